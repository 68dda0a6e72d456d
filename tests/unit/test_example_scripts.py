"""Every script in examples/scripts gives commands that parse and would run, started by launchers that only listen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.config import parse, refuse_unbuilt, require_runnable

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "examples" / "scripts").glob("*.sh"))
LAUNCHERS = ("python", "deepspeed", "torchrun", "srun", "openrlhf")
LISTENER = """#!{python}
import json, os, sys
with open(os.environ["HEARD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + chr(10))
"""


@pytest.fixture
def commands(tmp_path):
    """Runs a script with its variables set; what it would have started."""

    def run(script: Path) -> list[list[str]]:
        for name in LAUNCHERS:
            (tmp_path / name).write_text(LISTENER.format(python=sys.executable))
            (tmp_path / name).chmod(0o755)
        wanted = {name: f"./{name.lower()}" for name in re.findall(r"\$\{(\w+):\?", script.read_text())}
        heard = tmp_path / "heard.jsonl"
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HEARD": str(heard), **wanted}
        subprocess.run(["bash", script, "--train.seed", "7"], env=env, cwd=tmp_path, check=True, timeout=60)
        return [json.loads(line) for line in heard.read_text().splitlines()]

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_starts_commands_that_run(commands, script):
    started = commands(script)
    assert started
    for words in started:
        place = next(i for i, word in enumerate(words) if word.startswith("openrlhf.cli."))
        command = words[place].removeprefix("openrlhf.cli.")
        assert words[place - 1] in ("-m", "--module")
        config = parse(command, words[place + 1 :])
        require_runnable(config)
        refuse_unbuilt(config)
    assert "7" in started[0], "flags after the script's name are passed on"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_needs(script):
    done = subprocess.run(
        ["bash", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "MODEL: name a" in done.stderr
