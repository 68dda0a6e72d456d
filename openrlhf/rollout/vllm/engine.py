"""`VllmEngine`: the policy samples from a vLLM whose workers are processes of their own.

Who waits on whom:
    generate      asks on the engine's own loop (`LoopThread`), waits for its future
    stream        the same, and meanwhile for each of its parts
    pause, resume around a push: nothing is sampled in between; requests under way go on with the new weights
    sleep         gives the device's memory away: `wake` takes back what weights need, `resume` the rest
Every wait has a deadline: calls their own, generations that of an engine which samples nothing at all.
vLLM knows no versions before 0.32. So every request counts: where `pause` found it is where the new version begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf.models.image_processor import ImageProcessor, blank_image, unsampled_tokens
from openrlhf.rollout.base import (
    ControlledEngine,
    DraftCounts,
    EngineError,
    NoWeightsError,
    check_images,
    check_prompt,
)
from openrlhf.rollout.generated_text import eos_token_ids
from openrlhf.rollout.vllm import compat, spare
from openrlhf.rollout.vllm.routes import merged
from openrlhf.rollout.vllm.sampling import likeliest_told, read_told, sampling_arguments
from openrlhf.rollout.vllm.settings import (
    OWNER,
    SCHEDULERS,
    SOCKETS,
    VllmSettings,
    ask_for_fp32_logits,
    engine_arguments,
    environment,
    sockets_folder,
    worker_environment,
)
from openrlhf.rollout.vllm.spare import SpareProcess
from openrlhf.rollout.vllm.speculation import DraftGate
from openrlhf.rollout.vllm.texts import PartTexts
from openrlhf.types import FinishReason, Generation, PlacedImage, SamplingParams, Supports
from openrlhf.utils import waits
from openrlhf.utils.event_loops import LoopThread
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock, WeightSyncError
from openrlhf.weight_sync.transports import message_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
START_SECONDS = 1800.0
"""Weights of a large model are read from a slow disk, and graphs captured."""
CALL_SECONDS = 600.0
"""What an engine does between two steps: it may be in a long one, or write a bucket of weights."""
DEATH_SECONDS = 0.5
"""Until somebody who waits for a call looks whether vLLM is still there."""
STALL_SECONDS = 600.0
"""An engine with requests that samples no token for so long will not sample any more."""
_WEIGHTS, _KEYS_AND_VALUES = "weights", "kv_cache"
"""What of its memory vLLM can give away, in its own words."""
_NAME, _NUMBER = "policy", 1
"""Of the adapter in vLLM."""
_SHUTDOWN_SECONDS = 20.0
"""After this long vLLM kills what has not ended by itself."""


class VllmError(EngineError):
    """vLLM cannot start, has died or does not answer."""


@dataclass(slots=True)
class _Request:
    """One request under way."""

    name: str
    params: SamplingParams
    starts: list[tuple[int, int]]
    """(token, version): from this token on that version samples."""
    sampled: list[int] = field(default_factory=list)
    """What was handed out, to a stream in parts."""
    token_ids: list[int] = field(kw_only=True)
    images: Sequence[PlacedImage] = field(kw_only=True)
    prompt: Any = field(kw_only=True)
    """Both, as vLLM takes them."""
    arguments: dict[str, Any] = field(kw_only=True)
    tells_supports: bool = field(kw_only=True)
    """Whether vLLM tells the likeliest tokens beside each sampled one."""
    texts: PartTexts | None = field(kw_only=True)
    """None: no text, or vLLM's own where it looks for stop strings."""

    def versions(self, start: int, end: int) -> list[int]:
        ends = [first for first, _ in self.starts[1:]] + [end]
        spans = zip(self.starts, ends, strict=True)
        return [version for (first, version), stop in spans for _ in range(max(first, start), min(stop, end))]

    @property
    def was_read_again(self) -> bool:
        """Weights have changed after its first token."""
        return any(first > 0 for first, _ in self.starts)


