"""Which flags the code outside `openrlhf.config` reads, found in its syntax trees.

Every function that takes a configuration, or a section of one, says so in its signature. From there it follows what
`config.ds.lora.rank`, `ds = config.ds` and `self._config` are. A property of a configuration reads what its own body
reads, and counts where somebody reads it. A class with a field that is a section (`LoadSettings`) is followed as well.
A function of any configuration that returns one of the same type (`local_copies`) returns what it was given.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any

from openrlhf.config import ROOTS

PACKAGE = Path(__file__).resolve().parents[2] / "openrlhf"

Place = tuple[str, str]
"""A command, and the dotted name of one of its sections; "" is the whole configuration. Of a class that holds sections:
`RECORD` and its name."""
RECORD = "record"
Places = frozenset[Place]
NOWHERE: Places = frozenset()
SAME: Places = frozenset({("same", "")})
"""What a function returns that gives back a configuration of the type of its first argument."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sections() -> dict[Place, Any]:
    """Every section of every command, with its defaults."""
    found: dict[Place, Any] = {}

    def visit(command: str, path: str, section: Any) -> None:
        found[command, path] = section
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value):
                visit(command, f"{path}.{field.name}".lstrip("."), value)

    for command, root in ROOTS.items():
        visit(command, "", root())
    return found


@functools.cache
def places_of(class_name: str) -> Places:
    """Where a section of this class, or of one made from it, stands."""
    return frozenset(
        place for place, section in sections().items() if class_name in {cls.__name__ for cls in type(section).__mro__}
    )


