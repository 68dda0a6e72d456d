"""A real Ray: started, joined, divided up, and gone afterwards."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray
from patience import patience
from processes import alive, wait_until

from openrlhf.cluster.launch import WORKERS_PER_CORE, ClusterError, placed, ray_cluster
from openrlhf.cluster.placement import PlacementRequest, Role, Size, plan

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

WAITING = """
import os, time
from openrlhf.cluster.launch import ray_cluster
from openrlhf.utils import interrupts
import ray

@ray.remote(num_cpus=0)
class Worker:
    def ready(self):
        return True

with interrupts.handled():
    try:
        with ray_cluster():
            worker = Worker.remote()
            ray.get(worker.ready.remote())
            print(os.environ["OPENRLHF_RUN_FOLDER"], flush=True)
            time.sleep(600)
    except KeyboardInterrupt:
        raise SystemExit(interrupts.exit_status())
"""


@ray.remote
class Sitter:
    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()


TOKEN = Path.home() / ".ray" / "auth_token"


@pytest.fixture(scope="module")
def cluster():
    """A Ray of our own, which leaves no token where there was none."""
    had_token = TOKEN.exists()
    with ray_cluster() as joined:
        yield joined
    assert TOKEN.exists() == had_token


def workers(**groups) -> PlacementRequest:
    """Groups by name → workers, on a cluster that counts workers."""
    return PlacementRequest(groups={Role[name]: Size(1, count) for name, count in groups.items()}, cpus_per_device=0)


def test_a_ray_of_our_own_counts_workers(cluster):
    (node,) = cluster.total
    assert node.devices == WORKERS_PER_CORE * os.cpu_count()
    assert cluster.devices_per_node == 1


def test_a_ray_of_our_own_is_this_machines_and_this_users(cluster):
    """Whatever it has started listens on loopback alone, and its session is in a folder that others may not enter."""
    sitter = Sitter.remote()
    ray.get(sitter.where.remote(), timeout=60)
    listening = {
        (process.name(), address.laddr.ip)
        for process in (psutil.Process(pid) for pid in (os.getpid(), *descendants(os.getpid())))
        for address in process.net_connections("inet")
        if address.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {ip.removeprefix("::ffff:") for _, ip in listening} <= {"127.0.0.1", "::1"}
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    private = session.parents[1].stat()
    assert (stat.S_IMODE(private.st_mode), private.st_uid) == (0o700, os.getuid())


def test_workers_sit_where_the_plan_says_and_leave_room_afterwards(cluster):
    """Two devices of an actor and a reference, half each, and one for a critic: all but three stay free meanwhile."""
    request = PlacementRequest(
        groups={Role.ACTOR: Size(1, 2), Role.REFERENCE: Size(1, 2), Role.CRITIC: Size(1, 1)},
        colocate_actor_ref=True,
        cpus_per_device=0,
    )
    (node,) = cluster.total
    with placed(plan(request), cluster) as whole:
        places = [place for role in request.groups for place in whole.plan.placements(role)]
        sitters = [Sitter.options(**whole.options(place)).remote() for place in places]
        found = ray.get([sitter.where.remote() for sitter in sitters], timeout=60)
        assert [node_id for node_id, _ in found] == [whole.node_id(place) for place in places]
        assert len({pid for _, pid in found}) == 5
        assert wait_until(lambda: cluster.free()[0].devices == node.devices - 3, 10)
    assert wait_until(lambda: cluster.free() == [node], 10)


def test_a_plan_that_cannot_fit_is_refused_at_once(cluster):
    began = time.monotonic()
    with (
        pytest.raises(ClusterError, match=r"1 short; it fits with --train\.colocate_all"),
        placed(plan(workers(ACTOR=cluster.total[0].devices, CRITIC=1)), cluster),
    ):
        pass
    assert time.monotonic() - began < patience(5)


def test_devices_that_others_use_are_waited_for_until_the_deadline(cluster):
    devices = cluster.total[0].devices
    with placed(plan(workers(ACTOR=devices - 1)), cluster):
        with (
            pytest.raises(ClusterError, match=r"waited 1 s for devices that others use; .* has 1: 1 short"),
            placed(plan(workers(ACTOR=2)), cluster, deadline=1),
        ):
            pass
        with placed(plan(workers(ACTOR=1)), cluster):
            pass


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(file.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


@pytest.mark.parametrize(
    ("number", "group", "status"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 143)],
    ids=["ctrl-c", "kill", "kill of the group"],
)
def test_nothing_is_left_of_a_run_that_was_ended(number, group, status):
    """Ray's servers are children of the run, its workers grandchildren. A signal to the run's group, as terminals and
    schedulers send it, ends the run, and the run ends Ray: nobody finds its servers gone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen([sys.executable, "-c", WAITING], env=environment, start_new_session=True, **pipes)
    try:
        folder = Path(run.stdout.readline().strip())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        started = descendants(run.pid)
        assert len(started) >= 3
        (os.killpg if group else os.kill)(run.pid, number)
        assert run.wait(timeout=30) == status
        assert wait_until(lambda: not any(alive(pid) for pid in started), 20)
        assert run.stderr.read() == ""
        assert not folder.exists()
    finally:
        run.kill()
