"""How one device is divided between training and an engine: hand-derived numbers, and three models on two devices."""

import pytest

from openrlhf.runs.device_memory import (
    GIB,
    LONG,
    TILES,
    DeviceMemory,
    DoesNotFitError,
    EngineNeed,
    Layout,
    ModelShape,
    TrainedModel,
    TrainingNeed,
    capped,
    divide,
    engine_need,
    leaves_too_little,
    review,
    training_need,
)


def shape(parameters, layers, hidden, intermediate, vocabulary, kv_heads, head):
    return ModelShape(
        parameters=parameters,
        trained=parameters,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        cache_numbers=layers * 2 * kv_heads * head,
        kv_heads=kv_heads,
    )


SMALL = shape(134_515_008, 30, 576, 1536, 49_152, 3, 64)
"""SmolLM2-135M."""
MIDDLE = shape(1_543_714_304, 28, 1536, 8960, 151_936, 2, 128)
"""Qwen2.5-1.5B."""
LARGE = shape(7_615_616_512, 28, 3584, 18_944, 152_064, 4, 128)
"""Qwen2.5-7B."""


def one_device(model, *, gib, tokens=16_384, checkpointing=False, states_stay=True, sleeps=None):
    """64 prompts × 8 samples of at most 768 tokens."""
    training = training_need(
        [TrainedModel(model, Layout(checkpointing=checkpointing))], tokens=tokens, longest=768, states_stay=states_stay
    )
    engine = engine_need(model, max_len=768, needed=512, places=512)
    return divide(DeviceMemory(total=gib * GIB), training, engine, sleeps=sleeps)


# ----------------------------------------------------------------------------------------------------- what is needed


def test_what_training_needs_by_hand():
    """2 layers of hidden size 5 and intermediate 2, 1,000 parameters, 800 of them trained: weights 2,000, masters and
    moments 9,600, gradients 3,200; a token keeps 2 · 2 · 41 bytes, of which 1.7 times as much is set aside."""
    model = ModelShape(parameters=1000, trained=800, layers=2, hidden=5, intermediate=2)
    need = training_need([TrainedModel(model, Layout())], tokens=10, longest=4)
    assert (need.weights, need.states) == (2000, 9600)
    assert need.work == 3200 + int(1.7 * 1640) + TILES
    assert (need.total, need.staying) == (2000 + 9600 + need.work, 11_600)
    assert training_need([TrainedModel(model, Layout())], tokens=10, longest=4, states_stay=False).staying == 2000
    assert training_need([TrainedModel(model, Layout())], tokens=10, longest=4, averaged=True).states == 9600 + 3200
    offloaded = training_need([TrainedModel(model, Layout(4, 2))], tokens=10, longest=4, offloaded=True)
    assert (offloaded.weights, offloaded.states) == (2000, 0)


def test_models_of_a_process_add_up_but_work_one_after_the_other():
    """fp32 weights are their own masters."""
    policy = ModelShape(parameters=1000, trained=1000, layers=2, hidden=5, intermediate=2)
    critic = ModelShape(parameters=100, trained=100, layers=1, hidden=5, intermediate=2, element_bytes=4)
    frozen = ModelShape(parameters=1000, trained=0, layers=2, hidden=5, intermediate=2)
    alone, beside = TrainedModel(policy, Layout()), TrainedModel(critic, Layout())
    need = training_need([alone, beside], frozen=[TrainedModel(frozen, Layout())], tokens=10, longest=4)
    assert need.weights == 2000 + 400 + 2000
    assert need.states == 12_000 + 800
    assert need.work == training_need([alone], tokens=10, longest=4).work


def test_the_longest_sequence_may_be_a_stream_by_itself():
    """Below `LONG` its MLPs are whole: one just below may take more than a longer one."""
    model = ModelShape(parameters=0, trained=0, layers=100, hidden=5, intermediate=200)

    def work(longest):
        return training_need([TrainedModel(model, Layout())], tokens=0, longest=longest).work

    assert work(100) < work(LONG - 1) == work(LONG + 1) < work(40 * LONG)


