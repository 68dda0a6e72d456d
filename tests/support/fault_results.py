"""What became of runs that were made to fail, as a table that is kept: `tests/faults/RESULTS.md`.

A section per kind of fault. A session replaces the sections whose tests it ran, and leaves the others as they are.
"""

from __future__ import annotations

import re
from pathlib import Path

HEAD = """\
# Runs that were made to fail

Written by `make test-faults`: each line is a run that something was done to, and what became of it. Times and
checkpoints differ from session to session; outcomes do not.
"""


class Results:
    """Rows of the sections that this session has tests of."""

    def __init__(self) -> None:
        self._sections: dict[str, list[dict[str, str]]] = {}

    def add(self, section: str, **row: object) -> None:
        """Rows of a section have the same columns; `_` in a column's name becomes a space."""
        named = {name.replace("_", " "): str(value) for name, value in row.items()}
        self._sections.setdefault(section, []).append(named)

    def write(self, path: Path) -> None:
        if not self._sections:
            return
        kept = _sections(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept |= {title: _table(rows) for title, rows in self._sections.items()}
        parts = [HEAD, *(f"## {title}\n\n{kept[title]}" for title in sorted(kept))]
        path.write_text("\n".join(parts), encoding="utf-8")


def _sections(text: str) -> dict[str, str]:
    """Title → what follows it."""
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    found = (part.partition("\n") for part in parts)
    return {title: f"{body.strip()}\n" for title, _, body in found}


def _table(rows: list[dict[str, str]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
