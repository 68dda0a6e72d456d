"""Something that starts beside other work: both errors end it in order, and what has started is closed."""

import threading
import time

import pytest

from openrlhf.models.loading import ModelLoadError
from openrlhf.rollout.base import EngineError
from openrlhf.runs import starting
from openrlhf.runs.preflight import reading_model
from openrlhf.runs.starting import Starting


class Engine:
    closed = False

    def close(self):
        self.closed = True


class Slow:
    """A start that ends when it is let go, or given up."""

    def __init__(self):
        self.may_end, self.given_up, self.engine = threading.Event(), 0, Engine()

    def __call__(self):
        assert self.may_end.wait(60)
        if self.given_up:
            raise EngineError("its process has ended")
        return self.engine

    def give_up(self):
        self.given_up += 1
        self.may_end.set()


def open_slow(slow):
    return Starting(slow, what="for the engine to start", give_up=slow.give_up)


def test_other_work_goes_on_while_something_starts():
    slow = Slow()
    with open_slow(slow) as begun:
        assert not slow.engine.closed
        slow.may_end.set()
        assert begun.result() is slow.engine
        assert not slow.engine.closed
    assert slow.engine.closed
    assert slow.given_up == 0


def test_only_what_was_waited_for_counts():
    slow = Slow()
    with open_slow(slow) as begun:
        threading.Timer(0.2, slow.may_end.set).start()
        begun.wait()
        waited = begun.waited
        begun.result()
    assert 0.1 < waited <= begun.waited < waited + 0.1


def test_a_start_that_fails_is_told_where_it_is_waited_for_in_its_own_words(tmp_path):
    """Also through code that takes every RuntimeError for a damaged model."""

    def fail():
        raise EngineError("vLLM did not start")

    with (
        pytest.raises(EngineError, match=r"^vLLM did not start$"),
        Starting(fail, what="to start", give_up=lambda: None) as begun,
        reading_model(str(tmp_path), flag="--actor.model_name_or_path"),
    ):
        begun.wait()


@pytest.mark.parametrize("error", [ModelLoadError("no weights"), KeyboardInterrupt()])
def test_an_error_beside_it_ends_a_start(error):
    slow = Slow()
    with pytest.raises(type(error)), open_slow(slow):
        raise error
    assert slow.given_up >= 1


def test_a_start_that_cannot_be_ended_is_left(monkeypatch):
    monkeypatch.setattr(starting, "GIVE_UP_SECONDS", 0.3)
    never = threading.Event()
    began = time.monotonic()
    with (
        pytest.raises(ModelLoadError),
        Starting(lambda: never.wait(60) and Engine(), what="to start", give_up=lambda: None),
    ):
        raise ModelLoadError("no weights")
    assert time.monotonic() - began < 30
    never.set()
