"""Drafts of the next tokens without a draft model: where they come from, how long they are, and whether they pay.

Imports no vLLM. vLLM verifies a draft in one step: it samples from the policy at every position of the draft, keeps
the tokens that agree, and replaces the first that does not. A draft changes how many tokens a step yields, and never
their distribution (Leviathan et al., arXiv:2211.17192; for a draft that is certain of its tokens, each is kept with
the probability that the policy gives it, and else another is sampled from what is left).

Responses       what was sampled for a prompt before
HistoryDrafts   drafts for requests from the responses to the same prompt
draft_room      how long a draft may be beside so many requests
DraftGate       whether drafts are asked for at all
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from openrlhf.rollout.base import DraftCounts
from openrlhf.rollout.vllm.settings import STEP_TOKENS

WORTH = 0.25
"""Tokens that drafts must add to the step of a request, on average. Below it what they cost is more: looking for them,
their positions in the step, and sampling at each."""
REST = 8
"""Rounds without drafts before they are tried again: policies change."""
ENOUGH = 512
"""Steps of requests below which a round says nothing about drafts."""

_END = -1
"""Stands before every response: no token is equal to it."""


def draft_room(requests: int, wanted: int) -> int:
    """Tokens of a draft for each of so many requests, of `wanted` at most: together they stay within a step whose time
    is that of reading the weights. With more than half as many requests as a step has tokens there are none."""
    return max(0, min(wanted, STEP_TOKENS // max(1, requests) - 1))


class Responses:
    """Earlier responses by their prompts. The prompts used longest ago are forgotten first."""

    def __init__(self, *, max_tokens: int = 2**25, per_prompt: int = 16, context: int = 16) -> None:
        """`max_tokens`: of 4 bytes each. `context`: tokens of the prompt's end that stand before each response, so that
        its beginning is found as well."""
        self._streams: OrderedDict[bytes, np.ndarray] = OrderedDict()
        """By prompt: its responses, the newest last, each behind `_END` and the end of the prompt. None is changed."""
        self._max_tokens = max_tokens
        self._per_prompt = per_prompt
        self.context = context
        self.num_tokens = 0

    @staticmethod
    def key(prompt: Sequence[int] | np.ndarray) -> bytes:
        return hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        if not len(response):
            return
        key = self.key(prompt)
        old = self._streams.pop(key, np.empty(0, np.int32))
        stream = np.concatenate([old, np.array([_END, *prompt[-self.context :], *response], np.int32)])
        starts = np.flatnonzero(stream == _END)
        if len(starts) > self._per_prompt:
            stream = stream[starts[-self._per_prompt] :].copy()
        self._streams[key] = stream
        self.num_tokens += len(stream) - len(old)
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= len(self._streams.popitem(last=False)[1])

    def stream(self, key: bytes) -> np.ndarray | None:
        found = self._streams.get(key)
        if found is not None:
            self._streams.move_to_end(key)
        return found


def longest_match(stream: np.ndarray, recent: np.ndarray, *, shortest: int) -> int | None:
    """Where the stream goes on after the longest end of `recent` that it contains; the last place of several.

    None: no end of at least `shortest` tokens is in it with something behind it.
    """
    ends = np.flatnonzero(stream[:-1] == recent[-1])
    ends = ends[stream[ends + 1] != _END]
    length = 1
    while len(ends) and length < len(recent):
        longer = ends[ends >= length]
        longer = longer[stream[longer - length] == recent[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1 if len(ends) and length >= shortest else None


@dataclass(slots=True)
class _Cursor:
    """Where a request is in an earlier response."""

    key: bytes
    stream: np.ndarray | None = None
    at: int = 0
    """The token of the stream that is expected next,"""
    length: int = 0
    """when the request has so many tokens."""

    def follow(self, tokens: np.ndarray) -> bool:
        """Whether the request has gone on as the response did, which it has then as well."""
        if self.stream is None:
            return False
        new = tokens[self.length :]
        if not np.array_equal(self.stream[self.at : self.at + len(new)], new):
            return False
        self.at, self.length = self.at + len(new), len(tokens)
        return True


class HistoryDrafts:
    """A request follows an earlier response for as long as it goes on like it, and looks for a place in all of them by
    its last tokens when it does not."""

    def __init__(self, responses: Responses, *, shortest: int = 3) -> None:
        self._responses = responses
        self._shortest = shortest
        self._cursors: dict[str, _Cursor] = {}

    def draft(self, name: str, tokens: np.ndarray, *, prompt_length: int, room: int) -> list[int]:
        """At most `room` tokens that may come after `tokens`, of which the first are the prompt; []: nothing is known.

        `name`: the request's, until `end`.
        """
        cursor = self._cursors.get(name)
        if cursor is None:
            cursor = self._cursors[name] = _Cursor(self._responses.key(tokens[:prompt_length]))
        if not cursor.follow(tokens) and not self._place(cursor, tokens):
            return []
        assert cursor.stream is not None
        following = cursor.stream[cursor.at : cursor.at + room]
        ends = np.flatnonzero(following == _END)
        return following[: ends[0] if len(ends) else None].tolist()

    def end(self, name: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """A request is over, and what it sampled is a source for others."""
        self._cursors.pop(name, None)
        self._responses.add(prompt, response)

    def _place(self, cursor: _Cursor, tokens: np.ndarray) -> bool:
        stream = self._responses.stream(cursor.key)
        at = None
        if stream is not None:
            at = longest_match(stream, tokens[-self._responses.context :], shortest=self._shortest)
        cursor.stream = None if at is None else stream
        cursor.at, cursor.length = at or 0, len(tokens)
        return at is not None


class DraftTally:
    """Counts what becomes of drafts, step by step."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        """By request: tokens of the draft that its next step verifies; 0: there was room for one."""
        self._steps = self._tokens = self._open_steps = self._drafted = self._accepted = 0

    def sampled(self, name: str, tokens: int) -> None:
        """A step of a request has yielded so many tokens."""
        self._steps += 1
        self._tokens += tokens
        given = self._given.pop(name, None)
        if given is not None:
            self._open_steps += 1
            self._drafted += given
            self._accepted += min(tokens - 1, given)

    def drafted(self, name: str, tokens: int) -> None:
        self._given[name] = tokens

    def end(self, name: str) -> None:
        self._given.pop(name, None)

    def take(self) -> DraftCounts:
        """Those since the last call."""
        counts = DraftCounts(
            steps=self._steps,
            tokens=self._tokens,
            open_steps=self._open_steps,
            drafted=self._drafted,
            accepted=self._accepted,
        )
        self._steps = self._tokens = self._open_steps = self._drafted = self._accepted = 0
        return counts


class DraftGate:
    """Whether drafts pay: they stop for `REST` rounds after one in which they have added less than `WORTH` tokens to a
    step of a request that had room for one, and are tried again then. A round ends with a push of weights."""

    def __init__(self) -> None:
        self.open = True
        self._rest = 0

    def after(self, counts: DraftCounts) -> str | None:
        """What has changed after a round, in words; None: nothing."""
        if not self.open:
            self._rest -= 1
            if self._rest:
                return None
            self.open = True
            return "are tried again"
        if counts.open_steps < ENOUGH or counts.gain >= WORTH:
            return None
        self.open, self._rest = False, REST
        return (
            f"are off for {REST} rounds: they added {counts.gain:.2f} tokens to a step, and what they cost is "
            f"about {WORTH:g}"
        )
