"""Buckets of weights: everything arrives as it was, in few blocks; and the probe that compares engine and policy."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.policy import Policy
from openrlhf.weight_sync.base import WeightSyncError
from openrlhf.weight_sync.buckets import cut_into_buckets
from openrlhf.weight_sync.probe import LocalProbe, Probe, policy_logprobs, probe_tokens, tolerance

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def test_tensors_are_laid_end_to_end_from_multiples_of_16():
    """12 bytes, then 2 from 16 on, then 40 from 32 on: 72 of 80 bytes. The next 12 would begin at 80."""
    named = [
        ("a", torch.arange(3.0)),
        ("b", torch.ones(1, dtype=torch.bfloat16)),
        ("c", torch.zeros(2, 5)),
        ("d", torch.arange(3.0)),
    ]
    first, second = cut_into_buckets(named, max_bytes=80)
    assert [(entry.name, entry.start) for entry in first.entries] == [("a", 0), ("b", 16), ("c", 32)]
    assert len(first.payload) == 72
    assert [(entry.name, entry.start) for entry in second.entries] == [("d", 0)]


def test_a_tensor_larger_than_a_bucket_has_one_to_itself():
    named = [("small", torch.ones(2)), ("large", torch.ones(100)), ("last", torch.ones(2))]
    assert [[entry.name for entry in bucket.entries] for bucket in cut_into_buckets(named, max_bytes=64)] == [
        ["small"],
        ["large"],
        ["last"],
    ]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from(DTYPES)), max_size=8),
    max_bytes=st.integers(1, 200),
)
def test_everything_arrives_as_it_was(shapes, max_bytes):
    named = [
        (str(i), torch.arange(rows * columns).view(rows, columns).to(dtype).t())  # not contiguous
        for i, (rows, columns, dtype) in enumerate(shapes)
    ]
    buckets = list(cut_into_buckets(named, max_bytes=max_bytes))
    arrived = [pair for bucket in buckets for pair in bucket.tensors()]
    assert [name for name, _ in arrived] == [name for name, _ in named]
    for (_, ours), (_, theirs) in zip(arrived, named, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert all(len(bucket.payload) <= max_bytes or len(bucket.entries) == 1 for bucket in buckets)


def test_a_tensor_may_change_as_soon_as_the_next_is_asked_for():
    """As one that was gathered from several ranks, whose memory the next one gets."""
    memory = torch.zeros(4)

    def gathered():
        for value in (1.0, 2.0):
            yield str(value), memory.fill_(value)

    (bucket,) = cut_into_buckets(gathered(), max_bytes=1000)
    assert [tensor.tolist() for _, tensor in bucket.tensors()] == [[1.0] * 4, [2.0] * 4]


def test_a_checksum_sees_one_bit():
    (bucket,) = cut_into_buckets([("a", torch.arange(9.0))], max_bytes=1000)
    before = bucket.checksum()
    bucket.payload[17] ^= 4
    assert bucket.checksum() != before


@pytest.mark.parametrize(("off", "allowed"), [(0.0, True), (5e-5, True), (3e-4, False), (math.nan, False)])
def test_a_probe_allows_what_the_tolerance_allows(models, off, allowed):
    probe = LocalProbe(Probe.of(vocab_size=13, dtype=torch.float32, max_model_len=64), models.policy)
    *others, last = policy_logprobs(models.policy, probe.probe.token_ids)
    found = [*others, last + off]
    if allowed:
        assert probe.check(found, version=3) == pytest.approx(off, abs=1e-6)
    else:
        with pytest.raises(WeightSyncError, match="version 3"):
            probe.check(found, version=3)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 1.0), (torch.float16, 1 / 8), (torch.float32, 1e-4)])
def test_the_tolerance_follows_the_steps_of_the_dtype(dtype, expected):
    """128 times 2^-7 and 2^-10; of fp32's 2^-23 it would be less than sums over many terms are off by."""
    assert tolerance(dtype) == expected


def test_a_probe_runs_without_dropout_and_leaves_the_mode_as_it_was(models):
    policy = Policy(copy.deepcopy(models.policy.model))
    add_adapter(policy.model, LoraSection(rank=2, alpha=4, dropout=0.5), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    policy.train()
    first, second = (policy_logprobs(policy, probe_tokens(13)) for _ in range(2))
    assert first == second
    assert policy.training


@pytest.mark.parametrize(("max_model_len", "expected"), [(64, 32), (33, 32), (16, 15)])
def test_a_probe_leaves_room_for_the_token_that_an_engine_samples(max_model_len, expected):
    assert len(Probe.of(vocab_size=13, dtype=torch.float32, max_model_len=max_model_len).token_ids) == expected


def test_probe_tokens_reach_the_whole_vocabulary():
    tokens = probe_tokens(1000, length=32)
    assert len(set(tokens)) == 32
    assert min(tokens) < 50
    assert 950 <= max(tokens) < 1000
