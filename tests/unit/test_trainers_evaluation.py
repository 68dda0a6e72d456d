"""What evaluations report, and which one was the best."""

import json
from math import comb

import pytest
import torch

from openrlhf.algorithms.reduction import pass_at_k
from openrlhf.config import ConfigError
from openrlhf.trainers.evaluation import BestMetric, evaluation_metrics, evaluation_names
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory


def make_group(ordinal: int, source: str, scores: list[float | None], *, length: int = 2, truncated: int = 0) -> Group:
    """Samples of `length` action tokens, the first `truncated` of them cut; rewards are ten times the scores."""

    def member(sample: int, score: float | None) -> Trajectory:
        key = SampleKey(ordinal, sample)
        if score is None:
            return Trajectory(key=key, segments=(), outcome=Outcome.FAILED, error="no")
        tokens = 1 + length
        segment = Segment(
            token_ids=torch.arange(tokens),
            action_mask=torch.arange(tokens) > 0,
            rollout_logprobs=None,
            versions=torch.zeros(tokens, dtype=torch.int32),
            turn_rewards=torch.zeros(tokens),
        )
        outcome = Outcome.TRUNCATED if sample < truncated else Outcome.FINISHED
        return Trajectory(key=key, segments=(segment,), outcome=outcome, reward=10 * score, score=score)

    prompt = Prompt(ordinal=ordinal, text="q", datasource=source)
    return Group(prompt=prompt, trajectories=tuple(member(i, score) for i, score in enumerate(scores)))


def test_evaluation_measures_each_source_and_all_together():
    """math: prompts with scores 1,0 and 0,0: pass1 1/4, pass@2 (1 + 0)/2, mean reward 10 · 1/4, length 2.
    code: one prompt with scores 0.5,0.5: pass1 1/2, pass@2 0 (no score of 1), mean reward 5, length 5, one of 2 cut.
    Together: (4 · 2 + 2 · 5) / 6 = 3 tokens, 1/6 cut."""
    groups = [
        make_group(0, "math", [1.0, 0.0]),
        make_group(1, "code", [0.5, 0.5], length=5, truncated=1),
        make_group(2, "math", [0.0, 0.0]),
    ]
    assert evaluation_metrics(groups, k=2).values() == pytest.approx(
        {
            "eval_math_pass1": 0.25,
            "eval_math_pass2": 0.5,
            "eval_math_mean": 2.5,
            "eval_math_response_length_mean": 2.0,
            "eval_math_truncated_rate": 0.0,
            "eval_code_pass1": 0.5,
            "eval_code_pass2": 0.0,
            "eval_code_mean": 5.0,
            "eval_code_response_length_mean": 5.0,
            "eval_code_truncated_rate": 0.5,
            "eval_response_length_mean": 3.0,
            "eval_truncated_rate": 1 / 6,
            "eval_num_samples": 6,
            "eval_failed": 0,
        }
    )


def test_failed_samples_are_counted_and_enter_no_number():
    """math: 1 and a failure: pass1 is 1 over one sample, and one sample cannot tell pass@2. code: nothing but failures,
    so no number at all."""
    values = evaluation_metrics([make_group(0, "math", [1.0, None]), make_group(1, "code", [None, None])], k=2).values()
    assert values["eval_math_pass1"] == 1.0
    assert (values["eval_num_samples"], values["eval_failed"]) == (1, 3)
    assert "eval_math_pass2" not in values
    assert not [name for name in values if "code" in name]


def test_evaluation_with_one_sample_has_only_pass_at_1():
    values = evaluation_metrics([make_group(0, "math", [1.0])], k=1).values()
    assert [name for name in values if "pass" in name] == ["eval_math_pass1"]


