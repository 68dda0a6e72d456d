"""Images in the embedded engine: what it samples is what transformers' own forward of the whole sequence says."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vision_models import KINDS, image, write_vision_model

from openrlhf.models.attention import ATTENTION
from openrlhf.models.image_processor import ExpandedText, ImageProcessor, unsampled_tokens
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import FinishReason, Generation, ImageInput, PlacedImage, SamplingParams

CASES = {
    "no image": ("what is it?", []),
    "one": ("is @ red?", [(1, 24, 16)]),
    "three": ("@ and @ or @ is?", [(1, 24, 16), (2, 40, 16), (3, 16, 32)]),
    "side by side": ("see @@ now", [(4, 24, 24), (5, 16, 16)]),
    "twice the same": ("@ is @ or @?", [(1, 24, 16), (1, 24, 16), (2, 24, 16)]),
    "first": ("@?", [(6, 32, 16)]),
    "last": ("look at *", [(7, 24, 40)]),
}
"""Text with places of images: @ in the marks of a chat template, * the image alone. (seed, width, height) of each."""
CLOSE = {torch.float64: 2e-6, torch.float32: 5e-5}
"""By what the model computes in. Log-probs are float32. In float32 these random models are 2e-5 from their own results
in float64, on any side; an image in a wrong place, or with wrong positions, is off by 1e-2 and more."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Family:
    """One of the small models, as transformers runs it."""

    tokenizer: Any
    processor: ImageProcessor
    native: Any
    """In float64."""

    def in_float32(self) -> Family:
        return dataclasses.replace(self, native=copy.deepcopy(self.native).float())

    def model(self, *, packed: bool = True) -> Any:
        """A copy for an engine."""
        model = copy.deepcopy(self.native)
        if packed:
            model.set_attn_implementation({"text_config": ATTENTION})
        return model

    def engine(self, *, packed: bool = True, **kwargs: Any) -> EmbeddedEngine:
        return EmbeddedEngine(self.model(packed=packed), self.tokenizer, max_model_len=400, **kwargs)

    def prompt(self, text: str, images: Sequence[tuple[int, int, int]] = ()) -> ExpandedText:
        mark = self.tokenizer.chat_template.split("{%- if item.type == 'image' %}")[1].split("{%")[0]
        text = text.replace("@", mark).replace("*", self.processor.image_token)
        prepared = [self.processor.prepare(image(seed, width=width, height=height)) for seed, width, height in images]
        return self.processor.expand(text, prepared)


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory) -> Family:
    folder = write_vision_model(request.param, tmp_path_factory.mktemp(request.param))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = ImageProcessor.load(folder, tokenizer)
    assert processor is not None
    native = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    return Family(tokenizer, processor, native.eval())


