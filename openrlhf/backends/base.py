"""The training backend's interface: what learners, checkpoints and weight pushes ask of it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from openrlhf.backends import BACKENDS
from openrlhf.backends.ranks import Launch, Ranks, read_launch
from openrlhf.backends.state import LeftOut, not_finite
from openrlhf.config.backend import BackendSection
from openrlhf.config.fields import ConfigError
from openrlhf.config.training import OptimizerSection

GATHERED_BYTES = 256 * 2**20
"""The most bytes of parameters that are gathered at a time, where ranks share parameters out."""


Wanted = Callable[[str], bool]
"""Of a weight's name in the module: whether it is asked for."""


def everything(name: str) -> bool:
    return True


class Weights(Protocol):
    """Weights that can be had whole, wherever they lie."""

    def whole_weights(
        self, *, max_bytes: int = GATHERED_BYTES, only: Wanted = everything
    ) -> Iterator[tuple[str, Tensor]]:
        """The live weights by their names in the module, in its dtypes: each parameter once, then what it saves beside.
        `only`: of these names; the others are not gathered.

        Collective: every rank iterates to the end, and sees the same names in the same order. On each a tensor is
        whole; where ranks share parameters out, at most `max_bytes` of them are at a time (but one always is), so
        whoever holds tensors back holds their memory. They may be the live ones: to be read, before the next step.
        """
        ...

    def weights_not_finite(self) -> list[str]:
        """Names of live weights with an infinite number or one that is none, on any rank. Collective."""
        ...

    def weight_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """What `whole_weights` would give, on the meta device: names, dtypes, shapes. Nothing is gathered."""
        ...


class Backend(Weights, Protocol):
    """Owns a module, its optimizers and their schedule, and an average of the weights if one is wanted."""

    @property
    def module(self) -> nn.Module:
        """The module to call for a forward."""
        ...

    @property
    def learning_rate(self) -> float:
        """That of the next optimizer step; of the matrices, where Muon has a rate of its own."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient; losses are already weighted, so gradients simply add up."""
        ...

    def step(self) -> float:
        """One optimizer step on the accumulated gradient; returns its norm before clipping. Collective.

        A step that is not finite never happens: where the gradient, the weights or what the optimizer keeps is not, on
        any rank, all ranks drop the gradient, bring back what is damaged, and go on as if there had been no such step;
        the schedule stands still, and the norm that is returned is not finite. Raises NotFiniteError where weights
        cannot be brought back.
        """
        ...

    @property
    def left_out(self) -> LeftOut | None:
        """Why the latest step was left out, on all ranks; None: it was taken."""
        ...

    def require_finite(self) -> list[str]:
        """Look at all weights, and bring back what is damaged; returns what was, in words. Collective.

        Raises NotFiniteError where that cannot be done: nobody may be given such weights. Not while it sleeps.
        """
        ...

    def drop_gradients(self) -> None:
        """Forget what was added since the last step, also the part of a backward that failed."""
        ...

    def retry_blocker(self) -> str | None:
        """After a forward or backward that failed: why gradients cannot be dropped, and the step not begun again.

        None: they can. Ranks that were not told may go on, and each has to do its part of their sums.
        """
        ...

    def sleep(self) -> None:
        """Move what only a step needs (master weights, moments) to CPU memory. Forwards go on as before."""
        ...

    def wake(self) -> None:
        """It comes back to the device; before the next backward."""
        ...

    def weights_to_save(self) -> AbstractContextManager[Mapping[str, Tensor] | None]:
        """While open, the weights to export: their average if one is kept, else the live ones. Collective.

        None: the module holds them, and afterwards the live ones again, whatever happened. Otherwise they are given
        to the main rank, whole, by their names in the module.
        """
        ...

    def scalar_state(self) -> dict[str, Any]:
        """The state that is no tensor, as JSON values: {"steps": 12}; with fp16 the loss scale too."""
        ...

    def tensor_state(self) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters in fp32, and what optimizers and averages keep for each, one at a time.

        Whole tensors, named `<kind>/<parameter>`: `parameters`; `exp_avg`, `exp_avg_sq` and `step` (no dimension) of
        AdamW; `momentum_buffer` of Muon; `average`. A parameter that was never updated has no optimizer state. The
        names of parameters are those of `module.named_parameters()`, so what one backend wrote another continues from.

        Collective: every rank iterates to the end and sees the same names in the same order. A tensor is whole on the
        main rank, may be empty elsewhere, and is valid until the next is asked for.
        """
        ...

    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from there; on every rank. `tensors` is lazy: it reads its file when asked for a name.

        Without an average in it, one that is kept starts from its weights. A state of another module or other
        optimizers is a ValueError (`state.require_names`).
        """
        ...


