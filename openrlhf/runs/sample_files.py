"""Samples of `openrlhf eval` as files: all as they are judged, and data sets of the best answers or of pairs.

An evaluation that was stopped goes on from the first; the others are for rejection sampling and preference training.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from openrlhf.data.files import DataError
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory

Describe = Callable[[Group], dict[str, Any]]


class SampleFile:
    """A JSON Lines file with a line for each prompt, written as its samples have been judged.

    The first line says what was sampled from what. A file that begins with the same is gone on with: the prompts that
    it has are not played again. One with another beginning is refused.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], describe: Describe) -> None:
        """`describe`: a group's line. Raises DataError for a file that holds something else."""
        self.path = path
        self._describe = describe
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[int, dict[str, Any]] = {}
        """The lines that are there, by the prompt's place in the data."""
        head = json.dumps({"sampled": dict(identity)}, ensure_ascii=False, default=str)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        if lines and (not whole or whole[0].rstrip("\n") != head):
            raise DataError(
                f"--save {path}: the file is there and is not of this model, data, reward and sampling: remove it, "
                "or name another"
            )
        for number, line in enumerate(whole[1:], 2):
            try:
                record = json.loads(line)
                self.found[record["index"]] = record
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"--save {path}, line {number}: it is not a prompt's samples: remove the file"
                ) from error
        self._file = path.open("w", encoding="utf-8")  # again from the start: a line that was cut off is gone
        self._file.writelines(whole or [head + "\n"])
        self._file.flush()

    def groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """What an earlier evaluation has left."""
        return [_group_from(record, prompts[index]) for index, record in self.found.items() if index < len(prompts)]

    def write(self, group: Group) -> None:
        line = {"index": group.prompt.ordinal, **self._describe(group)}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _group_from(record: Mapping[str, Any], prompt: Prompt) -> Group:
    members = [_trajectory_from(sample, prompt, number) for number, sample in enumerate(record["samples"])]
    return Group(prompt=prompt, trajectories=tuple(members))


def _trajectory_from(sample: Mapping[str, Any], prompt: Prompt, number: int) -> Trajectory:
    """Its tokens are not in the file, only how many the policy has sampled: they are zeros here."""
    outcome, actions = Outcome(sample["outcome"]), sample["tokens"]
    mask = torch.arange(actions + 1) > 0
    tokens = torch.zeros(actions + 1, dtype=torch.int64)
    segment = Segment(
        token_ids=tokens,
        action_mask=mask,
        rollout_logprobs=None,
        versions=torch.where(mask, 0, -1).int(),
        turn_rewards=torch.zeros(actions + 1),
    )
    return Trajectory(
        key=SampleKey(prompt.ordinal, number),
        segments=() if outcome is Outcome.FAILED else (segment,),
        outcome=outcome,
        reward=sample["reward"],
        score=sample["score"],
        text=prompt.text + sample["text"],
        extra_logs=sample.get("extra_logs", {}),
        error=sample.get("error", ""),
        agent=sample.get("agent", ""),
    )


def best_answers(groups: Iterable[Group], *, threshold: float, end: str) -> Iterator[dict[str, Any]]:
    """Of each prompt the answer with the highest reward, among those that ended by themselves and whose score is at
    least `threshold`; the first where several are as good. A prompt without such an answer is left out.

    `end`: the text of end-of-sequence, which training adds itself.
    """
    for group in groups:
        members = [t for t in _ended(group, end) if t.score is not None and t.score >= threshold]
        if members:
            best = max(members, key=_reward)
            yield {
                "input": group.prompt.text,
                "output": _answer(best, group.prompt, end),
                "datasource": group.prompt.datasource,
                "score": best.score,
                "reward": best.reward,
            }


def preference_pairs(groups: Iterable[Group], *, end: str) -> Iterator[dict[str, Any]]:
    """Of each prompt the answers with the highest and the lowest reward, among those that ended by themselves; the
    first where several are alike. A prompt whose answers have one reward is left out."""
    for group in groups:
        members = _ended(group, end)
        if not members:
            continue
        best, worst = max(members, key=_reward), min(members, key=_reward)
        if _reward(best) > _reward(worst):
            yield {
                "prompt": group.prompt.text,
                "chosen": _answer(best, group.prompt, end),
                "rejected": _answer(worst, group.prompt, end),
                "margin": _reward(best) - _reward(worst),
                "datasource": group.prompt.datasource,
            }


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """A JSON Lines file of them, whole or not at all; how many there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text("".join(lines), encoding="utf-8")
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return len(lines)


def _ended(group: Group, end: str) -> list[Trajectory]:
    """Those that ended by themselves, and have a text."""
    return [t for t in group.scored if t.outcome is Outcome.FINISHED and _answer(t, group.prompt, end)]


def _reward(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None  # a scored one has it
    return trajectory.reward


def _answer(trajectory: Trajectory, prompt: Prompt, end: str) -> str:
    answer = trajectory.text.removeprefix(prompt.text)
    return answer.removesuffix(end) if end else answer
