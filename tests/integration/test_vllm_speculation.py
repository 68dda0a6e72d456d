"""Drafts of the next tokens in vLLM on this machine's CPU: they change how many tokens a step yields, and nothing else.

All tests share an engine whose drafts are earlier responses to the same prompt, and else what followed the last tokens
before. Requests have their own seeds and begin together, so that every run of a test samples the same tokens.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_tokenizers import tokenizer as small_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

from openrlhf.backends.base import ModuleWeights
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm import speculation
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import Generation, PackedTokens, SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

VOCABULARY, CONTEXT, PLACES = 360, 256, 64
LOOP = SimpleNamespace(run=asyncio.run)


@dataclass
class Setup:
    engine: VllmEngine
    model: Any
    seeds: Iterator[int]

    def push(self) -> dict[str, float]:
        weights = PolicyWeights(Policy(self.model), ModuleWeights(Policy(self.model)))
        sync = EngineWeightSync(self.engine, weights, RpcSender(checksums=True), LOOP)
        return sync.push(version=self.engine.version + 1).values()

    def change_weights(self, *, seed: int, by: float = 0.3) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(by * parameter.std().nan_to_num() * torch.randn_like(parameter))

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Generation]:
        """All of them, as many at once as the engine has places for; each wave begins when all of it has arrived."""

        async def wave(asked: Sequence[Sequence[int]]) -> list[Generation]:
            await self.engine.pause()
            calls = [
                asyncio.create_task(self.engine.generate(prompt, params.copy(seed=next(self.seeds))))
                for prompt in asked
            ]
            while self.engine.num_running < len(asked):
                await asyncio.sleep(0.001)
            await self.engine.ask(self.engine.llm.is_sleeping(), "for what is behind the requests")
            await self.engine.resume(self.engine.version + 1)
            return await asyncio.gather(*calls)

        waves = [prompts[start : start + PLACES] for start in range(0, len(prompts), PLACES)]
        return [generation for asked in waves for generation in asyncio.run(wave(asked))]

    def rescored(self, prompt: Sequence[int], generation: Generation, *, temperature: float) -> torch.Tensor:
        """Log-probs of its tokens by the policy."""
        token_ids = torch.tensor([*prompt, *generation.token_ids])
        tokens = PackedTokens.from_sequences([token_ids], [torch.arange(len(token_ids)) >= len(prompt)])
        with torch.no_grad():
            return Policy(self.model).eval()(tokens, temperature=temperature).logprobs_A

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Of the token that comes next."""
        every = PackedTokens.from_sequences(
            [torch.tensor([*token_ids, token]) for token in range(VOCABULARY)],
            [torch.arange(len(token_ids) + 1) == len(token_ids)] * VOCABULARY,
        )
        with torch.no_grad():
            return Policy(self.model).eval()(every, temperature=1.0).logprobs_A


@pytest.fixture(autouse=True)
def no_end_of_drafts(monkeypatch) -> None:
    """A random model repeats little."""
    monkeypatch.setattr(speculation, "WORTH", 0.0)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[Setup]:
    tokenizer = small_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder),
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=PLACES,
        cpu_cache_gib=1,
        deterministic=True,
        speculation="history",
        speculation_tokens=3,
    )
    engine = VllmEngine(settings, tokenizer)
    yield Setup(engine, model, itertools.count())
    engine.close()


def test_sequences_have_the_probability_that_the_policy_gives_them(setup):
    """Three tokens, each one of the three likeliest: 27 sequences, whose probabilities are enumerated.

    χ² of 2,048 samples has 26 degrees of freedom: 26 on average, and more than 54.1 once in a thousand cases.
    """
    prompt, samples = [5, 6, 7, 8, 5, 6, 7], 2048

    @functools.cache
    def likeliest(read: tuple[int, ...]) -> list[int]:
        return setup.logits(read).topk(3).indices.tolist()

    expected = {(): 1.0}
    for _ in range(3):
        expected = {
            (*tokens, int(token)): probability * float(share)
            for tokens, probability in expected.items()
            for top in [setup.logits([*prompt, *tokens]).topk(3)]
            for token, share in zip(top.indices, top.values.softmax(0), strict=True)
        }
    asyncio.run(setup.engine.take_draft_counts())
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, supports=8)
    found = setup.sample([prompt] * samples, params)
    counts = asyncio.run(setup.engine.take_draft_counts())
    assert counts.accepted > samples / 2
    assert counts.drafted - counts.accepted > samples / 10
    seen = Counter(tuple(generation.token_ids) for generation in found)
    assert set(seen) <= set(expected)
    assert min(expected.values()) * samples > 1
    assert sum((seen[key] - samples * p) ** 2 / (samples * p) for key, p in expected.items()) < 54.1
    for generation in found[-64:]:
        for place, told in enumerate(generation.supports.tolist()):
            before = [*prompt, *generation.token_ids[:place]]
            assert sorted(told) == sorted(likeliest(tuple(before)))
        total = sum(generation.logprobs)
        assert total == pytest.approx(math.log(expected[tuple(generation.token_ids)]), abs=1e-3)


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, 0.0), (0.3, 0.05)])
def test_log_probs_are_those_of_the_sampled_tokens_also_when_the_weights_are_others(setup, temperature, kept):
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5 + i] for i in range(4)] * 4
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    setup.change_weights(seed=1)
    setup.push()
    for _ in range(2):
        for prompt, generation in zip(prompts, setup.sample(prompts, params), strict=True):
            own = setup.rescored(prompt, generation, temperature=temperature)
            torch.testing.assert_close(torch.tensor(generation.logprobs), own, atol=2e-4, rtol=0)
    metrics = setup.push()
    assert metrics["rollout/draft_acceptance"] >= kept
    assert metrics["rollout/tokens_per_step"] >= 1 + kept / 2


