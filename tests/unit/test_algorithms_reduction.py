"""Weights that make a sum of token losses the mean a paper asks for; and pass@k."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.reduction import Aggregation, pass_at_k, sample_weights


def test_sample_weights_by_hand():
    """Samples of 1, 3 and 0 action tokens.

    token: 1/4 each; sequence: two samples count, so 1/2 and 1/(2·3); constant L = 8: 1/(2·8) each. The sample
    without actions weighs nothing and is in no denominator.
    """
    counts = [1, 3, 0]
    assert sample_weights(Aggregation.TOKEN, counts) == [1 / 4, 1 / 4, 0]
    assert sample_weights(Aggregation.SEQUENCE, counts) == [1 / 2, 1 / 6, 0]
    assert sample_weights(Aggregation.CONSTANT, counts, constant_length=8) == [1 / 16, 1 / 16, 0]
    assert sample_weights(Aggregation.TOKEN_SUM, counts) == [1 / 2, 1 / 2, 0]
    assert sample_weights(Aggregation.TOKEN, [0, 0]) == [0, 0]
    with pytest.raises(ValueError, match="needs the length"):
        sample_weights(Aggregation.CONSTANT, counts)


def test_prompts_weigh_alike_whatever_their_samples():
    """Prompt a: samples of 1 and 3 tokens, the second in segments of 1 and 2; prompt b: one of 2 tokens and one of
    none; prompt c: none at all. Two prompts count: 1/(2·4) for each token of a, 1/(2·2) for each of b."""
    counts = [1, 1, 2, 2, 0, 0]
    weights = sample_weights(Aggregation.PROMPT_MEAN, counts, episodes=[0, 1, 1, 2, 3, 4], prompts=list("aaabbc"))
    assert weights == [1 / 8, 1 / 8, 1 / 8, 1 / 4, 0, 0]
    assert sample_weights(Aggregation.PROMPT_MEAN, [1, 3]) == sample_weights(Aggregation.SEQUENCE, [1, 3])


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=10))
def test_token_and_sequence_weights_make_means(counts):
    """The loss of all-ones is 1 under a mean: Σ_i w_i |o_i| = 1."""
    for aggregation in (Aggregation.TOKEN, Aggregation.SEQUENCE, Aggregation.PROMPT_MEAN):
        weights = sample_weights(aggregation, counts, prompts=[i // 2 for i in range(len(counts))])
        assert sum(w * c for w, c in zip(weights, counts, strict=True)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(4, 0, 1, 0), (4, 4, 2, 1), (4, 1, 1, 1 / 4), (4, 2, 2, 1 - 1 / 6), (5, 3, 3, 1)],
)
def test_pass_at_k_by_hand(n, correct, k, expected):
    """n=4, c=2, k=2: of the 6 pairs one has no right sample. n=5, c=3, k=3: only 2 wrong ones, so none of 3."""
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(n, correct, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, correct, k)
