"""Off-policy weights, derived by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.corrections import CORRECTIONS, CorrectionInputs, get_correction


def weights_of(name: str, ratios: list[float], sequences: list[int]) -> tuple[list[float], list[bool]]:
    rollout = torch.linspace(-2, -1, len(ratios))
    old = rollout + torch.tensor(ratios).log()
    result = get_correction(name)(CorrectionInputs(old, rollout, torch.tensor(sequences)), low=0.5, high=2.0)
    return result.weights_A.tolist(), result.touched_A.tolist()


@pytest.mark.parametrize(
    ("name", "weights", "touched"),
    [
        # Bounds [0.5, 2]. Three sequences: ratios (4, 1), (8, 2), (0.25, 1).
        # tis clamps each.
        ("tis", [2, 1, 2, 2 - 1e-4, 0.5, 1], [True, False, True, False, True, False]),
        # icepop drops each that is outside.
        ("icepop", [0, 1, 0, 2 - 1e-4, 0, 1], [True, False, True, False, True, False]),
        # The geometric means are √4 = 2 (just in), √16 = 4 (out: both tokens go), √0.25 = 0.5 (just in: 0.25 stays
        # 0.25, for the lower bound is the sequence's alone).
        ("seq-mask-tis", [2, 1, 0, 0, 0.25, 1], [True, False, True, True, False, False]),
    ],
)
def test_weights_by_hand(name, weights, touched):
    """The ratios at the bounds are moved inwards by 1e-4, so that rounding does not decide."""
    ratios = [4 - 1e-3, 1, 8, 2 - 1e-4, 0.25 + 1e-4, 1]
    found, changed = weights_of(name, ratios, [0, 0, 1, 1, 2, 2])
    assert found == pytest.approx(weights, abs=2e-4)
    assert changed == touched


def test_kpop_by_hand():
    """The bound is 0.1 nats in both directions, of the events "this token" and "any other".

    π_old   π_rollout   KL one way, the other              weight
    0.5     0.75        −½ log 0.75 = 0.144, …             0
    0.5     0.6         0.0204, 0.0201                     5/6
    0.01    0.001       0.0141, 0.0067                     10: rare tokens may be off by a large factor
    0.99    0.85        0.121, 0.275                       0, though the factor is 1.16
    0.01    0.1         0.0713, 0.1445                     0: one direction is enough
    0.1     0.01        0.1445, 0.0713                     0: and so is the other
    """
    old = torch.tensor([0.5, 0.5, 0.01, 0.99, 0.01, 0.1]).log()
    rollout = torch.tensor([0.75, 0.6, 0.001, 0.85, 0.1, 0.01]).log()
    result = get_correction("kpop")(CorrectionInputs(old, rollout, torch.zeros(6).long()), low=0.9, high=1.1)
    assert result.weights_A.tolist() == pytest.approx([0, 5 / 6, 10, 0, 0, 0], rel=1e-4)
    assert result.touched_A.tolist() == [True, False, False, True, True, True]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_change_nothing_where_engine_and_trainer_agree(name):
    assert weights_of(name, [1.0, 1.0, 1.0], [0, 0, 1]) == ([1, 1, 1], [False, False, False])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_bounds_belong_to_the_inside(name):
    """With equal log-probs w is exactly 1, and so are both bounds."""
    logprobs = torch.tensor([-1.0, -2.0])
    result = get_correction(name)(CorrectionInputs(logprobs, logprobs, torch.tensor([0, 1])), low=1.0, high=1.0)
    assert result.weights_A.tolist() == [1, 1]
    assert not result.touched_A.any()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient_and_stay_finite(name):
    old = torch.tensor([500.0, -500.0, 0.1], requires_grad=True)
    inputs = CorrectionInputs(old, torch.zeros(3), torch.tensor([0, 1, 2]))
    result = get_correction(name)(inputs, low=0.0, high=float("inf"))
    assert not result.weights_A.requires_grad
    assert torch.isfinite(result.weights_A).all()


def test_an_unknown_correction_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="known: tis, icepop, seq-mask-tis"):
        get_correction("is")


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(deadline=None, max_examples=30)
@given(samples=st.lists(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=5), min_size=1, max_size=5))
def test_a_sample_s_weights_do_not_depend_on_its_company(name, samples):
    def one_batch(chosen: list[list[float]]) -> list[list[float]]:
        gaps = torch.tensor([gap for sample in chosen for gap in sample])
        sizes = [len(sample) for sample in chosen]
        sequences = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(sizes))
        inputs = CorrectionInputs(gaps, torch.zeros_like(gaps), sequences)
        return [piece.tolist() for piece in get_correction(name)(inputs, low=0.5, high=2.0).weights_A.split(sizes)]

    whole = one_batch(samples)
    assert [one_batch([sample])[0] for sample in samples] == whole
    assert one_batch(samples[::-1]) == whole[::-1]
