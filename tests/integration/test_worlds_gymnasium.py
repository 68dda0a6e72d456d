"""Gymnasium 1.4.0 as text: what is seen, how actions are read, what is earned, and two steps of training."""

import asyncio

import pytest
from installed_worlds import install_world
from patience import patience

from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import find_python
from openrlhf.worlds.gymnasium import find_action
from openrlhf.worlds.process import WorldPlan, WorldRefusal

NAME = "openrlhf.worlds.gymnasium"
WAY = ["[down]", "[down]", "[right]", "[right]", "[down]", "[right]"]
STILL = {"FrozenLake-v1.is_slippery": False}


@pytest.fixture(scope="module", autouse=True)
def installed():
    install_world(NAME)


@pytest.fixture
def world():
    made = []

    def make(*tasks, **options):
        settings = WorldSettings(tuple((name, 1.0) for name in tasks), options, seed=3)
        made.append(WorldPlan(NAME, settings, find_python(NAME), patience(60.0)).process())
        return made[-1]

    yield make
    for process in made:
        process.close()


def play(world, *actions, record=None, seed=0):
    """What is seen first, and the turns until an end."""

    async def steps():
        label = (record or next(iter(world.records(count=1, seed=1))))["label"]
        episode = await world.begin(label, seed=seed)
        turns = []
        for action in actions:
            turns.append(await episode.step({"role": "assistant", "content": action, "text": action}))
            if turns[-1].done:
                break
        await episode.close()
        return episode.start.messages[0]["content"], turns

    return asyncio.run(steps())


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("I go [right].", 2),
        ("[left] is a hole, so [ Down ]", 1),
        ("[down] because of [the ice]", 1),  # the last that is an action
        ("right.", 2),
        ("[3]", 3),
        ("I go right", None),
        ("[jump]", None),
        ("", None),
    ],
)
def test_an_action_is_the_last_one_in_brackets(said, found):
    assert find_action(said, ["left", "down", "right", "up"]) == found


def test_a_lake_is_crossed(world):
    """The map of Gymnasium: down, down, right, right, down, right goes around its holes."""
    first, turns = play(world("FrozenLake-v1", **STILL), *WAY)
    assert "P F F F\nF H F H\nF F F H\nH F F G" in first
    assert "S F F F\nP H F H\nF F F H\nH F F G" in turns[0].messages[0]["content"]
    assert [turn.reward for turn in turns] == [0, 0, 0, 0, 0, 1]
    assert [turn.done for turn in turns] == [False] * 5 + [True]
    assert turns[-1].logs == {"env_steps": 6, "unread_actions": 0}


def test_a_hole_is_the_end(world):
    _, turns = play(world("FrozenLake-v1", **STILL), "[right]", "[down]", "[down]")
    assert [(turn.reward, turn.done) for turn in turns] == [(0, False), (0, True)]


def test_an_answer_without_an_action_is_no_step(world):
    _, turns = play(world("FrozenLake-v1", penalty=-0.25, **STILL), "hm", "[down]")
    assert turns[0].reward == -0.25
    assert "[left], [down], [right], [up]" in turns[0].messages[0]["content"]
    assert turns[1].logs == {"env_steps": 1, "unread_actions": 1}


def test_steps_have_a_limit(world):
    _, turns = play(world("FrozenLake-v1", steps=2, **STILL), "[up]", "[up]", "[up]")
    assert [turn.done for turn in turns] == [False, True]


def test_answers_without_an_action_are_turns_too(world):
    _, turns = play(world("FrozenLake-v1", steps=3, **STILL), "hm", "[up]", "[up]", "[up]")
    assert [turn.done for turn in turns] == [False, False, True]


def test_lakes_are_made_for_each_record(world):
    made = world("FrozenLake-v1", lake=5)
    records = list(made.records(count=5, seed=2))
    assert list(world("FrozenLake-v1", lake=5).records(count=5, seed=2)) == records
    seen = {record["input"][0]["content"] for record in records}
    assert len(seen) == 5
    for record in records:
        assert play(made, record=record)[0] == record["input"][0]["content"]


def test_samples_slip_by_their_own_chance(world):
    """Both read the same first message; the ice throws them where it will."""
    made = world("FrozenLake-v1")
    runs = [play(made, *["[right]"] * 8, seed=seed) for seed in (1, 1, 2, 3, 4)]
    assert len({first for first, _ in runs}) == 1
    walks = [[turn.as_json()["messages"] for turn in turns] for _, turns in runs]
    assert walks[0] == walks[1]
    assert any(walk != walks[0] for walk in walks[2:])


def test_cliffs_cost(world):
    first, turns = play(world("CliffWalking-v1"), "[right]", "[up]", *["[right]"] * 11, "[down]")
    assert "P C C C C C C C C C C G" in first
    assert [turn.reward for turn in turns[:3]] == [-100, -1, -1]
    assert (turns[-1].done, turns[-1].score) == (True, 1.0)


def test_a_taxi_is_shown_with_its_passenger(world):
    first, turns = play(world("Taxi-v4"), "[pickup]")
    assert first.count("T") >= 1
    assert "The passenger is at " in first
    assert turns[0].reward in (-10.0, -1.0)
    assert turns[0].score == 0.0


def test_cards_and_poles(world):
    cards, (stand,) = play(world("Blackjack-v1"), "[stick]")
    assert "Your hand counts" in cards
    assert stand.done
    assert stand.score == (stand.reward + 1) / 2
    pole, turns = play(world("CartPole-v1"), *["[left]"] * 30)
    assert "pole angle" in pole
    assert turns[-1].done
    assert 8 <= len(turns) < 15  # pushed to one side, it falls
    assert sum(turn.reward for turn in turns) == len(turns)


def test_environments_without_words_are_shown_as_numbers(world):
    first, turns = play(world("MountainCar-v0"), "[2]", "[left]")
    assert "You observe [-0." in first
    assert "[0], [1], [2]" in first
    assert [turn.logs["unread_actions"] for turn in turns] == [0, 1]


@pytest.mark.parametrize(
    ("tasks", "options", "why"),
    [
        (["FrozenLak-v1"], {}, "Gymnasium cannot make FrozenLak-v1.*FrozenLake-v1"),
        (["Pendulum-v1"], {}, "text plays discrete ones alone"),
        (["LunarLander-v3"], {}, "needs more than Gymnasium itself"),
        (["FrozenLake-v1"], {"slippery": False}, "no such option; it has steps, lake"),
        (["FrozenLake-v1"], {"FrozenLake-v1.ice": 3}, "Gymnasium cannot make FrozenLake-v1"),
        (["FrozenLake-v1"], {"steps": 0}, "expected a number of turns"),
    ],
)
def test_what_cannot_be_played_is_refused(world, tasks, options, why):
    with pytest.raises(WorldRefusal, match=why):
        world(*tasks, **options).start_now()


def test_two_steps_of_training(cli):
    ran = cli(
        "--train.agent_func_path", NAME, "--world.tasks", "FrozenLake-v1,CartPole-v1",
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=1024,
        world__samples=8, world__options="FrozenLake-v1.is_slippery=false,brief=true", max_steps=2,
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 and step["unread_actions"] > 0 for step in steps)
    assert steps[0]["logprobs_diff"] < 1e-4
