"""What an engine may have of its device's memory, from flags and the files of models."""

import types

import pytest
import torch
from small_rl import CONFIG
from transformers import Qwen2ForCausalLM, Qwen3MoeConfig

from openrlhf.cluster.launch import DeviceBytes
from openrlhf.cluster.placement import Role, plan, requested
from openrlhf.config import ConfigError, parse
from openrlhf.runs.device_memory import GIB, TILES, DeviceMemory, EngineMemory
from openrlhf.runs.engine_memory import (
    NOTHING_SHARED,
    engine_memory,
    engine_of,
    local_device,
    places,
    policy_shape,
    review_training,
    shape_of,
    training_of,
)
from openrlhf.runs.engines import with_sleep
from openrlhf.runs.ray_launcher import engine_memory_on

PARAMETERS = 13 * 8 * 2 + 64 + 8 + 2 * (32 + 4) + 64 + 3 * 96 + 3 * 8
"""Embeddings and head of 13 × 8; queries with a bias, keys and values of one head of 4, results; an MLP; norms."""
TOKEN = 2 * (6.6 * 8 + 4 * 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(CONFIG).save_pretrained(folder)
    return folder


def config_of(folder, words="", *, launcher="local"):
    defaults = {
        "--actor.model_name_or_path": str(folder),
        "--train.launcher": launcher,
        "--algo.kl.init_coef": "0",
        "--algo.advantage.estimator": "group_norm",
        "--data.max_len": "32",
        "--train.dynamic_batch_enable": "true",
        "--train.max_tokens_per_gpu": "1000000",
    }
    given = words.split()
    argv = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
    return parse("train_ppo_ray", argv + given)


@pytest.mark.parametrize(("requests", "expected"), [(8, 256), (300, 300), (512, 512), (1024, 512)])
def test_places_match_the_rollout_up_to_the_largest_graph(requests, expected):
    assert places(requests) == expected


def test_shapes_are_read_without_weights(folder):
    shape = policy_shape(config_of(folder))
    assert (shape.parameters, shape.trained) == (PARAMETERS, PARAMETERS)
    assert (shape.layers, shape.hidden, shape.intermediate, shape.vocabulary) == (1, 8, 12, 13)
    assert (shape.cache_numbers, shape.kv_heads, shape.element_bytes) == (8, 1, 2)  # bf16, on a GPU
    adapted = policy_shape(config_of(folder, "--ds.lora.rank 2 --ds.lora.target_modules q_proj"))
    assert (adapted.parameters, adapted.trained) == (PARAMETERS + 32, 32)


def test_a_mixture_has_the_experts_of_a_token():
    """8 experts of 768, each with a copy of its input and its output: half the hidden size more."""
    mixture = Qwen3MoeConfig(hidden_size=2048, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768)
    assert shape_of(mixture, parameters=1, trained=1).intermediate == 8 * (768 + 1024)


@pytest.mark.parametrize(
    ("words", "weights", "states"),
    [
        ("", 2, 12),
        ("--algo.kl.init_coef 0.1", 4, 12),  # a reference
        ("--algo.kl.init_coef 0.1 --ref.offload", 2, 12),
        ("--train.enable_ema", 2, 16),
        ("--algo.advantage.estimator gae", 4, 24),  # a critic
        ("--ds.param_dtype fp32", 4, 8),
    ],
)
def test_all_models_of_the_process_count(folder, words, weights, states):
    config = config_of(folder, words)
    need = training_of(config, policy_shape(config))
    assert (need.weights, need.states) == (weights * PARAMETERS, states * PARAMETERS)


def test_reward_models_count_with_their_weights(folder):
    words = f"--reward.model_name_or_path {folder}"
    found = [config_of(folder, f"{words} {more}") for more in ("", "--reward.offload")]
    assert [training_of(config, policy_shape(config)).weights for config in found] == [4 * PARAMETERS, 2 * PARAMETERS]


def test_ranks_share_out_what_zero_shares_out(folder):
    config = config_of(folder, "--ds.zero_stage 3", launcher="ray")
    whole, shared = (training_of(config, policy_shape(config), ranks=ranks) for ranks in (1, 4))
    assert (whole.weights, whole.states) == (2 * PARAMETERS, 12 * PARAMETERS)  # one rank trains with plain torch
    assert (shared.weights, shared.states) == (2 * PARAMETERS // 4, 3 * PARAMETERS)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("", 1_000_000),
        ("--train.max_tokens_per_gpu 10", 32),  # the longest sample alone
        ("--train.dynamic_batch_enable false --train.micro_batch_size 4", 128),
        ("--train.dynamic_batch_enable false --train.micro_batch_size 1", 32),
    ],
)
def test_activations_are_those_of_the_largest_micro_batch(folder, words, tokens):
    config = config_of(folder, words)
    work = training_of(config, policy_shape(config)).work
    assert work == pytest.approx(4 * PARAMETERS + 1.7 * tokens * TOKEN + TILES, abs=2)


