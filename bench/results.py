"""bench/RESULTS.md, one section per bench, each rewritten by its own bench only."""

from __future__ import annotations

import re
from pathlib import Path


def write_section(path: Path, *, title: str, body: str) -> None:
    """Replace the section `## title` of the file, or add it at the end; the other sections stay as they are."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Measurements\n"
    section = f"## {title}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(text):
        text = pattern.sub(lambda _: section + "\n", text)
    else:
        text = text.rstrip() + "\n\n" + section
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
