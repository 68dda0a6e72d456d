"""The stage "advantages", step by step: rewards of episodes, comparison of a group, credit of tokens."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.recording_engine import EngineCall, segments_from_calls
from openrlhf.algorithms.advantages import Turns, get_estimator
from openrlhf.learners.advantages import (
    AdvantageSettings,
    RewardShaping,
    SampleMaker,
    give_credit,
    may_get_advantages,
    training_samples,
)
from openrlhf.types import (
    FinishReason,
    Fork,
    Generation,
    Group,
    Outcome,
    Prompt,
    RewardPart,
    SampleKey,
    Segment,
    TrainingBatch,
    TrainingSample,
    Trajectory,
)

WIDE = (-10.0, 10.0)


def turns(*rewards: float) -> TokenRecorder:
    """An episode with one two-token action per reward."""
    recorder = TokenRecorder([1])
    for reward in rewards:
        recorder.append_action(
            Generation(token_ids=[2, 3], logprobs=[0.0, 0.0], versions=[0, 0], finish_reason=FinishReason.STOP)
        )
        recorder.reward_turn(reward)
        recorder.append_observation([4])
    return recorder


def group(*episodes: tuple[float, ...], failed: int = 0) -> Group:
    members = [
        Trajectory(
            key=SampleKey(0, i), segments=(turns(*rewards).segment(),), outcome=Outcome.FINISHED, reward=sum(rewards)
        )
        for i, rewards in enumerate(episodes)
    ]
    broken = [
        Trajectory(key=SampleKey(0, len(episodes) + i), segments=(), outcome=Outcome.FAILED, error="boom")
        for i in range(failed)
    ]
    return Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(*members, *broken))


def shape(groups: list[Group], name: str = "reinforce_baseline", clip_range=WIDE, turns=Turns.OUTCOME, **shaping):
    settings = AdvantageSettings(
        estimator=get_estimator(name), shaping=RewardShaping(clip_range=clip_range, **shaping), turns=turns
    )
    return training_samples(groups, settings)


def compared(result) -> list[list[float]]:
    return [sample.compared_A.tolist() for sample in result.samples]


def test_failed_members_are_in_no_statistic():
    """Rewards 1 and 3 and a failure: the mean is 2, not 4/3."""
    result = shape([group((1.0,), (3.0,), failed=1)])
    assert compared(result) == [[-1, -1], [1, 1]]


def test_a_member_left_alone_gives_no_sample_where_members_are_compared():
    result = shape([group((1.0,), failed=1), group((1.0,), (0.0,))])
    assert len(result.samples) == 2
    assert result.metrics.values()["rollout/left_alone"] == 1
    assert len(shape([group((1.0,), failed=1)], "reinforce").samples) == 1


def test_raw_rewards_are_clipped_per_turn_before_the_baseline():
    """Turns 20 and −1 under a clip of ±10 are 10 and −1: total 9; the other's total is 1: mean 5."""
    result = shape([group((20.0, -1.0), (1.0,))])
    assert compared(result) == [[4] * 4, [-4] * 2]
    assert result.samples[0].rewards_A.tolist() == [0, 10, 0, -1]
    assert (result.clipped_rewards, result.rewards) == (1, 3)


def truncated(*rewards: float) -> Group:
    """Two episodes of two turns (four action tokens); the first was cut by a limit."""
    whole = group(rewards, rewards)
    cut = dataclasses.replace(whole.trajectories[0], outcome=Outcome.TRUNCATED)
    return dataclasses.replace(whole, trajectories=(cut, whole.trajectories[1]))


def test_an_overlong_turn_is_charged_and_its_penalty_is_in_the_reward():
    """A turn of 2 tokens, limit 3, buffer 2: over = 2 − 1 = 1, penalty −½·factor 3 = −1.5."""
    result = shape([group((1.0,), (1.0,))], overlong_buffer=2, overlong_factor=3.0, response_limit=3)
    assert result.samples[0].rewards_A.tolist() == [0, -0.5]
    values = result.metrics.values()
    assert values["overlong_penalty"] == -1.5
    assert values["reward"] == -0.5


