"""A policy's weights as vLLM's transfer engines ask for them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from openrlhf.backends.base import Weights
from openrlhf.backends.state import some
from openrlhf.models.file_weights import file_weights
from openrlhf.models.policy import Policy
from openrlhf.weight_sync.base import WeightSyncError


class PolicyWeights(WeightSource):
    """Whatever trains the policy, and on how many ranks: its weights, whole, as the model's files would hold them.

    Tied ones come once, adapters are merged (`models.file_weights`). Every rank has one, and iterates when the others
    do; what it keeps of a tensor is its own business.
    """

    def __init__(self, policy: Policy, weights: Weights) -> None:
        """`weights`: the policy's backend, or its `ModuleWeights`. Raises for a policy whose weights cannot be sent."""
        self._policy = policy
        self._weights = weights
        self.metadata()

    def metadata(self) -> list[ParamMeta]:
        shapes = file_weights(self._policy, self._weights.weight_shapes())
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in shapes]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return file_weights(self._policy, self._weights.whole_weights())

    def require_finite(self) -> None:
        """Before anything is sent. Collective. Raises WeightSyncError."""
        if bad := self._weights.weights_not_finite():
            raise WeightSyncError(f"weights are not finite: {some(bad)}")
