"""KL estimates and their controllers, derived by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.kl import AdaptiveKL, FixedKL, get_kl_estimator


def estimate(name: str, differences: list[float]) -> tuple[list[float], list[float]]:
    """The estimate where log π − log π_ref is this, and d estimate / d log π."""
    reference = torch.full((len(differences),), -0.5)
    logprobs = (reference + torch.tensor(differences)).requires_grad_()
    values = get_kl_estimator(name)(logprobs, reference)
    values.sum().backward()
    return values.tolist(), logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("name", "values", "gradient"),
    [
        # d = 0, log 2, −log 2: dk1/dlogp = 1; dk2/dlogp = d; dk3/dlogp = 1 − exp(−d).
        ("k1", [0, math.log(2), -math.log(2)], [1, 1, 1]),
        ("k2", [0, math.log(2) ** 2 / 2, math.log(2) ** 2 / 2], [0, math.log(2), -math.log(2)]),
        ("k3", [0, 1 / 2 - 1 + math.log(2), 2 - 1 - math.log(2)], [0, 1 / 2, -1]),
    ],
)
def test_estimates_by_hand(name, values, gradient):
    found, slope = estimate(name, [0.0, math.log(2), -math.log(2)])
    assert found == pytest.approx(values, abs=1e-6)
    assert slope == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # d = 12 and −12: k1 = ±12; k2 = 72; k3 = 11 + exp(−12) and exp(12) − 13. All beyond 10 and held there.
        ("k1", [10, -10]),
        ("k2", [10, 10]),
        ("k3", [10, 10]),
    ],
)
def test_estimates_are_held_within_ten(name, values):
    assert estimate(name, [12.0, -12.0]) == (values, [0, 0])


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_tokens_the_reference_holds_impossible_stay_finite(name):
    """exp(500) is infinite, and an infinite inner slope times the bound's 0 would be no number."""
    values, gradient = estimate(name, [500.0, -500.0])
    assert all(map(math.isfinite, values + gradient))


def test_an_unknown_estimator_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="known: k1, k2, k3"):
        get_kl_estimator("k4")


def test_the_fixed_coefficient_stays_as_configured():
    controller = FixedKL(0.1)
    controller.update(kl=100.0, samples=10**6)
    controller.load_state_dict({"coef": 0.7})
    assert controller.coef == 0.1


def test_the_adaptive_coefficient_by_hand():
    """coef 0.1, target 6, horizon 1000, rounds of 100 samples: coef ← coef · (1 + 0.1 e).

    KL 12:   e = clip(1, ±0.2) = 0.2        0.1 · 1.02 = 0.102
    KL 6.6:  e = 0.1                        0.102 · 1.01 = 0.10302
    KL 6:    e = 0                          0.10302
    KL 0:    e = clip(−1, ±0.2) = −0.2      0.10302 · 0.98 = 0.1009596
    """
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    seen = []
    for kl in (12.0, 6.6, 6.0, 0.0):
        controller.update(kl, samples=100)
        seen.append(controller.coef)
    assert seen == pytest.approx([0.102, 0.10302, 0.10302, 0.1009596])


def test_rounds_larger_than_the_horizon_halve_at_most():
    """1 − 0.2 · 10 = −1 would turn the penalty into a bonus; the factor is 1/2 instead. Upwards it is 1 + 2 = 3."""
    controller = AdaptiveKL(0.4, target=1.0, horizon=100)
    controller.update(0.0, samples=1000)
    assert controller.coef == pytest.approx(0.2)
    controller.update(9.0, samples=1000)
    assert controller.coef == pytest.approx(0.6)


def test_a_coefficient_that_fell_to_the_bottom_comes_back():
    """It rests at 1e-6 of its first value; 1.2 per round leads back over 1 after 76 rounds (1.2^76 > 1e6)."""
    controller = AdaptiveKL(1.0, target=1.0, horizon=100)
    for _ in range(5000):
        controller.update(0.0, samples=100)
    assert controller.coef == pytest.approx(1e-6)
    for _ in range(76):
        controller.update(5.0, samples=100)
    assert controller.coef > 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 10**5)), max_size=30))
def test_the_coefficient_stays_positive_and_finite(rounds):
    controller = AdaptiveKL(0.01, target=0.5, horizon=10_000)
    for kl, samples in rounds:
        controller.update(kl, samples)
        assert 0 < controller.coef < math.inf


def test_a_resumed_coefficient_goes_on_where_it_was():
    first, second = (AdaptiveKL(0.1, target=6.0, horizon=1000) for _ in range(2))
    first.update(12.0, samples=100)
    second.load_state_dict(first.state_dict())
    first.update(3.0, samples=50)
    second.update(3.0, samples=50)
    assert second.coef == first.coef != 0.1


def test_a_run_that_turns_adaptive_starts_from_the_fixed_coefficient():
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.load_state_dict(FixedKL(0.3).state_dict())
    assert controller.coef == 0.3


@pytest.mark.parametrize("wrong", [{"coef": 0.0}, {"target": 0.0}, {"horizon": -1}])
def test_adaptive_kl_controller_refuses_settings_that_could_never_adapt(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.* must be > 0"):
        AdaptiveKL(**{"coef": 0.1, "target": 6.0, "horizon": 1000, **wrong})
