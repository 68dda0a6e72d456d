"""A teacher that other machines serve: vLLM's OpenAI-compatible server tells the log-probs of a prompt's tokens.

POST /v1/completions {"prompt": token ids, "prompt_logprobs": k, "max_tokens": 1} is answered with, in `choices[0]`,

    prompt_logprobs   [null, {"151": {"logprob": -0.2, "rank": 1, "decoded_token": "a"}, …}, …]

one entry for each token: the k likeliest there by their ids, and the token itself if it is none of them. They are of
the softmax at temperature 1, over all tokens. Attempts, deadlines and the choice of servers are as in `rewards.http`.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import torch

from openrlhf.agents.values import BadValueError
from openrlhf.learners.teacher import as_read
from openrlhf.rewards.http import REACH_SECONDS, HttpServers, Remedy
from openrlhf.types import Segment, TrainingBatch
from openrlhf.utils import waits

T = TypeVar("T")
DEFAULT_PATH = "/v1/completions"
PROBE = "The 3 quick foxes: été, 東京! def f(x): return x**2\n"
"""A text whose tokens differ between vocabularies."""
SHOWN = 200


class RemoteTeacherError(RuntimeError):
    """No server of a teacher gave an answer that can be used."""


class _Servers(HttpServers):
    useless = Remedy.ANOTHER_SERVER  # it answers all samples so
    what = "teacher server"
    timeout_flag = "--teacher.timeout"
    error = RemoteTeacherError

    async def longest(self, url: str) -> int | None:
        """The most tokens of a request and its answer, as the list of models says that belongs to the address of
        completions. None: there is no list, or it does not say."""
        base, found, rest = url.rpartition("/completions")
        if not found or rest:
            return None
        try:
            async with (
                asyncio.timeout(REACH_SECONDS),
                self._client().get(f"{base}/models", allow_redirects=False) as response,
            ):
                card = (await response.json(content_type=None))["data"][0]  # the one that is asked, as none is named
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
            return None
        most = card.get("max_model_len") if isinstance(card, dict) else None
        return most if isinstance(most, int) else None


class Told(NamedTuple):
    """What a teacher says of the action tokens of a segment."""

    ids: list[list[int]]
    """The likeliest tokens; of a teacher that rewards, the sampled one alone."""
    logprobs: list[list[float]]


class RemoteTeacher:
    """Asks one of several servers about each sample, many at once."""

    def __init__(
        self, urls: Sequence[str], *, top_k: int, vocabulary: int, timeout: float, api_key: str | None
    ) -> None:
        """`top_k`: how many of the likeliest tokens are wanted, 0: the log-probs of the sampled ones. `vocabulary`: the
        number of the policy's tokens. `timeout`: seconds for one sample, all attempts together."""
        self._urls = [completions_url(url) for url in urls]
        self._top_k = top_k
        self._vocabulary = vocabulary
        self._timeout = timeout
        self._api_key = api_key

    def tell(self, batch: TrainingBatch) -> None:
        if not self._top_k:
            self._require_whole(batch)
        segments = [sample.segment for sample in as_read(batch).samples]
        with waits.waiting(f"for the teacher servers {', '.join(self._urls)}"):
            told = _run(self._ask_all(segments))
        ids = torch.tensor([row for one in told for row in one.ids], dtype=torch.int32)
        logprobs = torch.tensor([row for one in told for row in one.logprobs], dtype=torch.float32)
        width = self._top_k or 1
        if self._top_k:
            batch.teacher_ids_AK, batch.teacher_logprobs_AK = ids.view(-1, width), logprobs.view(-1, width)
        else:
            batch.teacher_logprobs_A = logprobs.view(-1)

    def _require_whole(self, batch: TrainingBatch) -> None:
        """A reward is the difference of two log-probs, which must be of softmaxes over the same tokens. Raises
        RemoteTeacherError where those of the policy are over a part of them: an agent may cut its own calls."""
        cut = next(
            (s for s in batch.samples if s.segment.supports and bool((s.segment.supports.sizes_A > 0).any())), None
        )
        if cut is not None:
            raise RemoteTeacherError(
                f"--teacher.remote_url: prompt {cut.key.prompt} sample {cut.key.sample} was sampled with top_p, top_k "
                "or min_p, which its agent asked for: servers tell log-probs over all tokens, and those of the policy "
                "are of what these leave. Give --algo.sampling_mask 0 or --teacher.loss, or sample without them"
            )

    async def _ask_all(self, segments: Sequence[Segment]) -> list[Told]:
        servers = _Servers(self._urls, timeout=self._timeout, api_key=self._api_key)
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._ask(servers, segment)) for segment in segments]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await servers.close()
        return [task.result() for task in asked]

    async def _ask(self, servers: _Servers, segment: Segment) -> Told:
        token_ids = segment.token_ids.tolist()
        actions = segment.action_mask.nonzero().flatten().tolist()
        told = await servers.ask(
            _request(token_ids, self._top_k),
            samples=1,
            name="--teacher.remote_url",
            parse=lambda found: self._told(found, token_ids, actions),
        )
        waits.mark_progress()
        return told

    def _told(self, found: Any, token_ids: Sequence[int], actions: Sequence[int]) -> Told:
        entries = prompt_logprobs(found, len(token_ids))
        told = Told([], [])
        for at in actions:
            known = _by_id(entries[at])
            if self._top_k:
                best = sorted(known, key=lambda token: -known[token])[: self._top_k]
                if len(best) < self._top_k:
                    raise BadValueError(f"{len(best)} tokens where --teacher.top_k {self._top_k} were asked for")
                if max(best) >= self._vocabulary:
                    raise BadValueError(f"token {max(best)} among the likeliest: the policy has {self._vocabulary}")
            elif token_ids[at] in known:
                best = [token_ids[at]]
            else:
                raise BadValueError(f"no log-prob of token {token_ids[at]} at position {at}: {_shown(entries[at])}")
            told.ids.append(best)
            told.logprobs.append([known[token] for token in best])
        return told


