"""Dynamic sampling: which groups a round trains on, whatever the order in which they end."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.checkpoint.training_state import read_state, write_state
from openrlhf.data.curricula import BySuccess, CurriculumSettings
from openrlhf.data.prompts import PromptSet, PromptStream
from openrlhf.data.sources import load_records
from openrlhf.rollout.collector import (
    PromptsExhausted,
    SyncCollector,
    group_from,
    group_state,
    rollout_metrics,
    source_metrics,
)
from openrlhf.rollout.filtering import ScoreFilter, Verdicts, mean_score
from openrlhf.rollout.runner import RolloutError
from openrlhf.types import Group, Outcome, Prompt, SampleKey, SamplingParams, Segment, Supports, Trajectory

GOOD, BAD, FAILS = (1.0, 0.0), (0.0, 0.0), (None, None)
"""Scores of a prompt's two samples; None: the sample failed."""

Script = Sequence[Sequence[float | None]]


def trajectory(key: SampleKey, score: float | None, *, version: int = 0) -> Trajectory:
    if score is None:
        return Trajectory(key=key, segments=(), outcome=Outcome.FAILED, error="rewards.py:3: no")
    segment = Segment(
        token_ids=torch.tensor([1, 2]),
        action_mask=torch.tensor([False, True]),
        rollout_logprobs=torch.zeros(2),
        versions=torch.tensor([-1, version], dtype=torch.int32),
        turn_rewards=torch.tensor([0.0, score]),
    )
    return Trajectory(key=key, segments=(segment,), outcome=Outcome.FINISHED, reward=score, score=score)


def make_group(*scores: float | None, ordinal: int = 0, version: int = 0) -> Group:
    members = tuple(
        trajectory(SampleKey(ordinal, sample), score, version=version) for sample, score in enumerate(scores)
    )
    return Group(prompt=Prompt(ordinal=ordinal, text="q"), trajectories=members)


class ScriptedRunner:
    """Prompt o takes `turns[o]` turns of the event loop (0 unless given) and gets the scores of `script[o]`."""

    def __init__(self, script: Script, turns: Mapping[int, int] | None = None) -> None:
        self.script = script
        self.turns = turns or {}
        self.version = 0
        self.events: list[tuple[str, int]] = []
        self.breaks_on: int | None = None
        self.texts: dict[int, str] = {}
        self.with_logprobs: list[int] = []
        """Ordinals of the prompts that were to have sampled log-probs."""

    @property
    def started(self) -> list[int]:
        return [ordinal for event, ordinal in self.events if event == "start"]

    async def play(self, prompt: Prompt, *, n: int, sampling_params: SamplingParams) -> Group:
        self.events.append(("start", prompt.ordinal))
        self.texts[prompt.ordinal] = prompt.text
        if sampling_params.wants_logprobs:
            self.with_logprobs.append(prompt.ordinal)
        for _ in range(self.turns.get(prompt.ordinal, 0)):
            await asyncio.sleep(0)
        if prompt.ordinal == self.breaks_on:
            raise RolloutError("the engine is gone")
        self.events.append(("end", prompt.ordinal))
        return make_group(*self.script[prompt.ordinal], ordinal=prompt.ordinal, version=self.version)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    path.write_text("".join(json.dumps({"input": f"q{i}"}) + "\n" for i in range(64)))
    return path


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def make(loop, records):
    """A collector over as many prompts as the runner's script has lines."""

    def make(
        runner: ScriptedRunner,
        *,
        batch: int = 2,
        at_once: int | None = None,
        filtered: bool = True,
        logprobs_every: int = 1,
        members: int = 1,
        curriculum: bool = False,
    ):
        data = PromptSet(load_records(str(records), max_samples=len(runner.script)))
        chooses = BySuccess(len(data), CurriculumSettings(seed=0, half_life=5)) if curriculum else None
        return SyncCollector(
            prompts=PromptStream(data, seed=0, num_episodes=1, curriculum=chooses),
            runner=runner,
            loop=loop,
            batch_size=batch,
            samples_per_prompt=2,
            sampling_params=SamplingParams(),
            logprobs_every=logprobs_every,
            generate_batch_size=at_once,
            score_filter=ScoreFilter(0, 1, warn_after=10 * batch, members=members) if filtered else None,
        )

    return make


