"""The agents of docs/agents.md run as they stand there."""

import re
from pathlib import Path

import pytest

from openrlhf.cli.check import main

TEXT = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_an_agent_of_the_document_plays(tmp_path, capsys, block):
    path = tmp_path / "agent.py"
    path.write_text(block)
    assert main([str(path), "--agent_hosts", "0", "--n", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ok")


def test_the_document_has_agents():
    assert len(BLOCKS) == 2
