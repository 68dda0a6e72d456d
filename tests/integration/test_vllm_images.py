"""vLLM on this machine's CPU reads prepared images: the log-probs of transformers' own forward, whatever is pushed.

An engine takes half a minute to start, so all tests of a family of models share one, and push weights of their own
where they need them. torchvision is not there: vLLM starts without.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import watching_worker
from transformers import AutoModelForImageTextToText, AutoTokenizer
from vision_models import KINDS, image, write_vision_model

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.file_weights import FileAdapter
from openrlhf.models.image_processor import ExpandedText, ImageProcessor, digest_of, unsampled_tokens
from openrlhf.models.policy import Policy
from openrlhf.rollout.vllm import adapter_problem
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.types import Generation, PlacedImage, SamplingParams
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.transports import RpcSender

pytestmark = pytest.mark.slow

CONTEXT = 256
SAME, OTHER = 1e-4, 1e-2
"""Log-probs of the same model are at most so far apart, and those of different ones at least so far. Seen was 5e-6 with
the weights of the folders, and 2e-5 with those that tests change, which are larger."""
ATTEMPTS = 50
"""To stop a request before it is over, on a busy machine."""
TEXTS = ["ab12?", "look at {} and say", "{}{}=2 {}"]
"""No image; one; three, two of them side by side and one last."""


@dataclass
class Setup:
    """An engine, and the model whose weights it has."""

    engine: VllmEngine
    model: Any
    processor: ImageProcessor
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weights that the folder has."""

    @property
    def mark(self) -> str:
        """What the chat template writes for an image. Without the marks around it transformers' Qwens take the features
        of two images side by side for one."""
        token = self.processor.image_token
        return token if "<|" not in token else f"<|vision_start|>{token}<|vision_end|>"

    @property
    def banned(self) -> list[int]:
        return list(unsampled_tokens(self.model.config))

    def prompt(self, text: str, *, seed: int = 0) -> ExpandedText:
        """With images of several sizes, other ones for each seed."""
        sizes = [(24, 16), (16, 32), (40, 16)][: text.count("{}")]
        images = [self.processor.prepare(image(10 * seed + i, width=w, height=h)) for i, (w, h) in enumerate(sizes)]
        return self.processor.expand(text.format(*[self.mark] * len(images)), images)

    def push(self, *, only_decoder: bool = False) -> None:
        policy = Policy(self.model)
        weights = PolicyWeights(policy, ModuleWeights(policy), only_decoder=only_decoder)
        sender = RpcSender(block_bytes=50_000, checksums=True)
        sync = EngineWeightSync(self.engine, weights, sender, SimpleNamespace(run=asyncio.run))
        sync.push(version=self.engine.version + 1)

    def change_weights(self, part: str = "", *, seed: int) -> None:
        """Those whose names have this part."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if part in name:
                    parameter.add_(0.5 * parameter.std().nan_to_num() * torch.randn_like(parameter))

    def logprobs(self, asked: ExpandedText) -> torch.Tensor:
        return torch.tensor(asyncio.run(self.engine.logprobs(*asked)))

    def generate(self, asked: ExpandedText, params: SamplingParams) -> Generation:
        return asyncio.run(self.engine.generate(asked.token_ids, params, asked.images))

    def watch(self) -> None:
        asyncio.run(self.engine.ask(self.engine.llm.collective_rpc("watch_images"), "to watch"))

    def seen(self) -> tuple[int, str]:
        (found,) = asyncio.run(self.engine.ask(self.engine.llm.collective_rpc("digest_of_images"), "for a digest"))
        return tuple(found)


@pytest.fixture(scope="module", params=list(KINDS))
def started(request, tmp_path_factory) -> Iterator[Setup]:
    kind, folder = request.param, tmp_path_factory.mktemp("model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_vision_model(kind, folder)
    if kind == "qwen3_vl":
        tie_head(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openrlhf.rollout.vllm.settings.WORKER_EXTENSION", watching_worker.NAME)
        engine, tokenizer = start_engine(folder, max_images=3)
    with contextlib.closing(engine):
        model = load_model(folder)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        yield Setup(engine, model, ImageProcessor.load(folder, tokenizer), kept)
    torch.set_num_threads(threads)


@pytest.fixture
def setup(started) -> Setup:
    """The engine has the weights of the folder, by a push."""
    started.model.load_state_dict(started.kept)
    started.push()
    return started


def start_engine(folder: Path, **options: Any) -> tuple[VllmEngine, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    places = {"max_model_len": CONTEXT, "max_num_seqs": 32, "cpu_cache_gib": 1}
    return VllmEngine(VllmSettings(model=str(folder), dtype="float32", **places, **options), tokenizer), tokenizer


def load_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def tie_head(folder: Path) -> None:
    """The smaller models of this family have a head that is their embedding."""
    model = load_model(folder)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)


@torch.no_grad()
def own_logits(model: Any, asked: ExpandedText) -> torch.Tensor:
    """Of transformers' forward: [T, V], row t of what follows token t."""
    token_ids, inputs = torch.tensor([asked.token_ids]), joined(asked.images)
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (token_ids == asked.images[0].image.placeholder).long()
    return model(input_ids=token_ids, **inputs).logits[0]


