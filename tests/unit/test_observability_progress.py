"""The lines people watch."""

import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from openrlhf.observability.progress import Progress, clock_text, sparkline


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def run_plain(steps: int, total: int, **metrics: float) -> list[str]:
    stream, now = io.StringIO(), FakeTime()
    with Progress(total, "tiny · group_norm", stream=stream, now=now) as progress:
        for step in range(1, steps + 1):
            progress.phase("generation")
            now.seconds += 3.2
            progress.step(step, metrics)
    return stream.getvalue().splitlines()


def test_progress_prints_one_aligned_line_per_step():
    """3.2 s a step and 80 - 12 = 68 steps left: 217.6 s, 3:38."""
    metrics = {"reward": 0.431, "response_length": 5.2, "policy_loss": -0.01234, "perf/tokens_per_second": 12345.0}
    title, *lines = run_plain(12, 80, **metrics)
    assert title == "tiny · group_norm"
    assert lines[-1] == ("step 12/80  reward  0.431  len    5.2  loss  -0.0123  tok/s  12,345    3.2 s/step  eta 3:38")
    assert len({line.index("s/step") for line in lines}) == 1
    assert lines[0].startswith("step  1/80  reward")


def test_tokens_per_second_of_rl_are_those_that_were_generated():
    """16 samples of 5.2 tokens in 3.2 s: 26, however long their prompts are."""
    metrics = {"response_length": 5.2, "perf/tokens_per_second": 12345.0, "perf/generated_tokens_per_second": 26.0}
    assert "len    5.2  tok/s      26    3.2 s/step" in run_plain(1, 80, **metrics)[-1]


def test_supervised_steps_show_loss_and_accuracy():
    *_, line = run_plain(1, 5, loss=0.6931, acc=0.75)
    assert line == "step 1/5  loss   0.6931  acc 0.750    3.2 s/step  eta 0:13"


def test_progress_leaves_out_missing_metrics_and_shows_nan():
    *_, line = run_plain(1, 5, reward=float("nan"))
    assert line == "step 1/5  reward    nan    3.2 s/step  eta 0:13"


def test_the_loop_s_own_step_time_is_preferred():
    *_, line = run_plain(1, 2, **{"timing/step_total": 2.0})
    assert line == "step 1/2    2.0 s/step  eta 0:02"


def test_evaluations_and_notes_are_lines():
    stream = io.StringIO()
    with Progress(2, "tiny", stream=stream) as progress:
        metrics = {"eval_default_pass1": 0.25, "eval_math_pass1": 0.5, "eval_math_mean": 0.4}
        metrics |= {"eval_response_length_mean": 7.25, "eval_num_samples": 64.0, "eval_failed": 2.0, "timing/eval": 1.0}
        progress.evaluation(0, metrics)
        progress.evaluation(0, {"eval_loss": 1.5, "eval_failed": 0.0, "global_step": 1.0})
        progress.note("checkpoint written to [runs/demo]")
    assert stream.getvalue().splitlines()[1:] == [
        "eval at step 0  pass1 0.250  math_pass1 0.500  len 7.2  failed 2",
        "eval at step 0  loss 1.500",
        "checkpoint written to [runs/demo]",
    ]


def test_a_run_that_ends_sooner_than_planned_counts_to_its_end():
    stream = io.StringIO()
    with Progress(9, "tiny", stream=stream) as progress:
        progress.step(4, {})
        progress.end_early("the prompts ran out")
        assert progress._run.seconds_left == 0
    assert stream.getvalue().splitlines()[-1] == "ended after step 4 of at most 9: the prompts ran out"


@pytest.mark.parametrize(("error", "word"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "stopped")])
def test_an_early_end_is_said_and_passed_on(error: type[BaseException], word: str):
    stream = io.StringIO()

    def run() -> None:
        with Progress(9, "tiny", stream=stream) as progress:
            progress.step(4, {})
            raise error

    with pytest.raises(error):
        run()
    assert stream.getvalue().splitlines()[-1] == f"{word} after step 4 of 9"


def test_people_read_stderr_and_machines_stdout(capsys: pytest.CaptureFixture):
    with Progress(1, "tiny") as progress:
        progress.step(1, {"reward": 1.0})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reward  1.000" in captured.err


def test_clock_and_sparkline():
    assert [clock_text(s) for s in (0, 59.6, 220, 3725, float("nan"))] == ["0:00", "1:00", "3:40", "1:02:05", "–:––"]
    assert sparkline([], width=4) == ""
    assert sparkline([2.0], width=4) == "▄"
    assert sparkline([0, 1, 2, 3], width=4) == "▁▃▆█"
    assert sparkline([0, 0, 4, 4], width=2) == "▁█"
    assert len(sparkline(list(range(1000)), width=14)) == 14


LIVE_RUN = """
import signal, sys
from openrlhf.observability.progress import Progress
with Progress(4, "tiny [group_norm]") as progress:
    progress.phase("generation")
    progress.step(1, {"reward": 0.25, "policy_loss": float("nan")})
    progress.step(2, {"reward": 0.5})
    progress.evaluation(2, {"eval_default_pass1": 0.75})
    signal.raise_signal(signal.SIGINT)
"""


def on_a_terminal(code: str) -> tuple[str, str, int]:
    """(what the terminal got, what stdout got, exit status) of a process whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(ours, 65536):
                chunks.append(chunk)
        except OSError:  # Linux reports the other end's closing like this.
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    stdout, _ = process.communicate(timeout=60)
    reader.join(timeout=10)
    os.close(ours)
    return b"".join(chunks).decode(), stdout.decode(), process.returncode


def test_ctrl_c_leaves_the_terminal_sane():
    """The cursor that the live display hid is back, stdout is untouched, and the interrupt is not swallowed."""
    screen, stdout, status = on_a_terminal(LIVE_RUN)
    assert "tiny [group_norm]" in screen
    assert "2/4" in screen
    assert "nan" in screen
    assert "pass1 0.750" in screen
    assert "interrupted after step 2 of 4" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    assert stdout == ""
    assert status != 0