@torch.no_grad()
def own_logits(model: Any, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> torch.Tensor:
    """[T, V]: of transformers' own forward, with the tokens that are never sampled taken out."""
    ids = torch.tensor([token_ids])
    inputs = {}
    for name in images[0].image.tensors if images else ():
        inputs[name] = torch.cat([placed.image.tensors[name] for placed in images])
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    logits[:, list(unsampled_tokens(model.config))] = float("-inf")
    return logits


def assert_is_own(model: Any, prompt: ExpandedText, result: Generation, *, greedy: bool = False) -> None:
    start = len(prompt.token_ids)
    logits = own_logits(model, [*prompt.token_ids, *result.token_ids], prompt.images)[start - 1 : -1]
    sampled = torch.tensor(result.token_ids)
    if greedy:
        assert torch.equal(logits.argmax(-1), sampled)
    expected = logits.log_softmax(-1).gather(-1, sampled[:, None]).squeeze(-1)
    assert result.logprobs == pytest.approx(expected.tolist(), rel=0, abs=CLOSE[logits.dtype])


async def _gather(calls: Sequence[Coroutine]) -> list[Generation]:
    return await asyncio.gather(*calls)


def generate_all(
    engine: EmbeddedEngine, prompts: Sequence[ExpandedText], params: SamplingParams | Sequence[SamplingParams]
) -> list[Generation]:
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    calls = [engine.generate(p.token_ids, s, p.images) for p, s in zip(prompts, params, strict=True)]
    return asyncio.run(_gather(calls))


def encoded(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of the images that the engine's tower is given from now on."""
    digests: list[str] = []
    own: Callable = engine._images._add

    def add(images: Sequence[ImageInput]) -> None:
        digests.extend(image.digest for image in images)
        own(images)

    monkeypatch.setattr(engine._images, "_add", add)
    return digests


@pytest.mark.parametrize(("packed", "dtype"), [(True, "float64"), (False, "float64"), (True, "float32")])
def test_greedy_tokens_and_log_probs_are_transformers_own(family, packed, dtype):
    """Each prompt alone, and then all at once, four at a time: rows of all kinds join, leave and go on together."""
    family = family.in_float32() if dtype == "float32" else family
    prompts = [family.prompt(text, images) for text, images in CASES.values()]
    alone = [generate_all(family.engine(packed=packed), [prompt], GREEDY)[0] for prompt in prompts]
    for prompt, result in zip(prompts, alone, strict=True):
        assert len(result.token_ids) == GREEDY.max_tokens
        assert_is_own(family.native, prompt, result, greedy=True)
    crowd = family.engine(packed=packed, max_batch_size=4, max_batch_tokens=60)
    together = generate_all(crowd, prompts, GREEDY)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    for prompt, result in zip(prompts, together, strict=True):
        assert_is_own(family.native, prompt, result)


def test_samples_of_a_prompt_encode_its_images_once(family, monkeypatch):
    """Ten samples, four at a time: some read the prompt together, others start from the keys of one that runs, in rows
    that text had before."""
    engine = family.engine(max_batch_size=4)
    digests = encoded(engine, monkeypatch)
    prompt, text = family.prompt(*CASES["twice the same"]), family.prompt(*CASES["no image"])
    prompts = [prompt, text, text, *[prompt] * 9]
    limits = [9, 2, 3, 9, 5, 7, 8, 4, 6, 9, 2, 5]
    params = [_sampled(limit, seed=i) for i, limit in enumerate(limits)]
    for asked, result in zip(prompts, generate_all(engine, prompts, params), strict=True):
        assert_is_own(family.native, asked, result)
    assert sorted(digests) == sorted({placed.image.digest for placed in prompt.images})
    assert engine.stats.prompt_tokens == len(prompt.token_ids) + len(text.token_ids)


def test_samples_of_a_prompt_that_ends_with_its_image(family, monkeypatch):
    """The last token is no token that could be fed by its id: who comes later reads the image again, not encoded again,
    after a beginning that a finished sample has left."""
    engine = family.engine(max_batch_size=2)
    digests = encoded(engine, monkeypatch)
    prompt = family.prompt(*CASES["last"])
    params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (2, 6, 3, 5, 4)]
    for result in generate_all(engine, [prompt] * 5, params):
        assert_is_own(family.native, prompt, result)
    assert len(digests) == 1
    # Never a part of the image.
    assert engine.stats.reused_tokens in [n * prompt.images[0].start for n in (1, 2, 3)]


@pytest.mark.parametrize("reuse", [True, False])
def test_a_later_turn_with_a_further_image_reads_only_the_rest(family, monkeypatch, reuse):
    engine = family.engine(reuse_prefixes=reuse)
    digests = encoded(engine, monkeypatch)
    turns = [("@ is?", [(1, 24, 16)]), (" and @ or", [(2, 40, 24)]), ("?", []), ("*", [(3, 16, 16)]), ("!!", [])]
    tokens: list[int] = []
    placed: list[PlacedImage] = []
    read, known = 0, 0
    for number, (text, images) in enumerate(turns):
        new = family.prompt(text, images)
        placed += [PlacedImage(len(tokens) + start, one) for start, one in new.images]
        tokens += new.token_ids
        prompt = ExpandedText(list(tokens), tuple(placed))
        (result,) = generate_all(engine, [prompt], SamplingParams(max_tokens=4 + number, ignore_eos=True, seed=number))
        assert_is_own(family.native, prompt, result)
        # The last token of a turn was sampled, and never read.
        assert engine.stats.prompt_tokens == read + len(tokens) - (known if reuse else 0)
        read, known = engine.stats.prompt_tokens, len(tokens) + len(result.token_ids) - 1
        tokens += result.token_ids
    assert len(digests) == 3


def test_a_push_in_the_middle_reads_again_with_new_features(family, monkeypatch):
    """Each token has the log-prob that the weights of its version give it after all before it, the tower's included. A
    request that comes later starts from what those under way have read with the new weights."""
    engine, before, after = family.engine(), family.native, copy.deepcopy(family.native)
    _change(after)
    digests = encoded(engine, monkeypatch)
    prompts = [family.prompt(*CASES[name]) for name in ("three", "no image", "last")]

    async def play() -> tuple[list[Generation], Generation]:
        calls = (engine.generate(p.token_ids, _sampled(20, seed=i), p.images) for i, p in enumerate(prompts))
        tasks = [asyncio.create_task(call) for call in calls]
        while engine.stats.generated_tokens < 24:
            await asyncio.sleep(0)
        await engine.pause()
        _change(engine.model)
        await engine.resume(1)
        later = engine.generate(prompts[0].token_ids, _sampled(5, seed=9), prompts[0].images)
        return await asyncio.gather(*tasks), await later

    across, later = asyncio.run(play())
    for prompt, result in zip(prompts, across, strict=True):
        assert result.versions == [0] * 8 + [1] * 12
        assert_is_own(before, prompt, _part(result, slice(8)))
        read_again = ExpandedText([*prompt.token_ids, *result.token_ids[:8]], prompt.images)
        assert_is_own(after, read_again, _part(result, slice(8, None)))
    assert_is_own(after, prompts[0], later)
    assert len(digests) == 2 * len(set(digests)) == 2 * 4


def _part(whole: Generation, tokens: slice) -> Generation:
    return Generation(
        token_ids=whole.token_ids[tokens],
        logprobs=whole.logprobs[tokens],
        versions=whole.versions[tokens],
        finish_reason=None,
    )


def _sampled(max_tokens: int, *, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


@torch.no_grad()
def _change(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(model.named_parameters()):
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.05)


@pytest.mark.parametrize("frozen", [True, False])
def test_features_outlive_a_push_where_the_tower_is_frozen(family, monkeypatch, frozen):
    engine = family.engine(frozen_tower=frozen)
    digests = encoded(engine, monkeypatch)
    prompt = family.prompt(*CASES["one"])
    generate_all(engine, [prompt], GREEDY)
    assert len(engine._images) == 1
    asyncio.run(engine.resume(1))
    assert len(engine._images) == int(frozen)
    (result,) = generate_all(engine, [prompt], GREEDY)
    assert_is_own(family.native, prompt, result, greedy=True)
    assert len(digests) == (1 if frozen else 2)


def test_features_go_with_sleep_and_release(family):
    engine = family.engine(frozen_tower=True)
    prompt = family.prompt(*CASES["three"])

    async def play() -> None:
        await engine.generate(prompt.token_ids, GREEDY, prompt.images)
        assert (len(engine._images), engine._images.num_bytes > 0) == (3, True)
        await engine.sleep()
        assert (len(engine._images), engine._images.num_bytes) == (0, 0)
        await engine.resume(1)
        await engine.generate(prompt.token_ids, GREEDY, prompt.images)
        engine.release()
        assert (len(engine._images), engine._images.num_bytes) == (0, 0)

    asyncio.run(play())


def test_features_stay_within_their_memory_and_the_least_recently_used_go(family, monkeypatch):
    """Room for two images of three: a, b, again a, c: b goes. Three in one prompt are there together all the same."""
    texts = [family.prompt("is @?", [(seed, 24, 16)]) for seed in (1, 2, 3)]
    measured = family.engine()
    generate_all(measured, texts[:1], GREEDY)
    engine = family.engine(max_feature_bytes=2 * measured._images.num_bytes, reuse_prefixes=False)
    digests = encoded(engine, monkeypatch)
    a, b, c = texts
    for prompt in (a, b, a, c, a, b):
        generate_all(engine, [prompt], GREEDY)
        assert len(engine._images) <= 2
    seen = [prompt.images[0].image.digest for prompt in (a, b, c, b)]
    assert digests == seen
    prompt = family.prompt("@@@?", [(seed, 24, 16) for seed in (4, 5, 6)])
    (result,) = generate_all(engine, [prompt], GREEDY)
    assert_is_own(family.native, prompt, result, greedy=True)
    assert engine._images.num_bytes == 2 * measured._images.num_bytes


def test_the_same_ids_with_other_pixels_are_another_prompt(family):
    """At once, one after the other, and as a later turn. The first image is the same, so the tokens before the second
    image may be reused, and no more."""
    engine = family.engine()
    one, other = (family.prompt("abc @ is @ so?", [(1, 24, 16), (seed, 24, 16)]) for seed in (2, 3))
    assert one.token_ids == other.token_ids
    together = generate_all(engine, [one, other, one, other], GREEDY)
    for prompt, result in zip((one, other, one, other), together, strict=True):
        assert_is_own(family.native, prompt, result, greedy=True)
    assert engine.stats.prompt_tokens == 2 * len(one.token_ids)
    assert together[0].token_ids != together[1].token_ids

    third = family.prompt("abc @ is @ so?", [(1, 24, 16), (4, 24, 16)])
    (result,) = generate_all(engine, [third], GREEDY)
    assert_is_own(family.native, third, result, greedy=True)
    assert engine.stats.reused_tokens == third.images[1].start

    swapped = family.prompt("abc @ is @ so?", [(2, 24, 16), (1, 24, 16)])
    (result,) = generate_all(engine, [swapped], GREEDY)
    assert_is_own(family.native, swapped, result, greedy=True)


def test_a_placeholder_that_the_head_wants_most_is_never_sampled(family):
    """The head is forced towards every token that stands for something else. Log-probs are those of a softmax without
    them, as `logprobs` says too; without the ban nothing else would be sampled."""
    family = family.in_float32()
    engine = family.engine()
    unsampled = list(unsampled_tokens(engine.model.config))
    assert family.processor.placeholder in unsampled
    native = copy.deepcopy(family.native)
    for model in (engine.model, native):
        force_towards(model, unsampled)
    prompt = family.prompt(*CASES["one"])
    with torch.no_grad():
        wanted = model_argmax(native, prompt)
    assert wanted in unsampled
    ways = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01},
        {"top_k": 4},
        {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": -1.0},
    ]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, seed=i, **way) for i, way in enumerate(ways)]
    results = generate_all(engine, [prompt] * len(params), params)
    assert not {token for result in results for token in result.token_ids} & set(unsampled)
    for result in results[:2]:
        assert_is_own(native, prompt, result)
    found = asyncio.run(engine.logprobs([*prompt.token_ids, *results[1].token_ids], prompt.images))
    assert found[len(prompt.token_ids) - 1 :] == pytest.approx(results[1].logprobs, abs=CLOSE[torch.float32])