def test_engines_share_the_requests_of_a_round(folder):
    config = config_of(folder, "--rollout.batch_size 100 --rollout.n_samples_per_prompt 8")
    shape = policy_shape(config)
    found = [engine_of(config, shape, engines=engines) for engines in (1, 2, 8)]
    assert [(need.needed, need.sequences) for need in found] == [(512, 512), (400, 400), (100, 256)]
    agent = config_of(folder, "--rollout.batch_size 100 --train.agent_func_path agent.py")
    assert engine_of(agent, shape).sequences == 800  # histories wait for their environments


# ----------------------------------------------------------------------------------------------------- the decision


@pytest.fixture
def device(monkeypatch):
    """A GPU of 100 GiB on which this process has 2 and others 1."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (97 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    return local_device(torch.device("cuda"))


def test_the_memory_of_this_process_s_gpu(device):
    assert device == DeviceMemory(total=100 * GIB, others=GIB, loaded=2 * GIB)
    assert local_device(torch.device("cpu")) is None


def test_without_a_flag_nobody_sleeps_where_both_fit_and_one_line_says_so(folder, device, caplog):
    """2.5 GiB for vLLM's context and graphs, and keys and values of 1,024 samples, 512 at once: 512 × 32 × 16 bytes."""
    with caplog.at_level("INFO"):
        found = engine_memory(config_of(folder), device)
    assert found.memory.sleeps is False
    assert found.memory.cache_bytes == 512 * 32 * 16
    assert found.memory.share == pytest.approx(0.025, abs=1e-3)
    (line,) = caplog.messages
    assert line == str(found.division)
    assert line.startswith("one device of 100 GiB for both")


@pytest.mark.parametrize(
    ("tokens", "words", "sleeps"),
    [
        (290_000_000, "", False),  # 93 GiB, 1.7 · 202 bytes each
        (310_000_000, "", True),
        (310_000_000, "--vllm.enable_sleep false", False),
        (1000, "--vllm.enable_sleep", True),
        (310_000_000, "--train.async_enable --train.async_share_device", False),
    ],
)
def test_engines_sleep_where_they_must_or_as_asked(folder, device, tokens, words, sleeps):
    found = engine_memory(config_of(folder, f"--train.max_tokens_per_gpu {tokens} {words}"), device)
    assert found.memory.sleeps is sleeps
    assert found.division is not None


@pytest.mark.parametrize(
    ("asked", "tokens", "words", "share", "sleeps"),
    [
        (0.5, 1000, "", 0.5, False),
        (0.95, 1000, "", 0.94, False),  # 97 are free, and 3 stay so
        (0.5, 200_000_000, "", 0.5, True),  # 64 GiB
        (0.5, 200_000_000, "--vllm.enable_sleep false", 0.5, False),
        (0.5, 1000, "--vllm.enable_sleep", 0.5, True),
    ],
)
def test_a_share_is_obeyed_as_far_as_it_is_free(folder, device, asked, tokens, words, share, sleeps):
    words = f"--train.max_tokens_per_gpu {tokens} --vllm.gpu_memory_utilization {asked} {words}"
    found = engine_memory(config_of(folder, words), device)
    assert found.memory.share == pytest.approx(share, abs=1e-6)
    assert (found.memory.sleeps, found.memory.cache_bytes, found.division) == (sleeps, None, None)


