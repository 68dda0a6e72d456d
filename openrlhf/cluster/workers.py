"""Worker groups: the ranks of one model as Ray actors, each where the plan puts it, called all at once."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from openrlhf.cluster.devices import local_device
from openrlhf.cluster.launch import Placed
from openrlhf.cluster.placement import Role

START = 120.0
"""Seconds for processes to start and to answer."""


class WorkerError(RuntimeError):
    """A rank failed, died or did not answer in time. The message says which, and where."""


class Shell:
    """The inside of a worker's process: a rank's place among the others, and the service it makes there."""

    def __init__(self) -> None:
        self._service: Any = None

    def address(self) -> tuple[str, int]:
        """This node, and a port that nobody uses there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, rank: int, count: int, meeting: tuple[str, int], build: Callable[[], Any]) -> None:
        """Tell libraries who this process is, as torchrun does, and make the service."""
        import ray

        given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(local_device(given, os.environ)),
            "MASTER_ADDR": meeting[0],
            "MASTER_PORT": str(meeting[1]),
        }
        self._service = build()

    def call(self, method: str, arguments: tuple[Any, ...], *fetched: Any) -> Any:
        """`fetched` follow the others: object references that Ray has brought here."""
        return getattr(self._service, method)(*arguments, *fetched)


class WorkerGroup:
    """The ranks of one role. A context manager: their processes end with it."""

    def __init__(self, placed: Placed, role: Role, build: Callable[[], Any], *, deadline: float) -> None:
        """`build` is called once in every rank's process, where it may meet the others (`backends.process_group`).

        Raises WorkerError; then nothing is left behind.
        """
        import ray

        self._role = role
        places = placed.plan.places(role)
        shell = ray.remote(Shell)
        self._actors = [shell.options(**placed.options(place)).remote() for place in places]
        self._nodes = [placed.node_id(place) for place in places]
        try:
            host, port = self._wait([self._actors[0].address.remote()], "to start", START)[0]
            if len(set(self._nodes)) == 1:
                host = "127.0.0.1"
            starts = [
                actor.start.remote(rank, len(self._actors), (host, port), build)
                for rank, actor in enumerate(self._actors)
            ]
            self._wait(starts, "to load", deadline)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def call(self, method: str, *arguments: Any, deadline: float, shares: Sequence[Any] | None = None) -> list[Any]:
        """What every rank's service answers, by rank. `shares`: one more argument for each, its own.

        A share that is an object reference is fetched by its rank alone. Raises WorkerError as soon as one rank does.
        """
        own = [()] * len(self._actors) if shares is None else [(share,) for share in shares]
        calls = [actor.call.remote(method, arguments, *share) for actor, share in zip(self._actors, own, strict=True)]
        return self._wait(calls, f"for {method}", deadline)

    def _wait(self, calls: Sequence[Any], what: str, seconds: float) -> list[Any]:
        """All answers. Whoever fails first ends the wait: the others may be waiting for it too."""
        import ray

        end, pending = time.monotonic() + seconds, list(calls)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
            if not done:
                late = ", ".join(self._name(rank) for rank, call in enumerate(calls) if call in pending)
                raise WorkerError(f"waited {seconds:g} s {what}: {late}")
            for call in done:
                try:
                    ray.get(call)
                except ray.exceptions.RayTaskError as error:
                    reason = f"{type(error.cause).__name__}: {error.cause}".splitlines()[0]
                    raise WorkerError(f"{self._name(calls.index(call))}: {reason}") from error
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[-1].strip()
                    raise WorkerError(f"{self._name(calls.index(call))} is gone: {reason}") from error
        return ray.get(list(calls))

    def _name(self, rank: int) -> str:
        import ray

        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return f"{self._role} rank {rank} on {addresses.get(self._nodes[rank], self._nodes[rank])}"

    def close(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
