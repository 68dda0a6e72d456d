"""Examples of supervised fine-tuning: texts as tokens, with the tokens that are learnt."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.data.boundaries import Encoder, MarkedText
from openrlhf.data.files import DataError, Record
from openrlhf.data.image_places import DataImages, ImagePlaces, place_in_messages, place_in_text
from openrlhf.data.images import ImageError, named_image
from openrlhf.data.reading import Format, Reading, SkipReason, Unusable, chat_text, plain_text
from openrlhf.data.sources import Records, warn_left_out
from openrlhf.data.templates import known_keys, read_messages, read_text, read_value, render_chat, says_something
from openrlhf.data.tokenisation import tokenise
from openrlhf.models.image_processor import ImageProcessor, ImageProcessorError
from openrlhf.types import PlacedImage

logger = logging.getLogger(__name__)

DECODED = 32
"""Samples with images that are read to their last pixel before a run begins."""
KEPT_IMAGES = 32
"""Prepared images that a data set keeps for the next ones who ask."""

Images = tuple[bytes | str, ...]
Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One tokenised text.

    "2+3=" → "5", a token per character:

        token_ids    2 + 3 = 5 </s>
        target_mask  0 0 0 0 1 1
    """

    token_ids: Tensor
    """int64 [T]"""
    target_mask: Tensor
    """bool [T]: tokens that are learnt; never the first, which nothing predicts."""
    where: str = ""
    """The origin of the record, for messages: `record 4 of train.jsonl`."""
    load_images: Callable[[], tuple[PlacedImage, ...]] | None = None
    """Reads and prepares the images among the tokens; None: there are none."""
    image_keys: tuple[int, ...] = ()
    """A number for each image, equal for the same image: it is known without reading any."""

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images among the tokens. Raises DataError for one that cannot be read any more."""
        return self.load_images() if self.load_images else ()

    def __post_init__(self) -> None:
        if self.token_ids.dim() != 1 or self.token_ids.shape != self.target_mask.shape:
            raise ValueError(f"mask of shape {tuple(self.target_mask.shape)} for {tuple(self.token_ids.shape)} tokens")
        if len(self.token_ids) == 0 or bool(self.target_mask[0]):
            raise ValueError("the first token of a sequence has nothing before it, so it cannot be learnt")

    def __len__(self) -> int:
        return self.token_ids.shape[0]


@dataclass(frozen=True, kw_only=True)
class ExampleFormat:
    """Which keys of a record hold what, and how they become text.

    - `output_key` set: prompt and answer, strings or chats. With the chat template, strings are wrapped as one message
      of the user and one of the assistant; the answers learnt are the assistant's messages under `output_key`.
    - `output_key` unset: `input_key` holds a whole chat, whose last message is learnt.
    - `multiturn`: every message of the assistant is learnt.
    - `pretrain`: the text as it is, all of it learnt: neither template is applied, nothing is stripped and no
      end-of-sequence is added. A list of messages is no text: it is rendered in the chat template, and all of that
      is learnt.
    """

    input_key: str = "input"
    output_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    multiturn: bool = False
    pretrain: bool = False
    places: ImagePlaces | None = None

    def read(self, record: Record, tokenizer: Any, folder: Path | None = None) -> Reading:
        if self.pretrain:
            text, images = self._raw(record, tokenizer, folder)
        elif self.apply_chat_template:
            text, images = self._chat(record, tokenizer, folder)
        else:
            text, images = self._plain(record, folder)
        return Reading((text,), images=(images,))

    def _raw(self, record: Record, tokenizer: Any, folder: Path | None) -> tuple[MarkedText, Images]:
        value = read_value(record, self.input_key, flag="--data.input_key")
        output = None if self.output_key is None else self._output(record)
        if self.apply_chat_template and not (isinstance(value, str | None) and isinstance(output, str | None)):
            messages = read_messages(value, role="user", key=self.input_key)
            messages += read_messages(output, role="assistant", key=self.output_key or "")
            messages, images = place_in_messages(messages, record, self.places, folder)
            text = render_chat(messages, tokenizer) if any(map(says_something, messages)) else ""
        else:
            text = read_text(value, key=self.input_key) + read_text(output, key=self.output_key or "")
            text, images = place_in_text(text, record, self.places, folder)
        if not text:
            raise Unusable(SkipReason.EMPTY_RESPONSE)
        return MarkedText(text, None, closed=False), images

    def _plain(self, record: Record, folder: Path | None) -> tuple[MarkedText, Images]:
        prompt = read_text(read_value(record, self.input_key, flag="--data.input_key"), key=self.input_key)
        if self.output_key is None:
            raise DataError(
                f"its {self.input_key!r} is one text, and which part of it is the answer is not said: set "
                f"--data.output_key, or --model.pretrain_mode_enable to learn all of it"
            )
        response = read_text(self._output(record), key=self.output_key)
        if not prompt.strip():
            raise Unusable(SkipReason.EMPTY_PROMPT)
        prompt, images = place_in_text(prompt, record, self.places, folder)
        return plain_text(prompt, response, input_template=self.input_template, places=self.places), images

    def _chat(self, record: Record, tokenizer: Any, folder: Path | None) -> tuple[MarkedText, Images]:
        value = read_value(record, self.input_key, flag="--data.input_key")
        messages = read_messages(value, role="user", key=self.input_key)
        first = 0 if self.multiturn else len(messages)
        if self.output_key is not None:
            messages += read_messages(self._output(record), role="assistant", key=self.output_key)
        elif isinstance(value, str):
            raise DataError(f"its {self.input_key!r} is one text, not a chat with an answer: set --data.output_key")
        elif not self.multiturn:
            first = max(0, len(messages) - 1)
        if first == 0 and not self.multiturn:
            raise Unusable(SkipReason.EMPTY_PROMPT)
        messages, images = place_in_messages(messages, record, self.places, folder)
        return chat_text(messages, tokenizer, first=first), images

    def _output(self, record: Record) -> Any:
        assert self.output_key is not None
        return read_value(record, self.output_key, flag="--data.output_key")


class TokenisedSet(Sequence[Sample], Generic[Sample]):
    """The usable samples of a data set, tokenised, in file order.

    Every record is read once, here. Records there is nothing to learn from are left out, with one warning per reason
    that says how many; anything else that is wrong raises DataError with the record's number.
    """

    def __init__(
        self,
        records: Records,
        format: Format,
        *,
        tokenizer: Any,
        max_len: int,
        workers: int | None = None,
        cache_dir: Path | None = None,
        image_processor: ImageProcessor | None = None,
        flag: str = "--data.dataset",
    ) -> None:
        """`workers`, `cache_dir`: see `tokenisation.tokenise`; `tokenisation.default_folder()` is the usual folder.
        `image_processor`: needed where the format has places for images."""
        images = None
        if format.places is not None:
            if image_processor is None:
                raise ValueError("images need an image processor")
            images = DataImages(format.places, image_processor)
        encoder = Encoder(tokenizer, max_len=max_len, image_token=images.places.token if images else None)
        self._records = records
        self._format = format
        self._tokenizer = encoder.tokenizer
        self._flag = flag
        self._columns = tokenise(
            records, format, encoder, images=images, workers=workers, cache_dir=cache_dir, flag=flag
        )
        self._starts_NK = _before(self._columns.lengths)
        self._first_image_NK = _before(self._columns.images)
        # A prompt with two answers, and whatever asks for a sample twice in a step, has each image prepared once.
        self._prepare = functools.lru_cache(maxsize=KEPT_IMAGES)(images.prepare) if images else None
        self.skipped: dict[str, int] = {}
        """Reason → how many records were left out for it."""
        self._report(flag, max_len=max_len)
        for index in np.flatnonzero(self._columns.images.sum(axis=1))[:DECODED].tolist():
            for sequence in range(self._columns.images.shape[1]):
                self._images(index, sequence)  # to the last pixel, so that what is wrong with all is found here

    def __len__(self) -> int:
        return len(self._columns.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._sample(range(len(self))[index])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, all of its sequences together."""
        return self._columns.lengths.sum(axis=1).tolist()

    @property
    def target_counts(self) -> list[int]:
        """Tokens to learn in each sample, all of its sequences together."""
        if not len(self):
            return []
        return np.add.reduceat(self._columns.targets, self._starts_NK[:, 0], dtype=np.int64).tolist()

    @property
    def digest(self) -> str:
        """A digest of all tokens and of which are learnt. Two sets with the same digest are the same."""
        digest = hashlib.blake2b(digest_size=8)
        for column in (self._columns.lengths, self._columns.values, self._columns.ids, self._columns.targets):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    @property
    def num_truncated(self) -> int:
        """Samples that were cut at the length limit."""
        return int(self._columns.truncated.any(axis=1).sum())

    def where(self, index: int) -> str:
        """`record 12 of train.jsonl`, for messages about sample `index`."""
        return self._records.where(int(self._columns.rows[index]))

    def _sample(self, index: int) -> Sample:
        raise NotImplementedError

    def _example(self, index: int, sequence: int = 0) -> Example:
        start = int(self._starts_NK[index, sequence])
        tokens = slice(start, start + int(self._columns.lengths[index, sequence]))
        load_images = functools.partial(self._images, index, sequence)
        keys = self._columns.image_keys[self._image_slice(index, sequence)].tolist()
        return Example(
            token_ids=torch.from_numpy(self._columns.ids[tokens].astype(np.int64)),
            target_mask=torch.from_numpy(np.array(self._columns.targets[tokens])),
            where=self.where(index),
            load_images=load_images if keys else None,
            image_keys=tuple(keys),
        )

    def _images(self, index: int, sequence: int) -> tuple[PlacedImage, ...]:
        """The images of a sequence, read again. Raises DataError for one that is not what it was."""
        row, offset = int(self._columns.rows[index]), int(self._starts_NK[index, sequence])
        spans = self._columns.image_spans[self._image_slice(index, sequence)].tolist()
        placed = []
        assert self._prepare is not None
        try:
            reading = self._format.read(self._records[row], self._tokenizer, self._records.folder(row))
            for number, ((start, end), source) in enumerate(zip(spans, reading.images[sequence], strict=True), start=1):
                image = self._prepare(source)
                if tuple(self._columns.ids[offset + start : offset + end]) != image.token_ids:
                    raise ImageError(
                        f"image {number} of {len(spans)} has {len(image)} tokens now, and {end - start} when the data "
                        f"was read: has {named_image(source)} been replaced? Begin again"
                    )
                placed.append(PlacedImage(start, image))
        except (DataError, ImageProcessorError) as error:
            raise DataError(f"{self._flag}, {self.where(index)}: {error}") from error
        return tuple(placed)

    def _image_slice(self, index: int, sequence: int) -> slice:
        first = int(self._first_image_NK[index, sequence])
        return slice(first, first + int(self._columns.images[index, sequence]))

    def _report(self, flag: str, *, max_len: int) -> None:
        for reason in SkipReason:
            rows = self._columns.skipped_for(reason).tolist()
            if rows:
                self.skipped[reason.value] = len(rows)
                warn_left_out(self._records, rows, why=reason.value, what="records", flag=flag)
        if self._format.places is not None and not self._columns.images.any():
            logger.warning(
                "%s: no record has an image, under %r or in its messages: is --data.image_key one of %s?",
                flag, self._format.places.key, known_keys(self._records[0]),
            )  # fmt: skip
        if not len(self):
            counts = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
            raise DataError(f"{flag}: no usable record among {len(self._records)}: {counts or 'there are none'}")
        if self.num_truncated:
            logger.info("%s: %d of %d samples are cut at %d tokens", flag, self.num_truncated, len(self), max_len)
        if altered := np.flatnonzero(self._columns.altered).tolist():
            logger.warning(
                "%s: in %d of %d samples the chat template leaves out or changes words of an answer, for instance its "
                "thinking; what is left is learnt (%s)", flag, len(altered), len(self), self.where(altered[0]),
            )  # fmt: skip


def _before(counts: np.ndarray) -> np.ndarray:
    """int64 [N, K]: the sum of all counts before each."""
    return np.cumsum(counts).reshape(counts.shape) - counts


class ExampleSet(TokenisedSet[Example]):
    """Examples from records in an `ExampleFormat`."""

    def _sample(self, index: int) -> Example:
        return self._example(index)


if TYPE_CHECKING:
    _: type[Format] = ExampleFormat
