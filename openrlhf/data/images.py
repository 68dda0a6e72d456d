"""Images of records and environments: from whatever form they come in to pixels.

portable      the same image as bytes of a file, as an absolute path or as a URL: cheap to keep and to send
image_size    its width and height, read from the beginning of the file
read_image    its pixels, in RGB
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from openrlhf.data.files import DataError
from openrlhf.utils import waits

if TYPE_CHECKING:
    from PIL.Image import Image

URL_SECONDS = 30.0
"""The deadline of a download."""
URL_BYTES = 64 * 2**20
"""The most that is downloaded for one image."""
SOURCE_KEYS = ("bytes", "image", "image_url", "url", "path", "base64")
"""The keys under which an object may hold an image: those of `datasets` and of items in chat messages."""
KINDS = "a path, the bytes of a file, a data URI, base64, a URL, a Pillow image or an array of uint8"

_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK", "Qk")
"""The first bytes of PNG, JPEG, GIF, WebP, TIFF (two) and BMP files."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{32,}={0,2}\s*")
_ORIENTATION = 0x0112
_SIXTEEN_BITS = ("I", "I;16", "I;16L", "I;16B", "I;16N")


class ImageError(DataError):
    """An image cannot be read. The message names the image, and says what is wrong with it."""


def read_image(source: Any, *, allow_urls: bool, folder: Path | None = None) -> Image:
    """The pixels of an image in RGB, upright. It takes milliseconds to seconds: call it outside of event loops.

    `source`: a path (see `portable`), the bytes of a file, a data URI, base64, a Pillow image, an array of uint8, an
    object with one of `SOURCE_KEYS`, or, with `allow_urls`, an http(s) URL. What is transparent becomes white, 16 bits
    of grey become 8, and of an animation the first picture is taken. Raises ImageError.
    """
    from PIL import Image

    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if isinstance(source, Image.Image):
        return _rgb(source, "a Pillow image")
    found = portable(source, folder=folder)
    what = named_image(found)
    if is_url(found):
        if not allow_urls:
            raise ImageError(f"{what} is a URL: --data.allow_image_urls lets the run fetch images")
        found = _download(found)
    with _open_file(found, what) as file, _open_image(file, what) as image:
        return _rgb(image, what)


def portable(source: Any, *, folder: Path | None = None) -> bytes | str:
    """The same image in a form that is cheap to keep and to send, and that means the same in every process of this
    machine: the bytes of its file, an absolute path, or a URL. The pixels are not looked at.

    A relative path is looked for in `folder`, which is that of the data file, and then in the working directory.
    Raises ImageError for a file that is not there, and for a value that is no image.
    """
    from PIL import Image

    if isinstance(source, Mapping):
        given = [source[key] for key in SOURCE_KEYS if source.get(key) is not None]
        if not given:
            raise ImageError(f"an image must have one of {', '.join(SOURCE_KEYS)}, got the keys {_listed(source)}")
        return portable(given[0], folder=folder)
    if isinstance(source, bytes | bytearray | memoryview):
        if not len(source):
            raise ImageError("an image has no bytes")
        return bytes(source)
    if isinstance(source, os.PathLike):
        return _find(os.fspath(source), folder)
    if isinstance(source, np.ndarray):
        source = _from_array(source)
    if isinstance(source, Image.Image):
        return _as_png(_rgb(source, "a Pillow image"))
    if not isinstance(source, str) or not source.strip():
        raise ImageError(f"an image must be {KINDS}, got {source!r:.60} ({type(source).__name__})")
    return _from_text(source.strip(), folder)


def image_size(source: bytes | str) -> tuple[int, int] | None:
    """Width and height of what `portable` returned, as `read_image` would give it; None for a URL, which is not
    fetched for it. Only the beginning of the file is read. Raises ImageError."""
    if is_url(source):
        return None
    what = named_image(source)
    with _open_file(source, what) as file, _open_image(file, what) as image:
        try:
            # Pillow turns a TIFF by itself, and would read a whole PNG to find out whether it is turned.
            asked = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
            turned = asked and image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        except Exception as error:  # decoders have no exception in common
            raise _broken(what, error) from error
        return (image.height, image.width) if turned else (image.width, image.height)


def is_url(source: Any) -> TypeGuard[str]:
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def named_image(source: bytes | str) -> str:
    """What messages call it."""
    if isinstance(source, bytes):
        return f"an image of {len(source):,} bytes"
    return f"the image {source if len(source) <= 200 else source[:199] + '…'}"


def _from_text(text: str, folder: Path | None) -> bytes | str:
    if is_url(text):
        return text
    if text[:5].lower() == "data:":
        head, comma, rest = text.partition(",")
        if not comma:
            raise ImageError(f"the data URI {text[:60]!r} has no comma, after which its bytes would be")
        return _from_base64(rest) if head.lower().endswith(";base64") else unquote_to_bytes(rest)
    if text.startswith("file://"):
        return _find(unquote(text.removeprefix("file://localhost").removeprefix("file://")), folder)
    # A path may look like base64, and the base64 of a JPEG begins as an absolute path does.
    if text.startswith(_BASE64_BEGINNINGS) and _BASE64.fullmatch(text) and existing_file(text, folder) is None:
        return _from_base64(text)
    return _find(text, folder)


