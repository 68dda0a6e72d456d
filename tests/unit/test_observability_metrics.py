"""Reductions do not depend on how the work was cut; phases add up."""

import math
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.observability.metrics import BusyClock, Last, Max, Mean, Metrics, Min, PhaseClock, Quantile, Std, Sum

numbers = st.floats(-1e6, 1e6)


def test_a_mean_weighs_micro_batches_by_their_size():
    """10 tokens with total 1 and 90 with total 2: 3 / 100, where a mean of means would say (0.1 + 0.0222) / 2."""
    first, second = Metrics(), Metrics()
    first.mean("kl", 1.0, 10)
    second.mean("kl", 2.0, 90)
    assert Metrics.merged([first, second]).values() == {"kl": pytest.approx(0.03)}


def test_tensors_are_read_when_a_result_is_asked_for_and_count_as_numbers_do():
    """Both kinds of numbers mixed, in the order in which names were written."""

    def written(number) -> Metrics:
        metrics, later = Metrics(), Metrics()
        metrics.last("rate", 0.5)
        metrics.mean("loss", number(3.0), 2)
        metrics.sum("count", 1)
        later.max("longest", 7)
        later.mean("loss", number(5.0), number(6))
        later.note("a note")
        metrics.merge(later)
        return metrics

    read = []
    lazy = written(lambda x: LateTensor(torch.tensor(x), read))
    assert not read
    assert lazy.values() == written(float).values() == {"rate": 0.5, "loss": 1.0, "count": 1.0, "longest": 7.0}
    assert list(lazy) == ["rate", "loss", "count", "longest"]
    assert len(read) == 3
    assert pickle.loads(pickle.dumps(written(torch.tensor))) == written(float)