def model_argmax(model: Any, prompt: ExpandedText) -> int:
    ids = torch.tensor([prompt.token_ids])
    inputs = dict(prompt.images[0].image.tensors)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return int(model(input_ids=ids, **inputs).logits[0, -1].argmax())


@torch.no_grad()
def force_towards(model: Any, tokens: Sequence[int]) -> None:
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
    head.bias[list(tokens)] = 100.0


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "with a cache of its own"])
def test_log_probs_of_a_sequence_with_images(family, packed):
    family = family.in_float32()
    engine = family.engine(packed=packed)
    for text, images in CASES.values():
        prompt = family.prompt(text, images)
        logits = own_logits(family.native, prompt.token_ids, prompt.images)
        expected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(prompt.token_ids)[1:, None]).squeeze(-1)
        found = torch.tensor(asyncio.run(engine.logprobs(prompt.token_ids, prompt.images)))
        text_tokens = expected.isfinite()
        assert torch.allclose(found[text_tokens], expected[text_tokens], atol=CLOSE[torch.float32], rtol=0)
        assert (found[~text_tokens] < -1e9).all()


def test_who_ends_early_leaves_nothing_behind(family):
    """Aborted, cancelled and closed, running or still waiting: rows are free, and pixels are no longer held."""
    engine = family.engine(max_batch_size=3)
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    pixels: list[weakref.ref] = []

    async def play() -> None:
        def prompt(seed: int) -> ExpandedText:
            made = family.prompt("is @?", [(seed, 24, 16)])
            pixels.append(weakref.ref(made.images[0].image.tensors["pixel_values"]))
            return made

        def generate(seed: int) -> asyncio.Task:
            ids, images = prompt(seed)
            return asyncio.create_task(engine.generate(ids, long, images))

        ids, images = prompt(0)
        stream = engine.stream(ids, long, images)
        del images
        async with contextlib.aclosing(stream):
            assert (await anext(stream)).token_ids
            running, waiting = [generate(1), generate(2)], [generate(3), generate(4)]
            while engine.num_running < 3:
                await asyncio.sleep(0)
            running[0].cancel()
            waiting[0].cancel()
            await asyncio.sleep(0)
        del stream
        while engine.num_waiting:
            await asyncio.sleep(0)
        engine.abort()
        assert {(await task).finish_reason for task in (running[1], waiting[1])} == {FinishReason.ABORT}

    asyncio.run(play())
    assert (engine.num_running, engine.num_waiting, engine._by_prompt, engine._streams) == (0, 0, {}, [])
    gc.collect()
    assert [ref() is None for ref in pixels] == [True] * 5
    prompt = family.prompt(*CASES["one"])
    (result,) = generate_all(engine, [prompt], GREEDY)
    assert_is_own(family.native, prompt, result, greedy=True)