def ordinals(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.ordinal for group in groups]


def rounds_of(collector: SyncCollector) -> list[list[int]]:
    """Ordinals of every round until the prompts run out."""
    rounds = []
    for _ in range(1000):
        try:
            rounds.append(ordinals(collector.next_batch().groups))
        except PromptsExhausted:
            return rounds
    raise AssertionError("the collector never ended")


# ---------------------------------------------------------------------------------------------------- the range


@pytest.mark.parametrize(
    ("scores", "accepted"),
    [
        ((0.0, 0.0, 0.0), False),
        ((1.0, 1.0, 1.0), False),
        ((0.0, 0.0, 1.0), True),
        ((0.5, 0.5, 0.5), True),
        ((-1.0, 1.0, 0.0), False),
        ((0.0, 3.0, 0.0), False),
    ],
)
def test_both_ends_of_the_range_are_outside_it(scores, accepted):
    """Means 0, 1, 1/3, 1/2, 0 and 1 against (0, 1)."""
    assert ScoreFilter(0, 1, warn_after=100).accepts(make_group(*scores)) is accepted


def test_an_end_that_no_float_can_hold_is_still_an_end():
    """0.1 as a float32 is more than 0.1 as a double, and the mean of the float32s 0.1 and 0.5 is 0.30000000075,
    between the double 0.3 and the float32 0.3: ends are excluded all the same."""
    tenth, half, most = (float(torch.tensor(x)) for x in (0.1, 0.5, 0.9))
    score_filter = ScoreFilter(0.1, 0.9, warn_after=100)
    assert not score_filter.accepts(make_group(tenth, tenth, tenth))
    assert not score_filter.accepts(make_group(most, most, most))
    assert score_filter.accepts(make_group(tenth, tenth, most))
    assert not ScoreFilter(0.3, 1, warn_after=100).accepts(make_group(tenth, half))
    assert not ScoreFilter(0, 0.3, warn_after=100).accepts(make_group(tenth, half))


def test_failed_members_are_no_zeros():
    """1, 1 and a failure: the mean is 1, not 2/3."""
    group = make_group(1.0, None, 1.0)
    assert mean_score(group.scored) == 1.0
    assert not ScoreFilter(0, 1, warn_after=100).accepts(group)


def test_a_group_with_an_unscored_member_is_not_filtered():
    unscored = Trajectory(
        key=SampleKey(0, 1), segments=make_group(0.0).trajectories[0].segments, outcome=Outcome.FINISHED, reward=0.0
    )
    group = Group(prompt=Prompt(ordinal=0, text="q"), trajectories=(make_group(0.0).trajectories[0], unscored))
    assert mean_score(group.scored) is None
    assert ScoreFilter(0, 1, warn_after=100).accepts(group)


@pytest.mark.parametrize(
    ("scores", "accepted"),
    [
        ({"white": (1.0, 1.0), "black": (0.0, 0.0)}, False),
        ({"white": (1.0, 1.0), "black": (0.0, 1.0)}, True),
        ({"white": (1.0, 1.0), "black": (0.5,)}, False),
    ],
)
def test_a_group_of_several_agents_is_filtered_by_each(scores, accepted):
    """All four scores of the first group have the mean 1/2, but white always wins: neither has anything to learn. In
    the last one black has nobody to be compared with."""
    of_roles = [(agent, score) for agent, own in scores.items() for score in own]
    whole = make_group(*(score for _, score in of_roles))
    members = [dataclasses.replace(t, agent=agent) for t, (agent, _) in zip(whole.trajectories, of_roles, strict=True)]
    group = dataclasses.replace(whole, trajectories=tuple(members))
    assert ScoreFilter(0, 1, warn_after=100, members=2).accepts(group) is accepted
    means = rollout_metrics([group], max_length=100).values()
    for agent, own in scores.items():
        assert means[f"rollout/reward_mean_{agent}"] == sum(own) / len(own)


