"""The experts that the embedded engine tells of: transformers' own choice at every token, whatever the batch does."""

import asyncio
import copy
import random
from contextlib import aclosing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import decoder_layers
from openrlhf.models.policy import Policy
from openrlhf.models.routes import RouteLog, Routers, RouteShape, install_routers
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import FinishReason, Generation, PackedTokens, SamplingParams

SIZES = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SPARSE = (0, 2)
"""The layers that have experts: the one between them has none."""


def mixture(experts: int = 6, *, attention: str = ATTENTION, decision: float = 1.0):
    """Three experts a token. `decision`: the scale of the routers' weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=experts,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(std=decision)
    model.set_attn_implementation(attention)
    routers = install_routers(model, decoder_layers(model), replay=True)
    assert routers.layers == SPARSE
    return model


def engine_of(model, **options) -> EmbeddedEngine:
    return EmbeddedEngine(model, None, **{"max_model_len": 256, "return_routes": True} | options)


@torch.no_grad()
def chosen(model, tokens: list[int]) -> list:
    """[R, L, K] by one forward over the whole sequence without its last token, from the logits that it returns."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    logits = plain(input_ids=torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
    routes = torch.zeros(len(tokens) - 1, 3, 3, dtype=torch.long)
    for layer, logits_TE in zip(SPARSE, logits, strict=True):
        routes[:, layer] = logits_TE.topk(3).indices
    return routes.tolist()


def check(model, prompt, generation: Generation) -> None:
    tokens = [*prompt, *generation.token_ids]
    assert generation.routes.shape == (len(tokens) - 1, 3, 3)
    assert generation.routes.tolist() == chosen(model, tokens)


def generate_all(engine: EmbeddedEngine, prompts, params) -> list[Generation]:
    async def gathered() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True)))

    return asyncio.run(gathered())


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 97) for _ in range(count)]


def test_a_batch_tells_what_each_request_alone_would_choose():
    """12 requests, 5 at a time: rows join, leave, move into others' slots and outgrow theirs, at 64 tokens."""
    model = mixture()
    prompts = [numbers(3 + 7 * (i % 9), seed=i) for i in range(12)]
    params = [SamplingParams(max_tokens=2 + 3 * i, seed=i) for i in range(12)]
    results = generate_all(engine_of(model, max_batch_size=5, max_batch_tokens=80), prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        check(model, prompt, result)
        assert result.routes.dtype == np.uint8
        assert not result.routes[:, 1].any()
    assert max(map(len, (r.routes for r in results))) > 64


def test_samples_of_a_prompt_have_its_experts_and_their_own():
    """Six samples, three at a time: two share the first one's reading, and later ones start from a running one's."""
    model = mixture()
    prompt = numbers(20, seed=1)
    engine = engine_of(model, max_batch_size=3, reuse_prefixes=False)
    results = generate_all(engine, [prompt] * 6, [SamplingParams(max_tokens=5 + 3 * i, seed=i) for i in range(6)])
    assert engine.stats.prompt_tokens == 20
    for result in results:
        check(model, prompt, result)


def test_every_turn_has_the_experts_of_the_whole_history():
    """Of the second and third turn only what is new is read; a second ending of the first turn's answer as well."""
    model = mixture()
    engine = engine_of(model)
    tokens = numbers(30, seed=2)
    for turn in range(3):
        (said,) = generate_all(engine, [tokens], [SamplingParams(max_tokens=9, seed=turn)])
        check(model, tokens, said)
        tokens = [*tokens, *said.token_ids, *numbers(6, seed=turn)]
    assert engine.stats.reused_tokens == (30 + 9 - 1) + (30 + 9 + 6 + 9 - 1)
    rewritten = [[*tokens[:40], 1, 2], [*tokens[:35], 3]]
    for prompt, result in zip(
        rewritten, generate_all(engine, rewritten, [SamplingParams(max_tokens=4)] * 2), strict=True
    ):
        check(model, prompt, result)


def test_new_weights_choose_anew_for_every_token():
    """Requests under way, one of them new by then, are read again: no token keeps the experts of the old weights."""
    model = mixture()
    old = copy.deepcopy(model)
    engine = engine_of(model, max_batch_size=4, max_batch_tokens=30)
    prompts = [numbers(10, seed=i) for i in (5, 5, 6)]

    async def scenario() -> list[Generation]:
        calls = [
            asyncio.create_task(engine.generate(p, SamplingParams(max_tokens=20 + 9 * i, seed=i)))
            for i, p in enumerate(prompts)
        ]
        while engine.stats.generated_tokens < 24:
            await asyncio.sleep(0)
        with torch.no_grad():
            for layer in SPARSE:
                gate = model.model.layers[layer].mlp.gate.weight
                gate.copy_(gate.roll(1, dims=0))
        await engine.resume(1)
        return await asyncio.gather(*calls)

    for prompt, result in zip(prompts, asyncio.run(scenario()), strict=True):
        assert set(result.versions) == {0, 1}
        check(model, prompt, result)
        assert result.routes.tolist() != chosen(old, [*prompt, *result.token_ids])


def test_the_last_part_of_a_stream_has_them_all():
    model = mixture()
    engine = engine_of(model)
    prompt = numbers(10, seed=7)

    async def scenario() -> list[Generation]:
        async with aclosing(engine.stream(prompt, SamplingParams(max_tokens=6, seed=1))) as parts:
            return [part async for part in parts]

    *first, last = asyncio.run(scenario())
    assert first
    assert all(part.routes is None for part in first)
    tokens = [*prompt, *(token for part in (*first, last) for token in part.token_ids)]
    assert last.routes.tolist() == chosen(model, tokens)


def test_what_is_aborted_has_the_experts_of_what_was_read():
    """None where nothing was read: of a request that waits, and of one whose weights have changed since."""
    model = mixture()
    engine = engine_of(model, max_batch_size=1)
    prompt = numbers(10, seed=8)

    async def aborted(*, version: int) -> list[Generation]:
        await engine.resume(0)
        calls = [asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=100))) for _ in range(2)]
        begun = engine.stats.generated_tokens
        while engine.stats.generated_tokens < begun + 7:
            await asyncio.sleep(0)
        await engine.resume(version)
        engine.abort()
        return await asyncio.gather(*calls)

    running, waiting = asyncio.run(aborted(version=0))
    assert running.finish_reason is FinishReason.ABORT
    check(model, prompt, running)
    assert waiting.routes is None
    changed, _ = asyncio.run(aborted(version=1))
    assert len(changed.token_ids) == 7
    assert changed.routes is None