def check_remote_teacher(
    urls: Sequence[str], *, tokenizer: Any, top_k: int, max_len: int, timeout: float, api_key: str | None
) -> None:
    """Each server reads a text as the policy's tokenizer does, tells what is asked, and reads samples of `max_len`
    tokens, as far as it says how many it reads. Raises RemoteTeacherError."""
    own = list(tokenizer([PROBE], add_special_tokens=False)["input_ids"][0])
    body = _request(PROBE, top_k, return_token_ids=True, add_special_tokens=False)

    def parse(found: Any) -> None:
        theirs = _choice(found).get("prompt_token_ids")
        if theirs != own:
            raise BadValueError(
                f"it reads {PROBE!r} as the tokens {_shown(theirs)}, and the policy as {_shown(own)}: take a "
                "teacher of the same family"
            )
        prompt_logprobs(found, len(own))

    async def check(url: str) -> None:
        servers = _Servers([completions_url(url)], timeout=timeout, api_key=api_key)
        try:
            await servers.ask(body, samples=1, name="--teacher.remote_url", parse=parse)
            most = await servers.longest(completions_url(url))
        finally:
            await servers.close()
        if most is not None and most <= max_len:
            raise RemoteTeacherError(
                f"--teacher.remote_url: {url} reads {most} tokens, and samples have up to {max_len} (--data.max_len), "
                f"after each of which one more is asked for: start it with --max-model-len {max_len + 1}, or give "
                f"--data.max_len {most - 1}"
            )

    for url in urls:
        _run(check(url))


def completions_url(url: str) -> str:
    """The address that is asked: the URL as given, with `/v1/completions` where it ends before that."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path in ("", "/v1"):
        return urlunsplit(parts._replace(path=DEFAULT_PATH))
    return url


def prompt_logprobs(found: Any, tokens: int) -> list[Any]:
    """The entry of each token; that of the first is None. Raises BadValueError."""
    entries = _choice(found).get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != tokens:
        many = f"{len(entries)} entries" if isinstance(entries, list) else _shown(entries)
        raise BadValueError(f"choices[0].prompt_logprobs must have an entry for each of {tokens} tokens, got {many}")
    return entries


def _choice(found: Any) -> dict[str, Any]:
    choices = found.get("choices") if isinstance(found, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadValueError(f"there must be choices, got {_shown(found)}")
    return choices[0]


def _by_id(entry: Any) -> dict[int, float]:
    try:
        known = {int(token): float(about["logprob"]) for token, about in entry.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise BadValueError(f'expected {{"token id": {{"logprob": …}}}}, got {_shown(entry)}') from None
    if not all(math.isfinite(value) and value <= 1e-3 for value in known.values()):
        raise BadValueError(f"these are no log-probs: {_shown(entry)}")
    return known


def _request(prompt: str | list[int], top_k: int, **more: Any) -> bytes:
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k, **more}
    return json.dumps(asked).encode()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _run(work: Coroutine[Any, Any, T]) -> T:
    """In a thread of its own: the caller's may have an event loop."""
    call: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, work).result()


if TYPE_CHECKING:
    from openrlhf.learners.teacher import Teacher

    _: type[Teacher] = RemoteTeacher
