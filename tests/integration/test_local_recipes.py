"""The recipes of several commands in one process run small: every command of the script, in its order."""

import json
from importlib import import_module

import pytest
from script_commands import SCRIPTS, started_by

LOCAL = {script.stem: script for script in SCRIPTS if "--save" in script.read_text()}
REWARD = """
def reward_func(queries, prompts, labels):
    '''The later a digit stands first in "0123456789>", the better: every answer has a reward.'''
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    rewards = [1.0 - "0123456789>".find(answer[:1]) / 11 for answer in answers]
    return {"rewards": rewards, "scores": rewards}
"""


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_a_recipe_of_two_rounds(inputs, workplace, name, capfd):
    """Each round samples from the model of the one before and trains on what it has judged; a second evaluation plays
    nothing again."""
    (workplace / "reward.py").write_text(REWARD)
    out = workplace / "out"
    variables = {"MODEL": inputs.model, "DATA": inputs.data, "REWARD": workplace / "reward.py", "OUT": out}
    variables |= {"ROUNDS": 2, "SAMPLES": 8, "THRESHOLD": 0, "MAX_LEN": 16, "MAX_NEW_TOKENS": 8, "BATCH": 1}
    commands = started_by(LOCAL[name], workplace, variables=variables)
    trainer = "train_dpo" if "dpo" in name else "train_sft"
    assert [started.command for started in commands] == ["eval", trainer] * 2
    for started in commands:
        assert import_module(f"openrlhf.cli.{started.command}").main(started.words) in (0, None)
    assert commands[2].words[0] == str(out / "model1")
    made = "pairs" if "dpo" in name else "best"
    for number in (1, 2):
        assert len(lines(out / f"samples{number}.jsonl")) == 1 + len(inputs.records)
        assert lines(out / f"{made}{number}.jsonl")
        assert (out / f"model{number}" / "config.json").is_file()
    before = (out / "samples2.jsonl").read_text(), (out / f"{made}2.jsonl").read_text()
    capfd.readouterr()
    assert import_module("openrlhf.cli.eval").main(commands[2].words) == 0
    assert ((out / "samples2.jsonl").read_text(), (out / f"{made}2.jsonl").read_text()) == before
    assert "mean score" in capfd.readouterr().out
