"""The probe that compares what an engine computes with what the policy computes."""

import copy
import math

import pytest
import torch
from vllm_mixtures import VOCABULARY, make_mixture

from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.policy import Policy
from openrlhf.models.routes import RouteShape, route_shape
from openrlhf.weight_sync.base import WeightSyncError
from openrlhf.weight_sync.probe import LocalProbe, Probe, mixture_length, policy_logprobs, probe_tokens, tolerance


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


def test_an_engine_with_rounded_weights_is_judged_by_the_mean():
    """log-probs -40 and 0 have a standard deviation of 20.3 (32 of them, 16 each): 10.2 is allowed on average. Where
    they are all alike it is what a single one is allowed without rounding."""
    probe = Probe.of(vocab_size=64, dtype=torch.bfloat16, max_model_len=64, rounded=True)
    spread, alike = [-40.0, 0.0] * 16, [-4.0] * 32
    for own, off, allowed in ((spread, 10.0, True), (spread, 10.3, False), (alike, 0.9, True), (alike, 1.1, False)):
        single = [own[0] - 32 * off, *own[1:]]
        every = [value - off for value in own]
        for found in (single, every):
            if allowed:
                assert probe.compare(own, found, version=1) == pytest.approx(
                    max(abs(a - b) for a, b in zip(own, found, strict=True))
                )
            else:
                with pytest.raises(WeightSyncError, match="on average"):
                    probe.compare(own, found, version=1)
    with pytest.raises(WeightSyncError):
        probe.compare(spread, [math.nan] * 32, version=1)


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


class TestMixtures:
    @pytest.mark.parametrize(
        ("layers", "experts", "per_token", "expected"),
        [(48, 128, 8, 414), (32, 8, 2, 72), (24, 32, 4, 170), (61, 256, 8, 512), (2, 2, 2, 32), (1, 4, 2, 32)],
    )
    def test_a_probe_is_long_enough_to_reach_every_expert(self, layers, experts, per_token, expected):
        """E · L · (1 - K / E)^n = 1 / 100 at n = 206.6 for Qwen3-30B-A3B, twice the next whole number; 35.3 for
        Mixtral; 84.3 for gpt-oss-20b. No more than 512, no fewer than other probes have."""
        shape = RouteShape(layers=layers, experts=experts, per_token=per_token)
        assert mixture_length(shape) == expected
        if expected < 512 and per_token < experts:
            assert experts * layers * (1 - per_token / experts) ** (expected / 2) <= 0.01
        probe = Probe.of(vocab_size=1000, dtype=torch.float32, max_model_len=400, routes=shape)
        assert len(probe.token_ids) == min(expected, 399)

    @pytest.mark.parametrize(
        ("dtype", "looks_at_mean"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
    )
    def test_sixteen_bits_are_judged_by_the_mean(self, dtype, looks_at_mean):
        """Rounding moves the policy's own log-probs by 0.01 on average. A single token that is 3 off, sent to another
        expert, is 0.06 of 50 on average; all 0.1 off is more than 8 times 0.01. In fp32 the largest one decides."""
        shape = RouteShape(layers=1, experts=4, per_token=2)
        probe = Probe.of(vocab_size=64, dtype=dtype, max_model_len=64, routes=shape)
        assert (probe.rounding is not None) is looks_at_mean
        own = [-3.0] * 50
        side = [*own, *([-3.01] * 50)] if looks_at_mean else own
        lone, all_off = [*own[:-1], -6.0], [-3.1] * 50
        assert probe.compare(side, own, version=1) == 0
        for found, wrong in ((lone, not looks_at_mean), (all_off, True), ([*own[:-1], math.nan], True)):
            if wrong:
                with pytest.raises(WeightSyncError, match="on average by" if looks_at_mean else "by up to"):
                    probe.compare(side, found, version=1)
            else:
                assert probe.compare(side, found, version=1) == 3.0

    def test_the_policy_is_moved_by_its_rounding_alone_and_for_the_probe_alone(self):
        policy = Policy(make_mixture("qwen3_moe", dtype=torch.bfloat16))
        probe = Probe.of(
            vocab_size=VOCABULARY,
            dtype=torch.bfloat16,
            max_model_len=64,
            routes=route_shape(policy.model.config),
        )
        random_state = torch.get_rng_state()
        side = probe.policy_side(policy)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert probe.policy_side(policy) == side
        own, moved = torch.tensor(side).chunk(2)
        assert own.tolist() == policy_logprobs(policy, probe.token_ids)
        assert 1e-3 < (own - moved).abs().mean() < 0.5