def test_pass_at_k_counts_the_draws_that_hit():
    """Of the 10 ways to draw 2 from 5 with 2 right, 3 miss both: 1 − 3/10. As counted one by one."""
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    right = [True, True, False, False, False]
    draws = [(a, b) for a in range(5) for b in range(a)]
    assert len(draws) == comb(5, 2)
    assert sum(right[a] or right[b] for a, b in draws) / len(draws) == pytest.approx(pass_at_k(5, 2, 2))


# ---------------------------------------------------------------------------------------------------------- best


def test_the_first_pass1_by_name_is_followed_and_the_first_of_equals_stays():
    best = BestMetric()
    series = [{"eval_b_pass1": 0.9, "eval_a_pass1": value, "eval_a_mean": 9.0} for value in (0.2, 0.4, 0.4, 0.3, 0.5)]
    assert [best.update(step, values) for step, values in enumerate(series)] == [True, True, False, False, True]
    assert (best.key, best.value, best.step) == ("eval_a_pass1", 0.5, 4)


def test_a_named_metric_is_followed_and_none_turns_it_off():
    named, off = BestMetric("eval_a_mean"), BestMetric("none")
    values = {"eval_a_pass1": 0.5, "eval_a_mean": -3.0}
    assert named.update(1, values)
    assert (named.key, named.value) == ("eval_a_mean", -3.0)
    assert not off.update(1, values)
    assert (off.key, off.value) == (None, None)


def test_an_unknown_metric_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        BestMetric("eval_pass1").update(0, {"eval_b_pass1": 0.5, "eval_a_pass1": 0.5})
    assert str(caught.value) == (
        "--ckpt.best_metric_key eval_pass1: evaluations have no such metric (did you mean eval_b_pass1?); they have "
        "eval_a_pass1, eval_b_pass1"
    )


@pytest.mark.parametrize("k", [1, 2])
def test_evaluation_metric_names_are_known_before_it_runs(k):
    groups = [make_group(0, "math", [1.0] * k), make_group(1, "code", [0.5] * k)]
    assert sorted(evaluation_names(["math", "code"], k=k)) == sorted(evaluation_metrics(groups, k=k).values())


def test_a_typo_in_the_metric_is_found_before_the_first_evaluation():
    names = evaluation_names(["math"], k=1)
    for wanted in ("", "none", "eval_math_pass1", "eval_num_samples"):
        BestMetric(wanted).require(names)
    with pytest.raises(ConfigError) as caught:
        BestMetric("eval_math_pas1").require(names)
    assert str(caught.value) == (
        "--ckpt.best_metric_key eval_math_pas1: evaluations have no such metric (did you mean eval_math_pass1?); they "
        "have eval_failed, eval_math_mean, eval_math_pass1, eval_math_response_length_mean, eval_math_truncated_rate, "
        "eval_num_samples, eval_response_length_mean, eval_truncated_rate"
    )


def test_an_evaluation_that_could_not_measure_it_is_not_the_best():
    best = BestMetric()
    assert not best.update(0, {"eval_failed": 4.0})
    assert best.update(1, {"eval_a_pass1": 0.1})
    assert not best.update(2, {"eval_b_pass1": 0.9})
    assert not best.update(3, {"eval_a_pass1": float("nan")})
    assert not best.update(4, {"eval_a_pass1": float("inf")})
    assert (best.value, best.step) == (0.1, 1)


def test_the_best_survives_a_restart_unless_another_metric_is_wanted(caplog):
    best = BestMetric()
    best.update(3, {"eval_a_pass1": 0.5, "eval_a_mean": 0.5})
    state = json.loads(json.dumps(best.state_dict()))
    same, other = BestMetric(), BestMetric("eval_a_mean")
    same.load_state_dict(state)
    assert (same.key, same.value, same.step) == ("eval_a_pass1", 0.5, 3)
    assert not same.update(4, {"eval_a_pass1": 0.4})
    other.load_state_dict(state)
    assert "the checkpoint's best is that of eval_a_pass1" in caplog.text
    assert other.update(4, {"eval_a_mean": 0.1})
