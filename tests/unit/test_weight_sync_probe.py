"""The probe that compares what an engine computes with what the policy computes."""

import copy
import math

import pytest
import torch

from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.policy import Policy
from openrlhf.weight_sync.base import WeightSyncError
from openrlhf.weight_sync.probe import LocalProbe, Probe, policy_logprobs, probe_tokens, tolerance


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
