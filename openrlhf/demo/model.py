"""The demo's models and their supervised warm-up: a token per character, and a Qwen2 of about a million parameters, or
a Qwen2.5-VL of a third of that.

The warm-up brings random weights to where RL can take over: right now and then, not reliably.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.export import export_policy
from openrlhf.config.backend import InferenceBackendSection
from openrlhf.config.training import AdamSection, OptimizerSection
from openrlhf.data.image_places import MARK
from openrlhf.data.images import read_image
from openrlhf.demo.sorting import CHARACTERS
from openrlhf.demo.task import Problem
from openrlhf.models.image_processor import ExpandedText, ImageProcessor
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer
from openrlhf.types import PackedTokens

PAD, EOS = "<pad>", "<eos>"


def make_tokenizer(characters: str = CHARACTERS) -> Qwen2Tokenizer:
    """Padding, end of sequence and these: byte-level BPE without merges, so one token per character."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=PAD, pad_token=PAD, eos_token=EOS)


def make_model(tokenizer: Qwen2Tokenizer, *, seed: int, layers: int = 2) -> Qwen2ForCausalLM:
    """Random weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=224,
            intermediate_size=608,
            num_hidden_layers=layers,
            num_attention_heads=7,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def write_model(directory: Path, *, seed: int, characters: str = CHARACTERS, layers: int = 2) -> None:
    """A model folder as users have them."""
    tokenizer = make_tokenizer(characters)
    make_model(tokenizer, seed=seed, layers=layers).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


_VISION_TOKENS = ("vision_start", "vision_end", "image_pad", "video_pad")


def write_vision_model(directory: Path, *, seed: int, characters: str) -> None:
    """A model that reads images of 8 × 8 pixels as four features."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

    tokenizer = make_tokenizer(characters)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in _VISION_TOKENS]})
    ids: list[Any] = [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _VISION_TOKENS]
    start, end, image, video = ids
    hidden_size, patch_size = 96, 2
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": hidden_size,
                "intermediate_size": 2 * hidden_size,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                # Beside an adapter the head stays as it is: with the usual 0.02 no answer could become likely.
                "initializer_range": 0.1,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "patch_size": patch_size,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "fullatt_block_indexes": [0, 1],
                "out_hidden_size": hidden_size,
            },
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
            tie_word_embeddings=False,
        )
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=patch_size, merge_size=2, temporal_patch_size=1, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    for part in (model, tokenizer, images):
        part.save_pretrained(directory)


BATCH = 256
MAX_STEPS = 1000
WINDOW = 3
"""Steps over which the success rate is averaged."""


def warm_up(
    directory: Path,
    problems: Sequence[Problem],
    *,
    seed: int,
    until: float,
    on_step: Callable[[int, float], None],
) -> int:
    """Train the model in `directory` on worked examples until it would act as they do with probability `until`, and
    write it back. Returns the number of steps; `on_step(step, probability)` hears of each.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = LoadSettings(device=device, ds=InferenceBackendSection(param_dtype="fp32"))
    policy = load_policy(str(directory), settings)
    tokenizer = load_tokenizer(str(directory))
    images = _prepared(directory, tokenizer, problems)
    optimizer = OptimizerSection(adam=AdamSection(lr=5e-4), lr_scheduler="constant_with_warmup", lr_warmup_ratio=0.05)
    backend = TorchBackend(policy, optimizer, total_steps=MAX_STEPS)
    rng = random.Random(seed)
    recent: deque[float] = deque(maxlen=WINDOW)
    for step in range(1, MAX_STEPS + 1):
        tokens = _pack(rng.choices(problems, k=BATCH), tokenizer, rng, images).to(device)
        logprobs_A = backend.module(tokens, temperature=1.0).logprobs_A
        backend.backward(-logprobs_A.mean())
        backend.step()
        examples = torch.zeros(BATCH, device=device).index_add_(0, tokens.action_sequences(), logprobs_A.detach())
        recent.append(float(examples.exp().mean()))
        on_step(step, recent[-1])
        if len(recent) == WINDOW and fmean(recent) >= until:
            break
    export_policy(policy, tokenizer, directory)
    return step


def _prepared(directory: Path, tokenizer: Any, problems: Sequence[Problem]) -> dict[bytes, ExpandedText]:
    """The prompts of problems that have images, by their image."""
    shown = {problem.image: problem.prompt for problem in problems if problem.image is not None}
    processor = ImageProcessor.load(directory, tokenizer) if shown else None
    if processor is None:
        return {}
    return {
        data: processor.expand(
            prompt.replace(MARK, processor.image_token), [processor.prepare(read_image(data, allow_urls=False))]
        )
        for data, prompt in shown.items()
    }


def _pack(
    problems: Sequence[Problem], tokenizer: Any, rng: random.Random, images: Mapping[bytes, ExpandedText]
) -> PackedTokens:
    """Worked examples; their actions are what is learned."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    sequences, masks, placed = [], [], []
    for problem in problems:
        tokens, own_images = (ids(problem.prompt), ()) if problem.image is None else images[problem.image]
        tokens = list(tokens)
        placed.append(own_images)
        mask = [False] * len(tokens)
        for turn in problem.worked(rng):
            action, feedback = [*ids(turn.action), tokenizer.eos_token_id], ids(turn.feedback)
            tokens += action + feedback
            mask += [True] * len(action) + [False] * len(feedback)
        sequences.append(torch.tensor(tokens))
        masks.append(torch.tensor(mask))
    return PackedTokens.from_sequences(sequences, masks, images=placed)
