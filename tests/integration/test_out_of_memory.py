"""A micro-batch that does not fit is cut again, and the step it belongs to is the step it would have been."""

import logging

import pytest
import torch
from small_memory import SmallMemory
from small_rl import CPU, play, play_share, training
from small_sections import optimizer
from small_supervised import Samples, make_backend, make_policy, make_trainer, random_pairs
from thread_ranks import ThreadDistribution, outcomes, together
from torch import nn

from openrlhf.backends.torch import TorchBackend
from openrlhf.config.models import DPOModelSection
from openrlhf.learners.accumulation import DoesNotFitError, MicroBatching, MicroBatchSizer, Overflow
from openrlhf.trainers.dpo import DPOObjective
from openrlhf.trainers.preferences import Reference
from openrlhf.trainers.sft import SFTObjective

PPO = {"advantage_estimator": "gae", "init_kl_coef": 0.1, "entropy_loss_coef": 0.01}
TWO_STEPS = {"advantage_estimator": "reinforce", "train_batch_size": 4, "max_epochs": 2}


def same(values, expected):
    assert values.keys() - {"perf/max_tokens_per_gpu"} == expected.keys()
    for name, value in expected.items():
        if name != "critic_clip_ratio":  # a count of values on either side of an edge
            assert values[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def gaps(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("flags", [PPO, TWO_STEPS], ids=["policy and critic", "two steps"])
def test_a_round_in_little_memory_is_the_same_round(models, groups, flags, where):
    """Six samples of 5 to 7 tokens, 36 in all; at most 10 fit. Budgets: 36 → 18 → 9, which hold one sample each. Losses,
    metrics and the weights after two rounds are those of a run with room; half a backward leaves nothing behind."""
    roomy, roomy_models = training(models, **flags)
    tight, tight_models = training(models, **flags)
    memories = [SmallMemory(tight_models.policy, limit=10, where=where)]
    if tight_models.critic is not None:
        memories.append(SmallMemory(tight_models.critic, limit=10, where=where))
    for _ in range(2):
        same(play(tight.learners, groups), play(roomy.learners, groups))
    assert any(memory.overflows for memory in memories)
    assert gaps(tight_models.policy, roomy_models.policy) < 1e-5
    if tight_models.critic is not None:
        assert gaps(tight_models.critic, roomy_models.critic) < 1e-5


def test_the_smaller_budget_stays_and_is_told_once(models, groups, caplog):
    """36 tokens do not fit, 18 do: one overflow in the first round, none in the second."""
    tight, own = training(models, advantage_estimator="reinforce")
    memory = SmallMemory(own.policy, limit=20)
    with caplog.at_level(logging.WARNING):
        play(tight.learners, groups)
        values = play(tight.learners, groups)
    assert values["perf/max_tokens_per_gpu"] == 18
    assert memory.overflows == [36]
    (said,) = [record.message for record in caplog.records if "memory" in record.message]
    assert said.startswith("memory ran out in a micro-batch of 36 tokens (rank 0): from now on they have at most 18;")
    assert said.endswith("To begin with that: --train.max_tokens_per_gpu 18 with --train.dynamic_batch_enable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_forgets_what_half_a_backward_has_added(dtype):
    """Gradients 1 per weight, dropped, then 2: the norm of four weights is 4. In 16 bits they are in the master."""
    module = nn.Linear(4, 1, bias=False, dtype=dtype)
    backend = TorchBackend(module, optimizer(lr=0.0, max_norm=0))
    backend.backward(module.weight.sum())
    backend.drop_gradients()
    backend.backward(2 * module.weight.sum())
    assert backend.step() == pytest.approx(4.0)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("limit", [18, 10])
def test_all_ranks_begin_a_step_again_when_one_has_too_little_memory(models, groups, where, limit):
    alone, _ = training(models, **PPO)
    expected = [play(alone.learners, groups) for _ in range(2)]

    def run(own):
        training_of_rank, models_of_rank = training(models, distribution=ThreadDistribution(own), **PPO)
        memory = SmallMemory(models_of_rank.policy, limit=limit if own.index == 1 else None, where=where)
        return play_share(training_of_rank, groups, rounds=2, ranks=own), memory.overflows

    results = together(2, run)
    for said, _ in results:
        for own, values in zip(said, expected, strict=True):
            same(own, values)
    assert results[0][1] == []
    assert bool(results[1][1]) == (limit < 18)


def test_a_sequence_that_does_not_fit_by_itself(models, groups):
    tight, own = training(models, advantage_estimator="reinforce")
    SmallMemory(own.policy, limit=6)
    with pytest.raises(DoesNotFitError, match=r"on a single sample of 7 tokens \(rank 0\).*--data.max_len"):
        play(tight.learners, groups)


def test_a_backend_that_cannot_begin_again_says_why(models, groups):
    tight, own = training(models, advantage_estimator="reinforce")
    SmallMemory(own.policy, limit=20)
    tight.policy_backend.retry_blocker = lambda: "gradients were on their way"
    with pytest.raises(
        DoesNotFitError,
        match=r"36 tokens \(rank 0\), and the step cannot be begun again: gradients were on their way; begin "
        r"with --train.max_tokens_per_gpu 18 with --train.dynamic_batch_enable",
    ):
        play(tight.learners, groups)


def test_a_smaller_budget_is_no_advice_for_a_single_sample(models, groups):
    """Where ranks compute together too, in the update as in scoring: more of them might."""
    tight, own = training(models, advantage_estimator="reinforce", max_tokens_per_gpu=7)
    SmallMemory(own.policy, limit=6)
    tight.policy_backend.retry_blocker = lambda: "its ranks compute every layer together"
    scorer = tight.learners._policy_scorer
    scorer._forwards_together = True
    for run in (lambda: play(tight.learners, groups), lambda: scorer.score(tight.learners.place(groups).batch)):
        with pytest.raises(DoesNotFitError, match=r"on a single sample of 7 tokens.*--ds.ring_attn_size"):
            run()


def test_scoring_cuts_what_does_not_fit_and_keeps_the_rest(models, groups):
    """The reference reads the samples again, and its log-probs are part of every reward."""
    flags = {"advantage_estimator": "rloo", "init_kl_coef": 0.1, "max_tokens_per_gpu": 12}
    roomy, _ = training(models, **flags)
    tight, own = training(models, **flags)
    memory = SmallMemory(own.reference, limit=10)
    same(play(tight.learners, groups), play(roomy.learners, groups))
    assert memory.overflows == [11, 11]
    assert tight.learners._kl.reference._fitting.batching.tokens == 5


def test_scoring_that_ranks_do_together_is_refused(models, groups):
    def run(own):
        training_of_rank, models_of_rank = training(models, distribution=ThreadDistribution(own), **PPO)
        scorer = training_of_rank.learners._policy_scorer
        scorer._forwards_together = True
        SmallMemory(models_of_rank.policy, limit=20)
        return scorer.score(training_of_rank.learners.place(groups).batch)

    for error in outcomes(2, run):
        assert "that several ranks were computing together; begin with --rollout.max_tokens_per_gpu 18" in str(error)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_supervised_step_in_little_memory_is_the_same_step(kind, where, caplog):
    """Steps of 4 samples at once, of which 40 tokens fit. A pair is never cut."""
    samples = random_pairs(8) if kind == "dpo" else Samples(pair.chosen for pair in random_pairs(8))

    def run(limit):
        policy = make_policy(hidden=16)
        memory = SmallMemory(policy, limit=limit, where=where)
        if kind == "sft":
            objective = SFTObjective(samples, device=CPU)
        else:
            reference = Reference(make_policy(seed=1, hidden=16), device=CPU)
            objective = DPOObjective(samples, DPOModelSection(beta=0.1), reference=reference, device=CPU)
        trainer, logger = make_trainer(make_backend(policy), objective, batch_size=4, steps=4)
        trainer.fit()
        return policy, logger.of("train"), memory.overflows

    roomy, expected, _ = run(None)
    limit = max(samples.lengths) + 1
    tight, logged, overflows = run(limit)
    assert overflows
    assert all(tokens > limit for tokens in overflows)
    assert gaps(tight, roomy) < 1e-5
    for ours, theirs in zip(logged, expected, strict=True):
        for name in ("gpt_loss",) if kind == "sft" else ("loss", "acc", "chosen_reward"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert "To begin with that: a lower --train.micro_batch_size" in caplog.text


def test_half_of_the_smallest_that_failed():
    """A budget that no micro-batch reaches would be halved in vain: 1000 → what did not fit, 30 → 15."""
    fitting = MicroBatchSizer(MicroBatching(tokens=1000))
    fitting.shrink([Overflow(36, 4, 0), Overflow(30, 3, 1)])
    assert fitting.batching.tokens == 15
    with pytest.raises(DoesNotFitError):
        fitting.shrink([Overflow(14, 2, 0), Overflow(13, 1, 1)])
