"""From rewards, KL costs and values to advantages, by hand."""

import pytest
import torch

from openrlhf.algorithms.advantages import get_estimator
from openrlhf.learners.credit import CreditSettings, give_credit
from openrlhf.types import SampleKey, Segment, TrainingBatch, TrainingSample


def sample(rewards: list[float], *, key=(0, 0, 0), compared=None, gaps: bool = False) -> TrainingSample:
    """One action token per reward, after a prompt token; with `gaps` an observation token before every action."""
    mask = [False]
    for _ in rewards:
        mask += [False, True] if gaps else [True]
    T = len(mask)
    segment = Segment(
        token_ids=torch.zeros(T, dtype=torch.int64),
        action_mask=torch.tensor(mask),
        rollout_logprobs=None,
        versions=torch.zeros(T, dtype=torch.int32),
        turn_rewards=torch.zeros(T),
    )
    compared_A = None if compared is None else torch.tensor(compared)
    return TrainingSample(key=SampleKey(*key), segment=segment, rewards_A=torch.tensor(rewards), compared_A=compared_A)


def credit(samples, name, *, costs=None, values=None, **settings):
    batch = TrainingBatch(samples=samples)
    batch.values_A = None if values is None else torch.tensor(values)
    costs_A = None if costs is None else torch.tensor(costs)
    return give_credit(batch, CreditSettings(estimator=get_estimator(name), **settings), costs_A=costs_A)


def test_turn_rewards_count_for_their_own_and_earlier_tokens():
    """reinforce: turn rewards 1 (second token) and 2 (fourth) give 3, 3, 2, 2. Observations between change nothing."""
    for gaps in (False, True):
        result = credit([sample([0, 1.0, 0, 2.0], gaps=gaps)], "reinforce")
        assert result.advantages_A.tolist() == [3, 3, 2, 2]
        assert result.totals_E.tolist() == [3]
        assert result.returns_A is None


def test_what_was_compared_is_the_advantage():
    result = credit([sample([0, 1.0, 2.0], compared=[0.5, 0.5, -1.0], gaps=True)], "group_norm")
    assert result.advantages_A.tolist() == [0.5, 0.5, -1]
    assert result.totals_E.tolist() == [0.5]
    with pytest.raises(ValueError, match="was not compared"):
        credit([sample([1.0])], "group_norm")


def test_kl_costs_are_summed_backwards_and_not_scaled():
    """What came of the comparison is 2 on both tokens. Costs 0.1, 0.3: 2 − 0.4 and 2 − 0.3."""
    result = credit([sample([0, 1.0], compared=[2.0, 2.0])], "group_norm", costs=[0.1, 0.3])
    assert result.advantages_A.tolist() == pytest.approx([1.6, 1.7])
    assert result.totals_E.tolist() == pytest.approx([1.6])


@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_an_episode_s_total_is_never_discounted(name):
    """Rewards 0, 1, 4 and costs of 0.5 each, γ = ½: 5 − 1.5 under every estimator. Discounted it would be 0.625."""
    result = credit([sample([0, 1.0, 4.0])], name, costs=[0.5] * 3, values=[0.0] * 3, gamma=0.5)
    assert result.totals_E.tolist() == [3.5]


def test_discount_applies_to_rewards_and_costs():
    """reinforce, γ = ½, reward 4 on the last of three: 1, 2, 4. Costs (0, 0, 2): ½, 1, 2."""
    result = credit([sample([0, 0, 4.0])], "reinforce", costs=[0.0, 0.0, 2.0], gamma=0.5)
    assert result.advantages_A.tolist() == [0.5, 1, 2]


def test_gae_takes_costs_as_rewards_and_gives_returns():
    """r − k = (−1, 3), V = (1, 2), γ = 1, λ = ½: δ = (−1 + 2 − 1, 3 − 2) = (0, 1), A = (½, 1), returns = A + V."""
    result = credit([sample([0, 4.0])], "gae", costs=[1.0, 1.0], values=[1.0, 2.0], lambd=0.5)
    assert result.advantages_A.tolist() == [0.5, 1]
    assert result.returns_A.tolist() == [1.5, 3]
    assert result.totals_E.tolist() == [2]


def test_segments_of_an_episode_are_one_stream_of_credit():
    """Two segments earning 1 and 2, another episode earning 5: the first segment's token stands to gain 3."""
    samples = [
        sample([0, 1.0], key=(0, 0, 0)),
        sample([2.0], key=(0, 0, 1)),
        sample([5.0], key=(0, 1, 0)),
    ]
    assert credit(samples, "reinforce").advantages_A.tolist() == [3, 3, 2, 5]
    values = [1.0, 1.0, 1.0, 1.0]
    # δ = (0 + 1 − 1, 1 + 1 − 1, 2 − 1 | 5 − 1); λ = 1: suffix sums within the episode.
    assert credit(samples, "gae", values=values).advantages_A.tolist() == [2, 2, 1, 4]


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="critic's values"):
        credit([sample([1.0])], "gae")


@pytest.mark.parametrize("name", ["gae", "rloo"])
def test_an_empty_round_gives_empty_columns(name):
    result = credit([], name)
    assert len(result.advantages_A) == len(result.totals_E) == 0