class LateTensor(torch.Tensor):
    """Says when its number is looked at."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, read: list) -> "LateTensor":
        late = torch.Tensor._make_subclass(cls, tensor)
        late.read = read
        return late

    def detach(self) -> "LateTensor":
        return self

    def double(self) -> torch.Tensor:
        self.read.append(True)
        return torch.Tensor.double(self.as_subclass(torch.Tensor))


@settings(deadline=None)
@given(st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_metrics_do_not_depend_on_cut_and_order(parts: list[list[float]], shuffle: random.Random):
    def measure(values: list[float]) -> Metrics:
        metrics = Metrics()
        metrics.mean("mean", math.fsum(values), len(values))
        metrics.mean_of("mean_of", values)
        metrics.std_of("std", values)
        metrics.quantile_of("median", map(abs, values), share=0.5)
        for value in values:
            metrics.sum("sum", value)
            metrics.max("max", value)
            metrics.min("min", value)
        return metrics

    whole = measure([value for part in parts for value in part]).values()
    measured = [measure(part) for part in parts]
    shuffle.shuffle(measured)
    cut = shuffle.randrange(len(measured) + 1)
    grouped = Metrics.merged([Metrics.merged(measured[:cut]), Metrics.merged(measured[cut:])])
    # Rounding is relative to what was added up, which may cancel.
    assert grouped.values() == pytest.approx(whole, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("kind", [Sum, Max, Min, Last])
@settings(deadline=None)
@given(a=numbers, b=numbers, c=numbers)
def test_merging_is_associative(kind, a: float, b: float, c: float):
    left = kind(a).merge(kind(b)).merge(kind(c)).value
    right = kind(a).merge(kind(b).merge(kind(c))).value
    assert left == pytest.approx(right, abs=1e-6)


def test_the_last_value_wins():
    metrics = Metrics()
    metrics.last("actor_lr", 1e-6)
    metrics.last("actor_lr", 2e-6)
    assert metrics.values() == {"actor_lr": 2e-6}


def test_standard_deviation_by_hand():
    """1, 2 | 3, 6: μ = 3, Σ(x - μ)² = 4 + 1 + 0 + 9 = 14, √(14 / 4)."""
    assert Std.of([1, 2]).merge(Std.of([3, 6])).value == pytest.approx(math.sqrt(3.5))


def test_a_quantile_is_that_of_all_numbers_however_they_were_cut():
    """Of 1 … 1,000 in parts of 7, 990 are at most 990; 0 has no logarithm, and is the smallest."""
    parts = [Quantile.of(range(start, min(start + 7, 1001)), share=0.99) for start in range(1, 1001, 7)]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merge(part)
    assert whole.value == pytest.approx(990, rel=0.02)
    assert Quantile.of([0.0, 0.0, 0.0, 5.0], share=0.75).value == 0.0
    assert Quantile.of([2e-9], share=0.75).value == pytest.approx(2e-9, rel=0.02)
    assert Quantile.of([0.0, 0.0, 0.0, 5.0], share=0.76).value == pytest.approx(5, rel=0.02)
    for bad in (math.nan, math.inf):
        assert math.isnan(whole.merge(Quantile.of([bad], share=0.99)).value)


def test_metrics_of_nothing_have_no_mean():
    metrics = Metrics()
    metrics.quantile_of("median", [], share=0.5)
    metrics.mean("kl", 0.0, 0)
    metrics.std_of("std", [])
    assert metrics.values() == {}
    with pytest.raises(ValueError, match="count of a mean"):
        Mean(1.0, -1)


@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_is_never_swallowed(kind):
    assert math.isnan(kind(math.nan).merge(kind(1.0)).value)
    assert math.isnan(kind(1.0).merge(kind(math.nan)).value)


def test_metrics_refuse_two_reductions_of_one_name():
    metrics = Metrics()
    metrics.sum("tokens", 3)
    with pytest.raises(TypeError, match=r"'tokens' is a Sum.*Mean"):
        metrics.mean("tokens", 3, 1)


def test_metrics_travel_between_processes_and_merging_leaves_the_parts_alone():
    part = Metrics()
    part.mean("kl", 1, 2)
    copy = pickle.loads(pickle.dumps(part))
    assert Metrics.merged([part, copy]).values() == {"kl": 0.5}
    assert part == copy


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_phases_add_up_and_inner_phases_are_not_counted_twice():
    """3 s experience of which 2 s generation, 4 s training, 1 s elsewhere: 1 + 2 + 4 + 1 = 8."""
    now, heard = FakeTime(), []
    clock = PhaseClock(on_phase=heard.append, now=now)
    with clock.phase("make_experience"):
        now.seconds += 0.5
        with clock.phase("generation"):
            assert clock.current == "generation"
            now.seconds += 2
        now.seconds += 0.5
    now.seconds += 1
    with clock.phase("ppo_train"):
        now.seconds += 4
    assert clock.take() == {
        "timing/make_experience": 1.0,
        "timing/generation": 2.0,
        "timing/ppo_train": 4.0,
        "timing/step_total": 8.0,
    }
    assert heard == ["make_experience", "generation", "make_experience", "", "ppo_train", ""]
    assert clock.take() == {"timing/step_total": 0.0}


def test_a_phase_that_raises_is_timed_and_left():
    now = FakeTime()
    clock = PhaseClock(now=now)

    def fail() -> None:
        now.seconds += 3
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError), clock.phase("ppo_train"):
        fail()
    assert clock.current == ""
    assert clock.take()["timing/ppo_train"] == 3.0


def test_a_phase_may_span_a_take():
    now = FakeTime()
    clock = PhaseClock(now=now)
    with clock.phase("generation"):
        now.seconds += 1
        assert clock.take()["timing/generation"] == 1.0
        now.seconds += 2
    assert clock.take() == {"timing/generation": 2.0, "timing/step_total": 2.0}


def test_busy_seconds_are_those_in_which_anything_was_under_way():
    """One from 1 to 4, another from 2 to 6, a third from 8 on: 5 s until 8, and 7 s at 10."""
    clock = iter([1.0, 6.0, 8.0, 10.0])
    busy = BusyClock(now=lambda: next(clock))
    assert busy.seconds == 0
    busy.begin()
    busy.begin()
    busy.end()
    busy.end()
    assert busy.seconds == 5
    busy.begin()
    assert busy.seconds == 7
