"""The connection to a Ray cluster, an existing one or one of our own, and the reservation of a plan's devices on it."""

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
from typing import Any, NamedTuple

from openrlhf.cluster.placement import Fit, Node, Placement, PlacementPlan, Role, fit
from openrlhf.cluster.stack_probes import LOOKING
from openrlhf.config.fields import ConfigError
from openrlhf.utils import interrupts, waits
from openrlhf.utils.parent_death import RUN_FOLDER

logger = logging.getLogger(__name__)

START_TRIES = 3
WORKER = "openrlhf_worker"
"""Ray resource that counts workers where there are no GPUs: `ray start --resources '{"openrlhf_worker": 8}'`."""
WORKERS_PER_CORE = 4
"""On a Ray of our own without GPUs: how many workers may share a core."""
NODE_LABEL = "ray.io/node-id"
LONGEST_FOLDER = 107 - len("/orlhf-01234567/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""The longest path of a temporary folder in which Ray can work: the path of a socket has at most 107 bytes."""


class ClusterError(RuntimeError):
    """The cluster cannot be reached, or has no room for the run. The message is all that a user needs."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """How Ray accounts for a device."""

    resource: str
    cpus: int
    """CPUs that are reserved with one device."""

    def options(self, share: float) -> dict[str, Any]:
        """The options of a Ray actor that takes this share of a device."""
        if self.resource == "GPU":
            return {"num_gpus": share, "num_cpus": share * self.cpus}
        if self.resource == "CPU":
            return {"num_cpus": share}
        return {"resources": {self.resource: share}, "num_cpus": 0}

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one whole device."""
        return {self.resource: 1.0} | ({"CPU": float(self.cpus)} if self.cpus else {})


def device_kind(resources: list[Mapping[str, float]]) -> DeviceKind:
    """GPUs if any node has one; otherwise the resource `WORKER` if any node has it; otherwise CPUs."""
    if any(node.get("GPU") for node in resources):
        return DeviceKind("GPU", cpus=1)
    return DeviceKind(WORKER if any(node.get(WORKER) for node in resources) else "CPU", cpus=0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of the Ray cluster that this process is connected to."""

    node_ids: tuple[str, ...]
    kind: DeviceKind
    total: tuple[Node, ...]

    @property
    def devices_per_node(self) -> int:
        """The size of a group whose flags do not give it: the smallest number of GPUs of any node; without GPUs 1."""
        return (
            min((node.devices for node in self.total if node.devices), default=1) if self.kind.resource == "GPU" else 1
        )

    def free(self) -> list[Node]:
        """The resources of each node that are not in use at this moment."""
        from ray._private.state import available_resources_per_node

        now = available_resources_per_node()
        return [_node(now.get(node_id, {}), self.kind) for node_id in self.node_ids]


def _node(resources: Mapping[str, float], kind: DeviceKind) -> Node:
    return Node(int(resources.get(kind.resource, 0)), int(resources.get("CPU", 0)))


# ------------------------------------------------------------------------------------------------ connection


@contextlib.contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """While open, this process is connected to Ray: to RAY_ADDRESS if it is set, otherwise to a Ray of its own.

    A Ray of its own runs on this machine alone and serves this user alone: it listens on loopback, and its folder is
    private. All of its processes end with it, also after Ctrl-C; if this process is killed, Ray ends them itself.
    Raises ClusterError.
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
    from ray._raylet import Config  # type: ignore[attr-defined]  # it is written in Cython

    # Ray reads the environment when it is imported. It may have been imported before the variables above were set.
    Config.initialize("")
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
    """Start a Ray of one machine and one user."""
    with _handlers_kept(), _servers_of_our_own():
        _init(
            address="local",
            resources={WORKER: WORKERS_PER_CORE * (os.cpu_count() or 1)},
            include_dashboard=False,
            _temp_dir=str(folder),
        )


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for Ray's session (sockets, logs, spilled objects) inside a folder that only this user may enter.

    Ray makes its own folder readable for all users; the outer folder prevents that. The folder is removed at the end,
    unless the run has failed: then the logs of its processes are wanted.
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
    """The folder that Ray itself would use, or /tmp where the paths of its sockets would be too long for the system."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if wanted := environment.get(name):
            if len(os.path.abspath(wanted)) <= LONGEST_FOLDER:
                return os.path.abspath(wanted)
            logger.warning("%s %s is too long for Ray's sockets: its folder is in /tmp", name, wanted)
    return "/tmp"


@contextlib.contextmanager
def _servers_of_our_own() -> Iterator[None]:
    """Inside, `ray.init` starts servers that listen on loopback and are not in this process's process group.

    Ray has no option for either. It listens on loopback only on systems that cannot have clusters, so it is told that
    this is one. Its servers join the process group of their parent, where a SIGTERM to the group would end them before
    the run has stopped.
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
    """`ray.init`, tried again when a node of our own has not started within Ray's half minute on a busy machine."""
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
    """Why a cluster cannot be joined. Ray sends a token to a given address only if RAY_AUTH_MODE is set."""
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
    """The ids of the nodes that are alive at this moment."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def authentication(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that make a Ray of our own ask for a token.

    Anyone who reaches the ports of a Ray can run any code on it. So it asks for a token: the user's, if there is one,
    otherwise one that is made for this run and written nowhere. If the user has set RAY_AUTH_MODE, that decides.
    """
    if "RAY_AUTH_MODE" in environment:
        return {}
    home = Path(environment.get("HOME", "/"))
    mine = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys() or (home / ".ray" / "auth_token").exists()
    return {"RAY_AUTH_MODE": "token"} | ({} if mine else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})


def require_reachable(address: str, *, seconds: float = 5.0) -> None:
    """Check that a head node answers, because Ray itself would try for many minutes. Raises ClusterError."""
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
    """Restore the handler of SIGTERM, which Ray replaces by its own; `utils.interrupts` decides what it does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    exits = False
    try:
        yield
    except SystemExit as end:  # this is how Ray answers a SIGTERM that comes while it starts
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
class ReservedPlan:
    """A plan whose devices are reserved."""

    plan: PlacementPlan
    cluster: Cluster
    fit: Fit
    groups: tuple[Any, ...]
    """Ray placement groups, one per pool."""

    def options(self, place: Placement) -> dict[str, Any]:
        """The options of the Ray actor with this placement."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return self.cluster.kind.options(place.slot.share) | {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.groups[place.pool], placement_group_bundle_index=place.bundle
            )
        }

    def table(self) -> str:
        """The plan as a table, and the nodes of each pool."""
        lines = [self.plan.table()]
        for pool in self.plan.pools:
            nodes = dict.fromkeys(self.node_id(place) for role in pool.roles for place in self.plan.placements(role))
            lines.append(f"{pool.name} on node {', '.join(nodes)}")
        return "\n".join(lines)

    def address(self, place: Placement) -> str:
        """The network address of the placement's node, for messages."""
        import ray

        node_id = self.node_id(place)
        return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}.get(node_id, node_id)

    def device_memory(self, role: Role, *, deadline: float = 60.0) -> list[DeviceBytes]:
        """The memory of each GPU of a role, as it is before anything of the run has started there.

        Empty where it is not known: without GPUs, or where NVIDIA's management library does not tell.
        """
        import ray

        if self.cluster.kind.resource != "GPU":
            return []
        look = ray.remote(device_bytes)
        try:
            asked = [
                look.options(**self.options(place), max_retries=0).remote() for place in self.plan.placements(role)
            ]
            found = ray.get(asked, timeout=deadline)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.info("the memory of GPUs is not known: %s", _line(error))
            return []
        return [one for one in found if one is not None]

    def node_id(self, place: Placement) -> str:
        return _bundle_nodes(self.plan, self.fit, self.cluster)[place.pool][place.bundle]


