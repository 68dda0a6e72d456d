"""What docs/troubleshooting.md quotes is said somewhere, and the flags, metrics and pages it names exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

from openrlhf.config.aliases import vocabulary

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"\*\*`(.+?)`\*\*", TEXT)


@functools.cache
def said() -> str:
    """All text that the package has, f-strings without what is filled in."""
    found = []
    for path in (ROOT / "openrlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("…".join(p.value for p in node.values if isinstance(p, ast.Constant)))
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_said(message):
    """Each stretch between two that differ."""
    for part in filter(lambda part: len(part) > 2, re.split(r"…|%d|/stacks-1\.txt", message)):
        assert part.strip() in re.sub(r"%[dsg]", "…", said()), part


def test_there_are_messages():
    assert len(MESSAGES) > 25


def test_flags_metrics_and_links_exist():
    names = vocabulary("train_ppo_ray").names() | vocabulary("train_sft").names()
    assert set(re.findall(r"--([a-z]+\.\w[\w.]*\w)", TEXT)) <= names
    for target in re.findall(r"\]\(([a-z_]+\.md)\)", TEXT):
        assert (ROOT / "docs" / target).is_file(), target
    for metric in re.findall(r"^\| (`.+?) \|", TEXT, flags=re.MULTILINE):
        for name in re.findall(r"`([\w/]+)`", metric):
            assert name.removeprefix("rollout/") in said(), name