def test_the_limit_is_that_of_one_turn():
    """Turns of 4, 2 and 3 tokens under a limit of 4 with a buffer of 1: only the first is overlong, by all of the
    buffer, and pays −1 itself; the 9 tokens of all turns are beyond the limit and no matter. An episode without an
    action has no turn that could be overlong."""
    recorder = TokenRecorder([1])
    for length, reward in ((4, 0.5), (2, 0.25), (3, 1.0)):
        ids = list(range(2, 2 + length))
        recorder.append_action(
            Generation(token_ids=ids, logprobs=None, versions=[0] * length, finish_reason=FinishReason.STOP)
        )
        recorder.reward_turn(reward)
        recorder.append_observation([9])
    long = Trajectory(key=SampleKey(0, 0), segments=(recorder.segment(),), outcome=Outcome.FINISHED, reward=1.75)
    silent = Trajectory(
        key=SampleKey(0, 1), segments=(TokenRecorder([1]).segment(),), outcome=Outcome.FINISHED, reward=0.0
    )
    both = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(long, silent))
    result = shape([both], overlong_buffer=1, response_limit=4)
    assert result.samples[0].rewards_A.tolist() == [0, 0, 0, -0.5, 0, 0.25, 0, 0, 1]
    assert result.metrics.values()["overlong_penalty"] == -0.5  # of two episodes


def test_truncated_episodes_keep_what_the_coefficient_leaves_them():
    """½ of turns 1 and 2; −3 in their place. The one that ended properly keeps all. What is left is compared."""
    half = shape([truncated(1.0, 2.0)], stop_properly=0.5)
    assert [s.rewards_A.tolist() for s in half.samples] == [[0, 0.5, 0, 1], [0, 1, 0, 2]]
    assert compared(half) == [[-0.75] * 4, [0.75] * 4]
    assert half.metrics.values()["reward"] == 2.25
    replaced = shape([truncated(1.0, 2.0)], stop_properly=-3.0)
    assert [s.rewards_A.tolist() for s in replaced.samples] == [[0, 0, 0, -3], [0, 1, 0, 2]]


def test_penalties_come_before_the_clip_and_overlong_before_stop_properly():
    """Reward 1 − 4 (overlong, at the limit) = −3, halved −1.5, clipped to −1. In another order it would be −0.5 or −1.5."""
    cut = truncated(1.0).trajectories[0]
    one = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(cut,))
    result = shape(
        [one],
        "reinforce",
        clip_range=(-1.0, 1.0),
        overlong_buffer=1,
        overlong_factor=4.0,
        response_limit=2,
        stop_properly=0.5,
    )
    assert result.samples[0].rewards_A.tolist() == [0, -1]
    assert result.metrics.values()["reward"] == -1.5
    assert result.metrics.values()["reward_clipped"] == 1.0


@pytest.mark.parametrize("name", ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
@pytest.mark.parametrize(
    "episodes",
    [
        [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1)],
        [(0.3, 0.3, 0.3), (0.9,)],
        [(0.1,) * 10, (1.0,), (0.7, 0.3), (5.3, -4.3)],
    ],
)
def test_equal_totals_in_other_portions_are_equal(name, episodes):
    """As float32 numbers they are not: a z-score would make ±0.7 and more of the last bit, and 1e7 of a spread that is
    no more than that where the total and the mean are rounded differently."""
    result = shape([group(*episodes)], name)
    assert compared(result) == [[0.0] * 2 * len(turns) for turns in episodes]


def test_a_penalty_that_undoes_a_reward_leaves_nothing():
    """0.9 less the penalty 0.9 · 1 is −2e-8, as 0.9 is rounded to float32; the other earned nothing and paid nothing."""
    long, short = group((0.9, 0.0), (0.0, 0.0)).trajectories
    three = TokenRecorder([1])
    three.append_action(
        Generation(token_ids=[2, 3, 4], logprobs=None, versions=[0] * 3, finish_reason=FinishReason.STOP)
    )
    three.reward_turn(0.9)
    long = dataclasses.replace(long, segments=(three.segment(),))
    both = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(long, short))
    result = shape([both], "group_norm", overlong_buffer=1, overlong_factor=0.9, response_limit=3)
    assert compared(result) == [[0.0] * 3, [0.0] * 4]


