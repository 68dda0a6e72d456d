"""Tokens of a sample as the page shows them: texts, and a number per token for each column that the run has kept."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.observability.token_log import (
    StepTokens,
    TokenGroup,
    TokenLogError,
    TokenSegment,
    read_index,
    read_step,
    steps,
)
from openrlhf.viewer.index import Found, GroupKey, Source

MOST_STEPS = 4
"""Files that are held: one is read while its samples are looked at one after the other."""
PLAIN = (
    *("logprobs", "versions", "rewards", "shaped_rewards", "advantages", "returns", "values", "old_logprobs"),
    *("new_logprobs", "ref_logprobs", "entropy", "is_weights", "clipped", "losses"),
)
"""Columns that are shown as the file has them."""


class LoggedGroups:
    """The samples of a token log that has all groups, as records for the index; a `Source`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: dict[int, int] = {}
        """Step → when its file was written."""
        self._waiting: deque[Found | None] = deque()
        self._there = 0
        self.restarts = 0

    @property
    def progress(self) -> tuple[int, int]:
        done = len(self._seen)
        return (done - 1 if self._waiting else done), max(done, self._there)

    def read(self) -> Iterator[Found | None]:
        files = steps(self._run)
        self._there = len(files)
        written = {}
        for step, path in files.items():
            with contextlib.suppress(OSError):  # removed just now
                written[step] = path.stat().st_mtime_ns
        if any(written.get(step) != time for step, time in self._seen.items()):
            # A resumed run has removed the steps that it takes again.
            self._seen, self._waiting = {}, deque()
            self.restarts += 1
        while self._waiting:
            yield self._waiting.popleft()
        for step, time in written.items():
            if step in self._seen:
                continue
            self._seen[step] = time
            try:
                self._waiting.extend(map(Found, _records(read_index(files[step]))))
            except (OSError, TokenLogError):
                self._waiting.append(None)
            while self._waiting:
                yield self._waiting.popleft()


def _records(step: StepTokens) -> Iterator[dict[str, Any]]:
    for group in step.groups:
        reward = _mean_reward(group)
        for sample in group.samples:
            yield {
                "step": step.step,
                "prompt_ordinal": group.ordinal,
                "sample": sample.sample,
                **({"agent": sample.agent} if sample.agent else {}),
                "prompt": group.prompt,
                "response": sample.text.removeprefix(group.prompt),
                "label": group.label,
                "reward": sample.reward,
                "score": sample.score,
                "response_length": sample.num_actions,
                "outcome": sample.outcome,
                "error": sample.error,
                "choice": group.choice,
                "group_reward": reward,
                "group_samples": len(group.samples),
            }


def _mean_reward(group: TokenGroup) -> float | None:
    """Of the samples that were judged; None when none was."""
    rewards = [s.reward for s in group.samples if s.reward is not None and s.outcome != "failed"]
    return fmean(rewards) if rewards else None