def test_a_model_that_decodes_row_by_row_tells_too():
    model = mixture(attention="eager")
    engine = engine_of(model, max_batch_size=2)
    assert not engine.packed
    prompts = [numbers(5 + 2 * i, seed=i) for i in (0, 0, 1)]
    results = generate_all(engine, prompts, [SamplingParams(max_tokens=6 + i, seed=i) for i in range(3)])
    for prompt, result in zip(prompts, results, strict=True):
        check(model, prompt, result)


def test_replayed_they_bring_the_trainer_nearer_to_the_engine():
    """The engine computes in bf16, the trainer in fp32 with the same weights. A dozen of 816 choices differ, between
    experts that are nearly equal for their router, and not for the token: a log-prob is off by 2.8. With the engine's
    choices the largest distance is 0.14."""
    engine_model, model = mixture(decision=0.05).bfloat16(), mixture()
    model.load_state_dict(engine_model.state_dict())
    prompts = [numbers(12, seed=i) for i in range(8)]
    results = generate_all(engine_of(engine_model), prompts, [SamplingParams(max_tokens=40, seed=i) for i in range(8)])
    ids = [torch.tensor([*prompt, *result.token_ids]) for prompt, result in zip(prompts, results, strict=True)]
    tokens = PackedTokens.from_sequences(
        ids, [torch.arange(52) >= 12] * 8, routes=[torch.from_numpy(result.routes) for result in results]
    )
    sampled_A = torch.tensor([logprob for result in results for logprob in result.logprobs])
    shape = RouteShape(layers=3, experts=6, per_token=3)
    policy = Policy(model, routers=Routers(shape, SPARSE)).eval()
    log = RouteLog(shape)
    with torch.no_grad():
        own_A = policy(tokens.without_routes(), temperature=1.0).logprobs_A
        replayed_A = policy(tokens, temperature=1.0, route_log=log).logprobs_A
    assert log.compared_L.tolist() == [8 * 51, 0, 8 * 51]
    assert 0 < log.differing_L.sum() < 40
    gap, replayed = ((logprobs_A - sampled_A).abs() for logprobs_A in (own_A, replayed_A))
    assert gap.max() > 1.0
    assert replayed.max() < 0.3
    assert replayed.mean() < gap.mean() / 2


def test_many_experts_have_wider_numbers():
    model = mixture(experts=300)
    (result,) = generate_all(engine_of(model), [numbers(9, seed=3)], [SamplingParams(max_tokens=30, seed=1)])
    assert result.routes.dtype == np.int16
    assert result.routes.max() > 255
    check(model, numbers(9, seed=3), result)


def test_reading_leaves_the_routers_as_they_were():
    """An engine that does not tell samples the same, and training forwards meet no hook."""
    model = mixture()
    prompt, params = numbers(9, seed=4), SamplingParams(max_tokens=12, seed=1)
    (told,) = generate_all(engine_of(model), [prompt], [params])
    (silent,) = generate_all(engine_of(model, return_routes=False), [prompt], [params])
    assert (silent.token_ids, silent.logprobs, silent.routes) == (told.token_ids, told.logprobs, None)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_experts_cannot_tell():
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES), attn_implementation=ATTENTION)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no routers"):
        engine_of(model)
