"""One process or several, plain torch or DeepSpeed: which it is, from flags and from how the run was started."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from openrlhf.backends.base import Backend
from openrlhf.backends.optimizer import OptimizerSettings
from openrlhf.backends.ranks import ALONE, Launch, Ranks, join, read_launch
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.fields import ConfigError

if TYPE_CHECKING:
    from openrlhf.backends.deepspeed import ZeroSettings
    from openrlhf.config.backend import BackendSection


def uses_deepspeed(backend: str, ds: BackendSection, launch: Launch) -> bool:
    """Several processes, and what plain torch cannot do, are DeepSpeed's. Raises ConfigError where they are not."""
    only_deepspeed = {
        f"{launch.count} processes": launch.count > 1,
        "--ds.adam_offload": ds.adam_offload,
        f"--ds.tensor_parallel_size {ds.tensor_parallel_size}": ds.tensor_parallel_size > 1,
    }
    reasons = [name for name, given in only_deepspeed.items() if given]
    if backend == "torch" and reasons:
        raise ConfigError(f"--train.backend torch is one process with all its state: {reasons[0]} needs deepspeed")
    if launch.count % ds.tensor_parallel_size:
        raise ConfigError(
            f"--ds.tensor_parallel_size {ds.tensor_parallel_size}: {launch.count} processes cannot be divided into "
            "groups of that size; start a multiple of it"
        )
    return backend == "deepspeed" or bool(reasons)


def zero_settings(ds: BackendSection) -> ZeroSettings:
    from openrlhf.backends.deepspeed import ZeroSettings

    return ZeroSettings(
        stage=ds.zero_stage,
        offload=ds.adam_offload,
        secondary_partition=ds.zpg,
        overlap=ds.overlap_comm,
        tensor_parallel_size=ds.tensor_parallel_size,
    )


class Distribution:
    """How a run's models are spread over the processes that were started for it."""

    def __init__(self, ranks: Ranks, zero: ZeroSettings | None) -> None:
        """`zero`: None for plain torch."""
        self.ranks = ranks
        self._zero = zero

    @classmethod
    def of(cls, backend: str, ds: BackendSection) -> Distribution:
        """Meet the other processes, if there are any."""
        if not uses_deepspeed(backend, ds, read_launch(os.environ)):
            return cls(join(), None)
        from openrlhf.backends.deepspeed import computes_in

        try:
            takes_fp16 = computes_in(torch.float16)  # missing now rather than after the model was loaded
        except ImportError as error:
            raise ConfigError(str(error)) from error
        if ds.param_dtype == "fp16" and not takes_fp16:
            raise ConfigError(
                "--ds.param_dtype fp16: DeepSpeed does not compute in fp16 on this machine; use bf16 or fp32, or one "
                "process with --train.backend torch"
            )
        return cls(join(tensor_parallel_size=ds.tensor_parallel_size, also_alone=True), zero_settings(ds))

    def loading(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Around the loading of a model that `train` or `freeze` gets: of what is shared out, no rank holds all."""
        if self._zero is None:
            return contextlib.nullcontext()
        from openrlhf.backends.deepspeed import sharded_loading

        return sharded_loading(self._zero, dtype=dtype)

    def train(self, module: nn.Module, settings: OptimizerSettings, *, ema_beta: float | None = None) -> Backend:
        """`ema_beta` as in `TorchBackend`."""
        if self._zero is None:
            return TorchBackend(module, settings, ema_beta=ema_beta)
        from openrlhf.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(module, settings, self._zero, ema_beta=ema_beta)

    def freeze(self, module: nn.Module, *, offload: bool = False) -> nn.Module:
        """A module that is only run forward. `offload`: it waits in CPU memory. A whole one is fetched by whoever runs
        it (`backends.offload.on_device`), one that is shared out comes by itself."""
        module.requires_grad_(False)
        if self._zero is None or not self.shares_out_weights:
            return module.to("cpu") if offload else module
        from openrlhf.backends.deepspeed import shard_frozen

        return shard_frozen(module, self._zero, offload=offload)

    @property
    def backend(self) -> Literal["torch", "deepspeed"]:
        """As --train.backend calls it."""
        return "torch" if self._zero is None else "deepspeed"

    @property
    def forwards_together(self) -> bool:
        """Each forward is one of all ranks, which have parts of the weights."""
        return self._zero is not None and (self._zero.stage == 3 or self._zero.tensor_parallel_size > 1)

    @property
    def shares_out_weights(self) -> bool:
        """No rank holds a whole model."""
        return self._zero is not None and self._zero.stage == 3


ONE_PROCESS = Distribution(ALONE, None)
