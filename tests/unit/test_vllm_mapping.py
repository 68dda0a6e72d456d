"""Our words and vLLM's: sampling parameters and engine arguments. No vLLM is needed to compare them."""

import itertools
import math
import pickle
import tempfile
from itertools import pairwise
from types import SimpleNamespace

import pytest
from transformers import Qwen2_5_VLConfig, Qwen2Config

from openrlhf.rollout.vllm.sampling import likeliest_told, read_told, sampling_arguments
from openrlhf.rollout.vllm.settings import (
    VllmSettings,
    ask_for_fp32_logits,
    engine_arguments,
    graph_sizes,
    sockets_folder,
    worker_environment,
)
from openrlhf.types import SamplingParams
from openrlhf.utils.parent_death import RUN_FOLDER

SETTINGS = VllmSettings(model="/m", max_model_len=1024)


def arguments(params: SamplingParams | None = None, *, room: int = 100, end_ids=(2, 5), deterministic: bool = False):
    return sampling_arguments(params or SamplingParams(), room=room, end_ids=end_ids, deterministic=deterministic)


def test_numbers_pass_through():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "min_tokens": 3,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    found = arguments(SamplingParams(**given))
    assert {name: found[name] for name in given} == given


@pytest.mark.parametrize(("asked", "room", "expected"), [(None, 100, 100), (30, 100, 30), (300, 100, 100)])
def test_a_response_ends_where_the_context_does(asked, room, expected):
    assert arguments(SamplingParams(max_tokens=asked), room=room)["max_tokens"] == expected


def test_every_end_of_sequence_id_is_named_unless_ignored():
    params = SamplingParams(stop_token_ids=[9, 2])
    assert arguments(params)["stop_token_ids"] == [2, 5, 9]
    assert arguments(params.copy(ignore_eos=True))["stop_token_ids"] == [2, 9]
    assert arguments(end_ids=())["stop_token_ids"] is None


def test_seeds_travel_under_determinism_only_and_fit_63_bits():
    params = SamplingParams(seed=2**63 + 5)
    assert arguments(params)["seed"] is None
    assert arguments(params, deterministic=True)["seed"] == 5
    assert arguments(deterministic=True)["seed"] is None


def test_logprobs_are_of_the_sampled_token_alone():
    assert [arguments(SamplingParams(logprobs=asked))["logprobs"] for asked in (True, 0, 1, None, False)] == [
        0,
        0,
        0,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("given", "likeliest"),
    [
        ({"top_k": 20}, 21),  # the twenty-first shows that there are no more
        ({"top_p": 0.9}, 65),
        ({"min_p": 0.1}, 65),
        ({"top_k": 200, "top_p": 0.9}, 65),
        ({"top_k": 20, "supports": 8}, 9),
        ({"top_p": 0.9, "supports": 5000}, 1000),  # the whole vocabulary
        ({}, 0),  # nothing is cut
        ({"top_k": 20, "temperature": 0.0}, 0),
        ({"top_k": 20, "supports": 0}, 0),
    ],
)
def test_supports_are_asked_for_as_the_likeliest_tokens(given, likeliest):
    params = SamplingParams(**{"supports": 64, **given})
    assert likeliest_told(params, vocab_size=1000) == likeliest
    asked = sampling_arguments(params, room=9, end_ids=(), deterministic=False, likeliest=likeliest)
    assert asked["logprobs"] == likeliest
    silent = params.copy(logprobs=None)
    asked = sampling_arguments(silent, room=9, end_ids=(), deterministic=False, likeliest=likeliest)
    assert asked["logprobs"] == (likeliest or None)


def flat(*positions: dict[int, float] | list[tuple[int, float]]) -> SimpleNamespace:
    """vLLM's `FlatLogprobs`."""
    entries = [list(position.items()) if isinstance(position, dict) else position for position in positions]
    ends = list(itertools.accumulate(map(len, entries)))
    return SimpleNamespace(
        start_indices=[0, *ends][:-1],
        end_indices=ends,
        token_ids=[token for position in entries for token, _ in position],
        logprobs=[value for position in entries for _, value in position],
    )


