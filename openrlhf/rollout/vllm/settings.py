"""How an engine is started, and vLLM's arguments for it. Imports no vLLM: a mapping is data."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.utils.foreign_lines import IDLE_WARNINGS
from openrlhf.utils.parent_death import RUN_FOLDER

WORKER_EXTENSION = "openrlhf.rollout.vllm.worker.WorkerExtension"
SCHEDULERS = {
    asynchronous: f"openrlhf.rollout.vllm.scheduling.{name}"
    for asynchronous, name in {True: "QuickAsyncScheduler", False: "QuickScheduler"}.items()
}
"""By whether a step is scheduled while the one before it is computed, as vLLM decides."""
OWNER = "OPENRLHF_ENGINE_OWNER"
"""In the environment of an engine's processes: the process that they belong to."""
SOCKETS = "OPENRLHF_ENGINE_SOCKETS"
"""There too: the folder of their sockets."""
EXACT = "OPENRLHF_ENGINE_IS_EXACT"
"""Set in an engine's processes where they compute the exact forward."""
THREADS = "OPENRLHF_ENGINE_THREADS"
"""There too, on a CPU: how many compute a step."""
CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""Where vLLM reads to which cores its workers are bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """One engine."""

    model: str
    """A Hugging Face folder: configuration, tokenizer, first weights."""
    max_model_len: int
    dtype: str = "bfloat16"
    logits_dtype: str = "auto"
    """`fp32`; `model`: that of the model; `auto`: fp32, unless the engine's layers are quantised."""
    max_num_seqs: int = 512
    """Most requests at once. On a GPU also the largest captured graph: a batch above it runs without one, and 1,024
    sequences were seen to take longer than twice 512."""
    max_num_batched_tokens: int = 8192
    """Most tokens of one step. vLLM's own default for asynchronous engines is 2,048."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    cache_bytes: int | None = None
    """Keys and values, on each GPU; None: what weights and working memory leave of its share, which vLLM measures while
    it starts, and nobody else may take or free memory then."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    enable_prefix_caching: bool = True
    cpu_cache_gib: int = 4
    """Keys and values, on a CPU."""
    has_experts: bool = True
    """Whether the model is, as far as is known, a mixture of experts."""
    enable_sleep: bool = False
    """Whether it can give its memory away, which its allocator must know from the start."""
    trust_remote_code: bool = False
    seed: int = 0
    """Of vLLM's shared generator."""
    deterministic: bool = False
    """Whether requests sample with their own seeds, at a price."""
    engines: int = 1
    """Such as this one, at most, on a machine: they share its cores where it has no GPU."""
    max_images: int = 0
    """Images of one prompt that it makes sure to have memory for; prompts with more, which environments make, are read
    as well. 0: a model that could read some has no tower for them here."""
    keep_image_features: bool = False
    """Whether what the tower made of images outlives a push of weights: only where the tower is not trained."""
    return_routes: bool = False
    """Whether generations of a mixture of experts come with its routes; where vLLM cannot tell, they come without."""
    adapter_rank: int | None = None
    """It holds an adapter, of at most this rank, beside the weights; None: it holds none."""
    adapter_modules: tuple[str, ...] = ()
    """Modules that the adapter changes, by their names in the model's files, or the last parts of these names. All
    others stay plain layers, which compute a little faster. (): every linear layer may have a part of it."""
    quantization: str | None = None
    """fp8: its linear layers have weights of 8 bits, which it makes of those that it is sent. None: as `dtype` says."""
    speculation: str | None = None
    """Where drafts of the next tokens come from, one of `SPECULATIONS`; None: there are none."""
    speculation_tokens: int = 4
    """Of a draft, at most."""
    exact: bool = False
    """Whether it computes the exact forward (`models.exact`)."""

    @property
    def parts(self) -> int:
        """Devices, and worker processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def has_fp32_logits(self, *, quantised: bool) -> bool:
        """Whether logits are more exact than the model. `quantised`: some of the engine's layers are, perhaps its head,
        which vLLM refuses fp32 logits for."""
        asked = self.logits_dtype == "fp32" or (self.logits_dtype == "auto" and not quantised)
        return asked and self.dtype != "float32"


def engine_arguments(settings: VllmSettings, *, gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        # Every sequence must have room for its next token: vLLM refuses to start otherwise.
        "max_num_batched_tokens": max(settings.max_num_batched_tokens, settings.max_num_seqs),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "distributed_executor_backend": _executor(settings, gpu=gpu),
        "enable_prefix_caching": settings.enable_prefix_caching,
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
        # A rollout log-prob is that of the distribution sampled from: after temperature, top-p and penalties.
        "logprobs_mode": "processed_logprobs",
        # What a token was chosen among is told as the log-probs of so many of the likeliest.
        "max_logprobs": -1,
        # End-of-sequence ids come with every request; defaults of the model's makers must not change ours.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "enforce_eager": settings.enforce_eager or settings.exact or not gpu,
        "limit_mm_per_prompt": {"image": settings.max_images, "video": 0, "audio": 0},
        # Images come processed, so there is nothing to keep. vLLM's two copies of this cache, in two processes, are
        # emptied one after the other by a push, and a request in between would find its image in one of them alone.
        "mm_processor_cache_gb": 0,
    }
    if gpu:
        arguments |= {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_sleep_mode": settings.enable_sleep,
        }
        if settings.cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = settings.cache_bytes
        if settings.parts == 1 and not settings.has_experts and settings.quantization is None:
            # vLLM would time kernels of FlashInfer that a dense model in 16 or 32 bits does not have.
            arguments["enable_flashinfer_autotune"] = False
        if not arguments["enforce_eager"]:
            largest = max(settings.max_num_seqs, 0 if settings.speculation is None else STEP_TOKENS)
            arguments["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(largest)}
            if settings.adapter_rank is not None:
                # Every request asks for the adapter: graphs without it would be captured in vain.
                arguments["compilation_config"]["cudagraph_specialize_lora"] = False
    if settings.quantization is not None:
        arguments |= _quantised(settings)
    if settings.speculation is not None:
        arguments["speculative_config"] = _drafted(settings)
    if settings.adapter_rank is not None:
        if gpu and settings.dtype == "float32":
            raise ValueError("vLLM's kernels for adapters compute in 16 bits on a GPU, not in float32")
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": room_for_rank(settings.adapter_rank),
            "lora_dtype": "auto",  # that of the model
            "lora_target_modules": _target_modules(settings.adapter_modules),
        }
    return arguments


_UNROUNDED = (r"re:.*\.(gate|router|shared_expert_gate)$", r"re:(.*\.)?(vis|audio|multi_modal|mm_)[^.]*(\..*)?$")
"""Linear layers that stay as they are: a router's choice changes by far more than its scores are rounded by, and towers
see the pixels of images. Heads and embeddings are no linear layers to vLLM."""


def _quantised(settings: VllmSettings) -> dict[str, Any]:
    """Weights of linear layers and experts have 8 bits and one scale for every output channel; inputs are rounded token
    by token. vLLM makes both from 16-bit weights whenever a layer has been loaded: from files, and by each push. Its
    plain name `fp8` has one scale for a whole matrix in older versions, and expects weights of 8 bits in newer ones."""
    if settings.dtype == "float32":
        raise ValueError("weights of 8 bits are multiplied in 16 bits, not in float32")
    return {"quantization": "fp8_per_channel", "quantization_config": {"ignore": list(_UNROUNDED)}}


def _drafted(settings: VllmSettings) -> dict[str, Any]:
    """In vLLM's words; `history` is ngram there, and earlier responses are looked at before (`compat.Drafts`)."""
    drafts: dict[str, Any] = {"method": "suffix"}
    if settings.speculation != "suffix":
        drafts = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    return drafts | {"num_speculative_tokens": settings.speculation_tokens}


