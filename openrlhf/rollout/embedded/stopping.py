"""When a generation has said enough: end-of-sequence ids, and stop strings found while the text grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_REPLACEMENT = "\ufffd"


def eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Every id that ends a sequence, ascending: those of the generation config, the model's config, the tokenizer."""
    found: set[int] = set()
    config = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    for source in (getattr(model, "generation_config", None), config, text_config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
    return tuple(sorted(int(i) for i in found))


class StopStrings:
    """Watches one generation's text for stop strings, a token at a time.

    Special tokens count as text, so that `<|im_end|>` can be a stop string. Decodes only a short tail per
    token: of `_ids` the first `_read` are known as text already, and are decoded again only to see how the next ones
    join them (a tokenizer may write a space, or the rest of a character, only when it sees the neighbour).
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._tail = ""
        self._ids: list[int] = []
        self._read = 0

    def feed(self, token_id: int) -> bool:
        """Whether a stop string ends in the text that this token adds."""
        self._ids.append(token_id)
        known = self._decode(self._ids[: self._read])
        grown = self._decode(self._ids)[len(known) :]
        text = self._tail + grown
        found = any(stop in text[max(0, len(self._tail) - len(stop) + 1) :] for stop in self._stops)
        # A character cut in the middle decodes to a replacement sign until its last byte has come. Text that
        # really holds the sign must not wait for ever: no character has more than four bytes.
        if not grown.endswith(_REPLACEMENT) or len(self._ids) - self._read >= 4:
            self._tail = text[-self._keep :] if self._keep else ""
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
        return found

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
