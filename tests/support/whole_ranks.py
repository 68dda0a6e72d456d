"""Policies trained by two ranks, in every way of sharing them out; and their weights, gathered.

    torchrun --nproc-per-node 2 whole_ranks.py MODEL FOLDER

FOLDER then has a file per way: the weights of the main rank, what one process with plain torch made of the same steps,
what was announced, and how much was gathered at once. Each is iterated over twice, the second time broken off.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_sections import loading, optimizer
from torch import Tensor

from openrlhf.backends.base import Backend, Weights
from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed, sharded_loading
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.backend import BackendSection, LoraSection
from openrlhf.models.adapters import is_adapter
from openrlhf.models.file_weights import FileAdapter, file_weights
from openrlhf.models.loading import load_policy
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens
from openrlhf.weight_sync.probe import Probe

LORA = LoraSection(rank=4, alpha=8)
WAYS = {
    "zero 0": (BackendSection(zero_stage=0), None),
    "zero 2": (BackendSection(zero_stage=2), None),
    "zero 3": (BackendSection(zero_stage=3), None),
    "lora zero 2": (BackendSection(zero_stage=2), LORA),
    "lora zero 3": (BackendSection(zero_stage=3), LORA),
    "tp zero 1": (BackendSection(zero_stage=1, tensor_parallel_size=2), None),
    "tp zero 3": (BackendSection(zero_stage=3, tensor_parallel_size=2), None),
    "lora tp zero 1": (BackendSection(zero_stage=1, tensor_parallel_size=2), LORA),
    "lora tp zero 3": (BackendSection(zero_stage=3, tensor_parallel_size=2), LORA),
}
MAX_BYTES = 20_000


class Gathered:
    """Counts what `deepspeed.zero.GatheredParameters` is asked for."""

    def __init__(self) -> None:
        import deepspeed

        self.bytes: list[int] = []
        original, counted = deepspeed.zero.GatheredParameters, self.bytes

        class Counting(original):
            def __init__(self, params, *args, **kwargs) -> None:
                counted.append(sum(p.ds_numel * p.element_size() for p in params))
                super().__init__(params, *args, **kwargs)

        deepspeed.zero.GatheredParameters = Counting


def load(model: str, lora: LoraSection | None) -> Policy:
    return load_policy(model, loading(lora=lora))


def train(backend: Backend, *, share: float) -> None:
    """Two steps that are large enough to see: the first of an adapter moves B alone."""
    generator = torch.Generator().manual_seed(3)
    tokens = PackedTokens.from_sequences([torch.randint(1, 16, (12,), generator=generator)], [torch.arange(12) >= 1])
    for _ in range(2):
        backend.backward(-backend.module(tokens, temperature=1.0).logprobs_A.sum() * share)
        backend.step()


def base_and_adapter(policy: Policy, weights: Weights, gathered: list[int]) -> dict[str, dict[str, Tensor] | int]:
    """As an engine gets them that holds an adapter, and how many bytes were gathered for the adapter."""
    of_base = weights.whole_weights(only=lambda name: not is_adapter(name), max_bytes=MAX_BYTES)
    base = {n: t.clone() for n, t in file_weights(policy, of_base, merge=False)}
    gathered.clear()
    of_adapter = weights.whole_weights(only=is_adapter, max_bytes=MAX_BYTES)
    adapter = {n: t.clone() for n, t in FileAdapter(policy).tensors(of_adapter)}
    return {"base": base, "adapter": adapter, "gathered": sum(gathered)}


def main(model: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    gathered = Gathered()
    settings = optimizer(lr=1e-2, eps=1e-3)  # a larger eps: signs of tiny gradients do not decide
    for way, (zero, lora) in WAYS.items():
        alone = load(model, lora)
        plain = TorchBackend(alone, settings)
        train(plain, share=1.0)
        with sharded_loading(zero, dtype=torch.float32):
            policy = load(model, lora)
        ours = DeepSpeedBackend(policy, settings, zero)
        train(ours, share=zero.tensor_parallel_size / dist.get_world_size())

        gathered.bytes.clear()
        announced = [(n, t.dtype, t.shape) for n, t in file_weights(policy, ours.weight_shapes())]
        nothing = len(gathered.bytes)
        found = {n: t.clone() for n, t in file_weights(policy, ours.whole_weights(max_bytes=MAX_BYTES))}
        largest = max(gathered.bytes, default=0)
        next(broken_off := file_weights(policy, ours.whole_weights(max_bytes=MAX_BYTES)))
        broken_off.close()
        again = {n: t.clone() for n, t in file_weights(policy, ours.whole_weights())}
        probe = Probe.of(vocab_size=policy.model.config.vocab_size, dtype=torch.float32, max_model_len=64)
        result = {
            "found": found,
            "again": again,
            "expected": dict(file_weights(alone, plain.whole_weights())),
            "announced": announced,
            "gathered for weight_shapes": nothing,
            "largest": largest,
            "probe": probe.policy_side(ours.module),
            "probe alone": probe.policy_side(plain.module),
        }
        if lora is not None:
            result["apart"] = base_and_adapter(policy, ours, gathered.bytes)
            result["apart alone"] = base_and_adapter(alone, plain, gathered.bytes)
        names = [None, None]
        dist.all_gather_object(names, list(found))
        result["same names"] = names[0] == names[1]
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{way}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(sys.argv[1], Path(sys.argv[2]))
