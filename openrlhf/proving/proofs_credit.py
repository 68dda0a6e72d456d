"""Proofs of credit: advantages, what is in their statistics, the price of KL, and the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from openrlhf.config.commands import RLConfig
from openrlhf.proving.plain_round import LOGPROB_TOLERANCE, PlainRound, played, worst
from openrlhf.proving.registry import Disproved, proof
from openrlhf.proving.trial import LEARNING_RATE, RLTrial, Weights, failed
from openrlhf.rollout.collector import rollout_metrics
from openrlhf.runs.rl_models import kl_controller
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, TrainingBatch, Trajectory

ADVANTAGE_TOLERANCE = 5e-3


def assigned(trial: RLTrial, groups: Sequence[Group], *, config: RLConfig | None = None) -> TrainingBatch:
    """The batch of these groups after `place`, `score` and `assign_advantages` of the run's learners."""
    trial.to_training()
    learners = trial.learners(config).learners
    batch, _ = learners.place(groups)
    learners.score(batch)
    learners.assign_advantages(batch)
    return batch


def two_turns(trial: RLTrial, rewards: Sequence[tuple[float, float]], *, prompt: int = 0) -> Group:
    """A group of episodes of two turns, with feedback between them, that earned these rewards."""
    ids = trial.groups[0].scored[0].segments[0].token_ids.tolist() if trial.groups[0].scored else [1, 2, 3]
    members = []
    for sample, earned in enumerate(rewards):
        lengths = [3, 2 + sample % 2, 2, 3]  # prompt, turn, feedback, turn
        mask = torch.tensor([bool(i % 2) for i, length in enumerate(lengths) for _ in range(length)])
        ends = [sum(lengths[:2]) - 1, sum(lengths) - 1]
        turn_rewards, turn_ends = torch.zeros(len(mask)), torch.zeros(len(mask), dtype=torch.bool)
        for end, reward in zip(ends, earned, strict=True):
            turn_rewards[end], turn_ends[end] = reward, True
        segment = Segment(
            token_ids=torch.tensor([ids[(i + sample) % len(ids)] for i in range(len(mask))]),
            action_mask=mask,
            rollout_logprobs=torch.where(mask, -1.0, 0.0),
            versions=torch.where(mask, 0, -1).int(),
            turn_rewards=turn_rewards,
            turn_ends=turn_ends,
        )
        members.append(
            Trajectory(
                key=SampleKey(prompt, sample),
                segments=(segment,),
                outcome=Outcome.FINISHED,
                reward=float(turn_rewards.sum()),
                greedy_reward=0.5,
                score=0.0,
            )
        )
    return Group(prompt=Prompt(ordinal=prompt, text="x"), trajectories=tuple(members))


def _compare(trial: RLTrial, groups: Sequence[Group], what: str) -> tuple[int, float]:
    batch = assigned(trial, groups)
    plain = played(trial) if groups is trial.samples else PlainRound(trial, groups)
    wanted = plain.column(plain.advantages)
    assert batch.advantages_A is not None
    if len(wanted) != batch.num_actions:
        raise Disproved(f"{what}: {batch.num_actions} action tokens are trained on, and there are {len(wanted)}")
    gap = worst(batch.advantages_A, wanted)
    if not gap <= ADVANTAGE_TOLERANCE * max(1.0, float(wanted.abs().max())):
        at = int((batch.advantages_A - wanted).abs().argmax())
        raise Disproved(
            f"{what}: an advantage is {float(batch.advantages_A[at]):.5g}, and {float(wanted[at]):.5g} by the formula "
            f"of {trial.config.algo.advantage.estimator}"
        )
    return len(wanted), gap


@proof(
    "advantages",
    title="advantages are those of the estimator, group by group",
    shows="Every token's advantage is the formula's, from the shaped rewards of its own prompt's samples, the price of "
    "KL and a critic's values.",
    remedy="Samples of different prompts are mixed up, or the estimator is not the one of the flags: look at "
    "--algo.advantage.estimator and at what was changed between rewards and advantages.",
    cost=2,
)
def advantages(trial: RLTrial) -> str:
    count, gap = _compare(trial, trial.samples, "on the played samples")
    return f"{count} tokens of {len(trial.samples)} groups: at most {gap:.1g} away"


