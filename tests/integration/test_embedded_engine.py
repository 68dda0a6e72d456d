"""The embedded engine on tiny models: the same tokens as `model.generate`, whatever the batch does around them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import random
from collections.abc import AsyncGenerator, Coroutine, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_supports import check_supports
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)
from vllm_mixtures import FAMILIES, make_mixture

from openrlhf.models.attention import ATTENTION
from openrlhf.models.packed import PackedAttention
from openrlhf.models.routes import RouteShape
from openrlhf.models.support import examine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.embedded.kv_store import BLOCK, KeptHistories, KVStore, LayerShape, StoredHistory
from openrlhf.rollout.generated_text import GrowingText, StopStrings, decode, eos_token_ids
from openrlhf.types import FinishReason, Generation, SamplingParams, Supports

VOCABULARY = 260
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: a second thread costs more than it does, all the more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(config, *, attention: str = ATTENTION, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if attention != "eager":
        model.set_attn_implementation(attention)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and `<eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def random_prompts(n: int, *, longest: int = 70, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 256) for _ in range(rng.randint(1, longest))] for _ in range(n)]


async def _gather(calls: Sequence[Coroutine]) -> list[Generation]:
    return await asyncio.gather(*calls)


def generate_all(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], params) -> list[Generation]:
    """`params`: one for all, or one each."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    return asyncio.run(_gather([engine.generate(p, s) for p, s in zip(prompts, params, strict=True)]))


@torch.no_grad()
def rescore(model, prompt: Sequence[int], generation: Generation, *, temperature: float = 1.0) -> torch.Tensor:
    """log-probs of the generated tokens by one forward over the whole sequence."""
    logprobs = torch.log_softmax(logits_of(model, prompt, generation) / temperature, -1)
    return logprobs.gather(-1, torch.tensor(generation.token_ids)[:, None]).squeeze(-1)


@torch.no_grad()
def logits_of(model, prompt: Sequence[int], generation: Generation) -> torch.Tensor:
    """float32 [A, V]: those that the generated tokens were sampled by."""
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    plan = PackedAttention(torch.tensor([0, ids.shape[1]], dtype=torch.int32), ids.shape[1])
    logits = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], attention_plan=plan).logits[0]
    return logits.float()[len(prompt) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mixture_writes_what_it_generates_itself(family):
    """gpt-oss has sinks in attention, which a plan cannot express: it decodes with its own cache."""
    model = make_mixture(family, packed=False)
    model.generation_config.eos_token_id = None
    prompts = random_prompts(4, longest=30)
    expected = [
        model.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=6, do_sample=False
        )
        for p in prompts
    ]
    packed = examine(model, native_attention="eager").packed
    assert packed is (family != "gpt_oss")
    engine = EmbeddedEngine(model, make_tokenizer(), max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for prompt, known, generation in zip(prompts, expected, generate_all(engine, prompts, params), strict=True):
        assert generation.token_ids == known[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_generate_on_each_prompt_alone(family):
    """64 prompts of 1 … 70 tokens, 1 … 24 new ones, 20 at a time: rows join, leave and outgrow their pool (at 64)."""
    model = make_model(CONFIGS[family], attention="eager")
    prompts = random_prompts(64)
    rng = random.Random(2)
    limits = [rng.randint(1, 24) for _ in prompts]
    expected = [
        model.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=n, do_sample=False
        )[0, len(p) :].tolist()
        for p, n in zip(prompts, limits, strict=True)
    ]
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, None, max_model_len=128, max_batch_size=20, max_batch_tokens=150)
    results = generate_all(engine, prompts, [SamplingParams(temperature=0, max_tokens=n) for n in limits])
    assert [r.token_ids for r in results] == expected
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.stats.generated_tokens == sum(limits)


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_equal_a_rescore(family):
    model = make_model(CONFIGS[family])
    engine = EmbeddedEngine(model, None, max_model_len=160, max_batch_size=8)
    prompts = random_prompts(12, longest=20)
    for temperature in (1.0, 0.7):
        for prompt, result in zip(
            prompts, generate_all(engine, prompts, SamplingParams(temperature=temperature, max_tokens=70)), strict=True
        ):
            expected = rescore(model, prompt, result, temperature=temperature)
            assert torch.allclose(torch.tensor(result.logprobs), expected, atol=1e-5)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd():
    model = make_model(CONFIGS["qwen2"])
    params = SamplingParams(max_tokens=30, seed=1234, top_p=0.95)
    prompt = [5, 6, 7]
    alone = generate_all(EmbeddedEngine(model, None, max_model_len=128), [prompt], params)[0]
    crowd = [*random_prompts(50, seed=3), prompt, *random_prompts(49, seed=4)]
    others = [SamplingParams(max_tokens=n % 40 + 1) for n in range(99)]
    others.insert(50, params)
    engine = EmbeddedEngine(model, None, max_model_len=128, max_batch_size=16, seed=9)
    among = generate_all(engine, crowd, others)[50]
    assert among.token_ids == alone.token_ids
    assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_samples_of_a_prompt_differ_and_engines_of_equal_seed_agree():
    model = make_model(CONFIGS["qwen2"])

    def run(seed: int) -> list[tuple[int, ...]]:
        engine = EmbeddedEngine(model, None, max_model_len=64, seed=seed)
        return [tuple(r.token_ids) for r in generate_all(engine, [[1, 2, 3]] * 20, SamplingParams(max_tokens=8))]

    assert len(set(run(0))) == 20
    assert run(0) == run(0)
    assert run(0) != run(1)


