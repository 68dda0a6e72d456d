"""Worker groups: the ranks of some models as Ray actors, each on the device that the plan gives it, called together."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from openrlhf.cluster.launch import ReservedPlan
from openrlhf.cluster.placement import ProcessGroupSpec, Role
from openrlhf.cluster.stack_probes import ProbeAddress, StackProbes, install_here
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.utils import waits

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""How often a wait for answers checks whether it was given up."""

DEATH_NOTICE_SECONDS = 5.0
"""After one rank has failed, how long Ray may take to report another's death. When a rank dies, the collectives of
the others fail sooner than Ray reports the death, and the death is the cause that the user must see."""


class WorkerError(RuntimeError):
    """A rank or an engine failed, died or did not answer in time. The message says which, and where."""

    def __init__(self, message: str, *, reason: BaseException | None = None, details: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        """The exception that was raised there; None: the process died, or did not answer."""
        self.details = details
        """The traceback of `reason`."""


class Calls:
    """Waits for the answers of named actors."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def wait(self, calls: Sequence[Any], what: str, seconds: float) -> list[Any]:
        """All answers, one of each actor. The first failure ends the wait, because the other actors may never answer:
        they may be waiting for the one that has failed. Raises WorkerError.
        """
        import ray

        end, pending = time.monotonic() + seconds, list(calls)

        def late() -> str:
            return ", ".join(name for name, call in zip(self._names, calls, strict=True) if call in pending)

        with waits.waiting(lambda: f"{what}: {late()}", deadline=seconds) as wait:
            while pending:
                wait.check()
                done, pending = ray.wait(list(pending), timeout=min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
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
                    waits.mark_progress()
        return ray.get(list(calls))

    def _gone_among(self, pending: Sequence[Any], calls: Sequence[Any]) -> WorkerError | None:
        """The error of the first actor that turns out to be dead, of those that have not answered; None: all live."""
        import ray

        end = time.monotonic() + DEATH_NOTICE_SECONDS
        while pending and time.monotonic() < end:
            done, pending = ray.wait(list(pending), timeout=max(0.0, end - time.monotonic()))
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


def gone(name: str, error: BaseException) -> WorkerError:
    """The error of an actor that has died, with Ray's message but without Ray's list of possible causes."""
    why = str(error).strip().splitlines()[-1].split("Some common causes")[0].strip()
    return WorkerError(f"{name} is gone: {why}")


class WorkerActor:
    """The actor in a worker's process: it knows its rank among the others, and owns the service that is built there."""

    def __init__(self) -> None:
        self._service: Any = None
        self._meter: UsageMeter | None = None

    def install_stack_probe(self) -> ProbeAddress:
        """Install this process's stack probe. It is the first call, made before anything can hang."""
        return install_here()

    def import_modules(self, names: Sequence[str]) -> None:
        """Import what `start` will need. Nothing is told of a module that cannot be imported: `start` will."""
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)

    def address(self, *, on_one_node: bool) -> tuple[str, int]:
        """The address at which the ranks form their process group: this node, and a free port on it."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return "127.0.0.1" if on_one_node else ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, rank: int, count: int, meeting: tuple[str, int], folder: str, build: Callable[[], Any]) -> None:
        """Set the environment variables that torchrun would set, and build the service.

        `meeting`: the address of rank 0. `folder`: where the run was started; relative paths in flags begin there.
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
        """The address of this node, and the use of its device since the last call."""
        import ray

        assert self._meter is not None, "a worker that has started has one"
        return ray.util.get_node_ip_address(), self._meter.take()

    def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any], *fetched: Any) -> Any:
        """Call a method of the service. `fetched`: further arguments, which Ray has fetched from object references."""
        return getattr(self._service, method)(*arguments, *fetched, **options)

    def call_remote_ref(self, method: str, arguments: tuple[Any, ...]) -> tuple[None, Any]:
        """Call a method and keep its answer in Ray's object store. The first value says that the call has ended."""
        return None, self.call(method, arguments, {})


