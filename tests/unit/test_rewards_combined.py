"""Several rewards as one: weighted by hand."""

import asyncio

import pytest

from openrlhf.config.models import RewardEntry
from openrlhf.rewards.base import Reward, RewardError, RewardRequest
from openrlhf.rewards.combined import CombinedReward
from openrlhf.runs.reward_sources import source_names
from openrlhf.types import RewardPart

REQUEST = RewardRequest(queries=("qa", "qb"), prompts=("q", "q"), labels=("", ""), name="prompt 3")


class Source:
    """Gives what it was made with, or raises it; writes down what happens to it."""

    def __init__(self, *rewards, seconds=0.0, error=None):
        self.rewards = [r if isinstance(r, Reward) else Reward(reward=r) for r in rewards]
        self.seconds = seconds
        self.error = error
        self.events = []

    async def start(self):
        self.events.append("start")

    async def score(self, request):
        self.events.append("score")
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        if self.error:
            raise self.error
        return self.rewards

    async def close(self):
        self.events.append("close")
        if self.error:
            raise self.error


def combine(*sources, weights, names="abc"):
    combined = CombinedReward(dict(zip(names, sources, strict=False)), weights)
    return asyncio.run(combined.score(REQUEST))


def test_rewards_are_a_weighted_sum():
    """Sample 1: 0.7·1 + 0.3·4 = 1.9; sample 2: 0.7·2 + 0.3·(−2) = 0.8."""
    judged = combine(Source(1, 2), Source(4, -2), weights=[0.7, 0.3])
    assert [r.reward for r in judged] == pytest.approx([1.9, 0.8])
    assert [r.size for r in judged] == pytest.approx([1.9, 2.0])  # 1.4 + 0.6: how much was added, for what is rounding
    assert [r.extra_logs for r in judged] == [{"reward_a": 1, "reward_b": 4}, {"reward_a": 2, "reward_b": -2}]


def test_what_a_source_has_added_up_counts_as_it_was_added_up():
    """A function gave 100.3 and −100, whose sum may be rounded as one of 200.3; half of that, and 2 of another."""
    judged = combine(Source(*[Reward(reward=0.3, size=200.3)] * 2), Source(-2, 2), weights=[-0.5, 1.0])
    assert [r.size for r in judged] == pytest.approx([102.15, 102.15])


@pytest.mark.parametrize(
    ("scores", "weights", "score"),
    [
        ((1.0, 0.0), (3.0, 1.0), 0.75),
        ((1.0, None), (3.0, 1.0), 1.0),
        ((None, None), (3.0, 1.0), None),
        ((1.0, 0.5), (1.0, -1.0), 0.75),
        ((1.0, 0.5), (0.0, 1.0), 0.5),
        ((1.0, None), (0.0, 1.0), None),
    ],
)
def test_scores_are_a_mean_and_stay_between_0_and_1(scores, weights, score):
    """(3·1 + 1·0) / 4 = 0.75. A source without scores has no say, nor has one without weight."""
    sources = [Source(Reward(reward=0, score=s), Reward(reward=0, score=s)) for s in scores]
    assert [r.score for r in combine(*sources, weights=weights)] == [score, score]


def test_logs_keep_their_names_unless_they_are_taken():
    one = Reward(reward=1, extra_logs={"length": 5, "format": 1})
    two = Reward(reward=2, extra_logs={"length": 6})
    judged = combine(Source(one, one), Source(two, two), weights=[1, 1])
    assert judged[0].extra_logs == {"length": 5, "format": 1, "length_b": 6, "reward_a": 1, "reward_b": 2}


def test_without_any_weight_rewards_are_only_measured():
    """Scores count alike; a source without scores is measured by its rewards: (1 + 0.5) / 2 and (0 + 0.25) / 2."""
    scored = Source(Reward(reward=4, score=1), Reward(reward=4, score=0))
    judged = combine(scored, Source(0.5, 0.25), weights=[0, 0])
    assert [r.reward for r in judged] == [0, 0]
    assert [r.score for r in judged] == [0.75, 0.125]


def test_combined_reward_fails_the_group_if_one_source_fails():
    slow = Source(1, 1, seconds=60)
    with pytest.raises(RewardError, match="boom"):
        combine(slow, Source(error=RewardError("boom")), weights=[1, 1])
    assert slow.events == ["score", "cancelled"]


def test_combined_reward_sources_judge_at_the_same_time():
    """Each answers when all three have been asked: one after the other, the first would wait for ever."""

    class Meeting(Source):
        def __init__(self, barrier):
            super().__init__(1, 1)
            self.barrier = barrier

        async def score(self, request):
            await self.barrier.wait()
            return await super().score(request)

    async def main():
        barrier = asyncio.Barrier(3)
        combined = CombinedReward({name: Meeting(barrier) for name in "abc"}, [1, 1, 1])
        return await asyncio.wait_for(combined.score(REQUEST), 60)

    assert [reward.reward for reward in asyncio.run(main())] == [3, 3]


def test_start_and_close_reach_all():
    sources = [Source(error=RewardError("boom")), Source(1, 1)]
    combined = CombinedReward({"a": sources[0], "b": sources[1]}, [1, 1])
    asyncio.run(combined.start())
    with pytest.raises(RewardError, match="boom"):
        asyncio.run(combined.close())
    assert [source.events for source in sources] == [["start", "close"]] * 2


def test_names_in_metrics():
    entries = (
        RewardEntry("function", ("rewards/math.py",)),
        RewardEntry("function", ("other/math.py",)),
        RewardEntry("http", ("http://host:5000/get_reward", "http://other:5000/get_reward")),
        RewardEntry("model", ("org/reward-model",)),
    )
    assert source_names(entries) == ["math", "math_2", "host_5000", "reward-model"]


def test_a_sum_that_no_float32_holds_is_a_failure_of_the_group():
    with pytest.raises(RewardError, match=r"the weighted sum of a, b is 6e\+38: too large for a float32"):
        combine(Source(3e38, 1), Source(3e38, 1), weights=[1.0, 1.0])


def test_the_parts_of_a_weighted_sum():
    """A source that judges by one number is a part; one that has parts itself gives them, with both weights."""
    two = Reward(reward=2.0, parts=(RewardPart("right", 1.0), RewardPart("format", 0.5, 2.0)))
    first, second = combine(Source(1, 3), Source(two, two), weights=[0.5, 2.0])
    assert first.parts == (("a", 1, 0.5), ("b.right", 1.0, 2.0), ("b.format", 0.5, 4.0))
    for judged in (first, second):
        assert judged.reward == sum(part.value * part.weight for part in judged.parts)
