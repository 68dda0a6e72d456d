"""A run that a signal stops saves at the end of its step, says so, and goes on as if nothing had been."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed_runs import (
    PIPELINES,
    REPOSITORY,
    Rl,
    Sft,
    assert_nothing_lost_or_repeated,
    assert_same_end,
    assert_same_weights,
)
from patience import patience
from processes import living_children, wait_until

from openrlhf.observability.loggers import read_metrics


def steps(run) -> int:
    """In its metrics so far."""
    return sum(record["kind"] == "train" for record in read_metrics(run.run_dir / "metrics.jsonl"))


@pytest.fixture(scope="module")
def straight_rl(files, tmp_path_factory):
    """A sync run that nothing happened to."""
    run = Rl(files, tmp_path_factory.mktemp("straight_rl"))
    run.run()
    return run


@pytest.mark.parametrize(("pipeline", "number"), [("sync", signal.SIGTERM), ("partial", signal.SIGUSR1)])
def test_an_rl_run_saves_and_goes_on(files, straight_rl, tmp_path, pipeline, number):
    """In its fourth step or later, off its period of two half of the time."""
    run = Rl(files, tmp_path, PIPELINES[pipeline])
    stopped = run.kill_when(lambda: steps(run) >= 3, number=number)
    assert stopped.status == 128 + number
    done = steps(run)
    assert run.latest == f"global_step{done}"
    assert run.said.endswith(
        f"stopped by {number.name} and saved; started again with the same command it goes on from "
        f"{run.checkpoints}/global_step{done}\n"
    )
    assert "Traceback" not in run.said
    assert run.run() > 0
    assert f"continues from {run.checkpoints}/global_step{done}" in run.said
    assert_nothing_lost_or_repeated(run, straight_rl)
    if pipeline == "sync":
        assert_same_weights(run, straight_rl)
        assert run.history == straight_rl.history


def test_a_supervised_run_saves_and_goes_on(files, straight, tmp_path):
    run = Sft(files, tmp_path)
    stopped = run.kill_when(lambda: run.logged(8), number=signal.SIGUSR1)
    assert stopped.status == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1 and saved" in run.said
    run.run()
    assert_same_end(run, straight)


SLOW = "import time\ndef reward_func(queries):\n    print('judging', flush=True)\n    time.sleep(600)\n"


def test_a_step_that_does_not_end_in_time_ends_without_a_checkpoint(files, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    more = {"reward.remote_url": tmp_path / "slow.py", "ckpt.signal_deadline": 1}
    run = Rl(files, tmp_path / "run", more)
    stopped = run.kill_when(lambda: (run.folder / "said.txt").exists() and "judging" in run.said, number=signal.SIGTERM)
    assert stopped.status == 143
    assert stopped.seconds < patience(30)
    assert run.said.endswith(
        "stopped by SIGTERM: its step did not end within 1 s (--ckpt.signal_deadline); there is no checkpoint yet: it "
        "would begin anew\n"
    )


@pytest.mark.slow
def test_of_several_ranks_one_is_told_and_all_stop_after_the_same_step(files, straight, tmp_path):
    """Two ranks of DeepSpeed; the second gets the signal. Then the same command again, to the end."""
    run = Sft(files, tmp_path)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "openrlhf.cli.train_sft", *run.words(), "--ds.zero_stage", "2"),
    ]

    def started():
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "said.txt").open("ab") as said:
            return subprocess.Popen(command, stdout=said, stderr=said, cwd=tmp_path, env=environment)

    first = started()
    try:
        assert wait_until(lambda: run.logged(5) or first.poll() is not None, 300)
        (second_rank,) = (pid for pid in living_children(first.pid) if b"\0RANK=1\0" in _environment(pid))
        os.kill(second_rank, signal.SIGUSR1)
        assert first.wait(60) != 0
    finally:
        first.kill()
        first.wait()
    done = steps(run)
    assert run.latest == f"global_step{done}"
    assert run.said.count("stopped by SIGUSR1 and saved") == 2
    again = started()
    assert again.wait(300) == 0, run.said
    losses, expected = ([r["gpt_loss"] for r in one.history if r["kind"] == "train"] for one in (run, straight))
    assert losses == pytest.approx(expected, rel=1e-4)


def _environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
