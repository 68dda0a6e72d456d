"""Micro-batches and optimizer steps: nothing lost, nothing twice, never over the budget."""

from hypothesis import given
from hypothesis import strategies as st

from openrlhf.data.packing import by_count, by_tokens, evenly

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(lengths, st.integers(40, 200))
def test_a_token_budget_is_never_exceeded_and_every_sample_is_in_one_micro_batch(lengths, budget):
    bins = by_tokens(range(len(lengths)), lengths, budget=budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for b in bins)


@given(lengths)
def test_micro_batches_are_few(lengths):
    """First fit leaves at most one bin less than half full, so there are at most 2 · total / budget + 1 of them."""
    assert len(by_tokens(range(len(lengths)), lengths, budget=64)) <= 2 * sum(lengths) / 64 + 1


def test_a_sample_longer_than_the_budget_goes_alone():
    assert sorted(by_tokens([0, 1, 2], [100, 5, 5], budget=20)) == [[0], [1, 2]]


def test_bins_are_filled_evenly():
    """Eight samples of 10 at a budget of 50 need two micro-batches: four each, not five and three."""
    assert sorted(len(b) for b in by_tokens(range(8), [10] * 8, budget=50)) == [4, 4]


def test_families_stay_together_as_far_as_the_budget_allows():
    """Families of 30, 30 and 40 tokens at a budget of 60: two micro-batches, no family in both."""
    assert sorted(by_tokens(range(10), [10] * 10, budget=60, families="aabbabcccc")) == [
        [0, 1, 4, 2, 3, 5],
        [6, 7, 8, 9],
    ]


@given(lengths, st.integers(40, 200), st.integers(1, 5))
def test_families_change_neither_the_budget_nor_what_is_in(lengths, budget, count):
    families = [i % count for i in range(len(lengths))]
    bins = by_tokens(range(len(lengths)), lengths, budget=budget, families=families)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget for b in bins)


def test_by_count_keeps_order():
    assert by_count([3, 1, 2, 0, 4], size=2) == [[3, 1], [2, 0], [4]]


@given(st.integers(0, 50), st.integers(1, 8))
def test_evenly_differs_by_at_most_one(n, parts):
    cut = evenly(range(n), parts=parts)
    assert [i for part in cut for i in part] == list(range(n))
    assert len(cut) == parts
    assert max(map(len, cut)) - min(map(len, cut)) <= 1
