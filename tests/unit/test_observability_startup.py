"""The start of a run in parts: they add up to the time until the first sample, and are told once."""

import subprocess
import sys
import time

import pytest

from openrlhf.observability.startup import StartUp, process_began


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def test_parts_of_a_start_follow_each_other_up_to_the_first_sample():
    """Imports 10 s from the process's start at 100; data 2; 25 for engine and models, of which 1 belongs to neither and
    goes to the last; the push 1.5; the first sample 0.5: 39 in all. The engine's own parts are in none of these."""
    clock = Clock(110.0)
    start = StartUp(100.0, now=clock)
    start.mark("imports")
    clock.now = 112.0
    start.mark("data")
    clock.now = 137.0
    start.mark_all({"engine": 20.0, "models": 4.0, "engine process": 1.0, "engine graphs": 9.0})
    clock.now = 138.5
    start.mark("push")
    assert start.take() == {}  # it is not over
    clock.now = 139.0
    start.end("first sample")
    clock.now = 200.0
    start.end("first sample")  # the second sample
    start.mark("evaluation")
    assert start.line() == (
        "start-up 39.0 s: imports 10.0, data 2.0, engine 20.0 (process 1.0, graphs 9.0), models 5.0, push 1.5, "
        "first sample 0.5"
    )
    assert start.take() == {
        "imports": 10.0,
        "data": 2.0,
        "engine": 20.0,
        "models": 5.0,
        "engine_process": 1.0,
        "engine_graphs": 9.0,
        "push": 1.5,
        "first_sample": 0.5,
    }
    assert start.total == 39.0
    assert start.take() == {}


def test_a_part_that_comes_twice_is_one():
    clock = Clock(1.0)
    start = StartUp(0.0, now=clock)
    start.mark("data")
    clock.now = 3.0
    start.mark("reward")
    clock.now = 7.0
    start.mark("data")
    start.end("first sample")
    assert start.take()["data"] == 5.0


def test_a_second_attempt_begins_with_itself():
    clock = Clock(10.0)
    start = StartUp(0.0, now=clock)
    assert start.again() is start
    clock.now = 20.0
    second = start.again()
    clock.now = 21.0
    second.end("first sample")
    assert second.take() == {"first_sample": 1.0}
    assert second.total == 1.0


def test_a_process_knows_when_it_was_started():
    """The system counts in hundredths of a second."""
    code = "from openrlhf.observability.startup import process_began; print(process_began())"
    before = time.time()
    found = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert before - 0.05 <= found <= time.time()
    assert process_began() < before
    assert process_began() == pytest.approx(process_began(), abs=0.05)