@dataclass(slots=True)
class _RouteSource:
    """How the routes of a mixture of experts get here."""

    num_layers: int
    captured: list[int] | None
    """The layers whose routes our workers know. None: vLLM itself returns them."""
    warned: bool = False


class VllmEngine:
    """Token ids in, token ids out. Any number of calls, from any event loop; vLLM batches them.

    >>> engine = VllmEngine(VllmSettings(model=path, max_model_len=4096), tokenizer)
    >>> generation = await engine.generate(token_ids, SamplingParams(temperature=0.7))
    >>> engine.close()
    """

    def __init__(self, settings: VllmSettings, tokenizer: Any | None) -> None:
        """Starts vLLM, which takes most of a minute.

        `tokenizer` decodes results; vLLM loads its own from the model's folder, for stop strings. None: no text but
        where there are some.
        """
        self.settings = settings
        self.tokenizer = tokenizer
        self._version = 0
        self._paused = False
        self._numbers = itertools.count()
        self._answered = 0
        """Requests that are over."""
        self._running: dict[str, _Request] = {}
        self._given_away: set[str] = set()
        self._weightless = False
        """It has slept, or refused an adapter, and nothing was loaded since."""
        self._needs_base = True
        self._updating = False
        """Weights were loaded since the last pause, and their update is not finished."""
        self._base_came = False
        """A base was among them."""
        self._adapter_came: AdapterSpec | None = None
        """So was this adapter."""
        self._gate = DraftGate()
        self._adapter = None if settings.adapter_rank is None else LoRARequest(_NAME, _NUMBER, "pushed")
        """What every request asks for, also before the first push: vLLM's CPU build gives wrong log-probs where some
        requests of a batch have an adapter and others have none."""
        try:
            config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
        except (OSError, ValueError) as error:
            raise VllmError(f"{settings.model} is no model that an engine could load: {error}") from error
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._unsampled = unsampled_tokens(config)
        self._ends = eos_token_ids(
            SimpleNamespace(config=config, generation_config=_generation_config(settings.model)), tokenizer
        )
        self._thread = LoopThread("vllm")
        self._sockets = tempfile.mkdtemp(prefix="openrlhf-vllm-", dir=sockets_folder(os.environ))
        gpu = torch.cuda.is_available()
        try:
            wanted = worker_environment(settings, gpu=gpu, cores=sorted(os.sched_getaffinity(0)))
            owned = {OWNER: str(os.getpid()), SOCKETS: self._sockets, "VLLM_RPC_BASE_PATH": self._sockets}
            with environment(wanted | owned):
                self._llm: AsyncLLM | None
                self.start_seconds: dict[str, float]
                """How long the parts of its start took."""
                self._llm, self._routes, self.start_seconds = self._thread.run(
                    _start(settings, unsampled=self._unsampled, gpu=gpu, spare=spare.take()),
                    "to start",
                    deadline=START_SECONDS,
                )
        except Exception as error:
            self._thread.close()
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise VllmError(f"vLLM did not start with {settings.model}: {error}") from error
        waits.add_progress_source(self._work_done)
        self._images: compat.ImageInputs | None = None
        if settings.max_images and self._unsampled:
            try:
                self._images = _image_inputs(self._llm, settings)
            except BaseException:
                self.close()
                raise

    @property
    def llm(self) -> AsyncLLM:
        if self._llm is None:
            raise VllmError("the engine is closed")
        return self._llm

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Continue `token_ids` until end-of-sequence, a stop string, `max_tokens` or the context limit.

        `logprobs` are those of the distribution sampled from. Cancelling the call gives the request up. An engine that
        died, or samples nothing any more, fails every call with a VllmError.
        """
        request = self._make_request(token_ids, sampling_params.copy(), images)
        return await self._moving(asyncio.wrap_future(self._thread.submit(self._generate(request))))

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        """`generate` in parts: what is new, as soon as it is sampled. Closing the iterator gives the request up."""
        request = self._make_request(token_ids, sampling_params.copy(), images)
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[Generation | None]()

        async def pass_on() -> None:
            try:
                async for output in self._outputs(request, RequestOutputKind.DELTA):
                    part = await self._part(request, output)
                    loop.call_soon_threadsafe(parts.put_nowait, part)
            finally:
                loop.call_soon_threadsafe(parts.put_nowait, None)

        passing = self._thread.submit(pass_on())
        try:
            while (part := await self._moving(asyncio.ensure_future(parts.get()))) is not None:
                yield part
            await asyncio.wrap_future(passing)
        finally:
            passing.cancel()

    def abort(self) -> None:
        """Finish every request now, with the tokens it has: reason ABORT. Blocks."""
        self._give_up(CALL_SECONDS)

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def needs_base(self) -> bool:
        return self._needs_base

    async def pause(self) -> None:
        """Cached keys and values are forgotten, those of running requests too."""
        self._paused = True
        if not self._given_away:  # one that sleeps samples nothing
            await self.ask(self._stop(), "to stop sampling")
        if self._updating:
            await self.ask(self.llm.collective_rpc("forget_blocks"), "to forget unfinished weights")
            self._updating = self._base_came = False
            self._adapter_came = None

    async def resume(self, version: int) -> None:
        if not self._paused and version == self._version:
            return
        if self._weightless:
            raise NoWeightsError("an engine that slept, or refused an adapter, has no weights before the next push")
        if self._updating:
            if self._needs_base and not self._base_came:
                raise NoWeightsError("an adapter has come, and the base that it belongs to has not")
            await self._finish_update()
        await self.ask(self._resume(version), "to sample again")
        self._paused = False

    async def sleep(self) -> None:
        """The weights are not kept, for a push brings others: 0.05 s instead of 3. Nothing else may take or free memory
        of the device meanwhile: vLLM compares what is free before and after."""
        self._paused = True
        if _WEIGHTS not in self._given_away:
            await self.ask(self.llm.sleep(level=2, mode="keep"), "to sleep")
            self._given_away = {_WEIGHTS, _KEYS_AND_VALUES}
            self._weightless = self._needs_base = True

    async def wake(self) -> None:
        if _WEIGHTS in self._given_away:
            await self.ask(self.llm.wake_up([_WEIGHTS]), "to wake")
            self._given_away.remove(_WEIGHTS)

    async def load_weights(self, blocks: Sequence[WeightBlock], *, adapter: AdapterSpec | None = None) -> None:
        """vLLM loads them layer by layer, as if from a checkpoint. An error of a worker is raised as vLLM tells it."""
        if not self._paused:
            raise VllmError("weights are loaded while an engine is paused")
        self._updating = True
        messages = [message_of(block) for block in blocks]
        if adapter is None:
            self._needs_base = self._base_came = True
            await self.ask(self.llm.collective_rpc("take_blocks", args=(messages,)), "to take weights")
            self._weightless = False
        else:
            if self._adapter is None or adapter.number != _NUMBER:
                raise WeightSyncError(f"this engine was started without room for the adapter {adapter.number}")
            self._adapter_came = adapter
            spec = dataclasses.asdict(adapter)
            await self.ask(self.llm.collective_rpc("take_blocks", args=(messages, spec)), "to take an adapter")

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=None, detokenize=False)
        request = self._make_request(token_ids, params, images)
        request.arguments["prompt_logprobs"] = 0
        output = await self.ask(self._last_output(request), "for the log-probs of a prompt")
        found = output.prompt_logprobs[1:]
        return [at[token].logprob for at, token in zip(found, token_ids[1:], strict=True)]

    async def take_draft_counts(self) -> DraftCounts | None:
        kind = self.settings.speculation
        if kind is None:
            return None
        answers = await self.ask(self.llm.collective_rpc("take_draft_counts"), "what became of drafts")
        counts = next(DraftCounts(**answer) for answer in answers if answer is not None)
        if change := self._gate.after(counts):
            await self.ask(self.llm.collective_rpc("allow_drafts", args=(self._gate.open,)), "to change its drafts")
            logger.info("drafts (--vllm.speculation %s) %s", kind, change)
        return counts

    async def check_health(self) -> None:
        await self.ask(self._sign_of_life(), "for a sign of life")

    async def ask(self, work: Coroutine[Any, Any, _T], what: str, *, deadline: float = CALL_SECONDS) -> _T:
        """Run one of vLLM's coroutines on its loop, and wait on this one. `what` it is for: "to start"."""
        answer = asyncio.wrap_future(self._thread.submit(self._while_alive(work)))
        with waits.waiting(what, deadline=deadline):
            try:
                await asyncio.wait({answer}, timeout=deadline)
                if not answer.done():
                    raise VllmError(waits.with_stacks(f"vLLM does not answer: waited {deadline:g} s {what}"))
                waits.mark_progress()
                return answer.result()
            finally:
                answer.cancel()

    def close(self) -> None:
        """Give every request up and end vLLM's processes. Closing twice is fine."""
        if self._llm is None:
            return
        if self._running:
            with contextlib.suppress(VllmError):  # one that is dead has given them up
                self._give_up(_SHUTDOWN_SECONDS)
        # First vLLM's own tasks, which would take the end of its processes for a failure.
        self._thread.close()
        self._llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        shutil.rmtree(self._sockets, ignore_errors=True)  # vLLM leaves them
        self._llm = None  # now, and not when the interpreter ends: its finalizer needs modules that are gone by then

    def _give_up(self, deadline: float) -> None:
        work = self._while_alive(self.llm.abort(list(self._running)))
        try:
            self._thread.run(work, "to give requests up", deadline=deadline)
        except TimeoutError as error:
            raise VllmError(waits.with_stacks(f"vLLM does not answer: {error}")) from error

    async def _moving(self, answer: asyncio.Future[_T]) -> _T:
        """The answer, for as long as the engine samples something, for whomever."""
        before = None
        try:
            while not (await asyncio.wait({answer}, timeout=STALL_SECONDS))[0]:
                now = self._work_done()
                if now == before and not self._paused:
                    waiting = f"waited {STALL_SECONDS:g} s for a token; requests under way: {self.num_running}"
                    raise VllmError(waits.with_stacks(f"vLLM does not answer: {waiting}"))
                before = now
            return answer.result()
        finally:
            answer.cancel()

    def _work_done(self) -> tuple[int, int, int]:
        """Changes with every token, for whomever."""
        return self._answered, self._version, self._num_sampled() if self._llm is not None else 0

    async def _while_alive(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Its result. A call that vLLM's process takes along when it dies is answered by nobody."""
        answer = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({answer}, timeout=DEATH_SECONDS))[0]:
                if self.llm.errored:
                    raise _died()
            return answer.result()
        except EngineDeadError as error:
            raise _died() from error
        finally:
            answer.cancel()

    async def _sign_of_life(self) -> None:
        await self.llm.check_health()  # which knows of a death, and does not ask
        await self.llm.is_sleeping()

    def _num_sampled(self) -> int:
        """Tokens of the requests under way."""
        return sum(compat.num_output_tokens(self.llm).values())

    def _make_request(
        self, token_ids: Sequence[int], params: SamplingParams, images: Sequence[PlacedImage]
    ) -> _Request:
        prompt = [int(token) for token in token_ids]
        room = check_prompt(prompt, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        if images and self._images is None:
            raise ValueError(f"a prompt has {len(images)} images, and this engine reads none")
        check_images(prompt, images, unsampled=self._unsampled)
        if self.settings.speculation is not None and params.min_p > 0:
            raise ValueError("vLLM applies no min_p beside drafts of the next tokens (--vllm.speculation)")
        wants_text = params.detokenize and not params.stop and self.tokenizer is not None
        likeliest = likeliest_told(params, vocab_size=self._vocab_size)
        return _Request(
            name=str(next(self._numbers)),
            params=params,
            starts=[(0, self._version)],
            token_ids=prompt,
            images=images,
            prompt=self._images.prompt(prompt, images)
            if self._images and images
            else TokensPrompt(prompt_token_ids=prompt),
            arguments=sampling_arguments(
                params,
                room=room,
                end_ids=self._ends,
                deterministic=self.settings.deterministic,
                likeliest=likeliest,
            ),
            tells_supports=likeliest > 0,
            texts=PartTexts(self.tokenizer, params) if wants_text else None,
        )

    async def _outputs(self, request: _Request, kind: RequestOutputKind) -> AsyncGenerator[Any]:
        params = VllmSamplingParams(**request.arguments, output_kind=kind)
        self._running[request.name] = request
        request.starts = [(0, self._version)]
        try:
            asked = self.llm.generate(request.prompt, params, request.name, lora_request=self._adapter)
            async for output in asked:
                yield output
        except EngineDeadError as error:
            raise _died() from error
        finally:
            del self._running[request.name]
            self._answered += 1

    async def _last_output(self, request: _Request) -> Any:
        last = None
        async for output in self._outputs(request, RequestOutputKind.FINAL_ONLY):
            last = output
        if last is None:
            raise VllmError(f"vLLM ended request {request.name} without an answer")
        return last

    async def _generate(self, request: _Request) -> Generation:
        return await self._part(request, await self._last_output(request))

    async def _part(self, request: _Request, output: Any) -> Generation:
        """What vLLM says, in our words: new tokens of a stream, or a whole generation."""
        (found,) = output.outputs
        token_ids = list(found.token_ids)
        start, end = len(request.sampled), len(request.sampled) + len(token_ids)
        request.sampled += token_ids
        logprobs, supports = self._told(request, found, tokens=len(token_ids))
        reason = FinishReason(found.finish_reason) if found.finish_reason else None
        stop_reason = found.stop_reason
        if not request.params.ignore_eos and stop_reason in self._ends:
            stop_reason = None  # end-of-sequence; vLLM takes all but the first for stop tokens
        text = found.text
        if request.texts is not None:
            by_token = reason is FinishReason.STOP
            text = request.texts.last(token_ids, by_token=by_token) if reason else request.texts.next(token_ids)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=request.versions(start, end),
            finish_reason=reason,
            stop_reason=stop_reason,
            text=text,
            routes=await self._routes_of(request, found) if reason else None,
            supports=supports,
        )

    def _told(self, request: _Request, found: Any, *, tokens: int) -> tuple[list[float] | None, Supports | None]:
        """The log-probs of the sampled tokens, and what they were chosen among: those that are wanted."""
        if request.arguments["logprobs"] is None:
            return None, None
        supports = None
        if request.tells_supports and found.logprobs:
            logprobs, supports = read_told(found.logprobs, vocab_size=self._vocab_size)
        else:
            logprobs = list(found.logprobs.logprobs) if found.logprobs else []
        if len(logprobs) != tokens:
            raise VllmError(f"vLLM gave {len(logprobs)} log-probs for {tokens} tokens")
        return logprobs if request.params.wants_logprobs else None, supports

    async def _routes_of(self, request: _Request, found: Any) -> np.ndarray | None:
        """The experts of all that vLLM has read for a request that has ended: everything but its last token."""
        source, read = self._routes, len(request.token_ids) + len(request.sampled) - 1
        if source is None or not request.sampled:
            return None
        if source.captured is None:
            routes = found.routed_experts
            # vLLM gives each token the route of its first reading; and older versions lose the routes of a stream whose
            # parts come faster than they are read. One that ends because the engine is to be empty must not ask for
            # more.
            incomplete = request.was_read_again or routes is None
            if incomplete and not self._paused and found.finish_reason != FinishReason.ABORT:
                again = await self._read_again(request)
                routes = routes if again is None else again
        else:
            asked = self.llm.collective_rpc("take_routes", args=(request.name, read))
            try:
                messages = await self._while_alive(asked)
            except VllmError:
                return None
            routes = merged(messages, num_layers=source.num_layers, routed=source.captured)
        if routes is not None and routes.shape[:2] == (read, source.num_layers):
            return routes.view(np.int16) if routes.dtype == np.uint16 else routes
        if not source.warned:
            source.warned = True
            shape = "none" if routes is None else f"those of {routes.shape[0]} tokens in {routes.shape[1]} layers"
            logger.warning(
                "vLLM read %d tokens of a request in %d layers, and gave %s: a generation comes without routes (said "
                "once)",
                read,
                source.num_layers,
                shape,
            )
        return None

    async def _read_again(self, request: _Request) -> np.ndarray | None:
        """The routes of what was read under the newest weights: vLLM has it in its cache, where all but the last few
        tokens need no computation, and returns the routes with which it got there. None: it was interrupted."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=None, detokenize=False)
        again = self._make_request([*request.token_ids, *request.sampled[:-1]], params, request.images)
        try:
            (found,) = (await self._last_output(again)).outputs
        except VllmError:
            return None
        return found.routed_experts if found.token_ids else None

    async def _finish_update(self) -> None:
        """Raises WeightSyncError for an adapter that does not fit."""
        answers = await self.ask(self.llm.collective_rpc("finish_blocks"), "to finish with new weights")
        adapter, problem = self._adapter_came, None
        if adapter is not None:
            problems = [answer["problem"] for answer in answers if "problem" in answer]
            # Every worker has its layers: of a pipeline some, of tensor parallelism a part of each.
            reached = {module for answer in answers for module in answer.get("modules", ())}
            problem = problems[0] if problems else adapter.difference(reached)
        self._weightless = problem is not None
        # Weights that come without an adapter may have one merged into them: they are no base.
        self._needs_base = adapter is None or problem is not None
        self._updating = self._base_came = False
        self._adapter_came = None
        if problem is not None:
            raise WeightSyncError(
                f"vLLM cannot use the adapter as it is: {problem}. --vllm.lora_sync merged sends whole weights instead"
            )

    async def _stop(self) -> None:
        """vLLM's caches are those of keys and values and that of encoded images."""
        await self.llm.pause_generation(mode="keep", clear_cache=not self.settings.keep_image_features)
        if self.settings.keep_image_features:
            await self.llm.reset_prefix_cache(reset_running_requests=True)

    async def _resume(self, version: int) -> None:
        for name, count in compat.num_output_tokens(self.llm).items():
            request = self._running.get(name)
            if request is not None:
                request.starts.append((count, version))
        self._version = version
        if self._given_away:
            await self.llm.wake_up([_KEYS_AND_VALUES])  # with this vLLM samples again
            self._given_away.clear()
        else:
            await self.llm.resume_generation()


