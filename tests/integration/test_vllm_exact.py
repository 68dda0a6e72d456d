"""Exact rollouts in vLLM on this machine's CPU: the trainer's log-probs are the engine's, bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_tokenizers import tokenizer as small_tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.loading import LoadSettings, load_policy
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import Generation, PackedTokens, SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

LOOP = SimpleNamespace(run=asyncio.run)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[tuple[VllmEngine, Policy]]:
    """A model with grouped heads, norms of queries and keys, and a tied head."""
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=370,
        hidden_size=80,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    policy = load_policy(folder, LoadSettings(device="cpu", exact=True))
    settings = VllmSettings(
        model=str(folder),
        dtype="float32",
        max_model_len=96,
        max_num_seqs=8,
        cpu_cache_gib=1,
        enable_prefix_caching=True,
        exact=True,
    )
    engine = VllmEngine(settings, tokenizer)
    yield engine, policy
    engine.close()


def _logprobs(policy: Policy, prompts: list[list[int]], found: list[Generation]) -> list[torch.Tensor]:
    """By the trainer, all in one packed stream."""
    ids = [torch.tensor([*prompt, *each.token_ids]) for prompt, each in zip(prompts, found, strict=True)]
    actions = [torch.arange(len(own)) >= len(prompt) for own, prompt in zip(ids, prompts, strict=True)]
    with torch.no_grad():
        together = policy(PackedTokens.from_sequences(ids, actions), temperature=TEMPERATURE).logprobs_A
    return list(together.split([len(each.token_ids) for each in found]))


def _sample(engine: VllmEngine, prompts: list[list[int]]) -> list[Generation]:
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=40)

    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    return asyncio.run(all_of_them())


def _push(engine: VllmEngine, policy: Policy) -> None:
    weights: Any = PolicyWeights(policy, ModuleWeights(policy))
    EngineWeightSync(engine, weights, RpcSender(checksums=True), LOOP).push(version=engine.version + 1)


def test_the_gap_is_0_at_every_token_before_and_after_a_push(setup):
    """More requests than places, prompts of many lengths, one of them twice, which is then read from the cache."""
    engine, policy = setup
    prompts = [[5 + (i * 7 + j * 3) % 300 for j in range(3 + 5 * i)] for i in range(10)]
    prompts.append(prompts[-1])
    for change in (0.0, 0.05, 0.05):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(change * torch.randn_like(parameter))
        if change:
            _push(engine, policy)
        found = _sample(engine, prompts)
        for generation, own in zip(found, _logprobs(policy, prompts, found), strict=True):
            assert generation.logprobs == own.tolist()
    assert sum(len(generation.token_ids) for generation in found) > 100
