"""Samples with images, packed: the log-probs and gradients of each sample alone, and of the model's own forward."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from vision_models import KINDS, image, write_vision_model

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import BackendSection, InferenceBackendSection, LoraSection
from openrlhf.config.models import ActorSection
from openrlhf.demo.model import write_model
from openrlhf.models import vision
from openrlhf.models.body import decoder_body, with_any_image
from openrlhf.models.context import Context, share_streams
from openrlhf.models.exchange import play
from openrlhf.models.file_weights import FileAdapter
from openrlhf.models.image_processor import ImageProcessor, unsampled_tokens
from openrlhf.models.loading import (
    LoadSettings,
    ModelLoadError,
    load_policy,
    load_tokenizer,
    load_value_model,
    policy_skeleton,
)
from openrlhf.models.policy import tower_names
from openrlhf.types import PackedTokens, PlacedImage, Segment
from openrlhf.weight_sync.base import PolicyWeights
from openrlhf.weight_sync.probe import probe_tokens

SETTINGS = LoadSettings(device="cpu", ds=InferenceBackendSection(param_dtype="fp32"), images=True)
CLOSE = 1e-5


class Family:
    """A model in a folder, and samples for it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = write_vision_model(kind, folder)
        self.tokenizer = load_tokenizer(self.folder)
        processor = ImageProcessor.load(self.folder, self.tokenizer)
        assert processor is not None
        self.processor = processor
        self.mark = "<image>" if kind == "llava" else "<|vision_start|><|image_pad|><|vision_end|>"
        self.own_model = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=torch.float32).eval()
        sizes = [(24, 16), (16, 32), (40, 24), (24, 16)]
        self.inputs = [processor.prepare(image(i, width=w, height=h)) for i, (w, h) in enumerate(sizes)]

    def sample(self, prompt: str, response: str, *images: int) -> Segment:
        """`*` in a prompt is an image."""
        inputs = [self.inputs[i] for i in images]
        ids, placed = self.processor.expand((prompt + response).replace("*", self.mark), inputs)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[-len(response) :] = True
        return Segment(
            token_ids=torch.tensor(ids),
            action_mask=mask,
            rollout_logprobs=None,
            versions=torch.where(mask, 0, -1).int(),
            turn_rewards=torch.zeros(len(ids)),
            images=placed,
        )

    def samples(self) -> list[Segment]:
        """Without, with one and with three images; adjacent ones; one first and one last in the prompt."""
        return [
            self.sample("what is 1+1?", "2!"),
            self.sample("see * ok", "a cat", 0),
            self.sample("* and ** in one", "three", 1, 2, 3),
            self.sample("**", "two", 0, 3),
            self.sample("text *", "last", 2),
            self.sample("hello", "x"),
            self.sample("hello again", "x"),
        ]

    def group(self) -> list[Segment]:
        """Samples of one prompt, then of another with an image of the same size."""
        same = [self.sample("see *?", response, 0) for response in ("one", "two!", "x")]
        return [*same, self.sample("see *?", "one", 3), self.sample("see *?", "y", 3)]

    def turns(self) -> Segment:
        """An image among the feedback, after the first action, and one at the very end."""
        ids, placed = self.processor.expand(f"see {self.mark}abc{self.mark}def{self.mark}", self.inputs[:3])
        text = self.tokenizer("abcdef", add_special_tokens=False)["input_ids"]
        mask = torch.tensor([token in text for token in ids])
        return dataclasses.replace(
            self.sample("ab", "c"),
            token_ids=torch.tensor(ids),
            action_mask=mask & (torch.arange(len(ids)) > 5),
            versions=torch.zeros(len(ids)).int(),
            turn_rewards=torch.zeros(len(ids)),
            images=placed,
        )


@pytest.fixture(scope="module", params=list(KINDS))
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def policy(family):
    return load_policy(family.folder, SETTINGS)


def logprobs(policy, segments, **changes) -> torch.Tensor:
    tokens = dataclasses.replace(PackedTokens.from_segments(segments), **changes)
    return policy(tokens, temperature=1.0).logprobs_A


def alone(policy, segments) -> torch.Tensor:
    return torch.cat([logprobs(policy, [segment]) for segment in segments])


@torch.no_grad()
def own_logprobs(family: Family, segment: Segment) -> torch.Tensor:
    """Those of transformers' model as it is loaded, without the tokens that are never sampled."""
    inputs: dict[str, torch.Tensor] = {}
    for _, placed in segment.images:
        for name, tensor in placed.tensors.items():
            inputs[name] = torch.cat([inputs[name], tensor]) if name in inputs else tensor
    if segment.images and family.mark != "<image>":
        inputs["mm_token_type_ids"] = (segment.token_ids == family.processor.placeholder).int()[None]
    logits = family.own_model(input_ids=segment.token_ids[None], **inputs).logits[0].float()
    logits[:, list(unsampled_tokens(family.own_model.config))] = -torch.inf
    at = segment.action_mask.nonzero().flatten()
    return logits.log_softmax(-1)[at - 1, segment.token_ids[at]]


