"""Thumbnails are written once, read by name alone, and small in a page."""

import base64
import io
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from prepared_images import png, prepared

from openrlhf.observability.thumbnails import FOLDER, ThumbnailFolder, page_picture, png_size, read_thumbnail


def test_a_thumbnail_is_written_once_also_by_a_run_that_goes_on(tmp_path: Path):
    """An older run's file is left as it is, and counts."""
    one, two = prepared(1, tokens=3, placeholder=9), prepared(2, tokens=3, placeholder=9)
    folder = ThumbnailFolder(tmp_path / FOLDER)
    assert not (tmp_path / FOLDER).exists()
    path = folder.add(one)
    assert path is not None
    assert path.read_bytes() == one.thumbnail
    path.write_bytes(b"as it was")
    again = ThumbnailFolder(tmp_path / FOLDER)
    assert again.add(one) == path
    assert path.read_bytes() == b"as it was"
    again.add(two)
    assert again.num_bytes == len(b"as it was") + len(two.thumbnail)
    assert sorted(file.suffix for file in (tmp_path / FOLDER).iterdir()) == [".png", ".png"]


def test_an_image_without_a_thumbnail_has_no_file(tmp_path: Path):
    assert ThumbnailFolder(tmp_path / FOLDER).add(replace(prepared(1, tokens=1, placeholder=9), thumbnail=b"")) is None
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        f"{FOLDER}/../../secret.png",
        f"{FOLDER}/abcdefab/secret.png",
        f"/etc/{FOLDER}/abcdefabcdef.png",
        f"{FOLDER}/abcdefabcdef.png\n",
        f"{FOLDER}/abcdefabcdef.svg",
        "abcdefabcdef.png",
        None,
        7,
    ],
)
def test_no_other_file_is_ever_read(tmp_path: Path, name: object):
    """A log may come from somebody else."""
    run = tmp_path / "run"
    (run / FOLDER / "abcdefab").mkdir(parents=True)
    for path in ("../secret.png", "secret.png", f"{FOLDER}/abcdefab/secret.png", f"{FOLDER}/abcdefabcdef.png"):
        (run / path).write_bytes(prepared(1, tokens=1, placeholder=9).thumbnail)
    (run / FOLDER / "abcdefabcdef.svg").write_text("<svg onload='alert(1)'/>")
    assert read_thumbnail(run, name) is None
    assert read_thumbnail(run, f"{FOLDER}/abcdefabcdef.png") is not None


@pytest.mark.parametrize("content", [b"", b"<svg/>", b"\x89PNG\r\n\x1a\n", None])
def test_what_is_no_picture_is_none(tmp_path: Path, content: bytes | None):
    (tmp_path / FOLDER).mkdir()
    whole = png(Image.new("RGB", (30, 20)))
    name = f"{FOLDER}/abcdefabcdef.png"
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert read_thumbnail(tmp_path, name) is None
    assert page_picture(whole[:50], side=64) is None
    assert png_size(whole) == (30, 20)
    (tmp_path / name).write_bytes(png(Image.new("RGB", (5000, 10))))
    assert read_thumbnail(tmp_path, name) is None


@pytest.mark.parametrize(
    ("picture", "side", "kind", "size"),
    [
        (Image.new("RGB", (8, 8), "red"), 192, "png", (8, 8)),
        (Image.radial_gradient("L").resize((192, 96)), 192, "jpeg", (192, 96)),
        (Image.radial_gradient("L").resize((192, 96)), 64, "jpeg", (64, 32)),
        (Image.new("RGB", (192, 192), "red"), 64, "png", (64, 64)),
    ],
)
def test_a_page_has_the_smaller_kind_at_the_wanted_size(picture, side, kind, size):
    found = page_picture(png(picture), side=side)
    assert found is not None
    head, _, content = found.uri.partition(",")
    assert head == f"data:image/{kind};base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as drawn:
        assert drawn.size == size == found[:2]


def test_a_page_is_made_without_pillow_too(monkeypatch: pytest.MonkeyPatch):
    """The picture is then the file as it is."""
    content = png(Image.new("RGB", (100, 50)))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    found = page_picture(content, side=64)
    assert found == (100, 50, f"data:image/png;base64,{base64.b64encode(content).decode()}")
