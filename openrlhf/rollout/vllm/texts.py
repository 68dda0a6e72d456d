"""The text of a generation that vLLM gives as tokens: decoded once at its end, or part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.rollout.generated_text import GrowingText, finished_text
from openrlhf.types import SamplingParams


class PartTexts:
    """What each part adds. vLLM's own would begin in the middle of the prompt's last character, if that is cut."""

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._growing = GrowingText(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._token_ids: list[int] = []
        self._shown = 0

    def next(self, token_ids: Sequence[int]) -> str:
        """Of a part with others to follow: what is certain."""
        self._token_ids += token_ids
        text = "".join(map(self._growing.feed, token_ids))
        self._shown += len(text)
        return text

    def last(self, token_ids: Sequence[int], *, by_token: bool) -> str:
        """Of the last part, or of a whole generation. `by_token`: its last token ended it."""
        self._token_ids += token_ids
        text = finished_text(self._tokenizer, self._token_ids, self._params, by_token=by_token, found=None)
        return text[self._shown :]