def test_a_prompt_shared_by_many_is_read_once():
    """10 samples, 4 at a time: the first four share one reading, later ones start from a running sibling's keys."""
    model = make_model(CONFIGS["llama"])
    engine = EmbeddedEngine(model, None, max_model_len=128, max_batch_size=4)
    prompt = random_prompts(1, longest=70, seed=8)[0]
    limits = [3, 9, 5, 7, 8, 4, 6, 9, 2, 5]
    results = generate_all(engine, [prompt] * 10, [SamplingParams(max_tokens=n, seed=i) for i, n in enumerate(limits)])
    assert engine.stats.prompt_tokens == len(prompt)
    for result in results:
        assert torch.allclose(torch.tensor(result.logprobs), rescore(model, prompt, result), atol=1e-5)


def test_requests_under_way_are_read_again_after_the_weights_changed():
    """Every token has the log-prob that the weights of its version give it after all that stands before it. The second
    request starts from what the first has read with the new weights."""
    model = make_model(CONFIGS["qwen2"])
    before = copy.deepcopy(model)
    engine = EmbeddedEngine(model, None, max_model_len=64, max_batch_size=4)
    prompt = [3, 1, 4, 1, 5]

    async def scenario() -> tuple[Generation, Generation]:
        first = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=40, seed=1)))
        while engine.stats.generated_tokens < 10:
            await asyncio.sleep(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await engine.resume(1)
        second = await engine.generate(prompt, SamplingParams(max_tokens=5, seed=2))
        return await first, second

    first, second = asyncio.run(scenario())
    assert engine.stats.prompt_tokens == 5 + 15
    assert first.versions == [0] * 10 + [1] * 30
    assert second.versions == [1] * 5
    assert torch.allclose(torch.tensor(second.logprobs), rescore(model, prompt, second), atol=1e-5)
    expected = torch.cat([rescore(before, prompt, first)[:10], rescore(model, prompt, first)[10:]])
    assert torch.allclose(torch.tensor(first.logprobs), expected, atol=1e-5)


CUTS = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7, "temperature": 0.5},
    "min-p": {"min_p": 0.2},
    "all": {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    "few told": {"top_p": 0.9, "supports": 3},
}


def test_every_token_says_what_it_was_chosen_among():
    """Requests of all kinds in one batch, and of some that ask for nothing or have nothing to say."""
    model = make_model(CONFIGS["qwen2"])
    engine = EmbeddedEngine(model, None, max_model_len=64, max_batch_size=16)
    asked = [SamplingParams(**{"supports": 64, "max_tokens": 12, **cut}) for cut in CUTS.values()]
    silent = [SamplingParams(max_tokens=12, supports=64), SamplingParams(max_tokens=12, top_k=5)]
    prompts = random_prompts(len(asked) + 2, longest=20)
    for prompt, said, params in zip(
        prompts, generate_all(engine, prompts, [*asked, *silent]), [*asked, *silent], strict=True
    ):
        if params in asked:
            check_supports(logits_of(model, prompt, said), said, params)
        else:
            assert said.supports is None


def test_supports_are_those_of_the_weights_that_sampled():
    """Weights that change in the middle: what is read again was sampled from what it was sampled from."""
    model = make_model(CONFIGS["qwen2"])
    before = copy.deepcopy(model)
    engine = EmbeddedEngine(model, None, max_model_len=64, max_batch_size=4)
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=40, seed=1, top_p=0.8, supports=200)

    async def scenario() -> Generation:
        running = asyncio.create_task(engine.generate(prompt, params))
        while engine.stats.generated_tokens < 10:
            await asyncio.sleep(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await engine.resume(1)
        return await running

    said = asyncio.run(scenario())
    assert said.versions == [0] * 10 + [1] * 30
    old, new = logits_of(before, prompt, said)[:10], logits_of(model, prompt, said)[10:]
    check_supports(torch.cat([old, new]), said, params)


def test_reading_again_keeps_to_the_tokens_of_a_step_and_to_who_is_still_there():
    """Three requests of 12 and more tokens, 20 to a step: they go on one after the other. One of them is given up."""
    model = make_model(CONFIGS["qwen2"])
    engine = EmbeddedEngine(model, None, max_model_len=64, max_batch_size=4, max_batch_tokens=20)

    async def scenario() -> list[Generation]:
        asked = [engine.generate([3, 1, 4, i], SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
        tasks = [asyncio.create_task(work) for work in asked]
        while engine.stats.generated_tokens < 24:
            await asyncio.sleep(0)
        await engine.resume(1)
        tasks[1].cancel()
        await engine.resume(2)
        return [await task for task in (tasks[0], tasks[2])]

    for number, result in zip((0, 2), asyncio.run(scenario()), strict=True):
        assert len(result.token_ids) == 30
        assert set(result.versions) == {0, 2}
        assert torch.allclose(torch.tensor(result.logprobs), rescore(model, [3, 1, 4, number], result), atol=1e-5)
    assert engine.num_running == 0


def test_nothing_is_sampled_while_an_engine_is_paused():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=64)

    async def scenario() -> tuple[int, int, Generation]:
        task = asyncio.create_task(engine.generate([3, 1, 4], SamplingParams(max_tokens=30)))
        while engine.stats.generated_tokens < 5:
            await asyncio.sleep(0)
        await engine.pause()
        held = engine.stats.generated_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        after = engine.stats.generated_tokens
        await engine.resume(0)
        return held, after, await task

    held, after, result = asyncio.run(scenario())
    assert held == after
    assert len(result.token_ids) == 30


def test_a_late_request_does_not_wait_for_the_others():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=256, max_batch_size=4)

    async def scenario() -> int:
        early = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_tokens=200)))
        while engine.stats.steps < 5:
            await asyncio.sleep(0)
        before = engine.stats.steps
        await engine.generate([3, 4], SamplingParams(max_tokens=1))
        steps = engine.stats.steps - before
        assert not early.done()
        await early
        return steps

    assert asyncio.run(scenario()) <= 2


