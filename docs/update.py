"""Rewrites what the documentation takes from the code: `make docs`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

from openrlhf.config.document import render as flag_table
from openrlhf.observability.catalog import render as metrics_page

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- files -->", "<!-- /files -->"


def file_list() -> str:
    """Folder by folder, the first sentence of every module's docstring."""
    lines: list[str] = []
    folder = None
    for path in sorted((ROOT / "openrlhf").rglob("*.py"), key=lambda p: (p.parent, p.name != "__init__.py", p.name)):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not docstring:
            continue
        if path.parent != folder:
            folder = path.parent
            lines += ["", f"**{folder.relative_to(ROOT)}/**", ""]
        lines.append(f"- `{path.name}` — {_first_sentence(docstring)}")
    return "\n".join(lines)


def _first_sentence(docstring: str) -> str:
    """The first line, and those after it up to the one that ends a sentence."""
    lines = docstring.split("\n\n")[0].splitlines()
    last = next((i for i, line in enumerate(lines) if line.endswith((".", "?"))), 0)
    return " ".join(line.strip() for line in lines[: last + 1])


def architecture() -> str:
    """ARCHITECTURE.md with its file list brought up to date."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{file_list()}\n\n{END}{rest.split(END)[1]}"


def long_sequences() -> str:
    """long_sequences.md with its tables brought up to date."""
    return _with_tables("memory", "long_sequences.md")


def scale() -> str:
    """scale.md with its tables brought up to date."""
    return _with_tables("scale", "scale.md")


def _with_tables(script: str, document: str) -> str:
    """A document whose tables a script of this folder makes."""
    spec = importlib.util.spec_from_file_location(f"docs_{script}", ROOT / "docs" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.filled((ROOT / "docs" / document).read_text(encoding="utf-8"))


def documents() -> dict[Path, str]:
    """Every generated document and what it should say."""
    return {
        ROOT / "docs" / "ARCHITECTURE.md": architecture(),
        ROOT / "docs" / "flags.md": flag_table(),
        ROOT / "docs" / "long_sequences.md": long_sequences(),
        ROOT / "docs" / "metrics.md": metrics_page(),
        ROOT / "docs" / "scale.md": scale(),
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
