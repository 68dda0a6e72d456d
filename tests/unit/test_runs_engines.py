"""How engines are started: with which settings and adapters, and how weights reach them."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from openrlhf.config import ConfigError, parse
from openrlhf.runs.device_memory import EngineMemory
from openrlhf.runs.engines import (
    EngineAdapter,
    cpu_cache_gib,
    engine_adapter,
    require_speed_flags,
    transport,
    vllm_settings,
    wants_routes,
    with_lora_sync,
)


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


def test_engines_that_draft_tell_no_routes():
    config = parse("train_ppo_ray", ["--actor.model_name_or_path", "m", "--vllm.speculation", "ngram"])
    assert not wants_routes(config, Qwen3MoeConfig())


def test_ways_to_sample_faster_reach_the_engine_and_are_refused_where_they_cannot_work(monkeypatch):
    words = ["--vllm.quantization", "fp8", "--vllm.speculation", "suffix", "--vllm.speculation_tokens", "6"]
    config = parse("train_ppo_ray", ["--actor.model_name_or_path", "m", *words])
    memory = EngineMemory(0.5, sleeps=False)
    settings = vllm_settings(config, torch.device("cuda"), memory, model_config=Qwen2Config())
    assert (settings.quantization, settings.speculation, settings.speculation_tokens) == ("fp8", "suffix", 6)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "arctic_inference" else object())
    with pytest.raises(ConfigError, match=r"--vllm.speculation suffix: vLLM needs the package arctic-inference"):
        require_speed_flags(config, gpu=True)
    with pytest.raises(ConfigError, match=r"--vllm.quantization fp8: needs a GPU"):
        require_speed_flags(config, gpu=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    require_speed_flags(config, gpu=True)
    require_speed_flags(parse("train_ppo_ray", ["--vllm.speculation", "history"]), gpu=False)


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


def test_beside_drafts_adapters_are_merged_unless_asked_for(folder, monkeypatch, caplog):
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", no_problem)
    drafts = ["--vllm.speculation", "ngram"]
    with caplog.at_level("INFO"):
        assert engine_adapter(lora_config(folder, *drafts), gpu=True) is None
        assert engine_adapter(lora_config(folder, *drafts, "--vllm.lora_sync", "adapter"), gpu=True) is not None
    assert len(caplog.messages) == 1
    assert "--vllm.speculation ngram" in caplog.messages[0]


def test_weights_of_8_bits_are_made_of_merged_ones(folder, monkeypatch, caplog):
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", not_asked)
    with caplog.at_level("INFO"):
        assert engine_adapter(lora_config(folder, "--vllm.quantization", "fp8"), gpu=True) is None
    (said,) = caplog.messages
    assert "--vllm.quantization fp8 rounds it together with its weights" in said


def test_without_an_adapter_or_with_a_merged_one_vllm_is_not_asked(folder, monkeypatch):
    monkeypatch.setattr("openrlhf.runs.engines.adapter_problem", not_asked)
    merged, none = lora_config(folder, "--vllm.lora_sync", "merged"), parse("train_ppo_ray", [])
    assert engine_adapter(merged, gpu=False) is None
    assert engine_adapter(none, gpu=False) is None
    assert with_lora_sync(none, None) == none
    memory = EngineMemory(0.5, sleeps=False)
    assert vllm_settings(merged, torch.device("cpu"), memory, model_config=Qwen2Config()).adapter_rank is None


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (2**26 - 1, 1), (2**26, 2), (2**40, 4)])
def test_the_cache_of_an_engine_on_a_cpu_is_no_larger_than_its_requests(tokens, expected):
    """One layer, one head of 2: 2 × 4 × 2 = 16 bytes a token, so that 2^26 tokens are a GiB."""
    model = Qwen2Config(hidden_size=2, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    assert cpu_cache_gib(model, tokens=tokens) == expected
