"""A generation in parts: each with what is new, all together what `generate` returns."""

from __future__ import annotations

from typing import Any

from openrlhf.rollout.embedded.batch import Columns, Request
from openrlhf.rollout.embedded.stopping import GrowingText
from openrlhf.types import Generation


class StreamedParts:
    """Cuts one request's generation into parts, and remembers what has been handed out."""

    def __init__(self, request: Request, tokenizer: Any | None) -> None:
        params = request.params
        self._request = request
        self._text = (
            GrowingText(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if tokenizer is not None and params.detokenize
            else None
        )
        self._shown = 0
        self._waiting = ""
        """Text that is certain but may begin a stop string."""
        self.num_tokens = 0

    def next(self, new: Columns) -> Generation:
        """A part with others to follow."""
        self.num_tokens += len(new.token_ids)
        return Generation(
            token_ids=new.token_ids,
            logprobs=new.logprobs if self._request.params.wants_logprobs else None,
            versions=new.versions,
            finish_reason=None,
            text=self._show(new.token_ids),
        )

    def last(self, whole: Generation) -> Generation:
        """What is left of the finished generation."""
        return Generation(
            token_ids=whole.token_ids[self.num_tokens :],
            logprobs=None if whole.logprobs is None else whole.logprobs[self.num_tokens :],
            versions=whole.versions[self.num_tokens :],
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            text=whole.text[self._shown :],
        )

    def _show(self, token_ids: list[int]) -> str:
        if self._text is None:
            return ""
        text = self._waiting + "".join(map(self._text.feed, token_ids))
        stop = self._request.stop
        held = 0 if stop is None or self._request.params.include_stop_str_in_output else stop.begun
        shown = text[: max(0, len(text) - held)]
        self._waiting = text[len(shown) :]
        self._shown += len(shown)
        return shown
