"""Divergences by hand."""

import math

import pytest
import torch

from openrlhf.algorithms.distillation import LEAST_REST, get_divergence, top_k_divergence


def logs(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # π = (½, ½), p = (¾, ¼)
        ("reverse", 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        ("forward", 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)),
        # m = (⅝, ⅜)
        (
            "js",
            0.25 * (math.log(0.5 / 0.625) + math.log(0.5 / 0.375))
            + 0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375)),
        ),
    ],
)
def test_divergences_by_hand(name, wanted):
    assert float(get_divergence(name)(logs(0.5, 0.5), logs(0.75, 0.25))) == pytest.approx(wanted)
    assert float(get_divergence(name)(logs(0.3, 0.7), logs(0.3, 0.7))) == pytest.approx(0.0, abs=1e-12)


def test_the_rest_counts_as_one_token():
    """π = (0.5 | 0.2 + 0.3), p = (0.6 | 0.4): KL of (0.5, 0.5) from (0.6, 0.4)."""
    wanted = 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    own = top_k_divergence(get_divergence("reverse"), logs(0.5), torch.tensor([0.5]).double().log(), logs(0.6))
    assert float(own) == pytest.approx(wanted)


def test_a_teacher_that_leaves_no_rest_has_a_finite_price():
    """p = (1 | 0): the rest counts as `LEAST_REST`. KL of (0.9, 0.1) from (1, 1e-8)."""
    own = top_k_divergence(get_divergence("reverse"), logs(0.9), torch.tensor([0.1]).double().log(), logs(1.0))
    assert float(own) == pytest.approx(0.9 * math.log(0.9) + 0.1 * math.log(0.1 / LEAST_REST))


def test_an_unknown_divergence_names_the_known_ones():
    with pytest.raises(ValueError, match="'kl'; known: reverse, forward, js"):
        get_divergence("kl")
