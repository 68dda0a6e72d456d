"""Scripts of examples/scripts, run with launchers that only listen: what they would have started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "examples" / "scripts").glob("*.sh"))
MADE_FOR = re.compile(r"# Made for (\d+) nodes? with (\d+) GPUs")
RECIPES = [script for script in SCRIPTS if MADE_FOR.search(script.read_text())]
"""Those for clusters."""
LAUNCHERS = ("python", "python3", "deepspeed", "torchrun", "srun", "scontrol", "ray", "openrlhf")
LISTENER = """#!{python}
import json, os, sys
with open(os.environ["HEARD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + chr(10))
"""


class Started(NamedTuple):
    """A command of ours, and how it was called."""

    command: str
    words: list[str]
    launcher: list[str]
    """What stands before `openrlhf.cli…`."""


def required_variables(script: Path) -> list[str]:
    """Those without which it does nothing."""
    return re.findall(r"\$\{(\w+):\?", script.read_text())


def started_by(
    script: Path, folder: Path, *words: str, variables: Mapping[str, str | int] | None = None
) -> list[Started]:
    """What a script starts, called with these words and variables, those that it requires set to anything.

    `folder` is its current one. What a script calls besides, to start Ray say, is left out.
    """
    listeners = folder / "listeners"
    listeners.mkdir(exist_ok=True)
    for name in LAUNCHERS:
        (listeners / name).write_text(LISTENER.format(python=sys.executable))
        (listeners / name).chmod(0o755)
    heard = listeners / f"{script.stem}.jsonl"
    heard.unlink(missing_ok=True)
    environment = {"PATH": f"{listeners}:{os.environ['PATH']}", "HEARD": str(heard)}
    environment |= {name: f"./{name.lower()}" for name in required_variables(script)}
    environment |= {name: str(value) for name, value in (variables or {}).items()}
    subprocess.run(["bash", script, *words], env=environment, cwd=folder, check=True, timeout=60)
    lines = [json.loads(line) for line in heard.read_text().splitlines()]
    return [_split(line) for line in lines if any(word.startswith("openrlhf.cli.") for word in line)]


def _split(line: list[str]) -> Started:
    place = next(i for i, word in enumerate(line) if word.startswith("openrlhf.cli."))
    return Started(line[place].removeprefix("openrlhf.cli."), line[place + 1 :], line[:place])