def test_packed_samples_have_the_log_probs_of_the_models_own_forward(family, policy):
    assert policy.packed
    samples = [*family.samples(), family.turns()]
    expected = torch.cat([own_logprobs(family, segment) for segment in samples])
    with torch.no_grad():
        assert (logprobs(policy, samples) - expected).abs().max() < CLOSE
        assert (alone(policy, samples) - expected).abs().max() < CLOSE
    policy.packed = False
    policy.model.set_attn_implementation({"text_config": "sdpa"})
    with torch.no_grad():
        assert (logprobs(policy, samples) - expected).abs().max() < CLOSE


def test_shared_prompts_share_their_images_and_no_others(family, policy):
    samples = family.group()
    tokens = PackedTokens.from_segments(samples)
    prompt = int(samples[0].action_mask.int().argmax())
    assert tokens.shared_prefixes == (0, prompt, prompt, 0, prompt)  # the second image has the size of the first
    assert tokens.images is not None
    assert [found.digest for found in tokens.images.inputs] == [family.inputs[0].digest, family.inputs[3].digest]
    with torch.no_grad():
        expected = alone(policy, samples)
        assert (logprobs(policy, samples) - expected).abs().max() < CLOSE
        assert (logprobs(policy, samples, shared_prefixes=()) - expected).abs().max() < CLOSE
        assert (expected[:3] - expected[8:11]).abs().max() > 0.01  # "one" after another image


@pytest.mark.parametrize("which", ["samples", "group"])
def test_gradients_of_packed_samples_are_those_of_each_alone(family, policy, which):
    samples = getattr(family, which)()
    weights = torch.linspace(-1, 1, sum(segment.num_actions for segment in samples))
    found = []
    for computed in (logprobs, alone):
        policy.zero_grad()
        (computed(policy, samples) * weights).sum().backward()
        found.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
    packed, single = found
    assert set(packed) == set(single)
    assert any("patch_embed" in name for name in packed), "the tower's first layer learns"
    for name, expected in single.items():
        assert (packed[name] - expected).abs().max() <= CLOSE * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize("which", ["samples", "group"])
def test_ranks_that_share_a_stream_see_its_images(family, policy, which):
    samples = getattr(family, which)()
    weights = torch.linspace(-1, 1, sum(segment.num_actions for segment in samples))

    def trained(exchange=None):
        own = copy.deepcopy(policy)
        share_streams(own, None if exchange is None else Context(exchange=exchange))
        found = logprobs(own, samples)
        (found * weights).mean().backward()
        return found.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}

    expected, whole = trained()
    parts = play(2, trained)
    for found, _ in parts:
        assert (found - expected).abs().max() < CLOSE
    for name, gradient in whole.items():
        assert (sum(part[name] for _, part in parts) - gradient).abs().max() < CLOSE, name


def test_gradients_go_through_checkpointed_layers(family, policy):
    samples = family.samples()
    logprobs(policy, samples).sum().backward()
    expected = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    logprobs(policy, samples).sum().backward()
    assert {name for name, p in policy.named_parameters() if p.grad is not None} == set(expected)
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


def test_positions_go_on_after_an_image(family, policy):
    """By hand, for Qwen: an image of 6 × 4 patches is 3 × 2 features; text after it begins at the larger side."""
    body = decoder_body(policy.model)
    segment = family.sample("ab*c", "de", 0)
    rows = vision.position_ids(body, len(segment), segment.images)
    if family.mark == "<image>":
        assert rows is None
        return
    assert segment.images[0].start == 3  # a, b, vision_start
    expected = [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9],
    ]
    assert rows.tolist() == expected
    assert vision.position_ids(body, 7, segment.images).tolist() == [row[:7] for row in expected]


def test_positions_of_images_without_a_token_in_between(family, policy):
    """Written by hand without the tokens that stand around an image."""
    image = family.inputs[0]  # 3 × 2 features
    rows = vision.position_ids(decoder_body(policy.model), 14, [PlacedImage(1, image), PlacedImage(7, image)])
    if rows is not None:
        assert rows.tolist() == [
            [0, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4, 4, 7],
            [0, 1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 5, 5, 7],
            [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7],
        ]


def test_placeholders_have_no_share_in_the_distribution(family, policy):
    """However large their logits are."""
    tokens = PackedTokens.from_segments([family.samples()[1]])
    with torch.no_grad():
        before = policy(tokens, temperature=0.7, with_entropy=True)
        policy.model.get_output_embeddings().weight[list(unsampled_tokens(policy.model.config))] *= 1000
        after = policy(tokens, temperature=0.7, with_entropy=True)
    assert torch.equal(before.logprobs_A, after.logprobs_A)
    assert torch.equal(before.entropy_A, after.entropy_A)
    assert bool(after.entropy_A.isfinite().all())


