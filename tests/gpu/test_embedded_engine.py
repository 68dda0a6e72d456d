"""The embedded engine on one CUDA device: log-probs equal a re-score, greedy equals generate."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config

from openrlhf.models.attention import ATTENTION
from openrlhf.models.packed import PackedAttention
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import Generation, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=16),
}


def make(family: str, dtype: torch.dtype):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="sdpa").eval().to("cuda", dtype)


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, 1000) for _ in range(rng.randint(1, 80))] for _ in range(n)]


def run(engine: EmbeddedEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[Generation]:
    async def everything() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in requests))

    return asyncio.run(everything())


def gap(model, prompt: list[int], result: Generation) -> torch.Tensor:
    """|log-prob reported - log-prob of one forward over everything|, per sampled token."""
    ids = torch.tensor([[*prompt, *result.token_ids]], device="cuda")
    T = ids.shape[1]
    plan = PackedAttention(torch.tensor([0, T], dtype=torch.int32, device="cuda"), T)
    logits = model(
        input_ids=ids, position_ids=torch.arange(T, device="cuda")[None], attention_plan=plan, use_cache=False
    ).logits[0]
    expected = torch.log_softmax(logits.float(), -1)[:-1].gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].cpu()
    return (torch.tensor(result.logprobs) - expected).abs()


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@torch.no_grad()
def test_log_probs_equal_a_rescore(family, dtype, tolerance):
    model = make(family, dtype)
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, None, max_model_len=256, max_batch_size=16)
    requests = [(prompt, SamplingParams(max_tokens=8 + 3 * i)) for i, prompt in enumerate(prompts(40))]
    results = zip(requests, run(engine, requests), strict=True)
    gaps = torch.cat([gap(model, prompt, result) for (prompt, _), result in results])
    assert (gaps.max() if dtype == torch.float32 else gaps.mean()) < tolerance


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@torch.no_grad()
def test_log_probs_of_later_turns_equal_a_rescore(family, dtype, tolerance):
    """Each turn goes on where the last one ended, and reads only what is new."""
    model = make(family, dtype)
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, None, max_model_len=512, max_batch_size=16)
    histories = prompts(16)
    gaps = []
    for turn in range(4):
        requests = [(history, SamplingParams(max_tokens=8 + i)) for i, history in enumerate(histories)]
        results = run(engine, requests)
        gaps += [gap(model, prompt, result) for (prompt, _), result in zip(requests, results, strict=True)]
        feedback = prompts(16)[turn:] + prompts(16)[:turn]
        histories = [
            [*history, *result.token_ids, *more]
            for history, result, more in zip(histories, results, feedback, strict=True)
        ]
    gaps = torch.cat(gaps)
    assert (gaps.max() if dtype == torch.float32 else gaps.mean()) < tolerance
    assert engine.stats.reused_tokens > engine.stats.prompt_tokens


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_generate(family):
    model = make(family, torch.float32)
    requests = [(prompt, SamplingParams(temperature=0, max_tokens=24)) for prompt in prompts(24)]
    expected = []
    for prompt, _ in requests:
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected.append(output[0, len(prompt) :].tolist())
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, None, max_model_len=256, max_batch_size=8)
    assert [result.token_ids for result in run(engine, requests)] == expected