async def _start(
    settings: VllmSettings, *, unsampled: Sequence[int], gpu: bool, spare: SpareProcess | None
) -> tuple[AsyncLLM, _RouteSource | None, dict[str, float]]:
    asked = time.time()
    with compat.schedulers_in(spare):
        llm, config, routes = _start_llm(settings, gpu=gpu)
    work = _prepare(llm, config, settings, unsampled=unsampled, gpu=gpu, routes=routes)
    prepared = asyncio.gather(work, _start_seconds(llm, asked))
    while not (await asyncio.wait({prepared}, timeout=DEATH_SECONDS))[0]:
        if llm.errored:  # nobody will answer
            prepared.cancel()
            raise _died()
    source, seconds = prepared.result()
    return llm, source, seconds


async def _prepare(
    llm: AsyncLLM, config: VllmConfig, settings: VllmSettings, *, unsampled: Sequence[int], gpu: bool, routes: bool
) -> _RouteSource | None:
    """What its workers are told before the first request; how the routes of a mixture get here."""
    if not gpu and settings.pipeline_parallel_size > 1:
        await llm.collective_rpc("run_once")
    if settings.exact:
        await llm.collective_rpc("compute_exactly")
    if unsampled:
        await llm.collective_rpc("never_sample", args=(list(unsampled),))
    if settings.adapter_rank is not None:
        await llm.collective_rpc("hold_adapter", args=(_NUMBER,))
    if settings.speculation is not None:
        await llm.collective_rpc("begin_drafts", args=(settings.speculation == "history",))
    return await _route_source(llm, compat.num_layers(config), gpu=gpu) if routes else None


