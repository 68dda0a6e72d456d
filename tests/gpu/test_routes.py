"""Routes of a mixture of experts as vLLM returns them on a GPU, with CUDA graphs: transformers' own choice at every
token, but for experts that are about equally likely, between which rounding decides.

An engine takes a minute to start; each dtype has one for all its tests. What is printed: the share of choices, of each
token in each layer, that are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

pytest.importorskip("vllm")

from own_routes import check_routes, differing, router_logits
from small_tokenizers import tokenizer as small_tokenizer

from openrlhf.agents.recorder import TokenRecorder
from openrlhf.backends.base import ModuleWeights
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import FinishReason, Generation, SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.transports import IpcSender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 4096
TIE = {torch.float32: 0.05, torch.bfloat16: 0.4}
"""In the first layer logits of two experts may differ by this much and yet be swapped; the logits of a token have a
standard deviation of about 1. vLLM's kernels multiply fp32 in TF32."""
SAME = {torch.float32: 0.95, torch.bfloat16: 0.75}
"""The share of choices that have to be the same; those of another token are in 1 of 1,820 cases. On a CPU it was 1 in
fp32, and 0.91 to 0.98 in bf16."""
PARAMS = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, detokenize=False)


@dataclass
class Setup:
    engine: VllmEngine
    sync: EngineWeightSync
    model: Any
    dtype: torch.dtype
    version: int = 0

    def push(self) -> None:
        self.version += 1
        self.sync.push(version=self.version)

    def change_weights(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.5 * parameter.std().nan_to_num() * torch.randn_like(parameter))

    def check(self, routes: np.ndarray | None, token_ids: list[int]) -> float:
        """The share of choices that are the model's own."""
        check_routes(routes, self.model, token_ids, tie=TIE[self.dtype], deep=False)
        assert routes is not None
        assert routes.dtype == np.uint8
        return 1 - float(differing(routes, router_logits(self.model, token_ids)).mean())

    def check_all(self, what: str, prompts: list[list[int]], generations: list[Generation]) -> None:
        pairs = zip(prompts, generations, strict=True)
        same = np.mean([self.check(answer.routes, [*prompt, *answer.token_ids]) for prompt, answer in pairs])
        print(f"{self.dtype}, {what}: {same:.4f} of choices are the same")
        assert same > SAME[self.dtype]


@pytest.fixture(scope="module", params=TIE, ids=str)
def setup(request, tmp_path_factory) -> Iterator[Setup]:
    """Four layers, of which the second has no experts: 16 in each of the others, 4 of them for a token."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = small_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().to("cuda", request.param)
    folder = tmp_path_factory.mktemp("mixture")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder),
        max_model_len=1024,
        dtype=str(request.param).removeprefix("torch."),
        max_num_seqs=64,
        gpu_memory_utilization=0.3,
        enable_sleep=True,
        return_routes=True,
    )
    engine = VllmEngine(settings, tokenizer)
    policy = Policy(model)
    source = PolicyWeights(policy, ModuleWeights(policy))
    sync = EngineWeightSync(engine, source, IpcSender(block_bytes=32 * 2**20), SimpleNamespace(run=asyncio.run))
    yield Setup(engine, sync, model, request.param)
    engine.close()


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, VOCABULARY) for _ in range(count)]


def generate_all(engine: VllmEngine, prompts: list[list[int]], params: SamplingParams) -> list[Generation]:
    async def gathered() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    return asyncio.run(gathered())


def test_every_turn_of_an_episode_has_the_routes_of_the_whole_history(setup):
    """Eleven episodes at once, for which a CUDA graph of more is used. Later turns find the history in the cache."""
    recorders = [TokenRecorder(numbers(50 + i, seed=i)) for i in range(11)]
    histories = [numbers(50 + i, seed=i) for i in range(11)]
    for turn in range(3):
        answers = generate_all(setup.engine, histories, PARAMS)
        setup.check_all(f"turn {turn + 1}", histories, answers)
        for i, answer in enumerate(answers):
            recorders[i].append_action(answer)
            histories[i] += answer.token_ids
            if turn < 2:
                feedback = numbers(9, seed=100 * turn + i)
                recorders[i].append_observation(feedback)
                histories[i] += feedback
    for recorder in recorders:
        segment = recorder.segment()
        assert segment.routes.shape == (len(segment) - 1, 4, 4)
        setup.check(segment.routes.numpy(), segment.token_ids.tolist())


def test_samples_of_a_prompt_and_more_requests_than_places_are_aligned(setup):
    prompts = [numbers(100, seed=i // 8) for i in range(96)]
    setup.check_all("96 requests", prompts, generate_all(setup.engine, prompts, PARAMS))


@pytest.mark.parametrize("sleeps", [False, True])
def test_weights_that_change_in_the_middle_of_responses_choose_anew_for_every_token(setup, sleeps):
    old = copy.deepcopy(setup.model)
    prompts = [numbers(40, seed=i) for i in (1, 1, 1, 2, 3)]
    params = PARAMS.copy(max_tokens=400)
    setup.change_weights(seed=100)

    async def play() -> list[Generation]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in prompts]
        async with contextlib.aclosing(setup.engine.stream(prompts[0], params)) as parts:
            seen = 0
            async for part in parts:
                seen += len(part.token_ids)
                if seen > 40:
                    break
        if sleeps:
            await setup.engine.sleep()
        await asyncio.to_thread(setup.push)
        return await asyncio.gather(*calls)

    answers = asyncio.run(play())
    for prompt, answer in zip(prompts, answers, strict=True):
        assert set(answer.versions) == {setup.version - 1, setup.version}
        own = router_logits(old, [*prompt, *answer.token_ids])
        assert differing(answer.routes, own).any(1).mean() > 0.5
    setup.check_all("a push in the middle" + sleeps * ", asleep before", prompts, answers)


def test_however_a_request_ends_its_routes_are_those_of_all_before_its_last_token(setup):
    """After one token, in parts, and given up."""
    prompts = [numbers(30, seed=i) for i in range(3)]
    setup.check_all("one token", prompts, generate_all(setup.engine, prompts, PARAMS.copy(max_tokens=1)))

    async def streamed() -> list[Generation]:
        async with contextlib.aclosing(setup.engine.stream(prompts[0], PARAMS)) as parts:
            return [part async for part in parts]

    *first, last = asyncio.run(streamed())
    assert all(part.routes is None for part in first)
    setup.check(last.routes, [*prompts[0], *(token for part in (*first, last) for token in part.token_ids)])

    async def aborted() -> list[Generation]:
        calls = [asyncio.create_task(setup.engine.generate(p, PARAMS.copy(max_tokens=None))) for p in prompts]
        while setup.engine._num_sampled() < 60:
            await asyncio.sleep(0)
        await asyncio.to_thread(setup.engine.abort)
        return await asyncio.gather(*calls)

    answers = asyncio.run(aborted())
    assert {answer.finish_reason for answer in answers} == {FinishReason.ABORT}
    setup.check_all("given up", prompts, answers)
