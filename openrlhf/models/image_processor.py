"""The image processor: an image comes in, the tensors and tokens that a model reads come out.

It runs once per image. What it returns (`ImageInput`) goes to engines and to trainers as it is, so both sides see the
same pixels and the same number of tokens.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.types import ImageInput, PlacedImage

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL_PIXELS = 192
"""The longer side of an image in logs and reports."""
_NO_MODEL_INPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Outputs of a processor that describe the text: they are made anew for the whole sequence."""


class ImageProcessorError(ValueError):
    """A model's image processor cannot be loaded, or an image cannot be processed, or does not fit its text."""


class ExpandedText(NamedTuple):
    """A text with its images, as tokens."""

    token_ids: list[int]
    images: tuple[PlacedImage, ...]


class ImageProcessor:
    """The image processor of one model. It may be used from several threads."""

    def __init__(self, processor: Any, tokenizer: Any, *, placeholder: int) -> None:
        """`processor`: a transformers processor; `placeholder`: the token that features take the place of."""
        self.processor = processor
        """That of transformers, for users' code."""
        self._tokenizer = tokenizer
        self.placeholder = placeholder
        self.image_token: str = processor.image_token
        """What stands for an image in a text to which a chat template has been applied."""
        named = (self.image_token, tokenizer.convert_ids_to_tokens(placeholder))
        others = (getattr(processor, f"{kind}_token", None) for kind in ("video", "audio"))
        self.reserved_tokens = tuple(dict.fromkeys(token for token in (*named, *others) if isinstance(token, str)))
        """Tokens that stand for images, videos or sound. In a text that a user wrote they are a mistake."""
        self._tokens_of_size = functools.lru_cache(maxsize=2**14)(self._count_tokens)

    @staticmethod
    def load(path: str | os.PathLike[str], tokenizer: Any, *, trust_remote_code: bool = False) -> ImageProcessor | None:
        """The processor of the model at `path`; None: the model reads no images. Raises ImageProcessorError.

        Some models keep their chat template with the processor alone: a tokenizer without one gets that.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(os.path.expanduser(path), trust_remote_code=trust_remote_code)
        if not has_vision(config):
            return None
        placeholder = placeholder_of(config)
        try:
            processor = load_processor(path, config, tokenizer, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
            raise ImageProcessorError(
                f"{path}: the image processor of {config.model_type} cannot be loaded: {error}"
            ) from error
        if getattr(processor, "image_token", None) is None:
            raise ImageProcessorError(f"{path}: the processor of {config.model_type} names no image token")
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = getattr(processor, "chat_template", None)
        return ImageProcessor(processor, tokenizer, placeholder=placeholder)

    def prepare(self, image: Image) -> ImageInput:
        """What the model reads of this image. It takes milliseconds to seconds: call it outside of event loops."""
        image = image.convert("RGB")
        try:
            found = self.processor(
                text=[self.image_token], images=[image], add_special_tokens=False, return_tensors="pt"
            )
        except (ValueError, OSError, ZeroDivisionError) as error:
            raise ImageProcessorError(f"an image of {image.width} × {image.height} pixels: {error}") from error
        token_ids = tuple(found["input_ids"][0].tolist())
        tensors = {name: t for name, t in found.items() if name not in _NO_MODEL_INPUTS and isinstance(t, Tensor)}
        return ImageInput(
            tensors={name: tensor.contiguous() for name, tensor in tensors.items()},
            token_ids=token_ids,
            placeholder=self.placeholder,
            digest=digest_of(tensors, token_ids),
            thumbnail=_thumbnail(image),
            size=image.size,
        )

    def token_ids(self, width: int, height: int) -> tuple[int, ...]:
        """The tokens of an image of this size, which is all that they depend on: `prepare(image).token_ids`."""
        return self._tokens_of_size(width, height)

    def _count_tokens(self, width: int, height: int) -> tuple[int, ...]:
        number = self._stated_number(width, height) if self._states_numbers else None
        return (self.placeholder,) * number if number is not None else self._prepared_tokens(width, height)

    @functools.cached_property
    def _states_numbers(self) -> bool:
        """Whether the processor says by itself how many tokens an image of some size has, in microseconds. It is
        believed if it is right about a few sizes, and if these tokens are all that stands for an image."""
        return all(
            self._stated_number(*size) is not None
            and self._prepared_tokens(*size) == (self.placeholder,) * (self._stated_number(*size) or 0)
            for size in ((32, 32), (640, 480), (300, 900), (1600, 700))
        )

    def _stated_number(self, width: int, height: int) -> int | None:
        try:
            stated = self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
            return int(stated["num_image_tokens"][0])
        except Exception:  # a private method, which families have or have not: preparing an image always works
            return None

    def _prepared_tokens(self, width: int, height: int) -> tuple[int, ...]:
        from PIL import Image

        return self.prepare(Image.new("RGB", (width, height))).token_ids

    @property
    def settings(self) -> str:
        """What its results depend on, for the names of what is kept of them."""
        own = {name: value for name, value in vars(self.processor).items() if isinstance(value, int | float | str)}
        return f"{type(self.processor).__name__} {own} {self.processor.image_processor.to_json_string()}"

    def expand(self, text: str, images: Sequence[ImageInput]) -> ExpandedText:
        """The tokens of a text in which every image has one image token. Raises ImageProcessorError when the numbers
        differ: an image without a place, or a place without an image, would be lost without a word."""
        parts = text.split(self.image_token)
        if len(parts) - 1 != len(images):
            raise ImageProcessorError(
                f"the text has {len(parts) - 1} times {self.image_token}, and {len(images)} images belong to it"
            )
        # Image tokens are special tokens: no text before or after one is ever part of the same token.
        token_ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        (one,) = self._tokenizer(self.image_token, add_special_tokens=False)["input_ids"]
        waiting = list(images)
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        for token in token_ids:
            if token == one:
                image = waiting.pop(0)
                placed.append(PlacedImage(len(expanded), image))
                expanded += image.token_ids
            else:
                expanded.append(token)
        return ExpandedText(expanded, tuple(placed))

    def blank(self) -> ImageInput:
        """A small black image, for a forward in which only its shape matters."""
        return self.prepare(blank_image())


def has_vision(config: Any) -> bool:
    """Whether a model's configuration has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def blank_image() -> Image:
    from PIL import Image

    return Image.new("RGB", (32, 32))


