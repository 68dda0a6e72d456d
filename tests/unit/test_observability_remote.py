"""W&B (a small stand-in for it) and TensorBoard (the real one): names, secrets, and what is missing."""

import sys
import types

import pytest

from openrlhf.config import ConfigError, parse
from openrlhf.config.schema import to_dict
from openrlhf.observability.loggers import CompositeLogger, remote_loggers, require_loggers

KEY = "0123456789abcdef0123456789abcdef01234567"


class FakeRun:
    """Keeps what W&B would send; like W&B's own it refuses to log after the end."""

    def __init__(self, options):
        self.options, self.rows, self.metrics, self.finished = options, [], {}, False

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row):
        assert not self.finished
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module called wandb. Its `init` refuses keys that are not 40 characters long, and quotes them."""
    module = types.ModuleType("wandb")
    module.runs = []
    module.Settings = lambda **settings: types.SimpleNamespace(**settings)

    def init(**options):
        key = options["settings"].api_key
        if key is not None and len(key) != 40:
            raise ValueError(f"API key must be 40 characters long, yours was {len(key)}: {key}")
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def loggers(tmp_path, *words, command="train_sft"):
    config = parse(command, words)
    return remote_loggers(config.logger, to_dict(config), directory=tmp_path)


def test_wandb_gets_metrics_by_the_names_users_know(wandb, tmp_path):
    words = [
        "--use_wandb",
        KEY,
        "--wandb_org",
        "o",
        "--wandb_group",
        "g",
        "--wandb_project",
        "p",
        "--wandb_run_name",
        "r",
    ]
    logger = loggers(tmp_path, *words)
    (run,) = wandb.runs
    assert {k: run.options[k] for k in ("entity", "group", "project", "name", "dir")} == {
        "entity": "o", "group": "g", "project": "p", "name": "r", "dir": str(tmp_path),
    }  # fmt: skip
    logger.log(3, {"gpt_loss": 0.5, "timing/train": 1.0, "global_step": 3})
    logger.log(3, {"eval gpt_loss": 0.25}, kind="eval")
    assert run.rows == [
        {"train/gpt_loss": 0.5, "train/timing/train": 1.0, "train/global_step": 3},
        {"eval/eval gpt_loss": 0.25, "eval/global_step": 3},
    ]
    assert run.metrics["train/*"] == "train/global_step"
    assert run.metrics["eval/*"] == "eval/global_step"
    logger.close()
    assert run.finished


def test_the_key_reaches_wandb_as_a_setting_and_nothing_else_does(wandb, tmp_path):
    """What W&B calls metadata holds the command line."""
    loggers(tmp_path, "--use_wandb", KEY)
    (run,) = wandb.runs
    settings = run.options.pop("settings")
    assert settings.api_key == KEY
    assert settings.x_disable_meta is True
    assert KEY not in repr(run.options)
    assert run.options["config"]["train"]["seed"] == 42
    assert not any(KEY in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("word", ["True", "true"])
def test_true_means_the_login_of_this_machine(wandb, tmp_path, word):
    loggers(tmp_path, "--use_wandb", word)
    assert wandb.runs[0].options["settings"].api_key is None


def test_a_refused_key_is_said_without_the_key(wandb, tmp_path):
    with pytest.raises(ConfigError) as caught:
        loggers(tmp_path, "--use_wandb", "SECRET")
    assert "--logger.wandb.key: W&B does not start: API key must be 40 characters" in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("package", "words", "flag"),
    [
        ("wandb", ["--use_wandb", KEY], "--logger.wandb.key"),
        ("tensorboard", ["--use_tensorboard", "t"], "--logger.tensorboard_dir"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch, package, words, flag):
    monkeypatch.setitem(sys.modules, package, None)  # what an import of it meets
    with pytest.raises(ConfigError) as caught:
        require_loggers(parse("train_ppo_ray", words).logger)
    assert str(caught.value).startswith(
        f"{flag} needs {package}, which is not installed: pip install -e '.[{package}]' in the repository"
    )
    assert KEY not in str(caught.value)


def test_remote_loggers_import_nothing_unless_asked_for(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    require_loggers(parse("train_sft", []).logger)
    assert isinstance(loggers(tmp_path), CompositeLogger)


def test_tensorboard_files_hold_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = loggers(tmp_path, "--use_tensorboard", str(tmp_path / "tb"), "--wandb_run_name", "a/b:c")
    logger.log(1, {"loss": 2.0, "acc": 0.5, "global_step": 1})
    logger.log(2, {"loss": 1.0, "global_step": 2})
    logger.log(2, {"eval_loss": 1.5, "global_step": 2}, kind="eval")
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb" / "a_bc"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/eval_loss")] == [(2, 1.5)]
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/acc", "train/global_step", "eval/eval_loss", "eval/global_step"}  # fmt: skip


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--logger\.tensorboard_dir"):
        loggers(tmp_path, "--use_tensorboard", str(tmp_path / "file"))
