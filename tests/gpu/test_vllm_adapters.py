"""vLLM on a CUDA device holds the policy's adapter beside its base: captured graphs, sleep, experts.

An engine takes a minute to start; each model has one for all its tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

pytest.importorskip("vllm")

from small_tokenizers import tokenizer as small_tokenizer

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.file_weights import FileAdapter
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import NoWeightsError
from openrlhf.rollout.vllm import adapter_problem
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.blocks import AdapterSpec, WeightSyncError, pack
from openrlhf.weight_sync.probe import policy_logprobs, probe_tokens
from openrlhf.weight_sync.transports import IpcSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 4096
PROBE = probe_tokens(VOCABULARY, length=64)
RANK = 24
LOOP = SimpleNamespace(run=asyncio.run)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
DENSE = Qwen2Config(**SIZES)
MIXTURE = Qwen3MoeConfig(
    **SIZES, head_dim=64, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
)


def mean_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest would be that of a token for which two experts are all but equally good."""
    return float((torch.tensor(ours) - torch.tensor(theirs)).abs().mean())


@dataclass
class Setup:
    engine: VllmEngine
    model: Any
    """With an adapter."""
    tolerance: float = 0.0
    """How far the merged push is from the policy, up to a factor: an adapter that is held may be no further."""
    version: int = field(default=0)

    def sync(self, *, as_adapter: bool = True) -> EngineWeightSync:
        policy = Policy(self.model)
        weights = PolicyWeights(policy, ModuleWeights(policy), as_adapter=as_adapter)
        return EngineWeightSync(self.engine, weights, IpcSender(block_bytes=4 * 2**20), LOOP)

    def push(self, *, as_adapter: bool = True) -> dict[str, float]:
        self.version = self.engine.version + 1
        return self.sync(as_adapter=as_adapter).push(version=self.version).values()

    def train(self, seed: int) -> None:
        """As training would change the adapter; after the same seed it is the same."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=generator)

    @property
    def logprobs(self) -> list[float]:
        return asyncio.run(self.engine.logprobs(PROBE))

    @property
    def gap(self) -> float:
        return mean_gap(policy_logprobs(Policy(self.model), PROBE), self.logprobs)


@pytest.fixture(scope="module", params=[DENSE, MIXTURE], ids=["dense", "experts"])
def setup(request, tmp_path_factory) -> Iterator[Setup]:
    """In bf16, with captured graphs. Every linear layer and all experts are adapted."""
    tokenizer = small_tokenizer()
    config = copy.deepcopy(request.param)
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().to("cuda", torch.bfloat16)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_adapter(model, LoraSection(rank=RANK, alpha=32), dtype=torch.float32)
    adapter = FileAdapter(Policy(model))
    assert adapter_problem(str(folder), adapter.modules, rank=adapter.rank, gpu=True, dtype=torch.bfloat16) is None
    settings = VllmSettings(
        model=str(folder),
        max_model_len=512,
        max_num_seqs=64,
        gpu_memory_utilization=0.3,
        enable_sleep=True,
        adapter_rank=adapter.rank,
        adapter_modules=adapter.modules,
    )
    with contextlib.closing(VllmEngine(settings, tokenizer)) as engine:
        setup = Setup(engine, model)
        setup.train(0)
        setup.push(as_adapter=False)
        merged_gap = setup.gap
        assert merged_gap < 0.1
        setup.tolerance = 0.01 + 3 * merged_gap
        print(f"{type(config).__name__}: gap of the merged push {merged_gap:.2e}")
        yield setup


def test_an_adapter_computes_what_its_merged_weights_compute_and_comes_back_to_the_bit(setup):
    setup.train(1)
    first = setup.push()
    held = setup.logprobs
    assert setup.gap < setup.tolerance
    setup.push(as_adapter=False)
    print(f"held against merged {mean_gap(held, setup.logprobs):.2e}")
    assert mean_gap(held, setup.logprobs) < setup.tolerance
    setup.push()
    assert setup.logprobs == held
    setup.train(2)
    assert setup.gap > 2 * setup.tolerance  # or the push would prove nothing
    alone = setup.push()
    assert alone["sync/bytes"] < first["sync/bytes"] / 2
    assert setup.gap < setup.tolerance
    setup.train(1)
    setup.push()
    assert setup.logprobs == held


def test_the_base_pushed_again_leaves_the_same_bits(setup):
    setup.train(1)
    setup.push()
    before = setup.logprobs
    for _ in range(3):
        asyncio.run(setup.engine.sleep())
        assert setup.engine.needs_base
        setup.push()
        assert setup.logprobs == before


def test_what_captured_graphs_sample_is_of_the_newest_adapter(setup):
    """Many short answers decode in captured batches; log-probs of the same tokens are read without them."""
    prompts = [list(PROBE[start : start + 9]) for start in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    async def sampled() -> list[Any]:
        return await asyncio.gather(*(setup.engine.generate(prompt, params) for prompt in prompts))

    answers = []
    for seed in (1, 2, 1):
        setup.train(seed)
        setup.push()
        found, expected = asyncio.run(sampled()), list[float]()
        for prompt, answer in zip(prompts, found, strict=True):
            assert set(answer.versions) == {setup.version}
            expected += policy_logprobs(Policy(setup.model), [*prompt, *answer.token_ids])[len(prompt) - 1 :]
        assert mean_gap([x for answer in found for x in answer.logprobs or ()], expected) < setup.tolerance
        answers.append([answer.token_ids for answer in found])
    assert answers[0] != answers[1]


def test_an_adapter_without_its_base_after_a_sleep_and_one_that_does_not_fit_are_refused(setup):
    setup.train(1)
    setup.push()
    before = setup.logprobs
    adapter = FileAdapter(Policy(setup.model))
    spec = AdapterSpec(config=adapter.config, modules=adapter.modules)
    tensors = [*adapter.tensors((f"model.{n}", p.detach()) for n, p in setup.model.named_parameters() if "lora_" in n)]

    async def push(named: list[tuple[str, torch.Tensor]]) -> None:
        await setup.engine.pause()
        await setup.engine.wake()
        for block in pack(named, max_bytes=2**20):
            await setup.engine.load_weights([block], adapter=spec)
        await setup.engine.resume(setup.engine.version + 1)

    asyncio.run(push(tensors))
    assert setup.logprobs == before
    with pytest.raises(WeightSyncError, match=r"unchanged.*--vllm.lora_sync merged"):
        asyncio.run(push([(f"base_model.{name}", tensor) for name, tensor in tensors]))
    setup.push()
    assert setup.logprobs == before
    asyncio.run(setup.engine.sleep())
    with pytest.raises(NoWeightsError):
        asyncio.run(push(tensors))
    setup.push()
    assert setup.logprobs == before
