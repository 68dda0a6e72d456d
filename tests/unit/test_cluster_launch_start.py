"""A Ray of one's own on a machine that is busy with something else."""

import contextlib
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import ray

from openrlhf.cluster.launch import LONGEST_FOLDER, ClusterError, ray_cluster
from openrlhf.cluster.stack_probes import StackProbes
from openrlhf.utils import interrupts, waits
from openrlhf.utils.parent_death import RUN_FOLDER

LATE = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.fixture
def starts(monkeypatch):
    """How Ray answers to each try, one after the other; None: it starts."""
    answers, tries = [], []

    def init(**options):
        tries.append(options)
        if (error := answers.pop(0)) is not None:
            raise error

    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeID": "a", "Resources": {"CPU": 2.0}}])
    return answers, tries


def test_ray_cluster_tries_again_when_a_node_starts_late(starts):
    answers, tries = starts
    answers += [Exception(LATE), None]
    with ray_cluster():
        assert len(tries) == 2


@pytest.mark.parametrize(("error", "count"), [(LATE, 3), ("no space left on device", 1)])
def test_ray_cluster_that_cannot_start_is_an_error_in_one_line(starts, error, count):
    answers, tries = starts
    answers += [Exception(f"{error}\nand a second line")] * count
    with pytest.raises(ClusterError, match=f"^Ray does not start: {error}$"), ray_cluster():
        pass
    assert len(tries) == count


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (None, False),
        (KeyboardInterrupt(), False),
        (ClusterError("no room"), False),
        (RuntimeError("a rank died"), True),
    ],
    ids=["well", "a signal", "no room", "a failure"],
)
def test_ray_folder_is_private_and_stays_only_after_a_failure(starts, error, stays):
    answers, tries = starts
    answers.append(None)
    expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with interrupts.handled(), expected, ray_cluster():
        folder = Path(os.environ[RUN_FOLDER])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert Path(tries[0]["_temp_dir"]).parent == folder
        if error:
            raise error
    assert RUN_FOLDER not in os.environ
    assert folder.exists() == stays
    shutil.rmtree(folder, ignore_errors=True)


def test_ray_folder_avoids_paths_too_long_for_sockets(starts, tmp_path, monkeypatch, caplog):
    answers, _ = starts
    answers += [None, None]
    long, short = tmp_path / ("x" * LONGEST_FOLDER), Path("/tmp") / f"o{os.getpid()}"
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with ray_cluster():
        assert Path(os.environ[RUN_FOLDER]).parent == Path("/tmp")
    assert f"RAY_TMPDIR {long} is too long for Ray's sockets" in caplog.text
    short.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    with ray_cluster():
        assert Path(os.environ[RUN_FOLDER]).parent == short
    short.rmdir()


def test_sigterm_while_ray_starts_goes_to_the_run(starts, monkeypatch):
    """Ray's handler leaves the process with status 15."""

    def init(**options):
        signal.signal(signal.SIGTERM, lambda number, frame: (_ for _ in ()).throw(SystemExit(number)))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    with interrupts.handled():
        with pytest.raises(KeyboardInterrupt), ray_cluster():
            pass
        assert interrupts.exit_status() == 128 + signal.SIGTERM


def test_stack_probes_are_not_read_after_the_connection_to_ray_ends():
    """Ray would start another one for a process that asks it then, or end that process without a word."""
    assert not ray.is_initialized()
    late = StackProbes(["rank 0"], ["a reference from before"])
    assert late.stacks() == {}
    assert late.idle_seconds() == float("inf")


def test_stack_probes_that_are_closed_are_no_peers_any_more():
    """The stacks of a run would name the ranks of an earlier one, which are gone."""
    probes = StackProbes(["rank 0"], ["a reference"])
    assert probes in waits.peers
    probes.close()
    probes.close()
    assert probes not in waits.peers