# -------------------------------------------------------------------------------------------------- replacements


def test_a_group_that_would_give_no_sample_is_replaced(make):
    """One judged member of two, with a score inside the range: where members are compared it has nobody to be compared
    with. The round is full all the same. Where they are not compared, it is as good as others."""
    script = [(0.5, None), GOOD, BAD, GOOD, GOOD]
    batch = make(ScriptedRunner(script), members=2).next_batch()
    assert ordinals(batch.groups) == [1, 3]
    assert batch.rejected_prompts == [0, 2]
    metrics = batch.metrics.values()
    assert metrics["rollout/failed"] == 1
    assert metrics["dynamic_filtering_pass_rate"] == 2 / 3
    assert ordinals(make(ScriptedRunner(script)).next_batch().groups) == [0, 1]


def test_a_round_of_members_left_alone_says_why(make):
    with pytest.raises(RolloutError, match=r"all 3 groups of a round failed; first reason: rewards.py:3: no"):
        make(ScriptedRunner([(0.5, None)] * 8), members=2).next_batch()


def test_a_group_without_the_greedy_sample_that_it_needs_is_replaced():
    """Both samples of the first group were judged, and its greedy one failed."""
    verdicts = Verdicts(ScoreFilter(0, 1, warn_after=100, greedy=True))
    for greedy, accepted in ((None, False), (0.5, True)):
        whole = make_group(1.0, 0.0)
        members = tuple(dataclasses.replace(t, greedy_reward=greedy) for t in whole.trajectories)
        assert verdicts.accepts(dataclasses.replace(whole, trajectories=members)) is accepted
    assert verdicts.metrics(buffered=0).values()["rollout/judged_groups"] == 1
    assert Verdicts(ScoreFilter(0, 1, warn_after=100)).accepts(make_group(1.0, 0.0))


def test_a_round_of_groups_with_nobody_to_compare_says_why():
    """No sample failed, and each plays a role that no other plays."""
    verdicts = Verdicts(ScoreFilter(0, 1, warn_after=100, members=2))
    whole = make_group(1.0, 0.0)
    roles = tuple(dataclasses.replace(t, agent=f"player {i}") for i, t in enumerate(whole.trajectories))
    assert not verdicts.accepts(dataclasses.replace(whole, trajectories=roles))
    with pytest.raises(RolloutError, match=r"all 1 groups of a round failed; .* too few samples play each role"):
        verdicts.require_success([], batch_size=1)


def test_each_source_has_its_own_means():
    """Source a: scores 1 and 0 of one prompt, 1 of another whose second sample failed. Source b: nothing judged."""
    groups = [make_group(1.0, 0.0), make_group(1.0, None, ordinal=1), make_group(None, None, ordinal=2)]
    named = [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, datasource=source))
        for group, source in zip(groups, ("a", "a", "b"), strict=True)
    ]
    assert source_metrics(named).values() == {
        "source/a_score": pytest.approx(2 / 3),
        "source/a_reward": pytest.approx(2 / 3),
        "source/a_prompts": 2,
        "source/b_prompts": 1,
    }


def test_a_replacement_starts_while_others_are_in_play(make):
    """0 is rejected after a turn and 1 takes 50: 2 is started, judged and accepted long before 1 ends."""
    runner = ScriptedRunner([BAD, GOOD, GOOD, GOOD], turns={0: 1, 1: 50})
    groups = make(runner).next_batch().groups
    assert ordinals(groups) == [1, 2]
    assert runner.events == [("start", 0), ("start", 1), ("end", 0), ("start", 2), ("end", 2), ("end", 1)]


