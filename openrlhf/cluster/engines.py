"""vLLM engines on their devices, each in a process of its own, behind the one engine that the loop knows.

EngineShell     the inside of such a process: a `VllmEngine`, and vLLM's calls of a weight transfer
RayEngines      all of them, from the driver: requests go to whoever has least to do
EngineClients   all of them, from a rank of the policy: the control side of a weight transfer
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from openrlhf.cluster.beacons import Beacon, Beacons, lit_here
from openrlhf.cluster.launch import Placed
from openrlhf.cluster.placement import Role
from openrlhf.cluster.workers import Calls, WorkerError
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.rollout.balancing import Balancer
from openrlhf.rollout.base import EngineError
from openrlhf.types import Generation, SamplingParams

CONTROL_DEADLINE = 600.0
"""Of a call that changes all of an engine: pause, a bucket of weights, sleep."""
MOST_REQUESTS = 100_000
"""At once to an engine: vLLM has a queue of its own."""


class Seat:
    """Holds one device for an engine, and knows its name."""

    def devices(self) -> list[str]:
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


class EngineShell(Seat):
    """An engine's process. Requests are coroutines; what changes the engine waits in threads beside them."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._client: Any = None
        self._meter: UsageMeter | None = None

    async def beacon(self) -> Beacon:
        return lit_here()

    async def start(self, build: Callable[[], tuple[Any, Any]], folder: str, seats: Sequence[list[str]]) -> None:
        """`build` makes the engine and the client of its weight transfers. `seats`: of all its devices."""
        devices = [device for seat in seats for device in seat]
        if len(devices) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if os.path.isdir(folder):
            os.chdir(folder)
        try:
            self._engine, self._client = await asyncio.to_thread(build)
        except EngineError as error:
            raise EngineError(f"{error}{last_words()}") from error
        self._meter = UsageMeter()
        gc.collect()
        gc.freeze()  # see `utils.heap`; for good, this process has no other work

    async def usage(self) -> tuple[str, Usage]:
        """This node, and what its device did since the last call."""
        import ray

        assert self._meter is not None, "an engine that has started has one"
        return ray.util.get_node_ip_address(), self._meter.take()

    async def generate(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> Generation:
        return await self._engine.generate(token_ids, sampling_params)

    async def stream(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> AsyncGenerator[Generation]:
        async with contextlib.aclosing(self._engine.stream(token_ids, sampling_params)) as parts:
            async for part in parts:
                yield part

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self._engine, method), *arguments, **options)

    async def transfer(self, method: str, *arguments: Any) -> None:
        await asyncio.to_thread(getattr(self._client, method), *map(_readable, arguments))

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)


