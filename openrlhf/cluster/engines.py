"""vLLM engines on their devices, each in a process of its own, behind the one engine that the loop knows.

EngineSlot      an engine's devices, and the process that has them now (`engine_shell`)
RayEngines      all of them, from the driver: a router chooses the engine of a request, which travels on a connection
                (`connections`); everything else is a call of Ray's
EngineHandles   some of them, from a thread or process that may block: a replacement, a rank that sends weights

An engine is lost when its process or vLLM's has died, or does not answer. Who waits on whom then:
    its requests       go to the others, or wait until one samples; each has its seed, so it samples what it would have
    the replacement    a thread: a new process on the same place, as soon as engines are awake; then for the policy's
                       weights as they are (`supplied_by`); then it samples too
    the loop           for nobody: a push is for those that sample at the time
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from openrlhf.cluster.connections import ConnectionLostError, EngineConnections
from openrlhf.cluster.engine_shell import DeviceHolder, EngineShell, ProcessId, kill_processes
from openrlhf.cluster.health import HealthWatch, ReplacementBudget
from openrlhf.cluster.launch import ReservedPlan, alive_nodes
from openrlhf.cluster.placement import Placement, Role
from openrlhf.cluster.stack_probes import StackProbes
from openrlhf.cluster.workers import Calls, WorkerError, gone
from openrlhf.observability.usage import Usage
from openrlhf.rollout.base import ControlledEngine, DraftCounts, EngineError, LostRequestError, NoWeightsError
from openrlhf.rollout.requests import PackedRequest, RequestHandler, by_digest, read_generation
from openrlhf.rollout.router import Router
from openrlhf.types import Generation, ImageInput, PlacedImage, SamplingParams
from openrlhf.utils import waits
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock

logger = logging.getLogger(__name__)

CONTROL_DEADLINE = 600.0
"""Of a call that changes all of an engine: pause, a bucket of weights, sleep."""
SIGN_DEADLINE = 60.0
"""Of a sign of life that is asked for because something has failed."""
START_DEADLINE = 1800.0
"""Of an engine that replaces another."""
CLOSE_SECONDS = 30.0
"""Of an end in order."""
LOOK_SECONDS = 0.1
"""How often somebody looks whether replacements are over."""
REASON_DEADLINE = 10.0
"""Of Ray's word on why a process does not answer."""
MOST_CALLS = 1000
"""At once to an engine's actor."""


class EngineLostError(EngineError):
    """An engine is gone, and none can take its place as things are: the run has to be placed anew."""


