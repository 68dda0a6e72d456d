"""Steps are a function of their number: every sample once an epoch, the same for any number of ranks, resumable."""

import json
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.data.files import DataError
from openrlhf.data.packing import balance, best_fit
from openrlhf.data.schedule import Schedule, divide

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=60)
cuts = st.one_of(
    st.builds(lambda n: {"token_budget": n}, st.integers(40, 200)),
    st.builds(lambda n: {"micro_batch_size": n}, st.integers(1, 9)),
)


def long_tail(n, *, seed=0):
    """Tokens of n samples: log-normal, at most 4,096."""
    return np.clip(np.random.default_rng(seed).lognormal(6, 1, n).astype(int), 8, 4096).tolist()


class TestOrder:
    def test_every_sample_once_an_epoch_minus_the_tail(self):
        """10 samples in batches of 3: 3 steps an epoch, one sample left out of it, not always the same."""
        schedule = Schedule([5] * 10, batch_size=3, epochs=8, token_budget=100)
        assert schedule.steps_per_epoch == 3
        assert len(schedule) == 24
        left_out = set()
        for epoch in range(8):
            steps = [schedule.step(epoch * 3 + i) for i in range(3)]
            assert {step.epoch for step in steps} == {epoch}
            seen = Counter(sample for step in steps for sample in step.samples)
            assert set(seen.values()) == {1}
            left_out |= {*range(10)} - {*seen}
            assert len(seen) == 9
        assert len(left_out) > 1

    @pytest.mark.parametrize(("total", "steps"), [(None, 6), (4, 4), (6, 6), (100, 6)])
    def test_it_ends_after_the_steps_asked_for(self, total, steps):
        """Ten samples in steps of three, two epochs: six steps of which the first are the same whatever the limit."""
        schedule = Schedule([5] * 10, batch_size=3, epochs=2, total_steps=total, token_budget=100)
        whole = Schedule([5] * 10, batch_size=3, epochs=2, token_budget=100)
        assert len(schedule) == steps
        assert list(schedule) == list(whole)[:steps]

    def test_epochs_and_seeds_have_orders_of_their_own(self):
        def order(seed, epoch):
            return Schedule([1] * 50, batch_size=50, epochs=2, seed=seed, micro_batch_size=1).step(epoch).samples

        orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
        assert len({tuple(samples) for samples in orders}) == 4
        assert order(1, 0) == orders[0]

    def test_a_batch_larger_than_the_data_is_refused(self):
        with pytest.raises(DataError, match=r"--train\.batch_size 8 is more than the 5 samples there are"):
            Schedule([1] * 5, batch_size=8, micro_batch_size=1)

    def test_steps_outside(self):
        with pytest.raises(IndexError):
            Schedule([1] * 5, batch_size=5, micro_batch_size=1).step(1)


class TestResuming:
    @given(taken=st.integers(0, 12), ranks=st.integers(1, 4))
    def test_it_continues_with_the_next_step_on_any_number_of_ranks(self, taken, ranks):
        def schedule(ranks):
            return Schedule(long_tail(40), batch_size=10, epochs=3, ranks=ranks, token_budget=4096)

        whole = [step.samples for step in schedule(1)]
        begun = schedule(1)
        for _, _step in zip(range(taken), begun, strict=False):
            pass
        resumed = schedule(ranks)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert resumed.consumed_samples == 10 * taken
        assert [step.samples for step in resumed] == whole[taken:]

    def test_a_step_is_taken_when_it_is_handed_out(self):
        """A checkpoint written while step 0 is the current one, after its update, continues with step 1."""
        schedule = Schedule([1] * 4, batch_size=2, epochs=1, micro_batch_size=1)
        assert next(iter(schedule)).number == 0
        assert schedule.state_dict()["consumed_samples"] == 2
        assert schedule.next_step == 1

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"seed": 1}, "--train.seed 42, now it is 1"),
            ({"batch_size": 3}, "--train.batch_size 2, now it is 3"),
            ({"lengths": [1] * 5}, "made with 4 samples, now there are 5"),
        ],
    )
    def test_other_steps_are_refused(self, change, words):
        settings = {"lengths": [1] * 4, "batch_size": 2, "micro_batch_size": 1}
        state = Schedule(**settings).state_dict()
        with pytest.raises(DataError, match=words):
            Schedule(**{**settings, **change}).load_state_dict(state)

    def test_other_lengths_are_told(self, caplog):
        state = Schedule([1, 2], batch_size=2, micro_batch_size=1).state_dict()
        with caplog.at_level(logging.WARNING):
            Schedule([2, 1], batch_size=2, micro_batch_size=1).load_state_dict(state)
        assert "other lengths" in caplog.text