def test_a_request_that_a_push_interrupts_goes_on_with_drafts_and_the_new_weights(setup):
    """Every token has the log-prob of the version that sampled it. The weights change little and the temperature is
    low, so that a response goes on as earlier ones did."""
    temperature, prompt = 0.1, [9, 8, 7, 9, 8, 7]
    params = SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True)
    setup.push()
    setup.sample([prompt] * 8, params)  # from which drafts are made

    async def interrupted() -> list[Generation]:
        parts = setup.engine.stream(prompt, params.copy(seed=0))
        seen = [await anext(parts)]
        await setup.engine.pause()
        rest = asyncio.create_task(_collected(parts, seen))
        await asyncio.to_thread(setup.push)
        await rest
        return seen

    # The answer may be over before the engine has heard of the pause, and it may go on as none did before.
    for seed in range(3, 23):
        before = copy.deepcopy(setup.model.state_dict())
        setup.change_weights(seed=seed, by=0.02)
        seen = asyncio.run(interrupted())
        versions = torch.tensor([version for part in seen for version in part.versions])
        counts = asyncio.run(setup.engine.take_draft_counts())
        if len(versions.unique()) == 2 and counts.accepted:
            break
    assert counts.accepted > 0
    assert counts.tokens == int((versions == setup.engine.version).sum())
    logprobs = torch.tensor([logprob for part in seen for logprob in part.logprobs])
    tokens = [token for part in seen for token in part.token_ids]
    whole = Generation(token_ids=tokens, logprobs=logprobs.tolist(), versions=versions.tolist(), finish_reason=None)
    after = copy.deepcopy(setup.model.state_dict())
    for weights, version in ((before, setup.engine.version - 1), (after, setup.engine.version)):
        setup.model.load_state_dict(weights)
        gap = (logprobs - setup.rescored(prompt, whole, temperature=temperature)).abs()
        assert gap[versions == version].max() < 1e-3
        assert gap[versions != version].max() > 1e-2


async def _collected(parts: Any, seen: list[Generation]) -> None:
    async for part in parts:
        seen.append(part)


def test_drafts_that_do_not_pay_are_switched_off_and_tried_again(setup, monkeypatch, caplog):
    prompt, params = [5, 6, 7, 8, 5, 6, 7], SamplingParams(temperature=0.4, max_tokens=20, ignore_eos=True)
    for name, value in (("ENOUGH", 1), ("WORTH", 4.0), ("REST", 2)):
        monkeypatch.setattr(speculation, name, value)
    caplog.set_level(logging.INFO, logger="openrlhf")
    asyncio.run(setup.engine.take_draft_counts())
    setup.sample([prompt] * 8, params)
    assert "are off for 2 rounds" not in caplog.text
    setup.push()
    assert "drafts (--vllm.speculation history) are off for 2 rounds" in caplog.text
    for _ in range(2):
        setup.sample([prompt] * 8, params)
        metrics = setup.push()
        assert "rollout/draft_acceptance" not in metrics
        assert metrics["rollout/tokens_per_step"] == 1
    assert "are tried again" in caplog.text
    setup.sample([prompt] * 8, params)
    assert asyncio.run(setup.engine.take_draft_counts()).drafted > 0
    with pytest.raises(ValueError, match="min_p"):
        asyncio.run(setup.engine.generate(prompt, params.copy(min_p=0.1)))