class EngineSlot:
    """An engine's devices on the cluster, and the process that has them now."""

    def __init__(
        self,
        placed: ReservedPlan,
        places: Sequence[Placement],
        build: Callable[[], ControlledEngine],
        *,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """`places`: of its devices, the first of which has its process. `prepare` is called there before `build` can
        be."""
        import ray

        first, *others = places
        self.name = f"vLLM engine {first.slot.rank} on {placed.address(first)}"
        self._node = placed.node_id(first)
        self._options = placed.options(first) | {"max_concurrency": MOST_CALLS}
        self._build = build
        self._prepare = prepare
        holder_class = ray.remote(DeviceHolder)
        self._holders: list[Any] = [holder_class.options(**placed.options(place)).remote() for place in others]
        self.processes: list[ProcessId] = []
        """Of an engine that has started."""
        self.start_process()

    def start_process(self) -> None:
        """Start a new process. Nothing is waited for."""
        import ray

        actor_class: Any = ray.remote(EngineShell)  # Ray's own types know no methods of actors
        self.actor: Any = actor_class.options(**self._options).remote(self._prepare)
        devices = [holder.devices.remote() for holder in (self.actor, *self._holders)]
        self.start = self.actor.start.remote(self._build, os.getcwd(), *devices)
        """Answers with its processes."""
        self._stack_probes = StackProbes([self.name], [self.actor.install_stack_probe.remote()])

    def wait(self, *, deadline: float) -> None:
        """Until the engine samples. Raises WorkerError, and EngineLostError if its node is gone."""
        import ray

        end = time.monotonic() + deadline
        # Of a node that is gone Ray says nothing to who waits for a process there: it waits for the node's return.
        while not ray.wait([self.start], timeout=5.0)[0]:
            waits.mark_progress()  # a start has its own deadline; until then a wait for it is no stall
            self.require_node()
            if time.monotonic() > end:
                raise WorkerError(f"waited {deadline:g} s to start: {self.name}")
        (self.processes,) = Calls([self.name]).wait([self.start], "to start", SIGN_DEADLINE)

    def require_node(self) -> None:
        if self._node not in alive_nodes():
            raise EngineLostError(f"{self.name}: its node is gone")

    def end_process(self) -> None:
        """The engine's process ends, and so do those that vLLM has started: without this, the processes of an engine
        that has died would stay and hold memory of its device."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._stack_probes.close()
        ray.kill(self.actor)
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        ending = ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        with contextlib.suppress(ray.exceptions.RayError):  # a node that is gone has none
            ray.get(ending.remote(self.processes), timeout=SIGN_DEADLINE)

    def close(self) -> None:
        import ray

        self._stack_probes.close()
        for actor in (self.actor, *self._holders):
            ray.kill(actor)


def engine_slots(
    placed: ReservedPlan, build: Callable[[], ControlledEngine], *, prepare: Callable[[], None] | None = None
) -> list[EngineSlot]:
    """A slot for every engine of a plan, in the order of their numbers. Their processes are starting."""
    places: dict[int, list[Placement]] = {}
    for place in sorted(placed.plan.placements(Role.ENGINE), key=lambda place: place.slot.part):
        places.setdefault(place.slot.rank, []).append(place)
    return [EngineSlot(placed, places[rank], build, prepare=prepare) for rank in sorted(places)]


class RayEngines:
    """The engines of a plan, as one engine."""

    def __init__(
        self,
        slots: Sequence[EngineSlot],
        *,
        max_model_len: int,
        health_timeout: float = 0.0,
    ) -> None:
        """Nothing is waited for: see `ready`.

        `health_timeout`: an engine with requests that gives no sign of life for so many seconds is lost; 0: it has all
        the time.
        """
        self._slots = slots
        self._router = Router(len(self._slots))
        self._connections = EngineConnections()
        self._max_model_len = max_model_len
        self._version = 0
        self._with_base: dict[int, Any] = {}
        """Engines that have said to need no base, each with the process that said it."""
        self.paused = False
        """They are to sample nothing until a push is over."""
        self._awake = threading.Event()
        """Engines may have memory of their devices."""
        self._awake.set()
        self._supply: Callable[[int], None] = self.admit
        """Gives an engine the policy's weights, and admits it."""

        self._lock = threading.Lock()
        """Of what follows."""
        self.budget = ReplacementBudget()
        self._replacements: dict[int, threading.Thread] = {}
        self._replaced = 0
        self._waiting: list[Future[None]] = []
        """Requests that nobody is there for."""
        self._failure: EngineError | None = None
        self._closed = False
        self._watch = HealthWatch(self._at_work, timeout=health_timeout, give_up=self._unwell)
        if health_timeout:
            self._watch.start()

    def ready(self, *, deadline: float) -> None:
        """Wait until every engine samples. Raises WorkerError."""
        calls = Calls([slot.name for slot in self._slots])
        started = calls.wait([slot.start for slot in self._slots], "to start", deadline)
        for slot, processes in zip(self._slots, started, strict=True):
            slot.processes = processes

    def start_seconds(self) -> dict[str, float]:
        """How long the parts of an engine's start took, of the slowest, where engines know."""
        calls = [slot.actor.start_seconds.remote() for slot in self._slots]
        told = Calls([slot.name for slot in self._slots]).wait(calls, "for the parts of a start", SIGN_DEADLINE)
        return max(told, key=lambda parts: sum(parts.values()), default={})

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    # --------------------------------------------------------------------------------------------- requests

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        request = PackedRequest.of(token_ids, sampling_params, images)
        return read_generation(await self.answer(request, by_digest(images)))

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        request = PackedRequest.of(token_ids, sampling_params, images)
        async with contextlib.aclosing(self.answer_parts(request, by_digest(images))) as parts:
            async for part in parts:
                yield read_generation(part)

    async def answer(self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None) -> bytes:
        """What an engine answers. Neither the request nor its answer is read on the way; of its images, those travel
        that the engine's process does not have."""
        while True:
            await self._someone_samples()
            with self._router.chosen(request.beginning) as engine:
                actor = self._slots[engine].actor
                try:
                    connection = await self._connections.to(engine, actor)
                    return await connection.answer(request.payload, images)
                except _lost_errors() as error:
                    self._lose(engine, actor, await self._why_lost(engine, actor, error))

    async def answer_parts(
        self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None
    ) -> AsyncGenerator[bytes]:
        """What an engine answers, part by part. Raises LostRequestError when it is lost in the middle."""
        while True:
            await self._someone_samples()
            with self._router.chosen(request.beginning) as engine:
                actor, begun = self._slots[engine].actor, False
                try:
                    connection = await self._connections.to(engine, actor)
                    async with contextlib.aclosing(connection.parts(request.payload, images)) as parts:
                        async for part in parts:
                            begun = True
                            yield part
                    return
                except _lost_errors() as error:
                    cause = await self._why_lost(engine, actor, error)
                    self._lose(engine, actor, cause)
                    if begun:
                        raise LostRequestError(cause) from error

    async def _why_lost(self, engine: int, actor: Any, error: Exception) -> str:
        """Why a request was not answered. Of a process that has ended, Ray knows more than its connection."""
        import ray

        name = self._slots[engine].name
        if isinstance(error, ray.exceptions.RayError):
            return self._cause(engine, error)
        if isinstance(error, ConnectionLostError) and not self._closed:
            try:
                await asyncio.wait_for(asyncio.wrap_future(actor.devices.remote().future()), REASON_DEADLINE)
            except ray.exceptions.RayError as dead:
                return self._cause(engine, dead)
            except TimeoutError:
                pass
        return f"{name}: {error}"

    async def _someone_samples(self) -> None:
        """Wait for it. Raises EngineError when it will not be so any more."""
        while True:
            with self._lock:
                if self._failure is not None:
                    raise self._failure
                if self._router.open:
                    return
                waiter: Future[None] = Future()
                self._waiting.append(waiter)
            await asyncio.wrap_future(waiter)

    def _cause(self, engine: int, error: BaseException) -> str:
        """Why it is lost. What an engine refuses is its caller's doing, and raised."""
        import ray

        name = self._slots[engine].name
        if not isinstance(error, ray.exceptions.RayTaskError):
            return str(gone(name, error))
        if not isinstance(error.cause, EngineError) or isinstance(error.cause, NoWeightsError):
            raise error.cause from None
        return f"{name}: {error.cause}"

    # ------------------------------------------------------------------------------------------ control of all

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def needs_base(self) -> bool:
        """Whether one of those that sample does. Each says it when it is told to do something; one that is new has said
        nothing yet."""
        return any(self._with_base.get(engine) is not actor for engine, actor in self.sampling.items())

    async def pause(self) -> None:
        self.paused = True
        await self._tell_all(lambda actor: actor.pause.remote(), "to pause")

    async def resume(self, version: int) -> None:
        await self._tell_all(lambda actor: actor.resume.remote(version), "to resume")
        self._version = version
        self.paused = False

    async def sleep(self) -> None:
        """None is starting afterwards: training may have the devices."""
        while any(thread.is_alive() for thread in self._replacements.values()):
            await asyncio.sleep(LOOK_SECONDS)
        self._awake.clear()
        self.paused = True
        await self._tell_all(lambda actor: actor.sleep.remote(), "to sleep")

    async def wake(self) -> None:
        self._awake.set()
        await self._tell_all(lambda actor: actor.wake.remote(), "to wake")

    async def load_weights(self, blocks: Sequence[WeightBlock], *, adapter: AdapterSpec | None = None) -> None:
        """Blocks are written once, and fetched by the engines of each node."""
        import ray

        stored = ray.put(list(blocks))
        await self._ask_all(lambda actor: actor.load_weights.remote(stored, adapter), "to load weights")

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Those of one of the engines; `all_logprobs` are those of each."""
        return (await self.all_logprobs(token_ids, images))[0]

    async def all_logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[list[float]]:
        return await self._ask_all(lambda actor: actor.logprobs.remote(list(token_ids), images), "for log-probs")

    async def take_draft_counts(self) -> DraftCounts | None:
        """Of all together."""
        return DraftCounts.of_all(
            await self._ask_all(lambda actor: actor.take_draft_counts.remote(), "what became of drafts")
        )

    async def check_health(self) -> None:
        """Engines that give no sign of life are given up, and replaced."""
        await self._ask_all(lambda actor: actor.check_health.remote(), "for a sign of life", SIGN_DEADLINE)

    async def usage(self) -> list[tuple[str, Usage]]:
        """What every engine's first device did since the last call, with its node."""
        return await self._ask_all(lambda actor: actor.usage.remote(), "for usage")

    async def _tell_all(self, tell: Callable[[Any], Any], what: str) -> None:
        """All that sample, which answer whether they need a base then."""
        for (engine, actor), needs_base in (await self._answers(tell, what)).items():
            if needs_base:
                self._with_base.pop(engine, None)
            else:
                self._with_base[engine] = actor

    async def _ask_all(self, ask: Callable[[Any], Any], what: str, seconds: float = CONTROL_DEADLINE) -> list[Any]:
        return list((await self._answers(ask, what, seconds)).values())

    async def _answers(
        self, ask: Callable[[Any], Any], what: str, seconds: float = CONTROL_DEADLINE
    ) -> dict[tuple[int, Any], Any]:
        """What all answer that sample, by engine and process. An engine that fails or does not answer in time is given
        up, and its answer is left out. Raises EngineError when no engine will sample any more."""
        import ray

        if self._failure is not None:
            raise self._failure
        asked = {asyncio.wrap_future(ask(actor).future()): (engine, actor) for engine, actor in self.sampling.items()}
        names = ", ".join(self._slots[engine].name for engine, _ in asked.values())
        with waits.waiting(f"{what}: {names}", deadline=seconds):
            if asked:
                await asyncio.wait(asked, timeout=seconds)
        waits.mark_progress()
        answers = {}
        for answer, (engine, actor) in asked.items():
            if not answer.done():
                answer.cancel()
                self._lose(engine, actor, f"waited {seconds:g} s {what}: {self._slots[engine].name}")
                continue
            try:
                answers[engine, actor] = answer.result()
            except ray.exceptions.RayError as error:
                self._lose(engine, actor, self._cause(engine, error))
        return answers

    def handles(self, engines: Sequence[int]) -> EngineHandles:
        """Blocking calls to these, whether or not they are given requests."""
        slots = [self._slots[engine] for engine in engines]
        return EngineHandles([slot.actor for slot in slots], [slot.name for slot in slots])

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """vLLM ends its own processes; whoever does not within so many seconds is killed with his."""
        import ray

        with self._lock:
            self._closed = True
        self._awake.set()
        self._watch.stop()
        self._fail(EngineError("the engines are closed"))
        self._connections.close()
        ending = [slot.actor.close.remote() for slot in self._slots]
        with waits.waiting(lambda: f"to end: {', '.join(slot.name for slot in self._slots)}"):
            ray.wait(ending, num_returns=len(ending), timeout=seconds)
        for slot in self._slots:
            slot.close()
        self.wait_for_replacements(seconds / 3)

    # ------------------------------------------------------------------------------------------ replacement

    @contextlib.contextmanager
    def supplied_by(self, supply: Callable[[int], None]) -> Iterator[None]:
        """While open, an engine that replaces another is given the policy's weights by this, which admits it too.
        Before and after, a new engine samples with the weights of the model's files."""
        self._supply = supply
        try:
            yield
        finally:
            self._supply = self.admit

    @property
    def sampling(self) -> dict[int, Any]:
        """Engines that are given requests, each with its process."""
        return {engine: self._slots[engine].actor for engine in sorted(self._router.open)}

    def admit(self, engine: int) -> None:
        """It has what it needs, and is given requests."""
        with self._lock:
            self._router.open_to(engine)
            self._wake()

    def wait_for_replacements(self, seconds: float | None = None) -> None:
        """Of those that have been lost so far; None: as long as it takes."""
        for replacement in list(self._replacements.values()):
            replacement.join(seconds)

    def take_replaced(self) -> int:
        """How many engines have been replaced since the last call."""
        with self._lock:
            count, self._replaced = self._replaced, 0
            return count

    def _at_work(self) -> Mapping[Hashable, Callable[[], Future[object]]]:
        """What asks whom for a sign of life: engines with requests, while they are to sample."""
        busy = {} if self.paused else {e: actor for e, actor in self.sampling.items() if self._router.running[e]}

        def ask(actor: Any) -> Future[object]:
            return actor.check_health.remote().future()

        return {(e, actor): functools.partial(ask, actor) for e, actor in busy.items()}

    def _unwell(self, who: Any, error: BaseException) -> None:
        import ray

        engine, actor = who
        ray_says = isinstance(error, ray.exceptions.RayError)
        cause = self._cause(engine, error) if ray_says else f"{self._slots[engine].name}: {error}"
        self._lose(engine, actor, cause)

    def _lose(self, engine: int, actor: Any, cause: str) -> None:
        """It gets no more requests, and another takes its place. Only the first who notices makes a difference."""
        with self._lock:
            if self._closed or engine not in self._router.open or self._slots[engine].actor is not actor:
                return
            self._router.close_to(engine)
            thread = threading.Thread(target=self._replace, args=(engine, cause), name="replacement", daemon=True)
            self._replacements[engine] = thread
        thread.start()

    def _replace(self, engine: int, cause: str) -> None:
        slot, began = self._slots[engine], time.monotonic()
        try:
            while True:
                if not self.budget.spend(engine):
                    times = f"{self.budget.most} times within {self.budget.within / 60:g} minutes"
                    self._fail(EngineError(f"{cause} — it has been replaced {times}, and is not once more"))
                    slot.end_process()
                    return
                slot.end_process()
                slot.require_node()
                logger.warning("%s; another one starts in its place", cause)
                self._awake.wait()
                with self._lock:
                    if self._closed:
                        return
                    slot.start_process()
                try:
                    slot.wait(deadline=START_DEADLINE)
                    self._supply(engine)
                    break
                except WorkerError as error:
                    cause = str(error)
            with self._lock:
                self._replaced += 1
            logger.info("%s samples again, after %.0f s", slot.name, time.monotonic() - began)
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("%s cannot be replaced", slot.name)
            self._fail(EngineLostError(f"{slot.name} cannot be replaced: {error}"))

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)


