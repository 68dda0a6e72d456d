"""Turns a text with marked characters into tokens with a target mask.

Which tokens are learnt is read off the offsets of the whole text's tokens. Tokenising prompt and response apart would
give other tokens wherever a merge crosses the boundary: `"Q:" + " a"` has the token `" a"`, `"Q: " + "a"` too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf.data.files import DataError

HUGE = 1_000_000
"""Characters of a text of which only the part that may be kept is tokenised."""

ImageTokens = tuple[int, ...]
"""The tokens that stand for an image."""
Span = tuple[int, int]
"""Characters `start : end` of a text."""


class MarkedText(NamedTuple):
    """A text and which of its characters the model learns to write."""

    text: str
    learnt: tuple[Span, ...] | None
    """Ascending and apart from each other; None: all of it."""
    closed: bool
    """Whether the end of the text is the end of what the model says, so that end-of-sequence follows."""
    altered: bool = False
    """Whether the chat template changed the words of a message that is learnt."""

    @staticmethod
    def of(text: str, learnt: Iterable[Span], *, altered: bool = False) -> MarkedText:
        """Trailing newlines go; end-of-sequence follows where the last character is learnt."""
        text = text.rstrip("\n")
        spans = tuple((start, min(end, len(text))) for start, end in learnt if start < min(end, len(text)))
        return MarkedText(text, spans, bool(spans) and spans[-1][1] == len(text), altered)


class Tokens(NamedTuple):
    """One tokenised text."""

    ids: np.ndarray
    """int32 [T]"""
    targets: np.ndarray
    """bool [T]: which tokens are learnt; never the first, which nothing predicts."""
    prompt_length: int
    """How many tokens come before the first that is learnt, in the text before it was cut."""
    truncated: bool
    images: tuple[Span, ...] = ()
    """The tokens of each image, in the text before it was cut."""


class Encoder:
    """A tokenizer that knows where in the text its tokens stand.

    - A token is learnt if it holds any learnt character. So one that straddles the boundary is: no part of the answer
      goes unlearnt, and what tells two answers to a prompt apart is always among their targets.
    - End-of-sequence is added as a token, where it is due and not there already. It is learnt.
    - Texts longer than `max_len` tokens are cut at the right; those do not end, and get no end-of-sequence.
    - In place of the image token stand all tokens of the image. None of them is ever learnt.

    Special tokens written in the text are recognised, none are added. A slow tokenizer has no offsets: it serves for
    texts that are learnt as a whole, and is refused for others.
    """

    def __init__(self, tokenizer: Any, *, max_len: int, image_token: str | None = None) -> None:
        """`image_token`: what stands for an image in a text; it is a single token."""
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json")
        self.max_len = max_len
        self.tokenizer = _with_true_offsets(tokenizer) if tokenizer.is_fast else tokenizer
        self.image_token_id = None if image_token is None else int(tokenizer.convert_tokens_to_ids(image_token))

    def encode(self, texts: Sequence[MarkedText], images: Sequence[Sequence[ImageTokens]] = ()) -> list[Tokens]:
        """`images`: the tokens of each text's images, in the order in which they stand in it."""
        if not texts:
            return []
        images = images or [()] * len(texts)
        texts = [
            self._beginning(text) if len(text.text) > HUGE and not own else text
            for text, own in zip(texts, images, strict=True)
        ]
        with_offsets = any(text.learnt is not None for text in texts)
        if with_offsets and not self.tokenizer.is_fast:
            raise DataError(
                "finding the tokens of the answer needs a fast tokenizer, which knows where its tokens stand in the "
                "text: leave --data.disable_fast_tokenizer out, or take a model that has a tokenizer.json"
            )
        encoded = self.tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_offsets_mapping=with_offsets,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about long texts: they are cut below
        )
        offsets = encoded["offset_mapping"] if with_offsets else [None] * len(texts)
        return [
            self._tokens(text, np.array(ids, dtype=np.int32), of, own)
            for text, ids, of, own in zip(texts, encoded["input_ids"], offsets, images, strict=True)
        ]

    def _beginning(self, text: MarkedText) -> MarkedText:
        """A huge text without what is beyond `max_len` tokens for sure: tokenising megabytes takes minutes."""
        most = max(HUGE, (self.max_len + 1) * longest_token(self.tokenizer))
        return text if len(text.text) <= most else text._replace(text=text.text[:most], closed=False)

    def _tokens(
        self, text: MarkedText, ids: np.ndarray, offsets: Sequence[Span] | None, images: Sequence[ImageTokens]
    ) -> Tokens:
        targets = np.ones(len(ids), dtype=bool) if text.learnt is None else tokens_in(text.learnt, offsets or ())
        spans: list[Span] = []
        if images:
            assert self.image_token_id is not None
            ids, targets, spans = with_images(ids, targets, images, image_token_id=self.image_token_id)
        prompt_length = int(targets.argmax()) if targets.any() else len(ids)
        eos = self.tokenizer.eos_token_id
        if text.closed and (len(ids) == 0 or ids[-1] != eos):
            ids, targets = np.append(ids, np.int32(eos)), np.append(targets, True)
        truncated = len(ids) > self.max_len
        ids, targets = ids[: self.max_len], targets[: self.max_len].copy()
        targets[:1] = False
        return Tokens(ids, targets, prompt_length, truncated, tuple(spans))


def with_images(
    ids: np.ndarray, targets: np.ndarray, images: Sequence[ImageTokens], *, image_token_id: int
) -> tuple[np.ndarray, np.ndarray, list[Span]]:
    """Ids and targets with all tokens of each image in the place of its one token, and which these are."""
    places = np.flatnonzero(ids == image_token_id)
    lengths = np.ones(len(ids), dtype=np.int64)
    lengths[places] = [len(image) for image in images]
    ends = np.cumsum(lengths)
    ids, targets = np.repeat(ids, lengths), np.repeat(targets, lengths)
    spans: list[Span] = list(zip((ends - lengths)[places].tolist(), ends[places].tolist(), strict=True))
    for (start, end), image in zip(spans, images, strict=True):
        ids[start:end], targets[start:end] = image, False
    return ids, targets, spans


def without_common_beginning(first: Tokens, second: Tokens) -> list[Tokens]:
    """Tokens that both texts begin with are not learnt: they are as likely in both, and cancel in the comparison."""
    shorter = min(len(first.ids), len(second.ids))
    differ = np.flatnonzero(first.ids[:shorter] != second.ids[:shorter])
    common = int(differ[0]) if len(differ) else max(0, shorter - 1)
    later = [np.arange(len(tokens.ids)) >= common for tokens in (first, second)]
    return [
        tokens._replace(targets=tokens.targets & after, prompt_length=common)
        for tokens, after in zip((first, second), later, strict=True)
    ]


def longest_token(tokenizer: Any) -> int:
    """Characters of its longest token."""
    return max(map(len, tokenizer.get_vocab()))


def tokens_in(spans: Iterable[Span], offsets: Sequence[Span]) -> np.ndarray:
    """bool [T]: tokens that hold at least one character of a span; a token without characters counts by its place."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    ends = np.maximum(ends, starts + 1)
    inside = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        inside |= (starts < end) & (ends > start)
    return inside


def _with_true_offsets(tokenizer: Any) -> Any:
    """A copy without post-processor. Without special tokens to add, all that one does is to trim spaces off offsets."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
