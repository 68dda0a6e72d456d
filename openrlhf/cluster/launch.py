"""A Ray cluster to run on — one that is there, or one of our own — and a plan made real on it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.cluster.beacons import LOOKING
from openrlhf.cluster.placement import Fit, Node, Place, PlacementPlan, fit
from openrlhf.config.errors import ConfigError
from openrlhf.utils import interrupts, waits
from openrlhf.utils.parent_death import RUN_FOLDER

logger = logging.getLogger(__name__)

START_TRIES = 3
WORKER = "openrlhf_worker"
"""Ray resource that counts workers where there are no GPUs: `ray start --resources '{"openrlhf_worker": 8}'`."""
WORKERS_PER_CORE = 4
"""On a Ray of our own without GPUs: so many may share a core."""
NODE_LABEL = "ray.io/node-id"
LONGEST_FOLDER = 107 - len("/orlhf-01234567/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Of a temporary folder that Ray's may be in: a socket's path has at most 107 bytes."""


class ClusterError(RuntimeError):
    """The cluster cannot be had, or cannot hold the run. The message is all a user needs."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What a device is to Ray."""

    resource: str
    cpus: int
    """CPUs that come with one."""

    def options(self, share: float) -> dict[str, Any]:
        """Of a Ray actor that takes this share of a device."""
        if self.resource == "GPU":
            return {"num_gpus": share, "num_cpus": share * self.cpus}
        if self.resource == "CPU":
            return {"num_cpus": share}
        return {"resources": {self.resource: share}, "num_cpus": 0}

    @property
    def bundle(self) -> dict[str, float]:
        """A whole one."""
        return {self.resource: 1.0} | ({"CPU": float(self.cpus)} if self.cpus else {})


