"""Drafts of the next tokens in vLLM on a CUDA device, with its own kernels and CUDA graphs: samples stay exact.

An engine takes a minute to start; all tests share one. The tests of the CPU build enumerate probabilities
(`tests/integration/test_vllm_speculation.py`); here samples with drafts are compared with samples without.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

pytest.importorskip("vllm")

from small_tokenizers import tokenizer as small_tokenizer

from openrlhf.models.attention import ATTENTION
from openrlhf.rollout.vllm import speculation
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT = [5, 6, 7, 8, 5, 6, 7]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[VllmEngine]:
    tokenizer = small_tokenizer()
    config = Qwen2Config(
        vocab_size=360,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).bfloat16()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder),
        max_model_len=512,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,
        speculation="history",
        speculation_tokens=3,
    )
    engine = VllmEngine(settings, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "WORTH", 0.0)
        yield engine
    engine.close()


def sampled(engine: VllmEngine, count: int, **options: Any) -> list[Any]:
    params = SamplingParams(ignore_eos=True, detokenize=False, **options)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(engine.generate(PROMPT, params) for _ in range(count)))

    return asyncio.run(all_of_them())


def test_sequences_come_as_often_with_drafts_as_without(engine):
    """χ² of two samples of 27 sequences (three tokens, each one of three) has 26 degrees of freedom: more than 54.1
    once in a thousand cases."""
    count, found = 8192, {}
    for allowed in (True, False):
        asyncio.run(engine.ask(engine.llm.collective_rpc("allow_drafts", args=(allowed,)), "to change its drafts"))
        asyncio.run(engine.take_draft_counts())
        answers = sampled(engine, count, temperature=1.0, top_k=3, max_tokens=3)
        counts = asyncio.run(engine.take_draft_counts())
        print(SimpleNamespace(allowed=allowed, counts=counts))
        assert (counts.accepted > count / 4) == allowed
        found[allowed] = Counter(tuple(answer.token_ids) for answer in answers)
    asyncio.run(engine.ask(engine.llm.collective_rpc("allow_drafts", args=(True,)), "to change its drafts"))
    keys = set(found[True]) | set(found[False])
    assert len(keys) == 27
    assert sum((found[True][k] - found[False][k]) ** 2 / (found[True][k] + found[False][k]) for k in keys) < 54.1


def test_log_probs_are_those_of_the_sampled_tokens(engine):
    asyncio.run(engine.take_draft_counts())
    answers = sampled(engine, 32, temperature=1.0, max_tokens=200)
    assert asyncio.run(engine.take_draft_counts()).drafted > 0
    gaps = []
    for answer in answers:
        read = asyncio.run(engine.logprobs([*PROMPT, *answer.token_ids]))[len(PROMPT) - 1 :]
        gaps += [abs(a - b) for a, b in zip(answer.logprobs, read, strict=True)]
    print(f"largest {max(gaps):.3f}, mean {sum(gaps) / len(gaps):.5f}")
    assert sum(gaps) / len(gaps) < 0.05
    assert max(gaps) < 1
