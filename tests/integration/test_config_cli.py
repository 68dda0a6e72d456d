"""Entry points, in real processes: fast, without torch, one clear line per error."""

import subprocess
import sys
import time

import pytest

from openrlhf.cli import main as console
from openrlhf.config import ROOTS

HEAVY = ("torch", "transformers", "aiohttp", "rich", "ray", "vllm", "deepspeed", "datasets", "numpy")


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)


def best_time(*words: str) -> float:
    """Least of three, since other work on the machine only adds."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert run(*words).returncode == 0
        times.append(time.perf_counter() - start)
    return min(times)


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
    if command == "train_ppo_ray":
        for text in ("\nactor:\n", "\nrollout:\n", "--algo.advantage.estimator {gae,", "[--actor_learning_rate]"):
            assert text in done.stdout


@pytest.mark.parametrize("flag", ["--help", "--print_config"])
def test_answers_in_less_than_a_second(flag):
    assert best_time("-m", "openrlhf.cli.train_ppo_ray", flag) < 1.0


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
        (["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py", "--use_ms"], "not built yet"),
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
