"""Which judged groups are worth training on (dynamic filtering), and what became of the groups that have ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.runner import RolloutError
from openrlhf.types import Group, Trajectory

logger = logging.getLogger(__name__)

TOO_FEW = (
    "no sample has enough others to be compared with: a greedy one failed under the estimator remax, or too few "
    "samples play each role (--rollout.n_samples_per_prompt)"
)
"""Why groups gave nothing to train on although none of their samples failed."""


def mean_score(members: Sequence[Trajectory]) -> float | None:
    """Mean score of judged episodes; None when one of them has no score.

    Rounded to float32, the precision of scores: the mean of 0.1 and 0.5 is what 0.3 is.
    """
    scores = [t.score for t in members if t.score is not None]
    if not scores or len(scores) < len(members):
        return None
    return float(np.float32(math.fsum(scores) / len(scores)))


class ScoreFilter:
    """Accepts a judged group if low < mean score < high, both ends excluded.

    This is the dynamic sampling of DAPO (arXiv:2503.14476): with scores of 0 and 1 and the range (0, 1) it says
    0 < right samples < G. In any other group all samples are alike, and nothing is left once their mean is
    subtracted. Scores are judged, not rewards: penalties do not change which prompts are worth asking. A group with
    a judged member that has no score cannot be compared with the range; it is accepted. Where a group has several
    agents, which are compared each with its own kind, the group is accepted if one of them would be.
    """

    def __init__(self, low: float, high: float, *, warn_after: int, members: int = 1, greedy: bool = False) -> None:
        """`warn_after`: rejections in a row after which the log says so, once, until a group is accepted again.

        `members`: how many judged members a group must have to be trained on; one with fewer is a failed one, and where
        `greedy` is on, so is one without the reward of a greedy sample.
        """
        self._members = members
        self._greedy = greedy
        self._low, self._high = float(np.float32(low)), float(np.float32(high))
        self._range = f"--algo.dynamic_filtering_range {low:g} {high:g}"
        self._warn_after = warn_after
        self._judged = self._rejected = 0
        self._rejected_in_a_row: list[float] = []
        self._scores = self._rewards = (math.inf, -math.inf)
        """Lowest and highest mean of the groups that were rejected."""

    def accepts(self, group: Group) -> bool:
        """Whether to train on this group, which has at least one judged member."""
        scores = [mean_score(members) for members in group.by_agent.values() if self.can_train(members)]
        self._judged += 1
        outside = [score for score in scores if score is not None and not self._low < score < self._high]
        if len(outside) < len(scores):
            self._rejected_in_a_row.clear()
            return True
        self._rejected += 1
        self._rejected_in_a_row.append(score := math.fsum(outside) / len(outside))
        reward = math.fsum(group.rewards) / len(group.rewards)
        self._scores = (min(self._scores[0], score), max(self._scores[1], score))
        self._rewards = (min(self._rewards[0], reward), max(self._rewards[1], reward))
        if len(self._rejected_in_a_row) == self._warn_after:
            self._warn()
        return False

    def can_train(self, members: Sequence[Trajectory]) -> bool:
        """Whether judged members of one agent are enough to be trained on, whatever they earned."""
        usable = [t for t in members if t.greedy_reward is not None] if self._greedy else members
        return len(usable) >= self._members

    def summary(self) -> str:
        """A summary of the groups that this process has seen, for messages."""
        seen = f"{self._rejected} of {self._judged} judged groups had a mean score outside {self._range}"
        if self._rejected < self._judged or not self._judged:
            return seen
        scores, rewards = (f"from {low:g} to {high:g}" for low, high in (self._scores, self._rewards))
        return (
            f"--algo.dynamic_filtering_enable accepted none: {seen}. Mean scores were {scores}, mean rewards "
            f"{rewards}: the task is too hard or too easy for this model, or the range is not in the unit of the scores"
        )

    def _warn(self) -> None:
        scores = self._rejected_in_a_row
        below = sum(score <= self._low for score in scores)
        logger.warning(
            "--algo.dynamic_filtering_enable: not one of the last %d judged groups has a mean score inside %s (both "
            "ends excluded): %d at or below it, %d at or above it, from %g to %g. The task may be too hard or too easy "
            "for this model, or the range is not in the unit of the scores",
            len(scores), self._range, below, len(scores) - below, min(scores), max(scores),
        )  # fmt: skip


class Verdicts:
    """Accepts or rejects the groups of a round.

    Without a filter every group is accepted, also a failed one: it is in the batch, gives no sample and is counted.
    With a filter, failed groups are rejected too, and so are those in which so many members failed that the rest teach
    nothing: otherwise a round would have fewer samples than it was asked for.
    """

    def __init__(self, score_filter: ScoreFilter | None) -> None:
        self._filter = score_filter
        self.rejected: dict[int, list[float]] = {}
        """Prompts whose groups ended without being accepted, rejected or failed, with the scores of judged samples."""
        self._judged = 0
        self._rejected = 0
        self._failed: list[Group] = []
        """Groups without a judged member, or without enough of them, in the order in which they ended."""
        self._failed_samples = 0
        """Failed samples of the groups turned away."""

    @property
    def rejected_prompts(self) -> list[int]:
        return list(self.rejected)

    def scores(self, groups: Sequence[Group]) -> dict[int, list[float]]:
        """What is known of prompts when a round of these groups is handed to training, by ordinal."""
        return self.rejected | {group.prompt.ordinal: group.scores for group in groups}

    def accepts(self, group: Group) -> bool:
        """Whether a group that ended is trained on."""
        roles = group.by_agent.values()
        if any(self._filter is None or self._filter.can_train(members) for members in roles):
            self._judged += 1
            accepted = self._filter is None or self._filter.accepts(group)
            self._rejected += not accepted
        else:
            self._failed.append(group)
            accepted = self._filter is None
        if not accepted:
            self.rejected[group.prompt.ordinal] = group.scores
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
        errors = [t.error for group in failed for t in group.trajectories if t.failed]
        reason = min(errors, default=TOO_FEW)
        raise RolloutError(f"all {len(failed)} groups of a round failed; first reason: {reason}")

    def exhausted(self) -> str:
        """The message for when the prompts have run out."""
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
