"""The ledger of a run: every prompt and sample that it trained on, step by step, so that a lost one shows.

trained.jsonl has a line per step:

    {"step": 3, "trained": {"0-3": "8-10", "0,2-3": "11"}, "failed": {"1": "11"}, "turned_away": "6-7"}

Samples → ordinals of the prompts that have these: samples 0 to 3 of prompts 8, 9 and 10, and all but sample 1 of prompt
11, which failed, were given to the update of step 3. Prompts 6 and 7 were played for it and turned away. Numbers that
follow one another are a range, so a line stays short however large a step is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines

if TYPE_CHECKING:
    from openrlhf.types import Group


class SampleId(NamedTuple):
    prompt: int
    """The ordinal of the prompt."""
    sample: int


class TrainedStep(NamedTuple):
    """A line of the ledger."""

    step: int
    trained: list[SampleId]
    """Judged samples, as the update got them."""
    failed: list[SampleId]
    """The samples of the same prompts that gave nothing to train on."""
    rejected_prompts: list[int]
    """Ordinals of prompts that were played and not accepted (dynamic filtering)."""


class TrainedLedger:
    """trained.jsonl, appended to as rounds end."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesWriter(path)

    def write(self, step: int, groups: Sequence[Group], *, rejected_prompts: Iterable[int] = ()) -> None:
        trained: dict[tuple[int, ...], list[int]] = {}
        failed: dict[tuple[int, ...], list[int]] = {}
        for group in groups:
            judged = {t.key.sample for t in group.scored}
            others = {t.key.sample for t in group.trajectories} - judged
            for kind, samples in ((trained, judged), (failed, others)):
                if samples:
                    kind.setdefault(tuple(sorted(samples)), []).append(group.prompt.ordinal)
        self._lines.write(
            {
                "step": step,
                "trained": {ranges(samples): ranges(prompts) for samples, prompts in trained.items()},
                "failed": {ranges(samples): ranges(prompts) for samples, prompts in failed.items()},
                "turned_away": ranges(rejected_prompts),
            }
        )

    def close(self) -> None:
        self._lines.close()


def read_trained(path: Path) -> list[TrainedStep]:
    """The steps of trained.jsonl as one history: a step that a resumed run took again replaces the first and all after
    it."""
    history: list[TrainedStep] = []
    for record in read_json_lines(path):
        while history and history[-1].step >= record["step"]:
            history.pop()
        history.append(
            TrainedStep(
                step=record["step"],
                trained=_samples(record["trained"]),
                failed=_samples(record["failed"]),
                rejected_prompts=numbers(record["turned_away"]),
            )
        )
    return history


def ranges(values: Iterable[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3 and 7, in whatever order they come."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers(text: str) -> list[int]:
    """The numbers of a text that `ranges` wrote, ascending."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _samples(table: dict[str, Any]) -> list[SampleId]:
    return sorted(
        SampleId(prompt, sample)
        for samples, prompts in table.items()
        for prompt in numbers(prompts)
        for sample in numbers(samples)
    )
