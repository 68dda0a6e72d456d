"""vLLM and a policy on one CUDA device: pushes that stay on it, and turns on it.

An engine takes a minute to start; each dtype has one for all its tests, and one more has two processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

pytest.importorskip("vllm")

from small_tokenizers import tokenizer as small_tokenizer

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm import start_engine
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.processes import VllmProcesses
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.probe import max_gap, policy_logprobs, probe_tokens
from openrlhf.weight_sync.transports import IpcSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 4096
LOADED_GAP = {torch.float32: 0.03, torch.bfloat16: 0.3}
"""Log-probs of an engine that has read the weights from their file differ from the policy's by at most this much.
Two ways of attention differ by 0.13 in bf16 on a CPU. In fp32 vLLM's Triton attention multiplies in TF32, which keeps
10 bits of a mantissa."""


@dataclass
class Setup:
    engine: VllmEngine | VllmProcesses
    sync: EngineWeightSync
    model: Any
    tolerance: float
    """A push may bring the engine no further from the policy than reading a file does, up to a factor for the weights
    being others."""
    version: int = 0

    def push(self) -> dict[str, float]:
        self.version += 1
        return self.sync.push(version=self.version).values()

    def change_weights(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.3 * parameter.std().nan_to_num() * torch.randn_like(parameter))

    def gap(self) -> float:
        """Of the engine's log-probs to the policy's, at most."""
        probe = probe_tokens(VOCABULARY, length=64)
        return max_gap(policy_logprobs(Policy(self.model), probe), asyncio.run(self.engine.logprobs(probe)))


@pytest.fixture(scope="module", params=[*((dtype, 1) for dtype in LOADED_GAP), (torch.bfloat16, 2)], ids=str)
def setup(request, tmp_path_factory) -> Iterator[Setup]:
    """150 MB in bf16: large enough to see its memory come and go, and for several blocks."""
    dtype, processes = request.param
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = small_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().to("cuda", dtype)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder),
        max_model_len=512,
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=64,
        gpu_memory_utilization=0.3 / processes,
        enable_sleep=True,
        has_experts=False,
    )
    engine = start_engine(settings, tokenizer, processes=processes)
    policy = Policy(model)
    source = PolicyWeights(policy, ModuleWeights(policy))
    sender = IpcSender(block_bytes=32 * 2**20, readers=processes)
    sync = EngineWeightSync(engine, source, sender, SimpleNamespace(run=asyncio.run))
    setup = Setup(engine, sync, model, tolerance=0.0)
    loaded_gap = setup.gap()
    assert loaded_gap < LOADED_GAP[dtype]
    setup.tolerance = 1e-4 + 3 * loaded_gap
    print(f"{dtype}: gap as loaded {loaded_gap:.2e}")
    yield setup
    engine.close()


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_after_every_push_the_engine_computes_what_the_policy_computes(setup):
    for seed in range(3):
        setup.change_weights(seed)
        assert setup.gap() > 5 * setup.tolerance  # or the push would prove nothing
        setup.push()
        assert setup.gap() < setup.tolerance


def test_a_push_is_a_few_calls(setup):
    assert 2 < setup.push()["sync/buckets"] < len(list(setup.model.parameters())) / 2


def test_asleep_the_engine_has_given_its_memory_away_and_awake_it_computes_as_before(setup):
    """0.3 of the device, most of it for keys and values; CUDA graphs and the context stay."""
    setup.push()
    total = torch.cuda.mem_get_info()[1]
    awake = used()
    asyncio.run(setup.engine.sleep())
    assert awake - used() > 0.2 * total
    setup.push()
    assert used() == pytest.approx(awake, abs=0.02 * total)
    assert setup.gap() < setup.tolerance


def test_a_cycle_changes_no_greedy_token(setup):
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)

    async def sample() -> list[list[int]]:
        prompts = [[10 + i, 20, 30] for i in range(16)]
        done = await asyncio.gather(*(setup.engine.generate(prompt, params) for prompt in prompts))
        return [generation.token_ids for generation in done]

    setup.push()
    before = asyncio.run(sample())
    asyncio.run(setup.engine.sleep())
    setup.push()
    assert asyncio.run(sample()) == before


def test_nothing_grows_from_push_to_push(setup):
    """Ten cycles; the first two may still find their room. A block of 32 MiB lost in each would be seen."""
    seen = []
    for _ in range(12):
        asyncio.run(setup.engine.sleep())
        setup.push()
        torch.cuda.synchronize()
        seen.append(used())
    assert seen[-1] - seen[1] < 32 * 2**20
