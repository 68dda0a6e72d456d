"""Curricula draw prompts by what is known of them: when it is known, what they draw, and that a resumed run draws the
same."""

import itertools
import json
import math
from collections import Counter
from typing import get_args, get_type_hints

import numpy as np
import pytest

from openrlhf.checkpoint.training_state import read_state, write_state
from openrlhf.config.data import PromptDataSection
from openrlhf.data.curricula import CURRICULA, BySuccess, CurriculumSettings, Evidence
from openrlhf.data.files import DataError
from openrlhf.data.prompts import PromptSet, PromptStream
from openrlhf.data.sources import load_records

SIZE = 6
DIFFICULTY_N = np.array([2.0, 1.0, 1.0, 3.0, 2.0, 1.0])


def settings_of(**values) -> CurriculumSettings:
    return CurriculumSettings(**{"seed": 0, "half_life": 1e9} | values)


def make(name: str, size: int = SIZE, **values):
    given = {"difficulty_N": np.resize(DIFFICULTY_N, size)} if CURRICULA[name].takes_difficulty else {}
    return CURRICULA[name].make(size, settings_of(**values), **given)


def drawn(curriculum, count: int, *, first: int = 0, in_play=None) -> list[int]:
    return [curriculum.draw(ordinal, in_play or {}) for ordinal in range(first, first + count)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    records = [{"input": f"q{i}", "difficulty": level} for i, level in enumerate(DIFFICULTY_N.tolist())]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return PromptSet(load_records(str(path)))


def stream_of(prompts, name: str | None, *, passes: int | None = None, **values) -> PromptStream:
    return PromptStream(prompts, seed=0, num_episodes=passes, curriculum=name and make(name, **values))


def texts(taken) -> list[str]:
    return [prompt.text for prompt in taken]


def test_flag_and_registry_name_the_same():
    (choices, _) = get_args(get_type_hints(PromptDataSection, include_extras=True)["curriculum"])
    assert {*get_args(choices)} == {"off", *CURRICULA}


# ------------------------------------------------------------------------------------------------- what is known


def test_old_results_count_less_by_the_half_life():
    """Half-life 2 rounds: after scores 1, 1, 0 and two rounds of nothing, 2 solved are 1 and 1 missed is ½; a round
    with a score of 0.25 adds ¼ and ¾ to √½ of these."""
    evidence = Evidence(2, settings_of(half_life=2))
    evidence.learn([(1, [1.0, 1.0, 0.0])])
    evidence.learn([])
    evidence.learn([])
    assert evidence.solved_N.tolist() == pytest.approx([0, 1])
    assert evidence.missed_N.tolist() == pytest.approx([0, 0.5])
    assert evidence.rate_N[1] == pytest.approx(2 / 3)
    assert math.isnan(evidence.rate_N[0])
    evidence.learn([(1, [0.25])])
    assert evidence.solved_N[1] == pytest.approx(math.sqrt(0.5) + 0.25)
    assert evidence.missed_N[1] == pytest.approx(math.sqrt(0.5) / 2 + 0.75)
    assert evidence.judged_N.tolist() == [0, 4]


def test_scores_are_brought_to_their_range_and_one_warning_tells_of_others(caplog):
    """Range −1 to 1: −1, 0 and 1 are successes of 0, ½ and 1; 3 counts as 1, −7 as 0."""
    evidence = Evidence(1, settings_of(score_range=(-1.0, 1.0)))
    evidence.learn([(0, [-1.0, 0.0, 1.0])])
    assert (evidence.solved_N[0], evidence.missed_N[0], caplog.messages) == (1.5, 1.5, [])
    evidence.learn([(0, [3.0, -7.0])])
    assert (evidence.solved_N[0], evidence.missed_N[0]) == pytest.approx((2.5, 2.5))
    (line,) = caplog.messages
    assert line.startswith(
        "--data.curriculum: a score of 3 is outside --data.curriculum_score_range -1 1 and counts as its end"
    )


# -------------------------------------------------------------------------------------------------- what is drawn


def test_probabilities_by_success():
    """Never judged: ½·½/(1·2) = 1/8. 2 of 4 solved: 2.5·2.5/(5·6) = 5/24. 0 of 4: ½·4.5/(5·6) = 3/40. Their sum is
    49/120; explore ¼ leaves ¾ of each share and adds 1/12."""
    curriculum = BySuccess(3, settings_of(explore=0.25))
    curriculum.learn([(1, [1.0, 0.0, 1.0, 0.0]), (2, [0.0] * 4)])
    wanted = [0.75 * v * 120 / 49 + 1 / 12 for v in (1 / 8, 5 / 24, 3 / 40)]
    assert curriculum.probabilities().tolist() == pytest.approx(wanted)
    spread = 1 / (3 * sum(p * p for p in wanted))
    assert curriculum.metrics().values() == pytest.approx(
        {"curriculum/seen": 2 / 3, "curriculum/success": 1 / 4, "curriculum/spread": spread}
    )


def test_draws_follow_the_probabilities():
    """Of 4,000 draws each count is within 4.5 standard deviations of its expectation."""
    curriculum = BySuccess(3, settings_of(explore=0.25))
    curriculum.learn([(1, [1.0, 0.0, 1.0, 0.0]), (2, [0.0] * 4)])
    counts = Counter(drawn(curriculum, 4000))
    for index, p in enumerate(curriculum.probabilities()):
        assert abs(counts[index] - 4000 * p) < 4.5 * math.sqrt(4000 * p * (1 - p))


@pytest.mark.parametrize("attempts", [0, 32])
def test_draws_beside_prompts_in_play_keep_the_ratios_of_the_others(attempts, monkeypatch):
    """Whether they are drawn again until one is free, or looked at one by one: 1/8 to 3/40 is 5 to 3."""
    monkeypatch.setattr("openrlhf.data.curricula.ATTEMPTS", attempts)
    curriculum = BySuccess(3, settings_of(explore=0))
    curriculum.learn([(1, [1.0, 0.0, 1.0, 0.0]), (2, [0.0] * 4)])
    counts = Counter(drawn(curriculum, 4000, in_play={1: 1}))
    assert counts[1] == 0
    assert abs(counts[0] - 2500) < 4.5 * math.sqrt(4000 * 15 / 64)


def test_where_all_are_in_play_those_are_drawn_that_are_it_least():
    curriculum = BySuccess(3, settings_of())
    assert set(drawn(curriculum, 50, in_play={0: 2, 1: 1, 2: 1})) == {1, 2}


def test_levels_rise_when_they_are_mastered():
    """Level 1 is prompts 1, 2 and 5, level 2 is 0 and 4, level 3 is 3. 31 samples are not enough; 32 of which 26 are
    solved are 0.8125; level 2 falls short with 3 of 4, level 3 comes in the same round as level 2 is mastered."""
    curriculum = make("difficulty", explore=0)
    assert set(drawn(curriculum, 60)) == {1, 2, 5}
    curriculum.learn([(1, [1.0] * 15), (5, [1.0] * 10 + [0.0] * 6)])
    assert set(drawn(curriculum, 60)) == {1, 2, 5}
    curriculum.learn([(2, [1.0])])
    assert curriculum.metrics().values()["curriculum/level"] == 2
    assert set(drawn(curriculum, 60)) == {0, 4}
    curriculum.learn([(0, [1.0] * 24 + [0.0] * 8), (1, [0.0] * 32), (3, [1.0] * 32)])
    assert set(drawn(curriculum, 60)) == {0, 4}, "and the level before, now forgotten, is not come back to"
    curriculum.learn([(4, [1.0] * 32)])
    assert set(drawn(curriculum, 200)) == set(range(SIZE)), "all are mastered"
    assert curriculum.metrics().values()["curriculum/level"] == 3


def test_a_resumed_run_stays_at_its_level():
    """Level 1 was mastered, and what is known of it now would not be enough: it is not come back to."""
    curriculum = make("difficulty", explore=0)
    curriculum.learn([(1, [1.0] * 32)])
    curriculum.learn([(1, [0.0] * 32)])
    resumed = make("difficulty", explore=0)
    resumed.load_state_dict(curriculum.state_dict())
    assert set(drawn(curriculum, 60)) == set(drawn(resumed, 60)) == {0, 4}


def test_explored_draws_are_from_all_levels():
    """Explore 0.3: each of six prompts has 0.05, those of level 1 another 0.7/3."""
    probabilities = make("difficulty", explore=0.3).probabilities()
    assert probabilities.tolist() == pytest.approx([0.05 + 0.7 / 3 * (level == 1) for level in DIFFICULTY_N])


def test_solved_prompts_come_at_the_end_of_a_pass(prompts):
    """What becomes known in a pass counts from the next on. Both parts keep the order of a run without curriculum."""
    curriculum, plain = make("solved_last", threshold=0.5), stream_of(prompts, None)
    plain_order = [int(text[1:]) for text in texts(plain.take(3 * SIZE))]
    first = drawn(curriculum, 2)
    curriculum.learn([(first[0], [1.0, 0.0]), (first[1], [0.0, 0.0])])
    assert first + drawn(curriculum, SIZE - 2, first=2) == plain_order[:SIZE]
    second = plain_order[SIZE : 2 * SIZE]
    assert drawn(curriculum, SIZE, first=SIZE) == [i for i in second if i != first[0]] + [first[0]]
    curriculum.learn([(first[0], [0.0, 0.0])])
    assert drawn(curriculum, SIZE, first=2 * SIZE) == plain_order[2 * SIZE :]


# ---------------------------------------------------------------------------------------------------- in a stream


@pytest.mark.parametrize("name", CURRICULA)
def test_draws_depend_on_rounds_and_not_on_how_prompts_are_taken(prompts, name):
    whole, parts = (stream_of(prompts, name) for _ in range(2))
    for scores in ([1.0, 0.0], [0.0, 0.0], [1.0, 1.0]):
        taken = whole.take(4)
        assert list(itertools.chain(*(parts.take(n) for n in (1, 2, 0, 1)))) == taken
        known = {prompt.ordinal: scores for prompt in taken}
        whole.settle(known)
        parts.settle(dict(reversed(known.items())))


@pytest.mark.parametrize("name", ["success", "difficulty"])
def test_a_prompt_in_play_is_not_drawn_again(prompts, name):
    stream = stream_of(prompts, name, explore=0.5)
    assert sorted(texts(stream.take(SIZE))) == [f"q{i}" for i in range(SIZE)]
    stream.settle({3: [1.0]})
    assert stream.take(1)[0].text == stream.prompt_at(3).text, "the only one whose result is known"


def rounds(stream: PromptStream, resumed=lambda stream, number: stream) -> PromptStream:
    """Twelve rounds that leave prompts in play and give some back; `resumed` is what goes on after each."""
    rng, unsettled = np.random.default_rng(0), []
    for number in range(12):
        unsettled += [prompt.ordinal for prompt in stream.take(4)]
        stream.settle({ordinal: rng.integers(0, 2, 8).tolist() for ordinal in unsettled[:3]})
        unsettled = unsettled[3:]
        if number % 3 == 0:
            stream.give_back([unsettled.pop()])
        stream = resumed(stream, number)
    return stream


@pytest.mark.parametrize("name", CURRICULA)
def test_a_stream_that_is_resumed_after_every_round_draws_the_same(prompts, name, tmp_path):
    def resumed(stream, number):
        (folder := tmp_path / str(number)).mkdir()
        write_state(folder, stream.state_dict())
        fresh = stream_of(prompts, name)
        fresh.load_state_dict(read_state(folder))
        return fresh

    undisturbed, killed = rounds(stream_of(prompts, name)), rounds(stream_of(prompts, name), resumed)
    assert undisturbed.take(20) == killed.take(20)
    for ordinal in range(undisturbed.next_ordinal):
        assert undisturbed.prompt_at(ordinal) == killed.prompt_at(ordinal)


def test_a_pass_counts_as_many_draws_as_there_are_prompts(prompts):
    stream = stream_of(prompts, "success", passes=2)
    assert len(stream) == 2 * SIZE
    assert [p.ordinal for p in stream.take(5)] == [0, 1, 2, 3, 4]
    assert len(stream.take(100)) == 2 * SIZE - 5
    with pytest.raises(IndexError):
        stream.prompt_at(2 * SIZE)
    with pytest.raises(IndexError):
        stream_of(prompts, "success", passes=2).prompt_at(0)


def test_a_run_may_go_on_with_another_curriculum(prompts):
    """What was taken stays what it was; without a curriculum the order is that of the ordinals again."""
    plain = stream_of(prompts, None)
    before = texts(plain.take(4))
    chosen = stream_of(prompts, "success")
    chosen.load_state_dict(plain.state_dict())
    chosen.give_back([1])
    chosen.settle({0: [1.0], 2: [0.0]})
    assert texts([chosen.prompt_at(o) for o in range(4)]) == before
    more = texts(chosen.take(5))
    assert more[0] == before[1]
    levels = stream_of(prompts, "difficulty")
    levels.load_state_dict(chosen.state_dict())
    assert levels.metrics().values()["curriculum/seen"] == 2 / SIZE
    again = stream_of(prompts, None)
    again.load_state_dict(levels.state_dict())
    assert texts([again.prompt_at(o) for o in range(8)]) == before + more[1:]
    assert texts(again.take(4)) == texts(stream_of(prompts, None).take(12)[8:])


def test_off_is_to_the_bit_what_it_was(prompts):
    stream = stream_of(prompts, None)
    stream.take(3)
    stream.settle({0: [1.0]})
    assert stream.metrics().values() == {}
    assert {"drawn", "curriculum", "in_play"} & stream.state_dict().keys() == set()


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"input": "b"}, "it has no 'difficulty'"),
        ({"input": "b", "difficulty": "hard"}, "its 'difficulty' is no number: 'hard'"),
        ({"input": "b", "difficulty": True}, "its 'difficulty' is no number: True"),
    ],
)
def test_records_without_a_difficulty_are_named(tmp_path, record, problem):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ({"input": "a", "difficulty": 0.5}, record)))
    with pytest.raises(DataError) as caught:
        PromptSet(load_records(str(path))).difficulties("difficulty")
    assert str(caught.value).startswith(f"--data.prompt_dataset, record 2 of train.jsonl: {problem}: ")
