"""Values and gradients of every preference and reward-model loss, derived by hand in each docstring."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.preferences import (
    PairLogprobs,
    dpo_loss,
    get_reward_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
    mean_nll,
    preference_gap,
)

LOG3 = math.log(3.0)
"""σ(log 3) = 3/4, σ(−log 3) = 1/4: sigmoids that can be written down."""
LOG43 = math.log(4.0 / 3.0)
LOG4 = math.log(4.0)


def values_and_slopes(function, xs: list[float]) -> tuple[list[float], list[float]]:
    x = torch.tensor(xs, dtype=torch.float64, requires_grad=True)
    loss = function(x)
    (slope,) = torch.autograd.grad(loss.sum(), x)
    return loss.tolist(), slope.tolist()


def test_the_gap_is_what_the_policy_prefers_beyond_the_reference():
    """(−3 − −5) − (−4 − −4.5) = 2 − 0.5 = 1.5; its gradient is +1 on the chosen and −1 on the rejected answer."""
    chosen, rejected = (torch.tensor([x], requires_grad=True) for x in (-3.0, -5.0))
    reference = PairLogprobs(torch.tensor([-4.0]), torch.tensor([-4.5]))
    gap = preference_gap(PairLogprobs(chosen, rejected), reference)
    assert gap.tolist() == [1.5]
    gap.sum().backward()
    assert (chosen.grad.tolist(), rejected.grad.tolist()) == ([1.0], [-1.0])


def test_dpo_by_hand():
    """β = 0.5, so βh = log 3 at h = 2 log 3.

    h          −log σ(βh)          dl/dh = −β σ(−βh)
    2 log 3    −log 3/4 = log 4/3   −0.5 · 1/4
    0          log 2                −0.5 · 1/2
    −2 log 3   −log 1/4 = log 4     −0.5 · 3/4
    """
    values, slopes = values_and_slopes(lambda h: dpo_loss(h, beta=0.5), [2 * LOG3, 0.0, -2 * LOG3])
    assert values == pytest.approx([LOG43, math.log(2.0), LOG4])
    assert slopes == pytest.approx([-0.125, -0.25, -0.375])


def test_label_smoothing_by_hand():
    """β = 0.5, ε = 0.2: 0.8 · −log σ(βh) + 0.2 · −log σ(−βh).

    h          l                            dl/dh = −β ((1−ε) σ(−βh) − ε σ(βh))
    2 log 3    0.8 log 4/3 + 0.2 log 4       −0.5 (0.8/4 − 0.2·3/4) = −0.025
    −2 log 3   0.8 log 4 + 0.2 log 4/3       −0.5 (0.8·3/4 − 0.2/4) = −0.275
    2 log 4    (σ = 4/5 = 1 − ε: the minimum)  0
    """
    h = [2 * LOG3, -2 * LOG3, 2 * LOG4]
    values, slopes = values_and_slopes(lambda x: dpo_loss(x, beta=0.5, label_smoothing=0.2), h)
    assert values[:2] == pytest.approx([0.8 * LOG43 + 0.2 * LOG4, 0.8 * LOG4 + 0.2 * LOG43])
    assert slopes == pytest.approx([-0.025, -0.275, 0.0])


def test_dpo_does_not_overflow():
    """βh = ±1000: the loss is 0 or 1000, its slope 0 or −1."""
    values, slopes = values_and_slopes(lambda h: dpo_loss(h, beta=1.0), [1000.0, -1000.0])
    assert values == [0.0, 1000.0]
    assert slopes == [0.0, -1.0]


@given(st.floats(-20, 20), st.floats(0.01, 2))
def test_half_smoothing_knows_no_preference(gap, beta):
    """With ε = 1/2 a pair and its opposite cost the same."""
    h = torch.tensor([gap, -gap], dtype=torch.float64)
    one, other = dpo_loss(h, beta=beta, label_smoothing=0.5).tolist()
    assert one == pytest.approx(other)


def test_ipo_by_hand():
    """β = 0.25: the gap to reach is 1 / (2β) = 2.

    h    (h − 2)²    2 (h − 2)
    0    4           −4
    2    0            0
    5    9            6          too far is pulled back
    """
    values, slopes = values_and_slopes(lambda h: ipo_loss(h, beta=0.25), [0.0, 2.0, 5.0])
    assert values == pytest.approx([4, 0, 9])
    assert slopes == pytest.approx([-4, 0, 6])


def test_kto_by_hand():
    """β = 0.5, z₀ = 1; at r = 1 + 2 log 3: β(r − z₀) = log 3, p = 3/4; at r = 1 − 2 log 3: p = 1/4.

    r             label         l = 1 − σ(±…)    dl/dr = ∓β p (1 − p)
    1 + 2 log 3   desirable     1/4               −0.5 · 3/16
    1 − 2 log 3   desirable     3/4               −0.5 · 3/16
    1 + 2 log 3   undesirable   3/4               +0.5 · 3/16
    1             undesirable   1/2               +0.5 · 1/4
    """
    r = [1 + 2 * LOG3, 1 - 2 * LOG3, 1 + 2 * LOG3, 1.0]
    desirable = torch.tensor([True, True, False, False])
    z0 = torch.tensor(1.0, dtype=torch.float64)
    values, slopes = values_and_slopes(lambda x: kto_loss(x, desirable, z0, beta=0.5), r)
    assert values == pytest.approx([0.25, 0.75, 0.75, 0.5])
    assert slopes == pytest.approx([-3 / 32, -3 / 32, 3 / 32, 1 / 8])


def test_the_reference_point_is_a_mean_held_at_zero_without_gradient():
    """(3 − 1 + 1) / 3 = 1; a negative mean is no KL: 0."""
    ratios = torch.tensor([3.0, -1.0, 1.0], requires_grad=True)
    z0 = kto_reference_point(ratios)
    assert z0.item() == 1.0
    assert not z0.requires_grad
    assert kto_reference_point(-ratios).item() == 0.0


@pytest.mark.parametrize("name", ["sigmoid", "logexp"])
def test_reward_losses_by_hand(name):
    """r_c = log 3, r_r = 0, margin 0, log 3 and 0 (swapped rewards): σ(log 3) = 3/4.

    r_c − r_r   margin    sigmoid       dl/dr_c = −σ(−…)    logexp (no margin)   dl/dr_c
    log 3       0         log 4/3       −1/4                 log 4/3              −1/4
    log 3       log 3     log 2         −1/2                 log 4/3              −1/4
    −log 3      0         log 4         −3/4                 log 4                −3/4
    """
    chosen = torch.tensor([LOG3, LOG3, 0.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 0.0, LOG3], dtype=torch.float64, requires_grad=True)
    loss = get_reward_loss(name)(chosen, rejected, torch.tensor([0.0, LOG3, 0.0]))
    loss.sum().backward()
    with_margin = {"sigmoid": (math.log(2.0), -0.5), "logexp": (LOG43, -0.25)}[name]
    assert loss.tolist() == pytest.approx([LOG43, with_margin[0], LOG4])
    assert chosen.grad.tolist() == pytest.approx([-0.25, with_margin[1], -0.75])
    assert rejected.grad.tolist() == pytest.approx([0.25, -with_margin[1], 0.75])


def test_reward_loss_of_any_other_name_is_logexp():
    assert get_reward_loss("loglikelihood") is get_reward_loss("logexp") is not get_reward_loss("sigmoid")


def test_mean_nll_by_hand():
    """log π = −6 over 3 tokens: 2 a token, slope −1/3; a single token of −0.5."""
    values, slopes = values_and_slopes(lambda x: mean_nll(x, torch.tensor([3, 1])), [-6.0, -0.5])
    assert values == pytest.approx([2.0, 0.5])
    assert slopes == pytest.approx([-1 / 3, -1.0])
