"""The inside of an engine's process: the engine, and what Ray calls of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.cluster.connections import Address, serve_requests
from openrlhf.cluster.stack_probes import ProbeAddress, install_here
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.rollout.base import DraftCounts, EngineError, NoWeightsError
from openrlhf.rollout.requests import EngineRequests, PackedRequest
from openrlhf.types import ImageInput, PlacedImage
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock


class ProcessId(NamedTuple):
    """A process of a node, told apart from a later one with the same number."""

    number: int
    created: float


class DeviceHolder:
    """An actor that keeps one device for an engine, and knows the device's name."""

    def devices(self) -> list[str]:
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


class EngineShell(DeviceHolder):
    """An engine's process. Requests are coroutines; what changes the engine waits in threads beside them."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` begins at once with what needs neither the engine's settings nor its device."""
        self._engine: Any = None
        self._meter: UsageMeter | None = None
        if prepare is not None:
            prepare()
        self._serving: asyncio.Task[Address] | None = None

    async def install_stack_probe(self) -> ProbeAddress:
        return install_here()

    async def start(self, build: Callable[[], Any], folder: str, *holders: list[str]) -> list[ProcessId]:
        """`build` makes the engine. `holders`: the devices that each of its actors keeps.

        Returns its processes.
        """
        devices = [device for held in holders for device in held]
        if len(devices) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if os.path.isdir(folder):
            os.chdir(folder)
        with _explained():
            self._engine = await asyncio.to_thread(build)
        self._meter = UsageMeter()
        gc.collect()
        gc.freeze()  # see `runs.process`; for good, this process has no other work
        return own_processes()

    async def start_seconds(self) -> dict[str, float]:
        """How long the parts of the engine's start took, where it knows."""
        return dict(getattr(self._engine, "start_seconds", {}))

    async def usage(self) -> tuple[str, Usage]:
        """This node, and what its device did since the last call."""
        import ray

        assert self._meter is not None, "an engine that has started has one"
        return ray.util.get_node_ip_address(), self._meter.take()

    async def serve_requests(self) -> Address:
        """Where requests are answered (`connections`): neither they nor their answers go through Ray."""
        import ray

        if self._serving is None:
            handler = _ExplainedRequests(self._engine)
            self._serving = asyncio.create_task(serve_requests(handler, host=ray.util.get_node_ip_address()))
        return await asyncio.shield(self._serving)

    async def pause(self) -> bool:
        """Like the next three: whether it needs a base then."""
        with _explained():
            await self._engine.pause()
            return self._engine.needs_base

    async def resume(self, version: int) -> bool:
        with _explained():
            await self._engine.resume(version)
            return self._engine.needs_base

    async def sleep(self) -> bool:
        with _explained():
            await self._engine.sleep()
            return self._engine.needs_base

    async def wake(self) -> bool:
        with _explained():
            await self._engine.wake()
            return self._engine.needs_base

    async def load_weights(self, blocks: Sequence[WeightBlock], adapter: AdapterSpec | None = None) -> None:
        with _explained():
            await self._engine.load_weights(blocks, adapter=adapter)

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        with _explained():
            return await self._engine.logprobs(token_ids, images)

    async def take_draft_counts(self) -> DraftCounts | None:
        with _explained():
            return await self._engine.take_draft_counts()

    async def check_health(self) -> None:
        with _explained():
            await self._engine.check_health()

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)


class _ExplainedRequests(EngineRequests):
    """An engine's failure comes with what its log says of it."""

    async def answer(self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None) -> bytes:
        with _explained():
            return await super().answer(request, images)

    async def answer_parts(
        self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None
    ) -> AsyncGenerator[bytes]:
        with _explained():
            async with contextlib.aclosing(super().answer_parts(request, images)) as parts:
                async for part in parts:
                    yield part


def own_processes() -> list[ProcessId]:
    """This process and all that it has started."""
    import psutil

    me = psutil.Process()
    return [ProcessId(one.pid, one.create_time()) for one in (me, *me.children(recursive=True))]


def kill_processes(processes: Sequence[ProcessId]) -> None:
    """Those that are still there; returns when they are not."""
    import psutil

    found = []
    for number, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if process.create_time() == created:
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=30)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """An engine's failure, with what its log says of it."""
    try:
        yield
    except NoWeightsError:
        raise
    except EngineError as error:
        raise EngineError(f"{error}{last_words()}") from error


def last_words(log: str = "/proc/self/fd/2") -> str:
    """What this process's log says last of an error: vLLM's own processes tell nobody else why they ended."""
    try:
        path = os.path.realpath(log)
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 2**18))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if re.search(r"\w(Error|Exception): ", line) and "root cause" not in line]
    return f"; {found[-1].strip()} (in {path})" if found else f" (its log is {path})"
