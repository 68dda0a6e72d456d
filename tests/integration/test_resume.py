"""A run that was interrupted ends as one that was not; what cannot be continued is refused in a line."""

import logging
import os
import shutil
import socket
from importlib import import_module

import pytest
import torch
from killed_runs import Sft, assert_same_end, flags
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.checkpoint.folder import CheckpointFolder, Claim, Retention
from openrlhf.observability.loggers import read_metrics, without_times


@pytest.mark.parametrize(
    ("at", "step"),
    [("logged", 2), ("logged", 19), ("writing", 12)],
    ids=["before the first checkpoint", "between two", "inside a write"],
)
def test_killed_and_started_again_it_ends_the_same(files, straight, tmp_path, at, step):
    """`tests/faults` does it ten times."""
    run = Sft(files, tmp_path)
    run.kill(at, step)
    run.run()
    assert_same_end(run, straight)


# ------------------------------------------------------------------------------------- the rest in this process


@pytest.fixture
def train(files, workplace, monkeypatch, capfd, caplog):
    """Runs a command: exit status, and what it said."""
    import openrlhf.runs.supervised_assembly  # noqa: F401, seconds of imports

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", files / "cache")  # of all runs on these files
    data = {
        "train_sft": {"data__dataset": files / "sft.jsonl", "data__output_key": "output", "data__input_template": "{}"},
        "train_rm": {"data__dataset": files / "pairs.jsonl", "data__prompt_key": "prompt"},
        "train_dpo": {"data__dataset": files / "pairs.jsonl", "data__prompt_key": "prompt"},
    }

    def run(command, folder, **overrides):
        folder = workplace / folder
        caplog.clear()
        with caplog.at_level(logging.INFO):
            words = flags(files, folder, **data[command] | {"train__max_epochs": 1} | overrides)
            rc = import_module(f"openrlhf.cli.{command}").main(words)
        return rc, capfd.readouterr().err + caplog.text

    return run


def weights(folder):
    (file,) = (folder / "out").glob("*.safetensors")
    return load_file(file)


def back_to(step, source, target):
    """What a run that was interrupted after `step` leaves."""
    shutil.copytree(source / "checkpoints" / f"global_step{step}", target / "checkpoints" / f"global_step{step}")
    (target / "checkpoints" / "latest").write_text(f"global_step{step}\n")


RUNS = {
    "rm": ("train_rm", {}),
    "dpo": ("train_dpo", {}),
    "kto": ("train_dpo", {"model__loss_type": "kto"}),
    "muon": ("train_sft", {"optim": "muon"}),
    "bf16": ("train_sft", {"ds__param_dtype": "bf16"}),
    "lora": ("train_sft", {"ds__lora__rank": 4, "ds__lora__dropout": 0.3}),
}


@pytest.mark.parametrize("name", RUNS)
def test_everything_that_is_trained_continues_to_the_bit(train, files, tmp_path, name):
    """Step 5 of an epoch's 8 (KTO: 16), so that a DPO has seen some references and not others. Dropout draws from
    torch's generator."""
    command, extra = RUNS[name]
    if name == "kto":
        extra = extra | {"data__dataset": files / "judged.jsonl"}
    rc, said = train(command, "a", ckpt__save_steps=5, ckpt__max_num=9, train__max_epochs=2, **extra)
    assert rc == 0, said
    back_to(5, tmp_path / "a", tmp_path / "b")
    rc, said = train(command, "b", ckpt__save_steps=5, train__max_epochs=2, ckpt__load_enable=True, **extra)
    assert rc == 0, said
    assert "continues from" in said
    straight, resumed = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)

    def history(run_dir):
        return [without_times(r) for r in read_metrics(run_dir / "metrics.jsonl") if r["step"] > 5]

    assert history(tmp_path / "b" / "run") == history(tmp_path / "a" / "run") != []


