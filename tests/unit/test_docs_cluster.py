"""What docs/cluster.md, hybrid_engine.md, multi_node.md and long_sequences.md show is what happens."""

import re
import shlex
from pathlib import Path

import pytest
from script_commands import RECIPES, started_by

from openrlhf.cluster.placement import Node, fit, plan, requested
from openrlhf.config import parse, require_runnable
from openrlhf.config.aliases import vocabulary

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "docs" / name for name in ("cluster.md", "hybrid_engine.md", "multi_node.md", "long_sequences.md")]
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in DOCUMENTS}
COMMAND = re.compile(r"^python -m openrlhf\.cli\.train_ppo_ray ((?:.*\\\n)*.*)$", re.MULTILINE)
by_name = pytest.mark.parametrize("name", TEXTS)


@by_name
def test_whole_commands_parse_and_could_run(name):
    """Those without an ellipsis."""
    for found in COMMAND.findall(TEXTS[name]):
        if "…" not in found:
            config = parse("train_ppo_ray", shlex.split(found.replace("\\\n", " ")))
            require_runnable(config)
            plan(requested(config, devices_per_node=8, engines_by_default=True))


def test_there_are_such_commands():
    assert sum("…" not in found for text in TEXTS.values() for found in COMMAND.findall(text)) == 3


@by_name
def test_flags_and_scripts_and_links_exist(name):
    text = TEXTS[name]
    assert set(re.findall(r"--([a-z]+\.\w[\w.]*\w)", text)) <= vocabulary("train_ppo_ray").names()
    for script in re.findall(r"(\w+\.sh)", text):
        assert (ROOT / "examples" / "scripts" / script).is_file(), script
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        path = ROOT / "docs" / target if target else ROOT / "docs" / f"{name}.md"
        assert path.is_file(), target
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, anchor


def test_the_plan_that_is_shown_is_the_scripts(tmp_path):
    (script,) = (path for path in RECIPES if path.name == "train_ppo_ray_70b_48gpus.sh")
    (started,) = started_by(script, tmp_path)
    config = parse(started.command, started.words)
    assert plan(requested(config, devices_per_node=8, engines_by_default=True)).table() in TEXTS["cluster"]


def test_the_error_that_is_shown_is_what_is_said():
    words = "--actor.num_gpus_per_node 8 --critic.num_gpus_per_node 8 --ref.num_gpus_per_node 8 --vllm.num_engines 4"
    config = parse("train_ppo_ray", [*words.split(), "--reward.remote_url", "reward.py"])
    wanted = plan(requested(config, devices_per_node=8, engines_by_default=True))
    assert f"error: {fit(wanted, [Node(8, 64)]).problem}\n" in TEXTS["cluster"]


def test_the_readme_leads_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in DOCUMENTS:
        assert f"(docs/{path.name})" in readme
    for script in re.findall(r"examples/scripts/(\w+\.sh)", readme):
        assert (ROOT / "examples" / "scripts" / script).is_file()
