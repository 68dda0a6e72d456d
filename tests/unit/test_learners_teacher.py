"""A policy that learns from a teacher: gradients by autograd over whole softmaxes, advantages by hand."""

import math

import pytest
import torch
from small_rl import equal_rewards, make_groups, make_models, play, training

from openrlhf.models.body import decoder_body, hidden_states
from openrlhf.observability.metrics import Metrics
from openrlhf.types import TrainingBatch

ALONE_FLAGS = {"teacher.model_name_or_path": "t", "advantage_estimator": "reinforce", "remote_rm_url": None}


def taught_groups():
    """The teacher's word is all that pulls: with equal rewards nothing else does."""
    return equal_rewards(make_groups())


def gradient_of(groups=None, **flags):
    """The gradient of a round's single step, its batch and its models."""
    run, own = training(make_models(), **{**ALONE_FLAGS, **flags})
    found = {}

    def keep(step, accumulate):
        for micro in step.micro_batches():
            accumulate(micro, Metrics())
        for name, parameter in own.policy.named_parameters():
            found[name] = parameter.grad.clone()
            parameter.grad = None

    learners = run.learners
    batch, _ = learners.place(taught_groups() if groups is None else groups)
    learners.score(batch)
    learners.assign_advantages(batch)
    learners.update(batch, inspect=keep)
    return found, batch, own


def whole_softmaxes(policy, batch):
    """log π [A, V] of each sample, by a plain forward of the whole sequence without packing."""
    rows = []
    for sample in batch.samples:
        packed = TrainingBatch(samples=[sample]).pack([0]).tokens
        hidden = hidden_states(decoder_body(policy.model), packed, positions=packed.action_positions - 1).states_pD
        rows.append(torch.log_softmax(hidden @ policy.model.get_output_embeddings().weight.t(), dim=-1))
    return torch.cat(rows)


def divergence_by_hand(name, log_q, log_p):
    q, p = log_q.exp(), log_p.exp()
    middle = ((p + q) / 2).log()
    return {
        "reverse": (q * (log_q - log_p)).sum(1),
        "forward": (p * (log_p - log_q)).sum(1),
        "js": 0.5 * (q * (log_q - middle)).sum(1) + 0.5 * (p * (log_p - middle)).sum(1),
    }[name]


@pytest.mark.parametrize("name", ["reverse", "forward", "js"])
def test_a_loss_over_the_whole_vocabulary_has_the_gradient_of_the_divergence(name):
    """k = V, coefficient 0.7, mean over tokens. The teacher has 16 tokens, of which the policy has 13: its distribution
    is that over these 13."""
    gradients, batch, own = gradient_of(**{"teacher.loss": name, "teacher.top_k": 50, "teacher.coef": 0.7})
    assert batch.teacher_ids_AK.shape == (batch.num_actions, 13)
    with torch.no_grad():
        log_p = whole_softmaxes(own.teacher, batch)[:, :13].log_softmax(-1)
    policy = training(make_models(), **ALONE_FLAGS)[1].policy
    wanted = 0.7 * divergence_by_hand(name, whole_softmaxes(policy, batch), log_p).mean()
    wanted.backward()
    for name, parameter in policy.named_parameters():
        assert float((gradients[name] - parameter.grad).norm()) <= 2e-6 * max(1.0, float(parameter.grad.norm())), name


@pytest.mark.parametrize(
    "flags", [{"use_dynamic_batch": None, "max_tokens_per_gpu": None, "micro_train_batch_size": 1}]
)
@pytest.mark.parametrize("k", [3, 13])
def test_micro_batches_and_packing_change_nothing(flags, k):
    whole, *_ = gradient_of(**{"teacher.loss": "js", "teacher.top_k": k})
    cut, *_ = gradient_of(**{"teacher.loss": "js", "teacher.top_k": k, **flags})
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("estimator", ["reinforce", "group_norm"])
def test_a_reward_is_added_to_the_advantages_as_it_is(gamma, estimator):
    """A_t = what the estimator makes of the task's rewards + c · Σ_{i ≥ t} γ^(i−t) (log p(i) − log π(i)): neither
    whitened nor compared, and its size is its coefficient under every estimator."""
    flags = {"advantage_estimator": estimator, "teacher.gamma": gamma, "teacher.coef": 0.3}
    _, batch, own = gradient_of(make_groups(), **flags)
    bare, _ = training(make_models(), advantage_estimator=estimator)
    plain, _ = bare.learners.place(make_groups())
    bare.learners.score(plain)
    bare.learners.assign_advantages(plain)
    policy = training(make_models(), **ALONE_FLAGS)[1].policy
    with torch.no_grad():
        tokens_A = torch.cat([s.segment.token_ids[s.segment.action_mask] for s in batch.samples])
        gap_A = [
            whole_softmaxes(model, batch).gather(1, tokens_A[:, None]).squeeze(1) for model in (own.teacher, policy)
        ]
    rewards_A = (gap_A[0] - gap_A[1]).tolist()
    for i in range(len(batch)):
        own_slice = batch.actions_of(i)
        earned = rewards_A[own_slice]
        wanted = [0.3 * sum(gamma ** (j - t) * earned[j] for j in range(t, len(earned))) for t in range(len(earned))]
        actual = (batch.advantages_A - plain.advantages_A)[own_slice]
        torch.testing.assert_close(actual, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [None, "reverse", "forward", "js"])
def test_the_policy_comes_closer_to_its_teacher(loss):
    flags = ALONE_FLAGS | {"teacher.loss": loss, "teacher.top_k": 5, "actor_learning_rate": 3e-2}
    run, _ = training(make_models(), **flags)
    groups = taught_groups()
    said = [play(run.learners, groups) for _ in range(12 if loss else 2)]
    assert all(math.isfinite(one["teacher_kl"]) for one in said)
    if loss:  # samples that are not the policy's own any more say nothing of a reward
        assert said[-1]["teacher_kl"] < 0.5 * said[0]["teacher_kl"]


def test_a_teacher_is_no_adapter_and_no_reference():
    """Its log-probs are its own model's, whatever the policy and the reference are."""
    _, batch, own = gradient_of(init_kl_coef=0.1)
    with torch.no_grad():
        tokens_A = torch.cat([s.segment.token_ids[s.segment.action_mask] for s in batch.samples])
        wanted_A = whole_softmaxes(own.teacher, batch).gather(1, tokens_A[:, None]).squeeze(1)
    torch.testing.assert_close(batch.teacher_logprobs_A, wanted_A, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(batch.teacher_logprobs_A, batch.reference_logprobs_A)


def test_a_batch_without_samples_has_columns_of_the_right_width():
    run, _ = training(make_models(), **ALONE_FLAGS | {"teacher.loss": "js", "teacher.top_k": 4})
    batch = TrainingBatch(samples=[])
    run.learners.score(batch)
    assert batch.teacher_ids_AK.shape == batch.teacher_logprobs_AK.shape == (0, 4)
    assert batch.teacher_ids_AK.dtype == torch.int32