class DeviceBytes(NamedTuple):
    total: int
    used: int


def device_bytes() -> DeviceBytes | None:
    """The memory of the GPU that Ray gave this process; it is not touched for that, and torch is not imported."""
    import ray
    from ray._private.thirdparty import pynvml

    names = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    try:
        pynvml.nvmlInit()
        by_index = bool(names) and names[0].isdecimal()
        find = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
        found = pynvml.nvmlDeviceGetMemoryInfo(find(int(names[0]) if by_index else names[0]))
    except (pynvml.NVMLError, IndexError):
        return None
    return DeviceBytes(total=found.total, used=found.used)


@contextlib.contextmanager
def placed(plan: PlacementPlan, cluster: Cluster, *, deadline: float = 60.0) -> Iterator[ReservedPlan]:
    """While open, the plan's devices are reserved for this run.

    A plan that the cluster could never hold is refused at once. If other runs use some of the devices now, this waits
    for them until the deadline. Raises ClusterError.
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
                    # The node of each bundle is fixed by `fit`. Left free, Ray might place the bundles of one group so
                    # that a later group has no room, and then wait for ever.
                    bundle_label_selector=[{NODE_LABEL: node} for node in nodes],
                )
            )
        for pool, group in zip(plan.pools, groups, strict=True):
            if not group.wait(deadline):
                raise ClusterError(f"waited {deadline:g} s for the {len(pool.bundles)} devices of {pool.name}")
        yield ReservedPlan(plan, cluster, found, tuple(groups))
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
