"""docs/algorithms.md is true: its commands parse and could run, its flags exist, its code works, nothing is left out."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from openrlhf.algorithms import advantages, losses
from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.losses import POLICY_LOSSES, LossInputs, LossSettings
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.config import parse, require_runnable
from openrlhf.config.aliases import vocabulary
from openrlhf.config.training import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", PROSE)
RECIPES = dict(re.findall(r"^\| ([^|]+) \| `(--[^`]+)` \|$", TEXT, flags=re.MULTILINE))
"""What a reader wants → the flags to add."""


def base_command() -> list[str]:
    (command,) = [text for language, text in BLOCKS if language == "bash"]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "openrlhf.cli.train_ppo_ray"]
    return words[3:]


def test_every_recipe_is_found():
    names = ("PPO", "REINFORCE++:", "REINFORCE++-baseline", "RLOO", "GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "SAPO",
             "GMPO", "LUSPO", "VESPO", "DPPO by total variation", "DPPO by KL", "Clip-Cov", "KL-Cov", "MaxRL", "Distillation",
             "Pass@k training", "ReMax", "Process rewards", "Process supervision", "GDPO")  # fmt: skip
    assert [next(name for name in names if wish.startswith(name)) for wish in RECIPES] == list(names)


@pytest.mark.parametrize("wish", RECIPES)
def test_recipes_parse_without_a_note_and_could_run(wish, capsys):
    config = parse("train_ppo_ray", [*base_command(), *shlex.split(RECIPES[wish])])
    require_runnable(config)
    assert capsys.readouterr().err == ""


def test_every_flag_named_exists():
    named = {word.removeprefix("--") for span in SPANS for word in re.findall(r"--[\w.]+", span)}
    assert len(named) > 60
    assert named - {"help"} <= vocabulary("train_ppo_ray").names()


@pytest.mark.parametrize(
    "registry", [ESTIMATORS, POLICY_LOSSES, KL_ESTIMATORS, CORRECTIONS, SCHEDULES, list(Aggregation)]
)
def test_every_algorithm_is_named(registry):
    assert set(registry) <= set(SPANS)


def test_files_named_exist():
    folders = (ROOT, ROOT / "docs", ROOT / "openrlhf", ROOT / "openrlhf" / "algorithms")
    for name in {span for span in SPANS if span.endswith(".py")}:
        assert any(list(folder.glob(name)) for folder in folders), name
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert target.startswith("images/") or (ROOT / "docs" / target).exists(), target


def test_links_within_the_document_have_their_heading():
    headings = re.findall(r"^#+ (.+)$", PROSE, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


def example(module, registry: str):
    """The document's entry for this registry, from its code, on a copy of the module."""
    (code,) = [text for language, text in BLOCKS if language == "python" and f"{registry}[" in text]
    assert len(code.strip().splitlines()) <= 15
    before = getattr(module, registry)
    names = {**vars(module), "Tensor": torch.Tensor, registry: dict(before)}
    exec(code, names)
    (added,) = names[registry].keys() - before.keys()
    return names[registry][added]


def test_the_example_of_an_estimator_works():
    """Of 0, 1 and 9 the median is 1."""
    values, samples = torch.tensor([0.0, 9.0, 1.0]), torch.arange(3)
    shaping = example(advantages, "ESTIMATORS").shape(values, samples)
    assert shaping.baseline_M.tolist() == [1, 1, 1]
    assert shaping.scale_M.tolist() == [1, 1, 1]
    columns = example(advantages, "ESTIMATORS").shape(torch.stack([values, 2 * values], dim=1), samples)
    assert columns.baseline_M.tolist() == [[1, 2]] * 3


def test_the_example_of_a_loss_works():
    """l = −A log π, dl/dlog π = −A."""
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.tensor([3.0, -1.0]), torch.tensor([0, 0]))
    result = example(losses, "POLICY_LOSSES").function(inputs, LossSettings(clip_low=0.2, clip_high=0.2))
    assert result.loss_A.tolist() == [1.5, -2.0]
    assert not result.clipped_A.any()
    (gradient,) = torch.autograd.grad(result.loss_A.sum(), logprobs)
    assert gradient.tolist() == [-3.0, 1.0]
