"""What the workers of one process do with a round: who is asked, who learns, and what the coefficient becomes."""

import copy
import dataclasses
import math

import pytest
import torch
from small_rl import equal_rewards, play, training

from openrlhf.runs.rl_models import RLModels
from openrlhf.types import Group


def moved(before, module) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


class Counting(torch.nn.Module):
    """Counts forwards; otherwise the module it wraps."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner
        self.routers, self.replays = inner.routers, inner.replays
        self.scored = self.trained = 0

    @property
    def model(self):
        return self.inner.model

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled():
            self.trained += 1
        else:
            self.scored += 1
        return self.inner(*args, **kwargs)


def counting(models):
    return dataclasses.replace(models, policy=Counting(models.policy))


def test_the_policy_waits_for_the_critic(models, groups):
    """freezing_steps 1: in rounds 0 and 1 only the critic moves, in the third both."""
    run, own = training(models, advantage_estimator="gae", freezing_actor_steps=1)
    policy, critic = weights(own.policy), weights(own.critic)
    for _ in range(2):
        alone = play(run.learners, groups)
        assert not moved(policy, own.policy)
        assert moved(critic, own.critic)
        assert "policy_loss" not in alone
    assert "policy_loss" in play(run.learners, groups)
    assert moved(policy, own.policy)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_loss_that_chooses_tokens_knows_and_runs_every_sample(models, groups, loss):
    """In one optimizer step per round, where others need no log-probs before it; the samples of the first prompt earned
    the same, so that others would not run them."""
    run, _ = training(models, advantage_estimator="group_norm", policy_loss_type=loss)
    batch, _ = run.learners.place([equal_rewards(groups)[0], groups[1]])
    run.learners.score(batch)
    assert bool((batch.old_logprobs_A < 0).all())
    run.learners.assign_advantages(batch)
    assert not bool(batch.advantages_A[batch.actions_of(0)].any())
    run.learners.update(batch, keep=True)
    assert not batch.seen_A["new_logprobs"].isnan().any()


def test_a_policy_that_waits_chooses_no_tokens(models, groups):
    run, _ = training(models, advantage_estimator="gae", freezing_actor_steps=0, policy_loss_type="kl_cov")
    assert "policy_loss" not in play(run.learners, groups)
    assert "policy_loss" in play(run.learners, groups)


def test_the_critic_learns_its_returns(models, groups):
    """The same round again and again: the value loss falls to a tenth."""
    run, _ = training(models, advantage_estimator="gae", value_clip=100, actor_learning_rate=1e-9)
    losses = [play(run.learners, groups)["critic_loss"] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]


def test_fp16_learns_what_fp32_learns(models, groups):
    """Policy, reference and critic in fp16, losses scaled: what is measured differs by what fp16 rounds.

    The critic's first gradients overflow until its scale is low enough; nothing moves before that, and those steps
    are counted and have no norm.
    """
    half = RLModels(
        policy=copy.deepcopy(models.policy).half(),
        reference=copy.deepcopy(models.reference).half(),
        critic=copy.deepcopy(models.critic).half(),
    )
    flags = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2", "entropy_loss_coef": 0.1}
    full, low = (training(m, advantage_estimator="gae", actor_learning_rate=1e-9, **flags)[0] for m in (models, half))
    expected, rounds = play(full.learners, groups), [play(low.learners, groups) for _ in range(6)]
    for name in ("policy_loss", "critic_loss", "kl", "entropy_loss", "actor_grad_norm", "critic_grad_norm"):
        measured = next(values[name] for values in rounds if name in values)
        assert math.isfinite(measured)
        assert measured == pytest.approx(expected[name], rel=2e-2, abs=1e-3), name
    assert rounds[-1]["critic_loss"] < expected["critic_loss"]
    assert rounds[0]["critic_skipped_steps"] == 1


@pytest.mark.parametrize(
    ("flags", "scored"),
    [
        ({}, 0),  # one step per round: the current log-probs are the old ones
        ({"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2"}, 0),
        ({"init_kl_coef": 0.1}, 1),  # KL in the reward is that of the policy as it sampled
        ({"train_batch_size": 4}, 1),  # two steps per round
        ({"train_batch_size": 6, "rollout_batch_size": 4}, 0),  # these six samples are one step of a larger round's two
        ({"max_epochs": 2}, 1),
    ],
)
def test_old_log_probs_cost_a_forward_only_where_they_are_needed(models, groups, flags, scored):
    """And `score` makes them: an update scores nothing."""
    run, own = training(counting(models), advantage_estimator="rloo", **flags)
    run.learners.score(run.learners.place(groups).batch)
    assert own.policy.scored == scored
    play(run.learners, groups)
    assert own.policy.scored == 2 * scored


def test_kl_is_a_true_mean_over_the_tokens_and_a_cost_in_the_return(models, groups):
    """rloo's advantages cancel within a group, so the mean return is the mean cost alone."""
    run, _ = training(models, advantage_estimator="rloo", init_kl_coef=0.1)
    values = play(run.learners, groups)
    batch, _ = run.learners.place(groups)
    packed = batch.pack(range(len(batch)))
    with torch.no_grad():
        gap_A = (
            models.policy(packed.tokens, temperature=1.0).logprobs_A
            - models.reference(packed.tokens, temperature=1.0).logprobs_A
        )
    assert values["kl"] == pytest.approx(float(gap_A.mean()), rel=1e-4)
    assert values["kl_coef"] == 0.1
    assert values["return"] == pytest.approx(-0.1 * float(gap_A.sum()) / len(batch), rel=1e-3)