def own_logprobs(model: Any, asked: ExpandedText, *, temperature: float = 1.0) -> torch.Tensor:
    """Of each token but the first, under the softmax without tokens that stand for images."""
    logits = own_logits(model, asked)[:-1] / temperature
    logits[:, list(unsampled_tokens(model.config))] = -torch.inf
    rows = logits.log_softmax(-1)
    return rows.gather(-1, torch.tensor(asked.token_ids[1:])[:, None]).squeeze(-1)


def joined(images: Sequence[PlacedImage]) -> dict[str, torch.Tensor]:
    """The tensors of several images, as a model takes them."""
    names = images[0].image.tensors if images else ()
    return {name: torch.cat([placed.image.tensors[name] for placed in images]) for name in names}


def extended(asked: ExpandedText, generation: Generation) -> ExpandedText:
    return ExpandedText([*asked.token_ids, *generation.token_ids], asked.images)


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference. Tokens that stand for images have the log-prob of what is never sampled, on both sides."""
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    return float((found - expected)[finite].abs().max())


@pytest.mark.parametrize("text", TEXTS)
def test_logprobs_of_a_prompt_are_those_of_transformers(setup, text):
    asked = setup.prompt(text)
    expected = own_logprobs(setup.model, asked)
    assert int(expected.isinf().sum()) == sum(token in setup.banned for token in asked.token_ids[1:])
    assert gap(setup.logprobs(asked), expected) < SAME


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_generation_has_the_logprobs_of_the_distribution_it_was_sampled_from(setup, text, temperature):
    asked = setup.prompt(text)
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    generation = setup.generate(asked, params)
    expected = own_logprobs(setup.model, extended(asked, generation), temperature=temperature)[-24:]
    assert gap(torch.tensor(generation.logprobs), expected) < SAME


def test_requests_of_one_batch_keep_their_images_and_parts_are_the_whole(setup):
    """Twelve at once, with none, one and three images: no request gets another's."""
    asked = [setup.prompt(text, seed=seed) for seed in range(4) for text in TEXTS]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    async def together() -> list[Generation]:
        calls = (setup.engine.generate(prompt.token_ids, params, prompt.images) for prompt in asked)
        return await asyncio.gather(*calls)

    async def parts(prompt: ExpandedText) -> list[int]:
        streamed = setup.engine.stream(prompt.token_ids, params, prompt.images)
        return [token async for part in streamed for token in part.token_ids]

    for prompt, generation in zip(asked, asyncio.run(together()), strict=True):
        expected = own_logprobs(setup.model, extended(prompt, generation))[-12:]
        assert gap(torch.tensor(generation.logprobs), expected) < SAME
    assert asyncio.run(parts(asked[-1])) == generation.token_ids


def test_the_tensors_that_reach_the_tower_are_those_that_were_sent(setup):
    asked = setup.prompt(TEXTS[-1], seed=7)
    setup.watch()
    setup.logprobs(asked)
    assert setup.seen()[1] == digest_of(joined(asked.images), ())


