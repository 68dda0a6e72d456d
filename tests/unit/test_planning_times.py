"""Seconds of phases, by hand and beside what was measured on an H200 (bench/RESULTS.md)."""

import math

import pytest
import torch

from openrlhf.models.loading import LoadSettings
from openrlhf.planning.hardware import GPUS
from openrlhf.planning.models import read_model
from openrlhf.planning.times import (
    MEASURED,
    Batch,
    EngineGroup,
    Ranks,
    decode_step,
    forward_flops,
    generation_seconds,
    push_seconds,
    scoring_seconds,
    training_seconds,
    update_flops,
)

H200 = GPUS["H200"]


@pytest.fixture(scope="module")
def model():
    found = {}

    def read(name):
        if name not in found:
            found[name] = read_model(name, LoadSettings(device=torch.device("cuda"), trains=True))
        return found[name]

    return read


def test_prompts_are_computed_once_for_samples_that_share_them():
    """Two prompts of 10 tokens, four samples of 5 each: 2 · (10 + 4 · 5) = 60 tokens are computed, of 8 · 15 = 120.
    Pairs: 2 · (10²/2 + 4 · (10 · 5 + 5²/2)) = 2 · (50 + 250) = 600."""
    batch = Batch(samples=8, prompt=10, response=5, sharing=4)
    assert (batch.tokens, batch.given_tokens, batch.pairs) == (60, 120, 600)


def test_arithmetic_counts_matrices_head_and_attention(model):
    """SmolLM2-135M: a layer has 576 · (576 + 2 · 192 + 576) + 3 · 576 · 1536 = 3,538,944 entries, 30 layers 106,168,320;
    the head 49,152 · 576 = 28,311,552, on responses alone."""
    small = model("SmolLM2-135M")
    assert (small.matrices, small.head, small.attention_width) == (106_168_320, 28_311_552, 576)
    batch = Batch(samples=8, prompt=10, response=5, sharing=4)
    linear = 2 * (106_168_320 * 60 + 28_311_552 * 40)
    attention = 4 * 576 * 30 * 600
    assert forward_flops(small, batch) == linear + attention
    assert update_flops(small, batch, checkpointing=False) == 3 * (linear + attention)
    assert update_flops(small, batch, checkpointing=True) == 3 * (linear + attention) + 2 * 106_168_320 * 60


def test_only_the_experts_of_a_token_are_multiplied_and_all_that_are_met_are_read(model):
    """Qwen3-30B-A3B has 3.0B parameters for a token. One sequence meets 8 of 128 experts, 512 meet all of them:
    (1 − 8/128)^512 is nothing."""
    mixture = model("Qwen3-30B-A3B")
    assert 30.4e9 < mixture.shape.parameters < 30.6e9
    assert 3.0e9 < mixture.matrices + mixture.head < 3.1e9
    group = EngineGroup(engines=1)
    least = (mixture.matrices + mixture.head) * 2 / H200.bandwidth
    one, many = (decode_step(mixture, n, 100, H200, group) for n in (1, 512))
    assert one > least
    assert many - one > 2 * 27e9 / H200.bandwidth  # the other 27B parameters


ROUND = Batch(samples=512, prompt=256, response=512, sharing=8)
SHORT = Batch(samples=512, prompt=128, response=256)


@pytest.mark.parametrize(
    ("name", "batch", "steps_of", "low", "high"),
    [
        ("Qwen2.5-1.5B", ROUND, None, 6.3, 8.7),  # bench.hybrid: vLLM alone, on Ray, in one process
        ("Qwen2.5-1.5B", SHORT, 512 / 49_462, 0, 0),  # bench.adapters, merged
        ("Qwen2.5-7B", SHORT, 512 / 22_581, 0, 0),
    ],
)
def test_generation_is_near_what_was_measured(model, name, batch, steps_of, low, high):
    if steps_of is None:
        assert low * 0.9 < generation_seconds(model(name), batch, H200, EngineGroup(engines=1), prompts=64).total < high
    else:
        length = batch.prompt + batch.response / 2
        assert decode_step(model(name), 512, length, H200, EngineGroup(engines=1)) == pytest.approx(steps_of, rel=0.1)


def test_an_update_is_near_what_was_measured(model):
    """bench.trainer, `round`: 6.42 s."""
    found = training_seconds(
        model("Qwen2.5-1.5B"), ROUND, H200, Ranks(), micro_batches=25, steps=1, checkpointing=False
    )
    assert found.total == pytest.approx(6.42, rel=0.1)


@pytest.mark.parametrize(
    ("name", "bytes_moved", "measured"), [("7B", 15.23e9, 1.09), ("6.56B mixture", 13.1e9, 0.78), ("LoRA", 81e6, 0.09)]
)
def test_a_push_is_near_what_was_measured(name, bytes_moved, measured):
    assert push_seconds(bytes_moved, rate=MEASURED["push_rate"].value).total == pytest.approx(measured, rel=0.25)


def test_small_work_is_bound_by_launches(model):
    """24 layers of 0.5B, forward and backward of 5,120 tokens: 24 · 4.4 ms; measured: 106 to 131 ms."""
    small = model("Qwen2.5-0.5B")
    batch = Batch(samples=8, prompt=128, response=512, sharing=8)
    found = training_seconds(small, batch, H200, Ranks(), micro_batches=1, steps=0, checkpointing=False)
    assert found.compute == pytest.approx(0.1056)
    assert "launches" in found.why


def test_devices_divide_arithmetic_and_traffic_is_added(model):
    """Twice the ranks take half as long; ranks of ZeRO-3 that wait for weights longer than they compute say so."""
    large = model("Qwen2.5-7B")
    many = Batch(samples=4096, prompt=256, response=512, sharing=8)
    one, two = (scoring_seconds(large, many, H200, Ranks(count=count), micro_batches=1).compute for count in (1, 2))
    assert one == pytest.approx(2 * two)
    tiny = Batch(samples=1, prompt=0, response=8)
    ranks = Ranks(count=8, zero=3, link=H200.link)
    waiting = scoring_seconds(large, tiny, H200, ranks, micro_batches=1)
    gathered = 2 * large.shape.parameters * 7 / 8 / (450e9 * 0.7)
    assert waiting.traffic + waiting.compute == pytest.approx(gathered)


def test_sequences_that_find_no_place_wait(model):
    """1,024 sequences in 256 places are four waves."""
    small = model("Qwen2.5-0.5B")
    batch = Batch(samples=1024, prompt=64, response=64)
    all_at_once, waves = (
        generation_seconds(small, batch, H200, EngineGroup(engines=1, places=places), prompts=64).total
        for places in (256, 1024)
    )
    assert all_at_once > 2 * waves
    assert math.isclose(
        generation_seconds(small, batch, H200, EngineGroup(engines=4, places=256), prompts=256).total * 4, all_at_once,
        rel_tol=0.1,
    )  # fmt: skip


def test_every_constant_says_where_it_comes_from():
    assert all(constant.value > 0 and len(constant.source) > 20 for constant in MEASURED.values())