def test_engines_with_devices_of_their_own_take_095_or_what_was_asked_for(folder):
    assert engine_memory(config_of(folder), None) == NOTHING_SHARED
    assert NOTHING_SHARED.memory == EngineMemory(0.95, sleeps=False)
    asked = config_of(folder, "--vllm.gpu_memory_utilization 0.7")
    assert engine_memory(asked, None).memory == EngineMemory(0.7, sleeps=False)


def test_what_cannot_fit_is_refused_with_the_remedy(folder):
    with pytest.raises(ConfigError, match=r"training needs .* and the device has 0.0 GiB: --ds.enable_sleep moves"):
        engine_memory(config_of(folder), DeviceMemory(total=1000))


class Placed:
    """A plan on GPUs of these sizes: GiB in all, and in use."""

    def __init__(self, config, *gpus, resource="GPU"):
        self.plan = plan(requested(config, devices_per_node=2, engines_by_default=True))
        self.cluster = types.SimpleNamespace(kind=types.SimpleNamespace(resource=resource))
        self._gpus = [DeviceBytes(total * GIB, used * GIB) for total, used in gpus]

    def device_memory(self, role):
        assert role is Role.ENGINE
        return self._gpus


def on_ray(folder, words, *gpus, resource="GPU"):
    config = config_of(folder, words, launcher="ray")
    return engine_memory_on(Placed(config, *gpus, resource=resource), config)


def test_on_ray_the_fullest_gpu_decides_before_anything_has_started(folder):
    """Two ranks share out the masters and moments of 310 million tokens' policy, not its activations."""
    few, many = (f"--train.colocate_all --train.max_tokens_per_gpu {tokens}" for tokens in (290_000_000, 310_000_000))
    found = on_ray(folder, few, (200, 0), (110, 5))
    assert found.memory.sleeps is False
    assert found.division.device == DeviceMemory(total=110 * GIB, others=5 * GIB)
    assert found.division.training.states == 12 * PARAMETERS // 2
    assert on_ray(folder, many, (200, 0), (100, 0)).memory.sleeps
    assert on_ray(folder, f"{many} --vllm.enable_sleep false", (100, 0)).memory.sleeps is False


def test_on_ray_engines_take_turns_where_nothing_is_known_or_a_share_was_given(folder):
    assert on_ray(folder, "--train.colocate_all").memory == EngineMemory(0.95, sleeps=True)
    asked = "--train.colocate_all --vllm.gpu_memory_utilization 0.6"
    assert on_ray(folder, asked, (100, 0)).memory == EngineMemory(0.6, sleeps=True)
    assert on_ray(folder, f"{asked} --vllm.enable_sleep false").memory == EngineMemory(0.6, sleeps=False)
    together = "--train.async_enable --train.async_share_device"
    assert on_ray(folder, together, (100, 0)).division.memory.sleeps is False
    assert on_ray(folder, "", (100, 0)) == on_ray(folder, "--train.colocate_all", resource="CPU") == NOTHING_SHARED


def test_ranks_are_told_whether_engines_sleep(folder):
    config = config_of(folder, "--train.colocate_all", launcher="ray")
    for sleeps in (True, False):
        assert with_sleep(config, EngineMemory(0.5, sleeps=sleeps)).engines_sleep is sleeps


def test_the_first_update_is_reviewed_unless_the_user_has_decided(folder, device, caplog):
    found = engine_memory(config_of(folder), device)
    with caplog.at_level("INFO"):
        review_training(found.division, config_of(folder), 10 * GIB)
        review_training(found.division, config_of(folder, "--vllm.enable_sleep false"), 10 * GIB)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert caplog.messages[0].startswith("training took 10.0 GiB at its peak; 0.6 were set aside")
