"""Generation that goes on while rounds are trained on: nobody waits for the slowest, and nobody gets too old."""

import asyncio
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_collector import BAD, FAILS, GOOD, make_group

from openrlhf.data.prompts import PromptSet, PromptStream
from openrlhf.data.sources import load_records
from openrlhf.rollout.async_collector import AsyncCollector, bound_of, chosen, room_for
from openrlhf.rollout.collector import PromptsExhausted
from openrlhf.rollout.filtering import ScoreFilter
from openrlhf.rollout.runner import RolloutError
from openrlhf.types import SamplingParams
from openrlhf.utils.event_loops import BackgroundRunner


class Engine:
    version = 0


class Behind:
    """What the pipeline knows: how many updates the engine has not got."""

    updates = 0

    def __call__(self):
        return self.updates


class Runner:
    """Prompt o ends when it is told to, with the scores of `script[o]` and the version that it began with. Those that
    are told together end one after the other."""

    def __init__(self, script, engine, loop):
        self.script = script
        self.engine = engine
        self.loop = loop
        self.started = []
        self.let_go = {ordinal: asyncio.Event() for ordinal in range(len(script))}
        self.breaks_on = None

    async def play(self, prompt, *, n, sampling_params):
        self.started.append(prompt.ordinal)
        version = self.engine.version
        await asyncio.wait_for(self.let_go[prompt.ordinal].wait(), 20)
        if prompt.ordinal == self.breaks_on:
            raise RolloutError("the engine is gone")
        return make_group(*self.script[prompt.ordinal], ordinal=prompt.ordinal, version=version)

    def finish(self, *ordinals):
        self.loop.run(self._finish(ordinals))

    async def _finish(self, ordinals):
        for ordinal in ordinals:
            self.let_go[ordinal].set()
            for _ in range(5):  # turns of the loop: one that waits for it has ended by then
                await asyncio.sleep(0)


@pytest.fixture(scope="module")
def loop():
    with BackgroundRunner() as running:
        yield running


@pytest.fixture
def make(loop, tmp_path):
    made = []

    def make(script, *, batch=2, queue=1, at_once=None, ahead=True, filtered=False, behind=lambda: 0):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"input": f"q{i}"}) + "\n" for i in range(len(script))))
        engine = Engine()
        runner = Runner(script, engine, loop)
        made.append(runner)
        collector = AsyncCollector(
            prompts=PromptStream(PromptSet(load_records(str(path))), seed=0, num_episodes=1, shuffle=False),
            runner=runner,
            engine=engine,
            loop=loop,
            batch_size=batch,
            samples_per_prompt=2,
            sampling_params=SamplingParams(),
            queue_size=queue,
            at_once=at_once,
            ahead=ahead,
            behind=behind,
            score_filter=ScoreFilter(0.1, 0.9, warn_after=100) if filtered else None,
        )
        return collector, runner, engine

    yield make
    for runner in made:
        runner.finish(*runner.let_go)


def ordinals(round_):
    return [group.prompt.ordinal for group in round_.groups]


def test_a_round_does_not_wait_for_the_slowest_until_it_must(make):
    """Two rounds ahead: prompts 0 to 3 begin at version 0. 0 takes its time; rounds are made of the others, until the
    one that leads from version 2, which 0 must not miss."""
    collector, runner, engine = make([GOOD] * 12, queue=2, at_once=4)
    assert collector.staleness_bound == 2
    runner.finish(1, 2)
    assert ordinals(collector.next_batch()) == [1, 2]
    engine.version = 1
    runner.finish(3, 4, 5)
    assert ordinals(collector.next_batch()) == [3, 4]
    engine.version = 2
    runner.finish(6, 7, 8)
    timer = threading.Timer(0.2, runner.finish, [0])
    timer.start()
    third = collector.next_batch()
    assert runner.let_go[0].is_set()
    assert ordinals(third) == [0, 5]
    assert third.metrics.values()["rollout/staleness_max"] == 2


def test_prompts_start_while_a_round_is_trained_on_and_no_more_than_there_is_room_for(make):
    collector, runner, _ = make([GOOD] * 8, queue=1)
    runner.finish(*range(8))
    assert ordinals(collector.next_batch()) == [0, 1]
    collector.drain()
    assert runner.started == [0, 1, 2, 3]
    collector.resume()
    assert ordinals(collector.next_batch()) == [2, 3]


def test_at_rest_nothing_is_in_play_and_nothing_starts(make, loop):
    collector, runner, _ = make([GOOD] * 8, queue=2, at_once=3)
    runner.finish(0, 1)
    collector.next_batch()
    runner.finish(*range(8))
    collector.drain()
    before = list(runner.started)
    assert collector.state_dict()["unserved"] == []
    loop.run(asyncio.sleep(0.05))
    assert runner.started == before
    collector.resume()
    assert ordinals(collector.next_batch()) == [2, 3]


