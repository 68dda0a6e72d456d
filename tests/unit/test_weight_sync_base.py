"""Pushes into an engine with weights of its own: what it gets of a policy with an adapter, when, and in how many bytes."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter, is_adapter
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import DraftCounts
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights, WeightSyncError
from openrlhf.weight_sync.transports import RpcSender

LOOP = SimpleNamespace(run=asyncio.run)
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
NUMBERS = 2 * (2 * (8 + 8) + 2 * (8 + 4) + 2 * (8 + 8) + 2 * (8 + 4) + 3 * 2 * (8 + 12))
"""Of the adapter, rank 2, in two layers: q, v, o, k, and three matrices of the MLP; each has rank · (inputs + outputs)."""


class HoldingEngine:
    """Keeps what it is sent as vLLM does: a base, and beside it an adapter, which a new base makes it forget."""

    def __init__(self) -> None:
        self.base: dict[str, torch.Tensor] = {}
        self.adapter: dict[str, torch.Tensor] = {}
        self.spec = None
        self.paused = False
        self.version = -1
        self.loaded: list[str] = []
        self.needs_base = True
        self.drafts: DraftCounts | None = None

    async def pause(self) -> None:
        self.paused = True

    async def wake(self) -> None: ...

    async def take_draft_counts(self) -> DraftCounts | None:
        return self.drafts

    async def sleep(self) -> None:
        self.paused = self.needs_base = True
        self.base, self.adapter = {}, {}

    async def load_weights(self, blocks, *, adapter=None) -> None:
        assert self.paused
        for block in blocks:
            self.loaded.append("base" if adapter is None else adapter.name)
            taken = {name: tensor.clone() for name, tensor in block.tensors()}
            if adapter is None:
                self.base, self.adapter, self.needs_base = {**self.base, **taken}, {}, False
            else:
                self.adapter, self.spec = {**self.adapter, **taken}, adapter

    async def resume(self, version: int) -> None:
        self.version, self.paused = version, False

    def weights(self) -> dict[str, torch.Tensor]:
        """What it computes with."""
        found = dict(self.base)
        if self.adapter:
            assert self.adapter.keys() == {f"{m}.lora_{side}.weight" for m in self.spec.modules for side in "AB"}
            scale = self.spec.config["lora_alpha"] / self.spec.config["r"]
            for module in self.spec.modules:
                a, b = (self.adapter[f"{module}.lora_{side}.weight"] for side in "AB")
                found[f"{module}.weight"] = found[f"{module}.weight"] + scale * b @ a
        return found


@pytest.fixture
def policy():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=13, num_hidden_layers=2, **SIZES, tie_word_embeddings=True))
    add_adapter(model, LoraSection(rank=2, alpha=6), dtype=torch.float32)
    return Policy(model)


@torch.no_grad()
def train(policy) -> None:
    for name, parameter in policy.named_parameters():
        if is_adapter(name):
            parameter.add_(0.3 * torch.randn_like(parameter))


def make_sync(engine, policy, *, as_adapter: bool, block_bytes: int = 2**20) -> EngineWeightSync:
    weights = PolicyWeights(policy, ModuleWeights(policy), as_adapter=as_adapter)
    return EngineWeightSync(engine, weights, RpcSender(block_bytes=block_bytes), LOOP)


def assert_has(engine, policy) -> None:
    expected = dict(PolicyWeights(policy, ModuleWeights(policy)))
    found = engine.weights()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def test_what_became_of_drafts_is_measured_with_a_push(policy):
    """12 tokens in 8 steps; 5 of 20 drafted ones were kept, in the 4 steps that could have had a draft."""
    engine = HoldingEngine()
    sync = make_sync(engine, policy, as_adapter=False)
    assert not [name for name in sync.push(version=1).values() if name.startswith("rollout/")]
    engine.drafts = DraftCounts(steps=8, tokens=12, open_steps=4, drafted=20, accepted=5)
    found = sync.push(version=2).values()
    assert found["rollout/draft_acceptance"] == 0.25
    assert found["rollout/draft_gain"] == 1.25
    assert found["rollout/tokens_per_step"] == 1.5
    engine.drafts = DraftCounts()
    assert not [name for name in sync.push(version=3).values() if name.startswith("rollout/")]


@pytest.mark.parametrize("block_bytes", [1, 100, 2**20])
def test_the_base_goes_to_an_engine_once_and_then_the_adapter_alone(policy, block_bytes):
    engine = HoldingEngine()
    sync = make_sync(engine, policy, as_adapter=True, block_bytes=block_bytes)
    whole = 4 * sum(parameter.numel() for parameter in policy.parameters())
    train(policy)
    first = sync.push(version=1).values()
    assert_has(engine, policy)
    assert engine.loaded[0] == "base"
    assert engine.loaded == sorted(engine.loaded), "the base before the adapter, which it would make an engine forget"
    assert first["sync/bytes"] == whole
    assert first["sync/buckets"] == len(engine.loaded)
    for version in (2, 3):
        train(policy)
        engine.loaded.clear()
        pushed = sync.push(version=version).values()
        assert_has(engine, policy)
        assert set(engine.loaded) == {"policy"}
        assert pushed["sync/bytes"] == 4 * NUMBERS
        assert pushed["sync/buckets"] == len(engine.loaded)
    assert engine.version == 3


def test_an_engine_that_has_slept_gets_both_again(policy):
    engine = HoldingEngine()
    sync = make_sync(engine, policy, as_adapter=True)
    sync.push(version=1)
    for version in (2, 3):
        asyncio.run(engine.sleep())
        train(policy)
        engine.loaded.clear()
        sync.push(version=version)
        assert engine.loaded == ["base", "policy"]
        assert_has(engine, policy)


def test_a_merged_adapter_is_in_all_weights_each_time(policy):
    engine = HoldingEngine()
    sync = make_sync(engine, policy, as_adapter=False)
    merged = 4 * sum(p.numel() for name, p in policy.named_parameters() if not is_adapter(name))
    for version in (1, 2):
        train(policy)
        assert sync.push(version=version).values()["sync/bytes"] == merged
        assert_has(engine, policy)
    assert engine.loaded == ["base", "base"]


@pytest.mark.parametrize("as_adapter", [True, False])
def test_weights_that_are_not_finite_are_not_sent(policy, as_adapter):
    engine = HoldingEngine()
    sync = make_sync(engine, policy, as_adapter=as_adapter)
    sync.push(version=1)
    engine.loaded.clear()
    with torch.no_grad():
        policy.model.model.layers[1].self_attn.q_proj.lora_B["default"].weight[0, 0] = torch.nan
    with pytest.raises(WeightSyncError, match=r"push of version 2 failed: weights are not finite: .*q_proj\.lora_B"):
        sync.push(version=2)
    assert engine.loaded == []
    assert engine.paused
