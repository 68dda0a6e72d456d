"""vLLM on this machine's CPU holds the policy's adapter beside its base: pushes of either, in any order and in pieces.

All tests but the last share one engine. Each begins with the base and an adapter of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import watching_worker
from engine_contract import EngineContract, Subject
from peft.tuners.lora import LoraLayer
from small_tokenizers import tokenizer as small_tokenizer
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen3MoeConfig

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import adapter_tensors, add_adapter, is_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.file_weights import FileAdapter
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import NoWeightsError
from openrlhf.rollout.vllm import adapter_problem
from openrlhf.rollout.vllm.compat import rewire
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import Generation, SamplingParams
from openrlhf.weight_sync.base import PolicyWeights, WeightSyncError
from openrlhf.weight_sync.blocks import AdapterSpec, pack
from openrlhf.weight_sync.probe import max_gap, policy_logprobs, probe_tokens

pytestmark = pytest.mark.slow

VOCABULARY = 360
CONTEXT = 256
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
}
PROBE = probe_tokens(VOCABULARY)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Adapter:
    """An adapter beside a base model: what is sent of it, and the model that computes with it."""

    model: Any
    spec: AdapterSpec
    tensors: dict[str, torch.Tensor]

    @property
    def logprobs(self) -> list[float]:
        return policy_logprobs(Policy(self.model), PROBE)

    @property
    def merged(self) -> list[tuple[str, torch.Tensor]]:
        return weights_of(self.model)


def adapter_of(base: Any, *, seed: int = 0, targets: Sequence[str] = ALL, **lora: Any) -> Adapter:
    """With factors as after long training: PEFT's B starts at 0."""
    model = copy.deepcopy(base)
    section = LoraSection(**({"rank": 4, "alpha": 12} | lora), target_modules=tuple(targets))
    add_adapter(model, section, dtype=torch.float32, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    tensors = {
        name: tensor.detach().clone() for name, tensor in adapter_tensors(dict(model.named_parameters())).items()
    }
    modules = tuple(dict.fromkeys(name.partition(".lora_")[0] for name in tensors))
    config = {"r": section.rank, "lora_alpha": section.alpha, "target_modules": list(targets)}
    return Adapter(model, AdapterSpec(config=config, modules=modules), tensors)


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    policy = Policy(model)
    return [(name, tensor.detach().clone()) for name, tensor in PolicyWeights(policy, ModuleWeights(policy))]


@dataclass
class Setup:
    engine: VllmEngine
    model: Any

    def __post_init__(self) -> None:
        self.base = weights_of(self.model)

    def push(self, adapter: Adapter | None = None, **options: Any) -> int:
        return asyncio.run(self.pushed(adapter, **options))

    async def pushed(
        self,
        adapter: Adapter | None = None,
        *,
        base: Sequence[tuple[str, torch.Tensor]] = (),
        max_bytes: int = 100_000,
        tensors: Mapping[str, torch.Tensor] | None = None,
        spec: AdapterSpec | None = None,
    ) -> int:
        """A push of `base`, where it is given, and of `adapter`, with other tensors or another spec where these are."""
        engine, version = self.engine, self.engine.version + 1
        await engine.pause()
        await engine.wake()
        for block in pack(base, max_bytes=max_bytes):
            await engine.load_weights([block])
        if adapter is not None:
            sent = adapter.tensors if tensors is None else tensors
            for block in pack(sent.items(), max_bytes=max_bytes):
                await engine.load_weights([block], adapter=spec or adapter.spec)
        await engine.resume(version)
        return version

    @property
    def logprobs(self) -> list[float]:
        return asyncio.run(self.engine.logprobs(PROBE))


def start(config: Any, folder: Path, **options: Any) -> Setup:
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    room = {"dtype": "float32", "max_model_len": CONTEXT, "max_num_seqs": 64, "cpu_cache_gib": 1}
    return Setup(VllmEngine(VllmSettings(model=str(folder), **room, **options), tokenizer), model)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Setup]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = Qwen2Config(**SMALL, eos_token_id=small_tokenizer().eos_token_id, tie_word_embeddings=False)
    setup = start(config, tmp_path_factory.mktemp("model"), adapter_rank=100, adapter_modules=ALL)
    yield setup
    setup.engine.close()
    torch.set_num_threads(threads)


