"""The records that a world and a run exchange: how they are read, and what they refuse."""

import json

import pytest

from openrlhf.worlds.base import (
    DrivenStart,
    GameStart,
    GameTurn,
    Outcome,
    Start,
    Turn,
    WorldError,
    WorldSettings,
    parse_options,
    parse_tasks,
    start_of_json,
)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("", ()),
        ("chain_sum", (("chain_sum", 1.0),)),
        ("chain_sum,gcd:2", (("chain_sum", 1.0), ("gcd", 2.0))),
        (" a : 0.5 , b ", (("a ", 0.5), ("b", 1.0))),
        ("ALE/Pong:v5", (("ALE/Pong:v5", 1.0),)),
        ("ALE/Pong:v5:3", (("ALE/Pong:v5", 3.0),)),
    ],
)
def test_tasks_are_names_with_weights(text, tasks):
    assert parse_tasks(text) == tuple((name.strip(), weight) for name, weight in tasks)


@pytest.mark.parametrize(("text", "why"), [("a,a", "named twice"), ("a:0", "positive"), ("a:-1", "positive")])
def test_tasks_that_cannot_be_drawn_are_refused(text, why):
    with pytest.raises(WorldError, match=why):
        parse_tasks(text)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("rows=4,slippery=false,name=lake", {"rows": 4, "slippery": False, "name": "lake"}),
        ('sizes=[4,8],goal={"a":[1,2]},text="a,b"', {"sizes": [4, 8], "goal": {"a": [1, 2]}, "text": "a,b"}),
        ("url=http://localhost:8/x?a=b", {"url": "http://localhost:8/x?a=b"}),
        ("limit=NaN", {"limit": "NaN"}),
    ],
)
def test_options_are_json_or_text(text, options):
    assert parse_options(text) == options


def test_an_option_without_a_value_is_refused():
    with pytest.raises(WorldError, match="key=value"):
        parse_options("rows")


def test_an_option_has_the_type_of_its_default():
    settings = WorldSettings(options={"rows": 4, "penalty": 1, "render": "x"})
    assert settings.option("rows", 8) == 4
    assert settings.option("penalty", 0.5) == 1.0
    assert settings.option("columns", 8) == 8
    with pytest.raises(WorldError, match="expected a bool"):
        settings.option("rows", False)
    with pytest.raises(WorldError, match="there are ansi, text"):
        settings.option("render", "ansi", choices=("ansi", "text"))
    with pytest.raises(WorldError, match="no such option; it has rows, render"):
        settings.check_options(("rows", "render"))


def test_records_travel_as_json():
    settings = WorldSettings(tasks=(("a", 2.0),), options={"rows": [1]}, seed=3)
    start = Start([{"role": "user", "content": "?"}], tools=[{"type": "function"}])
    turn = Turn([{"role": "user", "content": "no"}], reward=0.5, score=0.25, logs={"steps": 1})
    for record in (settings, start, turn):
        assert type(record).of_json(json.loads(json.dumps(record.as_json()))) == record


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Start([]), "at least one message"),
        (lambda: Start("hello"), "must be a list of messages"),
        (lambda: Start([{"role": "bot", "content": "?"}]), "system|user"),
        (lambda: Turn(), "must have a message"),
        (lambda: Turn(done=True, reward=float("nan")), "reward of a turn must be a finite number"),
        (lambda: Turn(done=True, logs={"steps": "4"}), "steps of a turn must be a finite number"),
    ],
)
def test_records_check_themselves(make, why):
    with pytest.raises(ValueError, match=why):
        make()


ASKED = [{"role": "user", "content": "Your move."}]


@pytest.mark.parametrize(
    "start",
    [
        Start([{"role": "user", "content": "hi"}], [{"type": "function"}]),
        GameStart(["a", "b"], GameTurn("b", ASKED)),
        DrivenStart(),
    ],
)
def test_beginnings_of_each_kind_survive_json(start):
    assert start_of_json(json.loads(json.dumps(start.as_json()))) == start


def test_the_end_of_a_game_has_numbers_for_each_agent_and_survives_json():
    turn = GameTurn("", [], {"a": 1, "b": -1}, scores={"a": 1.0}, logs={"b": {"invalid": 1}})
    assert GameTurn.of_json(json.loads(json.dumps(turn.as_json()))) == turn
    outcome = Outcome(0.5, logs={"turns": 3})
    assert Outcome.of_json(json.loads(json.dumps(outcome.as_json()))) == outcome


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: GameTurn("a"), "messages for the agent"),
        (lambda: GameTurn(messages=ASKED), "messages for the agent"),
        (lambda: GameTurn(rewards={"a": float("nan")}), "the reward of a must be a finite number"),
        (lambda: GameTurn(logs={"a": {"turns": "x"}}), "turns of a must be a finite number, got 'x'"),
        (lambda: GameStart(["a"], GameTurn("a", ASKED)), "two or more agents"),
        (lambda: GameStart(["a", "a"], GameTurn("a", ASKED)), "two or more agents"),
        (lambda: GameStart(["a", "b"], GameTurn("c", ASKED)), "the turn of a, b, not of 'c'"),
        (lambda: Outcome(float("inf")), "reward of an outcome"),
    ],
)
def test_games_and_outcomes_that_say_nothing_sensible_are_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
