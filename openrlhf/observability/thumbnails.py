"""Small pictures for people: in a folder beside the rollout log, each image once, and in the report's page.

A folder of files by digest, not data in the log: the same image is in many samples and steps, a log stays readable
text, and a folder that is copied takes its pictures along.
"""

from __future__ import annotations

import base64
import io
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

    from openrlhf.types import ImageInput

FOLDER = "rollout_images"
"""Beside rollouts.jsonl. `FOLDER/<digest>.png` is how the log names a file."""
MOST_PIXELS = 1024
"""The longer side of a file that is read: what is larger is no thumbnail of ours."""
DRAWING_BYTES = 12_000
"""A thumbnail with a larger PNG is a photo, of which no PNG is smaller than its JPEG."""
_NAME = re.compile(rf"{FOLDER}/([0-9a-f]{{8,128}}\.png)")
_PNG = b"\x89PNG\r\n\x1a\n"


class ThumbnailFolder:
    """The thumbnails of a log. The folder is made for the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = path.iterdir() if path.is_dir() else ()
        self._sizes = {file.name: file.stat().st_size for file in found if file.suffix == ".png"}

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def add(self, image: ImageInput) -> Path | None:
        """The file that shows the image, written unless it is there; None: the image has no thumbnail."""
        if not image.thumbnail:
            return None
        path = self._path / f"{image.digest}.png"
        if path.name not in self._sizes:
            self._path.mkdir(parents=True, exist_ok=True)
            # Renamed into place: a run that is killed here leaves no half of a picture under the name.
            draft = path.with_suffix(f".{os.getpid()}.partial")
            draft.write_bytes(image.thumbnail)
            draft.replace(path)
            self._sizes[path.name] = len(image.thumbnail)
        return path


def read_thumbnail(run: Path, name: object) -> bytes | None:
    """The PNG that a log in the folder `run` names; None where there is none. Names of other files are not read."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return None
    try:
        png = (run / FOLDER / match[1]).read_bytes()
    except OSError:
        return None
    size = png_size(png)
    return png if size is not None and max(size) <= MOST_PIXELS else None


def png_size(png: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG; None for what is none."""
    if not png.startswith(_PNG) or png[12:16] != b"IHDR" or len(png) < 24:
        return None
    width, height = struct.unpack(">II", png[16:24])
    return (width, height) if width and height else None


class PagePicture(NamedTuple):
    """A thumbnail as a page holds it."""

    width: int
    height: int
    uri: str
    """`data:image/…;base64,…`"""


def page_picture(png: bytes, *, side: int) -> PagePicture | None:
    """The picture with a longer side of at most `side` pixels, as the smaller of PNG and JPEG. None: it is broken.

    Without Pillow, on a machine where a report is only read, it stays as it is.
    """
    size = png_size(png)
    if size is None:
        return None
    try:
        from PIL import Image as pil
    except ImportError:
        return PagePicture(*size, _uri("png", png))
    try:
        with pil.open(io.BytesIO(png), formats=["PNG"]) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError):
        return None
    if max(size) > side:
        image.thumbnail((side, side))
        png = _encoded(image, "PNG") if len(png) <= DRAWING_BYTES else png
    jpeg = _encoded(image, "JPEG", quality=80)
    # Of few colours the PNG is smaller, and has no smears.
    return PagePicture(*image.size, _uri("png", png) if len(png) <= len(jpeg) else _uri("jpeg", jpeg))


def _encoded(image: Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