@pytest.fixture
def setup(engine) -> Setup:
    """With the base, and an adapter that the test does not know."""
    engine.push(adapter_of(engine.model, seed=99, rank=2), base=engine.base)
    return engine


class TestContract(EngineContract):
    @pytest.fixture
    def subject(self, setup) -> Subject:
        """The engine has weights without an adapter, as where one is merged."""
        setup.push(base=setup.base)
        return Subject(setup.engine, setup.base, [5, 3, 1, 4, 1, 5, 9, 2, 6], max_tokens=200, quiet=0.3)


@pytest.mark.parametrize(
    ("rank", "alpha", "targets"),
    [(1, 2, ALL), (3, 5, ("q_proj", "down_proj")), (8, 16, ALL), (64, 16, ("v_proj", "up_proj")), (100, 50, ALL)],
    ids=str,
)
def test_an_adapter_computes_what_its_merged_weights_and_peft_compute(setup, rank, alpha, targets):
    """Also where a layer that vLLM has put together has an adapter for one of its parts alone."""
    adapter = adapter_of(setup.model, rank=rank, alpha=alpha, targets=targets)
    assert not setup.engine.needs_base
    setup.push(adapter)
    held = setup.logprobs
    assert max_gap(held, adapter.logprobs) < 1e-4
    assert max_gap(held, policy_logprobs(Policy(setup.model), PROBE)) > 0.1
    setup.push(base=adapter.merged)
    assert max_gap(held, setup.logprobs) < 1e-4
    assert setup.engine.needs_base  # what it has is no base: an adapter beside it would count twice


def test_modules_have_the_scales_that_pefts_config_gives_them(setup):
    """By a pattern of their names, and with the rank's square root."""
    adapter = adapter_of(setup.model, rank=4, alpha=12)
    names = {"use_rslora": True, "alpha_pattern": {"q_proj": 8, "layers.1.mlp.down_proj": 2}}
    scaled = AdapterSpec(config=dict(adapter.spec.config) | names, modules=adapter.spec.modules)
    setup.push(adapter, spec=scaled)
    for name, layer in adapter.model.named_modules():
        if isinstance(layer, LoraLayer):
            alpha = 8 if "q_proj" in name else 2 if name.endswith("layers.1.mlp.down_proj") else 12
            layer.scaling["default"] = alpha / 2
    assert max_gap(setup.logprobs, adapter.logprobs) < 1e-4


@pytest.mark.parametrize("max_bytes", [1000, 30_000, 10_000_000])
def test_whatever_the_size_of_its_blocks_an_adapter_that_comes_back_has_the_same_bits(setup, max_bytes):
    first, second = adapter_of(setup.model, seed=1), adapter_of(setup.model, seed=2, rank=7)
    setup.push(first)
    before = setup.logprobs
    setup.push(second, max_bytes=max_bytes)
    assert max_gap(setup.logprobs, second.logprobs) < 1e-4
    assert max_gap(setup.logprobs, before) > 0.1
    setup.push(first, max_bytes=max_bytes)
    assert setup.logprobs == before


def test_a_base_that_is_pushed_again_leaves_the_same_bits(setup):
    """Before the adapter and without it; and another base is another."""
    adapter = adapter_of(setup.model)
    setup.push(adapter)
    before = setup.logprobs
    for _ in range(3):
        setup.push(adapter, base=setup.base)
        assert setup.logprobs == before
    setup.push(base=setup.base)
    alone = setup.logprobs
    assert max_gap(alone, policy_logprobs(Policy(setup.model), PROBE)) < 1e-4
    setup.push(base=adapter.merged)
    assert max_gap(setup.logprobs, before) < 1e-4
    setup.push(base=setup.base)
    assert setup.logprobs == alone


def test_nothing_that_was_read_with_an_older_adapter_is_used_with_a_newer(setup):
    """The prompt is the same, and long enough to be cached; tokens and log-probs are those of the newest adapter."""
    prompt = list(PROBE) * 3
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    for seed in (1, 2, 1):
        adapter = adapter_of(setup.model, seed=seed)
        setup.push(adapter)
        for _ in range(2):
            answer = asyncio.run(setup.engine.generate(prompt, params))
            expected = policy_logprobs(Policy(adapter.model), [*prompt, *answer.token_ids])[len(prompt) - 1 :]
            assert max_gap(answer.logprobs or (), expected) < 1e-4
        answers.append(answer.token_ids)
    assert answers[0] == answers[2] != answers[1]


