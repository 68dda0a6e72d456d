"""The records that a world and a run exchange: how they are read, and what they refuse."""

import json

import pytest

from openrlhf.worlds.base import Start, Turn, WorldError, WorldSettings, parse_options, parse_tasks


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
