"""Examples of supervised fine-tuning: texts as tokens, with the tokens that are learnt."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.data.boundaries import Encoder, MarkedText
from openrlhf.data.files import DataError, Record
from openrlhf.data.reading import Format, Reading, SkipReason, Unusable, chat_text, plain_text
from openrlhf.data.sources import Records, warn_left_out
from openrlhf.data.templates import read_messages, read_text, read_value, render_chat, says_something
from openrlhf.data.tokenisation import tokenise

logger = logging.getLogger(__name__)

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

    def read(self, record: Record, tokenizer: Any) -> Reading:
        if self.pretrain:
            return Reading((self._raw(record, tokenizer),))
        return Reading((self._chat(record, tokenizer) if self.apply_chat_template else self._plain(record),))

    def _raw(self, record: Record, tokenizer: Any) -> MarkedText:
        value = read_value(record, self.input_key, flag="--data.input_key")
        output = None if self.output_key is None else self._output(record)
        if self.apply_chat_template and not (isinstance(value, str | None) and isinstance(output, str | None)):
            messages = read_messages(value, role="user", key=self.input_key)
            messages += read_messages(output, role="assistant", key=self.output_key or "")
            text = render_chat(messages, tokenizer) if any(map(says_something, messages)) else ""
        else:
            text = read_text(value, key=self.input_key) + read_text(output, key=self.output_key or "")
        if not text:
            raise Unusable(SkipReason.EMPTY_RESPONSE)
        return MarkedText(text, None, closed=False)

    def _plain(self, record: Record) -> MarkedText:
        prompt = read_text(read_value(record, self.input_key, flag="--data.input_key"), key=self.input_key)
        if self.output_key is None:
            raise DataError(
                f"its {self.input_key!r} is one text, and which part of it is the answer is not said: set "
                f"--data.output_key, or --model.pretrain_mode_enable to learn all of it"
            )
        response = read_text(self._output(record), key=self.output_key)
        return plain_text(prompt, response, input_template=self.input_template)

    def _chat(self, record: Record, tokenizer: Any) -> MarkedText:
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
        return chat_text(messages, tokenizer, first=first)

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
        flag: str = "--data.dataset",
    ) -> None:
        """`workers`, `cache_dir`: see `tokenisation.tokenise`; `tokenisation.default_folder()` is the usual folder."""
        encoder = Encoder(tokenizer, max_len=max_len)
        self._records = records
        self._columns = tokenise(records, format, encoder, workers=workers, cache_dir=cache_dir, flag=flag)
        self._starts_NK = np.cumsum(self._columns.lengths).reshape(self._columns.lengths.shape) - self._columns.lengths
        self.skipped: dict[str, int] = {}
        """Reason → how many records were left out for it."""
        self._report(flag, max_len=max_len)

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
        return Example(
            token_ids=torch.from_numpy(self._columns.ids[tokens].astype(np.int64)),
            target_mask=torch.from_numpy(np.array(self._columns.targets[tokens])),
            where=self.where(index),
        )

    def _report(self, flag: str, *, max_len: int) -> None:
        for reason in SkipReason:
            rows = self._columns.skipped_for(reason).tolist()
            if rows:
                self.skipped[reason.value] = len(rows)
                warn_left_out(self._records, rows, why=reason.value, what="records", flag=flag)
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


class ExampleSet(TokenisedSet[Example]):
    """Examples from records in an `ExampleFormat`."""

    def _sample(self, index: int) -> Example:
        return self._example(index)


if TYPE_CHECKING:
    _: type[Format] = ExampleFormat
