"""Process reward models: a scalar head learns the log-odds that a step is good, at the token with which it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from openrlhf.algorithms.preferences import step_loss
from openrlhf.models.value import sequence_ends
from openrlhf.observability.metrics import Metrics
from openrlhf.trainers.sft import pack
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss

if TYPE_CHECKING:
    from openrlhf.data.steps import StepSet


class ProcessRewardObjective:
    """L = mean over the steps of answers, of all answers of the step, of the binary cross-entropy.

    The number of judged tokens is that of the whole optimizer step, so that a token weighs the same in any
    micro-batch. Other tokens are not judged.
    """

    names = MetricNames(
        evaluation={"loss": "eval_loss", "acc": "acc_mean"}, smoothed={"loss": "loss_mean", "acc": "acc_mean"}
    )

    def __init__(self, answers: StepSet, *, device: torch.device) -> None:
        self._answers = answers
        self.lengths = answers.lengths
        self._device = device

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        answers = {i: self._answers[i] for i in batch.samples}
        judged = max(1, sum(len(answer.ends) for answer in answers.values()))

        def compute_loss(micro: Sequence[int]) -> MicroBatchLoss:
            own = [answers[i] if i in answers else self._answers[i] for i in micro]
            tokens = pack([answer.example for answer in own]).to(self._device)
            starts = tokens.cu_seqlens[:-1].tolist()
            ends = [start + end for start, answer in zip(starts, own, strict=True) for end in answer.ends]
            good_P = torch.tensor([good for answer in own for good in answer.good], device=self._device)
            metrics = Metrics()
            if not ends:  # answers that were cut before their first step ended
                return MicroBatchLoss(0.0 * module(tokens, positions=sequence_ends(tokens)).sum(), metrics)
            values_P = module(tokens, positions=torch.tensor(ends, device=self._device))
            loss_P = step_loss(values_P, good_P)
            metrics.mean("loss", loss_P.detach().sum(), len(ends))
            metrics.mean("acc", ((values_P > 0) == good_P).sum(), len(ends))
            return MicroBatchLoss(loss_P.sum() / judged, metrics)

        return compute_loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


if TYPE_CHECKING:
    from openrlhf.trainers.supervised import Objective

    _: type[Objective] = ProcessRewardObjective
