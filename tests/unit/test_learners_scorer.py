"""Frozen forwards: how much of their results is held until it is read."""

import weakref

import pytest
import torch
from torch import nn

import openrlhf.learners.scorer as scorer
from openrlhf.learners.accumulation import MicroBatching
from openrlhf.types import SampleKey, Segment, TrainingBatch, TrainingSample

K = 4


def batch_of(lengths):
    samples = []
    for index, length in enumerate(lengths):
        mask = torch.arange(length) > 0
        segment = Segment(
            token_ids=torch.arange(length) + 10 * index,
            action_mask=mask,
            rollout_logprobs=None,
            versions=torch.where(mask, 0, -1).int(),
            turn_rewards=torch.zeros(length),
        )
        samples.append(TrainingSample(key=SampleKey(index, 0), segment=segment, rewards_A=torch.zeros(length - 1)))
    return TrainingBatch(samples=samples)


@pytest.mark.parametrize(("room", "held"), [(10**6, 6), (100, 2), (0, 1)])
def test_large_results_are_read_before_all_forwards_are_launched(monkeypatch, room, held):
    """Six forwards of three actions, each with 4 · 3 int32 and as many float32: 96 bytes. Where there is room for 100,
    the second is one too many, and both are read. What is read is the same."""
    monkeypatch.setattr(scorer, "_PENDING_BYTES", room)
    alive, most = weakref.WeakSet(), 0

    class Held(torch.Tensor):
        pass

    def forward(module, tokens):
        nonlocal most
        ids_A = tokens.token_ids[tokens.action_positions]
        given = (ids_A[:, None] + torch.arange(K)).int().as_subclass(Held), -ids_A[:, None].float().expand(-1, K)
        alive.add(given[0])
        most = max(most, len(alive))
        return given

    batch = batch_of([4] * 6)
    asked = scorer.Scorer(
        nn.Linear(1, 1),
        forward,
        batching=MicroBatching(samples=1),
        device=torch.device("cpu"),
        columns=(torch.zeros(0, K, dtype=torch.int32), torch.zeros(0, K)),
    )
    ids_AK, numbers_AK = asked.columns(batch)
    actions_A = torch.cat([sample.segment.token_ids[1:] for sample in batch.samples])
    assert torch.equal(ids_AK, (actions_A[:, None] + torch.arange(K)).int())
    assert torch.equal(numbers_AK, -actions_A[:, None].float().expand(-1, K))
    assert most == held
