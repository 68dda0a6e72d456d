"""Images in episodes: each is read and prepared once in a process, beside the event loops, and none is ever dropped.

From sources (`data.images.read_image`) to what the policy reads:

    text        has a mark for each image: the model's own image token, or `<image>`, which becomes what the chat
                template writes for an image. Images of a text without any mark stand before it. Another number of marks
                is an error.
    token ids   have one image token for each image, or all the tokens that stand for it (`ImageInput.token_ids`)

Without images, text that happens to contain such a mark stays text.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.values import BadValueError
from openrlhf.data.image_places import MARK
from openrlhf.data.images import ImageError, is_url, portable, read_image
from openrlhf.data.templates import image_places
from openrlhf.models.image_processor import ExpandedText, ImageProcessor, ImageProcessorError
from openrlhf.rollout.requests import num_bytes
from openrlhf.types import ImageInput, PlacedImage

THREADS = 4
"""Images that are prepared at the same time, at most."""
KEPT_BYTES = 512 << 20
"""The most bytes of prepared images that a process keeps for other episodes of the same prompt, and later turns."""
NO_IMAGES = (
    "the policy of this run reads no images: it needs a model that does, and --data.max_images_per_prompt above 0"
)


class BadImageError(BadValueError):
    """An image cannot be read, has no place, or leaves no room. The text says which and why."""


class EpisodeImages:
    """Prepares the images of the episodes that play in this process. It may be used from any thread and event loop."""

    def __init__(
        self, processor: ImageProcessor, tokenizer: Any, *, allow_urls: bool = False, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.processor = processor
        self.allow_urls = allow_urls
        self._tokenizer = tokenizer
        (self._image_token_id,) = tokenizer(processor.image_token, add_special_tokens=False)["input_ids"]
        self._written = image_places(processor, tokenizer, key="", most=0).written
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._prepared: OrderedDict[Any, Future[ImageInput]] = OrderedDict()
        """By source, the latest used at the end; some are being prepared."""
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="images")

    # ------------------------------------------------------------------------------------ from sources to tensors

    async def prepare(self, sources: Sequence[Any]) -> tuple[ImageInput, ...]:
        """What the policy reads of these images. Raises BadImageError."""
        loop = asyncio.get_running_loop()
        return tuple(await asyncio.gather(*(loop.run_in_executor(self._threads, self.prepare_one, s) for s in sources)))

    async def pixels(self, sources: Sequence[Any]) -> list[Any]:
        """The images as Pillow has them, for users' code. Raises BadImageError."""
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._threads, self._pixels, s) for s in sources)))

    def prepare_one(self, source: Any) -> ImageInput:
        """Blocks while the image is prepared. Raises BadImageError."""
        key = self._key(source)
        with self._lock:
            prepared = self._prepared.get(key)
            if prepared is not None:
                self._prepared.move_to_end(key)
            else:
                own = self._prepared[key] = Future()
        if prepared is not None:
            return prepared.result()  # another thread is at it, or was
        try:
            image = self.processor.prepare(self._pixels(source))
        except Exception as error:  # whatever it is, who waits for the image hears it, and it may be tried again
            with self._lock:
                del self._prepared[key]
            failure = _bad(error) if isinstance(error, ValueError) else error
            own.set_exception(failure)
            raise failure from None
        self._keep(own, image)
        return image

    def _pixels(self, source: Any) -> Any:
        try:
            return read_image(source, allow_urls=self.allow_urls)
        except ImageError as error:
            raise _bad(error) from None

    def _key(self, source: Any) -> Any:
        """Equal for the same image. A file may be another one later, and users' code may draw on a Pillow image."""
        from PIL.Image import Image

        try:
            if isinstance(source, Image):  # perhaps one whose file is read now
                return source.mode, source.size, source.getexif().tobytes(), _hash(source.tobytes()), _palette(source)
            found = portable(source)
            if isinstance(found, bytes):
                return _hash(found)
            if is_url(found):
                return found
            status = os.stat(found)
        except Exception as error:  # decoders have no exception in common
            raise _bad(error) from None
        return found, status.st_mtime_ns, status.st_size

    def _keep(self, own: Future[ImageInput], image: ImageInput) -> None:
        """The oldest are forgotten for it, where need be."""
        with self._lock:
            self._bytes += num_bytes(image)
            own.set_result(image)
            for key, prepared in list(self._prepared.items()):
                if self._bytes <= self._kept_bytes:
                    break
                if prepared.done():
                    self._bytes -= num_bytes(prepared.result())
                    del self._prepared[key]

    # ------------------------------------------------------------------------------------ text

    def expand(self, text: str, images: Sequence[ImageInput]) -> ExpandedText:
        """The tokens of a text with its images. Raises BadImageError when not every image has its mark."""
        return self.processor.expand(self._with_tokens(text, len(images)), images) if images else self._plain(text)

    def count_marks(self, text: str) -> int:
        """The places that images may take in a text."""
        return sum(text.count(mark) for mark in {MARK, self.processor.image_token})

    def _with_tokens(self, text: str, count: int) -> str:
        """The text with one image token for each of `count` images."""
        token = self.processor.image_token
        for reserved in self.processor.reserved_tokens:
            if reserved != token and reserved in text:
                raise BadImageError(f"the text spells {reserved}, which stands for something else than text")
        if text.count(token) == count:  # another `<image>` is text
            return text
        marks = self.count_marks(text)
        if marks == 0:
            return self._written * count + text
        if marks != count:
            names = " or ".join(dict.fromkeys((token, MARK)))
            raise BadImageError(f"the text has {marks} marks of images ({names}), and {count} images belong to it")
        return text.replace(MARK, self._written)

    def _plain(self, text: str) -> ExpandedText:
        """The tokens of a text without images. A token in it that would stand for an image, which is not there, is
        written in two parts."""
        token_ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self.processor.reserved_tokens))})", text):
            halves = (part[:1], part[1:]) if part in self.processor.reserved_tokens else (part,)
            token_ids += [token for half in halves for token in self._tokenise(half)]
        return ExpandedText(token_ids, ())

    def _tokenise(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    # ------------------------------------------------------------------------------------ token ids

    def place(self, token_ids: Sequence[int], images: Sequence[ImageInput]) -> PlacedTokens:
        """Tokens in which each image is one image token, or all of its own, in order. Raises BadImageError."""
        starts = _find_places(list(token_ids), images, token=self._image_token_id)
        if starts is None:
            raise BadImageError(
                f"{list(token_ids).count(self._image_token_id)} of the {len(token_ids)} tokens are image tokens "
                f"({self.processor.image_token}), and {len(images)} images belong to them: give one token for each "
                f"image, or all that the image processor makes of it ({', '.join(str(len(i)) for i in images)})"
                if images
                else f"token {list(token_ids).index(self._image_token_id)} stands for an image "
                f"({self.processor.image_token}), and no image belongs to it"
            )
        expanded: list[int] = []
        origins: list[int | None] = []
        placed: list[PlacedImage] = []
        at = 0
        for (start, end), image in zip(starts, images, strict=True):
            expanded += token_ids[at:start]
            origins += range(at, start)
            placed.append(PlacedImage(len(expanded), image))
            expanded += image.token_ids
            origins += [None] * len(image)
            at = end
        expanded += token_ids[at:]
        origins += range(at, len(token_ids))
        return PlacedTokens(expanded, tuple(placed), origins)

    def collapse(self, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
        """One image token for each image, as texts have it; `images` are among the tokens."""
        collapsed: list[int] = []
        at = 0
        for placed in images:
            collapsed += [*token_ids[at : placed.start], self._image_token_id]
            at = placed.end
        return [*collapsed, *token_ids[at:]]


class PlacedTokens(NamedTuple):
    """Token ids with all the tokens of their images."""

    token_ids: list[int]
    images: tuple[PlacedImage, ...]
    origins: list[int | None]
    """Of each token its index before; None for those of an image."""


def _find_places(token_ids: list[int], images: Sequence[ImageInput], *, token: int) -> list[tuple[int, int]] | None:
    """Where each image begins and ends among the tokens; None when images and image tokens do not come out even.

    Users' code collapses some images to one token and leaves others as they are. Raises BadImageError where that can be
    read in two ways: [t t · t t] may be images of 1, 2 and 2 tokens, or of 2, 2 and 1.
    """
    as_they_are = _search_places(token_ids, images, token=token, collapsed_first=False)
    if sum(image.token_ids.count(token) for image in images) == token_ids.count(token):
        return as_they_are  # none is collapsed
    collapsed = _search_places(token_ids, images, token=token, collapsed_first=True)
    if token_ids.count(token) != len(images) and as_they_are != collapsed:
        read = [_runs_between(token_ids, places or ()) for places in (as_they_are, collapsed)]
        if read[0] != read[1]:
            raise BadImageError(
                "some images have one token and some have all of theirs, side by side, so that it is not clear which "
                "is which: give them all in one form"
            )
    return collapsed


def _search_places(
    token_ids: list[int], images: Sequence[ImageInput], *, token: int, collapsed_first: bool
) -> list[tuple[int, int]] | None:
    """The first way to read the tokens that comes out even."""
    hopeless: set[tuple[int, int]] = set()

    def search(at: int, index: int) -> list[tuple[int, int]] | None:
        if (at, index) in hopeless:
            return None
        if index == len(images):
            return None if token in token_ids[at:] else []
        own = list(images[index].token_ids)
        for start in range(at, len(token_ids)):
            is_whole = token_ids[start] == own[0] and token_ids[start : start + len(own)] == own
            ends = [start + len(own)] if is_whole else []
            if token_ids[start] == token and len(own) != 1:
                ends.append(start + 1)
            for end in reversed(ends) if collapsed_first else ends:
                if (found := search(end, index + 1)) is not None:
                    return [(start, end), *found]
            if token_ids[start] == token:
                break
        hopeless.add((at, index))
        return None

    return search(0, 0)


def _runs_between(token_ids: list[int], places: Sequence[tuple[int, int]]) -> list[int]:
    """How many other tokens stand before each image: the tokens become the same if these are."""
    ends = [0, *(end for _, end in places)]
    return [start - before for before, (start, _) in zip(ends, places, strict=False)]


class ImageTokenizer:
    """The tokenizer of a model that reads images, which users' code knows as a processor too.

    It is called with text alone as a tokenizer is, and with `images` or `text=` as a processor is, which returns the
    tensors that the image processor makes. Everything else is the tokenizer's.
    """

    def __init__(self, tokenizer: Any, images: EpisodeImages) -> None:
        self.tokenizer = tokenizer
        self.episode_images = images
        self.image_token = images.processor.image_token

    @property
    def image_processor(self) -> Any:
        return self.episode_images.processor.processor.image_processor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "images" in kwargs or "text" in kwargs:
            return self.episode_images.processor.processor(*args, **kwargs)
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # of an instance that is not made yet: a copy, for instance
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def image_tokenizer(tokenizer: Any, path: str, *, allow_urls: bool, trust_remote_code: bool) -> ImageTokenizer:
    """The tokenizer of the model at `path`, with its image processor. Raises ImageProcessorError."""
    processor = ImageProcessor.load(path, tokenizer, trust_remote_code=trust_remote_code)
    if processor is None:
        raise ImageProcessorError(f"{path} is a model that reads no images: leave --data.max_images_per_prompt out")
    return with_images(tokenizer, processor, allow_urls=allow_urls)


def with_images(tokenizer: Any, processor: ImageProcessor, *, allow_urls: bool) -> ImageTokenizer:
    """The tokenizer, and its model's image processor, for the episodes of this process."""
    return ImageTokenizer(tokenizer, EpisodeImages(processor, tokenizer, allow_urls=allow_urls))


def images_of(hf_tokenizer: Any) -> EpisodeImages | None:
    """None: the policy reads no images."""
    return getattr(hf_tokenizer, "episode_images", None)


def check_readable(hf_tokenizer: Any, sources: Sequence[Any]) -> None:
    """Raises BadImageError for images that no policy of this run will see."""
    if sources and images_of(hf_tokenizer) is None:
        raise BadImageError(f"{len(sources)} came, but {NO_IMAGES}")


async def read_text(hf_tokenizer: Any, text: str, sources: Sequence[Any]) -> ExpandedText:
    """The tokens of a text and of the images that belong to it. Raises BadImageError."""
    check_readable(hf_tokenizer, sources)
    images = images_of(hf_tokenizer)
    if images is not None:
        return images.expand(text, await images.prepare(sources))
    return ExpandedText(hf_tokenizer(text, add_special_tokens=False)["input_ids"], ())


def begin_recording(read: ExpandedText, *, most: int, what: str) -> TokenRecorder:
    """The recorder of an episode that begins with these tokens. Text beyond `most` tokens is cut from the left; with
    images it is not, because no image is cut in two or left out. Raises BadImageError."""
    most = max(1, most)
    if read.images and len(read.token_ids) > most:
        raise BadImageError(
            f"{what} has {len(read.token_ids)} tokens with its {len(read.images)} images, and room for {most}: raise "
            "--data.max_len, or give it fewer or smaller images"
        )
    return TokenRecorder(read.token_ids[-most:], read.images)


def _bad(error: Exception) -> BadImageError:
    return BadImageError(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _palette(image: Any) -> bytes:
    return b"" if image.palette is None else image.palette.tobytes()