async def _start_seconds(llm: AsyncLLM, asked: float) -> dict[str, float]:
    """The longest of its workers, by part. `process`: until there is a worker."""
    longest: dict[str, float] = {}
    for made, parts in await llm.collective_rpc("start_seconds"):
        for part, seconds in {"process": made - asked, **parts}.items():
            longest[part] = max(longest.get(part, 0.0), seconds)
    return longest


def _start_llm(settings: VllmSettings, *, gpu: bool) -> tuple[AsyncLLM, VllmConfig, bool]:
    """vLLM, its configuration, and whether it may know the routes of a mixture."""
    compat.use_pillow()
    arguments = engine_arguments(settings, gpu=gpu) | compat.image_arguments()
    config = _configured(settings, arguments)
    if not gpu:
        _check_heads(config)
    routes = settings.return_routes and compat.has_experts(config)
    llm = _start_with_routes(settings, arguments) if routes and gpu else None
    if llm is None:
        routes = routes and not gpu
        compat.use_pillow_in_its_processes(config)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=arguments["disable_log_stats"])
    return llm, config, routes


def _configured(settings: VllmSettings, arguments: dict[str, Any]) -> VllmConfig:
    config = AsyncEngineArgs(**arguments).create_engine_config()
    if config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    if settings.has_fp32_logits(quantised=config.model_config.quantization is not None):
        ask_for_fp32_logits(config.model_config.hf_config)
    return config