def test_finish_reasons_and_the_context_limit():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=20)
    to_the_end, cut = generate_all(engine, [[1] * 15, [1] * 5], [SamplingParams(), SamplingParams(max_tokens=3)])
    assert (len(to_the_end.token_ids), len(cut.token_ids)) == (5, 3)
    assert to_the_end.finish_reason is cut.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="max_model_len"):
        generate_all(engine, [[1] * 20], SamplingParams())
    with pytest.raises(ValueError, match="at least one token"):
        generate_all(engine, [[]], SamplingParams())
    with pytest.raises(ValueError, match="got 260"):
        generate_all(engine, [[1, 260]], SamplingParams())


def test_every_end_of_sequence_id_stops_and_min_tokens_holds_them_off():
    model = make_model(CONFIGS["qwen2"])
    plain = EmbeddedEngine(model, None, max_model_len=64)
    prompt, params = [9, 8, 7], SamplingParams(max_tokens=40, seed=3)
    free = generate_all(plain, [prompt], params)[0]
    early, late = free.token_ids[6], free.token_ids[3]
    model.generation_config.eos_token_id = [early]
    model.config.eos_token_id = late
    try:
        assert eos_token_ids(model, None) == tuple(sorted({early, late}))
        engine = EmbeddedEngine(model, None, max_model_len=64)
        stopped, held = generate_all(engine, [prompt] * 2, [params, params.copy(min_tokens=20)])
    finally:
        model.config.eos_token_id = model.generation_config.eos_token_id = None
    first = min(free.token_ids.index(early), free.token_ids.index(late))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert not {early, late} & set(held.token_ids[:20])
    assert len(held.token_ids) > 20


def test_stop_tokens_end_a_generation_as_end_of_sequence_does():
    tokenizer = make_tokenizer()
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), tokenizer, max_model_len=128)
    prompt, params = [9, 8, 7], SamplingParams(max_tokens=80, seed=3, ignore_eos=True, skip_special_tokens=False)
    free = generate_all(engine, [prompt], params)[0]
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    asked = [
        params.copy(stop_token_ids=[stop]),
        params.copy(stop_token_ids=[stop], include_stop_str_in_output=True),
        params.copy(stop_token_ids=[stop, 3], min_tokens=50),
    ]
    hidden, shown, held = generate_all(engine, [prompt] * 3, asked)
    assert hidden.token_ids == shown.token_ids == free.token_ids[: first + 1]
    assert (hidden.finish_reason, hidden.stop_reason) == (FinishReason.STOP, stop)
    assert hidden.text == decode(tokenizer, free.token_ids[:first], skip_special_tokens=False)
    assert shown.text == decode(tokenizer, free.token_ids[: first + 1], skip_special_tokens=False)
    assert not {stop, 3} & set(held.token_ids[:50])
    with pytest.raises(ValueError, match="stop_token_ids"):
        generate_all(engine, [prompt], params.copy(stop_token_ids=[260]))


def test_end_of_sequence_can_be_ignored_and_its_text_left_out():
    tokenizer = make_tokenizer()
    model = make_model(CONFIGS["llama"])
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 2  # likely enough to come in 100 tokens
    engine = EmbeddedEngine(model, tokenizer, max_model_len=128)
    params = SamplingParams(max_tokens=100, seed=1, skip_special_tokens=False)
    ended, shown, ignored = generate_all(
        engine, [[5]] * 3, [params, params.copy(include_stop_str_in_output=True), params.copy(ignore_eos=True)]
    )
    n = len(ended.token_ids)
    assert ended.token_ids == shown.token_ids == ignored.token_ids[:n]
    assert (ended.token_ids[-1], ended.finish_reason, ended.stop_reason) == (256, FinishReason.STOP, None)
    assert shown.text == ended.text + "<eos>"
    assert len(ignored.token_ids) == 100
    assert "<eos>" in ignored.text


def test_repetition_penalty_equals_generate():
    model = make_model(CONFIGS["qwen2"], attention="eager")
    prompts = random_prompts(6, longest=20)
    expected = [
        model.generate(
            torch.tensor([p]),
            attention_mask=torch.ones(1, len(p), dtype=torch.long),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=1.5,
        )[0, len(p) :].tolist()
        for p in prompts
    ]
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, None, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=1.5)
    assert [r.token_ids for r in generate_all(engine, prompts, params)] == expected
    assert [r.token_ids for r in generate_all(engine, prompts, params.copy(repetition_penalty=1.0))] != expected


