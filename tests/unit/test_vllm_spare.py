"""A process that is there before it is needed: it does what it is given as a process that is started then would."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from patience import patience
from processes import alive, wait_until

from openrlhf.config import parse
from openrlhf.rollout.vllm import end_start, spare
from openrlhf.rollout.vllm.spare import SCHEDULER, SpareContext, SpareProcess, wants_spare

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def made(monkeypatch):
    """Spares that import nothing."""
    monkeypatch.setattr(spare, "IMPORTED", ())
    monkeypatch.setattr(spare, "IMPORTED_ON", {True: "json", False: "json"})
    processes = []

    def make(*, gpu=False):
        processes.append(SpareProcess(gpu=gpu))
        return processes[-1]

    yield make
    for process in processes:
        process.end()


def tell(path, word):
    with open(path, "w") as file:
        file.write(f"{os.getpid()} {word} {os.environ.get('WANTED')} {os.getcwd()} {signal.getsignal(signal.SIGINT)}")


def told(path):
    assert wait_until(lambda: path.exists() and path.read_text(), patience(60))
    return path.read_text()


def start(context, path, word="done"):
    process = context.Process(target=tell, name=SCHEDULER, kwargs={"path": str(path), "word": word})
    process.start()
    return process


def test_a_spare_does_its_task_in_the_environment_and_folder_of_the_moment(made, tmp_path, monkeypatch):
    process = made()
    monkeypatch.setenv("WANTED", "later")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for name, value in process._fixed.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    found = start(SpareContext(SPAWN, process), tmp_path / "said")
    said = told(tmp_path / "said")
    assert said.startswith(f"{process.process.pid} done later {tmp_path} ")
    assert "default_int_handler" in said
    found.join(patience(60))
    assert (found.exitcode, found.name, found.pid) == (0, SCHEDULER, process.process.pid)


def test_only_the_first_process_is_the_spare(made, tmp_path, monkeypatch):
    process = made()
    for name, value in process._fixed.items():
        monkeypatch.setenv(name, value)
    context = SpareContext(SPAWN, process)
    first, second = start(context, tmp_path / "1"), start(context, tmp_path / "2")
    assert told(tmp_path / "1").split()[0] == str(process.process.pid) == str(first.pid)
    assert told(tmp_path / "2").split()[0] == str(second.pid) != str(first.pid)


@pytest.mark.parametrize("why", ["variables", "dead", "inherited"])
def test_what_a_spare_cannot_do_another_process_does(made, tmp_path, monkeypatch, why):
    process = made()
    for name, value in process._fixed.items():
        monkeypatch.setenv(name, value)
    context = SpareContext(SPAWN, process)
    word = "done"
    if why == "variables":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    elif why == "dead":
        process.process.kill()
        process.process.join()
    else:
        word = SPAWN.Lock()  # only a process that starts can get it
    found = start(context, tmp_path / "said", word)
    assert told(tmp_path / "said").split()[0] == str(found.pid) != str(process.process.pid)
    assert not process.process.is_alive()


def test_an_engine_that_is_starting_can_be_ended(made):
    process = made()
    end_start()
    process.process.join(patience(30))
    assert process.process.exitcode == -signal.SIGKILL


WAITING = """
import sys, time
from openrlhf.rollout.vllm import spare

if __name__ == "__main__":
    spare.IMPORTED, spare.IMPORTED_ON = (), {True: "json", False: "json"}
    with spare.prepared(True):
        print(spare._prepared.process.pid, flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["end", "kill", "signal"])
def test_a_spare_ends_with_its_run(tmp_path, how):
    pytest.importorskip("vllm")
    (tmp_path / "run.py").write_text(WAITING)
    command = [sys.executable, str(tmp_path / "run.py")]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        child = int(run.stdout.readline())
        time.sleep(1.0)  # it has begun to wait
        if how == "kill":
            run.kill()
        elif how == "signal":
            os.killpg(run.pid, signal.SIGINT)
        run.stdin.close()
        assert wait_until(lambda: not alive(child), patience(20))
        said = run.stderr.read()
    assert "Traceback" not in said or how == "signal"
    assert said.count("Traceback") <= 1  # the run's own


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("--vllm.num_engines 1 --train.launcher local", {}, True),
        ("--vllm.num_engines 1", {}, True),
        ("--vllm.num_engines 1", {"RAY_ADDRESS": "10.0.0.1:6379"}, False),
        ("--vllm.num_engines 1 --train.launcher ray", {}, False),
        ("--vllm.num_engines 0", {}, False),
        ("--vllm.num_engines 2", {}, False),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_a_spare_is_for_runs_with_an_engine_in_their_own_process(words, variables, expected):
    assert wants_spare(parse("train_ppo_ray", words.split()), variables) is expected
