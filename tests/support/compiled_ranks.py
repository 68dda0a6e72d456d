"""Steps of two DeepSpeed ranks with compiled layers, beside the same steps without.

    torchrun --nproc-per-node 2 compiled_ranks.py FILE

FILE then has, for each way, the largest gap between the weights that are left, and for each rank how many pieces were
compiled in each step and what was said. Compilation is torch's up to the generation of code, for which a machine needs
a compiler; in the ways that fail it fails on one rank, in the backward pass of the second piece.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_sections import optimizer
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.config.backend import BackendSection, LoraSection
from openrlhf.models import compilation
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens

WAYS: dict[str, dict[str, Any]] = {
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3},
    "zero 3, checkpointing": {"stage": 3, "checkpointing": True},
    "zero 3, lora": {"stage": 3, "lora": True},
    "zero 2 fails": {"stage": 2, "fails": True},
    "zero 3 fails": {"stage": 3, "fails": True, "checkpointing": True},
    "tensor parallel": {"stage": 1, "tensor": True},
}
STEPS = 6
CONFIG = Qwen2Config(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
)


class Lines(logging.Handler):
    """Remembers what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def streams(step: int, rank: int) -> list[PackedTokens]:
    """As many on every rank, none like another."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    result = []
    for _ in range(2):
        lengths = torch.randint(
            2, 9, (int(torch.randint(1, 5, (), generator=generator)),), generator=generator
        ).tolist()
        sequences = [torch.randint(13, (length,), generator=generator) for length in lengths]
        result.append(PackedTokens.from_sequences(sequences, [torch.arange(length) > 0 for length in lengths]))
    return result


def broken(calls: list[int]):
    def run(graph, inputs):
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("no C++ compiler here")
        return aot_eager(graph, inputs)

    return run


def train(
    *,
    stage: int,
    compiled: bool,
    checkpointing: bool = False,
    lora: bool = False,
    fails: bool = False,
    tensor: bool = False,
):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(CONFIG, attn_implementation=ATTENTION)
    if lora:
        add_adapter(model, LoraSection(rank=2), dtype=torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy, said = Policy(model), Lines()
    torch._dynamo.reset()
    counters.clear()
    compilation._COMPILER._failed = False
    compilation._inductor = broken([]) if fails and dist.get_rank() == 1 else aot_eager
    compilation.logger.addHandler(said)
    if compiled:
        compilation.compile_layers(model)
    backend = DeepSpeedBackend(
        policy, optimizer(lr=1e-2), BackendSection(zero_stage=stage, tensor_parallel_size=2 if tensor else 1)
    )
    made, own = [], 0 if tensor else dist.get_rank()
    for step in range(STEPS):
        before = counters["stats"]["unique_graphs"]
        backend.module.eval()
        with torch.no_grad():
            for stream in streams(100 + step, own):
                backend.module(stream, temperature=1.0)
        backend.module.train()
        for stream in streams(step, own):
            backend.backward(backend.module(stream, temperature=1.0).logprobs_A.mean())
        backend.step()
        made.append(counters["stats"]["unique_graphs"] - before)
    weights = torch.cat([tensor.detach().float().flatten() for _, tensor in backend.whole_weights()])
    compilation.logger.removeHandler(said)
    return weights, made, said.texts


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    result = {}
    for way, settings in WAYS.items():
        expected, _, _ = train(**settings | {"fails": False}, compiled=False)
        weights, made, said = train(**settings, compiled=True)
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, {"made": made, "said": said})
        result[way] = {"gap": float((weights - expected).abs().max()), "ranks": of_ranks}
        print(dist.get_rank(), way, result[way], flush=True)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))
