"""Numbers that are none, on one of two ranks, in every way of sharing a model out.

    torchrun --nproc-per-node 2 finite_ranks.py FILE

FILE then has, per way and harm, whether the state is to the bit that of a training without that step, on both ranks, and
what was said.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_sections import optimizer
from torch import nn

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.backends.state import NotFiniteError
from openrlhf.config.backend import BackendSection
from openrlhf.config.training import MuonSection

HARMED = 2
WAYS = {
    "zero 0": (BackendSection(zero_stage=0), torch.float32),
    "zero 1": (BackendSection(zero_stage=1), torch.float32),
    "zero 2": (BackendSection(zero_stage=2), torch.float32),
    "zero 3": (BackendSection(zero_stage=3), torch.float32),
    "zero 1 bf16": (BackendSection(zero_stage=1), torch.bfloat16),
    "zero 2 bf16": (BackendSection(zero_stage=2), torch.bfloat16),
    "zero 3 bf16": (BackendSection(zero_stage=3), torch.bfloat16),
    "zero 1 bf16 sums": (BackendSection(zero_stage=1, grad_accum_dtype="bf16"), torch.bfloat16),
    "zero 2 bf16 sums": (BackendSection(zero_stage=2, grad_accum_dtype="bf16"), torch.bfloat16),
    "zero 3 bf16 sums": (BackendSection(zero_stage=3, grad_accum_dtype="bf16"), torch.bfloat16),
    "zero 2 offload": (BackendSection(zero_stage=2, adam_offload=True), torch.float32),
    "zero 3 offload": (BackendSection(zero_stage=3, adam_offload=True), torch.float32),
}


def make(zero: BackendSection, dtype: torch.dtype, muon: bool) -> DeepSpeedBackend:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(dtype)
    settings = optimizer(lr=0.01, muon=MuonSection(lr=0.02) if muon else None, scheduler="linear")
    return DeepSpeedBackend(module, settings, zero, total_steps=8, ema_beta=0.9)


def backward(backend: DeepSpeedBackend, step: int, *, size: float = 1.0) -> None:
    """Every rank has an input of its own."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    given = torch.randn(3, 4, generator=generator).to(next(backend.module.parameters()).dtype)
    backend.backward((backend.module(given).float() ** 2).mean() * size / dist.get_world_size())


def harm_weights(backend: DeepSpeedBackend) -> None:
    parameter = next(iter(backend._trained.values()))
    target = parameter.data if parameter.numel() else parameter.ds_tensor.data
    target.view(-1)[1] = math.nan


def harm_optimizer(backend: DeepSpeedBackend) -> None:
    for state in backend._masters_state():
        for kind, tensor in state.items():
            if kind != "step":
                tensor.view(-1)[0] = math.nan
        break


def train(backend: DeepSpeedBackend, harm: str | None, *, leave_out: bool = False) -> list[str]:
    said = []
    for step in range(5):
        here = step == HARMED and harm is not None and dist.get_rank() == 1
        if leave_out and step == HARMED:
            continue
        if here and harm == "weights":
            harm_weights(backend)
        if here and harm == "optimizer":
            harm_optimizer(backend)
        backward(backend, step, size=math.nan if here and harm == "gradient" else 1.0)
        norm = backend.step()
        if math.isfinite(norm) != (backend.left_out is None):
            raise AssertionError(f"norm {norm}, left out: {backend.left_out}")
        if backend.left_out is not None:
            said.append(f"{step}: {backend.left_out.reason}")
    return said


def state(backend: DeepSpeedBackend) -> dict[str, torch.Tensor]:
    whole = {name: tensor.clone() for name, tensor in backend.tensor_state()}
    whole |= {f"module/{name}": tensor.clone() for name, tensor in backend.whole_weights()}
    return whole | {"steps": torch.tensor(backend.scalar_state()["steps"])}


def everywhere(fact: bool) -> bool:
    facts: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return all(facts)


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    result = {}
    for way, muon in [*((way, False) for way in WAYS), ("zero 0", True), ("zero 2", True), ("zero 3 bf16", True)]:
        control = make(*WAYS[way], muon)
        train(control, None, leave_out=True)
        expected = state(control)
        for harm in ("gradient", "weights", "optimizer"):
            backend = make(*WAYS[way], muon)
            said = train(backend, harm)
            found = state(backend)
            same = found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
            result[f"{way}{' muon' if muon else ''} {harm}"] = {"same": everywhere(same), "said": said}
    for way in ("zero 0", "zero 3"):
        backend = make(*WAYS[way], False)
        if dist.get_rank() == 1:
            for master in backend._masters():
                master.data.fill_(math.nan)
        try:
            backend.require_finite()
            error = ""
        except NotFiniteError as lost:
            error = str(lost)
        result[f"{way} lost"] = {"same": everywhere(bool(error)), "said": [error]}
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))