@functools.cache
def flags_read() -> frozenset[Place]:
    """(command, flag) of everything that is read outside `openrlhf.config`."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "config" and "openrlhf.config" in path.read_text(encoding="utf-8")
    ]
    names: dict[str, Places] = {}
    variables: set[str] = set()
    for tree in (ast.parse((PACKAGE / "config" / "commands.py").read_text(encoding="utf-8")), *trees):
        for node in tree.body:  # SupervisedConfig = SFTConfig | RMConfig | DPOConfig
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                is_variable = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"
                is_type = isinstance(node.value, ast.BinOp) or is_variable
                named = _Reader(names, {}).annotation(node.value) if is_type else NOWHERE
                if named:
                    names[node.targets[0].id] = named
                    variables |= {node.targets[0].id} if is_variable else set()
    returns: dict[str, Places] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, Function) and node.returns is not None:
                same = isinstance(node.returns, ast.Name) and node.returns.id in variables
                returns[node.name] = SAME if same else _Reader(names, {}).annotation(node.returns)
    records: dict[str, dict[str, Places]] = {}
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        fields = {
            part.target.id: _Reader(names, {}).annotation(part.annotation)
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        if any(fields.values()):
            records[node.name] = fields
            names[node.name] = frozenset({(RECORD, node.name)})
    reads: set[Place] = set()
    for tree in trees:
        reader = _Reader(names, returns, records)
        reader.module(tree)
        reads |= reader.reads
    return frozenset(reads)


@functools.cache
def _property_reads(place: Place, name: str) -> tuple[frozenset[Place], Places]:
    """What a property of a section reads, and the sections that it may be."""
    member = inspect.getattr_static(type(sections()[place]), name)
    source = member.fget if isinstance(member, property) else member
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(source))).body
    assert isinstance(function, Function)
    reader = _Reader({}, {})
    returned = reader.function(function, {"self": frozenset({place})})
    return frozenset(reader.reads), returned


class _Reader:
    """Goes through a body and collects the flags that it reads."""

    def __init__(
        self, names: dict[str, Places], returns: dict[str, Places], records: dict[str, dict[str, Places]] | None = None
    ) -> None:
        self.reads: set[Place] = set()
        self._names, self._returns, self._records = names, returns, records or {}
        self._attributes: dict[str, Places] = {}

    def annotation(self, node: ast.expr | None) -> Places:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        named = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if node is not None else set()
        if "Config" in named:
            return frozenset((command, "") for command in ROOTS)
        return NOWHERE.union(*(self._names.get(name) or places_of(name) for name in named))

    def module(self, tree: ast.Module) -> None:
        for item in tree.body:
            self._attributes = {}
            if isinstance(item, ast.ClassDef):
                for part in item.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        self._attributes[part.target.id] = self.annotation(part.annotation)
                for _ in range(2):  # the second time it is known what `self._config` is
                    for part in item.body:
                        if isinstance(part, Function):
                            self.function(part, {})
            elif isinstance(item, Function):
                self.function(item, {})

    def function(self, function: Function, known: dict[str, Places]) -> Places:
        """What it may return."""
        known = dict(known)
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None:
                known[argument.arg] = self.annotation(argument.annotation)
        return self._body(function.body, known)

    def _body(self, body: list[ast.stmt], known: dict[str, Places]) -> Places:
        returned = NOWHERE
        for statement in body:
            if isinstance(statement, Function):
                self.function(statement, known)
                continue
            values = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)]
            if isinstance(statement, ast.With | ast.AsyncWith):
                values = [item.context_expr for item in statement.items]
            found = [self._value(value, known) for value in values]
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._bind(target, statement.value, known)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._bind(statement.target, statement.value, known)
            elif isinstance(statement, ast.For | ast.AsyncFor):
                self._bind(statement.target, statement.iter, known)
            elif isinstance(statement, ast.Return):
                returned = returned.union(*found)
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [part.body for name in ("handlers", "cases") for part in getattr(statement, name, [])]
            for block in blocks:
                returned |= self._body(block, known)
        return returned

    def _bind(self, target: ast.expr, value: ast.expr, known: dict[str, Places]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and ast.unparse(value.func) == "zip":
            value = ast.Tuple(value.args)  # for a, b in zip(these, those): an element counts as what it is taken from
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other, known)
        elif isinstance(target, ast.Name):
            known[target.id] = self._value(value, known)
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            before = self._attributes.get(target.attr, NOWHERE)
            self._attributes[target.attr] = before | self._value(value, known)

    def _value(self, node: ast.expr, known: dict[str, Places]) -> Places:
        """The sections that a value may be. The flags that it reads on the way are collected."""
        if isinstance(node, ast.Name):
            return known.get(node.id, NOWHERE)
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "self" and "self" not in known:
                return self._attributes.get(node.attr, NOWHERE)
            return NOWHERE.union(*(self._read(place, node.attr) for place in self._value(node.value, known)))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = dict(known)
            for part in node.generators:
                self._value(part.iter, inner)
                self._bind(part.target, part.iter, inner)
                for condition in part.ifs:
                    self._value(condition, inner)
            for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._value(value, inner)
            return NOWHERE
        children = [part.value if isinstance(part, ast.keyword) else part for part in ast.iter_child_nodes(node)]
        found = [self._value(child, known) for child in children if isinstance(child, ast.expr)]
        if isinstance(node, ast.IfExp | ast.BoolOp | ast.Tuple | ast.List | ast.Dict | ast.Subscript):
            return NOWHERE.union(*found)
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "dataclasses.asdict":  # reads every field
                for place in found[1]:
                    for field in dataclasses.fields(sections()[place]):
                        self._read(place, field.name)
            returned = self._returns.get(getattr(node.func, "id", getattr(node.func, "attr", "")), NOWHERE)
            return found[1] if returned is SAME else returned
        return NOWHERE

    def _read(self, place: Place, name: str) -> Places:
        command, path = place
        if command == RECORD:
            return self._records[path].get(name, self._returns.get(name, NOWHERE))
        section, full = sections()[place], f"{path}.{name}".lstrip(".")
        if (command, full) in sections():
            return frozenset({(command, full)})
        if name in {field.name for field in dataclasses.fields(section)}:
            self.reads.add((command, full))
            return NOWHERE
        if hasattr(type(section), name):
            reads, returned = _property_reads(place, name)
            self.reads |= reads
            return returned
        return NOWHERE  # another command's, before an isinstance