def test_a_request_under_way_goes_on_with_the_new_adapter(setup):
    old, new = adapter_of(setup.model, seed=1), adapter_of(setup.model, seed=2)
    first = setup.push(old)
    prompt, params = list(PROBE[:9]), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    async def play() -> Generation:
        call = asyncio.create_task(setup.engine.generate(prompt, params))
        async with contextlib.aclosing(setup.engine.stream(prompt, params)) as parts:
            seen = 0
            async for part in parts:
                seen += len(part.token_ids)
                if seen > 30:
                    break
        await setup.pushed(new)
        return await call

    answer = asyncio.run(play())
    assert set(answer.versions) == {first, first + 1}
    change = answer.versions.count(first)
    for adapter, span in ((old, slice(0, change)), (new, slice(change, None))):
        computed = policy_logprobs(Policy(adapter.model), [*prompt, *answer.token_ids])[len(prompt) - 1 :]
        assert max_gap(answer.logprobs[span], computed[span]) < 1e-4


DENSE = Qwen2Config(architectures=["Qwen2ForCausalLM"])
MIXTURE = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_experts=2, num_experts_per_tok=1)
QUERIES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
EXPERT = "model.layers.0.mlp.experts"
WHOLE_EXPERTS = tuple(f"{EXPERT}.{n}.{end}" for n in range(2) for end in ("gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize(
    ("config", "modules", "rank", "gpu", "problem"),
    [
        (DENSE, QUERIES, 512, False, None),
        (DENSE, QUERIES, 513, True, "its rank is 513, and vLLM holds 512 at most"),
        (DENSE, (*QUERIES, "lm_head"), 8, True, "lm_head: it is in none of the model's layers"),
        (DENSE, ("model.layers.0.self_attn.kv_b_proj",), 8, True, "attention does not call this layer"),
        (Qwen2Config(architectures=["UnheardOfForCausalLM"]), QUERIES, 8, True, "no adapters for UnheardOf"),
        (
            Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"]),
            (*QUERIES, "visual.blocks.0.attn.qkv"),
            8,
            True,
            "visual.blocks.0.attn.qkv: it is not in the language model",
        ),
        (MIXTURE, QUERIES, 8, False, "no adapters for mixtures of experts on a CPU"),
        (MIXTURE, (*QUERIES, *WHOLE_EXPERTS), 8, True, None),
        (MIXTURE, (*QUERIES, f"{EXPERT}.0.down_proj"), 8, True, "in model.layers.0.mlp fewer are trained"),
        (MIXTURE, ("model.layers.0.mlp.gate",), 8, True, None),
        (GptOssConfig(architectures=["GptOssForCausalLM"]), WHOLE_EXPERTS, 8, True, "other adapters for the experts"),
    ],
)
def test_why_vllm_cannot_hold_an_adapter(config, modules, rank, gpu, problem):
    found = adapter_problem(config, modules, rank=rank, gpu=gpu)
    assert found is None if problem is None else problem in (found or "")


def test_in_32_bits_only_a_cpu_can_hold_an_adapter():
    for gpu, dtype, holds in ((False, torch.float32, True), (True, torch.bfloat16, True), (True, torch.float32, False)):
        assert (adapter_problem(DENSE, QUERIES, rank=8, gpu=gpu, dtype=dtype) is None) == holds


def prefixed(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    return {f"base_model.model.{name}": tensor for name, tensor in adapter.tensors.items()}, None


def moved(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    """Sender and spec agree on a name that the model does not have."""
    tensors = {name.replace("layers.1", "layers.7"): tensor for name, tensor in adapter.tensors.items()}
    modules = tuple(name.replace("layers.1", "layers.7") for name in adapter.spec.modules)
    return tensors, AdapterSpec(config=adapter.spec.config, modules=modules)


def narrow(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    name = "model.layers.1.mlp.down_proj.lora_A.weight"
    return adapter.tensors | {name: adapter.tensors[name][:, :64]}, None


def without_b(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    name = "model.layers.1.self_attn.o_proj.lora_B.weight"
    return {other: tensor for other, tensor in adapter.tensors.items() if other != name}, None


def in_part(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    return {name: tensor for name, tensor in adapter.tensors.items() if "layers.0" in name}, None


def with_more(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    """An adapter of DoRA has a vector too."""
    return adapter.tensors | {"model.layers.0.mlp.up_proj.lora_magnitude_vector.weight": torch.ones(96)}, None


def on_the_head(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    """Which the model has, and vLLM has no adapter for."""
    factors = {"lm_head.lora_A.weight": torch.ones(4, 128), "lm_head.lora_B.weight": torch.ones(VOCABULARY, 4)}
    return adapter.tensors | factors, AdapterSpec(
        config=adapter.spec.config, modules=(*adapter.spec.modules, "lm_head")
    )


def too_wide(adapter: Adapter) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    name = "model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(129, 128), f"{name}.lora_B.weight": torch.ones(128, 129)}
    return adapter.tensors | factors, None


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            prefixed,
            r"of the 14 modules that are trained it leaves model.layers.0.self_attn.q_proj and 13 more unchanged",
        ),
        (moved, r"the model has no weight model.layers.7.self_attn.q_proj.weight"),
        (narrow, r"lora_B \[128, 4\] times lora_A \[4, 64\] of model.layers.1.mlp.down_proj cannot be added"),
        (without_b, r"of model.layers.1.self_attn.o_proj only lora_A has come"),
        (in_part, r"it leaves model.layers.1.self_attn.q_proj and 6 more unchanged"),
        (with_more, r"up_proj.lora_magnitude_vector.weight is not one of the two matrices"),
        (on_the_head, r"of the 15 modules that are trained it leaves lm_head unchanged"),
        (too_wide, r"q_proj has rank 129, and the engine has room for 128"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_the_engine_samples_nothing_until_the_next_push(
    setup, broken, reason
):
    adapter = adapter_of(setup.model)
    setup.push(adapter)
    before, version = setup.logprobs, setup.engine.version
    tensors, spec = broken(adapter)
    with pytest.raises(WeightSyncError, match=f"{reason}.*--vllm.lora_sync merged"):
        setup.push(adapter, tensors=tensors, spec=spec)
    assert setup.engine.version == version

    async def waits() -> bool:
        call = asyncio.create_task(setup.engine.generate(PROBE, SamplingParams(max_tokens=1)))
        await asyncio.sleep(0.3)
        paused = not call.done()
        call.cancel()
        with pytest.raises(NoWeightsError):
            await setup.engine.resume(version)
        return paused

    assert asyncio.run(waits())
    assert setup.engine.needs_base
    setup.push(adapter, base=setup.base)
    assert setup.logprobs == before


def test_an_adapter_needs_its_base_first(setup):
    adapter = adapter_of(setup.model)
    setup.push(adapter)
    before = setup.logprobs
    asyncio.run(setup.engine.sleep())
    with pytest.raises(NoWeightsError):
        setup.push(adapter)
    half = setup.base[: len(setup.base) // 2]

    async def breaks_off() -> None:
        await setup.engine.pause()
        for block in pack(half, max_bytes=1000):
            await setup.engine.load_weights([block])
        await setup.engine.pause()

    asyncio.run(breaks_off())
    with pytest.raises(NoWeightsError, match="the base that it belongs to has not"):
        setup.push(adapter)
    setup.push(adapter, base=setup.base)
    assert setup.logprobs == before


def test_an_adapter_of_which_a_part_came_is_forgotten(setup):
    """The next push has nothing of it; and nothing of it is left if none comes."""
    old, lost, new = (adapter_of(setup.model, seed=seed) for seed in (1, 2, 3))
    setup.push(old)
    before = setup.logprobs

    async def breaks_off() -> None:
        await setup.engine.pause()
        for block in [*pack(lost.tensors.items(), max_bytes=1000)][:9]:
            await setup.engine.load_weights([block], adapter=lost.spec)
        await setup.engine.pause()

    asyncio.run(breaks_off())
    asyncio.run(setup.engine.resume(setup.engine.version + 1))
    assert setup.logprobs == before
    asyncio.run(breaks_off())
    setup.push(new)
    assert max_gap(setup.logprobs, new.logprobs) < 1e-4
    asyncio.run(breaks_off())
    with pytest.raises(WeightSyncError, match="unchanged"):
        setup.push(new, tensors=dict(list(new.tensors.items())[-4:]))


@pytest.mark.parametrize("parts", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_every_worker_of_an_engine_has_its_part_of_an_adapter(tmp_path, parts):
    """Stages of a pipeline have other layers, and of one nothing may be trained. Other modules stay plain layers."""
    targets = ("q_proj", "o_proj", "up_proj")
    config = Qwen2Config(**SMALL, eos_token_id=small_tokenizer().eos_token_id)
    setup = start(config, tmp_path, **{parts: 2}, adapter_rank=4, adapter_modules=targets)
    with contextlib.closing(setup.engine):
        adapter = adapter_of(setup.model, targets=targets)
        setup.push(adapter, base=setup.base)
        before = setup.logprobs
        assert max_gap(before, adapter.logprobs) < 1e-4
        below = {name: tensor for name, tensor in adapter.tensors.items() if "layers.0" in name}
        names = tuple(name for name in adapter.spec.modules if "layers.0" in name)
        setup.push(adapter, tensors=below, spec=AdapterSpec(config=adapter.spec.config, modules=names))
        assert max_gap(setup.logprobs, before) > 0.1
        setup.push(adapter)
        assert setup.logprobs == before
        down = adapter_of(setup.model, targets=(*targets, "down_proj"))
        with pytest.raises(WeightSyncError, match=r"of the 8 modules .* model.layers.0.mlp.down_proj and 1 more"):
            setup.push(down)


def test_experts_hold_their_base_and_their_adapter_and_so_does_their_router(tmp_path, monkeypatch):
    """A CPU has no kernel that would compute with them: the engine is asked for nothing but what its layers hold."""
    monkeypatch.setattr("openrlhf.rollout.vllm.settings.WORKER_EXTENSION", watching_worker.NAME)
    config = Qwen3MoeConfig(**SMALL, head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    adapted = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    add_adapter(adapted, LoraSection(rank=4, alpha=12), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    in_files = FileAdapter(Policy(adapted))
    named = [(f"model.{name}", tensor.detach()) for name, tensor in adapted.named_parameters() if is_adapter(name)]
    spec = AdapterSpec(config=in_files.config, modules=in_files.modules)
    adapter = Adapter(adapted, spec, dict(in_files.tensors(named)))
    setup = start(config, tmp_path, adapter_rank=in_files.rank, adapter_modules=in_files.modules)
    base, sent, block = dict(setup.base), adapter.tensors, "model.layers.1.mlp"

    def total(tensors: Mapping[str, torch.Tensor], end: str) -> float:
        """Over the experts of a block."""
        return sum(tensors[f"{block}.experts.{expert}.{end}"].double().sum().item() for expert in range(4))

    expected = {
        "w13": [total(base, "gate_proj.weight") + total(base, "up_proj.weight")],
        "w2": [total(base, "down_proj.weight")],
        "w13_a": [total(sent, f"{name}.lora_A.weight") for name in ("gate_proj", "up_proj")],
        "w13_b": [3 * total(sent, f"{name}.lora_B.weight") for name in ("gate_proj", "up_proj")],
        "w2_a": [total(sent, "down_proj.lora_A.weight")],
        "w2_b": [3 * total(sent, "down_proj.lora_B.weight")],
        "router_b": [3 * sent[f"{block}.gate.lora_B.weight"].double().sum().item()],
    }
    with contextlib.closing(setup.engine):
        for _ in range(2):
            setup.push(adapter, base=setup.base)
            asked = setup.engine.llm.collective_rpc("sums_of_experts")
            (found,) = asyncio.run(setup.engine.ask(asked, "for sums"))
            assert len(found) == 2
            assert found[f"{block}.experts"] == {name: pytest.approx(sums) for name, sums in expected.items()}


def test_a_layer_with_several_names_gets_its_wrapper_by_each():
    inner, runner, block, wrapper = (torch.nn.Module() for _ in range(4))
    wrapper.base_layer = runner.gate = inner
    block.gate, block.experts, block.spare = wrapper, runner, inner
    rewire(block, [wrapper])
    assert block.gate is runner.gate is block.spare is wrapper
    assert wrapper.base_layer is inner
