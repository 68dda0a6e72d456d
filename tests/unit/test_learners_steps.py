"""How a round is cut: nothing lost, weights of the whole step, idle samples without a forward."""

import dataclasses
import math

import pytest
import torch
from thread_ranks import together

from openrlhf.algorithms.covariance import TokenChoice
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.learners.accumulation import MicroBatching
from openrlhf.learners.steps import (
    StepSettings,
    assign_to_ranks,
    gather_sample_info,
    optimizer_steps,
    shuffled,
    trained_samples,
)
from openrlhf.types import SampleKey, Segment, TrainingBatch, TrainingSample
from openrlhf.utils.randomness import derive_seed


def make_batch(shapes: list[tuple[int, int]], advantages: list[float] | None = None) -> TrainingBatch:
    """Samples of (prompt ordinal, action tokens), each after a prompt of one token."""
    samples = []
    for index, (prompt, actions) in enumerate(shapes):
        T = 1 + actions
        segment = Segment(
            token_ids=torch.arange(T) + 10 * index,
            action_mask=torch.arange(T) > 0,
            rollout_logprobs=None,
            versions=torch.zeros(T, dtype=torch.int32),
            turn_rewards=torch.zeros(T),
        )
        samples.append(TrainingSample(key=SampleKey(prompt, index), segment=segment, rewards_A=torch.zeros(actions)))
    batch = TrainingBatch(samples=samples)
    if advantages is not None:
        batch.advantages_A = batch.per_action(advantages)
    return batch


def make_settings(**changes) -> StepSettings:
    defaults = {
        "epochs": 1,
        "batch_size": 1000,
        "batching": MicroBatching(samples=1),
        "aggregation": Aggregation.TOKEN,
        "seed": 0,
    }
    return StepSettings(**{**defaults, **changes})


def rows(steps) -> list[list[int]]:
    return [sorted(row for micro in step for row in micro.packed.rows.tolist()) for step in steps]


def test_every_action_is_in_exactly_one_step_of_an_epoch():
    batch = make_batch([(0, 2), (0, 1), (1, 3), (1, 2), (2, 1), (2, 4), (3, 2)])
    steps = optimizer_steps(batch, make_settings(epochs=2, batch_size=3), round_index=1)
    assert len(steps) == 6
    for epoch in (steps[:3], steps[3:]):
        assert sorted(row for step in rows(epoch) for row in step) == list(range(15))


