"""Signals that ask a run to save and stop: what waits, for how long, and what it is told."""

import signal
import time

import pytest

from openrlhf.checkpoint.folder import CheckpointFolder, Retention
from openrlhf.config import parse
from openrlhf.runs.resume import Checkpoints, stoppable
from openrlhf.utils import interrupts
from openrlhf.utils.interrupts import Stopped

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


@pytest.fixture(autouse=True)
def _handled():
    """As every command does; whatever happens inside, handlers and timers are afterwards what they were."""
    before = [signal.getsignal(number) for number in WATCHED]
    with interrupts.handled():
        yield
    assert [signal.getsignal(number) for number in WATCHED] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_before_training_a_save_signal_has_nothing_to_say_and_sigterm_ends():
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.exit_status() == 143


@pytest.mark.parametrize("number", interrupts.SAVE_AND_STOP)
def test_while_training_it_asks_and_waits(number):
    with interrupts.deferred(60) as request:
        assert request.accept() is None
        signal.raise_signal(number)
        assert request.asked == number
        signal.raise_signal(signal.SIGTERM)  # passed on by a launcher
        assert request.accept() == number
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "a checkpoint may take its time"


def test_ctrl_c_does_not_wait():
    with interrupts.deferred(60):
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_after_the_deadline_it_is_ctrl_c():
    with interrupts.deferred(0.05) as request:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
    assert request.overdue
    assert interrupts.exit_status() == 128 + signal.SIGUSR1


def test_interrupts_leave_other_handlers_alone():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    with interrupts.deferred(60) as request:
        signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert heard == ["mine"]
    assert request.asked is None


# --------------------------------------------------------------------------------------------- what a run is told


def section(*words):
    return parse("train_sft", list(words)).ckpt


def folder(path, *, latest=None):
    if latest:
        (path / "latest").write_text(f"{latest}\n")
    return Checkpoints(CheckpointFolder(path, Retention()), None)


def told(ckpt, checkpoints, *signals, saves=False) -> Stopped:
    """How a run ends that gets these signals, and, with `saves`, the end of its step after them."""

    def run():
        with stoppable(ckpt, checkpoints) as request:
            for number in signals:
                signal.raise_signal(number)
            if saves:
                raise Stopped(request.accept())
            time.sleep(10)

    with pytest.raises(Stopped) as end:
        run()
    return end.value


def test_a_run_that_saved_says_how_it_goes_on(tmp_path):
    end = told(section("--save_steps", "5"), folder(tmp_path, latest="global_step7"), signal.SIGUSR1, saves=True)
    assert (end.by, end.saved) == (signal.SIGUSR1, True)
    assert str(end) == (
        "stopped by SIGUSR1 and saved; started again with the same command and --ckpt.load_enable it goes on from "
        f"{tmp_path}/global_step7"
    )


def test_a_run_that_has_no_time_names_the_last_checkpoint(tmp_path):
    ckpt = section("--save_steps", "5", "--ckpt.auto_resume", "--ckpt.signal_deadline", "0.05")
    end = told(ckpt, folder(tmp_path, latest="global_step5"), signal.SIGTERM)
    assert (end.by, end.saved) == (signal.SIGTERM, False)
    assert str(end) == (
        "stopped by SIGTERM: its step did not end within 0.05 s (--ckpt.signal_deadline); started again with the same "
        f"command it goes on from {tmp_path}/global_step5"
    )


def test_a_run_that_saves_nothing_ends_at_once_and_says_so(tmp_path):
    end = told(section(), Checkpoints(None, None), signal.SIGTERM)
    assert str(end) == (
        "stopped by SIGTERM: without --ckpt.save_steps or --ckpt.auto_resume nothing is saved to go on from"
    )
    end = told(section("--save_steps", "5", "--disable_ds_ckpt"), folder(tmp_path), signal.SIGTERM)
    assert str(end) == "stopped by SIGTERM: with --ckpt.disable_ds nothing is saved to go on from"


def test_ctrl_c_names_the_last_checkpoint_too(tmp_path):
    end = told(section("--save_steps", "5"), folder(tmp_path), signal.SIGINT)
    assert end.by == signal.SIGINT
    assert str(end) == "interrupted; there is no checkpoint yet: it would begin anew"


def test_ctrl_c_without_checkpoints_is_left_alone():
    with pytest.raises(KeyboardInterrupt) as end, stoppable(section(), Checkpoints(None, None)):
        signal.raise_signal(signal.SIGINT)
    assert not isinstance(end.value, Stopped)
