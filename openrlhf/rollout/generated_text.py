"""The text of a generation and where it ends: end-of-sequence ids, stop strings, text that grows token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from openrlhf.types import SamplingParams

_REPLACEMENT = "\ufffd"


def eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """All ids that end a sequence, ascending: those of the generation config, the model's config and the tokenizer."""
    found: set[int] = set()
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else None
    for source in (getattr(model, "generation_config", None), config, text_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
    return tuple(sorted(int(i) for i in found))


def decode(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text exactly as the policy wrote it. The tokenizers' "clean up" would delete spaces."""
    return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


class GrowingText:
    """The text of a generation, token by token. Text that was handed out never changes afterwards.

    Only a short tail is decoded per token. The text of the first `_read` of `_ids` was handed out already; these ids
    are decoded again only to see how the next ones join them, because a tokenizer may write a space, or the rest of a
    character, only when it sees the token before.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0
        self.open = ""
        """The text of the last tokens, which the next token may still change."""

    def feed(self, token_id: int) -> str:
        """Add a token. Returns the text that has become certain with it."""
        self._ids.append(token_id)
        known, whole = len(self._decode(self._ids[: self._read])), self._decode(self._ids)
        certain = self._certain(whole)
        end = known if certain == self._read else len(self._decode(self._ids[:certain]))
        if end > known:
            self._ids = self._ids[self._read :]
            certain -= self._read
        self._read = certain
        self.open = whole[end:]
        return whole[known:end]

    def _certain(self, whole: str) -> int:
        """How many of the ids have text that later tokens cannot change.

        A character that is cut in the middle decodes to a replacement sign until its last byte has come. A text that
        really contains the sign must not wait for ever. A character has at most four bytes, so among four tokens there
        is at least one place where a character ends.
        """
        if not whole.endswith(_REPLACEMENT):
            return len(self._ids)
        if len(self._ids) - self._read < 4:
            return self._read
        cuts = range(len(self._ids) - 1, self._read, -1)
        return next(
            (cut for cut in cuts if self._decode(self._ids[:cut]) + self._decode(self._ids[cut:]) == whole), self._read
        )

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=self._skip_special_tokens)


class FoundStop(NamedTuple):
    string: str
    tail: str
    """The text from the string's first character to the end. It is longer than the string if the last token goes on."""


class StopStrings:
    """Watches one generation's text for stop strings. Special tokens count as text: `<|im_end|>` can be one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._text = GrowingText(tokenizer, skip_special_tokens=False)
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._tail = ""
        self.found: FoundStop | None = None
        """The first stop string that ends in the text of the last token; None: there is none."""

    def feed(self, token_id: int) -> bool:
        """Whether a stop string ends in the text that this token adds."""
        known = self._tail
        certain = known + self._text.feed(token_id)
        text = certain + self._text.open
        starts = ((text.find(stop, max(0, len(known) - len(stop) + 1)), stop) for stop in self._stops)
        start, stop = min((found for found in starts if found[0] >= 0), default=(-1, ""))
        self.found = FoundStop(stop, text[start:]) if stop else None
        self._tail = certain[-self._keep :] if self._keep else ""
        return self.found is not None

    @property
    def begun(self) -> int:
        """How many of the last certain characters may be the beginning of a stop string."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if self._tail.endswith(stop[:n]))
        return max(lengths, default=0)


def finished_text(
    tokenizer: Any, token_ids: Sequence[int], params: SamplingParams, *, by_token: bool, found: FoundStop | None
) -> str:
    """The text of a generation that ended with its last token (`by_token`), a stop string (`found`), or neither."""
    if by_token and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    text = decode(tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens)
    if found is None:
        return text
    surplus = found.tail[len(found.string) :] if params.include_stop_str_in_output else found.tail
    if params.skip_special_tokens:
        for special in tokenizer.all_special_tokens:
            surplus = surplus.replace(special, "")
    return text.removesuffix(surplus)
