"""When an engine is given up, how often it is replaced, and where requests go meanwhile: on a clock that tests turn."""

from concurrent.futures import Future

import pytest
from hand_clock import HandClock

from openrlhf.cluster.health import HealthWatch, ReplacementBudget


@pytest.fixture
def clock():
    return HandClock()


def test_replacement_budget_counts_within_any_period(clock):
    """Two in 10 s: at 0 and 6; at 9 both still count; at 10 the first does not; at 15 those of 6 and 10 do."""
    budget = ReplacementBudget(2, within=10.0, clock=clock)
    spent = {}
    for seconds in (0, 6, 9, 10, 15, 16):
        clock.now = 1000.0 + seconds
        spent[seconds] = budget.spend(0)
    assert spent == {0: True, 6: True, 9: False, 10: True, 15: False, 16: True}


def test_replacement_budget_is_per_engine(clock):
    budget = ReplacementBudget(1, clock=clock)
    assert [budget.spend(0), budget.spend(1), budget.spend(0)] == [True, True, False]


class Patient:
    """An engine that is asked how it is."""

    def __init__(self):
        self.questions: list[Future] = []

    def ask(self) -> Future:
        self.questions.append(Future())
        return self.questions[-1]


class Ward:
    """Patients, of whom some are at work, and who was given up."""

    def __init__(self, clock, *names, timeout=30.0):
        self.patients = {name: Patient() for name in names}
        self.at_work = set(names)
        self.given_up: list[tuple[str, str]] = []
        self.clock = clock
        self.watch = HealthWatch(
            lambda: {name: self.patients[name].ask for name in self.at_work},
            timeout=timeout,
            give_up=lambda who, error: self.given_up.append((who, str(error))),
            clock=clock,
        )

    def look_after(self, seconds):
        self.clock.now += seconds
        self.watch.look()


def test_health_watch_gives_up_once_on_an_engine_that_does_not_answer(clock):
    ward = Ward(clock, "a", "b")
    ward.look_after(0)
    ward.patients["b"].questions[0].set_result(None)
    ward.look_after(30)
    assert ward.given_up == []
    ward.look_after(1)
    assert ward.given_up == [("a", "it has not answered for 30 s")]
    ward.at_work.remove("a")
    ward.look_after(60)
    assert [who for who, _ in ward.given_up] == ["a", "b"]  # b's second question was never answered


def test_health_watch_gives_up_at_once_on_an_engine_that_reports_an_error(clock):
    ward = Ward(clock, "a")
    ward.look_after(0)
    ward.patients["a"].questions[0].set_exception(RuntimeError("vLLM has died"))
    ward.look_after(1)
    assert ward.given_up == [("a", "vLLM has died")]


def test_the_time_of_who_was_not_at_work_begins_anew(clock):
    """20 s of work, rest, 20 s of work: never 30 s without an answer."""
    ward = Ward(clock, "a")
    ward.look_after(0)
    ward.look_after(20)
    ward.at_work.clear()
    ward.look_after(100)
    ward.at_work.add("a")
    ward.look_after(1)
    ward.look_after(20)
    assert ward.given_up == []
    assert len(ward.patients["a"].questions) == 2
