"""Samples arrive as they were sent."""

import dataclasses
import pickle

import pytest
import torch
from small_rl import make_groups

from openrlhf.algorithms.advantages import get_estimator
from openrlhf.cluster.transport import Column, PackedSamples, packed_parts, unpacked
from openrlhf.learners.advantages import AdvantageSettings, training_samples
from openrlhf.types import ImageInput, OtherPrompt, PlacedImage, Supports, TrainingBatch


def test_samples_survive_packing():
    """Every field of every sample, with and without rollout log-probs, extra inputs included."""
    samples = training_samples(make_groups(), AdvantageSettings(estimator=get_estimator("group_norm"))).samples
    first = int(samples[1].segment.token_ids[0])
    pixels = {"pixels": torch.ones(2, 2)}
    image = ImageInput(tensors=pixels, token_ids=(first,), placeholder=first, digest="a", thumbnail=b"png", size=(3, 2))
    bare = dataclasses.replace(samples[1].segment, rollout_logprobs=None, images=(PlacedImage(0, image),))
    samples[1] = dataclasses.replace(samples[1], segment=bare)
    routes = torch.arange(12, dtype=torch.uint8).view(2, 3, 2)
    routed = dataclasses.replace(samples[2].segment, routes=routes)
    told = Supports.of([[7, 8], *[None] * (routed.num_actions - 1)])
    samples[2] = dataclasses.replace(samples[2], segment=dataclasses.replace(routed, supports=told))
    samples[3] = dataclasses.replace(samples[3], other_prompt=OtherPrompt(2, (5, 6, 7)))
    arrived = unpacked([pickle.loads(pickle.dumps(PackedSamples.of(list(enumerate(samples)))))])
    assert len(arrived) == len(samples) == 6
    for there, here in zip(arrived, samples, strict=True):
        assert there.key == here.key
        torch.testing.assert_close(there.compared_A, here.compared_A, rtol=0, atol=0)
        assert torch.equal(there.rewards_A, here.rewards_A)
        for name in ("token_ids", "action_mask", "versions", "turn_rewards", "rollout_logprobs"):
            one, other = getattr(there.segment, name), getattr(here.segment, name)
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one, other) and one.dtype == other.dtype)
    assert [sample.other_prompt for sample in arrived] == [None, None, None, OtherPrompt(2, (5, 6, 7)), None, None]
    assert torch.equal(arrived[2].segment.routes, routes)
    assert arrived[2].segment.supports.tolist() == told.tolist()
    assert arrived[1].segment.routes is arrived[1].segment.supports is None
    (placed,) = arrived[1].segment.images
    assert (placed.start, placed.image.digest, placed.image.token_ids) == (0, "a", (first,))
    assert (placed.image.thumbnail, placed.image.size) == (b"png", (3, 2))
    assert torch.equal(placed.image.tensors["pixels"], torch.ones(2, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_column_finds_its_samples_however_they_are_shared_out(ranks):
    """From three ranks to others: each token's number arrives where its token is."""
    samples = training_samples(make_groups(), AdvantageSettings(estimator=get_estimator("rloo"))).samples
    theirs = [TrainingBatch(samples=samples[i::3]) for i in range(3)]
    for batch in theirs:
        batch.values_A = torch.cat(
            [sample.segment.token_ids[sample.segment.action_mask] for sample in batch.samples]
        ).float()
    parts = [Column.of(batch, "values_A") for batch in theirs]
    for own in (TrainingBatch(samples=samples[i::ranks]) for i in range(ranks)):
        expected = torch.cat([sample.segment.token_ids[sample.segment.action_mask] for sample in own.samples]).float()
        assert torch.equal(Column.for_batch(own, parts), expected)
    assert Column.for_batch(TrainingBatch(samples=[]), []).shape == (0,)


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (6, 1)])
def test_groups_of_other_sizes_share_what_was_packed_once(sizes):
    """Each sample is in one part, and every rank of each group gets its share, in the order of the round."""
    samples = training_samples(make_groups(), AdvantageSettings(estimator=get_estimator("rloo"))).samples
    groups = [[samples[rank::size] for rank in range(size)] for size in sizes]
    parts = packed_parts(samples, groups)
    assert sum(len(part.headers) for part in parts.values()) == len(samples)
    for group, shares in enumerate(groups):
        for rank, share in enumerate(shares):
            own = unpacked([part for owners, part in reversed(parts.items()) if owners[group] == rank])
            assert [sample.key for sample in own] == [sample.key for sample in share]


def test_a_rank_may_get_nothing():
    assert unpacked([]) == []
    assert packed_parts([], [[[], []]]) == {}
