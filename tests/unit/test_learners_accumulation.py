"""Micro-batches by tokens: what the flags say of one device, times the devices that compute each together."""

import pytest
import torch

from openrlhf.learners.accumulation import MicroBatching, MicroBatchSizer, Overflow
from openrlhf.types import SampleKey, Segment, TrainingBatch, TrainingSample


def batch_of(lengths: list[int]) -> TrainingBatch:
    def sample(index: int, length: int) -> TrainingSample:
        mask = torch.arange(length) >= 1
        segment = Segment(
            token_ids=torch.zeros(length, dtype=torch.int64),
            action_mask=mask,
            rollout_logprobs=None,
            versions=torch.zeros(length, dtype=torch.int32),
            turn_rewards=torch.zeros(length),
        )
        return TrainingSample(
            key=SampleKey(index, 0), segment=segment, rewards_A=torch.zeros(length - 1), compared_A=None
        )

    return TrainingBatch(samples=[sample(index, length) for index, length in enumerate(lengths)])


@pytest.mark.parametrize(("devices", "most"), [(1, 1), (2, 2), (4, 4)])
def test_devices_that_share_a_micro_batch_add_their_budgets_up(devices, most):
    """Four samples of 10 tokens, and a budget of 10 for each device."""
    cut = MicroBatching(tokens=10, devices=devices).cut(batch_of([10] * 4), range(4))
    assert [len(micro) for micro in cut] == [most] * (4 // most)


def test_a_budget_that_shrinks_stays_one_of_single_devices():
    """A micro-batch of 40 tokens on 4 devices did not fit: from now on 20, which are 5 for each device."""
    fitting = MicroBatchSizer(MicroBatching(tokens=10, devices=4))
    fitting.shrink([Overflow(tokens=40, samples=4, rank=0)])
    assert (fitting.batching.tokens, fitting.batching.devices) == (5, 4)
    assert fitting.remedy(20) == "--train.max_tokens_per_gpu 5 with --train.dynamic_batch_enable"
    assert [len(micro) for micro in fitting.batching.cut(batch_of([10] * 4), range(4))] == [2, 2]
