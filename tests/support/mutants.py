"""Mutants: bugs that frameworks of this field really had, built into ours for the length of a `with`.

A mutant is a change of a function's source. Its code is exchanged inside the function object, so that everyone who has
imported it has the mutant too. Where the source does not have the text any more, `CannotApply` says so: write the mutant
anew, or what holds the proofs is gone.
"""

import __future__

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import reduce


class CannotApply(AssertionError):
    pass


@contextlib.contextmanager
def mutated(target: str, *changes: tuple[str, str]) -> Iterator[None]:
    """`target`: `module:Class.method`. `changes`: texts that its source has exactly once, and what they become."""
    module_name, _, path = target.partition(":")
    module = importlib.import_module(module_name)
    found = reduce(lambda owner, name: inspect.getattr_static(owner, name), path.split("."), module)
    function = inspect.unwrap(getattr(found, "__func__", None) or getattr(found, "fget", None) or found)
    source = textwrap.dedent(inspect.getsource(function))
    lines = source.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith(("def ", "async def ")))
    source = "".join(lines[first:])
    for old, new in changes:
        if source.count(old) != 1:
            raise CannotApply(
                f"the mutant of {target} cannot be applied: its source has {source.count(old)} times {old!r}"
            )
        source = source.replace(old, new)
    namespace = dict(vars(module))
    flags = __future__.annotations.compiler_flag
    exec(compile(source, f"<mutant of {target}>", "exec", flags=flags, dont_inherit=True), namespace)
    mutant = namespace[function.__name__].__code__
    if mutant.co_freevars != function.__code__.co_freevars:
        raise CannotApply(f"the mutant of {target} cannot be applied: it needs {function.__code__.co_freevars}")
    original = function.__code__
    function.__code__ = mutant
    try:
        yield
    finally:
        function.__code__ = original
