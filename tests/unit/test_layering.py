"""The shape of the tree: heavy libraries in one place each, light folders light, documents true."""

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "openrlhf"

ALLOWED = {
    "ray": {"cluster"},
    "vllm": {"rollout/vllm"},
    "deepspeed": {"backends"},
    "wandb": {"observability"},
    "tensorboard": {"observability"},
    "flash_attn": set(),
    "peft": {"models", "checkpoint"},
    "liger_kernel": {"models"},
}
"""Heavy library → the folders that may import it."""


@functools.cache
def imported_by(path: Path) -> set[str]:
    """Top-level names of every import in a file, lazy ones included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("library", ALLOWED)
def test_a_heavy_library_is_imported_in_one_place(library):
    offenders = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if library in imported_by(path)
        and not any(path.is_relative_to(PACKAGE / folder) for folder in ALLOWED[library])
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "module",
    [
        "openrlhf.config",
        "openrlhf.cli.main",
        "openrlhf.cli.demo",
        "openrlhf.cli.check",
        "openrlhf.cli.replay",
        "openrlhf.cli.view",
        "openrlhf.viewer.server",
        "openrlhf.cli.prove",
        "openrlhf.cli.train_ppo_ray",
        "openrlhf.observability.progress",
        "openrlhf.observability.token_log",
    ],
)
def test_light_modules_import_no_torch(module):
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'datasets'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


RANK = """
import sys

import torch
from openrlhf.cluster import workers
from openrlhf.models.policy import Policy
from openrlhf.runs.engines import weight_sender
from openrlhf.runs.ranks import RankWeights
from openrlhf.backends.base import ModuleWeights
from openrlhf.config import parse
from openrlhf.weight_sync.base import PolicyWeights
from transformers import Qwen2Config, Qwen2ForCausalLM

sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
policy = Policy(Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1)))
config = parse("train_ppo_ray", ["--vllm.sync_verify", "true"])
blocks = []
sender = weight_sender(config, torch.device("cpu"))
PolicyWeights(policy, ModuleWeights(policy)).send(sender, lambda block, **_: blocks.append(block), needs_base=True)
assert blocks
print(*({"vllm", "ray", "deepspeed"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_rank_that_sends_weights_imports_no_vllm():
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


def test_no_code_asks_which_engine_it_has():
    """Engines differ behind the contract of `rollout.base`: `isinstance(engine, …)` would be a further one."""
    asked = re.compile(r"isinstance\((\w+\.)*_?engines?, ")
    offenders = [str(path) for path in PACKAGE.rglob("*.py") if asked.search(path.read_text(encoding="utf-8"))]
    assert offenders == []


IMPORT_ALL = """
import importlib, json, os, sys, threading

statements, modules = json.load(sys.stdin)
for statement in statements:  # what other libraries do when they are imported is not ours
    try:
        exec(statement, {})
    except ImportError:
        pass
before = dict(os.environ), set(threading.enumerate())
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name.startswith("openrlhf"):
            raise
    now = dict(os.environ), set(threading.enumerate())
    assert now == before, (module, [set(b) ^ set(a) for a, b in zip(before, now)])
"""


@pytest.mark.slow
def test_importing_a_module_starts_no_thread_and_changes_no_environment_variable():
    files = sorted(PACKAGE.rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    statements = {
        ast.unparse(node): None
        for node in (node for tree in trees for node in tree.body)
        if (isinstance(node, ast.Import) and not node.names[0].name.startswith("openrlhf"))
        or (isinstance(node, ast.ImportFrom) and not node.module.startswith(("openrlhf", "__future__")))
    }
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]
    assert len(modules) > 200
    told = json.dumps([list(statements), modules])
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], input=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_files_that_continuous_integration_names_are_there():
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_public_paths_that_users_name_exist():
    for name in ("train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm", "lora_combiner"):
        assert importlib.util.find_spec(f"openrlhf.cli.{name}")
    from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor

    assert issubclass(SingleTurnAgentExecutor, AgentExecutorBase)


def test_generated_documents_are_up_to_date():
    """If this fails: make docs"""
    spec = importlib.util.spec_from_file_location("docs_update", ROOT / "docs" / "update.py")
    update = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(update)
    stale = [path.name for path, text in update.documents().items() if path.read_text(encoding="utf-8") != text]
    assert stale == []