def test_what_an_engine_needs_by_hand():
    """Keys and values of 3 layers, 4 heads of 8: 192 numbers a token, and 40 tokens are 3 blocks of 16. Of 8 devices in
    two stages each has a head of the four, and half of the layers."""
    model = ModelShape(
        parameters=1600, trained=0, layers=3, hidden=5, intermediate=2, vocabulary=7, cache_numbers=192, kv_heads=4
    )
    need = engine_need(model, max_len=40, needed=8, places=256)
    assert (need.weights, need.sequence_bytes, need.sequences) == (3200, 48 * 192 * 2, 256)
    assert need.wish == 256 * need.sequence_bytes
    assert need.least == 2 * need.sequence_bytes  # a quarter of a round
    assert need.working == int(2.5 * GIB) + 8192 * 2 * (20 + 6) + 5 * 4 * 256 * 7
    assert engine_need(model, max_len=40, needed=1, places=256).least == need.sequence_bytes
    assert engine_need(model, max_len=40, needed=1000, places=512).sequences == 1000  # histories of an agent
    shared = engine_need(model, max_len=40, needed=8, places=256, tensor=8, stages=2)
    assert (shared.weights, shared.sequence_bytes) == (200, 48 * 192 * 2 // 8)
    three = engine_need(model, max_len=40, needed=8, places=250, processes=3)  # 84 places each, for 3 of the 8
    assert (three.weights, three.sequence_bytes) == (3 * 3200, need.sequence_bytes)
    assert (three.sequences, three.needed) == (3 * 84, 9)
    assert three.working == 3 * (int(2.5 * GIB) + 8192 * 2 * (20 + 6) + 5 * 4 * 84 * 7)


# ------------------------------------------------------------------------------------------------ three models, two GPUs


@pytest.mark.parametrize("gib", [80, 139])
def test_nobody_sleeps_beside_135m(gib):
    """State 18 bytes a parameter, 2.3 GiB; a token keeps 30 · 2 · (6.6 · 576 + 4 · 1536) bytes, 16,384 of them 9.1 GiB,
    1.7 times that is 15.5: 18 GiB with the tiles. Keys and values of a token are 30 · 2 · 3 · 64 · 2 bytes, those of
    512 × 768 tokens 8.4 GiB. Weights 0.25, context and graphs 2.5, the sampler 5 · 4 · 512 · 49,152 = 0.47, a step
    8192 · 2 · (4 · 576 + 3 · 1536) = 0.1: 11.8 in all."""
    found = one_device(SMALL, gib=gib)
    assert found.training.total / GIB == pytest.approx(18.0, abs=0.1)
    assert found.engine.fixed / GIB == pytest.approx(3.33, abs=0.03)
    assert found.cache == found.engine.wish == 512 * 768 * 23_040
    assert found.memory == (found.memory.share, False, found.cache)
    assert found.memory.share * gib == pytest.approx(11.8, abs=0.1)


def test_nobody_sleeps_beside_1_5b_on_139_gib_and_on_80_it_takes_turns():
    """18 · 1.54e9 bytes are 25.9 GiB; 16,384 tokens of 2,514 KiB are 39.3, times 1.7: 93 GiB in all, as much as
    `bench.sft` saw at most. vLLM: 2.9 of weights, 4.4 to work, 10.5 of keys and values."""
    found = one_device(MIDDLE, gib=139)
    assert found.training.total / GIB == pytest.approx(93, abs=0.5)
    assert (found.engine.fixed + found.cache) / GIB == pytest.approx(17.8, abs=0.2)
    assert (found.memory.sleeps, found.memory.cache_bytes) == (False, found.engine.wish)
    turns = one_device(MIDDLE, gib=80)
    assert (turns.memory.sleeps, turns.memory.cache_bytes) == (True, turns.engine.wish)
    assert not one_device(MIDDLE, gib=80, tokens=8192).memory.sleeps  # 60 and 18
    assert not one_device(MIDDLE, gib=80, checkpointing=True).memory.sleeps


def test_7b_takes_turns_and_has_what_training_leaves():
    """Weights and states are 14.2 + 85.1 GiB, and 3 stay free: of 139 GiB 36.7 are left, of which weights are 14.2 and
    the rest but for keys and values 5. Without the states there is room for all 21 GiB of them."""
    found = one_device(LARGE, gib=139, tokens=2048, checkpointing=True)
    assert (found.memory.sleeps, found.memory.cache_bytes) == (True, None)
    assert found.memory.share * 139 == pytest.approx(139 - 99.3 - 3, abs=0.1)
    assert found.cache / GIB == pytest.approx(17.4, abs=0.4)
    asleep = one_device(LARGE, gib=139, tokens=2048, checkpointing=True, states_stay=False)
    assert asleep.memory.cache_bytes == asleep.engine.wish
    with pytest.raises(DoesNotFitError, match=r"14 GiB of weights and 85 GiB of masters and moments, .* has 80 GiB"):
        one_device(LARGE, gib=80, tokens=2048, checkpointing=True)


# ---------------------------------------------------------------------------------------------------------- the rules


TRAINING = TrainingNeed(weights=10 * GIB, states=20 * GIB, work=20 * GIB)
ENGINE = EngineNeed(
    weights=5 * GIB, working=5 * GIB, sequence_bytes=GIB, sequence_tokens=100, sequences=40, needed=32
)  # fmt: skip
"""It wishes 40 GiB, and needs 8 at least."""


@pytest.mark.parametrize(
    ("total", "sleeps", "expected"),
    [
        (103, None, (50 / 103, False, 40 * GIB)),  # 50 + 10 + 40 + 3
        (102, None, (49 / 102, False, None)),
        (71, None, (18 / 71, False, None)),
        (70, None, (37 / 70, True, None)),  # 30 stay
        (103, True, (50 / 103, True, 40 * GIB)),
        (60, False, (18 / 60, False, None)),  # the least that it needs
        (46, False, (13 / 46, False, None)),  # what training leaves
    ],
)
def test_an_engine_has_what_it_can_use_beside_training_or_in_turns(total, sleeps, expected):
    found = divide(DeviceMemory(total=total * GIB), TRAINING, ENGINE, sleeps=sleeps)
    assert found.memory.share == pytest.approx(expected[0])
    assert found.memory[1:] == expected[1:]


def test_what_others_have_is_not_divided():
    found = divide(DeviceMemory(total=113 * GIB, others=10 * GIB), TRAINING, ENGINE)
    assert found.memory == (50 / 113, False, 40 * GIB)
    assert divide(DeviceMemory(total=112 * GIB, others=10 * GIB), TRAINING, ENGINE).cache == 39 * GIB


def test_an_engine_takes_at_most_095():
    little = TrainingNeed(weights=0, states=0, work=GIB)
    huge = EngineNeed(weights=GIB, working=0, sequence_bytes=GIB, sequence_tokens=1, sequences=999, needed=999)
    found = divide(DeviceMemory(total=1000 * GIB), little, huge)
    assert (found.memory.share, found.memory.sleeps) == (0.95, False)


def test_weights_that_do_not_fit_in_turns_are_refused():
    with pytest.raises(DoesNotFitError, match=r"5.0 GiB of weights, training keeps 30 GiB, .* has 34 GiB"):
        divide(DeviceMemory(total=34 * GIB), TRAINING, ENGINE)


def test_the_line_at_the_start():
    assert str(divide(DeviceMemory(total=103 * GIB), TRAINING, ENGINE)) == (
        "one device of 103 GiB for both: training may take 50 GiB (weights 10 GiB, masters and moments 20 GiB, "
        "gradients and activations 20 GiB), vLLM 50 GiB (weights 5.0 GiB, keys and values 40 GiB, of 40 GiB for 40 "
        "sequences of 100 tokens): nobody sleeps"
    )


def test_a_share_that_was_asked_for_is_kept_as_far_as_it_is_free():
    """Of 100 GiB models have 10 and states 20, and 3 stay free. What is loaded already may be more."""
    device = DeviceMemory(total=100 * GIB)
    assert capped(0.5, device, TRAINING) == 0.5
    assert capped(0.95, device, TRAINING) == pytest.approx(0.67)
    assert capped(0.95, DeviceMemory(total=100 * GIB, loaded=15 * GIB), TRAINING) == pytest.approx(0.62)
    assert capped(0.95, DeviceMemory(total=30 * GIB), TRAINING) == 0


@pytest.mark.parametrize(("share", "expected"), [(0.5, False), (0.51, True)])
def test_an_engine_sleeps_where_its_share_leaves_too_little(share, expected):
    assert leaves_too_little(share, DeviceMemory(total=100 * GIB), TRAINING) is expected


def test_the_first_update_is_compared_with_the_estimate():
    beside = divide(DeviceMemory(total=103 * GIB), TRAINING, ENGINE)
    assert review(beside, 45 * GIB) is None
    # 1.15 · 60 + 10 + 3 leave 21 for keys and values.
    assert "if memory runs out: --vllm.gpu_memory_utilization 0.30, or --vllm.enable_sleep" in review(beside, 60 * GIB)
    assert review(beside, 80 * GIB).endswith("if memory runs out: --vllm.enable_sleep")
    turns = divide(DeviceMemory(total=70 * GIB), TRAINING, ENGINE)
    assert review(turns, 49 * GIB) is None
    # 1.15 · 40 + 10 + 3 leave 11.
    assert "--vllm.gpu_memory_utilization 0.30 --vllm.enable_sleep false" in review(turns, 40 * GIB)
    assert review(turns, 60 * GIB).endswith("if memory runs out: a smaller --train.max_tokens_per_gpu")
