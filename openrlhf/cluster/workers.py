"""Worker groups: the ranks of a crew as Ray actors, each where the plan puts it, called all at once."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openrlhf.cluster.beacons import Beacon, Beacons, lit_here
from openrlhf.cluster.devices import local_device
from openrlhf.cluster.launch import Placed
from openrlhf.cluster.placement import ProcessGroupSpec, Role
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.utils import waits

LOOK_SECONDS = 1.0
"""How often somebody who waits looks up."""

BEREAVED = 5.0
"""Seconds in which, after one rank has failed, another may turn out to be gone: a collective fails sooner than Ray says
whose fault it was."""


class WorkerError(RuntimeError):
    """A rank or an engine failed, died or did not answer in time. The message says which, and where."""

    def __init__(self, message: str, *, reason: BaseException | None = None, details: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        """What was raised there; None: it died, or did not answer."""
        self.details = details
        """And its traceback."""


class Calls:
    """Waits for the answers of actors that have names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def wait(self, calls: Sequence[Any], what: str, seconds: float) -> list[Any]:
        """All answers, one of each actor. Whoever fails first ends the wait: the others may be waiting for it too.

        Raises WorkerError.
        """
        import ray

        end, pending = time.monotonic() + seconds, list(calls)

        def late() -> str:
            return ", ".join(name for name, call in zip(self._names, calls, strict=True) if call in pending)

        with waits.waiting(lambda: f"{what}: {late()}", deadline=seconds) as wait:
            while pending:
                wait.check()
                done, pending = ray.wait(pending, timeout=min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
                if not done and time.monotonic() >= end:
                    raise WorkerError(waits.with_stacks(f"waited {seconds:g} s {what}: {late()}"))
                for call in done:
                    try:
                        self._look_at(call, list(calls).index(call))
                    except WorkerError as error:
                        gone = None if error.reason is None else self._gone_among(pending, calls)
                        if gone is None:
                            raise
                        raise gone from error
                    waits.beat()
        return ray.get(list(calls))

    def _gone_among(self, pending: Sequence[Any], calls: Sequence[Any]) -> WorkerError | None:
        """Who is gone, of those that have not answered."""
        import ray

        end = time.monotonic() + BEREAVED
        while pending and time.monotonic() < end:
            done, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
            for call in done:
                try:
                    self._look_at(call, list(calls).index(call))
                except WorkerError as error:
                    if error.reason is None:
                        return error
        return None

    def _look_at(self, call: Any, index: int) -> None:
        import ray

        try:
            ray.get(call)
        except ray.exceptions.RayTaskError as error:
            reason = f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
            raise WorkerError(f"{self._names[index]}: {reason}", reason=error.cause, details=str(error)) from error
        except ray.exceptions.RayError as error:
            raise gone(self._names[index], error) from error


def gone(name: str, error: Exception) -> WorkerError:
    """With what Ray says of it, less its guesses."""
    why = str(error).strip().splitlines()[-1].split("Some common causes")[0].strip()
    return WorkerError(f"{name} is gone: {why}")


class Shell:
    """The inside of a worker's process: a rank's place among the others, and the service it makes there."""

    def __init__(self) -> None:
        self._service: Any = None
        self._meter: UsageMeter | None = None

    def beacon(self) -> Beacon:
        """To look at this process by. Asked once, before anything can hang."""
        return lit_here()

    def address(self, *, on_one_node: bool) -> tuple[str, int]:
        """Where ranks can meet: this node, and a port that nobody uses there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return "127.0.0.1" if on_one_node else ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, rank: int, count: int, meeting: tuple[str, int], folder: str, build: Callable[[], Any]) -> None:
        """Tell libraries who this process is, as torchrun does, and make the service. `meeting`: of rank 0.

        `folder`: where the run was started, for the relative paths of its flags.
        """
        import ray

        given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(local_device(given, os.environ)),
            "MASTER_ADDR": meeting[0],
            "MASTER_PORT": str(meeting[1]),
        }
        if os.path.isdir(folder):
            os.chdir(folder)
        self._service = build()
        self._meter = UsageMeter()

    def usage(self) -> tuple[str, Usage]:
        """This node, and what its device did since the last call."""
        import ray

        assert self._meter is not None, "a worker that has started has one"
        return ray.util.get_node_ip_address(), self._meter.take()

    def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any], *fetched: Any) -> Any:
        """`fetched` follow the others: object references that Ray has brought here."""
        return getattr(self._service, method)(*arguments, *fetched, **options)

    def produce(self, method: str, arguments: tuple[Any, ...]) -> tuple[None, Any]:
        """The answer stays here for whoever needs it; the first value says that it is there."""
        return None, self.call(method, arguments, {})


class WorkerGroup:
    """The ranks of a crew. Its processes end with `close`."""

    def __init__(self, placed: Placed, crew: ProcessGroupSpec, build: Callable[[], Any]) -> None:
        """`build` is called once in every rank's process, where it may meet the others (`backends.process_group`).

        Nothing is waited for: see `ready`.
        """
        import ray

        self._order = threading.Lock()
        """Several threads call; all ranks take their calls in one order, or collectives would wait for each other."""
        shell = ray.remote(Shell)
        self._actors = [shell.options(**placed.options(place)).remote() for place in crew.places]
        names = [f"{crew.name} rank {rank} on {placed.address(place)}" for rank, place in enumerate(crew.places)]
        self._calls = Calls(names)
        self._beacons = Beacons(names, [actor.beacon.remote() for actor in self._actors])
        nodes = {placed.node_id(place) for place in crew.places}
        meeting, folder = self._actors[0].address.remote(on_one_node=len(nodes) == 1), os.getcwd()
        self._starts = [
            actor.start.remote(rank, len(self._actors), meeting, folder, build)
            for rank, actor in enumerate(self._actors)
        ]

    def ready(self, *, deadline: float) -> None:
        """Wait until every rank has built its service. Raises WorkerError."""
        self._calls.wait(self._starts, "to start", deadline)

    def __len__(self) -> int:
        return len(self._actors)

    def call(
        self,
        method: str,
        *arguments: Any,
        deadline: float,
        shares: Sequence[Sequence[Any]] | None = None,
        **options: Any,
    ) -> list[Any]:
        """What every rank's service answers, by rank. `shares`: more arguments, each rank its own.

        Those that are object references are fetched by their rank alone. Raises WorkerError as soon as one rank does.
        """
        own = [()] * len(self._actors) if shares is None else shares
        with self._order:
            calls = [
                actor.call.remote(method, arguments, options, *share)
                for actor, share in zip(self._actors, own, strict=True)
            ]
        return self._calls.wait(calls, f"for {method}", deadline)

    def usage(self, *, deadline: float) -> list[tuple[str, Usage]]:
        """Of every rank's device since the last call, with its node."""
        return self._calls.wait([actor.usage.remote() for actor in self._actors], "for usage", deadline)

    def produce(self, method: str, *arguments: Any, deadline: float) -> list[Any]:
        """References to the answers, by rank, which stay where they are until somebody fetches them."""
        with self._order:
            pairs = [actor.produce.options(num_returns=2).remote(method, arguments) for actor in self._actors]
        self._calls.wait([done for done, _ in pairs], f"for {method}", deadline)
        return [reference for _, reference in pairs]

    def close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)


@contextlib.contextmanager
def worker_groups(
    placed: Placed, build: Callable[[tuple[Role, ...]], Any], *, deadline: float
) -> Iterator[dict[Role, WorkerGroup]]:
    """The group of every role while open, started all at once; those of one crew have the same.

    `build(roles)` makes the service of a rank, in its process. Whatever happens, no process is left. Raises
    WorkerError.
    """
    with contextlib.ExitStack() as held:
        groups: dict[Role, WorkerGroup] = {}
        for crew in placed.plan.crews():
            group = WorkerGroup(placed, crew, functools.partial(build, crew.roles))
            held.callback(group.close)
            groups |= dict.fromkeys(crew.roles, group)
        for group in dict.fromkeys(groups.values()):
            group.ready(deadline=deadline)
        yield groups