def device_kind(resources: list[Mapping[str, float]]) -> DeviceKind:
    """GPUs where a node has one; else workers where a node counts them; else a CPU is a worker."""
    if any(node.get("GPU") for node in resources):
        return DeviceKind("GPU", cpus=1)
    return DeviceKind(WORKER if any(node.get(WORKER) for node in resources) else "CPU", cpus=0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of the Ray that this process is connected to."""

    node_ids: tuple[str, ...]
    kind: DeviceKind
    total: tuple[Node, ...]

    @property
    def devices_per_node(self) -> int:
        """Of a group that leaves it to the machine: the fewest of a node that has any; without GPUs 1."""
        return (
            min((node.devices for node in self.total if node.devices), default=1) if self.kind.resource == "GPU" else 1
        )

    def free(self) -> list[Node]:
        """What nobody uses at this moment."""
        from ray._private.state import available_resources_per_node

        now = available_resources_per_node()
        return [_node(now.get(node_id, {}), self.kind) for node_id in self.node_ids]


def _node(resources: Mapping[str, float], kind: DeviceKind) -> Node:
    return Node(int(resources.get(kind.resource, 0)), int(resources.get("CPU", 0)))


# ------------------------------------------------------------------------------------------------ connection


@contextlib.contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """While open this process is connected to Ray: to RAY_ADDRESS if there is one, else to a Ray of its own.

    A Ray of its own is one machine's and this user's: it listens on loopback, and its folder is private. Whatever was
    started for it ends with it, also after Ctrl-C; if this process is killed, Ray sees to that itself. Raises
    ClusterError.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    joins = address not in ("", "local")
    if joins:
        require_reachable(address)
    else:
        os.environ.update(authentication(os.environ))
    try:
        import ray
    except ImportError as error:
        raise ClusterError("this run needs Ray: pip install -e '.[ray]' in the repository") from error
    from ray._raylet import Config

    Config.initialize("")  # who imported Ray before has shown it another environment
    with contextlib.nullcontext() if joins else private_folder() as folder:
        try:
            try:
                _join(address) if folder is None else _start(folder)
            except Exception as error:
                why = cannot_join(address, error) if joins else ClusterError(f"Ray does not start: {_line(error)}")
                raise why from error
            yield _connected()
        except KeyboardInterrupt:
            # Should shutting down hang: Ray ends what it started when it sees this process gone.
            interrupts.end_at_once_on_the_next(last=lambda: None)
            raise
        finally:
            with LOOKING:
                ray.shutdown()


def _join(address: str) -> None:
    with _handlers_kept():
        _init(address=address)


def _start(folder: Path) -> None:
    """A Ray of one machine and one user."""
    with _handlers_kept(), _servers_of_our_own():
        _init(
            address="local",
            resources={WORKER: WORKERS_PER_CORE * (os.cpu_count() or 1)},
            include_dashboard=False,
            _temp_dir=str(folder),
        )


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """For Ray's session: sockets, logs and what it spills. Ray opens its own folder to everybody, so it is inside one
    that only this user may enter.

    It is removed at the end, unless a run has failed on it: then the logs of its processes are wanted.
    """
    place = _short_folder(os.environ)
    try:
        os.makedirs(place, exist_ok=True)
        outer = Path(tempfile.mkdtemp(prefix="orlhf-", dir=place))
    except OSError as error:
        raise ClusterError(f"Ray's folder cannot be made in {place} ({error.strerror}): set TMPDIR") from error
    keeps, logs = False, outer / "r" / "session_latest" / "logs"
    logger.info("logs of this run's processes are in %s", logs)
    os.environ[RUN_FOLDER] = str(outer)  # for engines, which Ray starts
    try:
        yield outer / "r"
    except (ClusterError, ConfigError):
        raise
    except Exception:
        keeps = True
        logger.info("logs of the processes of the run that failed stay in %s", logs)
        raise
    finally:
        del os.environ[RUN_FOLDER]
        if not keeps:
            shutil.rmtree(outer, ignore_errors=True)


def _short_folder(environment: Mapping[str, str]) -> str:
    """Where Ray itself would make its folder, unless paths of sockets there would be longer than systems allow."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if wanted := environment.get(name):
            if len(os.path.abspath(wanted)) <= LONGEST_FOLDER:
                return os.path.abspath(wanted)
            logger.warning("%s %s is too long for Ray's sockets: its folder is in /tmp", name, wanted)
    return "/tmp"


@contextlib.contextmanager
def _servers_of_our_own() -> Iterator[None]:
    """Inside, `ray.init` starts servers that listen on loopback, and that signals to this process's group do not reach.

    Ray has no option for either. It knows loopback as the way of systems that cannot have clusters. Its servers share
    the group of whoever starts them: a SIGTERM to the group ended them first, and the run had nobody to ask any more.
    """
    from ray._private import ray_constants, services

    class Apart(services.ConsolePopen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, process_group=0)

    before = ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen
    ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen = False, Apart  # type: ignore[misc]
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen = before  # type: ignore[misc]


def _init(**options: Any) -> None:
    """`ray.init`. A node of one's own has half a minute to start, whatever else the machine does: it is tried again."""
    import ray

    for left in reversed(range(START_TRIES)):
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            logger.warning("Ray has not started in its time: this machine is busy; tried again")
            ray.shutdown()


def cannot_join(address: str, error: Exception) -> ClusterError:
    """Why, as far as Ray knows. It sends no token to an address it is told unless RAY_AUTH_MODE says so."""
    if "AuthenticationError" in f"{error} {error.__cause__}":
        return ClusterError(
            f"Ray at {address} asks for a token: set RAY_AUTH_MODE=token, and put its head's token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return ClusterError(f"Ray at {address} cannot be joined: {_line(error)}")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _connected() -> Cluster:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    resources = [node["Resources"] for node in nodes]
    kind = device_kind(resources)
    return Cluster(tuple(node["NodeID"] for node in nodes), kind, tuple(_node(r, kind) for r in resources))


def alive_nodes() -> set[str]:
    """Ids of the nodes that Ray has at this moment."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def authentication(environment: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a Ray of our own is to say about tokens.

    Who reaches the ports of a Ray may run anything on it. So it asks for a token: the user's, where there is one,
    else one that is made for this run and written nowhere. RAY_AUTH_MODE decides otherwise.
    """
    if "RAY_AUTH_MODE" in environment:
        return {}
    home = Path(environment.get("HOME", "/"))
    mine = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys() or (home / ".ray" / "auth_token").exists()
    return {"RAY_AUTH_MODE": "token"} | ({} if mine else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})


def require_reachable(address: str, *, seconds: float = 5.0) -> None:
    """Ray itself tries for many minutes to reach a head node that is not there. Raises ClusterError."""
    if address == "auto":
        return
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS {address}: a run lives on the cluster; submit it with `ray job submit --address={address} -- "
            "…`, or give host:port of the head node"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"RAY_ADDRESS {address}: not host:port of a head node")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        raise ClusterError(
            f"RAY_ADDRESS {address}: nobody answers there ({error.strerror or error}); start Ray with `ray start "
            "--head`, or leave RAY_ADDRESS out for a Ray of its own"
        ) from error


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself; what it means for a run is decided in `utils.interrupts`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    exits = False
    try:
        yield
    except SystemExit as end:  # so Ray answers to one that comes while it starts
        if end.code != signal.SIGTERM:
            raise
        exits = True
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        if exits:
            signal.raise_signal(signal.SIGTERM)


