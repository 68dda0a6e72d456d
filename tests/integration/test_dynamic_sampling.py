"""Dynamic sampling in the real loop: real engine, real reward host."""

import json

from openrlhf.observability.loggers import read_metrics, without_times

REWARD = """
import time

def reward_func(queries, prompts, labels):
    time.sleep({seconds})
    scores = [float(sum(map(ord, query[len(prompts[0]):])) % 3 == 0) for query in queries]
    return {{"rewards": [2 * score - 1 for score in scores], "scores": scores}}
"""


def test_filtered_rounds_are_the_same_however_long_rewards_take(cli, tmp_path):
    """A score of 1 in about a third of all answers: some groups of 2 have one right sample, and only these are trained
    on. 8 prompts cannot fill the 4 planned rounds of 2, so the run ends early, and is a whole run all the same."""
    histories = []
    for name, seconds in (("fast", "0"), ("slow", "0.02 * (int(prompts[0][0]) % 5)")):
        reward = tmp_path / f"{name}.py"
        reward.write_text(REWARD.format(seconds=seconds))
        ran = cli(
            algo__dynamic_filtering_enable=True,
            rollout__batch_size=2,
            rollout__vllm_generate_batch_size=3,
            train__batch_size=4,
            reward__remote_url=reward,
            logger__run_dir=tmp_path / name,
            ckpt__output_dir=tmp_path / f"{name}-model",
        )
        assert ran.rc == 0
        assert "of at most 4: the prompts ran out" in ran.err
        assert (tmp_path / f"{name}-model" / "config.json").exists()
        rollouts = [json.loads(line) for line in (tmp_path / name / "rollouts.jsonl").read_text().splitlines()]
        histories.append(([without_times(r) for r in read_metrics(tmp_path / name / "metrics.jsonl")], rollouts))
    assert histories[0] == histories[1]
    metrics, _ = histories[0]
    assert sum(m["rollout/judged_groups"] for m in metrics) <= 8
    assert sum(m["rollout/rejected_groups"] for m in metrics) > 0
    assert all(m["score"] == 0.5 and m["reward"] == 0.0 for m in metrics)


def test_when_no_group_is_worth_training_on_the_run_ends_with_an_error(cli):
    """The untrained model never sorts: all scores are 0, and a run that trains nothing has failed."""
    ran = cli(algo__dynamic_filtering_enable=True)
    assert ran.rc == 1
    assert (
        "error: not one group was trained on: the prompts ran out; --algo.dynamic_filtering_enable accepted" in ran.err
    )
    assert "8 of 8 judged groups" in ran.err
    assert "Mean scores were from 0 to 0, mean rewards from 0 to 0" in ran.err
    assert not [record for record in ran.metrics if record["kind"] == "train"]
