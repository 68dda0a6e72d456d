"""The running requests as arrays, one row each, so that the Python of a step costs the same however many run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openrlhf.rollout.embedded.kv_store import Tokens
from openrlhf.rollout.embedded.sampler import Penalty, uniforms
from openrlhf.rollout.generated_text import GrowingText, StopStrings
from openrlhf.types import Generation, PlacedImage, SamplingParams, Supports

_NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` or `stream` call."""

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]
    """The images in the prompt, in order."""
    tokens: Tokens
    """The prompt in the form in which it is compared with others."""
    params: SamplingParams
    limit: int
    """The most tokens that it may sample."""
    seed: int
    future: asyncio.Future
    ends: np.ndarray
    """int64 [E]: the token ids that end the generation."""
    stop: StopStrings | None = None
    progress: asyncio.Event | None = None
    """Set after each sampled token; a stream waits for it."""
    wanted: int | None = None
    """The number of the stored history that its prompt begins with, as known while the request waits."""
    row: int | None = None
    """The row in which it runs; None while it waits."""
    prompt_version: int = field(default=-1)
    """The version of the weights that read its prompt."""

    @property
    def ends_with_image(self) -> bool:
        return bool(self.images) and self.images[-1].end == len(self.token_ids)

    @property
    def most_known(self) -> int:
        """How many first tokens of the prompt may be known already. The last token must be run, because its logits
        predict the first token of the response; an image that ends there is run as a whole."""
        return self.images[-1].start if self.ends_with_image else len(self.token_ids) - 1

    @property
    def running_row(self) -> int:
        """The row of a request that runs."""
        assert self.row is not None
        return self.row