class WorkerGroup:
    """The ranks of some models: one process on each of their devices. The processes end with `close`."""

    def __init__(
        self,
        placed: ReservedPlan,
        spec: ProcessGroupSpec,
        build: Callable[[], Any],
        *,
        ranks_per_share: int = 1,
        modules: Sequence[str] = (),
    ) -> None:
        """`build` is called once in every rank's process, where it may meet the others (`backends.ranks`).

        `ranks_per_share`: so many neighbours have the same samples. Their processes start and import `modules`; with
        `start` they build, and nothing is waited for before `ready`.
        """
        import ray

        self._ranks_per_share = ranks_per_share

        self._order = threading.Lock()
        """Held while a call is sent to all ranks. Several threads call; if two ranks got them in different orders,
        their collectives would wait for each other for ever."""
        actor_class: Any = ray.remote(WorkerActor)  # Ray's own types know no methods of actors
        self._actors = [actor_class.options(**placed.options(place)).remote() for place in spec.placements]
        names = [f"{spec.name} rank {rank} on {placed.address(place)}" for rank, place in enumerate(spec.placements)]
        self._calls = Calls(names)
        self._stack_probes = StackProbes(names, [actor.install_stack_probe.remote() for actor in self._actors])
        nodes = {placed.node_id(place) for place in spec.placements}
        meeting, folder = self._actors[0].address.remote(on_one_node=len(nodes) == 1), os.getcwd()
        self._imports = [actor.import_modules.remote(modules) for actor in self._actors]

        def start() -> list[Any]:
            return [
                actor.start.remote(rank, len(self._actors), meeting, folder, build)
                for rank, actor in enumerate(self._actors)
            ]

        self._start: Callable[[], list[Any]] = start
        self._starts: list[Any] = []

    def start(self) -> None:
        """Let every rank build its service. Nothing is waited for."""
        if not self._starts:
            self._starts = self._start()

    def ready(self, *, deadline: float) -> None:
        """Wait until every rank has built its service. Raises WorkerError."""
        self.start()
        self._calls.wait(self._starts, "to start", deadline)

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def share_count(self) -> int:
        """The number of shares that samples are divided into."""
        return len(self._actors) // self._ranks_per_share

    def by_share(self, answers: Sequence[T]) -> list[T]:
        """One of the answers of every share: that of its first rank. They are by rank, as `call` gives them."""
        return list(answers[:: self._ranks_per_share])

    def call(
        self,
        method: str,
        *arguments: Any,
        deadline: float,
        shares: Sequence[Sequence[Any]] | None = None,
        **options: Any,
    ) -> list[Any]:
        """The answers of all ranks' services, by rank. `shares`: further arguments, different for each share.

        An object reference in `shares` is fetched by the ranks of its share alone. Raises WorkerError as soon as one
        rank fails.
        """
        given: Sequence[Sequence[Any]] = [()] * self.share_count if shares is None else shares
        own = [share for share in given for _ in range(self._ranks_per_share)]
        with self._order:
            calls = [
                actor.call.remote(method, arguments, options, *share)
                for actor, share in zip(self._actors, own, strict=True)
            ]
        return self._calls.wait(calls, f"for {method}", deadline)

    def usage(self, *, deadline: float) -> list[tuple[str, Usage]]:
        """The use of every rank's device since the last call, with the address of its node."""
        return self._calls.wait([actor.usage.remote() for actor in self._actors], "for usage", deadline)

    def call_remote_ref(self, method: str, *arguments: Any, deadline: float) -> list[Any]:
        """Ray references to the answers, by share; each stays on its rank's node until another process fetches it."""
        with self._order:
            pairs = [actor.call_remote_ref.options(num_returns=2).remote(method, arguments) for actor in self._actors]
        self._calls.wait([done for done, _ in pairs], f"for {method}", deadline)
        return self.by_share([reference for _, reference in pairs])

    def close(self) -> None:
        import ray

        self._stack_probes.close()
        for actor in self._actors:
            ray.kill(actor)


@contextlib.contextmanager
def worker_groups(
    placed: ReservedPlan,
    build: Callable[[tuple[Role, ...]], Any],
    *,
    ranks_per_share: int = 1,
    modules: Sequence[str] = (),
    first: Callable[[], None] = lambda: None,
    deadline: float,
) -> Iterator[dict[Role, WorkerGroup]]:
    """While open: the worker group of every role. All groups start at once; roles that share processes share a group.

    `build(roles)` makes the service of a rank, in its process, after `first` has returned; meanwhile the process
    starts, and imports `modules`. At the end all processes are ended, also after an error. Raises WorkerError.
    """
    with contextlib.ExitStack() as held:
        groups: dict[Role, WorkerGroup] = {}
        for spec in placed.plan.process_groups():
            build_rank = functools.partial(build, spec.roles)
            group = WorkerGroup(placed, spec, build_rank, ranks_per_share=ranks_per_share, modules=modules)
            held.callback(group.close)
            groups |= dict.fromkeys(spec.roles, group)
        first()
        every = list(dict.fromkeys(groups.values()))
        for group in every:
            group.start()
        for group in every:
            group.ready(deadline=deadline)
        yield groups


VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def local_device(given: Sequence[str], environment: Mapping[str, str]) -> int:
    """Index, among the visible devices, of the first that Ray gave this worker (`given`: its accelerator ids).

    Usually Ray makes no other device visible to a worker, and the index is 0. With
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (or the HIP or ROCR one) Ray leaves the variable alone: a worker sees
    the devices that its node was started with, and its own is one of them. So the index is looked up in the variable.
    """
    if not given:
        return 0
    for name in VISIBLE:
        visible = [device.strip() for device in environment.get(name, "").split(",")]
        if given[0] in visible:
            return visible.index(given[0])
    return int(given[0])