def test_failed_groups_are_replaced_and_counted_but_not_judged(make):
    """0 fails (2 samples), 1 is rejected, 2 has one failed and one judged sample of score 0.5, 3 is good: 3 judged."""
    collector = make(ScriptedRunner([FAILS, BAD, (0.5, None), GOOD]))
    groups, metrics, _ = collector.next_batch()
    assert ordinals(groups) == [2, 3]
    assert metrics.values()["rollout/judged_groups"] == 3
    metrics.merge(rollout_metrics(groups, max_length=8))
    assert metrics.values()["rollout/failed"] == 3
    assert metrics.values()["rollout/num_samples"] == 3


def test_without_a_filter_failed_groups_stay_and_nothing_is_replaced(make):
    runner = ScriptedRunner([FAILS, BAD, GOOD])
    groups, metrics, _ = make(runner, filtered=False).next_batch()
    assert ordinals(groups) == [0, 1]
    assert runner.started == [0, 1]
    assert metrics.values() == {}


def test_pass_rate_by_hand(make):
    """0–5 are good, bad, bad, good, bad, good. Round 1 takes 0–3: 2 of 4 accepted. Round 2 takes 4–6: 2 of 3."""
    collector = make(ScriptedRunner([GOOD, BAD, BAD, GOOD, BAD, GOOD, GOOD]))
    first, second = collector.next_batch().metrics.values(), collector.next_batch().metrics.values()
    assert (first["dynamic_filtering_pass_rate"], second["dynamic_filtering_pass_rate"]) == (2 / 4, 2 / 3)
    assert (first["rollout/judged_groups"], first["rollout/rejected_groups"]) == (4, 2)
    assert (second["rollout/judged_groups"], second["rollout/rejected_groups"]) == (3, 1)
    assert first["rollout/buffered"] == second["rollout/buffered"] == first["rollout/failed"] == 0


def test_a_reward_that_breaks_ends_the_run_and_does_not_eat_the_prompts(make):
    """Of 2 and 3 the first to fail is replaced by 4, the second tells that a whole batch has failed."""
    runner = ScriptedRunner([GOOD, GOOD, *[FAILS] * 60])
    collector = make(runner)
    collector.next_batch()
    with pytest.raises(RolloutError, match=r"all 3 groups of a round failed; first reason: rewards.py:3: no"):
        collector.next_batch()
    assert runner.started == [0, 1, 2, 3, 4]


def test_no_more_prompts_are_in_play_than_allowed(make):
    runner = ScriptedRunner([GOOD] * 5, turns={0: 3, 1: 1})
    assert rounds_of(make(runner, batch=5, at_once=2, filtered=False)) == [[0, 1, 2, 3, 4]]
    in_play = itertools.accumulate(1 if event == "start" else -1 for event, _ in runner.events)
    assert max(in_play) == 2


# ------------------------------------------------------------------------------------------------- over-sampling


def test_surplus_covers_rejections_and_waits_for_the_next_round(make):
    """4 in play for a batch of 2. Round 1: 1 is rejected, which the surplus covers; 3 waits. Round 2 starts 4 − 1 = 3
    more (4, 5, 6); 3 goes first and carries the version it was sampled with; 6 waits."""
    runner = ScriptedRunner([GOOD, BAD, GOOD, GOOD, BAD, GOOD, GOOD, GOOD], turns={0: 5, 4: 2})
    collector = make(runner, at_once=4)
    first = collector.next_batch()
    assert runner.started == [0, 1, 2, 3]
    runner.version = 1
    second = collector.next_batch()
    assert runner.started == [0, 1, 2, 3, 4, 5, 6]
    assert (ordinals(first.groups), ordinals(second.groups)) == ([0, 2], [3, 5])
    assert [int(group.trajectories[0].segments[0].versions[-1]) for group in second.groups] == [0, 1]
    values = second.metrics.values()
    assert (values["dynamic_filtering_pass_rate"], values["rollout/buffered"]) == (2 / 3, 1)


