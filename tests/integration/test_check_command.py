"""`openrlhf check` on files that can be used: what it shows, what it warns of, with users' own data and model."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_files import HEAD, env
from patience import patience
from PIL import Image

from openrlhf.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples" / "python"


@pytest.fixture
def check(capfd):
    """Runs it in this process; what was on stdout, and on stderr."""

    def run(*words: object) -> tuple[str, str]:
        rc = main(["check", *map(str, words)])
        said = capfd.readouterr()
        assert rc == 0, said.err
        return said.out, said.err

    return run


def verdict(out: str) -> str:
    """The last line: whether the file works, and what was tried."""
    return out.splitlines()[-1]


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES.glob("*reward_func.py")])
def test_example_rewards_are_fine(check, name):
    out, err = check(EXAMPLES / name, "--n", 2)
    assert f"{name}: reward_func" in out
    assert f": {name} works. reward_func was called 4 times, once for each prompt, and returned " in verdict(out)
    assert verdict(out).startswith(("ok: ", "ok, with "))
    assert verdict(out).endswith("A run takes the file with --reward.remote_url.")
    assert err == ""


def test_the_example_agent_is_shown_as_it_is_trained_on(check):
    out, err = check(EXAMPLES / "agent_func.py", "--n", 2, "--agent_hosts", 0)
    assert "?⟦" in out
    assert "Your next guess: ⟦" in out
    assert "All 8 episodes:" in out
    assert verdict(out).startswith("ok: agent_func.py works. AgentExecutor played 8 episodes of 4 prompts, with ")
    assert err == ""


def test_everything_odd_about_a_reward_is_said(check, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text("def reward_func(queries):\n    print('judging')\n    return {'rewards': 12, 'scores': -1}\n")
    out, err = check(file, "--n", 1)
    for text in (
        "all 12 rewards are 12, right answers included",
        "12 of 12 rewards are outside [-10, 10], such as 12",
        "12 of 12 scores are outside [0, 1], such as -1",
        "it printed 4 lines",
        "reward_func returned one number for 3 samples, so each gets it",
    ):
        assert f"warning: {text}" in out or f"{file}: {text}" in out
    assert verdict(out).startswith(
        "ok, with 5 warnings: odd.py works. reward_func was called 4 times, once for each prompt, and returned 12 "
        "rewards of 12, a score for each."
    )
    assert err == "judging\n" * 4


@pytest.mark.slow
def test_a_host_tells_what_is_slow(check, tmp_path):
    """In a process of its own: 1.2 s asleep in a coroutine."""
    file = tmp_path / "slow.py"
    file.write_text(HEAD + env("import time; time.sleep(1.2); return {'rewards': 1, 'done': True}"))
    out, _ = check(file, "--n", 1)
    assert "step took 1." in out


def test_a_file_may_be_both(check, tmp_path):
    file = tmp_path / "both.py"
    file.write_text(HEAD + env() + "def reward_func(queries):\n    return [len(q) / 99 for q in queries]\n")
    out, _ = check(file, "--n", 1, "--agent_hosts", 0)
    assert out.index("both.py: reward_func") < out.index("both.py: AgentExecutor")


SEEING = (
    HEAD
    + env(
        "self.n += 1\n        return {'rewards': self.n, 'done': self.n == 2, 'environment_feedback': '\\nnow: <image>\\n', "
        "'environment_images': [Image.new('RGB', (56, 56), (80 * self.n, 0, 0))]}",
        reset="return {'observation': '<image>' + states['observation'], 'images': [Image.new('RGB', (84, 56))]}",
    )
    + "from PIL import Image\n"
)


@pytest.mark.parametrize("hosts", [0, 1])
def test_an_agent_with_images_needs_no_model(check, tmp_path, hosts):
    """The built-in one makes a token of 28 × 28 pixels: 3 × 2 of the first image. `to` is where the next token is."""
    file = tmp_path / "seeing.py"
    file.write_text(SEEING)
    out, err = check(file, "--n", 1, "--agent_hosts", hosts, "--data.max_images_per_prompt", 1)
    assert err == ""
    assert "<|vision_start|>[image 1: 6 tokens]<|vision_end|>" in out
    assert "\nnow: <|vision_start|>[image 2: 4 tokens]<|vision_end|>\n⟦" in out
    first, second = (line.split() for line in out.splitlines() if line.startswith("image "))
    assert first[:8] == ["image", "1", "84", "×", "56", "6", "1", "7"]
    assert second[:6] == ["image", "2", "56", "×", "56", "4"]
    assert int(second[7]) - int(second[6]) == 4
    (folder,) = (line for line in out.splitlines() if line.startswith("(the thumbnails are in "))
    pictures = Path(folder.removeprefix("(the thumbnails are in ").removesuffix(")"))
    assert {path.name for path in pictures.iterdir()} == {first[8], second[8]}
    assert "seeing.py works" in verdict(out)


def test_an_agent_with_images_in_a_run_without_says_which_flag(capfd, tmp_path):
    file = tmp_path / "seeing.py"
    file.write_text(SEEING)
    assert main(["check", str(file), "--agent_hosts", "0"]) == 1
    assert "--data.max_images_per_prompt above 0" in capfd.readouterr().err


def test_prompts_with_images_are_judged(check, capfd, tmp_path):
    """A reward file sees the text, in which an image is one token. An image that is missing is named."""
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts):\n    return [p.count('<|image_pad|>') + len(p) % 7 for p in prompts]\n"
    )
    Image.new("RGB", (56, 56)).save(tmp_path / "dark.png")
    data = tmp_path / "train.jsonl"
    data.write_text('{"input": "What is <image>?", "images": "dark.png"}\n')
    words = ["--prompt_data", data, "--max_images_per_prompt", 1, "--n", 2]
    out, _ = check(file, *words)
    assert "What is <|vision_start|><|image_pad|><|vision_end|>?" in out
    data.write_text('{"input": "What is <image>?", "images": "gone.png"}\n')
    assert main(["check", str(file), *map(str, words)]) == 1
    assert "record 1 of train.jsonl: image 1 of 1: there is no image file gone.png" in capfd.readouterr().err


def test_users_bring_prompts_and_model(check, inputs, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    assert all(''.join(sorted(p[:-1])) == label for p, label in zip(prompts, labels))\n"
        "    return [float(q.endswith('<eos>')) for q in queries]\n"
    )
    # Flags as they stand in a run's command line.
    run = [
        "--actor.model_name_or_path",
        inputs.model,
        "--data.prompt_dataset",
        inputs.data,
        "--data.label_key",
        "label",
    ]
    out, _ = check(file, *run, "--data.max_len", 16, "--rollout.max_new_tokens", 4)
    assert f"{inputs.first_prompt}  label '{inputs.records[0]['label']}'" in out
    assert "4 calls, 24 samples" in out


def test_what_users_bring_may_be_wrong(capfd, inputs, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(queries):\n    return [1.0 for _ in queries]\n")
    for words, text in (
        (["--prompt_data", "nope.jsonl"], "error: --prompt_data: there is no file nope.jsonl"),
        (
            ["--prompt_data", inputs.data, "--label_key", "x"],
            "error: --prompt_data, record 1 of train.jsonl: it has no 'x'",
        ),
        (["--pretrain", "/no/model"], "error: --pretrain /no/model: no such folder"),
    ):
        assert main(["check", str(file), *map(str, words)]) == 1
        said = capfd.readouterr()
        assert text in said.err
        assert said.out == ""


def test_an_import_that_fails_is_told_before_a_model_is_looked_for(capfd, tmp_path):
    """The model's folder does not exist either: whoever loads it first says so. What the file printed is shown once."""
    file = tmp_path / "reward.py"
    file.write_text("print('loading')\nimport nosuchmodule\ndef reward_func(queries):\n    return 1\n")
    assert main(["check", str(file), "--pretrain", "/no/model"]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == (
        f"loading\nerror: {file}:2: ModuleNotFoundError: No module named 'nosuchmodule' (while the file was loaded)\n"
    )


def test_a_file_that_hangs_ends_with_its_time(tmp_path):
    """As users start it: python's and torch's start, then 1 s."""
    file = tmp_path / "reward.py"
    file.write_text("import time\ndef reward_func(queries):\n    time.sleep(600)\n")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.main", "check", str(file), "--timeout", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: built-in prompt 1 ")
    assert "did not answer in 1 s" in done.stderr
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - began < patience(40)


def test_wrong_options_are_usage_errors(capfd, tmp_path):
    for words in (["--n", "0"], ["--timeout", "soon"], ["--max_len", "8"], ["--what"]):
        with pytest.raises(SystemExit) as ended:
            main(["check", str(tmp_path / "reward.py"), *words])
        assert ended.value.code == 2
        assert "openrlhf check: error: " in capfd.readouterr().err