class RunningBatch:
    """The sampling state and the sampled tokens of every row. `requests[row]` is None where the row is free."""

    def __init__(self, max_rows: int) -> None:
        self.requests: list[Request | None] = [None] * max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self._seed = np.zeros(max_rows, np.uint64)
        self._count = np.zeros(max_rows, np.int64)
        self._limit = np.zeros(max_rows, np.int64)
        self._min_tokens = np.zeros(max_rows, np.int64)
        self._temperature = np.ones(max_rows, np.float32)
        self._top_p = np.ones(max_rows, np.float32)
        self._top_k = np.full(max_rows, -1, np.int64)
        self._min_p = np.zeros(max_rows, np.float32)
        self._penalised = np.zeros(max_rows, bool)
        self._ends = np.full((max_rows, 1), _NO_TOKEN)
        self._wants_logprobs = np.zeros(max_rows, bool)
        self._most_support = np.zeros(max_rows, np.int64)
        self._watched = np.zeros(max_rows, bool)
        self.last_tokens = np.zeros(max_rows, np.int64)
        """The token that each row feeds to its next step."""
        self._token_ids = np.zeros((max_rows, 64), np.int64)
        self._logprobs = np.zeros((max_rows, 64), np.float32)
        self._versions = np.zeros((max_rows, 64), np.int64)
        self._supports: list[list[Sequence[int] | None]] = [[] for _ in range(max_rows)]
        """Of rows that want them: for each token what it was chosen among (`sampler.Sampled.supports`)."""

    def __len__(self) -> int:
        return len(self.requests) - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, request: Request) -> int:
        """Give the request a row."""
        row = self._free.pop()
        params = request.params
        self.requests[row] = request
        request.row = row
        self._seed[row] = request.seed
        self._count[row] = 0
        self._limit[row] = request.limit
        self._min_tokens[row] = params.min_tokens
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k
        self._min_p[row] = params.min_p
        self._penalised[row] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1,
            0,
            0,
        )
        self._wants_logprobs[row] = params.wants_logprobs
        self._most_support[row] = params.supports if params.wants_supports else 0
        self._supports[row] = []
        missing = len(request.ends) - self._ends.shape[1]
        if missing > 0:
            self._ends = np.pad(self._ends, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self._ends[row] = _NO_TOKEN
        self._ends[row, : len(request.ends)] = request.ends
        self._watched[row] = request.stop is not None
        self.last_tokens[row] = request.token_ids[-1]
        return row

    def remove(self, row: int) -> None:
        request = self.requests[row]
        assert request is not None
        request.row = None
        self.requests[row] = None
        self._supports[row] = []
        self._free.append(row)

    def sampling(self, rows: np.ndarray) -> dict:
        """The arguments of `sampler.sample` for these rows, in this order."""
        count = self._count[rows]
        ends = self._ends[rows]
        line, column = np.nonzero((ends != _NO_TOKEN) & (count < self._min_tokens[rows])[:, None])
        return {
            "uniform": uniforms(self._seed[rows], count),
            "temperature": self._temperature[rows],
            "top_p": self._top_p[rows],
            "top_k": self._top_k[rows],
            "min_p": self._min_p[rows],
            "penalties": [self._penalty(i, rows[i]) for i in np.flatnonzero(self._penalised[rows])],
            "forbidden": np.stack([line, ends[line, column]], axis=1),
            "want_logprobs": bool(self._wants_logprobs[rows].any()),
            "most_support": most if (most := self._most_support[rows]).any() else None,
        }

    def _penalty(self, line: int, row: int) -> Penalty:
        request = self.requests[row]
        assert request is not None
        params = request.params
        return Penalty(
            row=line,
            prompt_ids=np.array(request.token_ids),
            response_ids=self._token_ids[row, : self._count[row]],
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )

    def record(
        self,
        rows: np.ndarray,
        token_ids: np.ndarray,
        logprobs: np.ndarray | None,
        supports: Sequence[Sequence[int] | None] | None = None,
        *,
        version: int,
    ) -> tuple[list[int], list[int]]:
        """Append one token to each row. Returns the rows that stopped and those that reached their limit."""
        count = self._count[rows]
        if count.max() >= self._token_ids.shape[1]:  # double the columns, so that growth costs O(1) a token
            for name in ("_token_ids", "_logprobs", "_versions"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)], axis=1))
        self._token_ids[rows, count] = token_ids
        self._versions[rows, count] = version
        if logprobs is not None:
            self._logprobs[rows, count] = logprobs
        if supports is not None:
            for i in np.flatnonzero(self._most_support[rows]).tolist():
                self._supports[rows[i]].append(supports[i])
        self.last_tokens[rows] = token_ids
        count += 1
        self._count[rows] = count

        stopped = (token_ids[:, None] == self._ends[rows]).any(1)
        for i in np.flatnonzero(self._watched[rows]).tolist():
            request = self.requests[rows[i]]
            found = request.stop.feed(int(token_ids[i]))
            if found and count[i] >= self._min_tokens[rows[i]]:
                stopped[i] = True
        full = (count >= self._limit[rows]) & ~stopped
        return rows[stopped].tolist(), rows[full].tolist()

    def sampled(self, row: int, start: int = 0) -> Generation:
        """The tokens that the row has sampled from its token `start` on, as a part of its generation without text."""
        request = self.requests[row]
        assert request is not None
        new = slice(start, int(self._count[row]))
        return Generation(
            token_ids=self._token_ids[row, new].tolist(),
            logprobs=self._logprobs[row, new].tolist() if request.params.wants_logprobs else None,
            versions=self._versions[row, new].tolist(),
            finish_reason=None,
            supports=Supports.of(self._supports[row][new]) if self._most_support[row] else None,
        )


class StreamedParts:
    """Cuts one request's generation into parts. Each part has what is new; all parts together are the generation."""

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
        """Text that is complete but may be the beginning of a stop string, which must not be shown."""
        self.num_tokens = 0

    def next(self, new: Generation) -> Generation:
        """A part that is not the last one, from the tokens that are new since the part before."""
        self.num_tokens += len(new.token_ids)
        return dataclasses.replace(new, text=self._show(new.token_ids))

    def last(self, whole: Generation) -> Generation:
        """The last part: the rest of the finished generation."""
        return Generation(
            token_ids=whole.token_ids[self.num_tokens :],
            logprobs=None if whole.logprobs is None else whole.logprobs[self.num_tokens :],
            versions=whole.versions[self.num_tokens :],
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            text=whole.text[self._shown :],
            routes=whole.routes,
            supports=None if whole.supports is None else whole.supports[self.num_tokens :],
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