def test_more_rejections_than_surplus_are_replaced_at_once(make):
    """3 in play for a batch of 2: 0 is covered by the surplus, 1 is replaced by 3 while 2 is still in play."""
    runner = ScriptedRunner([BAD, BAD, GOOD, GOOD], turns={2: 50})
    groups = make(runner, at_once=3).next_batch().groups
    assert ordinals(groups) == [2, 3]
    assert runner.events.index(("start", 3)) < runner.events.index(("end", 2))


def test_a_full_buffer_serves_a_round_alone(make):
    runner = ScriptedRunner([GOOD] * 12)
    collector = make(runner, at_once=6)
    assert ordinals(collector.next_batch().groups) == [0, 1]
    groups, metrics, _ = collector.next_batch()
    assert ordinals(groups) == [2, 3]
    assert runner.started == [0, 1, 2, 3, 4, 5]
    assert metrics.values()["rollout/judged_groups"] == 0
    assert "dynamic_filtering_pass_rate" not in metrics.values()


# ---------------------------------------------------------------------------------------------------- any order


def rounds_by_the_rule(script: Script, *, batch: int, at_once: int) -> list[list[int]]:
    """The same rounds, worked out one prompt after the other: no concurrency, nothing in flight."""
    left, waiting, rounds = list(range(len(script))), [], []
    accepted = {o for o, scores in enumerate(script) if tuple(scores) == GOOD}
    while True:
        if len(waiting) < batch:
            begin = max(batch, at_once) - len(waiting)
            waiting += [o for o in left[:begin] if o in accepted]
            del left[:begin]
            while len(waiting) < batch and left:
                waiting += [o for o in [left.pop(0)] if o in accepted]
        if not waiting:
            return rounds
        rounds.append(waiting[:batch])
        del waiting[:batch]


@given(
    script=st.lists(st.sampled_from([GOOD, BAD, (1.0, 1.0), (None, 0.0)]), min_size=1, max_size=24),
    turns=st.dictionaries(st.integers(0, 23), st.integers(0, 30)),
    batch=st.integers(1, 5),
    at_once=st.integers(1, 9),
)
def test_rounds_do_not_depend_on_who_ends_first(make, script, turns, batch, at_once):
    collector = make(ScriptedRunner(script, turns), batch=batch, at_once=at_once)
    assert rounds_of(collector) == rounds_by_the_rule(script, batch=batch, at_once=at_once)


@given(
    script=st.lists(st.sampled_from([GOOD, BAD, (1.0, 1.0), FAILS]), min_size=6, max_size=24),
    turns=st.dictionaries(st.integers(0, 23), st.integers(0, 9)),
    at_once=st.integers(1, 6),
    killed=st.integers(0, 5),
)
@settings(max_examples=30)
def test_a_curriculum_draws_the_same_whoever_ends_first_and_after_a_resume(make, script, turns, at_once, killed):
    """Prompts are drawn while a round is played, by what was known when it began: rejections, waiting groups and all."""
    plain, late = ScriptedRunner(script), ScriptedRunner(script, turns)
    collector, other = (make(runner, batch=2, at_once=at_once, curriculum=True) for runner in (plain, late))
    rounds = []
    with contextlib.suppress(PromptsExhausted, RolloutError):
        for number in itertools.count():
            rounds.append((ordinals(collector.next_batch().groups), dict(plain.texts)))
            assert (ordinals(other.next_batch().groups), dict(late.texts)) == rounds[-1]
            if number == killed:
                resumed = make(late, batch=2, at_once=at_once, curriculum=True)
                resumed.load_state_dict(as_kept(other.state_dict()))
                other = resumed


