"""Every number here is derived by hand in its docstring."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.advantages import (
    ESTIMATORS,
    Moments,
    TurnRewards,
    Turns,
    discounted_returns,
    gae,
    get_estimator,
    overlong_penalty,
    part_advantages,
    stop_properly,
    turn_advantages,
    whiten,
)

COMPARING = [name for name, estimator in ESTIMATORS.items() if estimator.needs_group]
GROUP_ESTIMATORS = [name for name in COMPARING if not ESTIMATORS[name].outcome_only]


def credit(name: str, turns: Turns, *episodes: list[float]) -> list[list[float]]:
    """The advantage of each turn; rewards are float32, as they come."""
    earned = [torch.tensor(rewards, dtype=torch.float32).double() for rewards in episodes]
    result = turn_advantages([TurnRewards(r, r.abs()) for r in earned], get_estimator(name).shape, turns)
    return [advantages_K.tolist() for advantages_K in result]


def shaped(name: str, totals: list[float]) -> list[float]:
    """The advantages of episodes of one turn, which are the same by outcome, to go and by step."""
    first, *others = ([a for (a,) in credit(name, turns, *([total] for total in totals))] for turns in Turns)
    assert all(other == pytest.approx(first, abs=1e-12) for other in others)
    return first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Totals 1, 0, 0, 3: mean 1; the others' means are 1, 4/3, 4/3, 1/3; unbiased variance (0+1+1+4)/3 = 2.
        ("reinforce_baseline", [0.0, -1.0, -1.0, 2.0]),
        ("dr_grpo", [0.0, -1.0, -1.0, 2.0]),
        ("rloo", [0.0, -4 / 3, -4 / 3, 8 / 3]),
        ("group_norm", [0.0, -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)]),
    ],
)
def test_group_shaping_by_hand(name, expected):
    assert shaped(name, [1.0, 0.0, 0.0, 3.0]) == pytest.approx(expected, abs=1e-6)


def test_several_rewards_are_compared_each_by_itself():
    """Three samples: of the first reward 1, 0, 2, mean 1 and variance 1; of the second, which counts −½, 5, 5, 5: none;
    of the third 0, 0, 3: mean 1, unbiased variance 3. A = z₁ − ½ · 0 + 2 z₃."""
    values = torch.tensor([[1.0, 5.0, 0.0], [0.0, 5.0, 0.0], [2.0, 5.0, 3.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64).expand(3, 3)
    found = part_advantages(values, weights, ESTIMATORS["gdpo"].shape)
    root = math.sqrt(3)
    assert found.tolist() == pytest.approx([-2 / root, -1 - 2 / root, 1 + 4 / root], abs=1e-6)
    with pytest.raises(ValueError, match="two or more"):
        part_advantages(values[:1], weights[:1], ESTIMATORS["gdpo"].shape)


def test_estimators_say_what_they_need():
    assert [name for name, e in ESTIMATORS.items() if e.needs_critic] == ["gae"]
    assert [name for name, e in ESTIMATORS.items() if e.greedy_baseline] == ["remax"]
    assert [name for name, e in ESTIMATORS.items() if e.whiten] == ["gae", "reinforce", "reinforce_baseline", "gdpo"]
    assert GROUP_ESTIMATORS == ["rloo", "reinforce_baseline", "group_norm", "dr_grpo", "maxrl"]
    assert set(COMPARING) - set(GROUP_ESTIMATORS) == {"pass_at_k", "gdpo"}


def outcome(name: str, totals: list[float], **settings: int) -> list[float]:
    """The advantages of episodes by their totals."""
    values = torch.tensor(totals, dtype=torch.float32).double()
    estimator = get_estimator(name)
    shape = estimator.with_k(settings["k"]).shape if settings else estimator.shape
    result = turn_advantages([TurnRewards(v[None], v[None].abs()) for v in values], shape, Turns.OUTCOME)
    return [advantages_K.item() for advantages_K in result]


def test_maxrl_divides_by_the_mean():
    """1, 0, 0, 0: mean ¼, so (1 − ¼)/¼ = 3, and −1 for the others; 1, 1, 1, 0: mean ¾, so ⅓, and −1. Where nobody
    earned anything, or the mean is negative, nobody has an advantage."""
    assert outcome("maxrl", [1.0, 0.0, 0.0, 0.0]) == pytest.approx([3, -1, -1, -1])
    assert outcome("maxrl", [1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert outcome("maxrl", [0.0, 0.0]) == [0.0, 0.0]
    assert outcome("maxrl", [-1.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize("rewards", list(itertools.permutations([0.3, -0.1, -0.2])))
def test_maxrl_takes_a_mean_of_rounding_for_none(rewards):
    """0.3 − 0.1 − 0.2 of float32 numbers is 4e-9 or so: divided by a mean of that, rewards would be 1e8. A right answer
    among many thousands counts all the same."""
    assert outcome("maxrl", list(rewards)) == [0.0, 0.0, 0.0]
    for turns in Turns:
        episodes = [TurnRewards(torch.tensor([r]).double(), torch.tensor([abs(r)]).double()) for r in rewards]
        found = turn_advantages(episodes, get_estimator("maxrl").shape, turns)
        assert [advantages_K.item() for advantages_K in found] == [0.0, 0.0, 0.0]
    assert outcome("maxrl", [1.0, *[0.0] * 9999])[0] == pytest.approx(9999)


def test_pass_at_k_by_hand():
    """1, 0, 0, 0 in pairs: 3 of 6 pairs have the 1, so b = ½ and s = ½. The right one is in pairs worth 1: (1 − ½)/½ =
    1. A wrong one is in 3 pairs, one of them with the right one: (⅓ − ½)/½ = −⅓.

    In triples all but one have it: b = ¾, s = √(3/16); right (1/4)/s = 1/√3; a wrong one is in 3 triples, 2 with the
    right one: (⅔ − ¾)/s = −1/(3√3). Three of 0, 1, 3 in pairs: worth 1, 3, 3: b = 7/3, s² = (16 + 4 + 4)/27 = 8/9;
    means (1 + 3)/2, (1 + 3)/2 and 3: −⅓, −⅓ and ⅔ over √8/3.
    """
    assert outcome("pass_at_k", [0.0, 1.0, 0.0, 0.0], k=2) == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3])
    third = 1 / (3 * math.sqrt(3))
    assert outcome("pass_at_k", [1.0, 0.0, 0.0, 0.0], k=3) == pytest.approx([3 * third, -third, -third, -third])
    root = math.sqrt(8)
    assert outcome("pass_at_k", [3.0, 0.0, 1.0], k=2) == pytest.approx([2 / root, -1 / root, -1 / root])


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 8), st.integers(1, 7), st.integers(1, 7))
def test_pass_at_k_of_right_and_wrong_is_the_paper_s_formula(n, right, k):
    """Equations of arXiv:2508.10751: R̄ = 1 − C(N⁻, k)/C(N, k), σ = √(R̄ (1 − R̄)), A⁺ = (1 − R̄)/σ, A⁻ = (1 − R̄ −
    C(N⁻−1, k−1)/C(N−1, k−1))/σ. Where all subsets are worth the same, and where there is only one, everyone has 0."""
    wrong = n - right
    found = outcome("pass_at_k", [1.0] * right + [0.0] * max(wrong, 0), k=k) if wrong > 0 else None
    if found is None:
        return
    mean = 1 - math.comb(wrong, k) / math.comb(n, k) if k <= n else 1.0
    spread = math.sqrt(mean * (1 - mean))
    if k >= n or not spread:
        assert found == pytest.approx([0.0] * n, abs=1e-12)
        return
    lost = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    expected = [(1 - mean) / spread] * right + [(1 - mean - lost) / spread] * wrong
    assert found == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-5, 5), min_size=3, max_size=7), st.integers(1, 6))
def test_pass_at_k_is_the_mean_over_all_subsets(totals, k):
    """Of rewards of any kind, ties included: every subset by itself."""
    found = outcome("pass_at_k", [float(t) for t in totals], k=k)
    subsets = list(itertools.combinations(range(len(totals)), k))
    if len(subsets) < 2 or len(set(totals)) == 1:
        assert found == [0.0] * len(totals)
        return
    worth = [max(totals[i] for i in subset) for subset in subsets]
    mean, spread = statistics.fmean(worth), statistics.pstdev(worth) or 1.0
    for i, advantage in enumerate(found):
        own = [w for w, subset in zip(worth, subsets, strict=True) if i in subset]
        assert advantage == pytest.approx((statistics.fmean(own) - mean) / spread, abs=1e-9)


@pytest.mark.parametrize("name", COMPARING)
@settings(deadline=None, max_examples=50)
@given(st.floats(-10, 10, width=32), st.integers(2, 64))
def test_a_group_that_agrees_gives_no_advantage(name, reward, size):
    """Exactly none: the float32 mean of 64 times −0.9 is off by one bit, which over a spread as small would be a
    z-score of 1."""
    found = outcome if ESTIMATORS[name].outcome_only else shaped
    assert found(name, [reward] * size) == [0.0] * size


@pytest.mark.parametrize("name", COMPARING)
def test_a_single_sample_has_nothing_to_be_compared_with(name):
    with pytest.raises(ValueError, match="two or more"):
        outcome(name, [1.0])


# A group of three: 1 then 2; 2 and no second turn; 0, then 1, then 3. Totals 3, 2, 4; from turn 2 on 2, 0, 4; from turn
# 3 on 0, 0, 3; six steps with sum 9.
THREE = ([1.0, 2.0], [2.0], [0.0, 1.0, 3.0])


@pytest.mark.parametrize(
    ("name", "turns", "expected"),
    [
        # Totals less 3; by the others' means 3, 3.5, 2.5.
        ("dr_grpo", "outcome", [[0, 0], [-1], [1, 1, 1]]),
        ("rloo", "outcome", [[0, 0], [-1.5], [1.5, 1.5, 1.5]]),
        # The deviation of 3, 2, 4 is 1.
        ("group_norm", "outcome", [[0, 0], [-1], [1, 1, 1]]),
        # Means 3, 2, 1. The deviations are 1; of 2, 0, 4: 2; of 0, 0, 3: √3.
        ("dr_grpo", "to_go", [[0, 0], [-1], [1, 2, 2]]),
        ("rloo", "to_go", [[0, 0], [-1.5], [1.5, 3, 3]]),
        ("group_norm", "to_go", [[0, 0], [-1], [1, 1, 2 / math.sqrt(3)]]),
        # Mean 9/6 = 3/2: steps −½, ½ | ½ | −3/2, −½, 3/2, summed from behind.
        ("dr_grpo", "step", [[0, 0.5], [0.5], [-0.5, 1, 1.5]]),
        # The others' means: (2 + 4)/4 = 3/2, (3 + 4)/5 = 7/5, (3 + 2)/3 = 5/3.
        ("rloo", "step", [[0, 0.5], [0.6], [4 - 5, 4 - 10 / 3, 3 - 5 / 3]]),
        # Squares ¼·4 + 9/4·2 = 5.5, over 5: variance 1.1.
        ("group_norm", "step", [[x / math.sqrt(1.1) for x in row] for row in ([0, 0.5], [0.5], [-0.5, 1, 1.5])]),
    ],
)
def test_credit_per_turn_by_hand(name, turns, expected):
    found = credit(name, Turns(turns), *THREE)
    assert [len(row) for row in found] == [2, 1, 3]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("turns", Turns)
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_episodes_that_are_all_alike_teach_nothing_at_any_turn(name, turns):
    """0.5, then 0.5, of everyone. Less the mean of the totals, the second turn's 0.5 would be −0.5. And 0, then 1: by
    step, 1 would be above the mean of both turns."""
    assert credit(name, turns, [0.5, 0.5], [0.5, 0.5]) == [[0.0, 0.0], [0.0, 0.0]]
    assert credit(name, turns, [0.0, 1.0], [0.0, 1.0]) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_to_go_credit_has_no_reward_of_earlier_turns(name):
    """To go: two episodes that differ in their first turn only are alike in the second. By outcome they are not."""
    first, second = credit(name, Turns.TO_GO, [1.0, 0.5], [0.0, 0.5])
    assert (first[1], second[1]) == (0.0, 0.0)
    assert first[0] == pytest.approx(-second[0])
    assert first[0] > 0
    assert credit(name, Turns.OUTCOME, [1.0, 0.5], [0.0, 0.5])[0][1] > 0


portions = st.lists(st.integers(-2000, 2000), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(st.lists(portions, min_size=2, max_size=8), st.integers(-3000, 3000), st.sampled_from([10, 100, 1000, 7]))
def test_equal_totals_in_whatever_portions_teach_nothing_by_outcome(episodes, total, unit):
    """Rewards in tenths, hundredths, … that add up to the same decimal number, each rounded to float32."""
    rewards = [[part / unit for part in (*parts, total - sum(parts))] for parts in episodes]
    for name in GROUP_ESTIMATORS:
        assert credit(name, Turns.OUTCOME, *rewards) == [[0.0] * len(row) for row in rewards]


@pytest.mark.parametrize("turns", [Turns.TO_GO, Turns.STEP])
@settings(deadline=None, max_examples=50)
@given(portions, st.integers(2, 8), st.sampled_from([10, 100, 1000, 7]), st.randoms(use_true_random=False))
def test_equal_turns_teach_nothing_to_go_and_by_step(turns, parts, size, unit, random):
    """Everyone earns the same in each turn, up to one in float32's last place."""
    rewards = [[part / unit * (1 + random.choice([-1, 0, 1]) * 2**-24) for part in parts] for _ in range(size)]
    for name in GROUP_ESTIMATORS:
        assert credit(name, turns, *rewards) == [[0.0] * len(parts)] * size


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_in_every_turn_teach_nothing_by_step(name):
    """One turn of 0.3 beside two and three: every step is the mean of all. To go they differ."""
    assert credit(name, Turns.STEP, [0.3], [0.3, 0.3], [0.3] * 3) == [[0.0], [0.0] * 2, [0.0] * 3]
    assert credit(name, Turns.TO_GO, [0.3], [0.3, 0.3], [0.3] * 3)[2][0] > 0.1


