"""`EmbeddedEngine`: the policy samples from itself, in the training process, on CPU or one GPU.

Who waits on whom:
    generate   appends a request to the queue, waits for its future
    stream     the same, and meanwhile for each of its tokens
    _drive     one task per event loop while anything is queued or running: admits, steps, tells the streams, resolves
               the futures of finished rows, yields to the loop once per step; ends when idle, rests while paused
Everything happens on the caller's event loop, between two of its turns: there are no locks, and a training step can
never overlap a decoding step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from openrlhf.models.adapters import adapter_tensors
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import decoder_body
from openrlhf.models.compilation import uncompiled
from openrlhf.models.image_processor import unsampled_tokens
from openrlhf.models.policy import Policy
from openrlhf.models.support import logit_transform
from openrlhf.models.vision import position_ids, reads_images
from openrlhf.rollout.base import ControlledEngine, check_images, check_prompt
from openrlhf.rollout.embedded.batch import Request, RunningBatch, StreamedParts
from openrlhf.rollout.embedded.decoder import Decoder, Prefill, packed_decoder
from openrlhf.rollout.embedded.fallback import CachedDecoder
from openrlhf.rollout.embedded.images import ImageReader
from openrlhf.rollout.embedded.kv_store import KnownPrefix, Tokens, comparable
from openrlhf.rollout.embedded.routes import RouteReader
from openrlhf.rollout.embedded.sampler import sample
from openrlhf.rollout.generated_text import StopStrings, eos_token_ids, finished_text
from openrlhf.types import FinishReason, Generation, PlacedImage, SamplingParams
from openrlhf.utils import waits
from openrlhf.utils.randomness import derive_seed
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock
from openrlhf.weight_sync.probe import policy_logprobs


@dataclass(slots=True)
class EngineStats:
    """Work done since construction."""

    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that went through the model; a prompt shared by n samples counts once."""
    reused_tokens: int = 0
    """Prompt tokens that did not, because a finished request had begun with them: earlier turns of an episode."""