STEP_TOKENS = 256
"""Tokens of a step that a device reads its weights for anyway. A step computes 2 operations per weight and token, and
reads 2 bytes per weight: of a device with 990 TFLOPS and 4.8 TB/s (H200) arithmetic takes longer from 206 tokens on."""

SPECULATIONS = ("ngram", "suffix", "history")
"""ngram: what followed the request's last tokens before, in its own prompt and response. suffix: vLLM's suffix
decoding. history: what followed them in earlier responses to the same prompt, else as ngram."""


def ask_for_fp32_logits(config: Any) -> None:
    """Changes a model's Hugging Face configuration, where vLLM reads the dtype of a head's results. On a GPU the head
    then has the trainer's product: 16-bit factors, an fp32 result, and no copy of the weights.

    vLLM gives the language model inside an image-text model that model's own part of the configuration, so every part
    is told.
    """
    config.head_dtype = "float32"
    for part in vars(config).values():
        if hasattr(part, "model_type"):
            ask_for_fp32_logits(part)


GRAPH_STEP = 32
"""From 64 sequences on, the distance between two captured batches."""


def graph_sizes(most: int) -> list[int]:
    """Batches that CUDA graphs are captured for, up to `most`; others run in the next larger one: 1, 2, 4, … 64, 96, …

    vLLM's own list has every eighth up to 256 and every sixteenth above: 51 for 512, each of which is captured twice,
    for decoding alone and with prompts. Here it is 21. Padding should cost little, by arithmetic: with fewer sequences
    than a GPU computes operations per byte it reads (about 160 on an H200 in bf16), a step takes as long as reading
    all weights once; above it 16 sequences are added in the mean. `bench.startup --graphs vllm` has the other list.
    """
    sizes = [1, 2, 4, 8, 16, 32, *range(64, most, GRAPH_STEP)]
    return [*(size for size in sizes if size < most), most]


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for. It has 1 too, which its kernels would pad."""


def room_for_rank(rank: int) -> int:
    """The smallest of vLLM's ranks that this one fits in."""
    if rank > RANKS[-1]:
        raise ValueError(f"vLLM holds adapters of rank {RANKS[-1]} at most, and this one has {rank}")
    return next(room for room in RANKS if room >= rank)


