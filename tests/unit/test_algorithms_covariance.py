"""Which tokens of a step are chosen: by hand, and the same however the step is shared out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import together

from openrlhf.algorithms.covariance import TokenChoice, chosen_tokens

ADVANTAGES = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0, 0.0])
LOGPROBS = torch.tensor([-1.0, -3.0, -3.0, -1.0, -2.0, -2.0])
DRAWS = torch.tensor([0.3, 0.5, 0.1, 0.9, 0.7, 0.8])
"""Means 0 and −2, so the covariances are 2, 2, −2, −2, 0 and 0."""


def test_the_largest_covariances_by_hand():
    """A share of 1/6 of six is one token: of the two with 2 the one whose draw is 0.5; of 0.5 three: both of these, and
    of the two with 0 the one whose draw is 0.8."""
    one = chosen_tokens(ADVANTAGES, LOGPROBS, DRAWS, TokenChoice(share=1 / 6 + 1e-9))
    assert one.nonzero().flatten().tolist() == [1]
    three = chosen_tokens(ADVANTAGES, LOGPROBS, DRAWS, TokenChoice(share=0.5))
    assert three.nonzero().flatten().tolist() == [0, 1, 5]


def test_what_all_tokens_have_in_common_is_no_covariance():
    """All advantages 3 higher and all log-probs 2 lower, which without their means would make of token 0 the first."""
    for choice in (TokenChoice(share=1 / 6 + 1e-9), TokenChoice(share=0.5), TokenChoice(share=1.0, between=(1.0, 5.0))):
        wanted = chosen_tokens(ADVANTAGES, LOGPROBS, DRAWS, choice)
        assert torch.equal(chosen_tokens(ADVANTAGES + 3, LOGPROBS - 2, DRAWS, choice), wanted)


def test_no_more_tokens_are_chosen_where_many_are_alike():
    """Of a policy that is certain of most tokens (log-prob 0 in fp32) all of these in the best samples have the largest
    covariance; where no sample has an advantage, all tokens have 0."""
    draws = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    advantages = torch.tensor([2.5, -0.35]).repeat(500)
    logprobs = torch.tensor([0.0, 0.0, 0.0, -1.0, -2.0]).repeat(200)
    for column in (advantages, torch.zeros(1000)):
        for share in (2e-4, 0.01, 0.2):
            assert int(chosen_tokens(column, logprobs, draws, TokenChoice(share=share)).sum()) == max(1, 1000 * share)


def test_draws_between_bounds_by_hand():
    """Between −1 and 3 are tokens 0, 1, 4 and 5, of which 5 and 4 have the largest draws; between 2 and 3 is none, for
    bounds do not belong to it."""

    def chosen(share: float, *between: float) -> list[int]:
        choice = TokenChoice(share=share, between=between)
        return chosen_tokens(ADVANTAGES, LOGPROBS, DRAWS, choice).nonzero().flatten().tolist()

    assert chosen(0.01, -1.0, 3.0) == [5]
    assert chosen(0.34, -1.0, 3.0) == [4, 5]
    assert chosen(1.0, -1.0, 3.0) == [0, 1, 4, 5]
    assert chosen(1.0, 2.0, 3.0) == []


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(-4, 4), st.integers(-6, 0)), min_size=1, max_size=25),
    st.lists(st.integers(0, 25), min_size=2, max_size=2),
    st.sampled_from([0.01, 0.1, 0.5]),
    st.sampled_from([None, (0.25, 5.0)]),
    st.randoms(use_true_random=False),
)
def test_ranks_and_order_choose_the_same_tokens(values, cuts, share, between, random):
    """Advantages and log-probs of eighths, whose sums are exact; three ranks, of which some may have nothing."""
    table = torch.tensor([(a / 8, p / 8, i / 32) for i, (a, p) in enumerate(values)])
    choice = TokenChoice(share=share, between=between)
    alone = chosen_tokens(*table.T, choice)
    assert between is not None or int(alone.sum()) == max(1, int(share * len(values)))
    order = list(range(len(values)))
    random.shuffle(order)
    low, high = sorted(min(cut, len(values)) for cut in cuts)
    shares = [order[:low], order[low:high], order[high:]]
    parts = together(3, lambda own: chosen_tokens(*table[shares[own.index]].T, choice, gather=own.gather))
    found = {
        token
        for share, part in zip(shares, parts, strict=True)
        for token, is_in in zip(share, part.tolist(), strict=True)
        if is_in
    }
    assert found == set(alone.nonzero().flatten().tolist())


def test_a_step_without_tokens_chooses_none():
    nothing = torch.empty(0)
    assert chosen_tokens(nothing, nothing, nothing, TokenChoice(share=0.1)).tolist() == []


def test_a_share_is_of_all_ranks_tokens():
    """Ten tokens on two ranks, share 0.2: the two with the largest covariance, both on the first rank."""
    advantages, logprobs = torch.tensor([5.0, 4.0, *[0.0] * 8]), torch.tensor([-1.0, -1.0, *[-2.0] * 8])

    def own_part(own):
        rows = slice(0, 5) if own.index == 0 else slice(5, 10)
        return chosen_tokens(
            advantages[rows], logprobs[rows], torch.zeros(5), TokenChoice(share=0.2), gather=own.gather
        )

    assert [part.tolist() for part in together(2, own_part)] == [[True, True, False, False, False], [False] * 5]
