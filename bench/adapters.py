"""Adapters in vLLM: seconds and bytes of a push, and decoding, beside LoRA that is merged into the weights.

    python -m bench.adapters                   # on a GPU: shapes of Qwen2.5-1.5B and 7B in bf16; on a CPU: a tiny one
    python -m bench.adapters --write           # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.adapters --shape 1.5B --rank 16          # one shape, or one rank, of several
    python -m bench.adapters --keep F          # results in a folder; those that are there are not measured again

Random weights, LoRA on all linear layers, whose B is not 0. Policy and engine share the device, as in a local run, and
the real code sends the weights. Every case has its own engine: one that knows no adapters and gets merged weights,
or one with room for just this rank. Its first push, which brings the base too, is told apart; the others are a median.
Then all requests are sampled at once, twice, to their full length, after some that warm up; the faster time counts. The
gap is that between the log-probs of engine and policy for the probe's tokens (`weight_sync.probe`), in nats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.hybrid import LETTERS, vllm_version
from bench.results import write_section

PUSHES = 5
"""After the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a machine is given."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    dtype: str
    ranks: tuple[int, ...]
    shapes: dict[str, dict[str, Any]]


GPU = Work(
    requests=512,
    prompt_tokens=128,
    new_tokens=256,
    dtype="bfloat16",
    ranks=(16, 64),
    shapes={
        "1.5B": {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        "7B": {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    },
)
CPU = Work(
    requests=8,
    prompt_tokens=8,
    new_tokens=16,
    dtype="float32",
    ranks=(4, 16),
    shapes={
        "tiny": {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
    },
)


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Configuration and tokenizer. Weights are pushed, and vLLM starts without any."""
    from transformers import Qwen2Config, Qwen2Tokenizer

    known = ["<pad>", "<eos>", *LETTERS]
    words = [*known, *(f"t{i}" for i in range(len(known), shape["vocab_size"]))]
    names = {"unk_token": "<pad>", "pad_token": "<pad>", "eos_token": "<eos>"}
    Qwen2Tokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], **names).save_pretrained(folder)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen2Config(**shape, **ends, max_position_embeddings=4096, rope_theta=1e6)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)


def make_policy(folder: Path, work: Work, *, rank: int) -> Any:
    """On the device, with an adapter that has left 0."""
    import torch
    from transformers import AutoConfig, Qwen2ForCausalLM

    from openrlhf.config.backend import LoraSection
    from openrlhf.models.adapters import add_adapter
    from openrlhf.models.attention import ATTENTION
    from openrlhf.models.policy import Policy

    dtype = getattr(torch, work.dtype)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM._from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation=ATTENTION
        )
        add_adapter(model, LoraSection(rank=rank, alpha=2 * rank), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
    return Policy(model).eval()


@contextlib.contextmanager
def started_engine(folder: Path, work: Work, *, adapter: Any | None) -> Iterator[Any]:
    """`adapter`: what it has room for (`FileAdapter`); None: nothing."""
    import torch
    from transformers import AutoTokenizer

    from openrlhf.rollout.vllm.settings import VllmSettings, environment, logging_variables

    with environment(logging_variables()):
        from openrlhf.rollout.vllm import engine as engine_module
    arguments = engine_module.engine_arguments

    def without_files(settings: VllmSettings, *, gpu: bool) -> dict[str, Any]:
        """All requests have one length, so one size of batch decodes them: few graphs are enough."""
        found = arguments(settings, gpu=gpu) | {"load_format": "dummy"}
        if gpu:
            found["compilation_config"]["cudagraph_capture_sizes"] = [1, 8, 64, settings.max_num_seqs]
        return found

    settings = VllmSettings(
        model=str(folder),
        max_model_len=work.prompt_tokens + work.new_tokens,
        dtype=work.dtype,
        max_num_seqs=work.requests,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        cpu_cache_gib=1,
        adapter_rank=None if adapter is None else adapter.rank,
        adapter_modules=() if adapter is None else adapter.modules,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine_module.engine_arguments = without_files
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with contextlib.closing(engine_module.VllmEngine(settings, tokenizer)) as engine:
            yield engine
    finally:
        engine_module.engine_arguments = arguments


def measure(folder: Path, work: Work, *, rank: int, as_adapter: bool) -> dict[str, Any]:
    import torch

    from openrlhf.backends.base import ModuleWeights
    from openrlhf.models.file_weights import FileAdapter
    from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
    from openrlhf.weight_sync.probe import Probe, max_gap
    from openrlhf.weight_sync.transports import IpcSender, RpcSender

    policy = make_policy(folder, work, rank=rank)
    began = time.perf_counter()
    with started_engine(folder, work, adapter=FileAdapter(policy) if as_adapter else None) as engine:
        start_seconds = time.perf_counter() - began
        weights = PolicyWeights(policy, ModuleWeights(policy), as_adapter=as_adapter)
        sender = IpcSender() if torch.cuda.is_available() else RpcSender()
        sync = EngineWeightSync(engine, weights, sender, SimpleNamespace(run=asyncio.run))
        pushes = []
        for version in range(1 + PUSHES):
            began = time.perf_counter()
            pushed = sync.push(version=version).values()
            pushes.append((time.perf_counter() - began, pushed["sync/bytes"]))
        vocabulary = policy.model.config.vocab_size
        probe = Probe.of(
            vocab_size=vocabulary, dtype=getattr(torch, work.dtype), max_model_len=work.prompt_tokens + work.new_tokens
        )
        gap = max_gap(probe.policy_side(policy), asyncio.run(engine.logprobs(probe.token_ids)))
        sample(engine, work, vocabulary, new_tokens=min(8, work.new_tokens))
        seconds = [sample(engine, work, vocabulary, new_tokens=work.new_tokens) for _ in range(2)]
    del policy, weights, sync
    gc.collect()
    (first_seconds, first_bytes), *others = pushes
    return {
        "start_seconds": start_seconds,
        "first_seconds": first_seconds,
        "first_bytes": first_bytes,
        "push_seconds": statistics.median(seconds for seconds, _ in others),
        "push_bytes": others[-1][1],
        "tokens_per_second": work.requests * work.new_tokens / min(seconds),
        "gap": gap,
    }


def sample(engine: Any, work: Work, vocabulary: int, *, new_tokens: int) -> float:
    """The seconds that all requests take."""
    from openrlhf.types import SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(2, vocabulary) for _ in range(work.prompt_tokens)] for _ in range(work.requests)]
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=None, detokenize=False)

    async def play() -> list[Any]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    began = time.perf_counter()
    answers = asyncio.run(play())
    seconds = time.perf_counter() - began
    lengths = {len(answer.token_ids) for answer in answers}
    if lengths != {new_tokens}:
        raise RuntimeError(f"responses were to have {new_tokens} tokens each, not {lengths}")
    return seconds


def cases(work: Work, *, shapes: list[str], ranks: list[int]) -> Iterator[tuple[str, int, bool]]:
    """Shape, rank, whether engines hold the adapter. What is merged has no rank: the first stands for all."""
    for shape in shapes:
        yield shape, ranks[0], False
        for rank in ranks:
            yield shape, rank, True


def named(shape: str, rank: int, as_adapter: bool) -> str:
    return f"{shape}-{rank}" if as_adapter else f"{shape}-merged"


def table(results: dict[tuple[str, int, bool], dict[str, Any]], work: Work) -> str:
    from importlib.metadata import version

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    def size(count: float) -> str:
        return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

    def row(case: tuple[str, int, bool]) -> str:
        shape, rank, as_adapter = case
        found = results[case]
        merged = next((r for (s, _, a), r in results.items() if s == shape and not a), None)
        ratio = f" ({found['tokens_per_second'] / merged['tokens_per_second']:.2f}×)" if as_adapter and merged else ""
        columns = [
            f"{shape}, {f'adapter, rank {rank}' if as_adapter else 'merged'}",
            f"{found['first_seconds']:.3f} s, {size(found['first_bytes'])}",
            f"{found['push_seconds']:.3f} s, {size(found['push_bytes'])}",
            f"{found['tokens_per_second']:,.0f}{ratio}",
            f"{found['gap']:.2g}",
        ]
        return f"| {' | '.join(columns)} |"

    return "\n".join(
        [
            f"LoRA on all linear layers, Qwen2.5 shapes in {work.dtype}, random weights; {work.requests} requests of "
            f"{work.prompt_tokens} + {work.new_tokens} tokens; {name}, torch {torch.__version__}, vLLM "
            f"{vllm_version(version)}. Pushes: median of {PUSHES} after the first, which brings the base. Repeat: "
            "`python -m bench.adapters --write`.",
            "",
            "| | first push | push | tokens/s | gap, nats |",
            "|---|---|---|---|---|",
            *map(row, results),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--shape", action="append", help="one of them; all, unless given")
    parser.add_argument("--rank", type=int, action="append", help="one of them; all, unless given")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    options = parser.parse_args()

    import torch

    work = GPU if torch.cuda.is_available() else CPU
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        keep = (options.keep or Path(temporary)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        for case in cases(work, shapes=options.shape or list(work.shapes), ranks=options.rank or list(work.ranks)):
            shape, rank, as_adapter = case
            kept, folder = keep / f"{named(*case)}.json", Path(temporary) / shape
            if not kept.exists():
                if not folder.exists():
                    write_model(folder, work.shapes[shape])
                kept.write_text(json.dumps(measure(folder, work, rank=rank, as_adapter=as_adapter)))
            results[case] = json.loads(kept.read_text())
            print(named(*case), json.dumps(results[case]), file=sys.stderr, flush=True)
    body = table(results, work)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Adapters", body=body)


if __name__ == "__main__":
    main()