def test_a_push_can_be_deferred_until_a_round_would_wait_for_the_slowest_anyway(make):
    """Two rounds of 2 ahead. Begun with version 0: 0 to 3, and 4 and 5 when the first round is taken.

    After the first update four are left: two of them make a round, so what is in play goes on with version 0. As the
    engine is one behind, at most (2 − 1)·2 may be left then, which 4 and 5 are: nothing begins. After the second update
    the next round would need both of them: the push comes first. What begins after it is of version 2.
    """
    behind = Behind()
    collector, runner, engine = make([GOOD] * 12, queue=2, at_once=4, behind=behind)
    runner.finish(0, 1, 2)
    assert ordinals(collector.next_batch()) == [0, 1]
    assert collector.can_do_without_push()
    behind.updates = 1
    assert collector.version == 1
    runner.finish(3)
    second = collector.next_batch()
    assert ordinals(second) == [2, 3]
    assert second.metrics.values()["rollout/staleness_max"] == 1
    assert runner.started == [0, 1, 2, 3, 4, 5]
    assert not collector.can_do_without_push()
    runner.finish(4, 5)
    collector.drain()
    engine.version, behind.updates = 2, 0
    collector.resume()
    assert collector.version == 2
    third = collector.next_batch()
    assert ordinals(third) == [4, 5]
    assert third.metrics.values()["rollout/staleness_max"] == 2
    assert runner.started == list(range(10))


def test_one_round_ahead_no_push_can_be_deferred(make):
    """The next round takes 2 and 3, all there is."""
    collector, runner, _ = make([GOOD] * 8)
    runner.finish(0, 1)
    collector.next_batch()
    assert runner.started == [0, 1, 2, 3]
    assert not collector.can_do_without_push()
    assert collector.version == 0


def test_no_push_can_be_deferred_when_nothing_is_in_play(make):
    collector, runner, _ = make([GOOD] * 6, queue=2, at_once=4)
    runner.finish(*range(6))
    collector.next_batch()
    collector.drain()
    assert runner.started == list(range(6))
    assert not collector.can_do_without_push()


def test_the_first_push_of_a_resumed_run_cannot_be_deferred(make):
    collector, runner, _ = make([GOOD] * 8, queue=3, at_once=6)
    runner.finish(0, 1, 2, 3, 4, 5)
    collector.next_batch()
    state = collector.state_dict()
    assert len(state["waiting"]) > 2
    resumed, _, _ = make([GOOD] * 8, queue=3, at_once=6)
    resumed.load_state_dict(state)
    assert not resumed.can_do_without_push()


def test_stragglers_go_on_in_the_next_round_and_are_waited_for_when_they_must(make):
    """Rounds of 2 with 3 in play, not ahead: at most ⌈3 / 2⌉ = 2 versions old. 0 and then 3 are the slowest.

    Round of version 0: 0, 1, 2 begin, and it ends with 1 and 2; nothing begins before the next is asked for.
    Round of version 1: 3 and 4 begin beside 0; 4 alone is not enough, 5 has not begun: 3 or 0 must end. 3 does.
    Round of version 2: 5 and 6 begin. Both end first, but 0 was begun two versions ago: it is waited for.
    """
    collector, runner, engine = make([GOOD] * 8, at_once=3, ahead=False)
    assert collector.staleness_bound == 2
    runner.finish(1, 2)
    first = collector.next_batch()
    assert ordinals(first) == [1, 2]
    assert first.metrics.values()["rollout/in_play"] == 1
    assert runner.started == [0, 1, 2]
    engine.version = 1
    runner.finish(4, 3)
    assert runner.started == [0, 1, 2]
    second = collector.next_batch()
    assert ordinals(second) == [3, 4]
    assert second.metrics.values()["rollout/staleness_max"] == 0
    engine.version = 2
    runner.finish(5, 6)
    timer = threading.Timer(0.2, runner.finish, [0])
    timer.start()
    third = collector.next_batch()
    assert runner.let_go[0].is_set()
    assert ordinals(third) == [0, 5]
    assert third.metrics.values()["rollout/staleness_max"] == 2
    assert runner.started == [0, 1, 2, 3, 4, 5, 6]


def test_a_straggler_is_asked_again_by_a_resumed_run(make):
    collector, runner, _ = make([GOOD] * 4, at_once=3, ahead=False)
    runner.finish(1, 2)
    collector.next_batch()
    state = collector.state_dict()
    assert (state["unserved"], state["waiting"]) == ([0], [])
    resumed, other, _ = make([GOOD] * 4, at_once=3, ahead=False)
    resumed.load_state_dict(state)
    other.finish(0, 3)
    assert ordinals(resumed.next_batch()) == [0, 3]


def test_filtering_replaces_what_is_turned_away(make):
    collector, runner, _ = make([GOOD, BAD, BAD, GOOD, FAILS, GOOD, GOOD], filtered=True)
    runner.finish(*range(7))
    first, second = collector.next_batch(), collector.next_batch()
    assert (ordinals(first), ordinals(second)) == ([0, 3], [5, 6])
    assert first.metrics.values()["rollout/rejected_groups"] == 2
    with pytest.raises(PromptsExhausted):
        collector.next_batch()


