"""Signals, sent to a real process as terminals, schedulers and impatient users do."""

import json
import os
import re
import signal
import threading
import time

import pytest
from patience import patience
from processes import alive, living_children, wait_until

SLOW = "import time\ndef reward_func(queries):\n    print('judging')\n    time.sleep(600)\n"
HOG = "import re\ndef reward_func(queries):\n    print('judging')\n    re.match(r'(a+)+$', 'a' * 64 + 'b')\n"
"""Holds the interpreter lock of its process, which therefore cannot end by itself."""


class Watched:
    """A process whose stderr is read as it comes."""

    def __init__(self, process, run_dir):
        self.process, self.run_dir = process, run_dir
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.text += line

    def wait_for(self, pattern, seconds=60.0):
        assert wait_until(lambda: re.search(pattern, self.text) or self.process.poll() is not None, seconds)
        assert self.process.poll() is None, self.text

    def send(self, number, *, group):
        """To the process group, as Ctrl-C in a terminal, or to the process alone, as `kill`."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self, seconds):
        """Exit status; the process and everything it started must be gone within `seconds` on a machine of its own."""
        children = living_children(self.process.pid)
        status = self.process.wait(timeout=patience(seconds))
        self._reader.join(timeout=5)
        assert wait_until(lambda: not any(alive(child) for child in children))
        assert self.process.stdout.read() == ""
        return status


@pytest.fixture
def watch(start_cli, tmp_path):
    """Starts a run and reads along. `reward`: source of its reward file."""

    def start(reward=None, **options):
        if reward is not None:
            (tmp_path / "reward.py").write_text(reward)
            options["reward__remote_url"] = tmp_path / "reward.py"
        return Watched(start_cli(**options), tmp_path / "run")

    return start


def check_readable(run_dir):
    """What the run wrote before it was interrupted; its records."""
    assert (run_dir / "config.yaml").is_file()
    assert "interrupted</span>" in (run_dir / "report.html").read_text()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


GENERATING = {"rollout__n_samples_per_prompt": 64, "rollout__max_new_tokens": 40, "data__max_len": 60}
TRAINING = {"train__max_epochs": 2000, "train__batch_size": 1}


@pytest.mark.parametrize(
    ("number", "group", "options", "status"),
    [
        (signal.SIGINT, True, GENERATING, 130),
        (signal.SIGINT, False, TRAINING, 130),
        (signal.SIGTERM, False, GENERATING, 143),
        (signal.SIGINT, True, {"reward": SLOW}, 130),
    ],
    ids=["ctrl-c generating", "kill -INT training", "kill generating", "ctrl-c slow reward"],
)
def test_a_signal_ends_the_run_in_order(watch, number, group, options, status):
    """The title is shown just before the first round, whose generation, training or reward takes its time."""
    run = watch(**options, train__num_episodes=1000)
    run.wait_for("judging" if "reward" in options else "reinforce_baseline\n")
    time.sleep(0.3)
    run.send(number, group=group)
    assert run.end(seconds=5.0) == status
    assert "interrupted after step" in run.text
    nothing_saved = (
        "stopped by SIGTERM: without --ckpt.save_steps or --ckpt.auto_resume nothing is saved to go on from\n"
    )
    assert run.text.endswith(nothing_saved if number == signal.SIGTERM else "interrupted\n")
    assert "Traceback" not in run.text
    assert "reward failed" not in run.text
    check_readable(run.run_dir)


def test_steps_that_were_finished_are_kept(watch):
    run = watch(train__num_episodes=1000)
    run.wait_for(r"step +3/")
    run.send(signal.SIGINT, group=True)
    assert run.end(seconds=5.0) == 130
    records = check_readable(run.run_dir)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= 3


def test_a_second_ctrl_c_ends_at_once(watch):
    """A reward that holds its interpreter gets 1.5 s to end by itself; whoever cannot wait presses Ctrl-C again."""
    run = watch(reward=HOG)
    run.wait_for("judging")
    run.send(signal.SIGINT, group=True)
    run.wait_for("the run so far is in")
    run.send(signal.SIGINT, group=True)
    assert run.end(seconds=1.0) == 130
    assert "Traceback" not in run.text
    check_readable(run.run_dir)


def test_a_background_job_ignores_ctrl_c_but_not_kill(watch):
    """Shells start background jobs with SIGINT ignored."""
    run = watch(reward=SLOW, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    run.wait_for("judging")
    run.send(signal.SIGINT, group=True)
    time.sleep(0.7)
    assert run.process.poll() is None
    run.send(signal.SIGTERM, group=False)
    assert run.end(seconds=5.0) == 143
    assert "Traceback" not in run.text
    assert "reward failed" not in run.text
    check_readable(run.run_dir)


def test_ctrl_c_while_libraries_load(watch):
    run = watch()
    # By then the flags are parsed and the imports, several seconds of them, have begun.
    assert wait_until(lambda: "libtorch" in _mapped(run.process.pid), 30)
    run.send(signal.SIGINT, group=True)
    assert run.end(seconds=5.0) == 130
    assert run.text == "interrupted\n"
    assert not run.run_dir.exists()


def _mapped(pid):
    with open(f"/proc/{pid}/maps") as maps:
        return maps.read()