@proof(
    "returns",
    title="what later turns earn reaches earlier ones",
    shows="Where an episode has several turns, returns and values go through the feedback between them.",
    remedy="Credit ends at the environment's tokens: actions that only prepare a success are never reinforced.",
    cost=2,
)
def returns(trial: RLTrial) -> str:
    late = [
        two_turns(trial, [(0.0, 1.0), (0.25, 0.0), (0.0, -0.5), (-0.5, 0.75)], prompt=0),
        two_turns(trial, [(0.0, 0.0), (0.0, 0.5), (1.0, 0.25), (0.0, 1.0)], prompt=1),
    ]
    count, _ = _compare(trial, late, "in episodes of two turns")
    return f"{count} tokens of 8 episodes with two turns each"


def _may_disagree(trial: RLTrial) -> str | None:
    config = trial.config
    if config.uses_critic:
        return "with a critic, samples that earned the same may have different advantages"
    if config.algo.advantage.estimator == "remax":
        return "samples are compared with a greedy one, which may have earned something else"
    if not config.uses_group_baseline and config.gamma != 1:
        return f"with --algo.advantage.gamma {config.gamma:g}, tokens of one sample have different returns"
    return None


@proof(
    "agreement",
    title="a group that agrees teaches nothing",
    shows="Samples whose rewards differ by rounding only have an advantage of exactly 0.",
    remedy="A z-score makes ±1 of rounding errors: groups that agree pull the policy in random directions.",
    unless=_may_disagree,
    cost=0.1,
)
def agreement(trial: RLTrial) -> str:
    base = torch.tensor(0.9)
    above = torch.nextafter(base, torch.tensor(1.0))
    groups = []
    for prompt in range(2):
        rewards = [float(above if (sample + prompt) % 3 == 0 else base) for sample in range(4)]
        groups.append(two_turns(trial, [(0.0, reward) for reward in rewards], prompt=prompt))
    # The price of KL, and what a teacher pays, come on top, and differ from token to token.
    algo = dataclasses.replace(trial.config.algo, kl=dataclasses.replace(trial.config.algo.kl, init_coef=0.0))
    teacher = dataclasses.replace(trial.config.teacher, coef=0.0)
    batch = assigned(trial, groups, config=dataclasses.replace(trial.config, algo=algo, teacher=teacher))
    assert batch.advantages_A is not None
    largest = float(batch.advantages_A.abs().max())
    if largest != 0:
        raise Disproved(f"rewards of 0.9 that differ in their last bit get advantages of up to {largest:.3g}")
    return "rewards that differ in their last bit: 0"


@proof(
    "failures",
    title="failed samples are in no statistic",
    shows="Samples that failed change no advantage and no mean; truncated ones are judged as the flags say.",
    remedy="Failures count as rewards of 0 somewhere: look for who reads `Group.trajectories`, not `Group.scored`.",
    cost=1,
)
def failures(trial: RLTrial) -> str:
    without = [
        dataclasses.replace(g, trajectories=tuple(t for t in g.trajectories if not t.failed)) for g in trial.samples
    ]
    between = [
        dataclasses.replace(
            g, trajectories=(failed(g.prompt.ordinal, 98), *g.trajectories, failed(g.prompt.ordinal, 99))
        )
        for g in without
    ]
    one, other = assigned(trial, without), assigned(trial, between)
    assert one.advantages_A is not None
    assert other.advantages_A is not None
    if one.num_actions != other.num_actions or not torch.equal(one.advantages_A, other.advantages_A):
        raise Disproved("advantages change when a group has failed members beside the judged ones")
    judged = [t for g in without for t in g.trajectories]
    told = rollout_metrics(between, max_length=trial.config.data.max_len).values()
    wanted = {
        "rollout/reward_mean": math.fsum(t.reward or 0.0 for t in judged) / len(judged),
        "response_length": sum(int(s.action_mask.sum()) for t in judged for s in t.segments) / len(judged),
        "truncated": sum(t.outcome is Outcome.TRUNCATED for t in judged) / len(judged),
        "rollout/failed": 2 * len(between),
    }
    for name, value in wanted.items():
        if not abs(told[name] - value) <= 1e-6 * max(1.0, abs(value)):
            raise Disproved(f"the metric {name} is {told[name]:.6g} with failed members, and should be {value:.6g}")
    return f"{len(judged)} judged samples, {2 * len(between)} failed ones beside them"