def test_the_last_round_is_as_small_as_what_is_left(make):
    collector, runner, _ = make([GOOD] * 3)
    runner.finish(0, 1, 2)
    assert ordinals(collector.next_batch()) == [0, 1]
    assert ordinals(collector.next_batch()) == [2]
    with pytest.raises(PromptsExhausted):
        collector.next_batch()


def test_what_breaks_a_prompt_ends_the_wait(make):
    collector, runner, _ = make([GOOD] * 4)
    runner.breaks_on = 1
    runner.finish(1)
    with pytest.raises(RolloutError, match="the engine is gone"):
        collector.next_batch()


def test_a_round_of_failures_says_why(make):
    collector, runner, _ = make([FAILS] * 4)
    runner.finish(*range(4))
    with pytest.raises(RolloutError, match=r"all 2 groups of a round failed; first reason: rewards\.py:3: no"):
        collector.next_batch()


def test_a_resumed_run_trains_on_what_was_finished_and_asks_again_for_what_was_in_play(make):
    collector, runner, _ = make([GOOD] * 8, queue=2, at_once=4)
    runner.finish(0, 1, 3)
    assert ordinals(collector.next_batch()) == [0, 1]
    while not (state := collector.state_dict())["waiting"]:
        pass
    assert [saved["ordinal"] for saved in state["waiting"]] == [3]
    assert state["unserved"] == [2, 4, 5]
    resumed, other, _ = make([GOOD] * 8, queue=2, at_once=4)
    resumed.load_state_dict(state)
    other.finish(*range(8))
    assert ordinals(resumed.next_batch()) + ordinals(resumed.next_batch()) == [2, 3, 4, 5]
    assert ordinals(resumed.next_batch()) == [6, 7]
    assert other.started[:3] == [2, 4, 5]


def test_a_prompt_turned_away_after_the_last_round_is_accounted_for_after_a_resume(make):
    """Rounds of two; 2 is turned away while the round of 0 and 1 is trained on."""
    script = [GOOD, GOOD, BAD, GOOD, GOOD]
    collector, runner, _ = make(script, filtered=True)
    runner.finish(0, 1)
    assert collector.next_batch().rejected_prompts == []
    runner.finish(2)
    while not (state := collector.state_dict())["turned_away"]:
        pass
    assert state["turned_away_scores"] == [[0.0, 0.0]]
    resumed, other, _ = make(script, filtered=True)
    resumed.load_state_dict(state)
    other.finish(*range(5))
    last = resumed.next_batch()
    assert (ordinals(last), last.rejected_prompts) == ([3, 4], [2])
    assert 2 not in other.started


@pytest.mark.parametrize(
    ("finished", "unfinished", "expected"),
    [
        ({0: 5, 1: 5, 2: 5}, [], [0, 1]),
        ({4: 5, 7: 4}, [5], [7, 4]),
        ({4: 5}, [5], None),
        ({4: 5}, [], [4]),
        # Of 4 groups of version 3 two have one more round, of version 5: three are one too many to leave behind.
        ({8: 5, 9: 5}, [3, 3, 3], None),
        ({6: 3, 9: 5}, [3, 3], [6, 9]),
    ],
)
def test_a_round_takes_the_oldest_if_the_others_can_still_be_in_time(finished, unfinished, expected):
    """Version 4, rounds of 2, bound 2: what began at version 3 has the round of version 5 left."""
    assert chosen(finished, unfinished, version=4, batch_size=2, bound=2) == expected


@settings(max_examples=200)
@given(st.data())
def test_no_group_is_older_than_the_bound_whatever_the_order_in_which_they_end(data):
    """Begins as many as there is room for, ends them in any order, takes a round whenever one can be had, and puts a
    push off whenever it may: none is older than the bound, and when all have ended there is always a round."""
    batch, capacity = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    capacity = max(capacity, batch)
    bound = bound_of(capacity, batch_size=batch)
    version, pushed, number, playing, finished = 0, 0, 0, {}, {}

    def begin() -> None:
        nonlocal number
        while len(playing) + len(finished) < room_for(capacity, batch_size=batch, behind=version - pushed):
            playing[number], number = pushed, number + 1

    for _ in range(data.draw(st.integers(1, 40))):
        begin()
        if playing and data.draw(st.booleans()):
            ended = data.draw(st.sampled_from(sorted(playing)))
            finished[ended] = playing.pop(ended)
        taken = chosen(finished, list(playing.values()), version=version, batch_size=batch, bound=bound)
        if taken is None:
            assert playing, "all have ended, and no round can be had"
            continue
        assert taken
        assert max(version - finished.pop(ordinal) for ordinal in taken) <= bound
        begin()
        version += 1
        if len(playing) + len(finished) <= batch or data.draw(st.booleans()):
            pushed = version
