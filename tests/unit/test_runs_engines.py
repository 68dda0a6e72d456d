"""How engines are started: what of a device's memory they may have, whether they sleep, how weights reach them."""

import pytest
import torch
from small_rl import make_models
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from openrlhf.config import ConfigError, parse
from openrlhf.observability.usage import GIB
from openrlhf.runs.engines import (
    EngineAdapter,
    EngineMemory,
    TrainedShape,
    engine_adapter,
    engine_memory,
    engine_share,
    needs_sleep,
    places,
    training_bytes,
    transport,
    vllm_settings,
    wants_routes,
    with_lora_sync,
)

SHAPE = TrainedShape(parameters=1000, layers=3, hidden=10, intermediate=20, element_bytes=2, checkpointing=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16 * 1000 + 7 * 3 * 2 * (120 + 80)),
        ({"element_bytes": 4}, 12 * 1000 + 7 * 3 * 4 * (120 + 80)),  # fp32 weights are their own masters
        ({"checkpointing": True}, 16 * 1000 + 7 * (2 * (120 + 80) + 3 * 2 * 10)),
    ],
)
def test_training_bytes_by_hand(changes, expected):
    """7 tokens; a layer keeps 12 × 10 + 4 × 20 numbers of each."""
    fields = {name: getattr(SHAPE, name) for name in SHAPE.__slots__} | changes
    assert training_bytes(TrainedShape(**fields), tokens=7) == expected


def test_the_estimate_is_near_what_was_measured():
    """`bench.sft`: Qwen2.5-1.5B in bf16, 16,384 tokens, 73 GiB at most, 2.9 of them weights."""
    shape = TrainedShape(
        parameters=1_543_714_304, layers=28, hidden=1536, intermediate=8960, element_bytes=2, checkpointing=False
    )
    assert training_bytes(shape, tokens=16_384) / GIB == pytest.approx(73 - 2.9, rel=0.05)


def test_an_engine_gets_what_it_asks_for_as_far_as_it_is_free():
    """3 GiB are left in any case, and what the trainer keeps there."""
    assert engine_share(0.5, free=70 * GIB, total=80 * GIB) == 0.5
    assert engine_share(0.95, free=73 * GIB, total=80 * GIB) == 70 / 80
    assert engine_share(0.95, free=73 * GIB, total=80 * GIB, staying=[20 * GIB, 10 * GIB]) == 40 / 80
    assert engine_share(0.95, free=2 * GIB, total=80 * GIB) == 0


def test_what_stays_beside_the_weights():
    """Moments of 4 bytes each, and masters of 16-bit weights."""
    shapes = [TrainedShape(parameters=1000, layers=1, hidden=1, intermediate=1, element_bytes=size, checkpointing=True)
              for size in (2, 4)]  # fmt: skip
    assert [shape.state_bytes for shape in shapes] == [12_000, 8_000]


@pytest.mark.parametrize(("share", "expected"), [(0.5, False), (0.51, True)])
def test_an_engine_sleeps_where_it_leaves_too_little(share, expected):
    """100 GiB, all free; two models of 17 and 16 with half as much again need 49.5: an engine may have 50.5."""
    assert needs_sleep(share, free=100 * GIB, total=100 * GIB, training=[17 * GIB, 16 * GIB]) is expected


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ("--train.launcher local", "cuda", "ipc"),
        ("--train.launcher local", "cpu", "rpc"),
        ("--train.launcher local --vllm.sync_backend gloo", "cuda", "rpc"),
        ("--train.launcher local --vllm.sync_with_ray", "cuda", "ipc"),
        ("--train.launcher ray --train.colocate_all", "cuda", "ipc"),
        ("--train.launcher ray --train.colocate_all --train.async_enable", "cuda", "group"),
        ("--train.launcher ray", "cuda", "group"),
        ("--train.launcher ray", "cpu", "rpc"),
        ("--train.launcher ray --vllm.sync_backend gloo", "cpu", "group"),
        ("--train.launcher ray --train.colocate_all --vllm.sync_backend gloo", "cuda", "group"),
        ("--train.launcher ray --vllm.sync_with_ray", "cuda", "rpc"),
        ("--train.launcher ray --vllm.sync_backend gloo --vllm.sync_with_ray", "cpu", "rpc"),
    ],
)
def test_weights_stay_on_a_device_that_is_shared_and_take_the_shortest_way_to_others(words, device, expected):
    assert transport(parse("train_ppo_ray", words.split()), torch.device(device)) == expected


@pytest.mark.parametrize(("requests", "expected"), [(8, 256), (300, 300), (512, 512), (1024, 512)])
def test_places_match_the_rollout_up_to_the_largest_graph(requests, expected):
    assert places(requests) == expected


