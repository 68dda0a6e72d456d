"""Gradients of mixtures of experts on two ranks, whose tokens reach different experts and leave some without any.

    torchrun --nproc-per-node 2 expert_ranks.py FILE

FILE then has, for each way, the largest gap between the gradients and those of one process, relative to the largest
gradient; the blocks that ZeRO gathers whole; and how many experts of the last layer no rank, and one alone, reaches.
And why the way that is refused is refused.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mixtures import make_mixture
from small_sections import optimizer
from torch import Tensor, nn

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.config.backend import BackendSection
from openrlhf.config.fields import ConfigError
from openrlhf.models.body import decoder_layers, expert_blocks, has_separate_experts
from openrlhf.models.policy import Policy
from openrlhf.models.routes import RouteLog, route_shape
from openrlhf.types import PackedTokens

WAYS: dict[str, dict[str, Any]] = {
    "qwen3_moe, checkpointing": {"reentrant": False},
    "qwen2_moe": {},
    "gpt_oss": {},
    "mixtral, one by one": {"apart": True},
    "mixtral, one by one, reentrant": {"apart": True, "reentrant": True},
}
REFUSED = {"apart": True, "reentrant": False}


class Expert(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = (hidden @ self.gate_up.T).chunk(2, dim=-1)
        return (nn.functional.silu(gate) * up) @ self.down.T


class Apart(nn.Module):
    """Experts as modules of their own, as models' own code has them: only those that have tokens are called."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        pairs = zip(stacked.gate_up_proj.data, stacked.down_proj.data, strict=True)
        self.experts = nn.ModuleList(Expert(*pair) for pair in pairs)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            part = self.experts[number](hidden[tokens]) * weights[tokens, place, None]
            output = output.index_add(0, tokens, part)
        return output


def make(way: str, *, apart: bool = False, reentrant: bool | None = None) -> Policy:
    policy = make_mixture(way.partition(",")[0])
    if apart:
        for layer in decoder_layers(policy.model) or ():
            layer.mlp.experts = Apart(layer.mlp.experts)
    if reentrant is not None:
        policy.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        policy.model.enable_input_require_grads()
    return policy.train()


def tokens(rank: int) -> PackedTokens:
    """A few tokens each, so that some experts have none. Two sequences: gpt-oss reads one after the other."""
    ids = [torch.tensor(pair) for pair in [[(3, 4), (3, 5)], [(20, 21), (20, 22)]][rank]]
    return PackedTokens.from_sequences(ids, [torch.arange(2) > 0] * 2)


def loss(module: nn.Module, rank: int) -> Tensor:
    return -module(tokens(rank), temperature=1.0).logprobs_A.sum()


def reached(policy: Policy, rank: int) -> set[int]:
    """The experts of the last layer, which all of these mixtures have."""
    log = RouteLog(route_shape(policy.model.config))
    policy(tokens(rank), temperature=1.0, route_log=log)
    return set(log.chosen_LE[-1].nonzero().flatten().tolist())


def main(file: Path) -> None:
    from deepspeed.utils import safe_get_full_grad
    from deepspeed.utils.z3_leaf_module import get_z3_leaf_modules

    dist.init_process_group("gloo")
    result = {}
    for way, settings in WAYS.items():
        alone = make(way, **settings)
        (loss(alone, 0) + loss(alone, 1)).backward()
        expected = {name: p.grad for name, p in alone.named_parameters()}
        experts = [reached(alone, rank) for rank in (0, 1)]
        policy = make(way, **settings)
        blocks = [type(block).__name__ for block in expert_blocks(policy.model)]
        backend = DeepSpeedBackend(policy, optimizer(lr=1e-2), BackendSection(zero_stage=3))
        backend.backward(loss(backend.module, dist.get_rank()))
        gap = largest = 0.0
        for name, parameter in policy.named_parameters():
            found, own = safe_get_full_grad(parameter), expected[name]
            own = torch.zeros_like(found) if own is None else own
            gap, largest = max(gap, float((found - own).abs().max())), max(largest, float(own.abs().max()))
        backend.step()
        result[way] = {
            "gap": gap / largest,
            "separate": has_separate_experts(policy.model),
            "blocks": blocks,
            "leaves": sorted({type(leaf).__name__ for leaf in get_z3_leaf_modules(policy)}),
            "reached by one": len(experts[0] ^ experts[1]),
            "reached by none": route_shape(policy.model.config).experts - len(experts[0] | experts[1]),
        }
        print(dist.get_rank(), way, result[way], flush=True)
    try:
        DeepSpeedBackend(make("mixtral", **REFUSED), optimizer(lr=1e-2), BackendSection(zero_stage=3))
    except ConfigError as error:
        result["refused"] = str(error)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))