def _start_with_routes(settings: VllmSettings, arguments: dict[str, Any]) -> AsyncLLM | None:
    """One that returns the routes of a mixture itself. None: there is none, and the log says why."""
    try:
        config = _configured(settings, arguments | compat.route_arguments())
        compat.use_pillow_in_its_processes(config)
        # Some versions find out while they start, in another process, that a kernel does not tell.
        return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments["disable_log_stats"])
    except (ValueError, RuntimeError) as error:
        _note_without_routes(str(error))
        return None


async def _route_source(llm: AsyncLLM, num_layers: int, *, gpu: bool) -> _RouteSource | None:
    answers = await llm.collective_rpc("find_routers" if gpu else "capture_routes")
    layers = sorted(layer for own, _ in answers for layer in own)
    reasons = [reason for _, reason in answers if reason]
    if reasons or not layers:
        _note_without_routes(reasons[0] if reasons else "no router was found")
        return None
    return _RouteSource(num_layers, captured=None if gpu else layers)


def _note_without_routes(reason: str) -> None:
    logger.warning("generations come without routes of experts (--algo.router_replay), vLLM does not tell: %s", reason)


def _image_inputs(llm: AsyncLLM, settings: VllmSettings) -> compat.ImageInputs:
    """Raises VllmError for a model whose images vLLM reads in another form than the model's processor gives them in: a
    request with one would end its workers."""
    inputs = compat.ImageInputs(llm)
    processor = ImageProcessor.load(settings.model, inputs.tokenizer, trust_remote_code=settings.trust_remote_code)
    if processor is None:
        raise VllmError(f"{settings.model} reads no images (--data.max_images_per_prompt)")
    if difference := inputs.difference(processor.blank(), blank_image()):
        raise VllmError(f"vLLM cannot be given the images of {settings.model}: it reads {difference}")
    return inputs


def _check_heads(config: VllmConfig) -> None:
    """Workers would find it out after half a minute, each with a traceback. The heads of attention over one latent
    (DeepSeek's MLA) have kernels of their own."""
    if config.model_config.use_mla:
        return
    size, known = config.model_config.get_head_size(), compat.head_sizes_on_a_cpu()
    if size not in known:
        raise VllmError(
            f"its attention on a CPU has heads of {', '.join(map(str, known))}, and this model's are {size}"
        )


def _died() -> VllmError:
    return VllmError("vLLM has died; what its processes said last is above")


def _generation_config(model: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # not every folder has one
        return None


if TYPE_CHECKING:
    _: type[ControlledEngine] = VllmEngine
