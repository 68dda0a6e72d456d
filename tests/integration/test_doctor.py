"""`openrlhf doctor` in front of commands on a tiny model: what it finds, what it says, and a command that it mended."""

import json
import shlex

import pytest

from openrlhf.checking.workbench import write_tiny_model
from openrlhf.cli.main import main
from openrlhf.planning.command import read_command
from openrlhf.planning.fit import fitted, planner
from openrlhf.planning.hardware import Device, Machines
from openrlhf.planning.plan import Expected, ModelReader

GOOD = "def reward_func(queries, prompts, labels):\n    return [float(label in query[len(prompt):]) for query, prompt, label in zip(queries, prompts, labels)]\n"
FLAT = "def reward_func(queries, prompts, labels):\n    return [1.0 for _ in queries]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    write_tiny_model(folder / "model")
    records = [{"input": f"What is {i} + {i}?", "label": str(2 * i)} for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "good.py").write_text(GOOD)
    (folder / "flat.py").write_text(FLAT)
    return folder


def words(folder, *more, reward="good.py", **flags):
    values = {
        "actor.model_name_or_path": folder / "model",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 64,
        "rollout.max_new_tokens": 8,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "train.batch_size": 16,
        "train.micro_batch_size": 16,
        "train.launcher": "local",
        "vllm.num_engines": 0,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "reward.remote_url": folder / reward,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / "run",
    } | {name.replace("__", "."): value for name, value in flags.items()}
    return ["rl", *(word for name, value in values.items() for word in (f"--{name}", str(value))), *more]


def test_a_run_that_can_start(folder, capsys):
    assert main(["doctor", "--json", "--gpus", "cpu", *words(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["starts"] is True
    assert found["steps"] == 10
    assert {finding["what"] for finding in found["findings"]} >= {"versions", "data", "reward"}
    assert set(found["seconds"]) == {"generate", "update", "push"}
    assert not (folder / "out").exists()


def test_what_is_wrong_is_told(folder, capsys):
    """A constant reward, prompts without room, and a template that is not there: the last of them ends it."""
    more = {"data__max_len": 16, "data__long_prompts": "cut"}
    assert main(["doctor", "--gpus", "cpu", *words(folder, reward="flat.py", **more)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "all 16 rewards are 1" in told
    assert "do not fit and lose their beginning" in told
    assert "ok: the run can start (" in told


@pytest.mark.parametrize(
    ("change", "status", "expected"),
    [
        ({"actor__model_name_or_path": "/nowhere/model"}, 1, "no such folder"),
        ({"data__prompt_dataset": "/nowhere/prompts.jsonl"}, 1, "/nowhere/prompts.jsonl"),
        ({"reward__remote_url": "/nowhere/reward.py"}, 1, "/nowhere/reward.py"),
        ({"rollout__batch_size": 0}, 1, "--rollout.batch_size"),
        ({"no__such_flag": 1}, 1, "--no.such_flag is unknown"),
    ],
)
def test_what_is_missing_fails(folder, capsys, change, status, expected):
    assert main(["doctor", *words(folder, **change)]) == status
    said = capsys.readouterr()
    assert expected in " ".join((said.out + said.err).split())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--gpus", "8xFOO", "rl"], "rl: error"),
        (["demo"], "no command of training"),
        (["--gpus", "H100", "--cluster", "2x8xH100", "rl"], "both name machines"),
    ],
)
def test_the_doctor_says_what_it_does_not_know(argv, expected, capsys):
    assert main(["doctor", *argv]) in (1, 2)
    assert expected in capsys.readouterr().err


def test_a_mended_command_runs(folder):
    """On a device with room for micro-batches of a few samples: the command that fits is the user's with smaller ones,
    and it trains."""
    given = read_command(words(folder, train__total_steps=1, train__micro_batch_size=16))
    reader = ModelReader()

    def cpu(memory):
        device = Device(name="cpu", memory=memory, flops=1e10, bandwidth=1e10, link=1e10, network=1e9, is_cpu=True)
        return Machines(1, 1, device)

    whole = planner(cpu(2**40), Expected(), reader)(given).peak_bytes
    smaller = planner(cpu(2**40), Expected(), reader)(given.changed({"train.micro_batch_size": 4})).peak_bytes
    assert smaller < whole
    here = cpu(int((whole + smaller) / 2))
    found = fitted(given, here, planner(here, Expected(), reader))
    assert found is not None
    assert found.plan.fits
    assert [set(step.changes) for step in found.steps] == [{"train.micro_batch_size"}]
    assert main(shlex.split(str(found.command))[1:]) == 0
    assert (folder / "out" / "config.json").exists()