def test_text_that_encodes_an_image_for_others_sake_is_unchanged(family, policy, monkeypatch):
    tokens = PackedTokens.from_segments([segment for segment in family.samples() if not segment.images])
    expected = policy(tokens, temperature=1.0).logprobs_A
    assert with_any_image(tokens, policy.blank) is tokens  # a rank that is alone
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    found = policy(tokens, temperature=1.0).logprobs_A
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    found.sum().backward()
    tower = dict(vision.tower_parameters(decoder_body(policy.model)))
    reached = [p.grad for p in tower.values() if p.grad is not None]
    assert reached
    assert all(not bool(grad.any()) for grad in reached)


def test_a_value_model_reads_images(family):
    model = load_value_model(family.folder, dataclasses.replace(SETTINGS, seed=1), fresh_head=True)
    samples = family.samples()
    tokens = PackedTokens.from_segments(samples)
    with torch.no_grad():
        values = model(tokens, positions=tokens.cu_seqlens[1:].long() - 1)
        singles = [PackedTokens.from_segments([segment]) for segment in samples]
        expected = torch.cat([model(one, positions=torch.tensor([one.num_tokens - 1])) for one in singles])
    torch.testing.assert_close(values, expected, rtol=0, atol=CLOSE)


class TestFrozenTower:
    SETTINGS = dataclasses.replace(SETTINGS, trains=True, model=ActorSection(freeze_visual_encoder=True))

    def test_the_decoder_alone_learns(self, family):
        policy = load_policy(family.folder, self.SETTINGS)
        logprobs(policy, family.samples()).sum().backward()
        tower = set(tower_names(policy))
        assert tower
        assert {name for name, p in policy.named_parameters() if p.grad is None} == tower

    @pytest.mark.parametrize("frozen", [True, False])
    def test_an_adapter_is_in_the_tower_or_not(self, family, frozen):
        lora = BackendSection(param_dtype="fp32", lora=LoraSection(rank=2))
        section = ActorSection(freeze_visual_encoder=frozen)
        policy = load_policy(family.folder, dataclasses.replace(self.SETTINGS, ds=lora, model=section))
        trained = {name for name, p in policy.named_parameters() if p.requires_grad}
        assert trained
        assert all("lora" in name for name in trained)
        assert bool(trained & set(tower_names(policy))) is not frozen
        logprobs(policy, family.samples()).sum().backward()

    def test_it_is_not_sent(self, family):
        policy = load_policy(family.folder, self.SETTINGS)
        weights = {name for name, _ in PolicyWeights(policy, ModuleWeights(policy))}
        decoder = {name for name, _ in PolicyWeights(policy, ModuleWeights(policy), only_decoder=True)}
        in_files = set(load_file(family.folder / "model.safetensors"))
        assert weights == in_files
        assert len(weights) - len(decoder) == len(tower_names(policy))
        assert not [name for name in decoder if any(part in name for part in ("visual", "vision", "projector"))]

    def test_nor_is_it_part_of_the_base_of_an_adapter(self, family):
        """The names of an adapter are those of the files, which not all families call as their class does."""
        lora = BackendSection(param_dtype="fp32", lora=LoraSection(rank=2))
        policy = load_policy(family.folder, dataclasses.replace(self.SETTINGS, ds=lora))
        weights = PolicyWeights(policy, ModuleWeights(policy), only_decoder=True, as_adapter=True)
        base = {name for name, _ in weights.base()}
        assert base == {name for name, _ in weights}
        modules = FileAdapter(policy).modules
        assert base.issuperset(f"{module}.weight" for module in modules)
        skeleton = policy_skeleton(family.folder, dataclasses.replace(self.SETTINGS, ds=lora))
        assert FileAdapter(skeleton).modules == modules

    def test_a_model_of_text_has_none(self, tmp_path):
        write_model(tmp_path, seed=0)
        with pytest.raises(ModelLoadError, match="freeze_visual_encoder: it has no vision tower"):
            load_policy(tmp_path, dataclasses.replace(self.SETTINGS, images=False))


def test_a_model_of_text_is_given_no_images(tmp_path):
    write_model(tmp_path, seed=0)
    with pytest.raises(ModelLoadError, match="qwen2 reads no images"):
        load_policy(tmp_path, SETTINGS)


def test_the_probe_of_pushes_has_no_token_that_is_never_sampled():
    ids = probe_tokens(50, unsampled=(3, 30, 31))
    assert len(ids) == 32
    assert not {3, 30, 31} & set(ids)
    assert probe_tokens(50) != ids
