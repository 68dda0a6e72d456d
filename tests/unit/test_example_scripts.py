"""Every script in examples/scripts gives commands that parse and would run, started by launchers that only listen."""

import json
import os
import subprocess

import pytest
from script_commands import MADE_FOR, RECIPES, SCRIPTS, required_variables, started_by

from openrlhf.cli import eval as evaluation
from openrlhf.cluster.placement import Node, fit, plan, requested
from openrlhf.config import parse, require_runnable
from openrlhf.config.parser import configure
from openrlhf.config.rules import notes_on


def by_name(scripts):
    return pytest.mark.parametrize("script", scripts, ids=lambda path: path.stem)


@by_name(SCRIPTS)
def test_a_script_starts_commands_that_run(script, tmp_path):
    commands = started_by(script, tmp_path, "--train.seed", "7")
    for started in commands:
        assert started.launcher[-1] in ("-m", "--module")
        if started.command == "eval":
            given, rest = evaluation._parser().parse_known_args(started.words)
            require_runnable(configure("train_ppo_ray", evaluation._settings(given, rest), name="eval", notes=False))
    commands = [started for started in commands if started.command != "eval"]
    assert commands
    for started in commands:
        config = parse(started.command, started.words)
        require_runnable(config)
    assert commands[0].words[-2:] == ["--train.seed", "7"], "flags after the script's name are passed on"


@by_name([script for script in SCRIPTS if required_variables(script)])
def test_a_script_says_what_it_needs(script):
    done = subprocess.run(
        ["bash", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert f"{required_variables(script)[0]}: " in done.stderr


@by_name(RECIPES)
def test_a_recipe_fills_the_machines_that_it_names(script, tmp_path):
    """… and has no flag that does nothing."""
    nodes, gpus = map(int, MADE_FOR.search(script.read_text()).groups())
    (started,) = started_by(script, tmp_path)
    config = parse(started.command, started.words)
    wanted = plan(requested(config, devices_per_node=gpus, engines_by_default=True))
    assert fit(wanted, [Node(devices=gpus, cpus=gpus)] * nodes).problem == ""
    assert wanted.devices == nodes * gpus
    assert list(notes_on(config)) == []


@by_name(RECIPES)
def test_paths_of_a_submitted_recipe_are_where_the_job_can_find_them(script, tmp_path):
    """A job runs in a copy of its working folder: what it writes there is lost."""
    (started,) = started_by(script, tmp_path)
    if started.launcher[:3] != ["ray", "job", "submit"]:
        return
    (environment,) = (word for word in started.launcher if word.startswith("--runtime-env-json="))
    folder = json.loads(environment.removeprefix("--runtime-env-json="))["working_dir"]
    config = parse(started.command, started.words)
    for path in (config.ckpt.output_dir, config.ckpt.path, config.logger.run_dir):
        assert path.startswith(str(tmp_path)), "where the user is"
    assert (script.parents[2] / "openrlhf").is_dir()
    assert folder == str(script.parents[2])
    for source in config.reward.sources:
        for name in source.names if source.kind == "function" else ():
            assert (script.parents[2] / name).is_file()
