"""Statistics of a round's rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev, stdev

from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, Outcome


def rollout_metrics(groups: Sequence[Group], *, max_length: int) -> Metrics:
    """Means over the judged samples of the groups that a round trains on; failed ones are only counted."""
    metrics = Metrics()
    judged = [t for group in groups for t in group.scored]
    count = len(judged)
    rewards = [reward for group in groups for reward in group.rewards]
    truncated = sum(t.outcome is Outcome.TRUNCATED for t in judged)
    responses = sum(t.num_actions for t in judged)
    metrics.mean("score", sum(score for group in groups for score in group.scores), count)
    metrics.mean("response_length", responses, count)
    metrics.mean("total_length", sum(t.num_tokens for t in judged), count)
    metrics.mean("truncated", truncated, count)
    metrics.mean("response_clip_ratio", sum(t.num_tokens >= max_length for t in judged), count)
    compared = [group.rewards for group in groups if len(group.rewards) > 1]
    spread = sum(stdev(rewards) for rewards in compared)
    metrics.mean("group_reward_std", spread, len(compared))
    for trajectory in judged:
        for name, value in trajectory.extra_logs.items():
            metrics.mean(name, value, 1)
    metrics.mean("rollout/reward_mean", sum(rewards), count)
    metrics.last("rollout/reward_std", pstdev(rewards) if count else 0.0)
    metrics.mean("rollout/response_length_mean", responses, count)
    metrics.mean("rollout/truncated_rate", truncated, count)
    metrics.last("rollout/num_samples", count)
    metrics.sum("rollout/failed", sum(t.failed for group in groups for t in group.trajectories))
    return metrics