class Distribution(Protocol):
    """How a run's models are spread over the processes that were started for it. One class per backend."""

    ranks: Ranks
    name: str
    """As --train.backend calls the backend."""

    @property
    def computes_together(self) -> bool:
        """Whether each forward is one of several ranks, which share out the weights or the tokens."""
        ...

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds a whole model."""
        ...

    @classmethod
    def check(cls, ds: BackendSection, launch: Launch) -> None:
        """Raise ConfigError where this backend cannot do what the flags and the launch ask for."""
        ...

    @classmethod
    def start(cls, ds: BackendSection) -> Distribution:
        """Meet the other processes, if there are any. Raises ConfigError."""
        ...

    def loading(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Held open while a model is loaded that `train` or `freeze` gets: no rank then loads all of a sharded one."""
        ...

    def train(
        self, module: nn.Module, optimizer: OptimizerSection, *, total_steps: int, ema_beta: float | None = None
    ) -> Backend:
        """A backend that trains the module. `ema_beta` as in `TorchBackend`. Collective."""
        ...

    def freeze(self, module: nn.Module, *, offload: bool = False) -> nn.Module:
        """A module that is only run forward. With `offload` its weights wait in CPU memory. Collective.

        Ranks that compute a policy's samples together compute this one's together too: all of a share are given them.
        """
        ...


def choose_backend(name: str, ds: BackendSection, launch: Launch) -> type[Distribution]:
    """The class of the backend `name`; `auto`: the first that can do what is asked. Raises ConfigError."""
    *simpler, last = BACKENDS if name == "auto" else [name]
    for candidate in simpler:
        found = _distribution(candidate)
        with contextlib.suppress(ConfigError):
            found.check(ds, launch)
            return found
    found = _distribution(last)
    found.check(ds, launch)
    return found


def start_backend(name: str, ds: BackendSection) -> Distribution:
    """Choose the backend and meet the other processes, if there are any. Raises ConfigError."""
    return choose_backend(name, ds, read_launch(os.environ)).start(ds)


def _distribution(name: str) -> type[Distribution]:
    return importlib.import_module(BACKENDS[name]).Distribution


class ModuleWeights:
    """The weights of a module that is whole in this process."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def whole_weights(
        self, *, max_bytes: int = GATHERED_BYTES, only: Wanted = everything
    ) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            if only(name):
                yield name, parameter.detach()
        yield from ((name, buffer) for name, buffer in saved_buffers(self._module) if only(name))

    def weights_not_finite(self) -> list[str]:
        return not_finite(dict(self._module.named_parameters()))

    def weight_shapes(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, meta_tensor(tensor.shape, tensor.dtype)) for name, tensor in self.whole_weights())


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a parameter, also where DeepSpeed has sharded it and this rank holds a flat piece (ZeRO-3)."""
    return getattr(parameter, "ds_shape", parameter.shape)


def is_sharded(module: nn.Module) -> bool:
    """Whether this process holds only pieces of the module's weights, as ZeRO-3 loads them, or none (meta device)."""
    return any(hasattr(p, "ds_id") or p.device.type == "meta" for p in module.parameters())


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a model's files have: a model needs more than its trained parameters."""
    saved = module.state_dict()
    return ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def meta_tensor(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


if TYPE_CHECKING:
    _: type[Weights] = ModuleWeights
