"""Reward models: a scalar head learns to give the chosen answer of a pair a higher value than the rejected one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from openrlhf.algorithms.preferences import RewardLoss
from openrlhf.models.value import Normalisation, sequence_ends
from openrlhf.observability.metrics import Metrics
from openrlhf.trainers.preferences import pack_pairs
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss

if TYPE_CHECKING:
    from openrlhf.data.preferences import PairSet


class RewardObjective:
    """L = mean over the step's pairs of l(r_chosen, r_rejected, margin).

    A reward is the head's value at a sequence's last token, in fp32.
    """

    names = MetricNames(
        evaluation={"loss": "eval_loss", "acc": "acc_mean", "reward_mean": "reward_mean", "reward_std": "reward_std"},
        smoothed={"loss": "loss_mean", "acc": "acc_mean"},
    )

    def __init__(self, pairs: PairSet, *, loss: RewardLoss, margins: bool, device: torch.device) -> None:
        """`margins`: the loss uses the margins of the records; otherwise all margins are 0."""
        self._pairs = pairs
        self.lengths = pairs.lengths
        self._loss = loss
        self._margins = margins
        self._device = device

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        def compute_loss(micro: Sequence[int]) -> MicroBatchLoss:
            pairs = [self._pairs[i] for i in micro]
            tokens = pack_pairs(pairs).to(self._device)
            rewards = module(tokens, positions=sequence_ends(tokens))
            chosen_P, rejected_P = rewards[0::2], rewards[1::2]
            margin_P = rewards.new_tensor([pair.margin if self._margins else 0.0 for pair in pairs])
            loss_P = self._loss(chosen_P, rejected_P, margin_P)
            metrics, count = Metrics(), len(pairs)
            metrics.mean("loss", loss_P.detach().sum(), count)
            metrics.mean("acc", (chosen_P > rejected_P).sum(), count)
            metrics.mean("chosen_reward", chosen_P.detach().sum(), count)
            metrics.mean("reject_reward", rejected_P.detach().sum(), count)
            given = rewards.tolist()
            metrics.mean_of("reward_mean", given)
            metrics.std_of("reward_std", given)
            return MicroBatchLoss(loss_P.sum() / len(batch.samples), metrics)

        return compute_loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def reward_statistics(evaluation: Mapping[str, float]) -> Normalisation | None:
    """The statistics for `--reward.normalize_enable`; None where all rewards were equal, or none was measured."""
    mean, std = evaluation.get("reward_mean"), evaluation.get("reward_std")
    return Normalisation(mean, std) if mean is not None and std else None


if TYPE_CHECKING:
    from openrlhf.trainers.supervised import Objective

    _: type[Objective] = RewardObjective
