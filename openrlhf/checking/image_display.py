"""The images of a checked text: their sizes and places among the tokens, and what they show.

A terminal with colours draws them; from a pipe people open the thumbnails.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from openrlhf.observability.thumbnails import ThumbnailFolder
from openrlhf.observability.turns import TextImage
from openrlhf.types import ImageInput

MOST_COLUMNS, MOST_ROWS = 36, 12
"""The most characters of a drawing, across and down."""
MOST_DRAWN = 6
"""The most images that are drawn for one text."""
GAP = 2


class ImageDisplay:
    def __init__(self, console: Console) -> None:
        self._console = console
        colours = console.color_system in ("256", "truecolor", "windows") and not console.no_color
        self._draws = console.is_terminal and colours
        self._thumbnails: ThumbnailFolder | None = None
        self._folder: Path | None = None
        self._drawn: set[str] = set()

    def show(self, images: Sequence[TextImage]) -> None:
        """A line for each, then those that were not drawn before."""
        if not images:
            return
        self._console.print("")
        before = self._folder
        self._console.print(self._table(images))
        if not self._draws:
            if self._folder is not before:
                self._console.print(f"(the thumbnails are in {self._folder})", soft_wrap=True)
            return
        new = {image.placed.image.digest: image for image in images if image.placed.image.digest not in self._drawn}
        self._drawn |= new.keys()
        shown = [image for image in new.values() if image.placed.image.thumbnail][:MOST_DRAWN]
        for row in self._rows(shown):
            self._console.print("")
            self._console.print(row)
        if len(new) > len(shown):
            self._console.print(Text(f"({len(new) - len(shown)} more are not drawn)", style="dim"))

    def _table(self, images: Sequence[TextImage]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("")
        for name in ("pixels", "tokens", "from", "to"):
            table.add_column(name, justify="right")
        if not self._draws:
            table.add_column("thumbnail", no_wrap=True)
        for image in images:
            placed = image.placed
            size = placed.image.size
            pixels = "?" if size is None else f"{size[0]} × {size[1]}"
            where = [] if self._draws else [self._file(placed.image)]
            table.add_row(
                f"image {image.number}", pixels, str(len(placed.image)), str(placed.start), str(placed.end), *where
            )
        return table

    def _file(self, image: ImageInput) -> str:
        if self._thumbnails is None:
            self._folder = Path(tempfile.mkdtemp(prefix="openrlhf-check-"))
            self._thumbnails = ThumbnailFolder(self._folder)
        path = self._thumbnails.add(image)
        return "none" if path is None else path.name

    def _rows(self, images: Sequence[TextImage]) -> list[Table]:
        """The drawings, as many beside each other as there is room for."""
        beside = max(1, (self._console.width + GAP) // (MOST_COLUMNS + GAP))
        rows = []
        for start in range(0, len(images), beside):
            row = Table.grid(padding=(0, GAP, 0, 0))
            row.add_row(*(self._captioned(image) for image in images[start : start + beside]))
            rows.append(row)
        return rows

    def _captioned(self, image: TextImage) -> Group:
        width = min(MOST_COLUMNS, self._console.width)
        return Group(Text(f"image {image.number}", style="dim"), half_blocks(image.placed.image.thumbnail, width))


def half_blocks(png: bytes, width: int) -> Text:
    """The picture in characters, each two pixels high: the upper one is the block's colour, the lower one behind it."""
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=["PNG"]) as opened:
        image = opened.convert("RGB")
    scale = min(width / image.width, 2 * MOST_ROWS / image.height)
    columns, lines = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    # Small pictures are enlarged as they are: a pixel of theirs is an even square.
    image = image.resize((columns, lines), Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX)
    pixels = image.load()
    assert pixels is not None
    text = Text(no_wrap=True)
    for upper in range(0, lines, 2):
        if upper:
            text.append("\n")
        for column in range(columns):
            style = _colour(pixels[column, upper])
            if upper + 1 < lines:
                style += f" on {_colour(pixels[column, upper + 1])}"
            text.append("▀", style=style)
    return text


def _colour(pixel: object) -> str:
    assert isinstance(pixel, tuple)
    return "#{:02x}{:02x}{:02x}".format(*pixel)