def test_values_assigned_later_are_checked_when_they_are_used():
    params = SamplingParams()
    params.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens"):
        generate_all(STREAMING(), [[1]], params)


def test_stop_strings_end_the_text_where_they_first_appear():
    tokenizer = make_tokenizer()
    engine = EmbeddedEngine(make_model(CONFIGS["llama"]), tokenizer, max_model_len=128)
    prompt, params = [40, 41, 42], SamplingParams(max_tokens=60, seed=5)
    free = generate_all(engine, [prompt], params)[0]
    # Two neighbouring printable characters of the free text: a string no single token spells.
    stop = next(free.text[i : i + 2] for i in range(10, 50) if free.text[i : i + 2].isascii())
    asked = [
        params.copy(stop=("never to be seen", stop)),
        params.copy(stop=stop, min_tokens=60),
        params.copy(min_tokens=60),
    ]
    stopped, held, unwatched = generate_all(engine, [prompt] * 3, asked)
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stopped.stop_reason == stop
    assert free.text.startswith(stopped.text + stop)
    assert stop not in stopped.text
    assert held.token_ids == unwatched.token_ids
    with pytest.raises(ValueError, match="tokenizer"):
        generate_all(EmbeddedEngine(engine.model, None, max_model_len=9), [[1]], params.copy(stop="x"))


def test_stop_strings_cross_tokens_and_characters():
    """Fed byte by byte: "né–" has 2- and 3-byte characters; the string is there with the last byte of its last one."""
    tokenizer = make_tokenizer()
    text = "a\ufffdb \U0001f600 né– "
    watch = StopStrings(tokenizer, ("né–", "zz"))
    ids = tokenizer.encode(text)
    hits = [i for i, token in enumerate(ids) if watch.feed(token)]
    assert hits == [len(tokenizer.encode(text[:-1])) - 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.characters(exclude_categories=["Cs"]), st.integers(0, 256)), max_size=20), st.booleans())
def test_text_grows_to_what_one_decoding_gives(pieces, skip_special_tokens):
    """Token by token, each a byte or `<eos>`: whole characters, stray bytes and characters cut in the middle."""
    tokenizer = make_tokenizer()
    ids = [token for piece in pieces for token in (tokenizer.encode(piece) if isinstance(piece, str) else [piece])]
    text = GrowingText(tokenizer, skip_special_tokens=skip_special_tokens)
    certain = ""
    whole = decode(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    for i, token in enumerate(ids):
        certain += text.feed(token)
        assert certain + text.open == decode(tokenizer, ids[: i + 1], skip_special_tokens=skip_special_tokens)
        assert whole.startswith(certain)
        assert len(text.open) < 4


def test_a_special_token_can_be_a_stop_string():
    tokenizer = make_tokenizer()
    watch = StopStrings(tokenizer, ("<eos>",))
    assert not watch.feed(65)
    assert watch.feed(tokenizer.eos_token_id)


def test_bytes_that_never_become_characters_do_not_hold_the_text_back():
    tokenizer = make_tokenizer()
    continuation = tokenizer.convert_tokens_to_ids(pre_tokenizers.ByteLevel().pre_tokenize_str("é")[0][0][1])
    watch = StopStrings(tokenizer, ("ok",))
    for _ in range(200):
        assert not watch.feed(continuation)
        assert len(watch._text._ids) <= 8
    o, k = tokenizer.encode("ok")
    assert [watch.feed(o), watch.feed(k)] == [False, True]


STREAMING = functools.cache(
    lambda: EmbeddedEngine(make_model(CONFIGS["llama"]), make_tokenizer(), max_model_len=128, max_batch_size=4)
)


async def collect(parts: AsyncGenerator[Generation]) -> list[Generation]:
    return [part async for part in parts]


def joined(parts: Sequence[Generation]) -> Generation:
    """The parts as one generation; all but the last must leave the reason open."""
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    return Generation(
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=None if parts[-1].logprobs is None else [value for part in parts for value in part.logprobs],
        versions=[version for part in parts for version in part.versions],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        text="".join(part.text for part in parts),
        supports=Supports.joined([(part.supports, len(part.token_ids)) for part in parts]),
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_stream_is_generate_in_parts(data):
    """Whatever ends it. Stop strings are cut from the text that comes without them, so that they are met."""
    engine = STREAMING()
    params = SamplingParams(
        seed=data.draw(st.integers(0, 5), label="seed"),
        max_tokens=data.draw(st.integers(1, 40)),
        skip_special_tokens=data.draw(st.booleans()),
        include_stop_str_in_output=data.draw(st.booleans()),
        ignore_eos=data.draw(st.booleans()),
        logprobs=data.draw(st.sampled_from([True, None])),
        top_k=data.draw(st.sampled_from([-1, 20])),
        supports=data.draw(st.sampled_from([0, 20])),
    )
    free = generate_all(engine, [[40, 41, 42]], params)[0]
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, max(0, len(free.text) - 1)))
        params.stop.append(free.text[start : start + data.draw(st.integers(1, 6))] or "<eos>")
    params.min_tokens = data.draw(st.sampled_from([0, 10]))
    params.stop_token_ids = data.draw(st.lists(st.sampled_from(free.token_ids), max_size=1))

    whole = generate_all(engine, [[40, 41, 42]], params)[0]
    parts = asyncio.run(collect(engine.stream([40, 41, 42], params)))
    assert joined(parts) == whole
    assert (whole.supports is None) is (params.top_k == -1 or not params.supports)
    assert whole.supports is None or joined(parts).supports.tolist() == whole.supports.tolist()
    assert [len(part.token_ids) for part in parts] == [1] * len(whole.token_ids)


