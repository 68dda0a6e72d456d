"""The frozen model that preferences are measured against: log-probs of answers, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.backends.offload import on_device
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.types import PackedTokens


def answer_logprobs(module: nn.Module, tokens: PackedTokens) -> Tensor:
    """float32 [N]: log π(y|x) of each sequence, the sum over its targets."""
    logprobs_A = module(tokens, temperature=1.0).logprobs_A
    return logprobs_A.new_zeros(tokens.num_sequences).index_add(0, tokens.action_sequences(), logprobs_A)


class Reference:
    """The frozen model that preferences are measured against."""

    def __init__(self, module: nn.Module, *, device: torch.device, offload: bool = False) -> None:
        """`offload`: the weights are on `device` only while they are used."""
        module.eval()
        self._module = module
        self._device = device
        self._offload = offload

    @torch.no_grad()
    def answer_logprobs(self, tokens: PackedTokens) -> Tensor:
        with on_device(self._module, self._device, offload=self._offload):
            return answer_logprobs(self._module, tokens.to(self._device))


class ReferenceLogprobs:
    """Reference log-probs of a data set's answers, K per sample, each computed once: the reference does not learn."""

    def __init__(
        self, samples: int, per_sample: int, compute: Callable[[Sequence[int]], Tensor], *, ranks: Ranks = ALONE
    ) -> None:
        """`compute`: float32 [n, K] of these samples."""
        self._known_SK = torch.full((samples, per_sample), float("nan"))
        self._compute = compute
        self._ranks = ranks

    def complete(self, samples: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> None:
        """Have all of `samples`, each rank computing its own micro-batches; all know the same then.

        As many forwards on every rank: a micro-batch without anything unknown computes one sample for nothing.
        """
        missing = {i for i in samples if bool(self._known_SK[i].isnan().any())}
        if not missing:
            return
        own: dict[int, Tensor] = {}
        for micro in micro_batches:
            wanted = [i for i in micro if i in missing]
            values = self._compute(wanted or [min(missing)]).cpu()
            own |= dict(zip(wanted, values, strict=False))
        for computed in self._ranks.gather(own):
            for i, values_K in computed.items():
                self._known_SK[i] = values_K

    def of(self, indices: Sequence[int]) -> Tensor:
        """float32 [n, K], on the CPU; `complete` has seen to it that they are there."""
        return self._known_SK[list(indices)]

    def state_dict(self) -> dict[str, Any]:
        """CheckpointedModel, because another micro-batch would give other last bits."""
        return {"logprobs": self._known_SK.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known_SK.copy_(state["logprobs"])