def test_sources_that_add_up_to_the_same_are_equal():
    """Two reward models gave 100.3 and −100, in float32, or 0.3 and nothing: what may be rounding goes by what was
    added, and is 3e-6 here."""
    first, second = group((0.0,), (0.0,)).trajectories
    first = first.with_reward(float(np.float32(100.3)) - 100.0, score=None, extra_logs={}, size=200.3)
    second = second.with_reward(float(np.float32(0.3)), score=None, extra_logs={}, size=0.3)
    both = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(first, second))
    assert compared(shape([both], "group_norm")) == [[0.0, 0.0], [0.0, 0.0]]
    assert shape([both], "group_norm", clip_range=(-1.0, 0.3)).clipped_rewards == 1  # 0.3 itself is not
    other = dataclasses.replace(both, trajectories=(first, second.with_reward(0.2, score=None, extra_logs={})))
    assert compared(shape([other], "group_norm"))[0] == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("outcome", [[0.5] * 4, [-0.5] * 2]),  # totals 3 and 2
        ("to_go", [[0.5, 0.5, 1, 1], [-0.5] * 2]),  # from the second turn on 2 and 0
        ("step", [[-1 / 3, -1 / 3, 1 / 3, 1 / 3], [1 / 3] * 2]),  # 1, 2, 2 less 5/3
    ],
)
def test_every_token_of_a_turn_has_its_turn_s_credit(turns, expected):
    result = shape([group((1.0, 2.0), (2.0,))], "dr_grpo", turns=Turns(turns))
    for found, wanted in zip(compared(result), expected, strict=True):
        assert found == pytest.approx(wanted)
    assert result.samples[0].compared_A.dtype == torch.float32


def test_turns_without_an_observation_between_them_are_turns():
    """Two actions of two tokens side by side, of which only the second earned something, beside a single one: from the
    second turn on 1 and 0. By the mask alone it would be one turn."""
    recorder = TokenRecorder([1])
    for _ in range(2):
        recorder.append_action(
            Generation(token_ids=[2, 3], logprobs=None, versions=[0, 0], finish_reason=FinishReason.STOP)
        )
    recorder.reward_turn(1.0)
    two, one = group((1.0,), (3.0,)).trajectories
    two = dataclasses.replace(two, segments=(recorder.segment(),))
    result = shape([Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(two, one))], "rloo", turns=Turns.TO_GO)
    assert compared(result) == [[-2, -2, 1, 1], [2, 2]]


def test_turns_go_on_over_the_segments_of_an_episode():
    """Turns that earn 1 and 2 in a segment each, beside turns 1 and 1 in one: from the second turn on 2 and 1."""
    cut, whole = group((1.0,), (1.0, 1.0)).trajectories
    cut = dataclasses.replace(cut, segments=(*cut.segments, turns(2.0).segment()), reward=3.0)
    both = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(cut, whole))
    for kind in Turns:
        in_one = group((1.0, 2.0), (1.0, 1.0))
        (first, second, other), (joined, same) = (
            compared(shape([both], turns=kind)),
            compared(shape([in_one], turns=kind)),
        )
        assert [*first, *second] == joined
        assert other == same
    assert compared(shape([both], "rloo", turns=Turns.TO_GO)) == [[1, 1], [1, 1], [-1, -1, -1, -1]]


def test_a_zero_reward_is_clipped_too():
    result = shape([group((0.0,), (2.0,))], clip_range=(0.5, 1.0))
    assert [float(s.rewards_A.sum()) for s in result.samples] == [0.5, 1.0]
    assert result.clipped_rewards == 2