@pytest.mark.parametrize(
    ("samples", "sizes"),
    [
        (16, [4, 4, 4, 4]),  # a full round
        (14, [4, 4, 3, 3]),  # two failed: as many steps, as even as they can be
        (5, [3, 2]),
        (3, [3]),  # the last prompts of the data are one step, not four of one sample or none
        (0, []),
    ],
)
def test_the_batch_size_is_that_of_a_step_also_in_a_short_round(samples, sizes):
    batch, settings = make_batch([(i // 2, 1) for i in range(samples)]), make_settings(batch_size=4)
    steps = optimizer_steps(batch, settings, round_index=1)
    assert [len(step) for step in rows(steps)] == sizes
    assert settings.on_policy(samples) == (len(sizes) <= 1)
    assert not dataclasses.replace(settings, epochs=2).on_policy(samples) or samples == 0


def test_the_order_is_another_every_round_and_keeps_a_prompt_together():
    batch = make_batch([(prompt, 1) for prompt in range(8) for _ in range(3)])
    orders = [shuffled(gather_sample_info(batch), seed=seed) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert sorted(order) == list(range(24))
        prompts = [batch.samples[i].key.prompt for i in order]
        assert [prompts[k : k + 3] for k in range(0, 24, 3)] == [[p] * 3 for p in dict.fromkeys(prompts)]


def test_weights_are_those_of_the_whole_step():
    """Samples of 1 and 3 actions. token: 1/4 each. sequence: 1/2 and 1/6. constant 8: 1/16 each. Values: tokens."""
    batch = make_batch([(0, 1), (1, 3)])

    def weights(**changes):
        (step,) = optimizer_steps(batch, make_settings(**changes), round_index=1)
        first, second = sorted(step, key=lambda micro: micro.packed.tokens.num_actions)
        return first, second

    for aggregation, expected in ((Aggregation.TOKEN, (1 / 4, 1 / 4)), (Aggregation.SEQUENCE, (1 / 2, 1 / 6))):
        first, second = weights(aggregation=aggregation)
        assert first.policy_weights_A.tolist() == pytest.approx([expected[0]])
        assert second.policy_weights_A.tolist() == pytest.approx([expected[1]] * 3)
        assert second.regulariser_weights_A.tolist() == second.value_weights_A.tolist() == [0.25] * 3
    _, second = weights(aggregation=Aggregation.CONSTANT, constant_length=8)
    assert second.policy_weights_A.tolist() == [1 / 16] * 3
    _, second = weights(aggregation=Aggregation.TOKEN, regulariser_aggregation=Aggregation.SEQUENCE)
    assert second.regulariser_weights_A.tolist() == pytest.approx([1 / 6] * 3)


@pytest.mark.parametrize(
    ("aggregation", "cut", "whole"),
    [
        (Aggregation.TOKEN, 1 / 12, 1 / 12),
        (Aggregation.SEQUENCE, 1 / (2 * 6), 1 / (2 * 6)),
        (Aggregation.CONSTANT, 1 / (2 * 8), 1 / (2 * 8)),
    ],
)
def test_an_episode_weighs_once_in_however_many_segments_it_comes(aggregation, cut, whole):
    """One episode of 1 + 2 + 3 actions in three segments beside one of 6 in one: two samples, not four, and 6 tokens
    each. Constant length 8."""
    batch = make_batch([(0, 1), (0, 2), (0, 3), (0, 6)])
    keys = [SampleKey(0, 0, 0), SampleKey(0, 0, 1), SampleKey(0, 0, 2), SampleKey(0, 1, 0)]
    batch = TrainingBatch(samples=[dataclasses.replace(s, key=key) for s, key in zip(batch.samples, keys, strict=True)])
    settings = make_settings(aggregation=aggregation, constant_length=8, batching=MicroBatching(samples=4))
    (step,) = optimizer_steps(batch, settings, round_index=1)
    (micro,) = step
    assert micro.policy_weights_A.tolist() == pytest.approx([cut] * 6 + [whole] * 6)


def test_the_segments_of_an_episode_are_in_one_optimizer_step():
    """Four episodes of three segments, two steps: two whole episodes each, also where others have one segment."""
    for segments in ([3, 3, 3, 3], [5, 1, 1, 1]):
        batch = make_batch([(0, 2)] * sum(segments))
        keys = [SampleKey(episode, 0, i) for episode, n in enumerate(segments) for i in range(n)]
        batch = TrainingBatch(
            samples=[dataclasses.replace(s, key=key) for s, key in zip(batch.samples, keys, strict=True)]
        )
        steps = optimizer_steps(batch, make_settings(batch_size=2), round_index=1)
        episodes = [{keys[row // 2].prompt for row in step} for step in rows(steps)]
        assert [len(step) for step in episodes] == [2, 2]
        assert not episodes[0] & episodes[1]


def test_idle_samples_get_no_forward_and_stay_in_the_denominator():
    """Four samples of 2 actions, two of them without advantage: 4 tokens run, each weighing 1/8, not 1/4."""
    batch = make_batch([(0, 2), (0, 2), (1, 2), (1, 2)], advantages=[0.0, 0.0, 1.0, -1.0])
    assert trained_samples(batch, make_settings(skip_idle=True)) == [2, 3]
    (step,) = optimizer_steps(batch, make_settings(skip_idle=True), round_index=1)
    assert rows([step]) == [[4, 5, 6, 7]]
    assert all(micro.policy_weights_A.tolist() == [1 / 8] * 2 for micro in step)
    (whole,) = optimizer_steps(batch, make_settings(), round_index=1)
    assert rows([whole]) == [list(range(8))]


def test_a_step_of_idle_samples_still_happens():
    """A micro-batch that weighs nothing shows the optimizer the gradient 0: its momentum goes on as it would have."""
    batch = make_batch([(0, 3), (0, 1)], advantages=[0.0, 0.0])
    (step,) = optimizer_steps(batch, make_settings(skip_idle=True), round_index=1)
    (micro,) = step
    assert micro.is_filler
    assert micro.policy_weights_A.tolist() == micro.value_weights_A.tolist() == [0.0]


# ----------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_have_the_same_steps_as_one_process(ranks, aggregation):
    """Which samples are in a step and what their tokens weigh does not depend on who has them, and all have equally
    many forwards; with 8 ranks some have nothing at all."""
    whole = make_batch([(0, 2), (0, 1), (1, 3), (1, 2), (2, 1), (2, 4), (3, 2)])
    settings = make_settings(epochs=2, batch_size=3, aggregation=aggregation, constant_length=10)
    alone = optimizer_steps(whole, settings, round_index=1)
    shares = assign_to_ranks(whole.samples, settings, round_index=1, ranks=ranks)
    parts = together(
        ranks,
        lambda own: optimizer_steps(TrainingBatch(samples=shares[own.index]), settings, round_index=1, ranks=own),
    )
    assert {len(part) for part in parts} == {6}
    for number, step in enumerate(alone):
        assert len({len(part[number]) for part in parts}) == 1
        found = {token: weight for part in parts for token, weight in weighed(part[number]).items()}
        assert found == pytest.approx(weighed(step))
        assert sum(micro.token_share for part in parts for micro in part[number]) == pytest.approx(1)


@pytest.mark.parametrize("between", [None, (-1.0, 5.0)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_chosen_tokens_are_those_of_the_step(ranks, between):
    """The same tokens on any number of ranks, in any micro-batches and in another order; in each of two epochs others
    may be drawn."""
    shapes = [(0, 2), (0, 1), (1, 3), (1, 2), (2, 1), (2, 4), (3, 2)]
    generator = torch.Generator().manual_seed(3)
    columns = {name: torch.randn(15, generator=generator) for name in ("advantages_A", "old_logprobs_A")}

    def filled(batch: TrainingBatch) -> TrainingBatch:
        places = {sample.key: whole.actions_of(i) for i, sample in enumerate(whole.samples)}
        for name, column in columns.items():
            setattr(
                batch, name, torch.cat([column[places[sample.key]] for sample in batch.samples] or [torch.empty(0)])
            )
        return batch

    whole = make_batch(shapes)
    settings = make_settings(epochs=2, chosen=TokenChoice(share=0.3, between=between))
    alone = [chosen(step) for step in optimizer_steps(filled(whole), settings, round_index=1)]
    assert [len(found) for found in alone] == [4, 4]
    assert (alone[0] == alone[1]) == (between is None)
    shares = assign_to_ranks(whole.samples, settings, round_index=1, ranks=ranks)
    other = dataclasses.replace(settings, batching=MicroBatching(tokens=9), seed=7)
    parts = together(
        ranks,
        lambda own: optimizer_steps(
            filled(TrainingBatch(samples=shares[own.index][::-1])), other, round_index=1, ranks=own
        ),
    )
    assert [set().union(*(chosen(part[number]) for part in parts)) for number in range(2)] == alone


def test_tokens_cannot_be_chosen_without_old_logprobs():
    settings = make_settings(chosen=TokenChoice(share=0.3))
    with pytest.raises(ValueError, match="old log-probs, and the batch has none"):
        optimizer_steps(make_batch([(0, 2)], [1.0]), settings, round_index=1)


def chosen(step) -> set[int]:
    """The tokens that were chosen."""
    return {
        token
        for micro in step
        if not micro.is_filler
        for token, is_chosen in zip(
            micro.packed.tokens.token_ids[micro.packed.tokens.action_positions].tolist(),
            micro.chosen_A.tolist(),
            strict=True,
        )
        if is_chosen
    }


def weighed(step) -> dict[int, float]:
    """What every action that counts weighs, by its token."""
    return {
        token: weight
        for micro in step
        if not micro.is_filler
        for token, weight in zip(
            micro.packed.tokens.token_ids[micro.packed.tokens.action_positions].tolist(),
            micro.policy_weights_A.tolist(),
            strict=True,
        )
    }


def test_tokens_are_shared_out_evenly_within_every_step():
    """Eight prompts of two samples of 5 tokens, four steps: two prompts a step, and each of two ranks has one of them
    whole, 10 tokens."""
    batch = make_batch([(i // 2, 4) for i in range(16)])
    settings = make_settings(batch_size=4)
    shares = assign_to_ranks(batch.samples, settings, round_index=3, ranks=2)
    order = shuffled(gather_sample_info(batch), seed=derive_seed(0, "order", 3, 0))
    for step in range(4):
        prompts = {order[4 * step] // 2, order[4 * step + 2] // 2}
        for share in shares:
            assert sum(len(s) for s in share if s.key.prompt in prompts) == 10
            assert len({s.key.prompt for s in share if s.key.prompt in prompts}) == 1


def test_the_segments_of_an_episode_stay_on_one_rank():
    batch = make_batch([(0, 4)] * 8)
    segments = [dataclasses.replace(s, key=SampleKey(0, i // 4, i % 4)) for i, s in enumerate(batch.samples)]
    for ranks in (2, 3, 5):
        shares = assign_to_ranks(segments, make_settings(batch_size=1), round_index=1, ranks=ranks)
        episodes = [{sample.key.sample for sample in share} for share in shares]
        assert sorted(e for share in episodes for e in share) == [0, 1]
        assert sorted(len(share) for share in shares if share) in ([8], [4, 4])


def test_samples_whose_columns_are_not_finite_are_named():
    """Samples 1 and 2 are of prompt 7; a rollout log-prob that is no number was never asked for."""
    batch = make_batch([(3, 2), (7, 1), (7, 2)], [1.0, math.nan, 1.0])
    batch.reference_logprobs_A = torch.tensor([0.0, 0.0, 0.0, 0.0, -math.inf])
    batch.rollout_logprobs_A = torch.tensor([math.nan, 0.0, 0.0, 0.0, 0.0])
    (step,) = optimizer_steps(batch, make_settings(), round_index=1)
    assert step.suspects(list(step)) == [
        "the advantage of prompt 7 sample 1",
        "the reference's log-prob of prompt 7 sample 2",
    ]
    batch.samples[0].rewards_A[1] = math.inf
    assert step.suspects([])[0] == "the reward of prompt 3 sample 0"


def test_optimizer_steps_name_losses_where_all_columns_are_finite():
    batch = make_batch([(3, 2), (7, 1), (7, 2)], [1.0, 2.0, 1.0])
    (step,) = optimizer_steps(batch, make_settings(), round_index=1)
    odd = [micro for micro in step if micro.keys[0].sample == 2]
    assert step.suspects(odd) == ["the loss of prompt 7 sample 2"]
    assert step.suspects([]) == []
