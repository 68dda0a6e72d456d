"""The contract of engines, fulfilled by the engine that tests use in place of a real one, and by the embedded one."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_contract import EngineContract, Subject
from fake_engine import FakeEngine, TablePolicy
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.weight_sync.base import PolicyWeights
from openrlhf.weight_sync.blocks import AdapterSpec, pack

SMALL = Qwen2Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestFakeEngine(EngineContract):
    @pytest.fixture(params=[False, True], ids=["own weights", "shared weights"])
    def subject(self, request) -> Subject:
        policy = TablePolicy()
        weights = [(name, weight.detach().clone()) for name, weight in policy.named_parameters()]
        return Subject(FakeEngine(policy, [], shares_weights=request.param), weights, [*map(ord, "312>")])


class TestEmbeddedEngine(EngineContract):
    @pytest.fixture(params=[ATTENTION, "eager"], ids=["packed", "with a cache of its own"])
    def subject(self, request) -> Subject:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SMALL, attn_implementation=request.param).eval()
        policy = Policy(model)
        weights = [(name, weight.detach().clone()) for name, weight in PolicyWeights(policy, ModuleWeights(policy))]
        return Subject(EmbeddedEngine(model, None, max_model_len=64), weights, [3, 1, 4, 1, 5])

    def test_log_probs_leave_every_module_in_its_mode(self, subject: Subject):
        """The model is the trainer's, which may have frozen a part of it."""
        model = subject.engine.model.train()
        model.model.norm.eval()
        before = [module.training for module in model.modules()]
        asyncio.run(subject.engine.logprobs(subject.prompt))
        assert [module.training for module in model.modules()] == before

    def test_an_adapter_is_loaded_by_the_names_of_its_file(self, subject: Subject):
        model = subject.engine.model
        add_adapter(model, LoraSection(rank=2, alpha=4, target_modules=("q_proj",)), dtype=torch.float32)
        name = "model.layers.1.self_attn.q_proj.lora_B.weight"
        spec = AdapterSpec(config={"r": 2, "lora_alpha": 4}, modules=("model.layers.1.self_attn.q_proj",))
        before = asyncio.run(subject.engine.logprobs(subject.prompt))
        asyncio.run(subject.engine.load_weights([*pack([(name, torch.ones(16, 2))], max_bytes=1000)], adapter=spec))
        assert model.get_parameter(name.replace("lora_B", "lora_B.default")).eq(1).all()
        assert asyncio.run(subject.engine.logprobs(subject.prompt)) != before
        assert not subject.engine.needs_base

    def test_resume_samples_for_nobody_if_all_have_given_up(self, subject: Subject):
        engine, forwards = subject.engine, []
        engine.model.register_forward_pre_hook(lambda module, arguments: forwards.append(module))

        async def play() -> None:
            await engine.pause()
            call = asyncio.create_task(subject.generate())
            await asyncio.sleep(subject.quiet)
            call.cancel()
            await asyncio.sleep(subject.quiet)
            await engine.resume(1)
            await asyncio.sleep(subject.quiet)
            assert not forwards

        asyncio.run(play())

    def test_a_pause_right_after_resume_lets_no_token_through(self, subject: Subject):
        """The engine wakes up in the next turn of the event loop, and is paused by then."""

        async def play() -> None:
            async with subject.under_way() as (_, parts):
                await subject.engine.pause()
                steps = subject.engine.stats.steps
                await asyncio.sleep(subject.quiet)
                await subject.engine.resume(1)
                await subject.engine.pause()
                await asyncio.sleep(subject.quiet)
                assert subject.engine.stats.steps == steps
                await subject.engine.resume(2)
                assert {version async for part in parts for version in part.versions} == {2}

        asyncio.run(play())