class TestRanks:
    @given(lengths, st.integers(1, 6), cuts)
    def test_together_the_ranks_have_every_sample_once(self, lengths, ranks, cut):
        shares = divide(range(len(lengths)), lengths, ranks=ranks, **cut)
        assert sorted(i for share in shares for bin_ in share for i in bin_) == [*range(len(lengths))]

    @given(lengths, st.integers(1, 6), cuts)
    def test_every_rank_has_as_many_forwards(self, lengths, ranks, cut):
        """And a rank's empty ones, if any, come last."""
        shares = divide(range(len(lengths)), lengths, ranks=ranks, **cut)
        assert len({len(share) for share in shares}) == 1
        for share in shares:
            full = [bool(bin_) for bin_ in share]
            assert full == sorted(full, reverse=True)
            assert any(full) or len(lengths) < ranks

    @given(lengths, st.integers(1, 6), st.integers(60, 200))
    def test_tokens_are_even_up_to_one_sample(self, lengths, ranks, budget):
        shares = divide(range(len(lengths)), lengths, ranks=ranks, token_budget=budget)
        loads = [sum(lengths[i] for bin_ in share for i in bin_) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)

    def test_a_large_step_is_even_within_a_percent(self):
        sizes = long_tail(512)
        shares = divide(range(512), sizes, ranks=8, token_budget=4096)
        loads = [sum(sizes[i] for bin_ in share for i in bin_) for share in shares]
        assert max(loads) / np.mean(loads) < 1.01

    def test_a_rank_sees_its_share(self):
        sizes = long_tail(16)
        schedules = [Schedule(sizes, batch_size=16, rank=r, ranks=2, token_budget=4096) for r in range(2)]
        steps = [schedule.step(0) for schedule in schedules]
        assert steps[0].samples == steps[1].samples
        assert [step.micro_batches for step in steps] == divide(steps[0].samples, sizes, ranks=2, token_budget=4096)

    def test_fewer_samples_than_forwards(self):
        """Five samples that fill the budget, on four ranks: one rank needs two forwards, so all have two."""
        assert divide(range(5), [10] * 5, ranks=4, token_budget=10) == [
            [[0], [4]], [[1], []], [[2], []], [[3], []],
        ]  # fmt: skip


class TestMicroBatches:
    @given(lengths, st.integers(1, 6), st.integers(20, 200))
    def test_never_over_the_budget(self, lengths, ranks, budget):
        """Only a sample that is over it by itself is, and goes alone."""
        for share in divide(range(len(lengths)), lengths, ranks=ranks, token_budget=budget):
            assert all(len(bin_) <= 1 or sum(lengths[i] for i in bin_) <= budget for bin_ in share)

    @given(lengths, st.integers(1, 6), st.integers(1, 9))
    def test_never_over_the_count(self, lengths, ranks, size):
        shares = divide(range(len(lengths)), lengths, ranks=ranks, micro_batch_size=size)
        assert all(len(bin_) <= size for share in shares for bin_ in share)
        counts = [sum(map(len, share)) for share in shares]
        assert max(counts) == -(-len(lengths) // ranks)

    def test_a_long_tail_fills_the_budget(self):
        """1,024 samples into 4,096 tokens: at least 98% of the room is used."""
        sizes = long_tail(1024)
        (bins,) = divide(range(1024), sizes, token_budget=4096)
        assert sum(sizes) / (4096 * len(bins)) >= 0.98

    def test_evenly_filled_where_the_budget_allows(self):
        """Eight samples of 10 at a budget of 50: four each, not five and three."""
        assert [len(bin_) for bin_ in divide(range(8), [10] * 8, token_budget=50)[0]] == [4, 4]

    @pytest.mark.parametrize("cut", [{}, {"token_budget": 5, "micro_batch_size": 1}])
    def test_one_of_two_ways_to_cut(self, cut):
        with pytest.raises(ValueError, match="either a token budget or a micro-batch size"):
            divide([0], [1], **cut)


class TestPacking:
    def test_best_fit_takes_the_fullest_bin_that_has_room(self):
        """Budget 10, lengths 7, 6, 4, 2, 1: 4 goes to 6 and fills it, 2 and 1 to 7."""
        assert best_fit([0, 1, 2, 3, 4], [7, 6, 4, 2, 1], budget=10) == [[0, 3, 4], [1, 2]]

    def test_best_fit_prefers_the_tighter_bin(self):
        """Budget 10, lengths 6, 7, 3, in this order: first fit would put the 3 to the 6."""
        assert best_fit([0, 1, 2], [6, 7, 3], budget=10) == [[0], [1, 2]]

    def test_balance_closes_full_bins(self):
        """6, 5, 4 and 1 to two bins of two: 6 | 5, 6 | 5 4, and the 1 has to go to the 6."""
        assert balance([0, 1, 2, 3], [6, 5, 4, 1], count=2, at_most=2) == [[0, 3], [1, 2]]
        assert balance([0, 1, 2, 3], [9, 3, 2, 1], count=2) == [[0], [1, 2, 3]]
        assert balance([0, 1, 2, 3], [9, 3, 2, 1], count=2, at_most=2) == [[0, 3], [1, 2]]
