"""Routes of a mixture of experts from vLLM on this machine's CPU: at every token the experts that transformers chooses.

All tests share one engine. Its cache has 30 blocks of 32 tokens, so that what requests have in common is found there
soon, and many requests at once have to make room for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from own_routes import check_routes, differing, router_logits
from small_tokenizers import tokenizer as small_tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from openrlhf.agents.recorder import TokenRecorder
from openrlhf.backends.base import ModuleWeights
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import decoder_layers
from openrlhf.models.policy import Policy
from openrlhf.models.routes import RouteLog, install_routers, route_shape
from openrlhf.rollout.vllm import engine as engine_module
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.routes import merged
from openrlhf.rollout.vllm.settings import VllmSettings, engine_arguments
from openrlhf.types import FinishReason, Generation, PackedTokens, SamplingParams, Segment
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

VOCABULARY = 360
BLOCK, BLOCKS = 32, 30
PARAMS = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, detokenize=False)
LOOP = SimpleNamespace(run=asyncio.run)


@dataclass
class Setup:
    engine: VllmEngine
    model: Any
    tokenizer: Any
    cached: list[int]
    """Of each request that has ended: the tokens of its prompt that vLLM found in its cache."""
    version: int = 0

    def push(self) -> None:
        policy = Policy(self.model)
        weights = PolicyWeights(policy, ModuleWeights(policy))
        self.version += 1
        EngineWeightSync(self.engine, weights, RpcSender(block_bytes=100_000), LOOP).push(version=self.version)

    def change_routers(self, seed: int) -> None:
        """So that most tokens go elsewhere, and keys and values are others too."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.5 * parameter.std().nan_to_num() * torch.randn_like(parameter))

    def check(self, prompt: list[int], generation: Generation) -> None:
        check_routes(generation.routes, self.model, [*prompt, *generation.token_ids])