def _no_target(trial: RLTrial) -> str | None:
    if not trial.config.uses_reference:
        return "the run has no KL term"
    return None if trial.config.algo.kl.target is not None else "the KL coefficient is fixed (no --algo.kl.target)"


@proof(
    "kl coefficient",
    title="the KL coefficient stays above 0",
    shows="However large a round and however small its KL, the adaptive coefficient never becomes 0 or negative.",
    remedy="A negative price rewards the policy for leaving the reference: look at --algo.kl.horizon.",
    unless=_no_target,
    cost=0,
)
def kl_coefficient(trial: RLTrial) -> str:
    controller = kl_controller(trial.given)
    samples = max(trial.given.samples_per_round, math.ceil(10 * trial.given.algo.kl.horizon))
    for number in range(200):
        controller.update(0.0, samples)
        if not 0 < controller.coef < math.inf:
            raise Disproved(
                f"after {number + 1} rounds of {samples} samples without KL the coefficient is {controller.coef:g}"
            )
    for _ in range(50):
        controller.update(10 * (trial.given.algo.kl.target or 1.0), trial.given.samples_per_round)
    if not controller.coef > 0:
        raise Disproved(f"from near 0 the coefficient does not come back: {controller.coef:g}")
    return f"{trial.given.algo.kl.init_coef:g} at first; above 0 after 200 rounds without KL"


def _no_reference(trial: RLTrial) -> str | None:
    return None if trial.config.uses_reference else "the run has no reference (--algo.kl.init_coef 0)"


@proof(
    "reference",
    title="the reference is the files' model, and stays",
    shows="The reference's log-probs are those of transformers' forward of the model's files, before the policy is "
    "trained and after, to the bit.",
    remedy="The reference shares weights with the policy, or its adapter is on while it is asked.",
    unless=_no_reference,
    cost=3,
)
def reference_stays(trial: RLTrial) -> str:
    trial.to_training()
    config = dataclasses.replace(
        trial.config,
        actor=dataclasses.replace(
            trial.config.actor,
            adam=dataclasses.replace(trial.config.actor.adam, lr=LEARNING_RATE),
            lr_scheduler="constant",
            lr_warmup_ratio=0.0,
        ),
    )
    kept = [Weights(m) for m in (trial.models.policy, trial.models.critic) if m is not None]
    learners = trial.learners(config).learners
    try:
        batch, _ = learners.place(trial.samples)
        learners.score(batch)
        assert batch.reference_logprobs_A is not None
        before = batch.reference_logprobs_A.clone()
        learners.assign_advantages(batch)
        moved = [p.detach().clone() for p in trial.models.policy.parameters() if p.requires_grad]
        learners.update(batch)
        now = [p for p in trial.models.policy.parameters() if p.requires_grad]
        if all(torch.equal(a, b) for a, b in zip(moved, now, strict=True)):
            raise Disproved("the policy does not move in an update, so that nothing is known of the reference")
        learners.score(batch)
        after = batch.reference_logprobs_A
        assert after is not None
    finally:
        for weights in kept:
            weights.restore()
    plain = played(trial)
    assert plain.reference_logprobs is not None
    gap = worst(before, torch.cat(plain.reference_logprobs))
    if not gap <= LOGPROB_TOLERANCE:
        raise Disproved(f"the reference's log-probs are up to {gap:.2g} away from those of the files' model")
    if not torch.equal(before, after):
        raise Disproved(f"an update of the policy moves the reference's log-probs by up to {worst(before, after):.2g}")
    return f"{len(before)} tokens: {gap:.1g} away from the files' model, and the same after an update"