def test_another_token_budget_continues_to_the_same_losses(train, tmp_path):
    rc, said = train("train_sft", "a", train__micro_batch_size=8)
    assert rc == 0, said
    back_to(4, tmp_path / "a", tmp_path / "b")
    rc, said = train("train_sft", "b", train__micro_batch_size=1, ckpt__load_enable=True)
    assert rc == 0, said
    straight, resumed = (
        {r["step"]: r["gpt_loss"] for r in read_metrics(tmp_path / name / "run" / "metrics.jsonl")} for name in "ab"
    )
    assert list(resumed) == [5, 6, 7, 8]
    assert resumed == pytest.approx({step: straight[step] for step in resumed}, rel=1e-5)


@pytest.fixture
def half_done(train, tmp_path):
    """A folder with the checkpoint of step 4."""
    rc, said = train("train_sft", "a", train__max_epochs=1, ckpt__save_hf=True)
    assert rc == 0, said
    return tmp_path / "a"


def test_a_checkpoint_is_a_model_that_anyone_loads(half_done):
    """Weights and moments in fp32 beside it; under `_hf` the same files a second time."""
    checkpoint = half_done / "checkpoints" / "global_step8"
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    linked = AutoModelForCausalLM.from_pretrained(half_done / "checkpoints" / "global_step8_hf")
    final = AutoModelForCausalLM.from_pretrained(half_done / "out")
    for name, tensor in final.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(linked.state_dict()[name], tensor)
    assert (checkpoint / "model" / "tokenizer.json").exists()
    assert not (half_done / "checkpoints" / "global_step8_hf" / "training_state").exists()


def test_a_finished_run_started_again_exports_again(half_done, train):
    before = weights(half_done)
    rc, said = train("train_sft", "a", ckpt__load_enable=True)
    assert rc == 0, said
    after = weights(half_done)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [r["step"] for r in read_metrics(half_done / "run" / "metrics.jsonl") if r["kind"] == "train"] == [
        *range(1, 9)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train__seed": 7}, "--train.seed 42, now it is 7"),
        ({"train__batch_size": 16}, "--train.batch_size 8, now it is 16"),
        ({"data__max_samples": 32}, "the digest of --data.dataset's tokens was"),
        ({"model__model_name_or_path": "wide"}, "the digest of --model.model_name_or_path's weights was"),
        ({"model__model_name_or_path": "other"}, "the digest of --model.model_name_or_path's weights was"),
        ({"optim": "muon"}, "another optimizer"),
        ({"model__loss_type": "kto"}, "what is trained was sft, and is kto now"),
    ],
)
def test_what_cannot_be_continued_is_one_line(half_done, train, files, tmp_path, change, said):
    command = "train_sft"
    if name := change.get("model__model_name_or_path"):
        change = {"model__model_name_or_path": shutil.copytree(files / "model", tmp_path / name)}
        shape = {"intermediate_size": 24} if name == "wide" else {}
        config = AutoConfig.from_pretrained(tmp_path / name, **shape)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    if "model__loss_type" in change:
        command, change = "train_dpo", change | {"data__dataset": files / "judged.jsonl"}
    rc, err = train(command, "a", ckpt__load_enable=True, **change)
    assert rc == 1
    assert said in err
    assert "Traceback" not in err


