"""Samples arrive as they were sent."""

import dataclasses
import pickle

import torch
from small_rl import make_groups

from openrlhf.algorithms.advantages import get_estimator
from openrlhf.cluster.transport import PackedSamples
from openrlhf.learners.samples import RewardShaping, training_samples


def test_samples_survive_packing():
    """Every field of every sample, with and without rollout log-probs, extra inputs included."""
    samples = training_samples(make_groups(), estimator=get_estimator("group_norm"), shaping=RewardShaping()).samples
    bare = dataclasses.replace(samples[1].segment, rollout_logprobs=None, multimodal={"pixels": torch.ones(2, 2)})
    samples[1] = dataclasses.replace(samples[1], segment=bare)
    arrived = pickle.loads(pickle.dumps(PackedSamples.of(samples))).samples()
    assert len(arrived) == len(samples) == 6
    for there, here in zip(arrived, samples, strict=True):
        assert (there.key, there.baseline, there.scale) == (here.key, here.baseline, here.scale)
        assert torch.equal(there.rewards_A, here.rewards_A)
        for name in ("token_ids", "action_mask", "versions", "turn_rewards", "rollout_logprobs"):
            one, other = getattr(there.segment, name), getattr(here.segment, name)
            assert (one is None) == (other is None)
            assert one is None or (torch.equal(one, other) and one.dtype == other.dtype)
    assert torch.equal(arrived[1].segment.multimodal["pixels"], torch.ones(2, 2))


def test_a_rank_may_get_nothing():
    assert PackedSamples.of([]).samples() == []
