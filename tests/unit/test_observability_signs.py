"""Signs of trouble in series made by hand: each is told once for as long as it lasts; healthy runs are left in peace."""

import json
import math
from collections.abc import Sequence

import pytest

from openrlhf.observability.metrics import Metrics
from openrlhf.observability.signs import RunWarnings, Signs, read_warnings


def told(**series: Sequence[float]) -> list[tuple[int, str]]:
    """(step, kind) of every sign of metrics given step by step, the first step being 1."""
    signs = Signs()
    steps = range(max(map(len, series.values())))
    return [
        (step + 1, sign.kind)
        for step in steps
        for sign in signs.after(step + 1, {name: values[step] for name, values in series.items()})
    ]


LEARNING = [0.1 + 0.8 * (1 - math.exp(-step / 10)) + 0.05 * (-1) ** step for step in range(40)]
STUCK = [0.3] * 40


def test_equal_groups_are_told_at_the_fifth_step_and_explain_the_zero_gradient():
    assert told(group_reward_std=[0.2] * 3 + [0.0] * 12, actor_grad_norm=[1.0] * 3 + [0.0] * 12) == [
        (8, "equal groups")
    ]


def test_a_zero_gradient_alone_is_told():
    assert told(actor_grad_norm=[0.5, *[0.0] * 9], group_reward_std=[0.4] * 10) == [(6, "zero gradient")]
    assert told(grad_norm=[0.0] * 5) == [(5, "zero gradient")]


def test_trouble_that_comes_back_is_told_again_and_a_flicker_is_not():
    """A run of five is told at its fifth step. One calm step breaks it, and the sign is gone for five steps, which is
    a flicker; six calm steps and four of the next five make ten, and the fifth is told."""
    assert told(group_reward_std=[0.0] * 7 + [0.1] + [0.0] * 7) == [(5, "equal groups")]
    assert told(group_reward_std=[0.0] * 7 + [0.1] * 6 + [0.0] * 7) == [(5, "equal groups"), (18, "equal groups")]


@pytest.mark.parametrize("score", [STUCK, LEARNING], ids=["stuck", "learning"])
@pytest.mark.parametrize(
    ("kind", "name", "series"),
    [
        ("entropy collapse", "entropy_loss", [1.0] * 10 + [0.01] * 30),
        ("entropy grows", "entropy_loss", [0.5 + 0.1 * step for step in range(40)]),
        ("length grows", "response_length", [100.0 * 1.05**step for step in range(40)]),
        ("length collapse", "response_length", [100.0] * 10 + [4.0] * 30),
    ],
)
def test_entropy_and_length_running_away_are_trouble_where_the_score_stands_still(kind, name, series, score):
    expected = [kind] if score is STUCK else []
    assert [found for _, found in told(**{name: series, "score": score})] == expected


def test_a_sure_policy_that_solves_its_task_is_no_collapse():
    assert told(entropy_loss=[1.0] * 10 + [0.001] * 30, score=[0.97] * 40) == []


def test_a_reward_that_falls_for_long_is_told_and_one_that_varies_is_not():
    rise, fall = [0.02 * step for step in range(20)], [0.4 - 0.01 * step for step in range(40)]
    # 0.02 up per step, 0.01 down: the best ten steps are 3 before the peak at step 21, the peak and 6 after it. They
    # end at step 27, and 20 steps later the fall is long enough.
    assert told(reward=rise + fall) == [(47, "reward falls")]
    assert told(reward=[0.4 + 0.1 * (-1) ** step for step in range(80)]) == []
    assert told(reward=[0.5] * 80) == []
    assert told(reward=LEARNING) == []


def test_thresholds_hold_for_three_steps():
    assert told(truncated=[0.95] * 3) == [(3, "responses cut")]
    assert told(ppo_clip_ratio=[0.4] * 2 + [0.1] + [0.4] * 3) == [(6, "large updates")]
    assert told(ppo_kl=[-0.2] * 3) == [(3, "large updates")]
    assert told(logprobs_diff=[0.2] * 3) == [(3, "engine differs")]
    assert told(logprobs_diff=[0.2, math.nan, 0.2, math.nan, 0.2, math.nan]) == [(5, "engine differs")]
    assert told(logprobs_diff=[0.2, 0.2, 0.05, 0.2, 0.2]) == []
    assert told(kl=[0.01] * 10 + [0.8] * 5) == [(14, "kl grows")]  # the mean of 0.01, 0.8, 0.8, 0.8, 0.8 is 0.642
    assert told(**{"rollout/failed": [3.0] * 3, "rollout/num_samples": [9.0] * 3}) == [(3, "failures")]
    assert told(**{"rollout/failed": [1.0] * 9, "rollout/num_samples": [9.0] * 9}) == []


def test_numbers_that_are_missing_or_not_finite_are_no_sign():
    assert told(actor_grad_norm=[math.nan] * 9, group_reward_std=[math.inf] * 9) == []
    signs = Signs()
    assert [signs.after(step, {}) for step in range(1, 9)] == [[]] * 8


def test_a_step_taken_again_replaces_what_was_after_the_checkpoint():
    """Four steps with equal groups, back to step 2, and three more: the fifth in a row is the new step 5."""
    signs = Signs()
    for step in range(1, 5):
        assert signs.after(step, {"group_reward_std": 0.0}) == []
    assert [len(signs.after(step, {"group_reward_std": 0.0})) for step in (3, 4, 5, 6)] == [0, 0, 1, 0]


def test_warnings_are_said_and_kept(tmp_path):
    said, path = [], tmp_path / "warnings.jsonl"
    earlier = [{"step": step, "kind": "train", "group_reward_std": 0.0} for step in range(1, 5)]
    warnings = RunWarnings(path, said.append, earlier=earlier)
    warnings.after(5, {"group_reward_std": 0.0}, ["left out"])
    warnings.close()
    assert said[0] == "warning: step 5: left out"
    assert said[1].startswith("warning: step 5: for 5 steps all samples of every prompt have earned the same")
    assert [(w["step"], w["kind"]) for w in read_warnings(path)] == [(5, "numbers"), (5, "equal groups")]


def test_warnings_of_steps_taken_again_are_replaced(tmp_path):
    path = tmp_path / "warnings.jsonl"
    records = [{"step": step, "kind": "numbers", "text": str(n)} for n, step in enumerate([3, 7, 9, 5, 5])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 6, "ki')
    assert [(w["step"], w["text"]) for w in read_warnings(path)] == [(3, "0"), (5, "3"), (5, "4")]


def test_notes_travel_with_metrics_once_each():
    first, second = Metrics(), Metrics()
    first.note("a")
    second.note("a")
    second.note("b")
    assert Metrics.merged([first, second]).notes == ["a", "b"]
