"""Where the images of a record stand in its text.

A record's images are under `--data.image_key`, or in the items of its chat messages. Places for those under the key are

- items without an image of their own, `{"type": "image"}`, where the messages have such;
- otherwise every `<image>` in a text;
- otherwise, where nothing says it, the beginning: in a chat, that of the user's first message.

In a record without images `<image>` is text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf.data.files import DataError, Record
from openrlhf.data.images import SOURCE_KEYS, ImageError, image_size, is_url, portable, read_image
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.types import ImageInput

MARK = "<image>"
"""What users write where an image belongs."""
IMAGE_TYPES = ("image", "image_url")
"""The types of the items of chat messages that are images."""


class PlacedText(NamedTuple):
    """A text with one image token for each of its images."""

    text: str
    images: tuple[bytes | str, ...] = ()
    """As `images.portable` returns them, in the order of their tokens."""


class PlacedMessages(NamedTuple):
    """Messages with one item `{"type": "image"}` for each of their images."""

    messages: list[dict[str, Any]]
    images: tuple[bytes | str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImagePlaces:
    """Which keys hold images, how many there may be, and how a model's text writes them (`templates.image_places`)."""

    key: str
    most: int
    """The most images that a record may have (`--data.max_images_per_prompt`)."""
    allow_urls: bool
    token: str
    """What stands for an image in a text to which a template has been applied."""
    written: str
    """How an image is written in a text without template: its token, and what the model's template has around it."""
    reserved: tuple[str, ...]
    """Tokens that stand for images, videos or sound. Nobody may write them."""
    items_only: bool
    """Whether the chat template leaves out the content of messages that is a string."""

    def in_text(self, text: str, record: Record, *, folder: Path | None = None) -> PlacedText:
        """A text, no chat template is applied to it, with the images under the record's key. Raises DataError.

        Who writes the model's own text by hand may write its image token instead of `<image>`.
        """
        own = self.own_images(record)
        if not own:
            self._refuse_reserved([text], images=False)
            return PlacedText(text)
        marks = re.compile(f"({re.escape(MARK)}|{re.escape(self.token)})")
        parts = marks.split(text)
        self._refuse_reserved(parts[::2], images=True)
        places = len(parts) // 2
        if places == 0:
            text = self.written * len(own) + text
        elif places != len(own):
            raise self._other_number(places, len(own), f"times {MARK}")
        else:
            text = marks.sub(lambda found: self.token if found[0] == self.token else self.written, text)
        return PlacedText(text, self._portable(own, folder))

    def in_messages(
        self, messages: Sequence[Mapping[str, Any]], record: Record, *, folder: Path | None = None
    ) -> PlacedMessages:
        """Chat messages, with the images in them and under the record's key. Raises DataError."""
        own = self.own_images(record)
        read = [{**message, "content": _items(message["content"])} for message in messages]
        brought = sum(_source(item) is not None for message in read for item in message["content"] or ())
        places = sum(is_image(item) for message in read for item in message["content"] or ()) - brought
        if own and not places:
            read = [{**m, "content": m["content"] and _split(m["content"])} for m in read]
            places = sum(is_image(item) for message in read for item in message["content"] or ()) - brought
        if own and not places:
            if brought:
                raise DataError(
                    f"its messages bring {brought} images of their own, and nothing in them says where the {len(own)} "
                    f"under {self.key!r} belong: write {MARK} there, or take them out"
                )
            self._put_in_front(read, len(own))
            places = len(own)
        if places != len(own):
            raise self._other_number(places, len(own), "places for images without an image of their own")
        waiting = iter(own)
        images = []
        for message in read:
            for item in filter(is_image, message["content"] or ()):
                source = _source(item)
                images.append(next(waiting) if source is None else source)
        texts = [item["text"] for message in read for item in message["content"] or () if not is_image(item)]
        self._refuse_reserved(texts, images=bool(images))
        for message, before in zip(read, messages, strict=True):
            message["content"] = self._content(before["content"], message["content"])
        return PlacedMessages(read, self._portable(images, folder))

    def require_tokens(self, text: str, images: Sequence[Any]) -> None:
        """Raises DataError where the text has not one token for each image: the template is not for images, or a part
        of the record that is neither text nor image has such a token."""
        if text.count(self.token) != len(images) and (images or self.token != MARK):
            raise DataError(
                f"with its template it has {text.count(self.token)} times {self.token} for {len(images)} images: "
                "the chat template must write one for each {'type': 'image'}; a template that does so may be given "
                "with --data.tokenizer_chat_template"
            )

    def require_plain(self, text: str) -> None:
        """Raises DataError for a text without images in which one of the model's tokens for images is written."""
        self._refuse_reserved([text], images=True)

    def own_images(self, record: Record) -> list[Any]:
        """What is under the key: none, one or several images."""
        return listed_images(record.get(self.key))

    def _put_in_front(self, messages: list[dict[str, Any]], count: int) -> None:
        asked = [message for message in messages if message["role"] == "user"] or messages
        asked[0]["content"] = [*({"type": "image"} for _ in range(count)), *(asked[0]["content"] or ())]

    def _content(self, before: Any, items: list[dict[str, Any]] | None) -> Any:
        """A string where it was one and may stay one."""
        if items is None or (isinstance(before, str) and not self.items_only and not any(map(is_image, items))):
            return before
        return [{"type": "image"} if is_image(item) else item for item in items]

    def _refuse_reserved(self, texts: Sequence[str], *, images: bool) -> None:
        """`<image>` may be a model's own token. In a record without images it is text, and is played as text."""
        reserved = [token for token in self.reserved if images or token != MARK]
        for token in (token for text in texts for token in reserved if token in text):
            raise DataError(
                f"its text has {token}, which stands for an image, a video or sound in this model, and none belongs to "
                f"it: take it out, or write {MARK} where an image of {self.key!r} belongs"
            )

    def _other_number(self, places: int, images: int, what: str) -> DataError:
        return DataError(f"it has {places} {what}, and {images} images under {self.key!r}: give one for each")

    def _portable(self, sources: Sequence[Any], folder: Path | None) -> tuple[bytes | str, ...]:
        if len(sources) > self.most:
            raise DataError(
                f"it has {len(sources)} images, and --data.max_images_per_prompt is {self.most}: raise it, or take the "
                "record out"
            )
        found = []
        for number, source in enumerate(sources, start=1):
            try:
                found.append(portable(source, folder=folder))
                if is_url(found[-1]) and not self.allow_urls:
                    raise ImageError(f"{found[-1][:200]} is a URL: --data.allow_image_urls lets the run fetch images")
            except ImageError as error:
                raise ImageError(f"image {number} of {len(sources)}: {error}") from error
        return tuple(found)