def _from_base64(text: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the base64 of an image is cut or broken ({error}): {text[:40]}…") from None
    if not data:
        raise ImageError("the base64 of an image has no bytes")
    return data


def _find(path: str, folder: Path | None) -> str:
    found = existing_file(path, folder)
    if found is None:
        given = Path(path).expanduser()
        looked = [] if given.is_absolute() else [*([folder.absolute()] if folder else []), Path.cwd()]
        where = f" (looked in {' and in '.join(map(str, dict.fromkeys(looked)))})" if looked else ""
        raise ImageError(f"there is no image file {path[:200]}{where}")
    return found


def existing_file(path: str, folder: Path | None) -> str | None:
    """The absolute path of this file: beside the data file first, then in the working directory."""
    expanded = os.path.expanduser(path)
    for base in (*([folder] if folder else []), Path.cwd()):
        candidate = os.path.join(os.path.abspath(base), expanded)
        if os.path.isfile(candidate):
            return os.path.normpath(candidate)
    return None


def _from_array(array: np.ndarray) -> Image:
    from PIL import Image

    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ImageError(
            f"an array is an image if it is uint8 [height, width] or [height, width, 3 or 4], got {array.dtype} "
            f"{list(array.shape)}"
        )
    if not array.size:
        raise _no_pixels("an array", array.shape[1], array.shape[0])
    return Image.fromarray(array)


def _as_png(image: Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------- decoding


def _open_file(source: bytes | str, what: str) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        return open(source, "rb")
    except FileNotFoundError:
        raise ImageError(f"there is no image file {source}") from None
    except OSError as error:
        raise ImageError(f"{what} cannot be read ({error.strerror})") from error


def _open_image(file: BinaryIO, what: str) -> Image:
    """The beginning of the file is read, and its size is checked."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(file)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{what} is a decompression bomb, or far too large ({error}): make it smaller") from None
    except UnidentifiedImageError:
        file.seek(0)
        size = _stated_size(file.read(32))
        if size is not None and 0 in size:
            raise _no_pixels(what, *size) from None
        raise ImageError(f"{what} is no image, or its beginning is broken: Pillow knows no such format") from None
    except Exception as error:  # decoders have no exception in common
        raise _broken(what, error) from error
    # Pillow itself only warns of what has up to twice as many pixels.
    if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
        raise ImageError(
            f"{what} is a decompression bomb, or far too large ({image.width} × {image.height} pixels, and "
            f"{Image.MAX_IMAGE_PIXELS:,} is Pillow's limit): make it smaller"
        )
    return image


def _stated_size(beginning: bytes) -> tuple[int, int] | None:
    """Width and height by the header of a PNG, GIF or BMP file. Pillow says of one with 0 that it is no image."""
    for magic, layout, offset in ((b"\x89PNG\r\n\x1a\n", ">II", 16), (b"GIF8", "<HH", 6), (b"BM", "<ii", 18)):
        if beginning.startswith(magic) and len(beginning) >= offset + struct.calcsize(layout):
            width, height = struct.unpack_from(layout, beginning, offset)
            return width, height
    return None


def _rgb(image: Image, what: str) -> Image:
    from PIL import Image as images
    from PIL import ImageOps

    if not image.width or not image.height:
        raise _no_pixels(what, image.width, image.height)
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in _SIXTEEN_BITS:
            image = images.fromarray(_eight_bits(np.asarray(image), what))
        elif image.mode == "F":
            raise ImageError(f"{what} has floating-point pixels, whose range is not known: save it with 8 or 16 bits")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # decoders have no exception in common
        raise _broken(what, error) from error


def _eight_bits(grey: np.ndarray, what: str) -> np.ndarray:
    """uint8 of 0 … 65,535. Pillow's own conversion cuts off what is above 255."""
    if grey.min() < 0 or grey.max() > 65535:
        raise ImageError(f"{what} has pixels outside of 16 bits, whose range is not known: save it with 8 or 16 bits")
    return ((grey.astype(np.int64) + 128) // 257).astype(np.uint8)


def _broken(what: str, error: Exception) -> ImageError:
    return ImageError(f"{what} is truncated or broken ({error or type(error).__name__})")


def _no_pixels(what: str, width: int, height: int) -> ImageError:
    return ImageError(f"{what} has {width} × {height} pixels: there is nothing to see")


def _listed(source: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, source)) or "(none)"


# ---------------------------------------------------------------------------------------------- downloads


def _download(url: str) -> bytes:
    """The body of the answer. The deadline holds for all of it, however slowly a server may speak: a socket's own
    timeout begins anew with every byte."""
    end = time.monotonic() + URL_SECONDS
    result: list[bytes | Exception] = []

    def fetch() -> None:
        try:
            result.append(_fetch(url, end))
        except Exception as error:  # of sockets, of HTTP, of certificates
            result.append(error)

    thread = threading.Thread(target=fetch, name=f"image {url[:60]}", daemon=True)
    with waits.waiting(f"for {named_image(url)}", deadline=URL_SECONDS):
        thread.start()
        thread.join(URL_SECONDS)
    found = result[0] if result else TimeoutError()
    if isinstance(found, bytes):
        return found
    if isinstance(found, ImageError):
        raise found
    late = isinstance(found, TimeoutError) or isinstance(getattr(found, "reason", None), TimeoutError)
    reason = f"no answer within {URL_SECONDS:g} s" if late else str(found) or type(found).__name__
    raise ImageError(f"{named_image(url)} cannot be fetched ({reason})") from found


def _fetch(url: str, end: float) -> bytes:
    opener = urllib.request.OpenerDirector()
    # No handlers of files and FTP, to which an answer could redirect.
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(url, headers={"User-Agent": "openrlhf"})
    parts: list[bytes] = []
    length = 0
    with opener.open(request, timeout=URL_SECONDS) as answer:
        while part := answer.read1(2**16):
            length += len(part)
            if length > URL_BYTES:
                raise ImageError(f"{named_image(url)} has more than {URL_BYTES // 2**20} MiB, which is the limit")
            if time.monotonic() > end:
                raise TimeoutError
            parts.append(part)
    return b"".join(parts)