def test_what_may_change_is_said_and_holds_from_then_on(half_done, train, files, tmp_path):
    """A model that has moved is the same model. Steps 5 to 8 again, with a hundredth of the learning rate."""
    back_to(4, half_done, tmp_path / "b")
    moved = shutil.copytree(files / "model", tmp_path / "moved")
    changes = {"model__model_name_or_path": moved, "adam__lr": 1e-5, "train__micro_batch_size": 1}
    rc, err = train("train_sft", "b", ckpt__load_enable=True, **changes)
    assert rc == 0, err
    assert "--adam.lr was 0.001 up to global_step4, and is 1e-05 from here on" in err
    assert "--train.micro_batch_size was" in err
    assert "--ckpt." not in "".join(line for line in err.splitlines() if "from here on" in line)
    rates = [r["lr"] for r in read_metrics(tmp_path / "b" / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert len(rates) == 4
    assert max(rates) <= 1e-5


def test_a_second_run_into_one_output_folder_is_refused(train, tmp_path):
    """Without checkpoints, too: the model of one would replace that of the other."""
    claim = Claim(tmp_path / "a" / ".out.lock", flag="--ckpt.output_dir")
    (tmp_path / "a").mkdir()
    claim.take()
    rc, err = train("train_sft", "a", ckpt__save_steps=-1)
    assert rc == 1
    holder = f"the run with process id {os.getpid()} on {socket.gethostname()}"
    assert f"--ckpt.output_dir {tmp_path / 'a' / 'out'}: {holder} writes its model there; wait for it" in err
    assert not (tmp_path / "a" / "run").exists()
    claim.release()
    rc, err = train("train_sft", "a", ckpt__save_steps=-1)
    assert rc == 0, err
    assert not (tmp_path / "a" / ".out.lock").exists()


def test_a_state_of_something_else_is_one_line(half_done, train):
    """A checkpoint that is whole by its manifest, and whose state another program wrote."""
    folder = CheckpointFolder(half_done / "checkpoints", Retention())
    (folder.begin(8) / "state.json").write_text('{"epoch": 3, "global_step": 8}')
    folder.commit(8)
    rc, err = train("train_sft", "a", ckpt__load_enable=True)
    assert rc == 1
    assert f"{half_done}/checkpoints/global_step8/state.json does not hold what a checkpoint" in err
    assert "Traceback" not in err


def test_an_earlier_runs_checkpoints_are_not_replaced_unasked(half_done, train):
    rc, err = train("train_sft", "a")
    assert rc == 2
    assert "holds checkpoints of an earlier run, up to global_step8" in err


def test_nothing_to_continue_from_is_a_new_run_and_said(train, tmp_path):
    rc, err = train("train_sft", "a", ckpt__load_enable=True, ckpt__save_steps=-1)
    assert rc == 0
    assert "no checkpoint in" in err
    assert not (tmp_path / "a" / "checkpoints" / "latest").exists()


def test_a_damaged_latest_falls_back(half_done, train):
    shard = next((half_done / "checkpoints" / "global_step8" / "model" / "training_state").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = weights(half_done)
    rc, err = train("train_sft", "a", ckpt__load_enable=True)
    assert rc == 0
    assert "global_step4 is used instead" in err
    after = weights(half_done)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_full_disk_ends_the_run_and_leaves_what_was_there(half_done, train, monkeypatch):
    """Continued for two epochs more, with a kilobyte left."""
    left = sorted(p.name for p in (half_done / "checkpoints").iterdir())
    usage = shutil.disk_usage(half_done)._replace(free=1024)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    rc, err = train("train_sft", "a", ckpt__load_enable=True, train__max_epochs=3)
    assert rc == 1
    assert "a checkpoint takes about" in err
    assert "GiB are free; make room" in err
    assert "Traceback" not in err
    assert sorted(p.name for p in (half_done / "checkpoints").iterdir()) == left


def test_without_training_state_there_is_a_model_and_no_resuming(train, tmp_path):
    rc, err = train("train_sft", "a", ckpt__disable_ds=True)
    assert rc == 0, err
    checkpoint = tmp_path / "a" / "checkpoints" / "global_step8"
    AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    assert not (checkpoint / "model" / "training_state").exists()
    rc, err = train("train_sft", "a", ckpt__load_enable=True)
    assert rc == 1
    assert "has no training state (--ckpt.disable_ds)" in err


def test_a_run_directory_without_a_name_is_found_again(train, tmp_path):
    """Unset, --logger.run_dir is named after the minute; the continued run goes on where it began."""
    common = {"logger__run_dir": None}
    rc, err = train("train_sft", "a", **common, wandb_run_name="first")
    assert rc == 0, err
    shutil.rmtree(tmp_path / "a" / "checkpoints" / "global_step8")
    rc, err = train("train_sft", "a", **common, wandb_run_name="second", ckpt__load_enable=True)
    assert rc == 0, err
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["first"]