def test_segments_of_one_episode_share_its_statistics():
    """An episode of two segments worth 1 and 2 beside one worth 5: totals 3 and 5, mean 4 for all three."""
    two, one = group((1.0,), (5.0,)).trajectories
    second = turns(2.0).segment()
    two = dataclasses.replace(two, segments=(*two.segments, second), reward=3.0)
    result = shape([Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(two, one))])
    assert [s.key for s in result.samples] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert compared(result) == [[-1, -1], [-1, -1], [1, 1]]
    assert [s.rewards_A.tolist() for s in result.samples] == [[0, 1], [0, 2], [0, 5]]
    assert TrainingBatch(samples=result.samples).episode_offsets == [0, 4, 6]


def test_an_episode_without_actions_counts_in_the_baseline_but_is_not_trained():
    silent = Trajectory(
        key=SampleKey(0, 1), segments=(TokenRecorder([1, 2]).segment(),), outcome=Outcome.FINISHED, reward=0.0
    ).with_reward(0.0, score=None, extra_logs={})
    talking = group((2.0,)).trajectories[0]
    result = shape([Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(talking, silent))])
    assert compared(result) == [[1, 1]]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_an_empty_round_is_an_empty_list(name):
    assert shape([group(failed=2)], name).samples == []


def test_totals_are_float32():
    result = shape([group((0.1,), (0.2,))], "rloo")
    assert result.samples[0].rewards_A.dtype == torch.float32


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
    return give_credit(batch, AdvantageSettings(estimator=get_estimator(name), **settings), costs_A=costs_A)


def test_turn_rewards_count_for_their_own_and_earlier_tokens():
    """reinforce: turn rewards 1 (second token) and 2 (fourth) give 3, 3, 2, 2. Observations between change nothing."""
    for gaps in (False, True):
        result = credit([sample([0, 1.0, 0, 2.0], gaps=gaps)], "reinforce")
        assert result.advantages_A.tolist() == [3, 3, 2, 2]
        assert result.totals_E.tolist() == [3]
        assert result.returns_A is None


def test_advantages_are_the_group_comparisons():
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


@pytest.mark.parametrize(
    ("name", "expected"), [("rloo", [1]), ("group_norm", [1]), ("reinforce_baseline", [0, 1]), ("reinforce", [0, 1])]
)
def test_samples_that_may_get_advantages_are_all_but_those_whose_comparison_gave_0(name, expected):
    """Whitening subtracts a mean of the round from a 0, and without a comparison nothing is known yet."""
    samples = [sample([0, 1.0], key=(i, 0, 0), compared=[x, x]) for i, x in enumerate([0.0, 0.5])]
    settings = AdvantageSettings(estimator=get_estimator(name))
    assert may_get_advantages(TrainingBatch(samples=samples), settings) == expected


# Roles, and samples that branch ----------------------------------------------------------------------------------------


def roles(*episodes: tuple[str, float]) -> Group:
    members = [
        Trajectory(
            key=SampleKey(0, i),
            segments=(turns(reward).segment(),),
            outcome=Outcome.FINISHED,
            reward=reward,
            agent=agent,
        )
        for i, (agent, reward) in enumerate(episodes)
    ]
    return Group(prompt=Prompt(ordinal=0, text="x"), trajectories=tuple(members))


def test_episodes_are_compared_with_those_of_their_agent():
    """White earned 1 and 0, black 0 and 0.5: the others of a role are one each. Of the judge there is only one: he has
    nobody to be compared with, and is counted. Where nothing is compared, all are trained on."""
    group = roles(("white", 1.0), ("black", 0.0), ("white", 0.0), ("black", 0.5), ("judge", 3.0))
    result = shape([group], "rloo")
    by_sample = {sample.key.sample: sample.compared_A.tolist() for sample in result.samples}
    assert by_sample == {0: [1, 1], 2: [-1, -1], 1: [-0.5, -0.5], 3: [0.5, 0.5]}
    assert result.metrics.values()["rollout/left_alone"] == 1
    assert len(shape([group], "reinforce").samples) == 5


