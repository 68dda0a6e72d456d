"""However many ranks share a round, it is the same round: losses, gradients, advantages and metrics."""

import pytest
from small_rl import make_models, play, play_share, training
from thread_ranks import ThreadDistribution, together

from openrlhf.cluster.transport import SampleColumns
from openrlhf.learners.steps import assign_to_ranks
from openrlhf.runs.rl_models import RLModels, step_settings
from openrlhf.types import SampleKey, TrainingBatch

RUNS = {
    "whitened": {"advantage_estimator": "reinforce"},
    "grpo": {"advantage_estimator": "group_norm", "micro_train_batch_size": 1, "use_dynamic_batch": None},
    "kl in the reward": {"advantage_estimator": "rloo", "init_kl_coef": 0.1, "kl_target": 1e-6, "kl_horizon": 12},
    "kl as a loss": {"advantage_estimator": "rloo", "init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2"},
    "ppo": {"advantage_estimator": "gae", "init_kl_coef": 0.1, "entropy_loss_coef": 0.01},
    "two steps": {"advantage_estimator": "gae", "train_batch_size": 4, "max_epochs": 2},
    "corrected": {"advantage_estimator": "rloo", "enable_vllm_is_correction": True},
}


def shared(models, groups, flags, *, ranks, rounds):
    """What every rank of so many says after each of the rounds."""

    def run(own):
        training_of_rank, _ = training(models, distribution=ThreadDistribution(own), **flags)
        return play_share(training_of_rank, groups, rounds=rounds, ranks=own), training_of_rank.learners.state_dict()

    return together(ranks, run)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_the_number_of_ranks_changes_nothing(models, groups, flags, ranks):
    """Six samples on 2 ranks, and on 8, of which two have none. The second round has the weights of the first."""
    alone, _ = training(models, **flags)
    expected = [play(alone.learners, groups) for _ in range(2)]
    for said, state in shared(models, groups, flags, ranks=ranks, rounds=2):
        for own, values in zip(said, expected, strict=True):
            assert own.keys() == values.keys()
            for name, value in values.items():
                if name != "critic_clip_ratio":  # a count of values on either side of an edge
                    assert own[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert state["rounds"] == 2
        assert state["kl"] == pytest.approx(alone.learners.state_dict()["kl"])


@pytest.mark.parametrize("name", ["ppo", "two steps", "corrected"])
def test_columns_come_from_the_rank_that_has_the_sample(models, groups, name):
    """The columns of two ranks together are those of one, through the form in which Ray carries them; a key of no
    sample is passed over."""
    flags = RUNS[name]
    keys = [SampleKey(prompt, sample) for prompt in (0, 1) for sample in (0, 2, 3)]
    alone, _ = training(models, **flags)
    whole, _ = alone.learners.place(groups)
    alone.learners.score(whole)
    alone.learners.assign_advantages(whole)
    alone.learners.update(whole, keep=True)
    expected = alone.learners.columns(whole, keys)
    assert list(expected) == [key for key in keys if key.sample != 3]

    def run(own):
        rank, _ = training(models, distribution=ThreadDistribution(own), **flags)
        placed, _ = rank.learners.place(groups)
        shares = assign_to_ranks(placed.samples, step_settings(rank._config), round_index=1, ranks=own.count)
        batch = TrainingBatch(samples=shares[own.index])
        rank.learners.score(batch)
        rank.learners.assign_advantages(batch)
        rank.learners.update(batch, keep=True)
        return SampleColumns.of(rank.learners.columns(batch, keys))

    found = {key: columns for share in together(2, run) for key, columns in share.by_key().items()}
    assert found.keys() == expected.keys()
    for key, columns in expected.items():
        assert found[key].keys() == columns.keys()
        for column, values in columns.items():
            assert found[key][column].tolist() == pytest.approx(values.tolist(), rel=1e-5, abs=1e-6), column
    seen = {"new_logprobs", "losses", "clipped", "advantages", "shaped_rewards"}
    more = {
        "ppo": {"entropy", "ref_logprobs", "values", "returns", "old_logprobs"},
        "two steps": {"values", "returns", "old_logprobs"},
        "corrected": {"is_weights"},
    }
    assert columns.keys() == seen | more[name]


def test_gradients_of_policy_and_critic_are_summed_as_the_flag_says():
    """Of a model in bf16 the sum of a step then lies with the weights, and no master has a gradient before the step."""
    models = make_models()
    models = RLModels(policy=models.policy.bfloat16(), reference=None, critic=models.critic.bfloat16())
    flags = {"param_dtype": "bf16", "init_kl_coef": 0, "advantage_estimator": "gae"}
    for sums, lies_with_weights in ((None, False), ("fp32", False), ("bf16", True)):
        trained, own = training(models, **flags, grad_accum_dtype=sums)
        for backend, module in zip(trained.backends, (own.policy, own.critic), strict=True):
            weight = next(p for p in module.parameters() if p.requires_grad)
            backend.backward(weight.sum())
            assert (weight.grad is not None) is lies_with_weights