class TokenFiles:
    """The token log of a run. Its methods may be called from several threads."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._read: OrderedDict[int, tuple[int, StepTokens]] = OrderedDict()
        self._scales: dict[Path, tuple[StepTokens, dict[str, float]]] = {}

    def group(self, key: GroupKey) -> tuple[StepTokens, TokenGroup] | None:
        """The group and the file that it is in; None where the run has kept no tokens of it."""
        try:
            step = self._step(key.step)
        except (OSError, TokenLogError):
            return None  # a resumed run has just removed it, or it was copied in part
        if step is None:
            return None
        found = [group for group in step.groups if group.ordinal == key.prompt]
        return (step, found[0]) if found else None

    def scales(self, step: StepTokens) -> dict[str, float]:
        """See `step_scales`; computed once for each file that is held."""
        with self._lock:
            known = self._scales.get(step.path)
            if known is None or known[0] is not step:
                held = {step.path for _, step in self._read.values()}
                self._scales = {path: known for path, known in self._scales.items() if path in held}
                known = self._scales[step.path] = step, step_scales(step)
            return known[1]

    def _step(self, number: int) -> StepTokens | None:
        with self._lock:
            path = steps(self._run).get(number)
            if path is None:
                return None
            changed = path.stat().st_mtime_ns
            if number not in self._read or self._read[number][0] != changed:
                self._read[number] = changed, read_step(path)
            self._read.move_to_end(number)
            while len(self._read) > MOST_STEPS:
                self._read.popitem(last=False)
            return self._read[number][1]


def step_scales(step: StepTokens) -> dict[str, float]:
    """Column → the size of a number that has the full colour, so that colours mean the same in all groups of a step.

    98 of 100 numbers are not larger: a single extreme token does not make all others look alike.
    """
    sizes: dict[str, list[np.ndarray]] = {}
    for group in step.groups:
        for sample in group.samples:
            for segment in sample.segments:
                for name, values in token_columns(segment).items():
                    known = values[np.isfinite(values) & segment.action]
                    if name in ("ratio", "is_weights"):
                        known = np.log(np.maximum(known, 1e-9))
                    sizes.setdefault(name, []).append(np.abs(known))
    joined = {name: np.concatenate(parts) for name, parts in sizes.items()}
    tops = {name: float(np.quantile(all_, 0.98) or all_.max()) for name, all_ in joined.items() if len(all_)}
    return {name: top or 1.0 for name, top in tops.items()}


def group_view(records: Sequence[Mapping[str, Any]], tokens: TokenGroup | None) -> dict[str, Any]:
    """A group from its lines of rollouts.jsonl, and from the token log, which has all of its samples."""
    lines = {record["sample"]: record for record in records}
    kept = {sample.sample: sample for sample in tokens.samples} if tokens is not None else {}
    first = next(iter(records), {})
    samples = []
    for number in sorted({*lines, *kept}):
        line, logged = lines.get(number, {}), kept.get(number)
        samples.append(
            {
                "sample": number,
                "agent": line.get("agent", logged.agent if logged else ""),
                "reward": line.get("reward", logged.reward if logged else None),
                "score": line.get("score", logged.score if logged else None),
                "outcome": line.get("outcome", logged.outcome if logged else ""),
                "error": line.get("error", logged.error if logged else ""),
                "length": line.get("response_length", logged.num_actions if logged else None),
                "response": line.get("response"),
                "turns": line.get("turns"),
                "logs": logged.extra_logs if logged else {},
                "has_tokens": logged is not None and logged.num_tokens > 0,
            }
        )
    return {
        "text": first.get("prompt", tokens.prompt if tokens else ""),
        "label": first.get("label", tokens.label if tokens else None),
        "choice": first.get("choice", tokens.choice if tokens else ""),
        "reward": first.get("group_reward", _mean_reward(tokens) if tokens else None),
        "size": first.get("group_samples", len(samples)),
        "source": tokens.datasource if tokens else "",
        "samples": samples,
    }


def sample_view(
    step: StepTokens, group: TokenGroup, sample: int, *, scales: Mapping[str, float]
) -> dict[str, Any] | None:
    """The segments of a sample, token by token; None where the group has no such sample."""
    found = next((one for one in group.samples if one.sample == sample), None)
    if found is None:
        return None
    return {"segments": [_segment(segment, step) for segment in found.segments], "scales": scales}


def token_columns(segment: TokenSegment) -> dict[str, np.ndarray]:
    """Column → a number per token, NaN where a token has none: those of the file, and what follows from them."""
    columns = {name: values for name in PLAIN if (values := segment.per_token(name)) is not None}
    if not segment.has_logprobs:
        columns.pop("logprobs", None)
    engine, old, new = (columns.get(name) for name in ("logprobs", "old_logprobs", "new_logprobs"))
    if engine is not None and old is not None:
        columns["gap"] = engine - old
    if old is not None and new is not None:
        columns["ratio"] = np.exp(np.clip(new - old, -50, 50))
    if old is not None and (reference := columns.get("ref_logprobs")) is not None:
        columns["kl"] = old - reference
    for name in ("logprobs", "rewards"):
        if name in columns:
            columns[name] = np.where(segment.action, columns[name], np.nan)
    return columns


def _segment(segment: TokenSegment, step: StepTokens) -> dict[str, Any]:
    columns = token_columns(segment)
    ends = segment.turn_ends
    return {
        "ids": segment.token_ids.tolist(),
        "texts": step.pieces.texts(segment.token_ids),
        "action": segment.action.astype(int).tolist(),
        "turn_ends": [] if ends is None else np.flatnonzero(ends).tolist(),
        "trained": segment.is_trained,
        "images": [{"start": i.start, "tokens": i.tokens, "file": i.file, "size": i.size} for i in segment.images],
        "columns": {name: _plain(values) for name, values in columns.items() if np.isfinite(values).any()},
    }


def _plain(values: np.ndarray) -> list[Any]:
    if values.dtype.kind in "iu":
        return values.tolist()
    return [value if value == value else None for value in np.round(values.astype(np.float64), 5).tolist()]


if TYPE_CHECKING:
    _: type[Source] = LoggedGroups