def forked(*members: tuple[float, Fork | None], tokens: int = 3) -> Group:
    """Episodes of one turn, whose first tokens may be another's."""
    trajectories = []
    for i, (reward, fork) in enumerate(members):
        recorder = TokenRecorder([1])
        said = Generation(
            token_ids=[2] * tokens, logprobs=[0.0] * tokens, versions=[0] * tokens, finish_reason=FinishReason.STOP
        )
        recorder.append_action(said)
        recorder.reward_turn(reward)
        trajectories.append(
            Trajectory(
                key=SampleKey(0, i),
                segments=(recorder.segment(),),
                outcome=Outcome.FINISHED,
                reward=reward,
                fork=fork,
            )
        )
    return Group(prompt=Prompt(ordinal=0, text="x"), trajectories=tuple(trajectories))


def test_a_token_is_compared_with_the_samples_that_do_not_share_it():
    """Samples 0, 1, 2 begin alike; 2 shares two tokens with 1, and one of these with 0. Rewards 3, 0, 6, 9.

    Sample 2: its first token is compared with 9 alone: −3; its second one with 3 and 9: 0; its own with 3, 0, 9: 2.
    Sample 1: 0 − 9; 0 − (3 + 9)/2; 0 − (3 + 6 + 9)/3. Sample 0: 3 − 9; then 3 − (0 + 6 + 9)/3.
    """
    group = forked((3.0, None), (0.0, Fork(0, 1)), (6.0, Fork(1, 2)), (9.0, None))
    assert compared(shape([group], "rloo")) == [[-6, -2, -2], [-9, -6, -6], [-3, 0, 2], [6, 6, 6]]


def test_what_all_samples_share_is_compared_with_nothing():
    group = forked((1.0, None), (3.0, Fork(0, 2)))
    for name in ("rloo", "dr_grpo", "group_norm"):
        assert all(row[:2] == [0, 0] for row in compared(shape([group], name)))
        assert all(row[2] != 0 for row in compared(shape([group], name)))


def test_the_gradient_of_a_game_with_branches_is_that_of_its_definition():
    """All 64 outcomes of two beginnings b, each gone on with twice: c. The reward of a sample is R(b, c).

    By definition ∇ E[R] = Σ_b Σ_c ∇ (p(b) p(c | b)) R(b, c). What is trained on is the mean over the four samples of
    Σ_t A_t ∇ log π_t; its mean over all outcomes is compared with it, for p(b = 1) = σ(u), p(c = 1 | b) = σ(v_b).
    """
    rewards = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5, (1, 1): 4.0}
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)  # u, v_0, v_1

    def logprob(which: int, value: int) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(logits[which] if value else -logits[which])

    value = sum((logprob(0, b) + logprob(1 + b, c)).exp() * rewards[b, c] for b in (0, 1) for c in (0, 1))
    (expected,) = torch.autograd.grad(value, logits)
    settings = AdvantageSettings(estimator=get_estimator("rloo"))
    trained = torch.zeros((), dtype=torch.float64)
    for b0, b1, *cs in itertools.product((0, 1), repeat=6):
        begun = (b0, b0, b1, b1)
        probability = (logprob(0, b0) + logprob(0, b1) + sum(map(logprob, (1 + b for b in begun), cs))).exp().detach()
        earned = [rewards[b, c] for b, c in zip(begun, cs, strict=True)]
        forks = [None, Fork(0, 1), None, Fork(2, 1)]
        group = forked(*zip(earned, forks, strict=True), tokens=2)
        for sample, b, c in zip(training_samples([group], settings).samples, begun, cs, strict=True):
            first, second = sample.compared_A.double()
            trained = trained + probability / 4 * (first * logprob(0, b) + second * logprob(1 + b, c))
    (found,) = torch.autograd.grad(trained, logits)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "reinforce"])
