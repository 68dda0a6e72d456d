"""Runs of the supervised command line in which a number stops being one, once, on the last rank.

    torchrun --nproc-per-node 2 harmed_runs.py runs.json

`runs.json` is a list of [harm, command, word, …]; `harm` is gradient, weights, optimizer, or "left out": the step is
not taken, as if somebody had known.
"""

import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.backends.state import LeftOut
from openrlhf.backends.torch import TorchBackend

HARMED = 3
"""The optimizer step, the first being 1."""


def state_of(backend: TorchBackend | DeepSpeedBackend) -> dict[str, dict[str, torch.Tensor]]:
    return backend._state()


@torch.no_grad()
def poison(backend: TorchBackend | DeepSpeedBackend, harm: str) -> None:
    parameter = next(iter(backend._trained.values()))
    if harm == "weights":
        (parameter.data if parameter.numel() else parameter.ds_tensor.data).view(-1)[1] = math.nan
    elif harm == "optimizer":
        kept = next(tensors for kind, tensors in state_of(backend).items() if kind == "exp_avg")
        next(iter(kept.values())).view(-1)[0] = math.nan


class Harm:
    """Put into a backend's methods for the time of one run."""

    def __init__(self, kind: str, backend: type[TorchBackend | DeepSpeedBackend], *, here: bool) -> None:
        self.kind, self.backend, self.here = kind, backend, here
        self.steps = 0
        self.backward, self.step, self.left_out = backend.backward, backend.step, backend.left_out

    def __enter__(self) -> None:
        harm = self

        def backward(self, loss):
            due = harm.here and harm.steps == HARMED - 1
            harm.backward(self, loss * math.nan if due and harm.kind == "gradient" else loss)

        def step(self):
            harm.steps += 1
            self.withheld = None
            if harm.steps == HARMED and harm.kind == "left out":
                # NaN in every rank's loss would do it too: here the gradient goes without anybody looking.
                self.drop_gradients()
                self.withheld = LeftOut("somebody knew")
                return math.nan
            if harm.steps == HARMED and harm.here:
                poison(self, harm.kind)
            return harm.step(self)

        self.backend.backward, self.backend.step = backward, step
        self.backend.left_out = property(lambda self: self.withheld or harm.left_out.fget(self))

    def __exit__(self, *error: object) -> None:
        self.backend.backward, self.backend.step, self.backend.left_out = self.backward, self.step, self.left_out


def main() -> int:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    backend = DeepSpeedBackend if ranks > 1 else TorchBackend
    for harm, command, *words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        with Harm(harm, backend, here=rank == ranks - 1):
            if status := import_module(f"openrlhf.cli.{command}").main(words):
                return status
        if dist.is_initialized():
            dist.barrier()
    return 0


if __name__ == "__main__":
    require_deepspeed()
    sys.exit(main())
