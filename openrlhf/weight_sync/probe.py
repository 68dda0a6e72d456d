"""Does an engine compute what the policy computes? Log-probs of a fixed sequence, side by side.

Parameters cannot be compared: an engine packs and fuses them, and on a CPU most are empty after packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens

_GOLDEN = (5**0.5 - 1) / 2
TOLERANCE = 1e-4
"""In fp32."""


class WeightSyncError(RuntimeError):
    """After a push the engine does not compute what the policy computes."""


class ProbedEngine(Protocol):
    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log π of each token but the first given those before it, at temperature 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The policy on a fixed sequence."""

    policy: Policy
    token_ids: tuple[int, ...]
    tolerance: float = TOLERANCE
    """Largest difference of a log-prob. The default is for fp32."""

    def check(self, engine: ProbedEngine, *, version: int) -> float:
        """The largest difference; above the tolerance a `WeightSyncError`."""
        ours = policy_logprobs(self.policy, self.token_ids).tolist()
        return compare(ours, engine.prompt_logprobs(self.token_ids), version=version, tolerance=self.tolerance)


def compare(policy: Sequence[float], engine: Sequence[float], *, version: int, tolerance: float = TOLERANCE) -> float:
    """The largest difference of their log-probs; above the tolerance a `WeightSyncError`."""
    gap = float((torch.tensor(policy, dtype=torch.float64) - torch.tensor(engine, dtype=torch.float64)).abs().max())
    if not gap <= tolerance:  # not a number is a difference too
        raise WeightSyncError(
            f"after the push of version {version} the engine's log-probs differ from the policy's by up to "
            f"{gap:.2g}; {tolerance:.2g} is allowed"
        )
    return gap


def probe_tokens(vocab_size: int, *, length: int = 32) -> tuple[int, ...]:
    """Ids from all over the vocabulary: the fractional parts of multiples of the golden ratio are spread evenly."""
    return tuple(int(vocab_size * (i * _GOLDEN % 1)) for i in range(1, length + 1))


@torch.no_grad()
def policy_logprobs(policy: Policy, token_ids: Sequence[int]) -> Tensor:
    """log π of each token but the first given those before it, at temperature 1."""
    T, device = len(token_ids), next(policy.parameters()).device
    positions = torch.arange(T, device=device)
    tokens = PackedTokens(
        token_ids=torch.tensor(token_ids, device=device),
        position_ids=positions,
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device=device),
        action_positions=positions[1:],
        max_seqlen=T,
    )
    return policy(tokens, temperature=1.0).logprobs_A