def test_the_gradient_of_rewritten_histories_is_that_of_its_definition(name):
    """A program asks twice. After answer b = 1 it rewrites what was said, so that c is sampled after other tokens and
    belongs to another segment; after b = 0 it goes on with the same one. All 16 pairs of episodes.

    The policy knows p(b = 1) = σ(u), p(c = 1 | what it reads) = σ(v_b). By definition ∇ E[R] = Σ_b Σ_c ∇(p(b) p(c | b))
    R(b, c). Dr. GRPO's mean of two has each sample in it, so that half of the gradient is left.
    """
    rewards = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5, (1, 1): 4.0}
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)  # u, v_0, v_1
    rows = {(1,): 0, (1, 10, 2): 1, (3, 2): 2}  # what the policy reads → the row of its logits; it says 10 or 11

    def logprob(which: int, value: int) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(logits[which] if value else -logits[which])

    def episode(index: int, b: int, c: int) -> Trajectory:
        asked = ([1], 10 + b), ([3, 2] if b else [1, 10, 2], 10 + c)
        calls = [
            EngineCall(
                prompt, Generation(token_ids=[said], logprobs=[0.0], versions=[0], finish_reason=FinishReason.STOP)
            )
            for prompt, said in asked
        ]
        segments = segments_from_calls(calls, reward=rewards[b, c])
        assert len(segments) == 1 + b
        return Trajectory(key=SampleKey(0, index), segments=segments, outcome=Outcome.FINISHED, reward=rewards[b, c])

    value = sum((logprob(0, b) + logprob(1 + b, c)).exp() * rewards[b, c] for b in (0, 1) for c in (0, 1))
    (expected,) = torch.autograd.grad(value, logits)
    settings = AdvantageSettings(estimator=get_estimator(name))
    trained = torch.zeros((), dtype=torch.float64)
    for said in itertools.product(itertools.product((0, 1), repeat=2), repeat=2):
        probability = sum(logprob(0, b) + logprob(1 + b, c) for b, c in said).exp().detach()
        group = Group(
            prompt=Prompt(ordinal=0, text="x"), trajectories=tuple(episode(i, b, c) for i, (b, c) in enumerate(said))
        )
        samples = training_samples([group], settings).samples
        advantages = iter(credit(samples, name).advantages_A.tolist())
        for sample in samples:
            tokens = sample.segment.token_ids.tolist()
            for at in sample.segment.action_mask.nonzero().flatten().tolist():
                taken = logprob(rows[tuple(tokens[:at])], tokens[at] - 10)
                trained = trained + probability / 2 * next(advantages) * taken
    (found,) = torch.autograd.grad(trained, logits)
    torch.testing.assert_close(found, expected / (2 if name == "dr_grpo" else 1), atol=1e-6, rtol=0)


def test_forks_of_a_sample_that_failed_share_what_they_have_of_it():
    group = forked((0.0, None), (1.0, Fork(0, 1)), (3.0, Fork(0, 1)), (7.0, None))
    failed = group.trajectories[0].as_failed("boom")
    group = dataclasses.replace(group, trajectories=(failed, *group.trajectories[1:]))
    assert compared(shape([group], "rloo")) == [[-6, -4, -4], [-4, -1, -1], [5, 5, 5]]


# ------------------------------------------------------------------------------------ several rewards, each by itself


def named(*members: dict[str, float], weights: dict[str, float] | None = None) -> Group:
    """Episodes of one turn that earned these."""
    whole = group(*((1.0,) for _ in members))
    trajectories = []
    for trajectory, earned in zip(whole.trajectories, members, strict=True):
        parts = tuple(RewardPart(name, value, (weights or {}).get(name, 1.0)) for name, value in earned.items())
        total = sum(part.value * part.weight for part in parts)
        trajectories.append(trajectory.with_reward(total, score=None, extra_logs={}, parts=parts))
    return dataclasses.replace(whole, trajectories=tuple(trajectories))


HALF_ROOT = 2**-0.5
"""The z-score of the better of two."""


