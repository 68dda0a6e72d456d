"""A policy that learns from a teacher: gradients by autograd over whole softmaxes, advantages by hand."""

import copy
import dataclasses
import math

import pytest
import torch
from small_rl import equal_rewards, make_groups, make_models, play, training

from openrlhf.config.backend import LoraSection
from openrlhf.learners.advantages import other_prompt
from openrlhf.models.adapters import add_adapter
from openrlhf.models.body import decoder_body, hidden_states
from openrlhf.observability.metrics import Metrics
from openrlhf.types import PackedTokens, TrainingBatch

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


def test_a_divergence_is_a_mean_over_tokens_unless_a_mean_is_asked_for():
    """gmpo's own mean is over samples, of 3, 4 and 4 tokens here: the divergence follows the flag alone."""
    flags = {"teacher.loss": "reverse", "teacher.top_k": 13}
    of_tokens, *_ = gradient_of(**flags)
    of_gmpo, *_ = gradient_of(**flags, policy_loss_type="gmpo")
    of_samples, *_ = gradient_of(**flags, **{"algo.loss_agg": "sequence"})
    for name, gradient in of_tokens.items():
        torch.testing.assert_close(of_gmpo[name], gradient, rtol=1e-5, atol=1e-7)
    assert any(float((of_samples[name] - gradient).norm()) > 1e-4 for name, gradient in of_tokens.items())


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


# ---------------------------------------------------------------- the teacher reads another prompt, or is the policy

CURRENT = {"teacher.model_name_or_path": None, "teacher.policy": "current", "teacher.prompt_key": "hint"}
HINTS = {0: (7, 1, 12, 3), 1: (9,)}
"""Longer than the prompts of two tokens, and shorter."""


def hinted(groups, hints=HINTS):
    return [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, teacher_ids=hints[group.prompt.ordinal]))
        for group in groups
    ]


def logprobs_after(policy, batch, hints):
    """log π [A, V] of each sample's actions, the first two tokens replaced, by plain forwards of whole sequences."""
    rows = []
    for sample in batch.samples:
        ids = torch.tensor([*hints[sample.key.prompt], *sample.segment.token_ids[2:].tolist()])
        mask = torch.cat([torch.zeros(len(hints[sample.key.prompt]), dtype=torch.bool), sample.segment.action_mask[2:]])
        packed = PackedTokens.from_sequences([ids], [mask])
        hidden = hidden_states(decoder_body(policy.model), packed, positions=mask.nonzero().flatten() - 1).states_pD
        rows.append(torch.log_softmax(hidden @ policy.model.get_output_embeddings().weight.t(), dim=-1))
    return torch.cat(rows)


def actions_of(batch):
    return torch.cat([s.segment.token_ids[s.segment.action_mask] for s in batch.samples])


@pytest.mark.parametrize("flags", [{"teacher.prompt_key": "hint"}, CURRENT])
def test_a_teacher_reads_its_own_prompt_before_the_same_response(flags):
    """Also across the feedback of a second turn, which stays. What the policy reads stays as it was."""
    _, batch, own = gradient_of(hinted(taught_groups()), **flags)
    _, plain, _ = gradient_of()
    with torch.no_grad():
        teacher = make_models().policy if flags is CURRENT else own.teacher  # before the update
        wanted_A = logprobs_after(teacher, batch, HINTS).gather(1, actions_of(batch)[:, None]).squeeze(1)
    torch.testing.assert_close(batch.teacher_logprobs_A, wanted_A, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.old_logprobs_A, plain.old_logprobs_A, rtol=0, atol=0)
    assert [len(s) for s in batch.samples] == [len(s) for s in plain.samples]


def test_a_loss_learns_from_what_the_policy_says_after_the_other_prompt():
    """k = V: the gradient is that of KL(p‖π) with p the policy's own distribution after the hint, held fixed."""
    gradients, batch, _ = gradient_of(
        hinted(taught_groups()), **CURRENT, **{"teacher.loss": "forward", "teacher.top_k": 13}
    )
    policy = training(make_models(), **{**ALONE_FLAGS, **CURRENT})[1].policy
    with torch.no_grad():
        log_p = logprobs_after(policy, batch, HINTS)
    divergence_by_hand("forward", whole_softmaxes(policy, batch), log_p).mean().backward()
    for name, parameter in policy.named_parameters():
        assert float((gradients[name] - parameter.grad).norm()) <= 2e-6 * max(1.0, float(parameter.grad.norm())), name
    assert max(float(gradient.norm()) for gradient in gradients.values()) > 1e-3


