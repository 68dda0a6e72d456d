"""Optimizer steps that were left out because something in them was not finite: counted, named, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openrlhf.backends.ranks import Ranks
from openrlhf.backends.state import LeftOut, NotFiniteError
from openrlhf.observability.metrics import Metrics

MAX_SKIPPED = 5
"""In a row; the default of --train.max_skipped_steps."""


class SkippedSteps:
    """Those of one model, which `<owner>skipped_steps` counts."""

    def __init__(self, owner: str, *, most: int = MAX_SKIPPED, ranks: Ranks) -> None:
        """`owner`: `actor_`, `critic_`, or nothing where there is one model. `most`: in a row until the run ends."""
        self._owner = owner
        self._most = most
        self._ranks = ranks
        self._in_a_row = 0

    def after(self, left_out: LeftOut | None, metrics: Metrics, suspects: Callable[[], Sequence[str]]) -> bool:
        """Whether a step was left out and its numbers do not count; `metrics` is told. Collective if so.

        `suspects`: what of this rank's samples was not finite, in words. Raises NotFiniteError, on all ranks, when too
        many were left out in a row. Where fp16 looks for its loss scale the losses are as good as ever.
        """
        if left_out is None:
            self._in_a_row = 0
            return False
        self._in_a_row += not left_out.expected
        metrics.sum(f"{self._owner}skipped_steps", 1 / self._ranks.count)
        if left_out.expected:
            return False
        found = dict.fromkeys(text for texts in self._ranks.gather(list(suspects())) for text in texts)
        who = {"actor_": " of the policy", "critic_": " of the critic"}.get(self._owner, "")
        why = "; ".join([left_out.reason, *(f"not finite: {text}" for text in found)])
        if self._in_a_row >= self._most:
            raise NotFiniteError(
                f"{self._in_a_row} optimizer steps{who} in a row were left out (--train.max_skipped_steps), the last "
                f"one because {why}. The last checkpoint is good: go on from it with a lower learning rate, with bf16 "
                "or fp32 in place of fp16, or without these samples"
            )
        metrics.note(f"an optimizer step{who} was left out: {why}")
        return True

    def mended(self, said: Sequence[str], metrics: Metrics) -> None:
        """What was brought back after the last step, before anybody was given it."""
        for text in said:
            metrics.note(text)