def test_images_that_do_not_fit_their_prompt_are_refused(family):
    engine = family.engine()
    prompt = family.prompt(*CASES["three"])
    first, second, third = prompt.images
    moved = PlacedImage(first.start + 1, first.image)
    for images, message in (
        ([moved, second, third], f"the tokens from {first.start + 1} on are not those of the image"),
        ([second, first, third], "stands before token"),
        ([first, first, third], "stands before token"),
        ([first, PlacedImage(len(prompt.token_ids) - 2, second.image)], "are not those of the image"),
        ([first, second], "stands for an image, and no image belongs to it"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.generate(prompt.token_ids, GREEDY, images))
        with pytest.raises(ValueError, match=message):
            asyncio.run(engine.logprobs(prompt.token_ids, images))


def test_a_model_of_text_refuses_images_by_name(family):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(family.tokenizer), **sizes)).eval()
    engine = EmbeddedEngine(model, None, max_model_len=100)
    prompt = family.prompt(*CASES["one"])
    with pytest.raises(ValueError, match="LlamaForCausalLM reads no images, and the prompt has 1"):
        asyncio.run(engine.generate(prompt.token_ids, GREEDY, prompt.images))


def test_images_with_another_number_of_features_are_refused(family):
    """As many placeholders as features: with one less, every feature after it would stand one place too early."""
    (placed,) = family.prompt(*CASES["one"]).images
    shorter = dataclasses.replace(placed.image, token_ids=placed.image.token_ids[:-1], digest="another")
    with pytest.raises(ValueError, match="placeholder tokens: they were prepared for another model"):
        family.engine()._images._features_of([shorter])
