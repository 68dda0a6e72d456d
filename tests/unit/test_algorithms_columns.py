"""Sums and means over columns keep to each sample, whoever its neighbours are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.columns import discounted_sums, sequence_means, shift_left

NUMBERS = st.floats(-4, 4, width=32)
SAMPLES = st.lists(st.lists(NUMBERS, min_size=0, max_size=9), min_size=1, max_size=6)


def laid_out(samples: list[list[float]]) -> tuple[torch.Tensor, list[int]]:
    """The column of these samples, and its offsets."""
    offsets = [0]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return torch.tensor([x for sample in samples for x in sample], dtype=torch.float32), offsets


def test_means_by_hand_and_their_gradient():
    """Samples (1, 3) and (5): means 2, 2, 5. Weighting the result by 1, 10, 100, the first sample's tokens each get
    (1 + 10) / 2 of the gradient, the second's 100. A sample without tokens between them (sequence 1) is no matter."""
    values = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
    means = sequence_means(values, torch.tensor([0, 0, 2]))
    assert means.tolist() == [2, 2, 5]
    (means * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad.tolist() == [5.5, 5.5, 100]


def test_shifting_by_hand():
    """(1, 2), (), (3): every token sees the next of its own sample, and the last one 0."""
    values, offsets = laid_out([[1, 2], [], [3]])
    assert shift_left(values, offsets).tolist() == [2, 0, 0]


def test_discounted_sums_by_hand():
    """(1, 2), (), (4) with decay 1/2: 1 + 2/2 = 2, 2, 4."""
    values, offsets = laid_out([[1, 2], [], [4]])
    assert discounted_sums(values, offsets, decay=0.5).tolist() == [2, 2, 4]
    assert discounted_sums(values, offsets, decay=0.0).tolist() == [1, 2, 4]
    assert discounted_sums(torch.empty(0), [0], decay=0.5).tolist() == []


@settings(deadline=None, max_examples=50)
@given(SAMPLES, st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_discounted_sums_are_the_recursion_of_each_sample(samples, decay):
    """y_t = x_t + decay · y_{t+1}, one token after the other, from the end."""
    values, offsets = laid_out(samples)
    expected = []
    for sample in samples:
        running, backwards = 0.0, []
        for value in reversed(sample):
            running = value + decay * running
            backwards.append(running)
        expected += backwards[::-1]
    sums = discounted_sums(values, offsets, decay=decay)
    assert sums.tolist() == pytest.approx(expected, abs=1e-4)


@settings(deadline=None, max_examples=50)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_permuting_samples_permutes_the_sums_to_the_bit(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)

    def per_sample(chosen: list[list[float]]) -> list[list[float]]:
        values, offsets = laid_out(chosen)
        sums = discounted_sums(values, offsets, decay=0.9)
        return [sums[offsets[i] : offsets[i + 1]].tolist() for i in range(len(chosen))]

    whole = per_sample(samples)
    assert per_sample([samples[i] for i in order]) == [whole[i] for i in order]
    assert [per_sample([sample])[0] for sample in samples] == whole


def test_a_long_sample_loses_no_precision():
    """Σ_{k<n} γ^k = (1 − γ^n) / (1 − γ): at γ = 0.999 over 5,000 tokens."""
    size, decay = 5000, 0.999
    sums = discounted_sums(torch.ones(size), [0, size], decay=decay)
    assert float(sums[0]) == pytest.approx((1 - decay**size) / (1 - decay), rel=1e-6)


def test_an_infinite_neighbour_stays_a_neighbour():
    values, offsets = laid_out([[1.0, 1.0], [float("inf")], [float("nan")]])
    assert discounted_sums(values, offsets, decay=1.0)[:2].tolist() == [2, 1]
    assert shift_left(values, offsets)[:3].tolist() == [1, 0, 0]
