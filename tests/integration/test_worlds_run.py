"""Runs in a user's world: its records as prompts, a process that dies on the way, and the commands beside a run."""

import json

import pytest
from world_files import counting_world

from openrlhf.checking.workbench import write_tiny_model
from openrlhf.cli.main import main


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a run in a world, with a model that has a chat template and a token for each byte."""
    model = tmp_path_factory.mktemp("model")
    write_tiny_model(model)
    none = dict.fromkeys(("data__prompt_dataset", "data__label_key", "reward__remote_url"), "none")
    return {**none, "actor__model_name_or_path": model, "data__max_len": 160}


def test_records_are_prompts_and_held_out_ones_are_others(cli, flags, tmp_path):
    world = counting_world(tmp_path)
    ran = cli(
        "--train.agent_func_path", world, "--world.samples", "8", "--eval.dataset", world, "--eval.steps", "2",
        "--world.eval_samples", "6", "--world.tasks", "count", "--world.processes", "2", **flags,
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    assert [record["kind"] for record in ran.metrics].count("train") == 2
    (evaluated,) = (record for record in ran.metrics if record["kind"] == "eval")
    assert "eval_count_pass1" in evaluated
    rollouts = [json.loads(line) for line in (ran.run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert all("Say " in rollout["prompt"] for rollout in rollouts)
    assert all(len([turn for turn in rollout["turns"] if turn["action"]]) == 2 for rollout in rollouts)


def test_a_world_that_dies_costs_one_attempt(cli, flags, tmp_path):
    """The process dies once in an episode of the third prompt, and for good in every one of the fifth."""
    labels = [{"say": "abcd"[i % 4], "index": i} for i in range(8)]
    labels[2] |= {"misdeed": "crash", "once": str(tmp_path / "died")}
    labels[4] |= {"misdeed": "refuse"}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input": f"Say {one['say']}.", "label": one}) + "\n" for one in labels))
    world = counting_world(tmp_path)
    ran = cli("--train.agent_func_path", world, **flags | {"data__prompt_dataset": str(data)})
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert (tmp_path / "died").exists()
    assert sum(step["rollout/failed"] for step in steps) > 0
    assert "the label has no goal" in ran.err + (ran.run_dir / "rollouts.jsonl").read_text()


def test_a_check_shows_an_episode(tmp_path, capsys):
    world = counting_world(tmp_path)
    assert main(["check", world, "--n", "2", "--max_new_tokens", "8", "--world.tasks", "count"]) == 0
    out = capsys.readouterr().out
    assert "Again." in out
    assert "World played 8 episodes of 4 prompts, with 2 turns" in " ".join(out.split())
    assert main(["check", world, "--world.tasks", "unknown"]) == 1
    assert "there is no task unknown; there is count" in capsys.readouterr().err
