"""What reward functions may return, and what is said about what they may not."""

import re
import struct
from collections import deque
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.values import BadValueError
from openrlhf.rewards.base import Reward
from openrlhf.rewards.values import parse_rewards

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.lists(FLOAT32, min_size=1, max_size=8)


def float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def refused(returned, count):
    with pytest.raises(BadValueError) as caught:
        parse_rewards(returned, count=count)
    return str(caught.value)


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "generator": lambda values: (value for value in values),
    "column": lambda values: [[value] for value in values],
    "numpy float64": lambda values: np.array(values, dtype=np.float64),
    "numpy [n, 1]": lambda values: np.array(values, dtype=np.float32)[:, None],
    "tensor": lambda values: torch.tensor(values),
    "tensor [1, n]": lambda values: torch.tensor(values)[None],
    "tensor with gradient": lambda values: torch.tensor(values, requires_grad=True),
    "list of scalars": lambda values: [torch.tensor(value) for value in values],
    "list of 1-element tensors": lambda values: [torch.tensor([value]) for value in values],
    "list of numpy scalars": lambda values: [np.float32(value) for value in values],
}


@pytest.mark.parametrize("container", CONTAINERS)
@given(values=VECTORS)
def test_any_container_of_n_numbers(container, values):
    assert parse_rewards(CONTAINERS[container](values), count=len(values)).rewards == values
    assert parse_rewards({"rewards": CONTAINERS[container](values)}, count=len(values)).rewards == values


@given(values=st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=8))
def test_everything_is_rounded_to_float32(values):
    assert parse_rewards(values, count=len(values)).rewards == [float32(value) for value in values]


@given(values=VECTORS, other=st.integers(1, 8), container=st.sampled_from(sorted(CONTAINERS)))
def test_any_other_number_of_values_is_refused(values, other, container):
    if other != len(values):
        message = refused(CONTAINERS[container](values), other)
        assert f"its rewards has {len(values)} values for {other} sample" in message


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.1, float32(0.1)),
        (np.float64(0.1), float32(0.1)),
        (np.bool_(True), 1.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(1.0, dtype=torch.bfloat16), 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
    ],
)
def test_one_number_applies_to_all(scalar, expected):
    values = parse_rewards({"rewards": scalar, "scores": scalar, "extra_logs": {"x": scalar}}, count=3)
    assert values.rewards == values.scores == values.extra_logs["x"] == [expected] * 3
    assert values.repeated
    assert not parse_rewards(scalar, count=1).repeated


def test_a_one_element_list_is_not_one_number():
    """A function that looks at queries[0] only must be noticed: [r] for 4 samples is a mistake, not a short form."""
    message = refused({"rewards": [0.5]}, 4)
    assert message == (
        "its rewards has 1 values for 4 samples: [0.5] (list of 1). "
        'Expected {"rewards": 4 numbers, one per sample}, with "scores" and "extra_logs" if wanted'
    )


def test_scores_and_logs():
    values = parse_rewards(
        {"rewards": [1, 2], "scores": torch.tensor([0.0, 1.0]), "extra_logs": {"len": [3, 4], "x": 5}}, count=2
    )
    assert values.rewards == [1.0, 2.0]
    assert values.scores == [0.0, 1.0]
    assert values.extra_logs == {"len": [3.0, 4.0], "x": [5.0, 5.0]}


def test_none_is_the_same_as_left_out():
    values = parse_rewards({"rewards": [1], "scores": None, "extra_logs": None, "unknown": object()}, count=1)
    assert values.scores is None
    assert values.extra_logs == {}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "it returned None: is a `return` missing? Expected"),
        ({}, "it returned a dict without 'rewards' (with no keys). Expected"),
        ({"reward": [1, 2]}, "it returned a dict without 'rewards' (with 'reward'). Expected"),
        ({"rewards": None}, "its rewards must be one number, got None. Expected"),
        ([1, None], "its rewards[1] must be one number, got None"),
        ("1.0", "its rewards must be one number, got '1.0' (str)"),
        (["1", "2"], "its rewards[0] must be one number, got '1' (str)"),
        ([1 + 2j, 0], "its rewards[0] must be one number, got (1+2j) (complex)"),
        ({1.0, 2.0}, "its rewards must be one number, got {1.0, 2.0} (set)"),
        ([{"a": 1}, 2], "its rewards[0] must be one number, got {'a': 1} (dict)"),
        ([], "its rewards has 0 values for 2 samples: [] (list of 0)"),
        ([1.0, float("nan")], "its rewards[1] must be finite, got nan (float)"),
        (float("inf"), "its rewards must be finite, got inf (float)"),
        (torch.tensor([0.0, -torch.inf]), "its rewards[1] must be finite, got -inf (float)"),
        ([1e39, 0], "its rewards[0] is too large for a float32: 1e+39 (float)"),
        ([10**400, 0], "is too large for a float32"),
        ({"rewards": [1, 2], "scores": [1]}, "its scores has 1 values for 2 samples"),
        ({"rewards": [1, 2], "scores": [1, float("nan")]}, "its scores[1] must be finite, got nan"),
        (
            {"rewards": [1, 2], "extra_logs": [1, 2]},
            "its 'extra_logs' must be a dict of numbers, got [1, 2] (list of 2)",
        ),
        ({"rewards": [1, 2], "extra_logs": {"x": [1]}}, "its extra_logs['x'] has 1 values for 2 samples"),
        ({"rewards": [1, 2], "extra_logs": {"x": "y"}}, "its extra_logs['x'] must be one number, got 'y' (str)"),
        (object(), "its rewards must be one number, got <object object at"),
    ],
)
def test_what_cannot_be_used(returned, message):
    assert message in refused(returned, 2)


def test_long_values_are_cut():
    assert len(refused(list(range(10_000)), 2)) < 400


def test_rewards_by_name_are_a_weighted_sum():
    """1·1 + ½·0.5 = 1.25 and 0 + ½·1 = 0.5; without weights 1.5 and 1."""
    parts = {"right": [1, 0], "format": [0.5, 1.0]}
    found = parse_rewards({"rewards": parts, "weights": {"format": 0.5}, "scores": [1, 0]}, count=2)
    assert (found.rewards, found.scores) == ([1.25, 0.5], [1, 0])
    assert (found.parts, found.weights) == ({"right": [1, 0], "format": [0.5, 1.0]}, {"format": 0.5})
    assert parse_rewards({"rewards": parts}, count=2).rewards == [1.5, 1.0]
    judged = Reward.each(found)
    assert judged[0].parts == (("right", 1, 1), ("format", 0.5, 0.5))
    assert judged[0].extra_logs == {"reward_right": 1, "reward_format": 0.5}
    assert judged[1].size == 0.5


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"rewards": {}}, "its 'rewards' is an empty dict"),
        ({"rewards": {"right": [1]}}, "rewards['right'] has 1 values for 2 samples"),
        ({"rewards": {"right": [1, 2]}, "weights": {"wrong": 1}}, "its 'weights' must be numbers by the names in"),
        ({"rewards": {"right": [1, 2]}, "weights": [1]}, "its 'weights' must be numbers by the names in"),
        ({"rewards": {"right": [1, 2]}, "weights": {"right": "1"}}, "weights['right']"),
        ({"rewards": {"a": [3e38, 0], "b": [3e38, 0]}}, "the sum of its rewards"),
    ],
)
def test_rewards_by_name_that_cannot_be_read(returned, says):
    with pytest.raises(BadValueError, match=re.escape(says)):
        parse_rewards(returned, count=2)
