"""The ledger of what was trained: every sample of every step, in a line that stays short."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rollout_collector import make_group

from openrlhf.observability.ledger import TrainedLedger, numbers, ranges, read_trained

A, B = (1.0, 0.0), (1.0, None)
"""Two judged samples; one, and one that failed."""


def write(path: Path, *steps) -> None:
    """Steps of (number, {ordinal: scores}, prompts turned away)."""
    ledger = TrainedLedger(path)
    for step, groups, rejected_prompts in steps:
        made = [make_group(*scores, ordinal=ordinal) for ordinal, scores in groups.items()]
        ledger.write(step, made, rejected_prompts=rejected_prompts)
    ledger.close()


def test_a_step_is_one_line_that_says_who_was_trained_who_failed_and_who_was_turned_away(tmp_path):
    path = tmp_path / "trained.jsonl"
    write(path, (1, {4: A, 5: A, 9: A, 7: B}, [8, 6]))
    assert json.loads(path.read_text()) == {
        "step": 1,
        "trained": {"0-1": "4-5,9", "0": "7"},
        "failed": {"1": "7"},
        "turned_away": "6,8",
    }
    (step,) = read_trained(path)
    assert step.trained == [(4, 0), (4, 1), (5, 0), (5, 1), (7, 0), (9, 0), (9, 1)]
    assert step.failed == [(7, 1)]
    assert step.rejected_prompts == [6, 8]


def test_steps_that_a_resumed_run_takes_again_replace_the_first(tmp_path):
    """Killed in step 4, continued from the checkpoint of step 2; the last line was cut off."""
    path = tmp_path / "trained.jsonl"
    write(path, (1, {0: A}, []), (2, {1: A}, []), (3, {2: A}, [3]))
    with path.open("a") as file:
        file.write('{"step": 4, "trained": {"0-1')
    write(path, (3, {4: A}, []), (4, {2: A}, []))
    assert [(s.step, {p for p, _ in s.trained}, s.rejected_prompts) for s in read_trained(path)] == [
        (1, {0}, []),
        (2, {1}, []),
        (3, {4}, []),
        (4, {2}, []),
    ]


def test_a_large_step_is_a_short_line(tmp_path):
    path = tmp_path / "trained.jsonl"
    write(path, (1, dict.fromkeys(range(1000), A), []))
    assert len(path.read_text()) < 100
    assert len(read_trained(path)[0].trained) == 2000


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_the_numbers(values):
    assert numbers(ranges(values)) == sorted(values)


@pytest.mark.parametrize(("values", "text"), [([], ""), ([7], "7"), ([3, 1, 2], "1-3"), ([0, 1, 5, 8, 9], "0-1,5,8-9")])
def test_ranges_by_hand(values, text):
    assert ranges(values) == text
