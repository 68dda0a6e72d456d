"""What became of groups that have ended: accepted, turned away by a filter, or failed."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.filtering import ScoreFilter
from openrlhf.rollout.runner import RolloutError
from openrlhf.types import Group


class Verdicts:
    """Of the groups of a round.

    Without a filter every group is accepted, also a failed one: it is in the batch, gives no sample and is counted.
    With a filter failed groups are turned away like rejected ones, and so are those in which so many members failed
    that the rest give no sample: a round would have fewer samples than it was asked for.
    """

    def __init__(self, score_filter: ScoreFilter | None) -> None:
        self._filter = score_filter
        self.turned_away: list[int] = []
        """Prompts whose groups ended without being accepted: rejected or failed."""
        self._judged = 0
        self._rejected = 0
        self._failed: list[Group] = []
        """Groups without a judged member, or without enough of them, in the order in which they ended."""
        self._failed_samples = 0
        """Failed samples of the groups turned away."""

    def accepts(self, group: Group) -> bool:
        """Whether a group that ended is trained on."""
        if len(group.scored) >= (1 if self._filter is None else self._filter.members):
            self._judged += 1
            accepted = self._filter is None or self._filter.accepts(group)
            self._rejected += not accepted
        else:
            self._failed.append(group)
            accepted = self._filter is None
        if not accepted:
            self.turned_away.append(group.prompt.ordinal)
            self._failed_samples += sum(t.failed for t in group.trajectories)
        return accepted

    def hopeless(self, batch_size: int) -> bool:
        """A batch's worth of groups failed and none was judged: replacements would only use up the prompts."""
        return len(self._failed) >= batch_size and not self._judged

    def require_success(self, groups: Sequence[Group], *, batch_size: int) -> None:
        """RolloutError if a round has nothing to train on because everything failed. `groups`: those it would have."""
        if any(group.scored for group in groups) or not (groups or self.hopeless(batch_size)):
            return
        failed = self._failed or [group for group in groups if not group.scored]
        reason = min(t.error for group in failed for t in group.trajectories if t.failed)
        raise RolloutError(f"all {len(failed)} groups of a round failed; first reason: {reason}")

    def exhausted(self) -> str:
        """For when the prompts ran out."""
        return "the prompts ran out" + (f"; {self._filter.summary()}" if self._filter else "")

    def metrics(self, *, buffered: int) -> Metrics:
        """`buffered`: accepted groups that wait for a later round."""
        metrics = Metrics()
        if self._filter is not None:
            metrics.mean("dynamic_filtering_pass_rate", self._judged - self._rejected, self._judged)
            metrics.last("rollout/judged_groups", self._judged)
            metrics.last("rollout/rejected_groups", self._rejected)
            metrics.last("rollout/buffered", buffered)
            metrics.sum("rollout/failed", self._failed_samples)
        return metrics
