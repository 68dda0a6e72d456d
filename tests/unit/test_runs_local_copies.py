"""Names of ModelScope become folders of this machine, through the modelscope package and a hub on loopback."""

import dataclasses
import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_hub import ModelHub, model_hub

from openrlhf.config import ConfigError, parse
from openrlhf.config.schema import flags_of
from openrlhf.runs import local_copies as module
from openrlhf.runs.local_copies import NAMED_BY, local_copies

PACKAGE = "modelscope.hub.snapshot_download"


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Iterator[ModelHub]:
    """It has the models org/policy and org/judge and the data sets org/prompts and org/held.out. One for all tests: the
    package remembers where the first was."""
    root = tmp_path_factory.mktemp("hub")
    for name in ("policy", "judge"):
        folder = root / "models" / "org" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"name": "{name}"}}')
        (folder / "whole.gguf").write_text("not read here")
    for name in ("prompts", "held.out"):
        (root / "datasets" / "org" / name / "part").mkdir(parents=True)
        (root / "datasets" / "org" / name / "part" / "train.jsonl").write_text('{"input": "1"}\n')
    with model_hub(root) as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSCOPE_CACHE", str(root / "cache"))
        patch.setenv("MODELSCOPE_ENDPOINT", found.endpoint)
        yield found


@pytest.fixture
def hub(opened, tmp_path, monkeypatch) -> Iterator[ModelHub]:
    """Nothing of it has been downloaded yet."""
    shutil.rmtree(opened.root / "cache", ignore_errors=True)
    opened.downloads.clear()
    module._downloaded.cache_clear()
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    yield opened
    module._downloaded.cache_clear()


def rl(*words: str):
    return parse("train_ppo_ray", ["--use_ms", *words])


def test_every_flag_that_names_something_to_load_is_known():
    """A comma list of flags that name models or data, in any command that has --use_ms."""
    commands = [
        c for c in ("train_ppo_ray", "train_sft", "train_rm", "train_dpo", "serve_rm") if "use_ms" in flags_of(c)
    ]
    assert len(commands) == 5
    named = {path for c in commands for path in flags_of(c) if path.endswith(("model_name_or_path", "dataset"))}
    assert named == set(NAMED_BY)


def test_names_become_folders_with_the_files_of_the_hub(hub, tmp_path):
    (tmp_path / "own" / "mine").mkdir()
    config = local_copies(
        rl(
            *("--pretrain", "org/policy", "--critic_pretrain", "mine", "--reward_pretrain", "org/judge,./mine"),
            *("--prompt_data", "org/prompts@part,hf://datasets/org/prompts", "--eval_dataset", "org/held.out"),
        )
    )
    policy = Path(config.actor.model_name_or_path)
    assert policy.is_relative_to(hub.root / "cache")
    assert [path.name for path in policy.iterdir()] == ["config.json"], "formats that nobody reads are left there"
    assert (policy / "config.json").read_text() == '{"name": "policy"}'
    assert config.critic.model_name_or_path == "mine"
    judge, own = config.reward.model_paths
    assert (Path(judge) / "config.json").read_text() == '{"name": "judge"}'
    assert own == "./mine"
    first, second = config.data.prompt_dataset.split(",")
    assert first.endswith("@part")
    assert (Path(first.removesuffix("@part")) / "part" / "train.jsonl").is_file()
    assert second == "hf://datasets/org/prompts"
    assert (Path(config.eval.dataset) / "part" / "train.jsonl").is_file()
    assert set(hub.downloads.values()) == {1}
    assert dataclasses.replace(config, actor=rl().actor).use_ms


def test_without_the_flag_names_stay_what_they_are(hub):
    config = parse("train_sft", ["--pretrain", "org/policy", "--dataset", "org/prompts"])
    assert local_copies(config) is config
    assert not hub.downloads


@pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo", "serve_rm"])
def test_every_command_reads_the_copies(hub, command):
    words = ["--reward_pretrain"] if command == "serve_rm" else ["--dataset", "org/prompts", "--pretrain"]
    words += ["org/policy", *(["--ref_pretrain", "org/judge"] if command == "train_dpo" else [])]
    config = local_copies(parse(command, ["--use_ms", *words]))
    model = config.reward if command == "serve_rm" else config.model
    assert (Path(model.model_name_or_path) / "config.json").is_file()
    if command == "train_dpo":
        assert (Path(config.ref.model_name_or_path) / "config.json").read_text() == '{"name": "judge"}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--pretrain", "org/none"],
            "--use_ms: --actor.model_name_or_path org/none cannot be downloaded from ModelScope: ",
        ),
        (["--prompt_data", "org/policy"], "--use_ms: --data.prompt_dataset org/policy cannot be downloaded"),
        (["--pretrain", "gpt2"], "--use_ms: --actor.model_name_or_path gpt2 is no file or folder here"),
    ],
)
def test_what_there_is_not_is_named(hub, words, said):
    with pytest.raises(ConfigError) as caught:
        local_copies(rl(*words))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_is_left_to_the_reader_of_files(hub):
    """`data/train.jsonl` looks like owner/name, and is none."""
    assert local_copies(rl("--prompt_data", "data/train.jsonl")).data.prompt_dataset == "data/train.jsonl"


def test_without_the_package_it_says_what_to_install(monkeypatch):
    module._downloaded.cache_clear()
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(
        ConfigError, match=r"--use_ms: --actor\.model_name_or_path org/policy .*-e .\.\[modelscope\]. in the repository"
    ):
        local_copies(rl("--pretrain", "org/policy"))


def no_network(*args, **options):
    raise ConnectionError("no route to host")


def test_a_whole_earlier_copy_is_read_where_the_hub_cannot_be_reached(hub, monkeypatch, caplog):
    """One that was broken off is not."""
    first = local_copies(rl("--pretrain", "org/policy")).actor.model_name_or_path
    module._downloaded.cache_clear()
    monkeypatch.setattr(importlib.import_module(PACKAGE), "snapshot_download", no_network)
    assert local_copies(rl("--pretrain", "org/policy")).actor.model_name_or_path == first
    assert "org/policy cannot be downloaded from ModelScope: no route to host; it is read as it was" in caplog.text
    with pytest.raises(ConfigError, match="no route to host"):
        local_copies(rl("--pretrain", "org/judge"))


def test_one_process_downloads_and_the_others_wait_for_it(hub, monkeypatch):
    """Played by threads that share no cache but the folder: each lock is an object of its own."""
    package = importlib.import_module(PACKAGE)

    whole, running, most = package.snapshot_download, [0], [0]

    def slow(*args, **options):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.05)
        try:
            return whole(*args, **options)
        finally:
            running[0] -= 1

    monkeypatch.setattr(package, "snapshot_download", slow)
    found = []
    uncached = module._downloaded.__wrapped__
    threads = [
        threading.Thread(target=lambda: found.append(uncached("org/policy", "model", flag="--x"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(set(found)) == 1
    assert len(found) == 3
    assert most == [1]
    assert hub.downloads["models/org/policy/config.json"] == 1


def test_who_waits_in_vain_says_for_what(hub, monkeypatch):
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.05)
    place = module._place("model org/policy")
    with (
        module.FileLock(place.with_suffix(".lock")),
        pytest.raises(ConfigError, match=r"another process .* remove .*\.lock"),
    ):
        local_copies(rl("--pretrain", "org/policy"))
    assert os.environ["MODELSCOPE_CACHE"] in str(place)