def test_a_curriculum_knows_what_was_turned_away(make):
    """Round 1 trains on 1 and 2; 0 was all wrong, which is known of its prompt as well; 3 waits and is not known yet.
    Four prompts: 3/4 seen, of success 0, ½ and ½."""
    collector = make(ScriptedRunner([BAD, GOOD, GOOD, GOOD]), at_once=4, curriculum=True)
    values = collector.next_batch().metrics.values()
    assert values["curriculum/seen"] == 3 / 4
    assert values["curriculum/success"] == pytest.approx(1 / 3)


# ------------------------------------------------------------------------------------------- prompts running out


def test_a_short_round_and_then_the_end(make):
    """5 prompts, batches of 2: 0 and 2, then 3 alone, because 4 is rejected and nothing is left to replace it."""
    collector = make(ScriptedRunner([GOOD, BAD, GOOD, GOOD, BAD]))
    first, second = collector.next_batch(), collector.next_batch()
    assert [ordinals(first.groups), ordinals(second.groups)] == [[0, 2], [3]]
    assert [first.rejected_prompts, second.rejected_prompts] == [[1], [4]]
    with pytest.raises(PromptsExhausted) as end:
        collector.next_batch()
    assert str(end.value) == (
        "the prompts ran out; 2 of 5 judged groups had a mean score outside --algo.dynamic_filtering_range 0 1"
    )


def test_when_every_group_is_rejected_the_end_says_what_they_earned(make):
    with pytest.raises(PromptsExhausted) as end:
        make(ScriptedRunner([BAD, BAD, (1.0, 1.0)])).next_batch()
    assert str(end.value) == (
        "the prompts ran out; --algo.dynamic_filtering_enable accepted none: 3 of 3 judged groups had a mean score "
        "outside --algo.dynamic_filtering_range 0 1. Mean scores were from 0 to 1, mean rewards from 0 to 1: the task "
        "is too hard or too easy for this model, or the range is not in the unit of the scores"
    )


def test_what_waits_is_trained_on_after_the_last_prompt(make):
    assert rounds_of(make(ScriptedRunner([GOOD] * 7), at_once=6)) == [[0, 1], [2, 3], [4, 5], [6]]


def test_nothing_accepted_ever_is_said_once_and_ends(make, caplog):
    collector = make(ScriptedRunner([BAD] * 30 + [(1.0, 1.0)] * 10))
    with pytest.raises(PromptsExhausted, match="40 of 40 judged groups"):
        collector.next_batch()
    (warning,) = caplog.messages
    assert warning.startswith(
        "--algo.dynamic_filtering_enable: not one of the last 20 judged groups has a mean score inside "
        "--algo.dynamic_filtering_range 0 1 (both ends excluded): 20 at or below it, 0 at or above it, from 0 to 0."
    )


def test_a_dry_spell_is_counted_anew_after_an_accepted_group(caplog):
    score_filter = ScoreFilter(0, 1, warn_after=3)
    for group in (BAD, BAD, GOOD, BAD, BAD):
        score_filter.accepts(make_group(*group))
    assert caplog.messages == []
    score_filter.accepts(make_group(1.0, 1.0))
    assert "2 at or below it, 1 at or above it, from 0 to 1." in caplog.text


def test_a_few_failures_at_the_very_end_do_not_spoil_the_run(make):
    assert rounds_of(make(ScriptedRunner([GOOD, GOOD, FAILS]))) == [[0, 1]]


# --------------------------------------------------------------------------------------------------------- state


def as_kept(state):
    """Through a checkpoint's files."""
    with tempfile.TemporaryDirectory() as folder:
        write_state(Path(folder), state)
        return read_state(Path(folder))