def mixture(tokenizer: Any) -> Any:
    """Three layers, of which the second has no experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[Setup]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer, folder = small_tokenizer(), tmp_path_factory.mktemp("mixture")
    model = mixture(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = VllmSettings(
        model=str(folder), dtype="float32", max_model_len=512, max_num_seqs=32, cpu_cache_gib=1, return_routes=True
    )
    with pytest.MonkeyPatch.context() as patch:
        cache = {"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS}
        patch.setattr(engine_module, "engine_arguments", lambda *a, **options: engine_arguments(*a, **options) | cache)
        engine = VllmEngine(settings, tokenizer)
    found = Setup(engine, model, tokenizer, cached=[])
    part = engine._part

    async def counting(request: Any, output: Any) -> Generation:
        if output.finished:
            found.cached.append(output.num_cached_tokens)
        return await part(request, output)

    engine._part = counting  # type: ignore[method-assign]
    with contextlib.closing(engine):
        yield found
    torch.set_num_threads(threads)


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, VOCABULARY) for _ in range(count)]


def generate_all(engine: VllmEngine, prompts: list[list[int]], params: SamplingParams) -> list[Generation]:
    async def gathered() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    return asyncio.run(gathered())


@torch.no_grad()
def distances(policy: Policy, recorded: list[Segment]) -> np.ndarray:
    """Of the engine's log-probs to the policy's, one for each sampled token."""
    found = policy(PackedTokens.from_segments(recorded), temperature=1.0).logprobs_A
    own = torch.cat([segment.rollout_logprobs[segment.action_mask] for segment in recorded])
    return (found - own).abs().numpy()


def test_with_the_engines_routes_the_policys_logprobs_are_closer_to_the_engines(tmp_path):
    """Both in bf16. Only where choices differ does it make a difference, and a large one."""
    tokenizer = small_tokenizer()
    model = mixture(tokenizer).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = VllmSettings(
        model=str(tmp_path), dtype="bfloat16", max_model_len=512, max_num_seqs=32, cpu_cache_gib=1, return_routes=True
    )
    prompts = [numbers(30, seed=i) for i in range(32)]
    with contextlib.closing(VllmEngine(settings, tokenizer)) as engine:
        answers = generate_all(engine, prompts, PARAMS.copy(max_tokens=60))
    recorded = []
    for prompt, answer in zip(prompts, answers, strict=True):
        recorder = TokenRecorder(prompt)
        recorder.append_action(answer)
        recorded.append(recorder.segment())
    routers = install_routers(model, decoder_layers(model), replay=True)
    policy, log = Policy(model, routers=routers), RouteLog(route_shape(model.config))
    assert policy.replays
    policy(PackedTokens.from_segments(recorded), temperature=1.0, route_log=log)
    differ = float(log.differing_L.sum() / log.compared_L.sum())
    replayed = distances(policy, recorded)
    own = distances(policy, [dataclasses.replace(segment, routes=None) for segment in recorded])
    print(
        f"{differ:.4f} of choices differ; distance with replay: mean {replayed.mean():.4f}, max {replayed.max():.3f}; "
        f"without: mean {own.mean():.4f}, max {own.max():.3f}"
    )
    assert 0 < differ < 0.1
    assert replayed.mean() < own.mean()
    assert replayed.max() < 0.5 * own.max()


def test_every_turn_of_an_episode_has_the_routes_of_the_whole_history(setup):
    """The second and the third turn find what was read before in the cache; the segment has those of the third."""
    setup.cached.clear()
    tokens = numbers(70, seed=1)
    recorder = TokenRecorder(tokens)
    for turn in range(3):
        (said,) = generate_all(setup.engine, [tokens], PARAMS)
        setup.check(tokens, said)
        assert said.routes.dtype == np.uint8
        assert not said.routes[:, 1].any()
        recorder.append_action(said)
        tokens = [*tokens, *said.token_ids]
        if turn < 2:
            feedback = numbers(9, seed=10 + turn)
            recorder.append_observation(feedback)
            tokens = [*tokens, *feedback]
    assert setup.cached == [0, (70 + 39) // BLOCK * BLOCK, (70 + 40 + 9 + 39) // BLOCK * BLOCK]
    segment = recorder.segment()
    assert segment.routes.shape == (len(segment) - 1, 3, 3)
    check_routes(segment.routes.numpy(), setup.model, segment.token_ids.tolist())


def test_samples_of_a_prompt_have_its_routes_and_their_own(setup):
    """All eight come in the same moment: most begin with blocks that another one reads in the same step."""
    setup.cached.clear()
    prompt = numbers(2 * BLOCK + 5, seed=2)
    for generation in generate_all(setup.engine, [prompt] * 8, PARAMS):
        setup.check(prompt, generation)
    assert sum(setup.cached) >= 7 * 2 * BLOCK


def test_requests_that_make_room_for_each_other_are_aligned(setup):
    """24 requests grow to 220 tokens, 7 blocks each: 168 for 30. Those that made room read again, or find their
    beginning in the cache."""
    prompts = [numbers(20, seed=i) for i in range(12)] * 2
    for prompt, generation in zip(
        prompts, generate_all(setup.engine, prompts, PARAMS.copy(max_tokens=200)), strict=True
    ):
        assert len(generation.token_ids) == 200
        setup.check(prompt, generation)


def test_weights_that_change_in_the_middle_of_responses_choose_anew_for_every_token(setup):
    """Among them requests that begin alike: one reads the prompt again, and the others find it in the cache."""
    old = copy.deepcopy(setup.model)
    prompts = [numbers(40, seed=i) for i in (1, 1, 1, 2, 3)]
    params = PARAMS.copy(max_tokens=120)
    setup.change_routers(seed=100)

    async def play() -> tuple[list[Generation], list[Generation]]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in prompts]
        parts = []
        async with contextlib.aclosing(setup.engine.stream(prompts[0], params)) as streamed:
            async for part in streamed:
                parts.append(part)
                if len(parts) == 60:
                    await asyncio.to_thread(setup.push)
        return await asyncio.gather(*calls), parts

    generations, parts = asyncio.run(play())
    for prompt, generation in zip(prompts, generations, strict=True):
        assert set(generation.versions) == {setup.version - 1, setup.version}
        setup.check(prompt, generation)
        own = router_logits(old, [*prompt, *generation.token_ids])
        assert differing(generation.routes, own).any(1).mean() > 0.5
    assert all(part.routes is None for part in parts[:-1])
    check_routes(parts[-1].routes, setup.model, [*prompts[0], *(t for part in parts for t in part.token_ids)])


def test_what_is_aborted_has_the_routes_of_what_was_read(setup):
    """Also in an engine that has been paused, and has forgotten all that it had read."""
    prompts = [numbers(12, seed=i) for i in range(3)]
    params = PARAMS.copy(max_tokens=None)

    async def play(*, paused: bool) -> list[Generation]:
        calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in prompts]
        async with contextlib.aclosing(setup.engine.stream(prompts[0], params)) as parts:
            seen = 0
            async for _ in parts:
                seen += 1
                if seen == 20:
                    break
        if paused:
            await setup.engine.pause()
        await asyncio.to_thread(setup.engine.abort)
        answers = await asyncio.gather(*calls)
        if paused:
            await setup.engine.resume(setup.version)
        return answers

    for paused in (False, True):
        for prompt, generation in zip(prompts, asyncio.run(play(paused=paused)), strict=True):
            assert generation.finish_reason is FinishReason.ABORT
            assert 15 < len(generation.token_ids) < 500
            setup.check(prompt, generation)


def test_an_answer_has_the_routes_of_all_before_its_last_token_however_it_ends(setup):
    """By a stop string, a stop token, after one token, and with a prompt of one token."""
    prompt = setup.tokenizer("the answer is")["input_ids"]
    greedy = PARAMS.copy(temperature=0.0, detokenize=True)
    (free,) = generate_all(setup.engine, [prompt], greedy)
    texts = [setup.tokenizer.decode([token]) for token in free.token_ids[3:]]
    word = next(text for text in texts if text.isascii() and text.isprintable() and text)
    for params, reason in (
        (greedy.copy(stop=[word]), FinishReason.STOP),
        (greedy.copy(stop=[word], include_stop_str_in_output=True), FinishReason.STOP),
        (greedy.copy(stop_token_ids=[free.token_ids[5]]), FinishReason.STOP),
        (greedy.copy(max_tokens=1), FinishReason.LENGTH),
    ):
        (generation,) = generate_all(setup.engine, [prompt], params)
        assert generation.finish_reason is reason
        setup.check(prompt, generation)
    (generation,) = generate_all(setup.engine, [prompt[:1]], greedy.copy(max_tokens=3))
    setup.check(prompt[:1], generation)


NO_ROUTE = 255


@pytest.fixture
def returned(setup, monkeypatch) -> Iterator[SimpleNamespace]:
    """The engine as on a GPU: routes come with the last output, and what was read twice has those of the first time,
    which are `NO_ROUTE` here. `change` is done to them on their way; `names` are those of the requests."""
    source, outputs = setup.engine._routes, setup.engine._outputs
    found = SimpleNamespace(names=[], change=lambda routes: routes)

    async def with_routes(request: Any, kind: Any) -> AsyncGenerator[Any]:
        found.names.append(request.name)
        tokens = 0
        async for output in outputs(request, kind):
            tokens += len(output.outputs[0].token_ids)
            if output.finished:
                read = len(request.token_ids) + tokens - 1
                messages = await setup.engine.llm.collective_rpc("take_routes", args=(request.name, read))
                routes = merged(messages, num_layers=3, routed=source.captured)
                first_new = max(first for first, _ in request.starts)
                routes[: len(request.token_ids) + first_new - 1 if first_new else 0] = NO_ROUTE
                output.outputs[0].routed_experts = found.change(routes)
            yield output

    monkeypatch.setattr(setup.engine, "_routes", engine_module._RouteSource(3, captured=None))
    monkeypatch.setattr(setup.engine, "_outputs", with_routes)
    return found


async def with_a_push(setup: Setup, prompts: list[list[int]], then: Callable[[], None] | None = None):
    """Generations in whose middle weights are pushed, and afterwards something else happens."""
    params = PARAMS.copy(max_tokens=120)
    calls = [asyncio.create_task(setup.engine.generate(prompt, params)) for prompt in prompts]
    while setup.engine._num_sampled() < 40 * len(prompts):
        await asyncio.sleep(0)
    setup.change_routers(seed=101)
    await asyncio.to_thread(setup.push)
    if then is not None:
        await asyncio.to_thread(then)
    return await asyncio.gather(*calls)


def test_what_vllm_returns_is_asked_for_again_where_weights_changed_in_between(setup, returned):
    """Once for each such request, most of which vLLM then finds in its cache."""
    prompts = [numbers(40, seed=i) for i in (1, 1, 2)]
    setup.cached.clear()
    for prompt, generation in zip(prompts, asyncio.run(with_a_push(setup, prompts)), strict=True):
        assert len(set(generation.versions)) == 2
        setup.check(prompt, generation)
    assert len(returned.names) == 6
    returned.names.clear()
    for prompt, generation in zip(prompts, generate_all(setup.engine, prompts, PARAMS), strict=True):
        setup.check(prompt, generation)
    assert len(returned.names) == 3


def test_requests_that_are_given_up_ask_for_nothing_more(setup, returned):
    """They have the routes that there are, of the first reading."""
    prompts = [numbers(40, seed=i) for i in (1, 2)]
    for prompt, generation in zip(prompts, asyncio.run(with_a_push(setup, prompts, setup.engine.abort)), strict=True):
        assert generation.finish_reason is FinishReason.ABORT
        assert len(generation.routes) == len(prompt) + len(generation.token_ids) - 1
        assert (generation.routes == NO_ROUTE).any()
    assert len(returned.names) == 2


def test_routes_of_other_tokens_are_no_routes(setup, returned, caplog):
    returned.change = lambda routes: routes[1:]
    generations = generate_all(setup.engine, [numbers(5, seed=i) for i in range(3)], PARAMS.copy(max_tokens=7))
    assert [generation.routes for generation in generations] == [None] * 3
    (line,) = [record.message for record in caplog.records if "without routes" in record.message]
    assert "vLLM read 11 tokens of a request in 3 layers, and gave those of 10 tokens in 3 layers" in line


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([([0, 1], None), ([], "the kernel of layer 3 chooses experts itself")], "the kernel of layer 3 chooses"),
        ([([], None)], "no router was found"),
    ],
)
def test_an_engine_whose_workers_do_not_see_all_choices_says_why_and_goes_on_without(answers, reason, caplog):
    async def collective_rpc(method: str) -> Any:
        return answers

    llm: Any = SimpleNamespace(collective_rpc=collective_rpc)
    for gpu in (False, True):
        assert asyncio.run(engine_module._route_source(llm, 4, gpu=gpu)) is None
    assert (
        caplog.text.count(
            f"generations come without routes of experts (--algo.router_replay), vLLM does not tell: {reason}"
        )
        == 2
    )


def test_a_vllm_that_refuses_to_return_routes_is_started_without(setup, caplog):
    """As the build for CPUs does, which would be asked if it were one for GPUs."""
    settings = setup.engine.settings
    assert engine_module._start_with_routes(settings, engine_arguments(settings, gpu=False)) is None
    assert "vLLM does not tell" in caplog.text
    assert "Model Runner V2" in caplog.text
