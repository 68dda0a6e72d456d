"""Every loss, KL mode and correction train together in every combination, each with some estimator, and so does every
estimator with every KL mode and correction; those that most runs use, in every combination of all four. What the parser
refuses says why."""

import itertools
import math

import pytest
import torch
from small_rl import play, training

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.config import ConfigError, parse

pytestmark = pytest.mark.slow

KL_MODES = [
    {},
    *({"init_kl_coef": 0.1, "kl_estimator": k, "use_kl_loss": loss} for k in KL_ESTIMATORS for loss in (None, True)),
]
CORRECTION_MODES = [{}, *({"enable_vllm_is_correction": True, "vllm_is_correction_type": name} for name in CORRECTIONS)]


CONSTANTS = {"pass_at_k": {"algo.advantage.pass_k": 2}}
"""What an estimator needs in groups as small as these."""


MOST_RUNS = (
    {"gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"},
    {"ppo", "gspo", "cispo", "sapo"},
)


def modes(estimator: str, loss: str) -> list[tuple[dict, dict]]:
    """The KL modes and corrections that this pair is tried with: all of them, if most runs use the pair. Else every
    combination of a loss has one estimator, the next one with the next loss, and with the next KL mode or correction."""
    first = list(POLICY_LOSSES).index(loss) - list(ESTIMATORS).index(estimator)
    every = itertools.product(enumerate(KL_MODES), enumerate(CORRECTION_MODES))
    common = estimator in MOST_RUNS[0] and loss in MOST_RUNS[1]
    return [(kl, correction) for (i, kl), (j, correction) in every if common or (first + i + j) % len(ESTIMATORS) == 0]


def test_which_choices_meet():
    met = {
        (e, p, KL_MODES.index(kl), CORRECTION_MODES.index(correction))
        for e, p in itertools.product(ESTIMATORS, POLICY_LOSSES)
        for kl, correction in modes(e, p)
    }
    counts = (len(ESTIMATORS), len(POLICY_LOSSES), len(KL_MODES), len(CORRECTION_MODES))
    common = math.prod(map(len, MOST_RUNS))
    assert sum(e in MOST_RUNS[0] and p in MOST_RUNS[1] for e, p, _, _ in met) == common * math.prod(counts[2:]) >= 672
    for several in [(1, 2, 3), (0, 2, 3), (0, 1)]:
        found = {tuple(combination[i] for i in several) for combination in met}
        assert len(found) == math.prod(counts[i] for i in several)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_two_updates_of_every_combination(models, groups, estimator, loss):
    """A round of two updates on fixed samples: metrics are finite, the mismatch is logged, weights move."""
    own_flags = {"advantage_estimator": estimator, "policy_loss_type": loss, **CONSTANTS.get(estimator, {})}
    for kl, correction in modes(estimator, loss):
        run, own = training(models, max_epochs=2, **own_flags, **kl, **correction)
        before = [p.detach().clone() for p in own.policy.parameters()]
        values = play(run.learners, groups)
        broken = {name: value for name, value in values.items() if not math.isfinite(value)}
        assert not broken, (kl, correction, broken)
        assert values["logprobs_diff"] > 0
        assert ("kl" in values) == bool(kl)
        assert ("critic_loss" in values) == ESTIMATORS[estimator].needs_critic
        assert ("is_weight" in values) == (bool(correction) and not POLICY_LOSSES[loss].corrects_itself)
        assert any(not torch.equal(a, b) for a, b in zip(before, own.policy.parameters(), strict=True))


REJECTED = [
    *(
        (f"--advantage_estimator {name} --n_samples_per_prompt 1", "must be more than 1")
        for name, entry in ESTIMATORS.items()
        if entry.needs_group
    ),
    *(
        (f"--policy_loss_type {name} --dual_clip 3", f"{name} has none")
        for name, entry in POLICY_LOSSES.items()
        if not entry.takes_dual_clip
    ),
    ("--kl_target 0.1 --init_kl_coef 0", "above 0"),
    ("--advantage_estimator a2c", f"not one of {', '.join(ESTIMATORS)}"),
    ("--policy_loss_type dapo", f"not one of {', '.join(POLICY_LOSSES)}"),
    ("--kl_estimator k4", f"not one of {', '.join(KL_ESTIMATORS)}"),
    ("--vllm_is_correction_type mis", f"not one of {', '.join(CORRECTIONS)}"),
    ("--algo.loss_agg mean", f"not one of {', '.join(Aggregation)}"),
]


@pytest.mark.parametrize(("flags", "reason"), REJECTED)
def test_what_the_parser_rejects_it_rejects_with_a_reason(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        parse("train_ppo_ray", flags.split())


@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize("estimator", ["gae", "group_norm"])
def test_gradient_norms_and_means_do_not_depend_on_the_budget(models, groups, aggregation, estimator):
    """Everything at once — KL loss, entropy bonus, correction, penalties, critic — in micro-batches of any size."""
    flags = {
        "advantage_estimator": estimator,
        "algo.loss_agg": aggregation,
        "init_kl_coef": 0.1,
        "kl_estimator": "k2",
        "use_kl_loss": True,
        "entropy_loss_coef": 0.01,
        "enable_vllm_is_correction": True,
        "overlong_buffer_len": 4,
        "stop_properly_penalty_coef": 0.5,
    }
    whole = play(training(models, **flags)[0].learners, groups)
    for budget in (7, 16, 24):
        cut = play(training(models, **flags, max_tokens_per_gpu=budget)[0].learners, groups)
        assert cut == pytest.approx(whole, rel=1e-5, abs=1e-6)
    samples = play(training(models, **flags, use_dynamic_batch=None, micro_train_batch_size=2)[0].learners, groups)
    assert samples == pytest.approx(whole, rel=1e-5, abs=1e-6)