def test_a_part_is_there_before_the_next_token_is_sampled():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=64)

    async def scenario() -> list[int]:
        sizes = []
        async for part in engine.stream([1, 2], SamplingParams(max_tokens=20)):
            sizes.append(len(part.token_ids))
            assert engine.stats.generated_tokens == sum(sizes)
            if sum(sizes) == 10:  # whoever takes its time finds everything since in the next part
                while engine.stats.generated_tokens < 15:
                    await asyncio.sleep(0)
        return sizes

    sizes = asyncio.run(scenario())
    assert sizes[:10] == [1] * 10
    assert sizes[10] >= 5
    assert sum(sizes) == 20


def test_closing_a_stream_frees_the_place():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=512, max_batch_size=1)

    async def scenario() -> int:
        async with contextlib.aclosing(engine.stream([1], SamplingParams(max_tokens=400))) as parts:
            async for _ in parts:
                if engine.stats.generated_tokens == 5:
                    break
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        await engine.generate([2], SamplingParams(max_tokens=2))
        return engine.stats.generated_tokens

    assert asyncio.run(scenario()) == 7


async def converse(engine: EmbeddedEngine, seed: int, *, turns: int = 4, temperature: float = 1.0):
    """[(prompt, generation)] of an episode whose every turn is answered by 1 … 40 random tokens."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1, 256) for _ in range(rng.randint(10, 40))]
    played = []
    for turn in range(turns):
        params = SamplingParams(temperature=temperature, max_tokens=rng.randint(1, 20), seed=100 * seed + turn)
        generation = await engine.generate(tokens, params)
        played.append((list(tokens), generation))
        tokens = [*tokens, *generation.token_ids, *(rng.randrange(1, 256) for _ in range(rng.randint(1, 40)))]
    return played


def play(engine: EmbeddedEngine, seeds: Sequence[int], **kwargs) -> list:
    return asyncio.run(_gather([converse(engine, seed, **kwargs) for seed in seeds]))


@pytest.mark.parametrize("family", CONFIGS)
def test_each_turn_reads_only_what_is_new(family):
    """A turn's prompt is known up to the token before the last one sampled, which was never fed."""
    model = make_model(CONFIGS[family])
    engine = EmbeddedEngine(model, None, max_model_len=300)
    (played,) = play(engine, [1])
    known = [len(prompt) + len(generation.token_ids) - 1 for prompt, generation in played[:-1]]
    assert engine.stats.reused_tokens == sum(known)
    assert engine.stats.prompt_tokens == sum(len(prompt) for prompt, _ in played) - sum(known)
    for prompt, generation in played:
        assert torch.allclose(torch.tensor(generation.logprobs), rescore(model, prompt, generation), atol=1e-5)
    assert len(engine._decoder.store.kept) == 1


@pytest.mark.parametrize("family", CONFIGS)
def test_conversations_are_the_same_with_and_without_reuse(family):
    """16 of them, 6 at a time: known beginnings of all lengths are extended in one step, beside new and running rows."""
    model = make_model(CONFIGS[family])
    engine, forgetful = (
        EmbeddedEngine(model, None, max_model_len=300, max_batch_size=6, max_batch_tokens=200, reuse_prefixes=reuse)
        for reuse in (True, False)
    )
    reused, read = play(engine, range(16)), play(forgetful, range(16))
    for ours, theirs in zip(reused, read, strict=True):
        for (prompt, mine), (same, plain) in zip(ours, theirs, strict=True):
            assert (prompt, mine.token_ids) == (same, plain.token_ids)
            assert mine.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    asked = sum(len(prompt) for conversation in read for prompt, _ in conversation)
    assert forgetful.stats.prompt_tokens == asked
    assert forgetful.stats.reused_tokens == 0
    assert engine.stats.prompt_tokens + engine.stats.reused_tokens == asked
    assert engine.stats.reused_tokens > asked / 3


def test_greedy_turns_equal_generate():
    model = make_model(CONFIGS["gemma3"])
    played = play(EmbeddedEngine(model, None, max_model_len=300), range(3), temperature=0.0)
    model.set_attn_implementation("eager")
    for prompt, generation in [turn for conversation in played for turn in conversation]:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(generation.token_ids), do_sample=False
        )
        assert generation.token_ids == whole[0, len(prompt) :].tolist()


