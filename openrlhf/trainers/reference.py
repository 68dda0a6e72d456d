"""The frozen model that preferences are measured against: log-probs of answers, each computed once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.types import PackedTokens


def answer_logprobs(module: nn.Module, tokens: PackedTokens) -> Tensor:
    """float32 [N]: log π(y|x) of each sequence, the sum over its targets."""
    logprobs_A = module(tokens, temperature=1.0).logprobs_A
    return logprobs_A.new_zeros(tokens.num_sequences).index_add(0, tokens.action_sequences(), logprobs_A)


class Reference:
    """The frozen model that preferences are measured against."""

    def __init__(self, module: nn.Module, *, device: torch.device, offload: bool = False) -> None:
        """`offload`: the weights are on `device` only while they are used."""
        self._module = module.eval()
        self._device = device
        self._offload = offload

    @torch.no_grad()
    def answer_logprobs(self, tokens: PackedTokens) -> Tensor:
        with self._on_device():
            return answer_logprobs(self._module, tokens.to(self._device))

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self._module.to(self._device)
        try:
            yield
        finally:
            self._module.to("cpu")


class ReferenceLogprobs:
    """Reference log-probs of a data set's answers, K per sample, each computed once: the reference does not learn."""

    def __init__(self, samples: int, per_sample: int, compute: Callable[[Sequence[int]], Tensor]) -> None:
        """`compute`: float32 [n, K] of these samples."""
        self._known_SK = torch.full((samples, per_sample), float("nan"))
        self._compute = compute

    def of(self, indices: Sequence[int]) -> Tensor:
        """float32 [n, K], on the CPU."""
        missing = [i for i in indices if bool(self._known_SK[i].isnan().any())]
        if missing:
            self._known_SK[missing] = self._compute(missing).cpu()
        return self._known_SK[list(indices)]

    def state_dict(self) -> dict[str, Any]:
        """Kept, because another micro-batch would give other last bits."""
        return {"logprobs": self._known_SK.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known_SK.copy_(state["logprobs"])
