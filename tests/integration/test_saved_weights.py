"""What a real run saves: live or averaged weights, moved by AdamW or by Muon."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.observability.loggers import read_metrics, without_times

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 7) for query in queries]
"""
"""Differs between the samples of almost any prompt, so that a random model gets a gradient."""


@pytest.fixture
def train(cli, tmp_path):
    """Runs two optimizer steps at a constant rate; returns the folder of the saved model and the numbers logged."""
    (tmp_path / "any_reward.py").write_text(REWARD)

    def run(name: str, **overrides):
        ran = cli(
            reward__remote_url=tmp_path / "any_reward.py",
            actor__lr_scheduler="constant",
            ckpt__output_dir=tmp_path / name,
            logger__run_dir=tmp_path / f"run_{name}",
            **overrides,
        )
        assert ran.rc == 0, ran.err
        return tmp_path / name, [without_times(r) for r in read_metrics(tmp_path / f"run_{name}" / "metrics.jsonl")]

    return run


def weights(folder) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_the_average_is_saved_and_training_does_not_notice(inputs, train):
    """After two steps with β = ¾ the average is 9/16·θ₀ + 3/16·θ₁ + ¼·θ₂. Along the way from θ₀ to θ₂ that is ¼ of it,
    and up to 3/16 more, as θ₁ lies between the two."""
    live_model, live_metrics = train("live", actor__adam__lr=1e-3)
    averaged_model, averaged_metrics = train(
        "averaged", actor__adam__lr=1e-3, train__enable_ema=True, train__ema_beta=0.75
    )
    assert averaged_metrics == live_metrics
    start, averaged, live = (
        torch.cat([p.flatten() for p in weights(folder).values()])
        for folder in (inputs.model, averaged_model, live_model)
    )
    way = live - start
    assert float(way.norm()) > 0
    assert 4 / 16 < float((averaged - start) @ way / (way @ way)) < 7 / 16


def test_muon_moves_the_matrices_of_the_layers(inputs, train):
    """With AdamW's rate at 0, only what Muon updates can move. The head is tied to the embeddings."""
    model, metrics = train("muon", actor__optim="muon", actor__muon__lr=1e-3, actor__adam__lr=0)
    assert [record["actor_lr"] for record in metrics] == [1e-3, 1e-3]
    before, after = weights(inputs.model), weights(model)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name, p in before.items() if p.dim() == 2 and "embed" not in name}
    assert moved