def test_a_history_can_be_continued_in_many_ways():
    """Four siblings of one continuation share its reading; other continuations, and a rewritten end, start from it too."""
    model = make_model(CONFIGS["llama"])
    engine = EmbeddedEngine(model, None, max_model_len=128, max_batch_size=4)
    prompt = random_prompts(1, longest=70, seed=8)[0][:30]
    said = generate_all(engine, [prompt], SamplingParams(max_tokens=11, seed=1))[0].token_ids
    history = [*prompt, *said]
    after = [[*history, 7, 7, 7]] * 4 + [[*history, 8], [*history, 9, 9], [*history[:35], 1, 2, 3], history]
    results = generate_all(engine, after, [SamplingParams(max_tokens=6, seed=i) for i in range(len(after))])
    for begun, result in zip(after, results, strict=True):
        assert torch.allclose(torch.tensor(result.logprobs), rescore(model, begun, result), atol=1e-5)
    # 30 the first time; then 3 new ones and the last one said, which was sampled but not read. When the other four get a
    # place, siblings have finished, which have read the whole history: 1, 2 and 3 new ones, and the last to predict from.
    assert engine.stats.prompt_tokens == 30 + 4 + 1 + 2 + 3 + 1


def test_nothing_is_reused_after_the_weights_changed():
    model = make_model(CONFIGS["qwen2"])
    engine = EmbeddedEngine(model, None, max_model_len=128)
    prompt = list(range(1, 21))

    async def scenario() -> tuple[list[int], Generation]:
        first = await engine.generate(prompt, SamplingParams(max_tokens=9))
        across = asyncio.create_task(engine.generate([30, *prompt], SamplingParams(max_tokens=40)))
        while engine.stats.generated_tokens < 20:
            await asyncio.sleep(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        await engine.resume(1)
        await across
        begun = [*prompt, *first.token_ids, 5, 6]
        return begun, await engine.generate(begun, SamplingParams(max_tokens=5))

    begun, second = asyncio.run(scenario())
    assert engine.stats.reused_tokens == 0
    assert torch.allclose(torch.tensor(second.logprobs), rescore(model, begun, second), atol=1e-5)


def test_kept_histories_stay_within_the_memory_of_the_running():
    """Two rows at a time, twenty conversations that take turns: some are remembered, and the others read again."""
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=300, max_batch_size=2)
    store = engine._decoder.store
    play(engine, range(20))
    assert 0 < store.kept.num_bytes <= store.num_bytes
    assert store.kept.num_bytes == sum(h.num_bytes for h in store.kept._histories.values())
    asked = engine.stats.prompt_tokens + engine.stats.reused_tokens
    assert 0 < engine.stats.reused_tokens < asked
    engine.release()
    assert (len(store.kept), store.kept.num_bytes, store.num_bytes) == (0, 0, 0)


def test_kept_histories_go_when_a_step_needs_their_memory():
    model = make_model(CONFIGS["qwen2"])
    engine = EmbeddedEngine(model, None, max_model_len=128)
    prompt = list(range(1, 21))
    expected = generate_all(engine, [prompt], SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    assert len(engine._decoder.store.kept) == 1

    def out_of_memory(*args) -> None:
        if len(engine._decoder.store.kept):
            raise torch.OutOfMemoryError("no room beside the kept histories")

    hook = model.model.layers[1].register_forward_pre_hook(out_of_memory)
    result = generate_all(engine, [[*prompt, *expected[:3]]], SamplingParams(temperature=0, max_tokens=3))[0]
    hook.remove()
    assert result.token_ids == expected[3:]


def test_cancelling_frees_the_place():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=512, max_batch_size=2)

    async def scenario() -> Generation:
        calls = [asyncio.create_task(engine.generate([i], SamplingParams(max_tokens=400))) for i in (1, 2, 3)]
        while engine.num_running < 2:
            await asyncio.sleep(0)
        assert engine.num_waiting == 1
        calls[0].cancel()  # a running one
        calls[2].cancel()  # a waiting one
        await asyncio.sleep(0)
        assert (engine.num_running, engine.num_waiting) == (1, 0)
        quick = await engine.generate([4], SamplingParams(max_tokens=2))
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return quick

    assert len(asyncio.run(scenario()).token_ids) == 2
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_abort_returns_what_there_is():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=512, max_batch_size=1)

    async def scenario() -> list[Generation]:
        calls = [asyncio.create_task(engine.generate([i], SamplingParams(max_tokens=400))) for i in (1, 2)]
        while engine.stats.generated_tokens < 7:
            await asyncio.sleep(0)
        engine.abort()
        return await asyncio.gather(*calls)

    running, waiting = asyncio.run(scenario())
    assert (len(running.token_ids), len(waiting.token_ids)) == (7, 0)
    assert running.finish_reason is waiting.finish_reason is FinishReason.ABORT
    assert engine.num_running == 0


def test_an_error_fails_every_call_and_the_engine_recovers():
    model = make_model(CONFIGS["qwen2"])
    engine = EmbeddedEngine(model, None, max_model_len=64, max_batch_size=2)
    expected = generate_all(engine, [[1, 2]], SamplingParams(temperature=0, max_tokens=5))[0].token_ids

    def explode(*args):
        raise RuntimeError("broken layer")

    async def scenario() -> list:
        calls = [asyncio.create_task(engine.generate([i], SamplingParams(max_tokens=50))) for i in (1, 2, 3)]
        while engine.num_running < 2:
            await asyncio.sleep(0)
        hook = model.model.layers[1].register_forward_pre_hook(explode)
        calls.append(asyncio.create_task(collect(engine.stream([4], SamplingParams(max_tokens=50)))))
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=30)
        hook.remove()
        return results

    assert [str(error) for error in asyncio.run(scenario())] == ["broken layer"] * 4
    assert generate_all(engine, [[1, 2]], SamplingParams(temperature=0, max_tokens=5))[0].token_ids == expected