# -------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class Placed:
    """A plan whose devices are reserved."""

    plan: PlacementPlan
    cluster: Cluster
    fit: Fit
    groups: tuple[Any, ...]
    """Ray placement groups, one per pool."""

    def options(self, place: Place) -> dict[str, Any]:
        """Of the Ray actor that sits there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return self.cluster.kind.options(place.seat.share) | {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.groups[place.pool], placement_group_bundle_index=place.bundle
            )
        }

    def table(self) -> str:
        """The plan, and the node of everybody."""
        lines = [self.plan.table()]
        for pool in self.plan.pools:
            nodes = dict.fromkeys(self.node_id(place) for role in pool.roles for place in self.plan.places(role))
            lines.append(f"{pool.name} on node {', '.join(nodes)}")
        return "\n".join(lines)

    def address(self, place: Place) -> str:
        """Of its node, for people."""
        import ray

        node_id = self.node_id(place)
        return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}.get(node_id, node_id)

    def node_id(self, place: Place) -> str:
        return _bundle_nodes(self.plan, self.fit, self.cluster)[place.pool][place.bundle]


@contextlib.contextmanager
def placed(plan: PlacementPlan, cluster: Cluster, *, deadline: float = 60.0) -> Iterator[Placed]:
    """While open the plan's devices are this run's.

    A plan that the cluster could never hold is refused at once; what others use now is waited for until the deadline.
    Raises ClusterError.
    """
    from ray.util import placement_group, remove_placement_group

    if problem := fit(plan, cluster.total).problem:
        raise ClusterError(problem)
    found = _free_places(plan, cluster, deadline=deadline)
    groups: list[Any] = []
    try:
        for nodes in _bundle_nodes(plan, found, cluster):
            groups.append(
                placement_group(
                    [cluster.kind.bundle] * len(nodes),
                    # Where a bundle goes is settled, so that Ray cannot decide otherwise, and then wait for room.
                    bundle_label_selector=[{NODE_LABEL: node} for node in nodes],
                )
            )
        for pool, group in zip(plan.pools, groups, strict=True):
            if not group.wait(deadline):
                raise ClusterError(f"waited {deadline:g} s for the {len(pool.bundles)} devices of {pool.name}")
        yield Placed(plan, cluster, found, tuple(groups))
    finally:
        for group in groups:
            remove_placement_group(group)


def _free_places(plan: PlacementPlan, cluster: Cluster, *, deadline: float) -> Fit:
    end = time.monotonic() + deadline
    with waits.waiting("for devices that others use", deadline=deadline):
        while True:
            found = fit(plan, cluster.free())
            if not found.problem:
                return found
            if time.monotonic() > end:
                raise ClusterError(f"waited {deadline:g} s for devices that others use; at the moment {found.problem}")
            time.sleep(0.5)


def _bundle_nodes(plan: PlacementPlan, found: Fit, cluster: Cluster) -> list[list[str]]:
    """[pool][bundle] → node id."""
    return [
        [cluster.node_ids[node] for block, node in zip(pool.blocks, nodes, strict=True) for _ in block]
        for pool, nodes in zip(plan.pools, found.nodes, strict=True)
    ]
