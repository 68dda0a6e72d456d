"""Entry points, in real processes: light, without torch, one clear line per error."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.cli import main as console
from openrlhf.config import ROOTS

HEAVY = ("torch", "transformers", "aiohttp", "rich", "ray", "vllm", "deepspeed", "datasets", "numpy")


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)


def libraries(*words: str) -> set[str]:
    """What a process imports, by its first name, apart from the standard library."""
    done = run("-X", "importtime", *words)
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert lines
    return {line.partition(".")[0] for line in lines} - sys.stdlib_module_names


def test_configuration_and_entry_points_import_nothing_heavy():
    code = (
        "import sys, importlib, contextlib, io\n"
        f"for name in {[*ROOTS, 'main']!r}: importlib.import_module('openrlhf.cli.' + name)\n"
        "from openrlhf.config import parse\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    parse('train_ppo_ray', ['--print_config'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("command", ROOTS)
def test_help_of_every_command(command):
    done = run("-m", f"openrlhf.cli.{command}", "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "--print_config" in done.stdout


@pytest.mark.parametrize("module", ["train_kto", "train_ppo", "batch_inference", "interactive_chat"])
def test_commands_of_older_versions_say_what_does_their_work(module):
    done = run("-m", f"openrlhf.cli.{module}", "--pretrain", "m")
    assert done.returncode == 2
    assert done.stderr == f"{module}: error: there is no such command; use {console.ELSEWHERE[module]}\n"


@pytest.mark.parametrize("flag", ["--help", "--print_config"])
def test_answers_without_importing_any_library_but_yaml(flag):
    """Each of the others takes longer to import than all the rest. What the environment itself imports is not ours, and
    `org` is what the standard library's `pickle` tries."""
    imported = libraries("-m", "openrlhf.cli.train_ppo_ray", flag) - libraries("-c", "import pickle")
    assert "openrlhf" in imported
    assert imported <= {"openrlhf", "yaml", "org"}


def test_print_config_is_only_the_configuration():
    done = run("-m", "openrlhf.cli.train_ppo_ray", "--perf", "--use_wandb", "SECRET", "--print_config")
    assert done.returncode == 0
    assert done.stdout.startswith("use_ms: false\n")
    assert done.stderr.startswith("note: --perf does nothing")
    assert "SECRET" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pretrian", "m"], "train_ppo_ray: error: --pretrian is unknown; did you mean --pretrain?"),
        ([], "train_ppo_ray: error: --actor.model_name_or_path is missing"),
        (
            ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py", "--use_ms"],
            "--use_ms: --actor.model_name_or_path m is no file or folder here",
        ),
    ],
)
def test_errors_are_lines_not_tracebacks(words, expected):
    done = run("-m", "openrlhf.cli.train_ppo_ray", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_console_command(capsys):
    assert console.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("rl", "sft", "rm", "dpo", "serve-rm", "lora-combine", "demo"))
    assert console.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("openrlhf ")
    assert console.main(["nonsense"]) == 2
    assert "no command 'nonsense'" in capsys.readouterr().err
    assert console.main([]) == 2


def test_a_console_word_reaches_its_command(capsys):
    with pytest.raises(SystemExit) as done:
        console.main(["rl", "--actor_learning_rate", "3e-6", "--print_config"])
    assert done.value.code == 0
    assert "lr: 3.0e-06" in capsys.readouterr().out
    assert console.main(["sft", "--pretrian", "m"]) == 2
    assert "did you mean --pretrain?" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize(
    ("unit", "integration", "ran", "fails"),
    [
        ("exit 0", "exit 0", 2, False),
        ("exit 1", "exit 0", 2, True),
        ("exit 2", "exit 0", 2, True),
        ("exit 0", "exit 1", 2, True),
        ("exit 1", "exit 1", 2, True),
        ("kill -INT 0; sleep 9; exit 2", "exit 0", 1, True),
    ],
)
def test_make_test_runs_unit_and_integration_tests_and_fails_if_either_did(tmp_path, unit, integration, ran, fails):
    """In an environment whose pytest does as it is told: 1 is a test that failed, 2 a file that cannot be read; and
    one is interrupted with Ctrl-C, which every process of the terminal gets."""
    environment = tmp_path / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").touch()
    pytest_ = environment / "bin" / "pytest"
    pytest_.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/ran\n'
        f'case "$*" in *tests/unit*) {unit};; *tests/integration*) {integration};; esac\n'
    )
    pytest_.chmod(0o755)
    (environment / "test.stamp").touch()
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["make", "-C", repository, "test", f"VENV={environment}", "ARGS=-k 'one or two'"],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    calls = (tmp_path / "ran").read_text().splitlines()
    assert (len(calls), done.returncode != 0) == (ran, fails), done.stdout + done.stderr
    assert calls[0].endswith("tests/unit")
    assert all(call.endswith("tests/integration -k one or two") for call in calls[1:])