def test_event_loops_may_follow_one_another_even_when_one_broke_off():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=512, max_batch_size=2)
    params = SamplingParams(temperature=0, max_tokens=6)
    first = generate_all(engine, [[1, 2, 3]], params)[0]

    async def broken_off() -> None:
        for i in range(3):
            task = asyncio.create_task(engine.generate([i + 1], SamplingParams(max_tokens=500)))
        while engine.num_running < 2:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(broken_off())
    assert generate_all(engine, [[1, 2, 3]], params)[0].token_ids == first.token_ids
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_training_goes_on_with_the_same_module():
    """Generation leaves flags as they were and weights fit for backward; what it samples next follows the update."""
    model = make_model(CONFIGS["qwen2"])
    engine = EmbeddedEngine(model, None, max_model_len=64)
    model.train()
    model.model.layers[0].eval()
    generate_all(engine, [[1, 2, 3]], SamplingParams(max_tokens=4))
    assert model.training
    assert model.model.layers[1].mlp.training
    assert not model.model.layers[0].mlp.training

    ids = torch.tensor([[1, 2, 3, 4]])
    plan = PackedAttention(torch.tensor([0, 4], dtype=torch.int32), 4)
    model(input_ids=ids, position_ids=torch.arange(4)[None], attention_plan=plan).logits.logsumexp(-1).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-1e-2)
    result = generate_all(engine, [[1, 2, 3]], SamplingParams(max_tokens=4))[0]
    model.eval()
    assert torch.allclose(torch.tensor(result.logprobs), rescore(model, [1, 2, 3], result), atol=1e-5)


def test_log_probs_only_when_asked_for():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=64)
    with_them, without = generate_all(
        engine, [[1], [1]], [SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=3, seed=1, logprobs=False)]
    )
    assert with_them.token_ids == without.token_ids
    assert len(with_them.logprobs) == 3
    assert without.logprobs is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_of_16_bits_are_near_a_rescore(dtype):
    model = make_model(CONFIGS["llama"]).to(dtype)
    engine = EmbeddedEngine(model, None, max_model_len=64)
    prompts = random_prompts(4, longest=10)
    for prompt, result in zip(prompts, generate_all(engine, prompts, SamplingParams(max_tokens=30)), strict=True):
        expected = rescore(model, prompt, result)
        assert (torch.tensor(result.logprobs) - expected).abs().median() < 0.1


def test_a_model_no_plan_can_express_falls_back_to_its_own_cache():
    """Gemma 2 caps its attention scores: natively loaded it runs row by row, loaded for plans it is refused."""
    config = Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=8, attn_logit_softcapping=5.0)
    model = make_model(config, attention="eager")
    prompts = random_prompts(5, longest=12)
    expected = [
        model.generate(
            torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), max_new_tokens=9, do_sample=False
        )[0, len(p) :].tolist()
        for p in prompts
    ]
    engine = EmbeddedEngine(model, None, max_model_len=64, max_batch_size=3)
    assert not engine.packed
    results = generate_all(engine, prompts, SamplingParams(temperature=0, max_tokens=9))
    assert [r.token_ids for r in results] == expected
    again = generate_all(engine, [prompts[0]] * 2, SamplingParams(temperature=0, max_tokens=9))
    assert [r.token_ids for r in again] == [expected[0]] * 2
    (played,) = play(EmbeddedEngine(model, None, max_model_len=300), [1], turns=2)
    assert [len(generation.token_ids) > 0 for _, generation in played] == [True, True]

    model.set_attn_implementation(ATTENTION)
    with pytest.raises((ValueError, NotImplementedError), match="Gemma2"):
        EmbeddedEngine(model, None, max_model_len=64)


def test_a_rotary_embedding_that_depends_on_the_batch_is_refused():
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="dynamic"):
        EmbeddedEngine(make_model(config), None, max_model_len=64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["place", "fork", "remove", "grow"]), st.integers(0, 2**20)), max_size=60))
