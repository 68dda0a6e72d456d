"""Run folders for the viewer's tests: metrics, rollouts and tokens as a run writes them, by hand and small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.observability.jsonl import JsonLinesWriter
from openrlhf.observability.run_directory import NoteLog, RunDirectory


def metrics(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "kind": "train", "time": 2.0 * step, "reward": step / 10, "timing/step_total": 2.0, **values}


def rollout(step: int, prompt: int, sample: int, /, **values: Any) -> dict[str, Any]:
    record = {
        "step": step,
        "prompt_ordinal": prompt,
        "sample": sample,
        "prompt": f"question {prompt}",
        "response": f"answer {sample} of step {step}",
        "label": None,
        "reward": float(sample),
        "score": None,
        "response_length": 10 + sample,
        "outcome": "finished",
        "error": "",
        "choice": "typical",
        "group_reward": 0.5,
        "group_samples": 2,
        "turns": [{"role": "assistant", "action": True, "text": f"answer {sample}", "tokens": 3, "reward": 0.0}],
    }
    return record | values


def append(path: Path, *records: dict[str, Any]) -> None:
    lines = JsonLinesWriter(path)
    for record in records:
        lines.write(record)
    lines.close()


def make_run(path: Path, *, steps: int = 3, groups: int = 2, **config: Any) -> RunDirectory:
    """A folder with `steps` steps, each with `groups` groups of two samples."""
    run = RunDirectory.create(path, {"actor": {"model_name_or_path": "org/small"}, **config})
    notes = NoteLog(run.notes, now=lambda: 1_763_000_000.0)
    notes.write("start", "rl")
    notes.close()
    append(run.metrics, *(metrics(step) for step in range(1, steps + 1)))
    append(run.rollouts, *(rollout(s, p, i) for s in range(1, steps + 1) for p in range(groups) for i in range(2)))
    return run


class WordTokenizer:
    """A token per text of a list: its id is its place."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.added_tokens_encoder: dict[str, int] = {}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[i] for i in ids)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self.words[ids] if isinstance(ids, int) else [self.words[i] for i in ids]

    def __len__(self) -> int:
        return len(self.words)


def write_tokens(run: RunDirectory, step: int, words: Sequence[str], *, ordinal: int = 0, error: str = "") -> None:
    """One group in rollouts.jsonl and in the token log: two samples, the first two words a prompt, the others sampled.

    Sample i has the advantages -1, 0, 1, … and log-probs -0.5, -1.0, … of the engine, which the trainer shares but for
    0.25 on the last token.
    """
    import torch

    from openrlhf.observability.rollout_log import RolloutLog
    from openrlhf.observability.token_log import TokenLog
    from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory

    tokenizer: Any = WordTokenizer(words)
    count = len(words)
    actions = count - 2
    ids = torch.arange(count)
    mask = torch.tensor([False, False, *[True] * actions])
    logprobs = torch.where(mask, -0.5 * (torch.arange(count) - 1).float(), 0.0)
    versions = torch.where(mask, step - 1, -1)
    trajectories = tuple(
        Trajectory(
            key=SampleKey(ordinal, sample),
            segments=(
                Segment(
                    token_ids=ids,
                    action_mask=mask,
                    rollout_logprobs=logprobs,
                    versions=versions,
                    turn_rewards=torch.zeros(count),
                ),
            ),
            outcome=Outcome.FAILED if error and sample else Outcome.FINISHED,
            reward=None if error and sample else float(sample),
            score=None,
            text="".join(words),
            error=error if sample else "",
        )
        for sample in range(2)
    )
    group = Group(prompt=Prompt(ordinal=ordinal, text="".join(words[:2]), label="the label"), trajectories=trajectories)
    log = RolloutLog(run.rollouts, tokenizer)
    log.write(step, [group])
    log.close()
    old = logprobs[2:].numpy().copy()
    old[-1] += 0.25
    columns = {
        "advantages": (torch.arange(actions).float() - 1).numpy(),
        "old_logprobs": old,
        "new_logprobs": old,
        "entropy": torch.linspace(0, 2, actions).numpy(),
    }
    tokens = TokenLog(run.path, tokenizer)
    tokens.write(step, [group], lambda keys: dict.fromkeys(keys, columns))
    tokens.close()