class EmbeddedEngine:
    """Continuous batching over a Hugging Face causal LM that stays the caller's: same weights, no copy.

    A model whose attention implementation is `ATTENTION` is decoded in one packed forward per step. Any other runs
    a request at a time with its own cache (`packed` is False), slow but right. A model of the first kind that
    cannot be decoded so is refused by name at construction.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        *,
        max_model_len: int,
        max_batch_size: int = 256,
        max_batch_tokens: int = 8192,
        reuse_prefixes: bool = True,
        max_feature_bytes: int = 2**29,
        frozen_tower: bool = False,
        return_routes: bool = False,
        seed: int = 0,
    ) -> None:
        """
        Args:
            model: evaluated under `no_grad`, in eval mode; its training flags are put back after every step.
            tokenizer: decodes results and looks for stop strings; None: no text, no stop strings.
            max_model_len: most tokens of a request, prompt and response together.
            max_batch_size: most requests decoding at once.
            max_batch_tokens: most prompt tokens read in one step; a longer prompt is read in a step of its own.
            reuse_prefixes: whether keys and values of finished requests are kept, while memory and weights last, for
                prompts that begin like them. Costs a copy of each, and at most the memory that running ones have.
            max_feature_bytes: most memory of features of images that are kept for prompts that show them again. The
                least recently used ones go first. The images of one step come on top.
            frozen_tower: whether a change of the weights leaves the vision tower as it is, and with it the features.
            return_routes: whether generations say which experts computed their tokens (`Generation.routes`). A model
                whose routers do not tell is refused.
            seed: randomness of requests that bring no seed; theirs follow from it and the order of the calls.
        """
        for name, value in (
            ("max_model_len", max_model_len - 1),
            ("max_batch_size", max_batch_size),
            ("max_batch_tokens", max_batch_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is too small")
        self.model = model
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._reuse_prefixes = reuse_prefixes
        self._seed = seed
        self._requests_seen = 0
        self._version = 0
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._eos = eos_token_ids(model, tokenizer)
        self._body = decoder_body(model)
        self._unsampled_ids = unsampled_tokens(model.config)
        device = next(model.parameters()).device
        self._unsampled = torch.tensor(self._unsampled_ids, device=device) if self._unsampled_ids else None
        self._waiting: deque[Request] = deque()
        self._batch = RunningBatch(max_batch_size)
        self._by_prompt: dict[Tokens, list[Request]] = {}
        """The running requests of each prompt: a later one starts from the keys and values of any of them."""
        self._streams: list[Request] = []
        self._stale: dict[int, Request] = {}
        """By row: running, with keys and values of older weights: they are read again before they go on."""
        self._free_to_step = asyncio.Event()
        self._free_to_step.set()
        waits.add_progress_source(self._steps_taken)
        self._task: asyncio.Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.packed = getattr(model.config.get_text_config(), "_attn_implementation", None) == ATTENTION
        self._images = (
            ImageReader(model, max_bytes=max_feature_bytes, frozen_tower=frozen_tower)
            if reads_images(self._body)
            else None
        )
        self._return_routes = return_routes
        routes = RouteReader(model) if return_routes else None
        with torch.no_grad(), _evaluating(model):
            self._decoder: Decoder = (
                packed_decoder(
                    model, max_rows=max_batch_size, max_length=max_model_len, images=self._images, routes=routes
                )
                if self.packed
                else CachedDecoder(model, self._images, routes)
            )

    @property
    def version(self) -> int:
        return self._version

    @property
    def shares_weights(self) -> bool:
        return True

    @property
    def needs_base(self) -> bool:
        return False

    async def pause(self) -> None:
        """On the loop that its requests are served on: a step is never in the middle there."""
        self._free_to_step.clear()

    async def resume(self, version: int) -> None:
        """Weights may have changed in place. Tokens sampled from now on are those of a model that has read everything
        before them: keys and values from before are forgotten, also those of requests under way, which are read
        again. So are features of images, unless the vision tower is frozen."""
        if self._free_to_step.is_set() and version == self._version:
            return
        self._version = version
        self._decoder.forget()
        running = {request.running_row: request for request in self._running()}
        self._decoder.remove([row for row in running if row not in self._stale])
        self._stale = running
        self._free_to_step.set()

    async def sleep(self) -> None:
        """The weights stay, which are the trainer's; keys, values and features of images go. The next step allocates
        their memory anew."""
        await self.pause()
        running = {request.running_row: request for request in self._running()}
        self._decoder.clear()
        self._stale = running

    async def wake(self) -> None:
        """Nothing has to come back before the next step."""

    async def load_weights(self, blocks: Sequence[WeightBlock], *, adapter: AdapterSpec | None = None) -> None:
        """Copies into the model, which is the caller's too. A trainer of this model has nothing to load."""
        own: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        if adapter is not None:
            own = adapter_tensors(own)
        with torch.no_grad():
            for name, tensor in (pair for block in blocks for pair in block.tensors()):
                if name not in own:
                    raise ValueError(f"{type(self.model).__name__} has no weight {name}")
                own[name].copy_(tensor)

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        check_prompt(token_ids, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        self._check_images(token_ids, images)
        policy = Policy(self.model, packed=self.packed, transform=logit_transform(self.model.config))
        with _evaluating(self.model):
            return policy_logprobs(policy.eval(), token_ids, images)

    async def take_draft_counts(self) -> None:
        """It drafts nothing."""

    async def check_health(self) -> None:
        """It lives as long as this process does."""

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def _steps_taken(self) -> int:
        return self.stats.steps

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Continue `token_ids` until end-of-sequence, a stop string, `max_tokens` or the context limit.

        With `sampling_params.seed` set, token i depends on (seed, i) and its history alone. `logprobs` are those
        of `sampler.sample`. Cancelling the call frees its place at once. An error of the model fails every call
        under way.
        """
        request = self._submit(token_ids, sampling_params, images)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._drop(request)
            raise

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        """`generate` in parts: what is new, as soon as it is sampled; put together they are what `generate` returns.

        A part is there before the next token is sampled; a consumer that takes its time gets several tokens in one.
        Text comes when it is certain: whole characters, and nothing that may yet turn out to begin a stop string.
        Closing the iterator frees the request's place:

            async with contextlib.aclosing(engine.stream(token_ids, params)) as parts:
                async for part in parts: ...
        """
        request = self._submit(token_ids, sampling_params, images)
        progress = request.progress = asyncio.Event()
        request.future.add_done_callback(lambda _: progress.set())
        self._streams.append(request)
        parts = StreamedParts(request, self.tokenizer)
        try:
            while await progress.wait():
                progress.clear()
                if request.future.done():
                    break
                yield parts.next(self._batch.sampled(request.running_row, start=parts.num_tokens))
            yield parts.last(request.future.result())
        finally:
            self._streams.remove(request)
            self._drop(request)

    def abort(self) -> None:
        """Finish every request now, with the tokens it has: reason ABORT."""
        self._finish(self._running(), FinishReason.ABORT)
        while self._waiting:
            request = self._waiting.popleft()
            logprobs: list[float] | None = [] if request.params.wants_logprobs else None
            nothing = Generation(token_ids=[], logprobs=logprobs, versions=[], finish_reason=None)
            self._resolve(request, nothing, FinishReason.ABORT)

    def release(self) -> None:
        """Give the key-value memory back. The next request allocates it anew."""
        if self.num_running:
            raise RuntimeError(f"{self.num_running} requests are running: wait for them or abort() before release()")
        self._decoder.clear()

    def _submit(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage]
    ) -> Request:
        """Queue a request. Raises ValueError where it cannot be sampled."""
        token_ids, params = tuple(token_ids), sampling_params.copy()
        room = check_prompt(token_ids, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        self._check_images(token_ids, images)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none")
        outside = [token for token in params.stop_token_ids if token >= self._vocab_size]
        if outside:
            raise ValueError(f"stop_token_ids must be in 0 … {self._vocab_size - 1}, got {outside[0]}")
        eos = () if params.ignore_eos else self._eos
        counter, self._requests_seen = self._requests_seen, self._requests_seen + 1
        request = Request(
            token_ids=token_ids,
            images=tuple(images),
            tokens=comparable(token_ids, images),
            params=params,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            seed=derive_seed(self._seed, "request", counter) if params.seed is None else params.seed % 2**64,
            future=asyncio.get_running_loop().create_future(),
            ends=np.unique(np.array([*eos, *params.stop_token_ids], dtype=np.int64)),
            stop=StopStrings(self.tokenizer, params.stop) if params.stop else None,
        )
        if known := self._decoder.recall(request.tokens, most=request.most_known):
            request.wanted = known.number
        self._waiting.append(request)
        self._ensure_driving()
        return request

    def _check_images(self, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        if images and self._images is None:
            raise ValueError(f"{type(self.model).__name__} reads no images, and the prompt has {len(images)}")
        check_images(token_ids, images, unsampled=self._unsampled_ids)
        # Worked out here once, and looked up later: what is wrong with an image fails its own call, and no other.
        position_ids(self._body, len(token_ids), images)

    def _ensure_driving(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._task is not None and not self._task.done() and not self._loop.is_closed():  # type: ignore[union-attr]
                raise RuntimeError("an embedded engine serves one event loop at a time, and another is using it")
            self._forget_loop(loop)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drive(), name="embedded engine")

    def _forget_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop what a loop that ended in the middle has left."""
        self._free(self._running())
        self._waiting = deque(request for request in self._waiting if request.future.get_loop() is loop)
        self._loop, self._task = loop, None
        was_free, self._free_to_step = self._free_to_step.is_set(), asyncio.Event()  # an event belongs to one loop
        if was_free:
            self._free_to_step.set()

    async def _drive(self) -> None:
        try:
            while self._waiting or self.num_running:
                if not self._free_to_step.is_set():
                    await self._free_to_step.wait()
                    continue  # by now everyone may have given up, or the engine be paused again
                self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    @torch.no_grad()
    def _step(self) -> None:
        """Admit who fits, run the model once, record a token for every row, let the finished go."""
        with _evaluating(self.model):
            prefills = self._admit()
            rows, logits = self._decoder.step(self._batch.last_tokens, prefills)
            sampled = sample(logits, unsampled=self._unsampled, **self._batch.sampling(rows))
        logprobs = None if sampled.logprobs is None else sampled.logprobs.cpu().numpy()
        token_ids = sampled.token_ids.cpu().numpy()
        stopped, full = self._batch.record(rows, token_ids, logprobs, sampled.supports, version=self._version)
        self.stats.steps += 1
        self.stats.generated_tokens += len(rows)
        self.stats.prompt_tokens += sum(len(prefill.token_ids) for prefill in prefills)
        self.stats.reused_tokens += sum(prefill.before for prefill in prefills)
        for finished, reason in ((stopped, FinishReason.STOP), (full, FinishReason.LENGTH)):
            if finished:
                self._finish(
                    [request for row in finished if (request := self._batch.requests[row]) is not None], reason
                )
        for request in self._streams:
            if request.row is not None and request.progress is not None:
                request.progress.set()

    def _admit(self) -> list[Prefill]:
        """Move waiting requests into free rows, in order of arrival, up to the step's prompt tokens.

        A prompt is read once: requests that wait together share the reading, and one that comes while another
        with the same prompt runs starts from its keys and values, with only the last prompt token left to feed. Of a
        prompt that begins like a finished request only the rest is read. Prompts are the same if their images are.
        """
        if self._stale:
            return self._read_again()
        prefills: dict[Tokens, Prefill] = {}
        tokens = 0
        while self._waiting and self._batch.num_free:
            request = self._waiting[0]
            prompt = request.tokens
            shared = prefills.get(prompt)
            reader = None if shared else self._reader(request)
            known = None if shared or reader else self._decoder.recall(prompt, most=request.most_known)
            unread = len(prompt) - (known.length if known else 0)
            if shared is None and reader is None and tokens and tokens + unread > self._max_batch_tokens:
                break
            self._waiting.popleft()
            row = self._batch.add(request)
            request.prompt_version = self._version
            if shared is not None:
                prefills[prompt] = shared._replace(siblings=(*shared.siblings, row))
            elif reader is None or not self._decoder.fork(reader.running_row, row, length=len(prompt) - 1):
                prefills[prompt] = self._prefill(request, request.token_ids, known=known)
                tokens += unread
            self._by_prompt.setdefault(prompt, []).append(request)
        return list(prefills.values())

    def _read_again(self) -> list[Prefill]:
        """Requests under way whose weights have changed, up to the step's prompt tokens; all others wait."""
        prefills: list[Prefill] = []
        tokens = 0
        for row, request in list(self._stale.items()):
            history = (*request.token_ids, *self._batch.sampled(row).token_ids)
            if tokens and tokens + len(history) > self._max_batch_tokens:
                break
            tokens += len(history)
            prefills.append(self._prefill(request, history))
            request.prompt_version = self._version
            del self._stale[row]
        return prefills

    def _prefill(self, request: Request, history: tuple[int, ...], *, known: KnownPrefix | None = None) -> Prefill:
        """The reading of a request's tokens so far, without those that are known."""
        before = 0 if known is None else known.length
        images = tuple(PlacedImage(start - before, image) for start, image in request.images if start >= before)
        prefill = Prefill(request.running_row, np.array(history[before:], dtype=np.int64), known=known, images=images)
        # One position more than there are tokens: where the next one will be.
        rows_RT = position_ids(self._body, len(history) + 1, request.images)
        if rows_RT is None:
            return prefill
        shift = int(rows_RT[0, -1]) - len(history)
        return prefill._replace(positions_RP=rows_RT[:, before:-1].numpy(), shift=shift)

    def _reader(self, request: Request) -> Request | None:
        """A running request that has read the same prompt with the present weights. The last token of the prompt is fed
        again, by its id: none will do where that token is an image's."""
        siblings = () if request.ends_with_image else self._by_prompt.get(request.tokens, ())
        return next((s for s in siblings if s.prompt_version == self._version), None)

    def _running(self) -> list[Request]:
        return [request for request in self._batch.requests if request is not None]

    def _finish(self, requests: Sequence[Request], reason: FinishReason) -> None:
        sampled = [self._batch.sampled(request.running_row) for request in requests]
        if self._return_routes:
            sampled = self._with_routes(requests, sampled)
        if self._reuse_prefixes and reason is not FinishReason.ABORT:
            # The last token was sampled but never fed. Requests that saw two versions of the weights are mixtures.
            self._decoder.keep(
                {
                    request.running_row: (*request.tokens, *tokens.token_ids[:-1])
                    for request, tokens in zip(requests, sampled, strict=True)
                    if request.prompt_version == self._version
                },
                wanted={request.wanted for request in self._waiting if request.wanted is not None},
            )
        self._free(requests)
        for request, tokens in zip(requests, sampled, strict=True):
            self._resolve(request, tokens, reason)

    def _with_routes(self, requests: Sequence[Request], sampled: Sequence[Generation]) -> list[Generation]:
        """A request that ends before new weights have read it again has none: nothing of it is stored."""
        stored = [request.running_row for request in requests if request.row not in self._stale]
        routes = dict(zip(stored, self._decoder.routes(stored), strict=True))
        return [
            dataclasses.replace(tokens, routes=routes.get(request.running_row))
            for request, tokens in zip(requests, sampled, strict=True)
        ]

    def _resolve(self, request: Request, sampled: Generation, reason: FinishReason) -> None:
        if request.future.done():
            return
        params = request.params
        last = sampled.token_ids[-1] if sampled.token_ids else None
        by_token = reason is FinishReason.STOP and last in request.ends
        found = request.stop.found if request.stop and reason is FinishReason.STOP and not by_token else None
        text = ""
        if self.tokenizer is not None and params.detokenize:
            text = finished_text(self.tokenizer, sampled.token_ids, params, by_token=by_token, found=found)
        stop_reason: int | str | None = found.string if found else None
        if by_token and (params.ignore_eos or last not in self._eos):
            stop_reason = last
        request.future.set_result(
            dataclasses.replace(sampled, finish_reason=reason, stop_reason=stop_reason, text=text)
        )

    def _free(self, requests: Sequence[Request]) -> None:
        self._decoder.remove([request.running_row for request in requests if request.row not in self._stale])
        for request in requests:
            self._stale.pop(request.running_row, None)
            self._batch.remove(request.running_row)
            siblings = self._by_prompt[request.tokens]
            siblings.remove(request)
            if not siblings:
                del self._by_prompt[request.tokens]

    def _drop(self, request: Request) -> None:
        if request.row is not None:
            self._free([request])
        elif request in self._waiting:
            self._waiting.remove(request)

    def _fail(self, error: BaseException) -> None:
        """Every call under way raises `error`; what the decoder holds may be half a step ahead, so it starts anew."""
        requests = [*self._running(), *self._waiting]
        self._waiting.clear()
        self._stale.clear()
        self._by_prompt.clear()
        self._batch = RunningBatch(len(self._batch.requests))
        self._decoder.clear()
        for request in requests:
            request.row = None
            if request.future.done():
                continue
            if isinstance(error, Exception):
                request.future.set_exception(error)
            else:
                request.future.cancel()


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Eval mode inside, as it is if its layers are compiled; every module gets its own training flag back."""
    switched = [module for module in model.modules() if module.training]
    for module in switched:
        module.training = False
    try:
        with uncompiled():
            yield
    finally:
        for module in switched:
            module.training = True


if TYPE_CHECKING:
    _: type[ControlledEngine] = EmbeddedEngine
