"""What is looked at before a run, commands as users type them, and what the doctor shows of it."""

import io
import json
import resource
import shlex

import pytest
from rich.console import Console

from openrlhf.config import ConfigError, parse
from openrlhf.config.aliases import vocabulary
from openrlhf.planning import machine
from openrlhf.planning.command import TRAINERS, read_command
from openrlhf.planning.display import DoctorDisplay, as_values
from openrlhf.planning.fit import fitted, planner
from openrlhf.planning.hardware import Machines, measured_cpu, parse_gpus
from openrlhf.planning.machine import Finding, Status, checkpoint_bytes, disagreements, driver_version
from openrlhf.planning.plan import Expected, ModelReader, plan_rl

READER = ModelReader()
WORDS = (
    "--data.prompt_dataset p.jsonl --reward.remote_url r.py --algo.advantage.estimator group_norm --algo.kl.init_coef 0"
)
SMALL = f"rl --actor.model_name_or_path Qwen2.5-0.5B {WORDS}"


def config_of(words):
    return read_command(shlex.split(words)).config()


def planned(words, where="1xH100"):
    return plan_rl(config_of(words), parse_gpus(where), reader=READER)


# ---------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("requirement", "here", "agrees"),
    [
        ("torch==2.11.0", "2.11.0+cu130", True),
        ("torch==2.13.0+cpu", "2.13.0+cpu", True),
        ("torch==2.11.0", "2.13.0", False),
        ("torch>=2.11", "2.9.1", False),
        ("torch>=3; extra == 'other'", "2.13.0", True),
    ],
)
def test_packages_say_what_they_need_of_each_other(requirement, here, agrees):
    found = list(disagreements("vllm", [requirement], {"torch": here, "vllm": "0.26.0"}))
    assert bool(found) is not agrees
    if found:
        line, remedy = found[0]
        assert line.startswith("vllm 0.26.0 needs torch")
        assert here in line
        assert "pip install" in remedy


def test_versions_that_go_together_pass_and_missing_ones_fail():
    here = {"torch": "2.13.0", "transformers": "5.19.0"}
    needs = {"openrlhf": ["torch>=2.11", "deepspeed>=0.19; extra == 'deepspeed'"]}
    config = parse("train_ppo_ray", ["--vllm.num_engines", "1"])
    options = {"version": here.get, "requires": lambda name: needs.get(name, [])}
    found = list(machine.versions(config, None, **options))
    assert [finding.status for finding in found] == [Status.PASS, Status.FAILURE]
    assert "--vllm.num_engines 1 needs vllm" in found[1].text
    here["torch"] = "2.8.0"
    found = list(machine.versions(parse("train_ppo_ray", []), None, **options))
    assert [finding.status for finding in found] == [Status.FAILURE]


def test_what_is_installed_here_goes_together():
    found = list(machine.versions(parse("train_ppo_ray", []), None))
    assert [finding.text for finding in found if finding.status is Status.FAILURE] == []


# ----------------------------------------------------------------------------------------------------------- machine


def test_the_driver_is_read_from_the_kernel():
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"
    assert driver_version(text) == "550.54.15"
    assert driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10") == "570.86.10"
    assert driver_version("nothing") == "unknown"


def test_checkpoints_have_weights_and_moments_in_fp32():
    """494,032,768 parameters: the model has 2 B of each; a checkpoint 12 B, three of them and one that is written."""
    P = 494_032_768
    plan = planned(SMALL)
    assert checkpoint_bytes(config_of(SMALL), plan) == (2 * P, 0)
    saves = config_of(f"{SMALL} --ckpt.save_steps 10")
    assert checkpoint_bytes(saves, plan) == (2 * P, 4 * 12 * P)
    both = config_of(f"{SMALL} --ckpt.save_steps 10 --ckpt.save_hf --ckpt.max_num 1")
    assert checkpoint_bytes(both, plan) == (2 * P, 2 * 14 * P)


def test_a_disk_that_is_too_small_fails(tmp_path, monkeypatch):
    words = f"{SMALL} --ckpt.output_dir {tmp_path}/out --ckpt.path {tmp_path}/ckpt --ckpt.save_steps 10"
    usage = type("Usage", (), {"free": 30 * 2**30, "total": 0})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)
    found = list(machine.disk(config_of(words), planned(words)))
    assert [finding.status for finding in found] == [Status.PASS]
    usage.free = 20 * 2**30
    found = list(machine.disk(config_of(words), planned(words)))
    assert [finding.status for finding in found] == [Status.FAILURE]
    assert "--ckpt.max_num" in found[0].remedy


