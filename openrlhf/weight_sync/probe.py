"""Does an engine compute what the policy computes? Log-probs of a fixed sequence, side by side.

Parameters cannot be compared: an engine packs and fuses them, and on a CPU most are empty after packing. A side is a
list of numbers, so that policy and engine may live in different processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from openrlhf.types import PackedTokens, PlacedImage
from openrlhf.weight_sync.base import WeightSyncError

_GOLDEN = (5**0.5 - 1) / 2
_LENGTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A sequence, and how far apart its log-probs may be."""

    token_ids: tuple[int, ...]
    tolerance: float
    """Largest difference of a log-prob."""

    @classmethod
    def of(cls, *, vocab_size: int, dtype: torch.dtype, max_model_len: int, unsampled: Sequence[int] = ()) -> Probe:
        """For a model that computes in `dtype`, and an engine that reads so many tokens and has to sample one.

        `unsampled`: tokens without a log-prob, because neither side ever samples them.
        """
        length = min(_LENGTH, max_model_len - 1)
        return cls(token_ids=probe_tokens(vocab_size, length=length, unsampled=unsampled), tolerance=tolerance(dtype))

    def policy_side(self, policy: nn.Module) -> list[float]:
        """By the policy, or the module that a backend gives for its forwards. Collective, where it is."""
        return policy_logprobs(policy, self.token_ids)

    def compare(self, policy: Sequence[float], engine: Sequence[float], *, version: int) -> float:
        """The largest difference; above the tolerance a `WeightSyncError`."""
        gap = max_gap(policy, engine)
        if not gap <= self.tolerance:  # not a number is a difference too
            raise WeightSyncError(
                f"after the push of version {version} the engine's log-probs differ from the policy's by up to "
                f"{gap:.2g}; {self.tolerance:.2g} is allowed"
            )
        return gap


@dataclass(frozen=True, slots=True)
class LocalProbe:
    """For a policy in the process of the engine."""

    probe: Probe
    policy: nn.Module

    def check(self, found: Sequence[float], *, version: int) -> float:
        """`found`: the engine's log-probs of the probe's tokens."""
        return self.probe.compare(self.probe.policy_side(self.policy), found, version=version)


def tolerance(dtype: torch.dtype) -> float:
    """How far apart two right implementations may be.

    A log-prob is a logit less log Σ exp of all of them. Engines round logits to the model's dtype: from 16 to 32, where
    those of large models are, by up to 8 ε. Layers in between, fused and ordered differently, add to that, most of all
    for unlikely tokens, which the probe is full of: two layers with large random weights were 37 ε apart. So 128 ε: 1
    in bf16, 1/8 in fp16. What this is to find, a layer that is missing or laid out wrongly, is off by more; that a
    16-bit engine is only one step behind no tolerance would show. In fp32 sums over thousands of terms decide, and 1e-4
    is 10 times what small models show.
    """
    return max(1e-4, 128 * torch.finfo(dtype).eps)


def max_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return float((torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs().max())


def probe_tokens(vocab_size: int, *, length: int = _LENGTH, unsampled: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids from all over the vocabulary: the fractional parts of multiples of the golden ratio are spread evenly."""
    ids = (int(vocab_size * (i * _GOLDEN % 1)) for i in itertools.count(1))
    return tuple(itertools.islice((token for token in ids if token not in unsampled), length))


@torch.no_grad()
def policy_logprobs(policy: nn.Module, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
    """log π of each token but the first given those before it, at temperature 1, without dropout."""
    actions = torch.arange(len(token_ids)) > 0
    tokens = PackedTokens.from_sequences([torch.tensor(token_ids)], [actions], images=[images])
    tokens = tokens.to(next(policy.parameters()).device)
    training = policy.training
    policy.eval()
    try:
        return policy(tokens, temperature=1.0).logprobs_A.tolist()
    finally:
        policy.train(training)