class RayEngines:
    """The engines of a plan. Implements `rollout.base.Engine`, and what a push of weights needs."""

    def __init__(self, placed: Placed, build: Callable[[], tuple[Any, Any]], *, max_model_len: int) -> None:
        """Nothing is waited for: see `ready`."""
        import ray

        places = placed.plan.places(Role.ENGINE)
        firsts = [place for place in places if place.seat.part == 0]
        shell, seat = ray.remote(EngineShell), ray.remote(Seat)
        self.actors = [
            shell.options(**placed.options(place), max_concurrency=MOST_REQUESTS).remote() for place in firsts
        ]
        self._seats = [seat.options(**placed.options(place)).remote() for place in places if place.seat.part]
        devices = dict(zip((p.seat.rank for p in firsts), ([actor] for actor in self.actors), strict=True))
        for place, held in zip((p for p in places if p.seat.part), self._seats, strict=True):
            devices[place.seat.rank].append(held)
        self._names = [f"vLLM engine {place.seat.rank} on {placed.address(place)}" for place in firsts]
        self._calls = Calls(self._names)
        self._beacons = Beacons(self._names, [actor.beacon.remote() for actor in self.actors])
        folder = os.getcwd()
        self._starts = [
            actor.start.remote(build, folder, ray.get([held.devices.remote() for held in devices[place.seat.rank]]))
            for actor, place in zip(self.actors, firsts, strict=True)
        ]
        self._balancer = Balancer(len(self.actors))
        self._max_model_len = max_model_len
        self._version = 0

    def ready(self, *, deadline: float) -> None:
        """Wait until every engine samples. Raises WorkerError."""
        self._calls.wait(self._starts, "to start", deadline)

    def __len__(self) -> int:
        return len(self.actors)

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    async def generate(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> Generation:
        with self._balancer.chosen(token_ids) as engine, self._answering(engine):
            return await _cancellable(self.actors[engine].generate.remote(list(token_ids), sampling_params))

    async def stream(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> AsyncGenerator[Generation]:
        import ray

        with self._balancer.chosen(token_ids) as engine, self._answering(engine):
            parts = self.actors[engine].stream.options(num_returns="streaming").remote(list(token_ids), sampling_params)
            try:
                async for part in parts:
                    yield await part
            finally:
                ray.cancel(parts)

    @contextlib.contextmanager
    def _answering(self, engine: int) -> Iterator[None]:
        """What an engine refuses is its caller's doing; one that is gone is everybody's problem. Raises EngineError."""
        import ray

        try:
            yield
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise EngineError(f"{self._names[engine]}: {error.cause}") from error
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise EngineError(str(self._calls.gone(engine, error))) from error

    def hold(self) -> None:
        self.call_all("hold")

    def go_on(self, *, version: int) -> None:
        self.call_all("go_on", version=version)
        self._version = version

    def call_all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """What every engine answers. Raises WorkerError."""
        calls = [actor.call.remote(method, *arguments, **options) for actor in self.actors]
        return self._calls.wait(calls, f"for {method}", CONTROL_DEADLINE)

    def usage(self) -> list[tuple[str, Usage]]:
        """Of every engine's first device since the last call, with its node."""
        return self._calls.wait([actor.usage.remote() for actor in self.actors], "for usage", CONTROL_DEADLINE)

    def close(self) -> None:
        """vLLM ends its own processes; whoever does not is killed with his."""
        import ray

        with contextlib.suppress(WorkerError):
            self._calls.wait([actor.close.remote() for actor in self.actors], "to end", 30.0)
        for actor in (*self.actors, *self._seats):
            ray.kill(actor)


class EngineClients:
    """vLLM's calls of a weight transfer, to all engines at once. Travels to the ranks, which make them."""

    def __init__(self, engines: RayEngines) -> None:
        self._actors = engines.actors
        self._calls = engines._calls
        self.num_updates = 0
        """Calls to each engine that carried weights."""

    @property
    def num_engines(self) -> int:
        return len(self._actors)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each is told its number."""
        calls = [
            actor.transfer.remote("init_weight_transfer_engine", {**init_info, "engine": number})
            for number, actor in enumerate(self._actors)
        ]
        self._calls.wait(calls, "for init_weight_transfer_engine", CONTROL_DEADLINE)

    def start_weight_update(self) -> None:
        self._transfer("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Written once, fetched by the engines of each node."""
        import ray

        self.num_updates += 1
        self._transfer("update_weights", ray.put(_portable(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._transfer("finish_weight_update")

    def _transfer(self, method: str, *arguments: Any) -> None:
        calls = [actor.transfer.remote(method, *arguments) for actor in self._actors]
        self._calls.wait(calls, f"for {method}", CONTROL_DEADLINE)


def last_words(log: str = "/proc/self/fd/2") -> str:
    """What this process's log says last of an error: vLLM's own processes tell nobody else why they ended."""
    try:
        path = os.path.realpath(log)
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 2**18))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if re.search(r"\w(Error|Exception): ", line) and "See root cause" not in line]
    return f"; {found[-1].strip()} (in {path})" if found else f" (its log is {path})"


def _portable(info: dict[str, Any]) -> dict[str, Any]:
    """Ray takes arrays, not views of memory."""
    return {
        name: np.frombuffer(value, np.uint8) if isinstance(value, memoryview) else value for name, value in info.items()
    }


def _readable(argument: Any) -> Any:
    """vLLM takes views of memory, not arrays."""
    if not isinstance(argument, dict):
        return argument
    return {name: memoryview(value) if isinstance(value, np.ndarray) else value for name, value in argument.items()}


async def _cancellable(call: Any) -> Any:
    import ray

    try:
        return await call
    except asyncio.CancelledError:
        ray.cancel(call)
        raise