def test_a_group_comes_back_from_a_checkpoint_as_it_was():
    group = make_group(1.0, None, ordinal=3, version=7)
    routed = dataclasses.replace(
        group.trajectories[0].segments[0], routes=torch.tensor([[[200, 1], [0, 255]]], dtype=torch.uint8)
    )
    actions = routed.num_actions
    routed = dataclasses.replace(routed, supports=Supports.of([[4, 9], None, *[[]] * (actions - 2)][:actions]))
    trajectories = (dataclasses.replace(group.trajectories[0], segments=(routed,)), *group.trajectories[1:])
    group = dataclasses.replace(group, trajectories=trajectories)
    same = group_from(as_kept(group_state(group)), group.prompt)
    assert same.prompt == group.prompt
    (segment,), (kept,) = group.trajectories[0].segments, same.trajectories[0].segments
    for name in ("token_ids", "action_mask", "rollout_logprobs", "versions", "turn_rewards", "routes"):
        assert torch.equal(getattr(segment, name), getattr(kept, name))
        assert getattr(segment, name).dtype == getattr(kept, name).dtype
    assert kept.supports.tolist() == segment.supports.tolist()
    for one, other in zip(group.trajectories, same.trajectories, strict=True):
        for name in ("key", "outcome", "reward", "score", "text", "extra_logs", "error"):
            assert getattr(one, name) == getattr(other, name)
        assert (type(other.key), type(other.outcome)) == (SampleKey, Outcome)


@settings(deadline=None)  # it writes files
@given(
    script=st.lists(st.sampled_from([GOOD, BAD, (None, 0.0)]), min_size=1, max_size=24),
    at_once=st.integers(1, 9),
    stop_after=st.integers(0, 5),
)
def test_a_resumed_run_loses_and_repeats_no_prompt(make, script, at_once, stop_after):
    """What a run that stops after some rounds and its successor train on, together, is every good prompt once."""
    runners = [ScriptedRunner(script), ScriptedRunner(script)]
    first, second = (make(runner, batch=3, at_once=at_once) for runner in runners)
    trained: list[int] = []
    with contextlib.suppress(PromptsExhausted):
        for _ in range(stop_after):
            trained += ordinals(first.next_batch().groups)
    second.load_state_dict(as_kept(first.state_dict()))
    trained += itertools.chain.from_iterable(rounds_of(second))
    assert not set(runners[0].started) & set(runners[1].started), "groups that wait are not played again"
    assert trained == [o for o, scores in enumerate(script) if scores == GOOD]


def test_every_so_many_prompts_have_logprobs_and_after_a_resume_the_same(make):
    """Of ten prompts 0, 4 and 8; a run that stops after the third of its rounds of two goes on with 8."""
    script = [GOOD] * 10
    whole, first, second = (ScriptedRunner(script) for _ in range(3))
    rounds_of(make(whole, logprobs_every=4))
    assert whole.with_logprobs == [0, 4, 8]
    stopped, resumed = make(first, logprobs_every=4), make(second, logprobs_every=4)
    for _ in range(3):
        stopped.next_batch()
    resumed.load_state_dict(as_kept(stopped.state_dict()))
    rounds_of(resumed)
    assert (first.with_logprobs, second.with_logprobs) == ([0, 4], [8])
    rounds_of(make(everyone := ScriptedRunner(script)))
    assert everyone.with_logprobs == list(range(10))


def test_prompts_in_play_when_the_engine_breaks_are_asked_again(make):
    """0 is accepted and 1 rejected before 2 breaks the round with 3 in play: 0 waits, 2 and 3 are given back."""
    runner = ScriptedRunner([GOOD, BAD, GOOD, GOOD, GOOD], turns={2: 5, 3: 50})
    runner.breaks_on = 2
    collector = make(runner, batch=3)
    with pytest.raises(RolloutError, match="the engine is gone"):
        collector.next_batch()
    state = collector.state_dict()
    assert [group["ordinal"] for group in state["waiting"]] == [0]
    assert (state["unserved"], state["prompts"]["again"], state["prompts"]["next_ordinal"]) == ([], [2, 3], 4)
    resumed = make(ScriptedRunner(runner.script), batch=3)
    resumed.load_state_dict(state)
    assert rounds_of(resumed) == [[0, 2, 3], [4]]