class EngineHandles:
    """Blocking calls to several engines at once, for threads and processes without an event loop: a replacement, and
    the ranks that send weights. Each method raises WorkerError as soon as one engine fails."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str]) -> None:
        self.actors = list(actors)
        self._calls = Calls(names)

    def pause(self) -> None:
        self._all(lambda actor: actor.pause.remote(), "to pause")

    def wake(self) -> None:
        self._all(lambda actor: actor.wake.remote(), "to wake")

    def resume(self, version: int) -> None:
        self._all(lambda actor: actor.resume.remote(version), "to resume")

    def load_weights(self, block: WeightBlock, *, adapter: AdapterSpec | None = None) -> None:
        """Written once, and fetched by the engines of each node."""
        import ray

        stored = ray.put([block])
        self._all(lambda actor: actor.load_weights.remote(stored, adapter), "to load weights")

    def logprobs(self, token_ids: Sequence[int]) -> list[list[float]]:
        return self._all(lambda actor: actor.logprobs.remote(list(token_ids)), "for log-probs")

    def check_health(self) -> None:
        self._all(lambda actor: actor.check_health.remote(), "for a sign of life")

    def _all(self, ask: Callable[[Any], Any], what: str) -> list[Any]:
        return self._calls.wait([ask(actor) for actor in self.actors], what, CONTROL_DEADLINE)


def _lost_errors() -> tuple[type[Exception], ...]:
    """What a request raises when its engine is lost. Other errors are what an engine refuses: its caller's doing."""
    import ray

    return EngineError, ConnectionLostError, ray.exceptions.RayError


if TYPE_CHECKING:
    _: type[ControlledEngine] = RayEngines
    _handler: type[RequestHandler] = RayEngines