def test_a_later_turn_with_one_more_image(setup):
    """What the engine has of the turn before, by its prefix, is used: the tower reads the new image alone."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first = setup.prompt("a long question about {}, which fills some blocks of keys and values", seed=3)
    answer = setup.generate(first, params)
    before = extended(first, answer)
    feedback = setup.prompt(" now {} too?", seed=4)
    moved = [PlacedImage(len(before.token_ids) + start, image) for start, image in feedback.images]
    second = ExpandedText([*before.token_ids, *feedback.token_ids], (*before.images, *moved))
    setup.watch()
    found = setup.generate(second, params)
    expected = own_logprobs(setup.model, extended(second, found))[-20:]
    assert gap(torch.tensor(found.logprobs), expected) < SAME
    assert setup.seen()[1] == digest_of(joined(moved), ())


def test_other_pixels_of_the_same_size_are_another_prompt(setup):
    """Token for token the prompts are equal: keys and values of the first must not be taken for the second."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    text = "{} a long question, so that there are whole blocks of keys and values behind the image"
    found = []
    for seed in (1, 2, 1):
        asked = setup.prompt(text, seed=seed)
        generation = setup.generate(asked, params)
        expected = own_logprobs(setup.model, extended(asked, generation))[-12:]
        assert gap(torch.tensor(generation.logprobs), expected) < SAME
        found.append(setup.logprobs(asked))
    finite = found[0].isfinite()
    assert torch.equal(found[0], found[2])
    assert (found[0] - found[1])[finite].abs().max() > OTHER


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_placeholder_is_never_sampled_however_likely(setup, temperature):
    """Its row of the head points where the last states of this prompt point, so that it would nearly always be next."""
    asked = setup.prompt(TEXTS[1])
    states: list[torch.Tensor] = []
    head = setup.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    own_logits(setup.model, asked)
    hook.remove()
    with torch.no_grad():
        head.weight[setup.banned] = 40 * states[0].mean(0) / states[0].mean(0).norm()
    setup.push()
    params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True)
    generation = setup.generate(asked, params)
    whole = extended(asked, generation)
    likeliest = own_logits(setup.model, whole)[len(asked.token_ids) - 1 : -1].argmax(-1)
    assert torch.isin(likeliest, torch.tensor(setup.banned)).float().mean() > 0.5
    assert not set(setup.banned).intersection(generation.token_ids)
    expected = own_logprobs(setup.model, whole)
    assert gap(torch.tensor(generation.logprobs), expected[-100:]) < SAME
    assert gap(setup.logprobs(whole), expected) < SAME


def test_pushes_change_the_tower_too(setup):
    """The same image each time, after the second and third push as after the first; then the first weights again."""
    asked = setup.prompt(TEXTS[-1])
    found = [setup.logprobs(asked)]
    for part in ("vis", ""):
        setup.change_weights(part, seed=len(found))
        setup.push()
        found.append(setup.logprobs(asked))
        assert gap(found[-1], own_logprobs(setup.model, asked)) < SAME
        assert gap(found[-1], found[-2]) > OTHER
    setup.model.load_state_dict(setup.kept)
    setup.push()
    assert torch.equal(setup.logprobs(asked), found[0])


def test_a_frozen_towers_work_is_kept_over_pushes_of_the_decoder(setup):
    """An image that was seen is not encoded again; a new one is, by the tower that the engine has kept."""
    asked, new = setup.prompt(TEXTS[-1]), setup.prompt(TEXTS[-1], seed=9)
    setup.logprobs(asked)
    setup.engine.settings = dataclasses.replace(setup.engine.settings, keep_image_features=True)
    try:
        setup.watch()
        for seed in (5, 6):
            setup.change_weights("language_model.layers", seed=seed)
            setup.push(only_decoder=True)
            assert gap(setup.logprobs(asked), own_logprobs(setup.model, asked)) < SAME
        assert setup.seen()[0] == 0
        assert gap(setup.logprobs(new), own_logprobs(setup.model, new)) < SAME
        assert setup.seen()[1] == digest_of(joined(new.images), ())
    finally:
        setup.engine.settings = dataclasses.replace(setup.engine.settings, keep_image_features=False)
    setup.push()
    setup.watch()
    setup.logprobs(asked)
    assert setup.seen()[1] == digest_of(joined(asked.images), ())