@pytest.mark.parametrize(
    ("asked", "tokens", "words", "share", "sleeps"),
    [
        (0.5, 1_000_000, "", 0.5, False),
        (0.95, 1_000_000, "", 0.95, False),  # 4 GiB are left
        (1.0, 1_000_000, "", 0.96, False),  # 3
        (1.0, 2_200_000, "", 0.96, True),
        (1.0, 2_200_000, "--vllm.enable_sleep false", 0.96, False),
        (0.5, 1_000_000, "--vllm.enable_sleep", 0.5, True),
    ],
)
def test_the_memory_of_an_engine_follows_from_flags_and_models(monkeypatch, asked, tokens, words, share, sleeps):
    """A device of 100 GiB, 99 of them free. Policy and critic of one layer, hidden 8, intermediate 12, in fp32 have
    4 × (96 + 48) = 576 bytes of activations a token each; with half as much again 10^6 tokens need 1.6 GiB, 2.2 × 10^6
    need 3.5."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (99 * GIB, 100 * GIB))
    argv = f"--train.launcher local --train.dynamic_batch_enable --train.max_tokens_per_gpu {tokens} --vllm.gpu_memory_utilization {asked}"
    config = parse("train_ppo_ray", [*argv.split(), *words.split()])
    found = engine_memory(config, make_models(), torch.device("cuda"))
    assert found.share == pytest.approx(share, abs=1e-6)
    assert found.sleeps is sleeps


@pytest.mark.parametrize(
    ("flags", "mixture", "dense"), [([], True, False), (["--algo.router_replay", "false"], False, False)]
)
def test_engines_of_mixtures_tell_their_routes(flags, mixture, dense):
    config = parse("train_ppo_ray", ["--actor.model_name_or_path", "folder", *flags])
    for model_config, told in ((Qwen3MoeConfig(), mixture), (Qwen2Config(), dense)):
        assert wants_routes(config, model_config) is told
        settings = vllm_settings(
            config, torch.device("cpu"), EngineMemory(0.5, sleeps=False), model_config=model_config
        )
        assert settings.return_routes is told


def test_routes_of_a_model_without_experts_cannot_be_replayed():
    config = parse("train_ppo_ray", ["--algo.router_replay", "true"])
    assert wants_routes(config, Qwen3MoeConfig())
    with pytest.raises(ConfigError, match=r"--algo.router_replay: qwen2 is no mixture of experts"):
        wants_routes(config, Qwen2Config())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1)).save_pretrained(folder)
    return folder


def lora_config(folder, *words):
    argv = ["--actor.model_name_or_path", str(folder), "--ds.lora.rank", "4", "--ds.lora.target_modules", "q_proj"]
    return parse("train_ppo_ray", [*argv, *words])


def no_problem(model, modules, *, rank, gpu, dtype):
    return None


def a_problem(model, modules, *, rank, gpu, dtype):
    return f"vLLM has no adapters for {modules[0]} of {model.model_type}"


def not_asked(*arguments, **options):
    raise AssertionError("vLLM is asked for nothing")


def test_engines_hold_an_adapter_where_vllm_can(folder, monkeypatch):
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", no_problem)
    for words in ([], ["--vllm.lora_sync", "adapter"]):
        config = lora_config(folder, *words)
        adapter = engine_adapter(config, gpu=False)
        assert adapter == EngineAdapter(4, ("model.layers.0.self_attn.q_proj",))
        assert with_lora_sync(config, adapter).vllm.lora_sync == "adapter"
        settings = vllm_settings(
            config,
            torch.device("cpu"),
            EngineMemory(0.5, sleeps=False),
            model_config=Qwen2Config(),
            adapter=adapter,
        )
        assert (settings.adapter_rank, settings.adapter_modules) == (4, adapter.modules)


def test_what_vllm_cannot_hold_is_merged_with_one_line_or_refused_where_it_was_asked_for(folder, monkeypatch, caplog):
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", a_problem)
    config = lora_config(folder)
    with caplog.at_level("INFO"):
        assert engine_adapter(config, gpu=False) is None
    (said,) = caplog.messages
    why = "vLLM has no adapters for model.layers.0.self_attn.q_proj of qwen2"
    assert said == f"LoRA is merged into the weights that engines get (--vllm.lora_sync merged): {why}"
    assert with_lora_sync(config, None).vllm.lora_sync == "merged"
    with pytest.raises(ConfigError, match=rf"--vllm.lora_sync adapter: {why}; give merged, or leave it out"):
        engine_adapter(lora_config(folder, "--vllm.lora_sync", "adapter"), gpu=False)


def test_engines_that_sleep_get_merged_weights_unless_asked(folder, monkeypatch, caplog):
    """The base would have to travel with every adapter."""
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", no_problem)
    with caplog.at_level("INFO"):
        assert engine_adapter(lora_config(folder), gpu=True, sleeps=True) is None
    (said,) = caplog.messages
    assert "engines that sleep give the base away" in said
    assert engine_adapter(lora_config(folder, "--vllm.lora_sync", "adapter"), gpu=True, sleeps=True) is not None


def test_without_an_adapter_or_with_a_merged_one_vllm_is_not_asked(folder, monkeypatch):
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", not_asked)
    merged, none = lora_config(folder, "--vllm.lora_sync", "merged"), parse("train_ppo_ray", [])
    assert engine_adapter(merged, gpu=False) is None
    assert engine_adapter(none, gpu=False) is None
    assert with_lora_sync(none, None) == none
    memory = EngineMemory(0.5, sleeps=False)
    assert vllm_settings(merged, torch.device("cpu"), memory, model_config=Qwen2Config()).adapter_rank is None
