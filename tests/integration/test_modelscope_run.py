"""Runs whose models and data ModelScope has, on a hub on loopback: every process finds them, and one downloads."""

import json
import shutil
from pathlib import Path

import pytest
from model_hub import ModelHub, model_hub
from preloaded import run_ranks
from small_sections import loading

from openrlhf.checkpoint.export import export_value_model
from openrlhf.cli import check
from openrlhf.config import parse
from openrlhf.models.loading import load_tokenizer, load_value_model
from openrlhf.observability.loggers import read_metrics
from openrlhf.runs import local_copies
from openrlhf.runs.reward_serving import _load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened(inputs, tmp_path_factory):
    """It has the policy and prompts of all tests, and a reward model. One for all: the package remembers the first."""
    root = tmp_path_factory.mktemp("hub")
    shutil.copytree(inputs.model, root / "models" / "org" / "policy-0.1B")
    model = load_value_model(str(inputs.model), loading(), fresh_head=True)
    export_value_model(model, load_tokenizer(str(inputs.model)), root / "models" / "org" / "judge")
    (root / "datasets" / "org" / "sums").mkdir(parents=True)
    shutil.copy(inputs.data, root / "datasets" / "org" / "sums" / "train.jsonl")
    with model_hub(root) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_CACHE", str(root / "cache"))
        patch.setenv("MODELSCOPE_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def hub(opened) -> ModelHub:
    shutil.rmtree(opened.root / "cache", ignore_errors=True)
    opened.downloads.clear()
    local_copies._downloaded.cache_clear()
    yield opened
    local_copies._downloaded.cache_clear()


NAMES = {"use_ms": True, "actor__model_name_or_path": "org/policy-0.1B", "data__prompt_dataset": "org/sums"}


def test_rl_in_one_process(hub, cli):
    """Policy, reference, critic, reward model and both data sets; the run is called by the names that were given."""
    ran = cli(
        *("--reward.weights", "1", "1"),
        **NAMES,
        reward__model_name_or_path="org/judge",
        algo__advantage__estimator="gae",
        algo__kl__init_coef=0.01,
        eval__dataset="org/sums",
        eval__split="train",
        eval__at_start=True,
        ckpt__save_steps=1,
    )
    assert ran.rc == 0, ran.err
    assert len([row for row in ran.metrics if row["kind"] == "train"]) == 2
    assert set(hub.downloads.values()) == {1}
    assert "org/policy-0.1B" in (ran.run_dir / "config.yaml").read_text()


def test_supervised_ranks_download_once(hub, inputs, tmp_path):
    words = ["-m", "openrlhf.cli.train_sft", "--use_ms", "--model.model_name_or_path", "org/policy-0.1B"]
    words += ["--data.dataset", "org/sums", "--data.input_key", "input", "--data.output_key", "label"]
    words += [
        "--data.input_template",
        "{}",
        "--data.max_len",
        "16",
        "--train.batch_size",
        "4",
        "--train.max_epochs",
        "1",
    ]
    words += ["--ckpt.output_dir", str(tmp_path / "model"), "--logger.run_dir", str(tmp_path / "run")]
    environment = {"MODELSCOPE_CACHE": str(hub.root / "cache"), "MODELSCOPE_ENDPOINT": hub.endpoint}
    environment |= {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run_ranks(2, words, cwd=tmp_path, said=tmp_path / "said.txt", environment=environment)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "model" / "config.json").is_file()
    assert set(hub.downloads.values()) == {1}


def test_ranks_and_engines_of_ray_find_the_copy(hub, run_cli, monkeypatch):
    """The driver, the rank and the engine are given the names, and each looks on its own machine."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    ran = run_cli(
        **NAMES,
        train__launcher="ray",
        actor__num_gpus_per_node=1,
        vllm__num_engines=1,
        train__total_steps=1,
        timeout=400,
    )
    assert ran.rc == 0, ran.err
    assert len(ran.metrics) == 1
    assert set(hub.downloads.values()) == {1}


def test_the_reward_server_reads_its_model(hub):
    model = _load_model(parse("serve_rm", ["--use_ms", "--reward_pretrain", "org/judge"]))
    assert Path(model.name).is_relative_to(hub.root / "cache")


def test_check_reads_data_and_tokenizer(hub, capsys):
    words = ["org/sums", "--model", "org/policy-0.1B", "--as", "rl", "--use_ms", "--data.label_key", "label"]
    assert check.main(words) == 0
    first = json.loads((hub.root / "datasets" / "org" / "sums" / "train.jsonl").read_text().splitlines()[0])
    assert first["input"] in capsys.readouterr().out