def test_a_policy_that_reads_its_own_prompt_earns_exactly_nothing():
    groups = taught_groups()
    same = {group.prompt.ordinal: None for group in groups}
    for group in groups:  # the samples of these groups have prompts of their own: one is enough for each group
        same[group.prompt.ordinal] = tuple(group.trajectories[0].segments[0].token_ids[:2].tolist())
    groups = [dataclasses.replace(group, trajectories=group.trajectories[:1]) for group in hinted(groups, same)]
    _, batch, _ = gradient_of(groups, **CURRENT, init_kl_coef=0)
    assert torch.equal(batch.teacher_logprobs_A, batch.old_logprobs_A)
    run, _ = training(make_models(), **{**ALONE_FLAGS, **CURRENT})
    assert play(run.learners, groups)["teacher_kl"] == 0.0


def test_the_current_policy_is_that_before_each_update():
    run, own = training(make_models(), **{**ALONE_FLAGS, **CURRENT, "actor_learning_rate": 3e-2})
    groups, seen = hinted(taught_groups()), []
    for _ in range(2):
        batch, _ = run.learners.place(groups)
        run.learners.score(batch)
        with torch.no_grad():
            wanted_A = logprobs_after(own.policy, batch, HINTS).gather(1, actions_of(batch)[:, None]).squeeze(1)
        torch.testing.assert_close(batch.teacher_logprobs_A, wanted_A, rtol=1e-4, atol=1e-5)
        run.learners.assign_advantages(batch)
        run.learners.update(batch)
        seen.append(batch.teacher_logprobs_A)
    assert not torch.allclose(*seen)


@pytest.mark.parametrize("loss", [None, "reverse"])
def test_the_initial_policy_is_the_model_below_the_adapter(loss):
    models = make_models()
    bare = copy.deepcopy(models.policy)
    flags = {"teacher.model_name_or_path": None, "teacher.policy": "initial", "teacher.prompt_key": "hint"}
    config_flags = {**ALONE_FLAGS, **flags, "teacher.loss": loss, "teacher.top_k": 13, "lora_rank": 2}
    add_adapter(models.policy.model, LoraSection(rank=2), dtype=torch.float32)
    with torch.no_grad():  # it has learnt something
        for name, parameter in models.policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    run, _ = training(models, **config_flags)
    batch, _ = run.learners.place(hinted(taught_groups()))
    run.learners.score(batch)
    with torch.no_grad():
        wanted_AV = logprobs_after(bare, batch, HINTS)
    if loss:
        actual_AV = torch.zeros_like(wanted_AV).scatter(1, batch.teacher_ids_AK.long(), batch.teacher_logprobs_AK)
        torch.testing.assert_close(actual_AV, wanted_AV, rtol=1e-4, atol=1e-5)
    else:
        wanted_A = wanted_AV.gather(1, actions_of(batch)[:, None]).squeeze(1)
        torch.testing.assert_close(batch.teacher_logprobs_A, wanted_A, rtol=1e-4, atol=1e-5)


def test_only_the_first_prompt_of_an_episode_is_replaced():
    """A later segment that begins with the same prompt has it replaced; one whose history was rewritten does not."""
    first = make_groups()[0].trajectories[2].segments[0]
    longer = dataclasses.replace(first, action_mask=torch.arange(len(first)) >= 4, versions=first.versions)
    rewritten = dataclasses.replace(first, token_ids=first.token_ids.roll(1))
    assert other_prompt(first, first, (1, 2, 3)) == (2, (1, 2, 3))
    assert other_prompt(first, longer, (1, 2, 3)) == (2, (1, 2, 3))
    assert other_prompt(first, rewritten, (1, 2, 3)) is None
    assert other_prompt(first, first, ()) is None
    read = first.reading(other_prompt(first, first, (1, 2, 3)))
    assert read.token_ids.tolist() == [1, 2, 3, *first.token_ids[2:].tolist()]
    assert read.action_mask.tolist() == [False] * 3 + first.action_mask[2:].tolist()
    assert read.versions.tolist() == [-1] * 3 + first.versions[2:].tolist()
    assert read.turn_rewards.tolist() == [0.0] * 3 + first.turn_rewards[2:].tolist()


def test_the_prompt_is_that_of_the_first_segment_in_which_something_was_sampled():
    """An episode whose first call brought no token: what the teacher reads has its own prompt in the place of the
    policy's, not before it."""
    whole = make_groups()[0]
    said = whole.trajectories[0].segments[0]
    silent = dataclasses.replace(
        said,
        action_mask=torch.zeros_like(said.action_mask),
        turn_rewards=torch.zeros_like(said.turn_rewards),
        versions=torch.full_like(said.versions, -1),
        rollout_logprobs=None,
    )
    episode = dataclasses.replace(whole.trajectories[0], segments=(silent, said))
    prompt = dataclasses.replace(whole.prompt, teacher_ids=(7, 1, 12))
    run, _ = training(make_models(), **ALONE_FLAGS)
    batch, _ = run.learners.place([dataclasses.replace(whole, prompt=prompt, trajectories=(episode,))])
    assert [(s.key.segment, s.other_prompt) for s in batch.samples] == [(1, (2, (7, 1, 12)))]