@dataclass(frozen=True, slots=True)
class DataImages:
    """How the images of records are found, and how a model reads them."""

    places: ImagePlaces
    processor: ImageProcessor

    def under(self, key: str) -> DataImages:
        """The same for records that have their images under this key."""
        return DataImages(replace(self.places, key=key), self.processor)

    def token_ids(self, image: bytes | str) -> tuple[int, ...] | None:
        """The tokens of what `images.portable` returned, known by its size; None for a URL, which is not fetched.
        Raises ImageError and ImageProcessorError."""
        size = image_size(image)
        return None if size is None else self.processor.token_ids(*size)

    def prepare(self, image: bytes | str) -> ImageInput:
        """Raises ImageError and ImageProcessorError."""
        return self.processor.prepare(read_image(image, allow_urls=self.places.allow_urls))


def place_in_text(text: str, record: Record, places: ImagePlaces | None, folder: Path | None) -> PlacedText:
    """`ImagePlaces.in_text`; without `places` the text has no images."""
    return PlacedText(text) if places is None else places.in_text(text, record, folder=folder)


def place_in_messages(
    messages: Sequence[Mapping[str, Any]], record: Record, places: ImagePlaces | None, folder: Path | None
) -> PlacedMessages:
    """`ImagePlaces.in_messages`; without `places` an image among the messages is an error."""
    if places is not None:
        return places.in_messages(messages, record, folder=folder)
    refuse_images(messages)
    return PlacedMessages([dict(message) for message in messages])


def listed_images(value: Any) -> list[Any]:
    """None, one or several: a null and an empty text, which is what an empty cell of a table is, are none."""
    if isinstance(value, list | tuple):
        return [image for image in value if image is not None]
    return [] if value is None or (isinstance(value, str) and not value.strip()) else [value]


def is_image(item: Any) -> bool:
    """Whether an item of a chat message is an image."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    return kind in IMAGE_TYPES or (kind is None and _source(item) is not None)


def image_sources(record: Record, key: str) -> Iterator[Any]:
    """Every image of a record as it is written there: those under the key, and those in messages."""
    for value in (*listed_images(record.get(key)), *_items_of(record)):
        while isinstance(value, Mapping):
            value = next((value[name] for name in SOURCE_KEYS if value.get(name) is not None), None)
        yield value


def _items_of(record: Record) -> Iterator[Any]:
    for messages in record.values():
        for message in messages if isinstance(messages, list | tuple) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            yield from filter(is_image, content if isinstance(content, list | tuple) else ())


def refuse_images(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError for an image in the messages: for runs that read none."""
    for message in messages:
        if isinstance(message["content"], list | tuple) and any(map(is_image, message["content"])):
            raise DataError(
                "its messages have an image, and this run reads none: set --data.max_images_per_prompt to the most "
                "images that a record has"
            )


def _items(content: Any) -> list[dict[str, Any]] | None:
    """The content of a message as items; None: it has none."""
    if content is None:
        return None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise DataError(f"the content of a message must be a string or a list of items, got {type(content).__name__}")
    items = []
    for item in content:
        if isinstance(item, str):
            item = {"type": "text", "text": item}
        if not isinstance(item, Mapping):
            raise DataError(f"an item of a message must be an object with a 'type', got {item!r:.80}")
        # Columnar files fill the keys that an item lacks with None.
        item = {key: value for key, value in item.items() if value is not None}
        if not is_image(item) and not isinstance(item.get("text"), str):
            raise DataError(
                f"an item of a message is of type {item.get('type')!r}: text and images ({', '.join(IMAGE_TYPES)}) "
                "are read"
            )
        items.append(item)
    return items


def _source(item: Mapping[str, Any]) -> Any:
    """The image that an item brings; None: it brings none."""
    if item.get("type") not in (*IMAGE_TYPES, None):
        return None
    return next((item[key] for key in SOURCE_KEYS if item.get(key) is not None), None)


def _split(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With an item for every mark in a text."""
    split: list[dict[str, Any]] = []
    for item in items:
        if is_image(item) or MARK not in item["text"]:
            split.append(dict(item))
            continue
        for number, part in enumerate(item["text"].split(MARK)):
            split += [{"type": "image"}] if number else []
            split += [{**item, "text": part}] if part else []
    return split