def test_few_open_files_and_little_shared_memory_matter_to_several_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (1024, resource.RLIM_INFINITY))
    assert next(machine.open_files(several=True)).status is Status.WARNING
    assert next(machine.open_files(several=False)).status is Status.PASS
    usage = type("Usage", (), {"total": 64 * 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: usage)
    assert "--shm-size" in next(machine.shared_memory(several=True, folder=str(tmp_path))).remedy
    assert next(machine.shared_memory(several=False, folder=str(tmp_path))).status is Status.PASS


def test_sequences_longer_than_positions_are_told():
    words = f"{SMALL} --data.max_len 65536"
    found = list(machine.look_at_model(config_of(words), planned(words)))
    assert [finding.what for finding in found] == ["positions"]
    assert list(machine.look_at_model(config_of(SMALL), planned(SMALL))) == []


def test_a_cpu_is_measured():
    found = measured_cpu(seconds=0.05)
    assert found.is_cpu
    assert found.flops > 1e6
    assert found.bandwidth > 1e6


# ---------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("words", "name", "ranks", "front"),
    [
        ("rl --seed 1", "train_ppo_ray", 1, "openrlhf rl"),
        ("openrlhf sft --seed 1", "train_sft", 1, "openrlhf sft"),
        ("python -m openrlhf.cli.train_dpo --seed 1", "train_dpo", 1, "python -m openrlhf.cli.train_dpo"),
        ("openrlhf.cli.train_rm --seed 1", "train_rm", 1, "python -m openrlhf.cli.train_rm"),
        ("python openrlhf/cli/train_sft.py --seed 1", "train_sft", 1, "python openrlhf/cli/train_sft.py"),
        ("torchrun --nnodes=2 --nproc_per_node 8 -m openrlhf.cli.train_sft --seed 1", "train_sft", 16, None),
        ("deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --seed 1", "train_sft", 4, None),
    ],
)
def test_commands_are_read_as_they_are_typed(words, name, ranks, front):
    found = read_command(shlex.split(words))
    assert (found.name, found.ranks, found.flags) == (name, ranks, ("--seed", "1"))
    assert str(found).endswith("--seed 1")
    if front:
        assert " ".join(found.front) == front


def test_a_command_that_trains_nothing_is_refused():
    for words in ([], ["demo"], ["--fit"]):
        with pytest.raises(ConfigError, match="no command of training"):
            read_command(words)


def test_flags_are_replaced_whatever_they_were_called():
    """--max_tokens_per_gpu sets two flags: the other one stays as it was."""
    command = read_command(shlex.split("rl --zero_stage 2 --max_tokens_per_gpu 8000 --no-packing_samples --seed=3"))
    found = command.changed({"ds.zero_stage": 3, "train.max_tokens_per_gpu": 4000, "train.seed": None})
    assert found.flags == (
        "--rollout.max_tokens_per_gpu", "8000", "--no-packing_samples",
        "--ds.zero_stage", "3", "--train.max_tokens_per_gpu", "4000",
    )  # fmt: skip


def test_the_doctors_own_options_are_no_flags_of_training():
    from openrlhf.cli.doctor import _parser

    own = {name.removeprefix("--") for action in _parser()._actions for name in action.option_strings}
    for command in TRAINERS.values():
        assert not own & vocabulary(command).names()


# ----------------------------------------------------------------------------------------------------------- display


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(width, monkeypatch):
    """No line of a number is broken: every phase is in one line with its total."""
    plan = planned(f"rl --actor.model_name_or_path Qwen2.5-7B --train.colocate_all {WORDS} --ds.zero_stage 3", "8xH100")
    file = io.StringIO()
    display = DoctorDisplay(file, explain=False)
    display._console = Console(file=file, width=width, highlight=False, markup=False)
    display.plan(plan)
    display.findings([Finding(Status.WARNING, "data", "a sentence " * 20, "do something")])
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    peak = plan.pools[0].peak
    row = next(line for line in lines if peak.phase in line and "79.2" in line)
    assert f"{peak.total / 2**30:.1f}" in row


def test_programs_get_bytes_and_seconds():
    command = read_command(shlex.split(f"rl --actor.model_name_or_path Qwen2.5-32B --train.colocate_all {WORDS}"))
    here = parse_gpus("8xH100")
    plan_of = planner(here, Expected(records=1000), READER)
    plan = plan_of(command)
    found = fitted(command, here, plan_of)
    values = json.loads(json.dumps(as_values(plan, [], found, starts=False, sought=True)))
    assert values["fits"] is False
    assert values["problems"][0]["kind"] == "memory"
    update = values["pools"][0]["phases"]["update"]
    assert update["bytes"] == pytest.approx(sum(part["bytes"] for part in update["parts"]))
    assert values["fit"]["plan"]["fits"] is True
    assert values["fit"]["command"].startswith("openrlhf rl --actor.model_name_or_path Qwen2.5-32B")
    assert values["step_seconds"] == pytest.approx(sum(one["total"] for one in values["seconds"].values()))


def test_machines_of_a_cpu_have_one_place():
    assert str(Machines(1, 1, measured_cpu(seconds=0.02), here=True)).endswith("of this CPU")
