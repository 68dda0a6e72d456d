"""Steps of two ranks of DeepSpeed in which one has a long sequence and the other has not, beside the same untiled.

    torchrun --nproc-per-node 2 tiled_ranks.py FILE

FILE then has, for each way, the largest gap between the weights that are left, and the tiles of each rank.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_sections import optimizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.config.backend import BackendSection, LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.models.tiles import TiledMLP, tile_mlps
from openrlhf.types import PackedTokens

WAYS: dict[str, dict[str, Any]] = {
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3},
    "zero 3, checkpointing": {"stage": 3, "reentrant": False},
    "zero 3, reentrant": {"stage": 3, "reentrant": True},
    "zero 3, lora": {"stage": 3, "lora": True},
    "tensor parallel": {"stage": 1, "tensor": 2},
}
LENGTHS = [[(20, 3), (2, 4)], [(3, 3), (13,)], [(5,), (31, 2)]]
"""By step the sequences of each rank. From ten tokens on there are tiles, of four."""


def tokens(lengths: tuple[int, ...]) -> PackedTokens:
    generator = torch.Generator().manual_seed(sum(lengths))
    sequences = [torch.randint(13, (length,), generator=generator) for length in lengths]
    return PackedTokens.from_sequences(sequences, [torch.arange(length) > 0 for length in lengths])


def train(
    *, stage: int, tiled: bool, reentrant: bool | None = None, lora: bool = False, tensor: int = 1
) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION)
    if tiled:
        assert tile_mlps(model, long=10, tile=4) == 2
    if lora:
        add_adapter(model, LoraSection(rank=2), dtype=torch.float32)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    own = 0 if tensor > 1 else dist.get_rank()
    section = BackendSection(zero_stage=stage, tensor_parallel_size=tensor)
    backend = DeepSpeedBackend(Policy(model), optimizer(lr=1e-2), section)
    seen, untiled = [], TiledMLP.untiled
    TiledMLP.untiled = lambda self, hidden: (seen.append(len(hidden)), untiled(self, hidden))[1]
    for lengths in LENGTHS:
        backend.module.eval()
        with torch.no_grad():
            backend.module(tokens(lengths[own]), temperature=1.0)
        backend.module.train()
        backend.backward(backend.module(tokens(lengths[own]), temperature=1.0).logprobs_A.mean())
        backend.step()
    TiledMLP.untiled = untiled
    weights = [tensor.detach().float().flatten() for _, tensor in backend.whole_weights()]
    return torch.cat(weights), len(seen)


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    result = {}
    for way, settings in WAYS.items():
        expected, _ = train(**settings, tiled=False)
        weights, seen = train(**settings, tiled=True)
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, seen)
        result[way] = {"gap": float((weights - expected).abs().max()), "tiles": of_ranks}
        print(dist.get_rank(), way, result[way], flush=True)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))
