"""Small random image-text models in folders as users have them, and images for them.

qwen2_5_vl    M-RoPE, windows in the tower
qwen3_vl      M-RoPE, features of the tower's lower layers enter the first layers of the decoder
llava         plain positions, images of one size
"""

from __future__ import annotations

import functools
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from openrlhf.demo.model import make_tokenizer

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+=?!Ġ"
"""The last is how a byte-level tokenizer writes a space."""
HIDDEN, HEADS = 64, 2
"""A head of 32 is the smallest that vLLM has kernels for on a CPU."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role }}={% if message.content is string %}{{ message.content }}{% else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' %}{{ IMAGE }}{% else %}{{ item.text }}{% endif -%}
{%- endfor -%}
{%- endif %}!
{%- endfor -%}
{%- if add_generation_prompt %}a={% endif -%}
"""


def image(seed: int, *, width: int = 24, height: int = 16) -> Image.Image:
    """Colours that no other seed has."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png_that_says(width: int, height: int) -> bytes:
    """A PNG whose header says this, whatever pixels follow."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"0")),
        (b"IEND", b""),
    )
    framed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def write_vision_model(kind: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """One of `KINDS`, with its tokenizer and its image processor."""
    torch.manual_seed(seed)
    tokenizer, model, processor = KINDS[kind]()
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    if kind == "llava":
        _name_as_published(folder / "model.safetensors")
        own = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **own}))
    return folder


TURNS = """\
{%- for message in messages -%}
{{ message.role }}={% if message.content is string %}{{ message.content }}{% else -%}
{%- for item in message.content -%}
{%- if item.type == 'image' %}{{ IMAGE }}{% else %}{{ item.text }}{% endif -%}
{%- endfor -%}
{%- endif %}!
{%- endfor -%}
{%- if add_generation_prompt %}assistant={% endif -%}
"""
"""A template whose generation prompt is the beginning of an assistant's message, so that turns can be put together."""


@functools.cache
def vision_tokenizer(kind: str) -> Any:
    """The tokenizer and image processor of one of `KINDS`, as agents have them, with the template `TURNS`."""
    from openrlhf.agents.images import image_tokenizer
    from openrlhf.models.loading import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_vision_model(kind, Path(folder))
        tokenizer = load_tokenizer(folder, use_fast=True, trust_remote_code=False)
        mark = "<image>" if kind == "llava" else "<|vision_start|><|image_pad|><|vision_end|>"
        tokenizer.chat_template = TURNS.replace("{{ IMAGE }}", mark)
        return image_tokenizer(tokenizer, folder, allow_urls=False, trust_remote_code=False)


def _name_as_published(file: Path) -> None:
    """Transformers leaves this prefix out of the files of a model that it has not loaded from some."""
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _tokenizer(image_mark: str, *specials: str) -> Any:
    tokenizer = make_tokenizer(CHARACTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ IMAGE }}", image_mark)
    return tokenizer


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
        **more,
    }


def _qwen_tokens() -> tuple[Any, dict[str, int]]:
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    tokenizer = _tokenizer("<|vision_start|><|image_pad|><|vision_end|>", *(f"<|{name}|>" for name in names))
    start, end, picture, video = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names)
    ids = {"vision_start_token_id": start, "vision_end_token_id": end}
    return tokenizer, ids | {"image_token_id": picture, "video_token_id": video}


def _qwen_images() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)


def _qwen2_5_vl() -> tuple[Any, Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer, ids = _qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": HIDDEN,
        "initializer_range": 0.2,
    }
    config = Qwen2_5_VLConfig(
        text_config=_text(tokenizer, rope_parameters=rope), vision_config=vision, tie_word_embeddings=False, **ids
    )
    return tokenizer, Qwen2_5_VLForConditionalGeneration(config), _qwen_images()


def _qwen3_vl() -> tuple[Any, Any, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer, ids = _qwen_tokens()
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    config = Qwen3VLConfig(
        text_config=_text(tokenizer, rope_parameters=rope), vision_config=vision, tie_word_embeddings=False, **ids
    )
    return tokenizer, Qwen3VLForConditionalGeneration(config), _qwen_images()


def _llava() -> tuple[Any, Any, Any]:
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    tokenizer = _tokenizer("<image>", "<image>")
    tokenizer.image_token = "<image>"
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": 16}
    images = CLIPImageProcessorPil(size=size, crop_size={"height": 16, "width": 16})
    return tokenizer, LlavaForConditionalGeneration(config), images


KINDS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
}
