"""Mixtures of experts in vLLM on this machine's CPU: one engine for each of four families, several checks each.

Transformers has the experts of a layer stacked, its files have them one by one or stacked otherwise, and vLLM packs
them for its kernels; gpt-oss has biases on them, gate and up in turns, and sinks in attention.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_sections import loading
from small_tokenizers import tokenizer as small_tokenizer
from vllm_mixtures import VOCABULARY, change_weights, expert_stacks, write_mixture

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.loading import load_policy
from openrlhf.models.policy import Policy
from openrlhf.models.routes import route_shape
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights, WeightSyncError
from openrlhf.weight_sync.probe import LocalProbe, Probe, max_gap
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

CONTEXT = 256
LOOP = SimpleNamespace(run=asyncio.run)
CASES = {"qwen3_moe": "float32", "mixtral": "bfloat16", "olmoe": "float32", "gpt_oss": "float32"}
"""By family, the dtype of model and engine."""


@dataclass
class Setup:
    family: str
    policy: Policy
    engine: VllmEngine
    probe: Probe
    version: int = 0

    def logprobs(self) -> list[float]:
        return asyncio.run(self.engine.logprobs(self.probe.token_ids))

    def push(self, policy: Policy | None = None, *, verified: bool = False, **parts: Any) -> dict[str, float]:
        """Of this policy, or the engine's own, or parts of it; compared with the engine's own."""
        self.version += 1
        weights = Part(policy or self.policy, ModuleWeights(policy or self.policy))
        vars(weights).update(parts)
        probe = LocalProbe(self.probe, self.policy) if verified else None
        sync = EngineWeightSync(self.engine, weights, RpcSender(block_bytes=50_000, checksums=True), LOOP, probe=probe)
        return sync.push(version=self.version).values()


@pytest.fixture(scope="module", params=CASES)
def setup(request, tmp_path_factory) -> Iterator[Setup]:
    family, dtype = request.param, CASES[request.param]
    tokenizer, folder = small_tokenizer(), tmp_path_factory.mktemp(family)
    write_mixture(family, folder, tokenizer, dtype=getattr(torch, dtype))
    policy = load_policy(folder, loading(dtype=getattr(torch, dtype)))
    probe = Probe.of(
        vocab_size=VOCABULARY,
        dtype=getattr(torch, dtype),
        max_model_len=CONTEXT,
        routes=route_shape(policy.model.config),
    )
    settings = VllmSettings(model=str(folder), dtype=dtype, max_model_len=CONTEXT, max_num_seqs=16, cpu_cache_gib=1)
    with contextlib.closing(VllmEngine(settings, tokenizer)) as engine:
        yield Setup(family, policy, engine, probe)


class Part(PolicyWeights):
    """Weights of which some are left out, or that break off."""

    without: str | None = None
    end: int | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(super().__iter__()):
            if i == self.end:
                raise OSError("a rank is gone")
            if self.without is None or self.without not in name:
                yield name, tensor


def test_the_same_weights_leave_every_bit_and_others_arrive(setup):
    """Once, twice and three times; then others, after updates that broke off in three places; then the first again."""
    first = setup.logprobs()
    assert setup.probe.compare(setup.probe.policy_side(setup.policy), first, version=0) < 2.0
    for _ in range(3):
        setup.push(verified=True)
        assert setup.logprobs() == first
    before = copy.deepcopy(setup.policy.state_dict())
    change_weights(setup.policy, seed=3)
    tensors = len(list(PolicyWeights(setup.policy, ModuleWeights(setup.policy))))
    for end in (tensors // 3, tensors // 2, tensors - 3):
        with pytest.raises(WeightSyncError, match="a rank is gone"):
            setup.push(end=end)
    setup.push(verified=True)
    arrived = setup.logprobs()
    assert max_gap(arrived, first) > 1.0
    setup.push(verified=True)
    assert setup.logprobs() == arrived
    setup.policy.load_state_dict(before)
    setup.push(verified=True)
    assert setup.logprobs() == first


@torch.no_grad()
def swap_experts(policy: Policy) -> None:
    for stack in expert_stacks(policy, layer=0):
        stack[[0, 1]] = stack[[1, 0]]


@torch.no_grad()
def swap_halves(policy: Policy) -> None:
    """Gate and up of all experts, w1 and w3 in the files; in gpt-oss they take turns."""
    for layer in range(2):
        for stack in expert_stacks(policy, layer=layer, only="gate_up"):
            if policy.model.config.model_type == "gpt_oss":
                stack.copy_(stack.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
            else:
                stack.copy_(stack.roll(stack.shape[1] // 2, dims=1))


@torch.no_grad()
def leave_an_expert(policy: Policy) -> None:
    """The last update has not reached the first expert of the last layer, whose weights it changed by a tenth."""
    for stack in expert_stacks(policy, layer=1):
        stack[0] += 0.1 * stack[0].std() * torch.randn(stack[0].shape).to(stack)


WRONG = {"two experts swapped": swap_experts, "w1 and w3 swapped": swap_halves, "one expert old": leave_an_expert}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_probe_finds_experts_that_are_not_the_policys(setup, wrong):
    """In 16 bits one expert costs no more than rounding does: there it finds those that are wrong in all layers."""
    policy = copy.deepcopy(setup.policy)
    WRONG[wrong](policy)
    if CASES[setup.family] == "float32" or wrong == "w1 and w3 swapped":
        with pytest.raises(WeightSyncError, match=rf"version {setup.version + 1} .* differ"):
            setup.push(policy, verified=True)
    setup.push(verified=True)


def test_a_layer_that_gets_nothing_ends_the_push(setup):
    """vLLM would say nothing and keep the old weights."""
    without = {"mixtral": "block_sparse_moe.experts", "gpt_oss": "self_attn.sinks"}.get(setup.family, "mlp.experts")
    with pytest.raises(Exception, match=r"takes no new weights for model\.layers\.0\."):
        setup.push(without=without)
    setup.push(verified=True)
