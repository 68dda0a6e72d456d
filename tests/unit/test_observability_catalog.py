"""The catalogue of metrics names what is logged: no more and no less."""

import ast
import re
from collections.abc import Iterator

from test_layering import PACKAGE

from openrlhf.observability.catalog import CATALOG

REDUCTIONS = {"mean", "mean_of", "quantile_of", "last", "sum", "max", "min", "std_of"}
NO_STEPS_TIME = {"evaluation", "checkpoint", "export"}
"""Phases after which the clock starts over."""


def pattern(node: ast.expr) -> str | None:
    """The text of a string, with a star for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def logged_by(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=attr), args=[first, *_]) if attr in REDUCTIONS:
                if name := pattern(first):
                    yield name
            case ast.Call(func=ast.Attribute(attr="phase"), args=[ast.Constant(value=str(phase))]):
                if phase not in NO_STEPS_TIME:
                    yield f"timing/{phase}"
            case ast.Call(func=ast.Name(id="MetricNames"), keywords=keywords):
                for names in (keyword.value for keyword in keywords if isinstance(keyword.value, ast.Dict)):
                    yield from filter(None, map(pattern, names.values))
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(name)))]) if name.startswith("timing/"):
                yield name
            case ast.Dict(keys=[ast.Constant(value=str(name))]) if name.startswith("eval_"):
                yield name


def test_every_logged_metric_is_described_and_every_described_one_logged():
    logged = {
        name: path.name
        for path in PACKAGE.rglob("*.py")
        for name in logged_by(ast.parse(path.read_text(encoding="utf-8")))
    }
    described = {re.sub(r"<\w+>", "*", name) for section in CATALOG for name in section.metrics}
    # A name's beginning may be filled in by what is a variable here: `{source}_pass1` is `eval_<source>_pass1`.
    logged = {re.sub(r"^\*_", "eval_*_", name): file for name, file in logged.items()}
    assert {name: file for name, file in logged.items() if name not in described} == {}
    assert described - logged.keys() == set()


def test_a_metric_is_described_once():
    names = [name for section in CATALOG for name in section.metrics]
    assert len(names) == len(set(names))


def test_a_call_that_logs_something_new_is_seen():
    tree = ast.parse('metrics.mean(f"{source}_pass{k}", total, 1)\nmetrics.last("new", 1)\nclock.phase("idle")')
    assert list(logged_by(tree)) == ["*_pass*", "new", "timing/idle"]