def test_gdpo_adds_up_what_each_reward_compares_to():
    """Two rewards of two samples: (1, 1) and (0, 1), z-scores ±1/√2 of the first and none of the second, where they
    agree; (1, 1) and (0, 0): both. The sum's z-score is the same for both groups."""
    one = shape([named({"a": 1, "b": 1}, {"a": 0, "b": 1})], "gdpo")
    both = shape([named({"a": 1, "b": 1}, {"a": 0, "b": 0})], "gdpo")
    assert compared(one) == [pytest.approx([HALF_ROOT] * 2), pytest.approx([-HALF_ROOT] * 2)]
    assert compared(both) == [pytest.approx([2 * HALF_ROOT] * 2), pytest.approx([-2 * HALF_ROOT] * 2)]
    for members in ([{"a": 1, "b": 1}, {"a": 0, "b": 1}], [{"a": 1, "b": 1}, {"a": 0, "b": 0}]):
        assert compared(shape([named(*members)], "group_norm"))[0] == pytest.approx([HALF_ROOT] * 2)


def test_gdpo_weighs_what_came_of_the_comparison():
    """Rewards of 100 and 1 with weights 1 and 3 that disagree: 1/√2 − 3/√2 for the first."""
    result = shape([named({"big": 100, "small": 0}, {"big": 0, "small": 1}, weights={"small": 3.0})], "gdpo")
    assert compared(result)[0] == pytest.approx([-2 * HALF_ROOT] * 2)
    assert result.samples[0].rewards_A.tolist() == [0, 10]  # the clip is of the whole in the metrics, and of each part


def test_rewards_that_were_clipped_each_by_itself_are_counted_and_warned_of(caplog):
    """Lengths of 300, 200 and 100 with a weight of 0.001: the sums are within the range, and the lengths are not. They
    are all 10 then, and compare to nothing: 3 of 6 rewards."""
    groups = [named({"a": 1, "long": 300}, {"a": 0, "long": 200}, {"a": 1, "long": 100}, weights={"long": 0.001})]
    result = shape(groups, "gdpo")
    assert compared(result) == compared(shape([named({"a": 1}, {"a": 0}, {"a": 1})], "gdpo"))
    assert result.metrics.values()["reward_clipped"] == 1 / 2
    SampleMaker(AdvantageSettings(estimator=get_estimator("gdpo"), shaping=RewardShaping(clip_range=WIDE)))(groups)
    assert "3 of 6 rewards lie outside --reward.clip_range -10 10" in caplog.text
    assert shape(groups, "gdpo", clip_range=(-1000.0, 1000.0)).metrics.values()["reward_clipped"] == 0
    assert shape(groups, "group_norm").metrics.values()["reward_clipped"] == 0


def test_gdpo_of_one_reward_is_grpo_s_comparison():
    groups = [group((1.0,), (3.0,), (0.0,))]
    assert compared(shape(groups, "gdpo")) == compared(shape(groups, "group_norm"))


def test_penalties_are_rewards_of_their_own_under_gdpo():
    """Turns of 2 tokens, all as long: the penalty is the same for all. A truncated episode that keeps −1 has nothing of
    its parts left, and −1 where the other has 0: worse in both."""
    short = shape([named({"a": 1}, {"a": 0})], "gdpo", overlong_buffer=2, overlong_factor=3.0, response_limit=3)
    assert compared(short)[0] == pytest.approx([HALF_ROOT] * 2)
    whole = named({"a": 1}, {"a": 1})
    cut = dataclasses.replace(whole.trajectories[0], outcome=Outcome.TRUNCATED)
    stopped = shape([dataclasses.replace(whole, trajectories=(cut, whole.trajectories[1]))], "gdpo", stop_properly=-1.0)
    assert compared(stopped)[1] == pytest.approx([2 * HALF_ROOT] * 2)


def test_a_penalty_on_length_is_compared_by_itself_under_gdpo():
    """Both earned 1. Of a limit of 3 tokens, 2 are 1 into the buffer of 2, so a turn pays 3 / 2: one of them once, the
    other in both of its turns."""
    result = shape([group((1.0,), (1.0, 0.0))], "gdpo", overlong_buffer=2, overlong_factor=3.0, response_limit=3)
    assert compared(result) == [pytest.approx([HALF_ROOT] * 2), pytest.approx([-HALF_ROOT] * 4)]


