"""Proofs of the update: log-probs, loss, gradient, and that these do not depend on how samples are cut or ordered."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from openrlhf.learners.advantages import KLCost, assign_advantages
from openrlhf.learners.steps import assign_to_ranks, optimizer_steps
from openrlhf.proving import reference
from openrlhf.proving.plain_round import (
    CUT_TOLERANCE,
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    inputs_of,
    plain_values,
    played,
    spread,
    worst,
)
from openrlhf.proving.registry import Disproved, proof
from openrlhf.proving.threads import together
from openrlhf.proving.trial import RLTrial, Updated
from openrlhf.runs.rl_models import advantage_settings, kl_controller, step_settings, teacher_reward
from openrlhf.types import UNTOLD, Segment, TrainingBatch


def _image_reference(trial: RLTrial) -> str | None:
    if trial.config.data.max_images_per_prompt > 0 and trial.config.uses_critic:
        return "the plain reference has no critic that reads images"
    return None


@proof(
    "log-probs",
    title="engine, trainer and transformers agree on log-probs",
    shows="The log-probs of the sampled tokens, as the engine told them and as the trainer computes them, are those of "
    "transformers' own forward of the same weights, of logits / temperature, over what top_p and top_k left.",
    remedy="Clipping, KL and importance weights are all wrong: look at what was changed in the model's forward, its "
    "attention or --rollout.temperature.",
    cost=2,
)
def log_probs(trial: RLTrial) -> str:
    trial.to_training()
    twice = dataclasses.replace(trial.config, train=dataclasses.replace(trial.config.train, max_epochs=2))
    learners = trial.learners(twice).learners
    batch, _ = learners.place(trial.samples)
    learners.score(batch)
    cut = trial.config.rollout.top_p < 1 or trial.config.rollout.top_k > 0
    engine_gap = trainer_gap = 0.0
    compared = 0
    for i, (sample, plain) in enumerate(zip(batch.samples, played(trial).current, strict=True)):
        own = batch.actions_of(i)
        assert batch.old_logprobs_A is not None
        scored = batch.old_logprobs_A[own]
        if bool(scored.any()):  # samples without an advantage are not scored
            trainer_gap = max(trainer_gap, worst(scored, plain))
        sampled, supports = sample.segment.rollout_logprobs, sample.segment.supports
        if sampled is not None and (supports is not None or not cut):
            # Of a support that is larger than engines tell, the trainer's softmax is another one.
            known_A = torch.ones(len(plain), dtype=torch.bool) if supports is None else supports.sizes_A != UNTOLD
            compared += int(known_A.sum())
            if bool(known_A.any()):
                engine_gap = max(engine_gap, worst(sampled[sample.segment.action_mask][known_A], plain[known_A]))
    for name, gap in (("trainer", trainer_gap), ("engine", engine_gap)):
        if not gap <= LOGPROB_TOLERANCE:
            raise Disproved(
                f"the {name}'s log-probs of sampled tokens are up to {gap:.2g} away from those of transformers at "
                f"temperature {trial.config.rollout.temperature:g}; {LOGPROB_TOLERANCE:g} is allowed"
            )
    engine = f", engine {engine_gap:.1g}" if compared else "; the engine's are after top_p and top_k" if cut else ""
    if compared and compared < batch.num_actions and cut:
        engine += f" over {compared} of them"
    return f"{batch.num_actions} tokens: trainer {trainer_gap:.1g} away{engine}"


@proof(
    "loss",
    title="loss and gradient are those of the formula",
    shows="The gradient that the optimizer gets is that of the configured loss, clip, dual clip, correction, KL term, "
    "teacher, entropy and reduction, computed one sample at a time by autograd over transformers' own forward.",
    remedy="The update does not do what the flags say. The detail says by how much; try without "
    "--actor.dual_clip, entropy, KL or the correction to see whose term it is.",
    unless=_image_reference,
    cost=3,
)
def loss(trial: RLTrial) -> str:
    config = trial.config
    plain = played(trial)
    current_A = torch.cat(plain.current)
    old_A = current_A - spread(len(current_A), config=config)
    if config.actor.policy_loss_type.startswith("dppo"):
        old_A[::3] = math.log(
            0.5
        )  # its bounds are those of probabilities, and tokens of a random model have hardly any
    rollout_A = old_A - 0.7 * spread(len(current_A), config=config, shift=4)
    # The advantages are another proof's business: both sides get the same, of either sign on every ratio.
    advantages_A = torch.tensor([(0.7, -1.1, 0.4, -0.6)[i % 4] for i in range(len(current_A))])

    def edit(batch: TrainingBatch) -> None:
        batch.old_logprobs_A, batch.advantages_A = old_A.clone(), advantages_A.clone()
        if config.corrects_off_policy:
            batch.rollout_logprobs_A = rollout_A.clone()

    done = trial.updated(edit=edit)
    samples, entropies = [], []
    no_reference: list[Tensor | None] = [None] * len(plain.segments)
    pieces = zip(
        plain.segments,
        plain.as_taught,
        plain.owners,
        plain.keys,
        plain.split(old_A),
        plain.split(advantages_A),
        plain.split(rollout_A),
        plain.reference_logprobs or no_reference,
        strict=True,
    )
    for segment, taught, owner, key, old, advantage, rollout, ref in pieces:
        over_all = trial.plain.logits(segment.token_ids, **inputs_of(segment, trial.device))
        logits = reference.over_supports(over_all, segment)
        mask = segment.action_mask.to(logits.device)
        column = reference.logprobs(logits, segment.token_ids, temperature=config.rollout.temperature)
        entropy = reference.entropies(logits, temperature=config.rollout.temperature)[mask].cpu()
        entropies.append(entropy.detach())
        whole = teacher = None
        if config.teacher.loss is not None and config.uses_teacher:
            whole = reference.whole_logprobs(over_all, temperature=config.rollout.temperature)[mask]
            teacher = _teacher_logprobs(trial, taught, vocabulary=whole.shape[1])
            teacher = teacher[taught.action_mask.to(teacher.device)]
        samples.append(
            reference.PlainSample(
                episode=owner,
                prompt=plain.episodes[owner].group[0],
                current=column[mask].cpu(),
                old=old,
                advantages=advantage,
                rollout=rollout if config.corrects_off_policy else None,
                reference=ref,
                entropy=entropy if config.actor.entropy_coef is not None else None,
                key=key,
                whole=whole,
                teacher=teacher,
            )
        )
    wanted = reference.policy_loss(samples, config, kl_coef=config.algo.kl.init_coef)
    wanted.backward()
    theirs = {f"model.{name}": gradient for name, gradient in trial.plain.gradients().items()}
    gap, where = reference.gradient_gap(done.policy, theirs)
    plain_samples = [dataclasses.replace(s, reference=None, entropy=None, whole=None) for s in samples]
    policy_part = float(reference.policy_loss(plain_samples, config, kl_coef=0.0).detach())
    said = done.metrics.get("policy_loss", math.nan)
    if not abs(said - policy_part) <= 1e-3 * max(1.0, abs(policy_part)):
        raise Disproved(f"the policy loss is {said:.6g}, and {policy_part:.6g} by its formula")
    if config.actor.entropy_coef is not None:
        entropy_mean = float(torch.cat(entropies).mean())
        if not abs(done.metrics["entropy_loss"] - entropy_mean) <= 1e-3 * max(1.0, entropy_mean):
            raise Disproved(
                f"the entropy is {done.metrics['entropy_loss']:.6g}, and {entropy_mean:.6g} at temperature "
                f"{config.rollout.temperature:g} by its formula"
            )
    if not gap <= GRADIENT_TOLERANCE:
        raise Disproved(
            f"the gradient is {gap:.2g} of its norm away from that of the formula, most in {where}; "
            f"{GRADIENT_TOLERANCE:g} is allowed"
        )
    return f"{len(current_A)} tokens, {len(theirs)} tensors: gradient {gap:.1g} of its norm away"


def _teacher_logprobs(trial: RLTrial, segment: Segment, *, vocabulary: int) -> Tensor:
    """float32 [T, V'], V' the tokens that the policy has too."""
    with torch.no_grad():
        logits = trial.plain_teacher.logits(segment.token_ids, **inputs_of(segment, trial.device))[:, :vocabulary]
    return reference.whole_logprobs(logits, temperature=trial.config.rollout.temperature)


@proof(
    "cuts",
    title="micro-batches, packing and order change nothing",
    shows="The gradient is the same one sample at a time, all samples in one packed stream, and in another order.",
    remedy="The loss is a mean over micro-batches, or samples see each other: look at --train.micro_batch_size and "
    "at what was changed in packing, positions or masks.",
    cost=4,
)
def cuts(trial: RLTrial) -> str:
    base = trial.updated()
    train = trial.config.train
    alone = dataclasses.replace(
        trial.config, train=dataclasses.replace(train, micro_batch_size=1, dynamic_batch_enable=False)
    )
    together_ = dataclasses.replace(
        trial.config, train=dataclasses.replace(train, micro_batch_size=10_000, dynamic_batch_enable=False)
    )
    uneven = dataclasses.replace(
        trial.config, train=dataclasses.replace(train, micro_batch_size=3, dynamic_batch_enable=False)
    )
    backwards = [dataclasses.replace(g, trajectories=g.trajectories[::-1]) for g in reversed(trial.samples)]
    variants: dict[str, Updated] = {
        "one sample at a time": trial.updated(config=alone),
        "all samples in one stream, in the opposite order": trial.updated(backwards, config=together_),
    }
    if len(trial.samples) * trial.config.samples_per_prompt > 4:
        variants["three samples at a time"] = trial.updated(config=uneven)
    largest = 0.0
    for name, other in variants.items():
        for whose in ("policy", "critic"):
            gap, where = reference.gradient_gap(getattr(other, whose), getattr(base, whose))
            largest = max(largest, gap)
            if not gap <= CUT_TOLERANCE:
                raise Disproved(
                    f"{name}, the {whose}'s gradient is {gap:.2g} of its norm away from that of micro-batches as the "
                    f"flags cut them, most in {where}; {CUT_TOLERANCE:g} is allowed"
                )
    return f"{len(variants) + 1} ways to cut: at most {largest:.1g} of the norm apart"


def _has_no_critic(trial: RLTrial) -> str | None:
    if not trial.config.uses_critic:
        return "the run has no critic"
    return "the plain reference has no critic that reads images" if _image_reference(trial) else None


@proof(
    "critic",
    title="the critic learns the returns that its formula says",
    shows="The critic's values, returns and gradient are those of GAE and of the clipped value loss, one sample at a "
    "time.",
    remedy="Look at --critic.value_clip, --algo.advantage.gamma and lambd, and at what was changed in the value model.",
    unless=_has_no_critic,
    cost=3,
)
def critic(trial: RLTrial) -> str:
    config, plain = trial.config, played(trial)
    assert plain.values is not None
    assert plain.returns is not None
    values_A, returns_A = torch.cat(plain.values), plain.column(plain.returns)
    old_A = values_A + 0.8 * spread(len(values_A), config=config) * config.critic.value_clip
    seen: dict[str, Tensor] = {}

    def edit(batch: TrainingBatch) -> None:
        assert batch.values_A is not None
        assert batch.returns_A is not None
        seen.update(values=batch.values_A.clone(), returns=batch.returns_A.clone())
        batch.values_A = old_A.clone()

    done = trial.updated(edit=edit)
    for name, wanted in (("values", values_A), ("returns", returns_A)):
        if not (gap := worst(seen[name], wanted)) <= LOGPROB_TOLERANCE * max(1.0, float(wanted.abs().max())):
            raise Disproved(f"the critic's {name} are up to {gap:.2g} away from those of the formula")
    assert trial.models.critic is not None
    head = trial.models.critic.head.weight
    head.grad = None
    total = torch.zeros(())
    for segment, old, wanted in zip(plain.segments, plain.split(old_A), plain.split(returns_A), strict=True):
        now = plain_values(trial, segment, gradient=True)
        total = total + reference.value_loss(now, old, wanted, clip=config.critic.value_clip).sum()
    (total / len(values_A)).backward()
    theirs = {f"model.{name}": gradient for name, gradient in trial.plain_critic.gradients().items()}
    assert head.grad is not None
    theirs["head.weight"], head.grad = head.grad.clone(), None
    gap, where = reference.gradient_gap(done.critic, theirs)
    if not gap <= GRADIENT_TOLERANCE:
        raise Disproved(
            f"the critic's gradient is {gap:.2g} of its norm away from that of the formula, most in {where}"
        )
    return f"{len(values_A)} values; gradient {gap:.1g} of its norm away"


@proof(
    "shares",
    title="two ranks have the advantages and weights of one",
    shows="Samples that are shared out over two ranks get the same advantages, and weigh the same in the loss, as on "
    "one rank.",
    remedy="A statistic is taken over a rank instead of the round: look at whitening and at the weights of the loss.",
    cost=1,
)
def shares(trial: RLTrial) -> str:
    config = trial.config
    trial.to_training()
    learners = trial.learners().learners
    whole, _ = learners.place(trial.samples)
    learners.score(whole)
    settings, steps = advantage_settings(config), step_settings(config)
    cost, teacher = None, teacher_reward(config)
    if config.uses_reference and not config.algo.kl.use_loss:
        from openrlhf.algorithms.kl import get_kl_estimator

        cost = KLCost(get_kl_estimator(config.algo.kl.estimator), kl_controller(config).coef)
    assign_advantages(whole, settings, kl_cost=cost, teacher=teacher)
    divided = assign_to_ranks(whole.samples, steps, round_index=1, ranks=2)
    places = {sample.key: i for i, sample in enumerate(whole.samples)}

    def of_rank(ranks: Any) -> dict[Any, tuple[Tensor, Tensor]]:
        own = divided[ranks.index]
        batch = TrainingBatch(samples=own)
        rows = [whole.actions_of(places[sample.key]) for sample in own]
        for name in ("old_logprobs_A", "reference_logprobs_A", "values_A", "teacher_logprobs_A"):
            column = getattr(whole, name)
            if column is not None:
                setattr(batch, name, torch.cat([column[row] for row in rows]) if rows else torch.empty(0))
        assign_advantages(batch, settings, kl_cost=cost, teacher=teacher, ranks=ranks)
        assert batch.advantages_A is not None
        weights_A = torch.zeros(batch.num_actions)
        for step in optimizer_steps(batch, steps, round_index=1, ranks=ranks):
            for micro in step:
                if not micro.is_filler:
                    weights_A[micro.packed.rows] += micro.policy_weights_A
        return {
            sample.key: (batch.advantages_A[batch.actions_of(i)], weights_A[batch.actions_of(i)])
            for i, sample in enumerate(own)
        }

    assert whole.advantages_A is not None
    alone_A = torch.zeros(whole.num_actions)
    for step in optimizer_steps(whole, steps, round_index=1):
        for micro in step:
            alone_A[micro.packed.rows] += micro.policy_weights_A
    found: dict[Any, tuple[Tensor, Tensor]] = {}
    for part in together(2, of_rank):
        found |= part
    if found.keys() != places.keys():
        raise Disproved(f"of {len(places)} samples {len(found)} are on a rank")
    for key, (advantages_a, weights_a) in found.items():
        own = whole.actions_of(places[key])
        for name, one, other in (
            ("advantage", advantages_a, whole.advantages_A[own]),
            ("weight in the loss", weights_a, alone_A[own]),
        ):
            if not (gap := worst(one, other)) <= 1e-5:
                raise Disproved(
                    f"prompt {key.prompt} sample {key.sample}: its {name} on two ranks is {gap:.2g} away from that on "
                    "one"
                )
    return f"{len(found)} samples on 2 ranks: the same"
