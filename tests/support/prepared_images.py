"""Prepared images without a model: a thumbnail, a size and so many equal tokens."""

from __future__ import annotations

import io

from PIL import Image
from vision_models import image

from openrlhf.types import ImageInput


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def prepared(seed: int, *, tokens: int, placeholder: int, width: int = 24, height: int = 16) -> ImageInput:
    """As a processor would prepare `image(seed)`; other seeds have other digests."""
    return ImageInput(
        tensors={},
        token_ids=(placeholder,) * tokens,
        placeholder=placeholder,
        digest=f"{seed:032x}",
        thumbnail=png(image(seed, width=width, height=height)),
        size=(width * 10, height * 10),
    )