@pytest.mark.parametrize("mode", [{}, {"use_kl_loss": True, "kl_estimator": "k2"}])
def test_the_coefficient_adapts_and_is_in_the_state(models, groups, mode):
    """A target far below the measured KL: the error is capped at 0.2, six samples over a horizon of 12: × 1.1."""
    flags = {"advantage_estimator": "rloo", "init_kl_coef": 0.1, "kl_target": 1e-6, "kl_horizon": 12, **mode}
    run, _ = training(models, **flags)
    factor = 1.1 if play(run.learners, groups)["kl"] > 0 else 0.9
    assert play(run.learners, groups)["kl_coef"] == pytest.approx(0.1 * factor)
    state = run.learners.state_dict()
    resumed, _ = training(models, **flags)
    resumed.learners.load_state_dict(state)
    assert play(resumed.learners, groups)["kl_coef"] == state["kl"]["coef"]


def test_kl_as_a_loss_pulls_the_policy_to_its_reference(models, groups):
    """Rewards aside, forty updates on k2 bring the KL to a tenth of what it was."""
    flags = {"init_kl_coef": 1, "use_kl_loss": True, "kl_estimator": "k2"}
    run, _ = training(models, advantage_estimator="rloo", **flags)
    measured = [play(run.learners, equal_rewards(groups))["kl"] for _ in range(40)]
    assert measured[-1] < 0.1 * measured[0]


def test_an_entropy_bonus_spreads_the_policy_and_a_zero_logs_it(models, groups):
    """Rewards aside, thirty updates with the bonus raise the entropy; with the coefficient 0 nothing moves."""
    run, _ = training(models, advantage_estimator="rloo", entropy_loss_coef=0.5, actor_learning_rate=1e-3)
    bonus = [play(run.learners, equal_rewards(groups))["entropy_loss"] for _ in range(30)]
    assert bonus[-1] > bonus[0] + 1e-4
    run, _ = training(models, advantage_estimator="rloo", entropy_loss_coef=0)
    logged = [play(run.learners, equal_rewards(groups))["entropy_loss"] for _ in range(3)]
    assert logged[-1] == pytest.approx(logged[0], abs=1e-6)
    run, _ = training(models, advantage_estimator="rloo")
    assert "entropy_loss" not in play(run.learners, groups)


def test_idle_groups_cost_no_forward_and_change_no_gradient(models, groups):
    """One of two groups agrees: with ppo alone its three samples are skipped, with the entropy logged they are not."""
    mixed = [equal_rewards(groups)[0], groups[1]]
    flags = {"advantage_estimator": "group_norm", "max_tokens_per_gpu": 8}
    skipping, skipped = training(counting(models), **flags)
    logging, logged = training(counting(models), **flags, entropy_loss_coef=0)
    with_skip, without = play(skipping.learners, mixed), play(logging.learners, mixed)
    assert (skipped.policy.trained, logged.policy.trained) == (3, 6)
    for name in ("actor_grad_norm", "policy_loss"):
        assert with_skip[name] == pytest.approx(without[name], rel=1e-5)


def test_idle_groups_cost_no_scoring_either(models, groups):
    mixed = [equal_rewards(groups)[0], groups[1]]
    flags = {"advantage_estimator": "group_norm", "max_tokens_per_gpu": 8, "max_epochs": 2}
    run, own = training(counting(models), **flags)
    play(run.learners, mixed)
    assert (own.policy.scored, own.policy.trained) == (3, 6)


@pytest.mark.parametrize("name", ["tis", "icepop", "seq-mask-tis"])
def test_a_correction_takes_away_what_the_engine_and_the_trainer_disagree_about(models, groups, name):
    """Rollout log-probs 3 nats off on one sample: its tokens are touched, and the gradient is not the uncorrected one."""
    run, _ = training(models, advantage_estimator="rloo")
    plain = play(run.learners, groups)
    run, _ = training(models, advantage_estimator="rloo", enable_vllm_is_correction=True, vllm_is_correction_type=name)
    off = [
        Group(prompt=g.prompt, trajectories=tuple(_shifted(t, 3.0 * (i == 0)) for i, t in enumerate(g.scored)))
        for g in groups
    ]
    corrected = play(run.learners, off)
    assert corrected["is_corrected"] >= 3 / 12
    assert corrected["logprobs_diff"] > plain["logprobs_diff"]
    assert corrected["actor_grad_norm"] != pytest.approx(plain["actor_grad_norm"], rel=1e-3)


def _shifted(trajectory, by):
    (segment,) = trajectory.segments
    logprobs = torch.where(segment.action_mask, segment.rollout_logprobs - by, 0.0)
    return dataclasses.replace(trajectory, segments=(dataclasses.replace(segment, rollout_logprobs=logprobs),))