def test_a_fork_s_common_tokens_are_compared_with_the_others_under_gdpo():
    """Three samples of which the third shares its first token with the first: there each is compared with the second
    alone."""
    whole = named({"a": 1, "b": 0}, {"a": 0, "b": 0}, {"a": 0, "b": 1})
    forked = dataclasses.replace(whole.trajectories[2], fork=Fork(0, 1))
    result = compared(shape([dataclasses.replace(whole, trajectories=(*whole.trajectories[:2], forked))], "gdpo"))
    assert result[0][0] == pytest.approx(HALF_ROOT)
    assert result[2][0] == pytest.approx(HALF_ROOT)
    assert result[0][1] == pytest.approx(2 / 3 / 3**-0.5 - 1 / 3 / 3**-0.5)


def test_maxrl_warns_once_of_prompts_that_cannot_teach_anything(caplog):
    """Right and wrong as 1 and −1: one right of four is −½ on average, of two 0, of which rounding is no part."""
    groups = [group((1.0,), (-1.0,), (-1.0,), (-1.0,)), group((1.0,), (-1.0,)), group((0.3,), (-0.1,), (-0.2,))]
    for name in ("maxrl", "group_norm"):
        make = SampleMaker(AdvantageSettings(estimator=get_estimator(name), shaping=RewardShaping(clip_range=WIDE)))
        make(groups[1:])
        assert "maxrl" not in caplog.text
        for _ in range(2):
            made = make(groups)
        assert (made.losses, caplog.text.count("of 1 of 3 prompts")) == ((1, 1) if name == "maxrl" else (0, 0))
        caplog.clear()


# ------------------------------------------------------------------------------------------------ the greedy sample


def beside(greedy: float | None, *episodes: tuple[float, ...]) -> Group:
    whole = group(*episodes)
    members = tuple(dataclasses.replace(t, greedy_reward=greedy) for t in whole.trajectories)
    return dataclasses.replace(whole, trajectories=members)


def test_remax_takes_the_greedy_sample_s_reward_from_every_return():
    """Greedy 0.75; turns of two tokens. One turn that earned 1: 0.25 each. Turns of 1 and 0.5: 1.5 − 0.75 for the first
    turn, 0.5 − 0.75 for the second; with γ = ½ returns 1·½ + ½·½³ = 0.5625, 1.125, 0.25, 0.5. A cost of 0.1 on every
    token is taken from the return as under reinforce."""
    made = shape([beside(0.75, (1.0,), (1.0, 0.5))], "remax")
    batch = TrainingBatch(samples=made.samples)
    settings = AdvantageSettings(estimator=get_estimator("remax"))
    credit = give_credit(batch, settings)
    assert credit.advantages_A.tolist() == pytest.approx([0.25, 0.25, 0.75, 0.75, -0.25, -0.25])
    assert credit.totals_E.tolist() == [1.0, 1.5]
    half = give_credit(batch, dataclasses.replace(settings, gamma=0.5)).advantages_A[2:] + 0.75
    assert half.tolist() == pytest.approx([0.5625, 1.125, 0.25, 0.5])
    paid = give_credit(batch, settings, costs_A=torch.full((6,), 0.1)).advantages_A[:2]
    assert paid.tolist() == pytest.approx([0.05, 0.15])


def test_samples_whose_greedy_sample_failed_are_left_out_under_remax():
    made = shape([beside(None, (1.0,), (2.0,)), beside(1.0, (1.0,))], "remax")
    assert len(made.samples) == 1
    assert made.metrics.values()["rollout/left_alone"] == 2
    assert len(shape([beside(None, (1.0,))], "reinforce").samples) == 1
    assert shape([beside(50.0, (1.0,))], "remax").samples[0].baseline == 10.0  # clipped as rewards are