@pytest.mark.parametrize("stop", ["pause", "sleep"])
def test_a_request_with_images_is_stopped_and_goes_on_with_the_weights_of_a_push(setup, stop):
    """Tokens from before have the log-probs of the old weights, those from after of the new ones, tower included."""
    asked, old = setup.prompt(TEXTS[-1]), copy.deepcopy(setup.model)
    params = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True, detokenize=False)

    async def play() -> list[Generation]:
        for _ in range(ATTEMPTS):
            async with contextlib.aclosing(setup.engine.stream(asked.token_ids, params, asked.images)) as parts:
                found = [await anext(parts)]
                await getattr(setup.engine, stop)()
                if setup.engine.num_running:
                    setup.change_weights(seed=11)
                    await asyncio.to_thread(setup.push)
                    return found + [part async for part in parts]
            await asyncio.to_thread(setup.push)  # it was over before it was stopped
        raise AssertionError("no request was stopped")

    parts = asyncio.run(play())
    columns = ([x for part in parts for x in getattr(part, name)] for name in ("token_ids", "logprobs", "versions"))
    token_ids, logprobs, versions = columns
    first_new, found = versions.index(setup.engine.version), torch.tensor(logprobs)
    assert versions == [setup.engine.version - 1] * first_new + [setup.engine.version] * (180 - first_new)
    whole = ExpandedText([*asked.token_ids, *token_ids], asked.images)
    before, after = (own_logprobs(model, whole)[-180:] for model in (old, setup.model))
    assert gap(found[:first_new], before[:first_new]) < SAME
    assert gap(found[first_new:], after[first_new:]) < SAME
    assert gap(before, after) > OTHER


def test_a_request_that_is_refused_leaves_the_engine_as_it_is(setup):
    asked = setup.prompt(TEXTS[-1])
    with pytest.raises(ValueError, match="stands for an image, and no image belongs to it"):
        setup.logprobs(ExpandedText(asked.token_ids, asked.images[:1]))
    assert gap(setup.logprobs(asked), own_logprobs(setup.model, asked)) < SAME


def test_environments_may_show_more_images_than_a_prompt_has(setup):
    """Six, where the engine was started for prompts of three."""
    asked = setup.prompt(TEXTS[-1])
    shifted = tuple(PlacedImage(len(asked.token_ids) + start, image) for start, image in asked.images)
    twice = ExpandedText(asked.token_ids * 2, asked.images + shifted)
    assert gap(setup.logprobs(twice), own_logprobs(setup.model, twice)) < SAME


def test_a_run_of_text_has_no_tower_and_takes_pushes_of_whole_models(tmp_path):
    write_vision_model("qwen2_5_vl", tmp_path)
    engine, tokenizer = start_engine(tmp_path)
    with contextlib.closing(engine):
        setup = Setup(engine, load_model(tmp_path), ImageProcessor.load(tmp_path, tokenizer))
        text = setup.prompt(TEXTS[0])
        for seed in range(2):
            assert gap(setup.logprobs(text), own_logprobs(setup.model, text)) < SAME
            setup.change_weights(seed=seed)
            setup.push()
        with pytest.raises(ValueError, match="1 images, and this engine reads none"):
            setup.logprobs(setup.prompt(TEXTS[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_the_decoder_is_pushed_without_the_tower(tmp_path, kind):
    """The files have other names for the decoder's layers than transformers' classes, and vLLM's have others again."""
    write_vision_model(kind, tmp_path)
    model = load_model(tmp_path)
    add_adapter(model, LoraSection(rank=4, alpha=8), dtype=torch.float32, only_decoder=True)
    policy = Policy(model)
    adapter = FileAdapter(policy)
    assert adapter_problem(str(tmp_path), adapter.modules, rank=adapter.rank, gpu=False) is None
    engine, tokenizer = start_engine(
        tmp_path, max_images=3, keep_image_features=True, adapter_rank=adapter.rank, adapter_modules=adapter.modules
    )
    with contextlib.closing(engine):
        setup = Setup(engine, model, ImageProcessor.load(tmp_path, tokenizer))
        weights = PolicyWeights(policy, ModuleWeights(policy), only_decoder=True, as_adapter=True)
        sync = EngineWeightSync(engine, weights, RpcSender(block_bytes=50_000), SimpleNamespace(run=asyncio.run))
        asked = [setup.prompt(text) for text in TEXTS]
        sync.push(version=1)
        base = [own_logprobs(model, one) for one in asked]
        assert max(map(gap, map(setup.logprobs, asked), base)) < SAME
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        sync.push(version=2)
        expected = [own_logprobs(model, one) for one in asked]
        assert min(map(gap, expected, base)) > OTHER
        assert max(map(gap, map(setup.logprobs, asked), expected)) < SAME