def placeholder_of(config: Any) -> int:
    """The token whose places the features of images take. Raises ImageProcessorError."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise ImageProcessorError(f"the configuration of {config.model_type} names no image_token_id")


def unsampled_tokens(config: Any) -> tuple[int, ...]:
    """The tokens that stand for images, videos or sound, which a policy must never sample; none for a model of text."""
    if not has_vision(config):
        return ()
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")]
    found = {value for name in names if isinstance(value := getattr(config, name, None), int)}
    vocabulary = config.get_text_config().vocab_size
    return tuple(sorted(token for token in found if 0 <= token < vocabulary))


def digest_of(tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> str:
    """Equal for equal tensors (names, shapes, types and numbers) and tokens alone."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    found.update(np.asarray(token_ids, dtype=np.int64).tobytes())
    return found.hexdigest()


def load_processor(path: Any, config: Any, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The processor of text and images, without one of videos: that of many families needs torchvision, of which there
    is no build that works beside every torch. Pillow resizes images just as well."""
    from transformers import AutoImageProcessor, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    path = os.path.expanduser(path)
    images = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code)
    cls: Any = PROCESSOR_MAPPING[type(config)]
    # The check looks classes up that exist with torchvision alone. What it checks is given here by name.
    unchecked = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, given: None})
    stored, _ = ProcessorMixin.get_processor_dict(path)
    options = {name: value for name, value in stored.items() if name not in ("processor_class", "auto_map")}
    options = {name: value for name, value in options.items() if not isinstance(value, dict)}
    return unchecked(image_processor=images, tokenizer=tokenizer, **options)


def _thumbnail(image: Image) -> bytes:
    small = image.copy()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    return buffer.getvalue()