def _target_modules(modules: Sequence[str]) -> list[str] | None:
    """As vLLM names them: by the last part. Experts of a layer are one module to it."""
    names = {EXPERTS if f".{EXPERTS}." in module else module.rpartition(".")[2] for module in modules}
    return sorted(names) or None


EXPERTS = "experts"
"""The part of a module's name that is followed by the number of an expert."""


def _executor(settings: VllmSettings, *, gpu: bool) -> str | None:
    """What runs vLLM's workers; None: what it chooses itself, which on a GPU is their scheduler's process."""
    if settings.parts > 1:
        # Inside a Ray actor vLLM would have Ray start them, on devices of which it knows nothing.
        return "mp"
    return None if gpu or CORES in os.environ else "openrlhf.rollout.vllm.compat.InProcessExecutor"


def worker_environment(settings: VllmSettings, *, gpu: bool, cores: Sequence[int] = ()) -> dict[str, str]:
    """What vLLM reads from the environment; what the user has set there wins. `cores`: those this process may use."""
    # A fork of a process with torch's threads may hang; and workers must find our extension by themselves.
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **import_variables(gpu=gpu)}
    if settings.exact:
        variables |= {EXACT: "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if gpu:
        # Its kernels are compiled at every start: 210 s instead of 57.
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    else:
        if settings.parts > 1 and cores:
            variables[CORES] = "|".join(core_shares(cores, settings.parts))
        variables[THREADS] = "1" if settings.exact else str(max(1, (len(cores) - 1) // settings.engines))
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_cache_gib)
        # Threads that look for drafts and those that compute a step would wait for each other: 170 ms a step, not 5.
        variables["NUMBA_NUM_THREADS"] = "1"
        # A worker waits here for its parent to end, and its parent for it; on a CPU there is nothing to give back.
        variables["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "0"
    return variables


def import_variables(*, gpu: bool) -> dict[str, str]:
    """Of these, what Python and libraries read when a process starts and when they are imported."""
    # Its processes have stderr in common with the run: torch's warnings in C++, and those for the makers of libraries.
    ignored = ["ignore::FutureWarning", "ignore::DeprecationWarning", *(f"ignore:{text}" for text in IDLE_WARNINGS)]
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": ",".join(ignored)}
    # Progress bars of weights and CUDA graphs.
    variables |= {"TQDM_DISABLE": "1", **logging_variables()}
    if gpu:
        variables["FLASHINFER_LOGGING_LEVEL"] = "WARNING"  # it says at every start that it looks for its best kernels
    else:
        # Counting ranks of log-probs would be compiled with the first request: 40 s instead of 1.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def logging_variables(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What vLLM reads when it is imported, here and in its processes: stdout is for what machines read. Users who ask
    vLLM for a level of their own get all of its lines."""
    variables = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    if not {"VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"} & given.keys():
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("logging.json"))
    return variables


@contextlib.contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """While open, these are set where nothing was: processes that start inherit them, this one is itself again."""
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def core_shares(cores: Sequence[int], parts: int) -> list[str]:
    """Cores for each part of an engine, as vLLM writes them; parts without one of their own share."""
    return [
        ",".join(str(core) for core in cores[part::parts]) or str(cores[part % len(cores)]) for part in range(parts)
    ]


LONGEST_FOLDER = 107 - len("/openrlhf-vllm-01234567/00000000-0000-0000-0000-000000000000")
"""A socket's path may have 107 bytes."""


def sockets_folder(environment: Mapping[str, str]) -> str:
    """Where a folder of an engine's sockets may be made: in the run's private one, else where temporary files are."""
    for wanted in (environment.get(RUN_FOLDER), tempfile.gettempdir()):
        if wanted and len(wanted) <= LONGEST_FOLDER and os.access(wanted, os.W_OK):
            return wanted
    return "/tmp"
