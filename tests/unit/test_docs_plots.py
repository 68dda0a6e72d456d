"""The script behind the pictures of docs/algorithms.md: what it would run, what it reads, what it draws."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from openrlhf.config import parse, require_runnable
from openrlhf.observability import charts
from openrlhf.rollout.embedded.sampler import sample

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import plots  # noqa: E402
from mismatched_engine import NoisySampler  # noqa: E402

KEPT = sorted((DOCS / "images" / "data").glob("*.json"))


@pytest.mark.parametrize("run", plots.runs(list(plots.FAMILIES), folder=Path("runs"), seeds=1), ids=str)
def test_every_run_of_every_family_could_start(run, capsys):
    flags = plots.rl_flags(plots.make_task(seed=0), Path("runs"), seed=0, steps=50)
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    config = parse("train_ppo_ray", words)
    changed = parse("train_ppo_ray", [*_without(words, run.plan(50)["words"]), *run.plan(50)["words"]])
    require_runnable(changed)
    assert capsys.readouterr().err == ""
    assert run.label in ("every group", "no correction", "reinforce_baseline", "RL alone") or changed != config


def _without(words: list[str], others: list[str]) -> list[str]:
    """As in a file, which flags override."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for name, value in pairs if name not in others for word in (name, value)]


def records(values, *, judged=None):
    for step, value in enumerate(values, start=1):
        yield {"step": step, "kind": "train", "score": value} | ({"rollout/judged_groups": judged} if judged else {})
        yield {"step": step, "kind": "eval", "eval_sorting_pass1": value / 2}


def test_numbers_of_two_seeds_are_their_mean_and_range_as_far_as_both_go():
    """0.2 and 0.4: mean 0.3; the third step of the second run has no partner."""
    found = {"rloo": [list(records([0.2, 0.5])), list(records([0.4, 0.5, 0.9]))]}
    score, held_out = plots.collect("estimators", found)["panels"]
    assert score["curves"] == [{"name": "rloo", "points": [[1, 0.3, 0.2, 0.4], [2, 0.5, 0.5, 0.5]]}]
    assert held_out["curves"][0]["points"][0] == [1, 0.15, 0.1, 0.2]


def test_prompts_asked_are_those_judged_and_a_batch_where_nothing_is_filtered():
    found = {"every group": [list(records([0.1, 0.2]))], "dynamic sampling": [list(records([0.1, 0.2], judged=300))]}
    plain, filtered = plots.collect("sampling", found)["panels"][2]["curves"]
    assert [x for x, _ in plain["points"]] == [128, 256]
    assert [x for x, _ in filtered["points"]] == [300, 600]


def test_a_picture_shows_every_curve_inside_its_panel_and_is_small():
    names = list(plots.FAMILIES["estimators"].variants)
    found = {name: [list(records([(i + k) / 70 for i in range(62)]))] for k, name in enumerate(names)}
    svg = charts.picture(plots.collect("estimators", found))
    assert len(svg.encode()) < 60_000
    page = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in page.iter(f"{space}text")]
    assert set(names) <= set(texts)
    assert texts.count("step") == 2
    trends = [path for path in page.iter(f"{space}path") if path.get("class").startswith("trend")]
    assert len({path.get("class") for path in trends}) == len(names)
    heights = [float(p.split()[1]) for path in trends for p in path.get("d")[1:].split("L")]
    assert charts.PANEL_TOP <= min(heights) < max(heights) <= charts.PANEL_BOTTOM


@pytest.mark.parametrize("numbers", KEPT, ids=lambda path: path.stem)
def test_the_pictures_are_those_of_the_numbers_kept(numbers):
    """If this fails: python docs/plots.py --draw"""
    picture = (DOCS / "images" / f"{numbers.stem}.svg").read_text(encoding="utf-8")
    assert picture == charts.picture(json.loads(numbers.read_text()))


def test_the_mismatched_engine_reports_what_it_samples_from_and_evaluates_clean():
    logits = torch.randn(64, 11, generator=torch.Generator().manual_seed(1))
    rest = {
        "uniform": (np.arange(64) + 0.5) / 64 + 1e-6 * np.arange(64),
        "top_p": np.ones(64, dtype=np.float32),
        "top_k": np.full(64, -1),
        "min_p": np.zeros(64, dtype=np.float32),
    }
    training, evaluation = np.ones(64, dtype=np.float32), np.full(64, 0.6, dtype=np.float32)
    noisy = NoisySampler(1.0)
    drawn = noisy(logits.clone(), temperature=training, **rest)
    gap = drawn.logprobs - logits.log_softmax(-1).gather(-1, drawn.token_ids[:, None]).squeeze(-1)
    assert 0.2 < gap.abs().mean() < 2
    clean, plain = (f(logits.clone(), temperature=evaluation, **rest) for f in (noisy, sample))
    assert torch.equal(clean.token_ids, plain.token_ids)
    assert torch.equal(clean.logprobs, plain.logprobs)
    silent, plain = (f(logits.clone(), temperature=training, **rest) for f in (NoisySampler(0.0), sample))
    assert torch.equal(silent.token_ids, plain.token_ids)