def test_supports_are_read_from_flat_lists():
    """Each token, then the three likeliest. The second one's third has a probability as well, so there may be a fourth;
    of a vocabulary of three there is none. The fourth was in a part that vLLM has put together with others: once alone.
    The fifth, sampled from more than three, is not among them."""
    out = -math.inf
    told = flat(
        [(7, -0.1), (7, -0.1), (4, -2.4), (9, out)],
        [(4, -1.0), (4, -1.0), (7, -1.1), (9, -1.2)],
        [(9, 0.0), (9, 0.0), (4, out), (7, out)],
        {4: -2.4, 7: -0.1, 9: out},
        [(8, -3.0), (4, -1.0), (7, -1.1), (9, -1.2)],
    )
    logprobs, supports = read_told(told, vocab_size=100)
    assert logprobs == [-0.1, -1.0, 0.0, -2.4, -3.0]
    assert supports.tolist() == [[7, 4], None, [9], [4, 7], None]
    assert read_told(flat({4: -1.0, 7: -1.1, 9: -1.2}), vocab_size=3).supports.tolist() == [[4, 7, 9]]
    assert len(read_told(flat(), vocab_size=3).supports) == 0


def test_vllm_decodes_only_where_it_looks_for_stop_strings():
    assert not arguments()["detokenize"]
    assert arguments(SamplingParams(stop=["."]))["detokenize"]


def test_the_largest_graph_is_the_largest_batch():
    found = engine_arguments(SETTINGS, gpu=True)
    assert found["max_num_seqs"] == found["compilation_config"]["cudagraph_capture_sizes"][-1] == 512
    assert not found["enforce_eager"]


def test_keys_and_values_have_what_the_share_leaves_or_so_many_bytes():
    assert "kv_cache_memory_bytes" not in engine_arguments(SETTINGS, gpu=True)
    exact = VllmSettings(model="/m", max_model_len=9, gpu_memory_utilization=0.1, cache_bytes=2**30)
    found = engine_arguments(exact, gpu=True)
    assert (found["gpu_memory_utilization"], found["kv_cache_memory_bytes"]) == (0.1, 2**30)
    assert "kv_cache_memory_bytes" not in engine_arguments(exact, gpu=False)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (7, [1, 2, 4, 7]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (150, [1, 2, 4, 8, 16, 32, 64, 96, 128, 150]),
    ],
)
def test_graphs_are_few_and_reach_the_largest_batch(most, sizes):
    assert graph_sizes(most) == sizes


def test_no_batch_above_64_is_padded_by_more_than_a_step():
    sizes = graph_sizes(512)
    assert len(sizes) == 21
    assert max(large - small for small, large in pairwise(sizes) if small >= 64) == 32


@pytest.mark.parametrize(
    ("options", "tunes"),
    [({"has_experts": False}, False), ({}, True), ({"has_experts": False, "tensor_parallel_size": 2}, True)],
)
def test_kernels_of_flashinfer_are_timed_only_for_models_that_may_have_them(options, tunes):
    found = engine_arguments(VllmSettings(model="/m", max_model_len=9, **options), gpu=True)
    assert found.get("enable_flashinfer_autotune", True) is tunes


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (100, 128), (257, 320), (512, 512)])
def test_an_adapter_has_room_for_its_rank(rank, room):
    found = engine_arguments(VllmSettings(model="/m", max_model_len=9, adapter_rank=rank), gpu=True)
    assert found["enable_lora"]
    assert found["max_lora_rank"] == room
    assert found["max_loras"] == 1
    assert found["lora_target_modules"] is None
    assert found["compilation_config"]["cudagraph_specialize_lora"] is False


def test_an_adapter_above_vllms_largest_rank_is_refused():
    with pytest.raises(ValueError, match="rank 512 at most, and this one has 513"):
        engine_arguments(VllmSettings(model="/m", max_model_len=9, adapter_rank=513), gpu=True)


def test_adapters_in_32_bits_are_for_cpus():
    settings = VllmSettings(model="/m", max_model_len=9, adapter_rank=4, dtype="float32")
    assert engine_arguments(settings, gpu=False)["enable_lora"]
    with pytest.raises(ValueError, match="16 bits on a GPU"):
        engine_arguments(settings, gpu=True)


def test_layers_without_an_adapter_stay_plain_and_experts_are_one_module():
    names = ("model.layers.0.self_attn.q_proj", "model.layers.7.self_attn.q_proj", "o_proj")
    experts = ("model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts.11.down_proj")
    settings = VllmSettings(model="/m", max_model_len=9, adapter_rank=4, adapter_modules=(*names, *experts))
    assert engine_arguments(settings, gpu=False)["lora_target_modules"] == ["experts", "o_proj", "q_proj"]
    assert "enable_lora" not in engine_arguments(SETTINGS, gpu=True)


@pytest.mark.parametrize(
    ("settings", "gpu"), [(VllmSettings(model="/m", max_model_len=9, enforce_eager=True), True), (SETTINGS, False)]
)
def test_without_graphs_none_are_configured(settings, gpu):
    found = engine_arguments(settings, gpu=gpu)
    assert found["enforce_eager"]
    assert "compilation_config" not in found


