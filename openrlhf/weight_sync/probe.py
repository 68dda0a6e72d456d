"""Does an engine compute what the policy computes? Log-probs of a fixed sequence, side by side.

Parameters cannot be compared: an engine packs and fuses them, and on a CPU most are empty after packing. A side is a
list of numbers, so that policy and engine may live in different processes.

**Mixtures of experts** need two things more. The sequence is long enough to reach every expert (`mixture_length`), for
32 tokens leave most of 128 experts out. And in 16 bits the largest difference says little: rounding sends single
tokens to other experts, and two right implementations were 3.0 apart at their worst token, more than some that had
two experts mixed up. So the mean difference is looked at too, in units of what the policy's own rounding costs: its
log-probs once more, with the output of every layer moved by up to one rounding. Measured with vLLM's CPU build against
the policy, 400 tokens, Qwen3-MoE's shape with random weights of scale 0.03, 0.08 and 0.2 (4 layers with 4 of 32
experts; 6 layers with 8 of 128), mean difference of log-probs in these units:

    bf16: right                                          1.2   1.8   2.7;  0.9   1.7   2.2
          w1 and w3 of all experts exchanged             5.2    30    58;  3.4    19    29
          the experts of one layer are others, at least  6.1    17    29;  3.5   8.3    11
          two experts of the first layer swapped         1.9   3.9   7.5;  1.0   2.6   4.7
          one of them is another                         1.6   2.8   5.1;  1.1   2.2   4.1

The limit is 8. What is laid out wrongly in all layers, or missing in one, is found, unless experts hardly matter (scale
0.03); one wrong expert is not: in 16 bits it costs no more than rounding does. In fp32, where right implementations
were 3e-5 apart at most, one of these was 3e-3 to 4 at its worst token, and the tolerance of 1e-4 finds it wherever the
sequence reaches it.

**Engines that round weights to 8 bits** (`--vllm.quantization`) compute something else than the policy, the more so the
larger its logits are. Only the mean difference is looked at, and half the standard deviation of the policy's log-probs
is allowed, or what is allowed a single one without rounding if that is more. Measured with two layers of random weights
rounding costs a quarter of the standard deviation; log-probs that have nothing to do with the policy's are more than a
whole one apart. Scales that were not renewed and weights that did not arrive are found; one wrong layer of many is not.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models.body import decoder_layers
from openrlhf.models.policy import Policy
from openrlhf.models.routes import RouteShape
from openrlhf.types import PackedTokens, PlacedImage
from openrlhf.weight_sync.base import WeightSyncError

_GOLDEN = (5**0.5 - 1) / 2
_LENGTH = 32
_MOST = 512
"""Tokens of a probe: an engine holds the logits of all of them at once, 300 MB for a vocabulary of 150,000."""
_ROUNDED_SHARE = 0.5
"""Mean difference that is allowed an engine with weights of 8 bits, in standard deviations of log-probs; see above."""
_ROUNDINGS = 8.0
"""How many times the mean difference that the policy's own rounding makes is allowed; see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A sequence, and how far apart its log-probs may be."""

    token_ids: tuple[int, ...]
    tolerance: float
    """Largest difference of a log-prob."""
    rounding: float | None = None
    """By how much a number is rounded, relative to it, where the mean difference is looked at too; None: it is not."""
    rounded: bool = False
    """Whether the engine has weights of 8 bits. Then only the mean difference is looked at."""

    @classmethod
    def of(
        cls,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        max_model_len: int,
        unsampled: Sequence[int] = (),
        routes: RouteShape | None = None,
        rounded: bool = False,
    ) -> Probe:
        """For a model that computes in `dtype`, and an engine that reads so many tokens and has to sample one.

        `unsampled`: tokens without a log-prob, because neither side ever samples them. `routes`: of a mixture.
        `rounded`: the engine has weights of 8 bits.
        """
        length = min(_LENGTH if routes is None else mixture_length(routes), max_model_len - 1)
        return cls(
            token_ids=probe_tokens(vocab_size, length=length, unsampled=unsampled),
            tolerance=tolerance(dtype),
            rounding=None if routes is None or rounded or dtype == torch.float32 else torch.finfo(dtype).eps / 2,
            rounded=rounded,
        )

    def policy_side(self, policy: nn.Module) -> list[float]:
        """By the policy, or the module that a backend gives for its forwards. Collective, where it is.

        The log-probs; where the mean difference is looked at they are followed by those that rounding has moved.
        """
        found = policy_logprobs(policy, self.token_ids)
        if self.rounding is not None:
            with _rounded_otherwise(policy, by=self.rounding):
                found += policy_logprobs(policy, self.token_ids)
        return found

    def compare(self, policy: Sequence[float], engine: Sequence[float], *, version: int) -> float:
        """The largest difference. Raises `WeightSyncError` if that, or the mean where it is looked at, is too large.

        `policy`: what `policy_side` gave.
        """
        own, moved = policy[: len(engine)], policy[len(engine) :]
        gap = max_gap(own, engine)
        after = f"after the push of version {version} the engine's log-probs differ from the policy's"
        limit = _ROUNDINGS * mean_gap(own, moved) if moved else 0.0
        if self.rounded:
            limit = max(self.tolerance, _ROUNDED_SHARE * float(torch.tensor(own).std()))
        if limit > 0:
            # Of rounded weights, or where a token may go to other experts, the largest difference says nothing.
            mean = mean_gap(own, engine)
            if not mean <= limit:
                raise WeightSyncError(f"{after} on average by {mean:.2g}; {limit:.2g} is allowed")
        elif not gap <= self.tolerance:  # not a number is a difference too
            raise WeightSyncError(f"{after} by up to {gap:.2g}; {self.tolerance:.2g} is allowed")
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


def mixture_length(routes: RouteShape) -> int:
    """So many tokens that all experts of all layers are reached, but for one case in a hundred, by routers that send
    tokens anywhere; twice that, because they have favourites.

    A token leaves an expert out with probability 1 - K / E, and n tokens E · L · (1 - K / E)^n of them on average.
    """
    if routes.per_token == routes.experts:
        return _LENGTH
    n = math.log(100 * routes.experts * routes.layers) / -math.log1p(-routes.per_token / routes.experts)
    return min(max(2 * math.ceil(n), _LENGTH), _MOST)


def max_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return float(_gaps(ours, theirs).max())


def mean_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return float(_gaps(ours, theirs).mean())


def _gaps(ours: Sequence[float], theirs: Sequence[float]) -> Tensor:
    return (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs()


def probe_tokens(vocab_size: int, *, length: int = _LENGTH, unsampled: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids from all over the vocabulary: the fractional parts of multiples of the golden ratio are spread evenly."""
    ids = (int(vocab_size * (i * _GOLDEN % 1)) for i in itertools.count(1))
    return tuple(itertools.islice((token for token in ids if token not in unsampled), length))


@contextlib.contextmanager
def _rounded_otherwise(policy: nn.Module, *, by: float) -> Iterator[None]:
    """Forwards inside move the output of each decoder layer by a random part of a rounding, on all ranks alike."""
    model = next(module for module in policy.modules() if isinstance(module, Policy)).model
    generators: dict[torch.device, torch.Generator] = {}

    def moved(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        generator = generators.setdefault(hidden.device, torch.Generator(hidden.device).manual_seed(0))
        noise = torch.empty_like(hidden, dtype=torch.float32).uniform_(-by, by, generator=generator)
        hidden = (hidden * (1 + noise)).to(hidden.dtype)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    hooks = [layer.register_forward_hook(moved) for layer in decoder_layers(model) or ()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