@pytest.mark.parametrize("turns", Turns)
@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6), st.floats(1e-4, 1), st.integers(2, 8))
def test_rewards_that_differ_are_not_taken_for_rounding(turns, row, difference, size):
    """One of the group earns 1e-4 or more beyond the others in its last turn, where all that was added up to 7 at most
    may be off by 3.3e-6. By outcome its z-score is √n − 1/√n, however little it is; by no kind is it 0."""
    rewards = [row] * (size - 1) + [[*row[:-1], row[-1] + difference]]
    found = credit("group_norm", turns, *rewards)
    assert any(found[-1])
    if turns is Turns.OUTCOME:
        assert found[-1][0] == pytest.approx(math.sqrt(size) - 1 / math.sqrt(size), rel=1e-3)


def test_how_much_may_be_rounding_is_judged_by_what_was_added():
    """100.3 − 100 is 3e-6 more than 0.3 in float32: nothing beside 200.3, which were added; but not nothing beside 0.3."""
    values = [torch.tensor([100.3]).double() - 100.0, torch.tensor([0.3]).double()]
    shape = get_estimator("group_norm").shape
    added = [TurnRewards(values[0], torch.tensor([200.3])), TurnRewards(values[1], values[1])]
    assert [a.tolist() for a in turn_advantages(added, shape, Turns.OUTCOME)] == [[0.0], [0.0]]
    single = [TurnRewards(value, value) for value in values]
    assert turn_advantages(single, shape, Turns.OUTCOME)[0].item() == pytest.approx(math.sqrt(0.5), rel=1e-3)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_shaping(name, totals, random):
    order = list(range(len(totals)))
    random.shuffle(order)
    whole = shaped(name, [float(t) for t in totals])
    assert shaped(name, [float(totals[i]) for i in order]) == pytest.approx([whole[i] for i in order], abs=1e-5)


