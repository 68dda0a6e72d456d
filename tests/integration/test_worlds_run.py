"""Runs in a user's world: its records as prompts, a process that dies on the way, and the commands beside a run."""

import json
from pathlib import Path

import pytest
from world_files import counting_world, duel_world

from openrlhf.checking.workbench import write_tiny_model
from openrlhf.cli.main import main
from openrlhf.config.parser import parse
from openrlhf.data.files import DataError
from openrlhf.runs.worlds import world_records


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


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--world.tasks", "count:-1"], "the weight of task count must be a positive number, got -1.0"),
        (["--world.options", "turns"], "--world.options turns: expected key=value"),
    ],
)
def test_a_check_names_flags_that_cannot_be_read(tmp_path, capsys, flags, why):
    assert main(["check", counting_world(tmp_path), *flags]) == 1
    assert capsys.readouterr().err.strip() == f"error: {why}"


@pytest.mark.parametrize(("record", "told"), [('"hello"', "'hello'"), ('{"input": "Say a."}', "{'input': 'Say a.'}")])
def test_records_without_input_and_label_are_refused(tmp_path, capsys, record, told):
    file = Path(counting_world(tmp_path))
    text = file.read_text()
    start = text.index("            yield ")
    file.write_text(text[:start] + f"            yield {record}\n" + text[text.index("\n", start) :])
    assert main(["check", str(file)]) == 1
    expected = 'record 1 of world counting.py must be {"input": …, "label": …}, got '
    assert capsys.readouterr().err.strip() == f"error: {expected}{told}"


def test_an_opponent_of_evaluations_stands_in_labels_that_are_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(duel_world(tmp_path))
    file.write_text(file.read_text().replace('{"first": index % self.agents}', "index"))
    words = [
        "--actor.model_name_or_path",
        "model",
        "--train.agent_func_path",
        str(file),
        "--world.eval_opponent",
        "low",
    ]
    config = parse("train_ppo_ray", [*words, "--eval.dataset", str(file), "--eval.steps", "1"])
    with pytest.raises(DataError, match=r"^--world\.eval_opponent low: .* must be an object.* duel\.py has 0$"):
        world_records(config, str(file), None, evaluation=True)
