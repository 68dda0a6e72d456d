"""DPO, cDPO and IPO: the policy learns to prefer the chosen answer of a pair more strongly than the reference does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf.algorithms.preferences import PAIR_LOSSES, PairLogprobs, mean_nll, preference_gap
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.config.models import DPOModelSection
from openrlhf.observability.metrics import Metrics
from openrlhf.trainers.preferences import Reference, ReferenceLogprobs, answer_logprobs, pack_pairs
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss
from openrlhf.types import PackedTokens

if TYPE_CHECKING:
    from openrlhf.data.preferences import PairSet


class DPOObjective:
    """L = mean over the step's pairs of l(h) + c · NLL of the chosen answer; h: `preference_gap`."""

    names = MetricNames(
        evaluation={"loss": "eval_loss", "acc": "acc_mean"}, smoothed={"loss": "loss_mean", "acc": "acc_mean"}
    )

    def __init__(
        self,
        pairs: PairSet,
        model: DPOModelSection,
        *,
        reference: Reference,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self._pairs = pairs
        self.lengths = pairs.lengths
        self._model = model
        self._loss = PAIR_LOSSES[model.objective]
        self._device = device
        self._reference = ReferenceLogprobs(
            len(pairs), 2, lambda indices: reference.answer_logprobs(self._pack(indices)).view(-1, 2), ranks=ranks
        )

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        section = self._model
        self._reference.complete(batch.samples, batch.micro_batches)

        def compute_loss(micro: Sequence[int]) -> MicroBatchLoss:
            policy = _pair_columns(answer_logprobs(module, self._pack(micro).to(self._device)).view(-1, 2))
            reference = _pair_columns(self._reference.of(micro).to(self._device))
            loss_P = self._loss(preference_gap(policy, reference), section)
            metrics, count = Metrics(), len(micro)
            if section.nll_loss_coef:
                lengths_P = loss_P.new_tensor([int(self._pairs[i].chosen.target_mask.sum()) for i in micro])
                nll_P = mean_nll(policy.chosen_P, lengths_P)
                loss_P = loss_P + section.nll_loss_coef * nll_P
                metrics.mean("nll_loss", nll_P.detach().sum(), count)
            chosen_P, rejected_P = (
                section.beta * (ours.detach() - theirs) for ours, theirs in zip(policy, reference, strict=True)
            )
            metrics.mean("loss", loss_P.detach().sum(), count)
            metrics.mean("acc", (chosen_P > rejected_P).sum(), count)
            metrics.mean("chosen_reward", chosen_P.sum(), count)
            metrics.mean("reject_reward", rejected_P.sum(), count)
            return MicroBatchLoss(loss_P.sum() / len(batch.samples), metrics)

        return compute_loss

    def _pack(self, indices: Sequence[int]) -> PackedTokens:
        return pack_pairs([self._pairs[i] for i in indices])

    def state_dict(self) -> dict[str, Any]:
        return self._reference.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reference.load_state_dict(state)


def _pair_columns(logprobs_P2: Tensor) -> PairLogprobs:
    return PairLogprobs(logprobs_P2[:, 0], logprobs_P2[:, 1])


if TYPE_CHECKING:
    from openrlhf.trainers.supervised import Objective

    _: type[Objective] = DPOObjective