@pytest.mark.parametrize(
    ("asked", "plain", "quantised"), [("auto", True, False), ("fp32", True, True), ("model", False, False)]
)
def test_16_bit_engines_have_logits_in_fp32_unless_told_otherwise(asked, plain, quantised):
    for dtype in ("bfloat16", "float16", "float32"):
        settings = VllmSettings(model="/m", max_model_len=9, dtype=dtype, logits_dtype=asked)
        found = [settings.has_fp32_logits(quantised=layers) for layers in (False, True)]
        assert found == [plain and dtype != "float32", quantised and dtype != "float32"]


def test_every_part_of_a_models_configuration_asks_for_logits_in_fp32():
    """vLLM gives the language model of an image-text model that model's own part."""
    plain, nested = Qwen2Config(), Qwen2_5_VLConfig()
    ask_for_fp32_logits(plain)
    ask_for_fp32_logits(nested)
    assert plain.head_dtype == nested.head_dtype == nested.text_config.head_dtype == "float32"
    assert pickle.loads(pickle.dumps(nested)).text_config.head_dtype == "float32"  # it travels to vLLM's processes


def test_a_step_has_room_for_a_token_of_every_sequence():
    settings = VllmSettings(model="/m", max_model_len=64, max_num_seqs=300, max_num_batched_tokens=100)
    assert engine_arguments(settings, gpu=True)["max_num_batched_tokens"] == 300


def test_a_cpu_has_a_cache_of_the_size_asked_for():
    settings = VllmSettings(model="/m", max_model_len=64, cpu_cache_gib=3)
    assert worker_environment(settings, gpu=False)["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in worker_environment(settings, gpu=True)


@pytest.mark.parametrize(
    ("cores", "parts", "expected"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3], 2, "0,2|1,3"), ([4, 5, 6], 2, "4,6|5"), ([7], 2, "7|7")],
)
def test_the_parts_of_an_engine_on_cpus_divide_the_cores(cores, parts, expected):
    settings = VllmSettings(model="m", max_model_len=64, tensor_parallel_size=parts)
    assert worker_environment(settings, gpu=False, cores=cores)["VLLM_CPU_OMP_THREADS_BIND"] == expected
    assert "VLLM_CPU_OMP_THREADS_BIND" not in worker_environment(settings, gpu=True, cores=cores)


@pytest.mark.parametrize(("cores", "engines", "expected"), [(1, 1, "1"), (2, 2, "1"), (8, 1, "7"), (8, 3, "2")])
def test_whole_engines_on_cpus_share_all_cores_but_one_and_are_bound_to_none(cores, engines, expected):
    settings = VllmSettings(model="m", max_model_len=64, engines=engines)
    found = worker_environment(settings, gpu=False, cores=list(range(cores)))
    assert found["OPENRLHF_ENGINE_THREADS"] == expected
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found


@pytest.mark.parametrize(
    ("parts", "gpu", "bound", "expected"),
    [
        (1, True, False, None),
        (1, False, False, "openrlhf.rollout.vllm.compat.InProcessExecutor"),
        (1, False, True, None),
        (2, True, False, "mp"),
        (2, False, False, "mp"),
    ],
)
def test_workers_live_beside_their_scheduler_unless_there_are_several_or_somebody_binds_them(
    parts, gpu, bound, expected, monkeypatch
):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if bound:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    settings = VllmSettings(model="m", max_model_len=64, tensor_parallel_size=parts)
    assert engine_arguments(settings, gpu=gpu)["distributed_executor_backend"] == expected


@pytest.mark.parametrize("images", [0, 3])
def test_an_engine_makes_room_for_so_many_images_of_a_prompt_and_for_nothing_else(images):
    arguments = engine_arguments(VllmSettings(model="m", max_model_len=64, max_images=images), gpu=True)
    assert arguments["limit_mm_per_prompt"] == {"image": images, "video": 0, "audio": 0}
    assert arguments["mm_processor_cache_gb"] == 0


def test_sockets_are_made_in_the_runs_folder_or_where_their_names_are_short_enough(tmp_path, monkeypatch):
    """A socket's path has at most 107 bytes, of which 60 are those of its name and of the engine's own folder."""
    long = tmp_path / ("x" * 48)
    long.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        assert sockets_folder({RUN_FOLDER: short}) == short
        assert sockets_folder({RUN_FOLDER: str(long)}) == "/tmp"
        monkeypatch.setattr(tempfile, "tempdir", short)
        assert sockets_folder({RUN_FOLDER: str(long)}) == short
        assert sockets_folder({}) == short
