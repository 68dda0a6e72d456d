"""The demo's task is a fair one: enough problems, none on both sides, no answer that pays off blindly."""

from collections import Counter

import pytest

from openrlhf.cli.demo import MAX_STEPS, rl_flags
from openrlhf.config import parse
from openrlhf.config.unbuilt import refuse_unbuilt
from openrlhf.demo.model import make_model, make_tokenizer
from openrlhf.demo.reward import reward_func
from openrlhf.demo.task import make_task


@pytest.mark.parametrize("seed", range(4))
def test_problems_are_many_and_disjoint_and_no_answer_is_common(seed):
    task = make_task(seed=seed)
    assert len(set(task.train)) == len(task.train) >= 1000
    assert not set(task.train) & set(task.held_out)
    assert not {p.answer for p in task.train} & {p.answer for p in task.held_out}
    for side in (task.train, task.held_out):
        assert Counter(p.answer for p in side).most_common(1)[0][1] <= 0.1 * len(side)


def test_only_the_right_order_with_an_end_is_rewarded():
    queries = ["73914>13479<eos>", "73914>13479", "73914>13497<eos>", "73914>134799"]
    result = reward_func(queries, ["73914>"] * 4, ["13479"] * 4)
    assert result["rewards"] == result["scores"] == [1.0, 0.0, 0.0, 0.0]


def test_the_tokenizer_is_one_token_per_character_and_round_trips():
    tokenizer = make_tokenizer()
    ids = tokenizer("73914>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == "73914><eos>"


def test_the_model_has_one_to_three_million_parameters():
    assert 1e6 <= make_model(make_tokenizer(), seed=0).num_parameters() <= 3e6


def test_its_flags_are_a_users_flags(tmp_path):
    flags = rl_flags(tmp_path, seed=0, steps=MAX_STEPS)
    config = parse("train_ppo_ray", [part for name, value in flags.items() for part in (f"--{name}", str(value))])
    refuse_unbuilt(config)
    assert config.data.max_samples <= len(make_task(seed=0).train)