def test_the_store_keeps_every_history_whatever_moves(operations):
    """Rows come, fork, leave in pairs and outgrow pools of 64, 128 and 256; what each has stored stays readable."""
    store = KVStore(
        {0: LayerShape(1, 1, 1)},
        max_rows=12,
        max_length=256,
        dtype=torch.float32,
        device=torch.device("cpu"),
        routes=RouteShape(layers=1, experts=2**15, per_token=1),
    )
    histories: dict[int, list[float]] = {}
    numbers = iter(range(1, 10**6))

    def write(row: int, position: int, number: float) -> None:
        pool, slot = store.slot(row)
        for cache in (pool.keys[0], pool.values[0], pool.routes[0]):
            cache[slot, 0, position, 0] = number

    for operation, choice in operations:
        free = [row for row in range(12) if row not in histories]
        if operation == "place" and free:
            histories[free[0]] = [float(next(numbers)) for _ in range(choice % 200 + 1)]
            store.place([free[0]], length=len(histories[free[0]]))
            for position, number in enumerate(histories[free[0]]):
                write(free[0], position, number)
        elif operation == "fork" and free and histories:
            source = sorted(histories)[choice % len(histories)]
            length = len(histories[source]) // 2
            store.place([free[0]], length=length)
            store.copy(source, [free[0]], length=length)
            histories[free[0]] = histories[source][:length]
        elif operation == "remove" and histories:
            gone = random.Random(choice).sample(sorted(histories), min(2, len(histories)))
            store.remove(gone)
            for row in gone:
                del histories[row]
        elif operation == "grow":
            for _ in range(choice % 40):
                store.remove([row for row in histories if len(histories[row]) == 256])
                histories = {row: history for row, history in histories.items() if len(history) < 256}
                store.make_room()
                for row, history in histories.items():
                    write(row, len(history), float(len(history)))
                    history.append(float(len(history)))
                    store.lengths[row] += 1
        for row, history in histories.items():
            pool, slot = store.slot(row)
            assert pool.rows[slot] == row
            assert len(history) <= pool.capacity
            assert pool.keys[0][slot, 0, : len(history), 0].tolist() == history
            assert pool.values[0][slot, 0, : len(history), 0].tolist() == history
        assert [routes.ravel().tolist() for routes in store.routes(list(histories))] == list(histories.values())
    assert sum(len(pool.rows) for pool in store.pools) == len(histories)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple), max_size=12), st.integers(0, 120))
def test_kept_histories_are_found_by_their_longest_common_beginning(sequences, budget):
    """Tokens 0 and 1, so that beginnings are shared; a byte per token. Where nothing is dropped, nothing is missed."""
    kept, dropped = KeptHistories(), False
    for token_ids in sequences:
        before = {history.tokens for history in kept._histories.values()}
        if kept.make_room(token_ids, len(token_ids), budget=budget):
            kept.add(StoredHistory(token_ids, (), len(token_ids)))
        present = {history.tokens for history in kept._histories.values()}
        assert kept.num_bytes == sum(map(len, present)) <= budget
        dropped |= any(not any(p[: len(b)] == b for p in present) for b in before)
        for asked in sequences:
            known = kept.find(asked)
            common = max((common_length(asked, history) for history in present), default=0)
            if known is not None:
                assert known.history.tokens[: known.length] == asked[: known.length]
            if not dropped:
                assert (known.length if known else 0) >= common // BLOCK * BLOCK
    assert set(kept._by_block.values()) <= set(kept._histories)


def test_a_history_is_kept_once_though_another_has_the_same_blocks():
    """They differ behind their last whole block, and the newer one is found for both."""
    one, other = ((*range(BLOCK), last) for last in (1, 2))
    kept = KeptHistories()
    for tokens in (one, other):
        assert kept.make_room(tokens, len(tokens), budget=100)
        kept.add(StoredHistory(tokens, (), len(tokens)))
    assert not kept.make_room(one, len(one), budget=100)
    assert not kept.make_room(other, len(other), budget=100)


def test_a_wanted_history_is_not_dropped_for_another():
    kept = KeptHistories()
    for first in (1, 2):
        assert kept.make_room((first,) * 10, 10, budget=25)
        kept.add(StoredHistory((first,) * 10, (), 10))
    oldest = kept.find((1,) * 10).number
    kept.find((2,) * 10)
    assert not kept.make_room((3,) * 20, 20, budget=25, wanted={oldest})
    assert kept.make_room((3,) * 15, 15, budget=25, wanted={oldest})
    assert (kept.find((1,) * 10).number, kept.find((2,) * 10)) == (oldest, None)


def test_kept_histories_make_room_for_rows():
    """A store with memory for 8 + 8 slots of 64 tokens, 4 bytes each for keys and values: the second pool needs it all."""

    class SmallStore(KVStore):
        def _allocate(self, pool, slots: int) -> None:
            if self.num_bytes + self.kept.num_bytes + slots * pool.capacity * 8 > 3 * 8 * 64 * 8:
                raise RuntimeError("out of memory")
            super()._allocate(pool, slots)

    store = SmallStore(
        {0: LayerShape(1, 1, 1)}, max_rows=16, max_length=256, dtype=torch.float32, device=torch.device("cpu")
    )
    store.place([0], length=40)
    store.keep({0: tuple(range(40))})
    assert store.kept.find(tuple(range(20))).length == 20
    store.place([1], length=100)
    assert store.kept.find(tuple(range(20))) is None
    with pytest.raises(MemoryError, match="max_batch_size"):
        store.place([2], length=200)


def test_the_store_grows_with_need_and_is_given_back():
    engine = EmbeddedEngine(make_model(CONFIGS["qwen2"]), None, max_model_len=512, max_batch_size=64)
    store = engine._decoder.store
    assert store.num_bytes == 0
    generate_all(engine, [[1], [2]], SamplingParams(max_tokens=3))
    # 8 slots of 64 tokens; a token keeps 2 layers × 2 heads × 8 dimensions × (key, value) in fp32 = 256 bytes.
    assert store.num_bytes == 8 * 64 * 256
    engine.release()
    assert store.num_bytes == 0
    assert len(generate_all(engine, [[1]], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_a_store_that_does_not_fit_says_what_to_change():
    store = KVStore(
        {0: LayerShape(8, 128, 128)}, max_rows=10**9, max_length=2**20, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(MemoryError, match="max_batch_size"):
        store.place(range(10**6), length=2**20 - 1)
