"""What samples have done to a step, and a step's numbers beside the logged ones."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from small_rl import make_groups

from openrlhf.runs.replay import Inspection, OptimizerStep, Replay, ReplayedStep, summary, table
from openrlhf.types import SampleKey, TrainingBatch, TrainingSample

GROUPS = make_groups()
KEYS = [SampleKey(0, 0), SampleKey(0, 1), SampleKey(1, 0)]


class AddingBackend:
    """A parameter of two numbers and one that no sample reaches; gradients add up until they are dropped."""

    def __init__(self):
        self.sum = None

    def gradients(self):
        return [self.sum, None]

    def drop_gradients(self):
        self.sum = None


def inspected(gradients: dict[SampleKey, tuple[float, float]]) -> Inspection:
    """One optimizer step of a micro-batch of all these samples; each has the loss 0.5."""
    backend = AddingBackend()
    together = SimpleNamespace(keys=tuple(gradients), is_filler=False)
    filler = SimpleNamespace(keys=(), is_filler=True)
    step = SimpleNamespace(
        micro_batches=lambda: [together, filler],
        single_samples=lambda: [SimpleNamespace(keys=(key,), is_filler=False) for key in gradients],
    )

    def run(micro, metrics):
        assert not micro.is_filler
        torch.rand(1)  # dropout
        own = sum(torch.tensor(gradients[key]) for key in micro.keys)
        backend.sum = own if backend.sum is None else backend.sum + own
        return torch.tensor(0.5 * len(micro.keys))

    inspection = Inspection(backend)
    before = torch.get_rng_state()
    inspection(step, run)
    assert torch.equal(torch.get_rng_state(), before), "the step that follows draws other numbers"
    assert backend.sum is None, "the step that follows has gradients that are not its own"
    return inspection


def trained() -> TrainingBatch:
    members = {t.key: t.segments[0] for group in GROUPS for t in group.scored}
    samples = [TrainingSample(key=k, segment=members[k], rewards_A=torch.zeros(members[k].num_actions)) for k in KEYS]
    batch = TrainingBatch(samples=samples)
    batch.advantages_A = batch.per_action([1.0, -2.0, 0.5])
    batch.seen_A = {"new_logprobs": batch.rollout_logprobs_A + batch.per_action([0.25, 0.0, -1.0])}
    return batch


def test_shares_are_projections_on_the_gradient_of_the_step():
    """g = (3, 0), (0, 4), (-1, 0): G = (2, 4), |G|² = 20, and g·G = 6, 16, -2."""
    inspection = inspected(dict(zip(KEYS, [(3.0, 0.0), (0.0, 4.0), (-1.0, 0.0)], strict=True)))
    assert inspection.steps == [OptimizerStep(gradient_norm=pytest.approx(math.sqrt(20)), samples=3)]
    effects = inspection.effects(trained(), GROUPS)
    assert [(e.prompt, e.sample) for e in effects] == [(0, 1), (0, 0), (1, 0)]
    assert [e.share for e in effects] == pytest.approx([0.8, 0.3, -0.1])
    assert [e.along for e in effects] == pytest.approx([16 / 20**0.5, 6 / 20**0.5, -2 / 20**0.5])
    assert [e.gradient_norm for e in effects] == [4, 3, 1]
    assert [e.advantage for e in effects] == [-2, 1, 0.5]
    assert [e.logprob_gap for e in effects] == pytest.approx([0, 0.25, 1], abs=1e-6)
    assert [e.reward for e in effects] == [0, 1, 1]


def test_a_sample_that_is_not_finite_is_the_first():
    """One sample's NaN makes the step's gradient NaN, and with it all shares. Of several it is the one whose reward is
    such a number."""
    inspection = inspected(dict(zip(KEYS, [(30.0, 0.0), (0.0, math.nan), (math.inf, 0.0)], strict=True)))
    effects = inspection.effects(trained(), GROUPS)
    assert [(e.prompt, e.sample) for e in effects][-1] == (0, 0)
    broken = [
        dataclasses.replace(group, trajectories=tuple(
            dataclasses.replace(t, reward=math.nan) if t.key == KEYS[2] else t for t in group.trajectories
        ))
        for group in GROUPS
    ]  # fmt: skip
    first = inspection.effects(trained(), broken)[0]
    assert (first.prompt, first.sample) == (1, 0)


def test_differences_are_those_of_the_last_bit():
    """What only the log has, and what measures the machine, is not compared; NaN is null there."""
    metrics = {"policy_loss": 0.1 + 0.2, "actor_lr": 1e-3, "kl": math.nan, "perf/max_tokens_per_gpu": 3.0, "own": 1.0}
    logged = {"policy_loss": 0.3, "actor_lr": 1e-3, "kl": None, "perf/max_tokens_per_gpu": 9, "reward_max": 1.0}
    step = ReplayedStep(step=3, metrics=metrics, logged=logged)
    assert step.differences == {"policy_loss": (0.3, 0.1 + 0.2)}
    assert step.bit_equal is False
    assert ReplayedStep(step=3, metrics=metrics, logged=logged | {"policy_loss": 0.1 + 0.2}).bit_equal is True
    assert ReplayedStep(step=3, metrics=metrics, logged=None).bit_equal is None


def test_the_table_is_short_unless_all_is_asked_for():
    inspection = inspected(dict(zip(KEYS, [(3.0, 0.0), (0.0, 4.0), (-1.0, 0.0)], strict=True)))
    found = Replay(
        run="r",
        step=7,
        origin=None,
        origin_step=0,
        replayed=[],
        weights=None,
        optimizer_steps=inspection.steps,
        effects=inspection.effects(trained(), GROUPS),
        idle=2,
        notes=[],
    )
    head, first, more = table(found, most=1)
    assert head.split() == [
        "share",
        "gradient",
        "norm",
        "loss",
        "reward",
        "advantage",
        "log-prob",
        "gap",
        "tokens",
        "sample",
    ]
    assert first.split() == ["80.0%", "4", "0.5", "0", "-2", "0", "6", "prompt", "0", "sample", "1"]
    assert more == "… and 2 more (--all)"
    assert len(table(found, most=None)) == 4
    assert summary(found) == [
        "the gradient of step 7 has norm 4.47214, of 3 samples; 2 more have an advantage of 0 and were left out"
    ]