def test_an_unknown_estimator_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match="known: gae, reinforce, remax, rloo, reinforce_baseline, group_norm, dr_grpo, maxrl"
    ):
        get_estimator("gea")


def test_returns_discount_over_action_tokens():
    """r = 0, 1, 0, 2 and γ = 1/2: R_3 = 2, R_2 = 1, R_1 = 1 + 1/2, R_0 = 3/4. With γ = 1 plain suffix sums."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert discounted_returns(rewards, [0, 4], gamma=0.5).tolist() == [0.75, 1.5, 1.0, 2.0]
    assert discounted_returns(rewards, [0, 4]).tolist() == [3.0, 3.0, 2.0, 2.0]


def test_returns_of_a_batch_by_hand():
    """Two samples, γ = 1/2. (1, 2): R_1 = 2, R_0 = 1 + 2/2 = 2. (0, 0, 8): 2, 4, 8."""
    rewards = torch.tensor([1.0, 2.0, 0.0, 0.0, 8.0])
    returns = discounted_returns(rewards, [0, 2, 5], gamma=0.5)
    assert returns.tolist() == [2, 2, 2, 4, 8]


def test_gae_by_hand():
    """r = 0, 1, 2; V = 1, 2, 4; γ = 1/2, λ = 1/2, so γλ = 1/4; behind the end V = A = 0.

    δ_2 = 2 + 0 − 4 = −2          A_2 = −2
    δ_1 = 1 + 4/2 − 2 = 1         A_1 = 1 − 2/4 = 1/2
    δ_0 = 0 + 2/2 − 1 = 0         A_0 = 0 + 1/8 = 1/8
    returns A + V = 9/8, 5/2, 2
    """
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    result = gae(rewards, values, [0, 3], gamma=0.5, lambd=0.5)
    assert result.advantages_A.tolist() == [0.125, 0.5, -2]
    assert result.returns_A.tolist() == [1.125, 2.5, 2]


def test_the_ends_of_lambda():
    """λ = 0: A = δ, what one step told. λ = 1: A = R − V, with the discounted returns (γ = 1/2) 1, 2, 2."""
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    assert gae(rewards, values, [0, 3], gamma=0.5, lambd=0.0).advantages_A.tolist() == [0, 1, -2]
    ended = gae(rewards, values, [0, 3], gamma=0.5, lambd=1.0)
    assert ended.advantages_A.tolist() == [0, 0, -2]
    assert ended.returns_A.tolist() == discounted_returns(rewards, [0, 3], gamma=0.5).tolist() == [1, 2, 2]


TOKENS = st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=7), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.randoms(use_true_random=False),
)
def test_gae_of_a_batch_is_the_definition_of_each_sample_in_any_order(samples, gamma, lambd, random):
    random.shuffle(samples)
    expected = []
    for sample in samples:
        next_value = next_advantage = 0.0
        backwards = []
        for reward, value in reversed(sample):
            next_advantage = reward + gamma * next_value - value + gamma * lambd * next_advantage
            next_value = value
            backwards.append(next_advantage)
        expected += backwards[::-1]
    offsets = [sum(len(s) for s in samples[:i]) for i in range(len(samples) + 1)]
    rewards, values = torch.tensor([token for sample in samples for token in sample]).T
    result = gae(rewards, values, offsets, gamma=gamma, lambd=lambd)
    assert result.advantages_A.tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(result.returns_A, result.advantages_A + values)


def test_whitening_by_hand():
    """1, 3, 5, 7: mean 4, population variance (9+1+1+9)/4 = 5."""
    values = torch.tensor([1.0, 3.0, 5.0, 7.0])
    expected = [(v - 4) / math.sqrt(5) for v in (1, 3, 5, 7)]
    assert whiten(values, Moments.of(values)).tolist() == pytest.approx(expected)
    assert whiten(values, Moments.of(values), divide_by_std=False).tolist() == [-3, -1, 1, 3]


def test_whitening_equal_values_gives_zeros_not_infinities():
    values = torch.full((4,), 0.3)
    assert whiten(values, Moments.of(values)).tolist() == [0.0] * 4
    assert whiten(values[:1], Moments.of(values[:1])).tolist() == [0.0]


def test_whitening_takes_the_last_bit_of_float32_for_rounding():
    """0.9 and the float32 above it. With the variance held at 1e-8 they would be ±3e-4; 0.9 and 0.9001 are no such
    neighbours: ±5e-5 over that."""
    equal = torch.tensor([0.9, 0.9 + 2**-24 + 2**-26])
    assert equal[0] != equal[1]
    assert whiten(equal, Moments.of(equal)).tolist() == [0.0, 0.0]
    other = torch.tensor([0.9, 0.9001])
    assert whiten(other, Moments.of(other)).tolist() == pytest.approx([-0.5, 0.5], rel=1e-2)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20), st.integers(1, 19))
def test_moments_of_parts_add_up_to_moments_of_the_whole(numbers, cut):
    values = torch.tensor(numbers)
    left, right = Moments.of(values[:cut]), Moments.of(values[cut:])
    both = Moments(*(a + b for a, b in zip(left, right, strict=True)))
    assert both.mean == pytest.approx(Moments.of(values).mean, abs=1e-9)
    assert both.variance == pytest.approx(Moments.of(values).variance, abs=1e-7)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (80, 0), (81, -0.1), (90, -1), (99, -1.9), (100, -2), (101, -2), (500, -2)],
)
def test_overlong_penalty_by_hand(length, expected):
    """Limit 100, buffer 20, factor 2: nothing up to 80 tokens, then 2/20 per token, −2 from the limit on."""
    assert overlong_penalty(length, limit=100, buffer=20, factor=2.0) == pytest.approx(expected)


def test_a_buffer_as_long_as_the_limit_charges_from_the_first_token():
    assert overlong_penalty(1, limit=10, buffer=10, factor=1.0) == pytest.approx(-0.1)


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match="above 0 and at most 10"):
        overlong_penalty(5, limit=10, buffer=buffer, factor=1.0)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [
        (1.0, [1, 0.5, 2]),  # keeps all
        (0.5, [0.5, 0.25, 1]),
        (0.0, [0, 0, 0]),
        (-0.5, [0, 0, -0.5]),  # the total becomes the coefficient
        (-3.0, [0, 0, -3]),
    ],
)
def test_stop_properly_penalty_of_a_truncated_episode(coef, expected):
    rewards = torch.tensor([1.0, 0.5, 2.0])
    assert stop_properly(rewards, coef=coef).tolist() == expected
    assert rewards.tolist() == [1, 0.5, 2]


def test_a_bonus_for_truncation_is_refused():
    with pytest.raises(ValueError, match="<= 1"):
        stop_properly(torch.tensor([1.0]), coef=1.5)


def test_the_order_of_penalties_matters_and_is_the_documented_one():
    """Rewards 1, 2, the second turn overlong: −1; stop-properly 0.5; clip [−1, 0.75]: (1, 2) → (1, 1) → (0.5, 0.5) →
    unchanged. Stop-properly first would give (0.5, 0), the clip first (0.375, −0.125)."""
    penalties = [overlong_penalty(length, limit=10, buffer=5, factor=1.0) for length in (3, 10)]
    charged = torch.tensor([1.0, 2.0]) + torch.tensor(penalties)
    assert stop_properly(charged, coef=0.5).clamp(-1, 0.75).tolist() == [0.5, 0.5]
