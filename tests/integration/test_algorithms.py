"""Switches of the RL mathematics in real runs on the demo's task."""

import random
import statistics

import pytest
import torch
from demo_runs import column, run, scores
from small_sections import loading
from transformers import AutoModelForSequenceClassification

from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.models.loading import load_value_model
from openrlhf.rollout.embedded import EmbeddedEngine

SMALL_ROUNDS = ["--rollout.batch_size", "32", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "128"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (0.05, "--algo.kl.init_coef 0.8 --algo.kl.horizon 800 --algo.kl.use_loss --algo.kl.estimator k2"),
        (0.075, "--algo.kl.init_coef 0.4 --algo.kl.horizon 3000"),
    ],
    ids=["loss", "reward"],
)
def test_an_adaptive_coefficient_holds_kl_at_its_target(demo, tmp_path, target, flags):
    """100 steps from a policy that is its own reference: over the last 20 the KL is within 30% of the target."""
    run_dir = run(
        demo,
        tmp_path / "run",
        *SMALL_ROUNDS,
        *("--data.max_samples", "3200", "--actor.adam.lr", "3e-4", "--eval.at_start", "false"),
        *("--algo.kl.target", str(target), *flags.split()),
        steps=100,
    )
    measured, coefficients = column(run_dir, "kl"), column(run_dir, "kl_coef")
    assert len(measured) == 100
    assert abs(measured[0]) < 0.01 * target
    assert statistics.mean(measured[-20:]) == pytest.approx(target, rel=0.3)
    assert len(set(coefficients)) > 90


@pytest.fixture
def mismatched(monkeypatch):
    """An engine whose log-probs are off by normal noise, as if its kernels disagreed with the trainer's."""
    generate = EmbeddedEngine.generate

    async def noisy(self, token_ids, sampling_params, images=()):
        result = await generate(self, token_ids, sampling_params, images)
        noise = random.Random(sampling_params.seed)
        return type(result)(
            token_ids=result.token_ids,
            logprobs=[p + noise.gauss(0.0, 0.3) for p in result.logprobs],
            versions=result.versions,
            finish_reason=result.finish_reason,
            text=result.text,
        )

    monkeypatch.setattr(EmbeddedEngine, "generate", noisy)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_mismatched_rollout_trains_stably_and_shows(demo, tmp_path, mismatched, name):
    """Noise of 0.3 nats: E|noise| = 0.3·√(2/π) = 0.239 is what `logprobs_diff` must show at every step."""
    run_dir = run(
        demo,
        tmp_path / "run",
        *("--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_type", name),
        steps=5,
    )
    before, after = scores(run_dir)
    assert after >= before + 0.1
    assert column(run_dir, "logprobs_diff") == pytest.approx([0.239] * 5, rel=0.05)
    assert max(column(run_dir, "actor_grad_norm")) < 10 * statistics.median(column(run_dir, "actor_grad_norm"))
    assert all(weight > 0 for weight in column(run_dir, "is_weight"))


def test_the_value_network_is_saved_and_is_not_the_one_it_started_from(demo, tmp_path):
    run_dir = run(
        demo,
        tmp_path / "run",
        *SMALL_ROUNDS,
        *("--algo.advantage.estimator", "gae", "--critic.adam.lr", "1e-3", "--critic.save_value_network"),
        *("--data.max_samples", "64", "--eval.at_start", "false"),
        steps=2,
    )
    folder = run_dir / "model_critic"
    saved = load_value_model(folder, loading(), fresh_head=False)
    start = load_value_model(demo.folder / "inputs" / "model", loading(seed=42))
    names = dict(start.named_parameters())
    assert all(not torch.equal(p, names[name]) for name, p in saved.named_parameters())
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.testing.assert_close(classifier.score.weight, saved.head.weight)


def test_without_the_flag_no_value_network_is_saved(demo, tmp_path):
    run_dir = run(
        demo,
        tmp_path / "run",
        *SMALL_ROUNDS,
        *("--algo.advantage.estimator", "gae", "--data.max_samples", "32", "--eval.at_start", "false"),
        steps=1,
    )
    assert not (run_dir / "model_critic").exists()
