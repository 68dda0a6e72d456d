"""Training in one process with plain torch, on the CPU or one GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf.backends.base import ModuleWeights
from openrlhf.backends.offload import Parking
from openrlhf.backends.optimizer import (
    LossScale,
    ScheduledOptimizers,
    make_optimizers,
    rate_factor,
    sum_dtype,
    trained_dtype,
)
from openrlhf.backends.ranks import ALONE, Launch, Ranks, join
from openrlhf.backends.state import (
    AVERAGE,
    PARAMETERS,
    LeftOut,
    NotFiniteError,
    StateGuard,
    not_finite,
    require_names,
    some,
    whole,
)
from openrlhf.config.backend import BackendSection
from openrlhf.config.fields import ConfigError
from openrlhf.config.training import OptimizerSection


class WeightAverage:
    """ema ← β·ema + (1 − β)·θ after every optimizer step, starting from θ₀; in fp32, one copy on θ's device.

    Averaging along the path of SGD: Polyak and Juditsky 1992 (https://doi.org/10.1137/0330046).
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], *, beta: float) -> None:
        """`masters`: the fp32 tensors that the optimizer updates."""
        self._masters = dict(masters)
        self._beta = beta
        self._average = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self._average.values()), list(self._masters.values()), 1.0 - self._beta)

    @contextlib.contextmanager
    def swapped_into(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """While open, `parameters` hold the average, in their dtype; then the very tensors they held before.

        Nothing is copied but what changes dtype. No optimizer step may happen meanwhile.
        """
        live = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._average[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = live[name]

    def of(self, name: str) -> Tensor:
        """The average of one parameter: to be read, or to be written when a run continues."""
        return self._average[name]


class TorchBackend(ModuleWeights):
    """fp32 master weights, moments and gradient sums, whatever dtype the module computes in.

    An fp32 module is its own master. For 16 bits a master copy is kept; each micro-batch's gradient is added to the
    master's in fp32 as soon as autograd has finished it, and the module gets the rounded result of a step. Losses of
    fp16 modules are scaled. A step whose gradient, weights or moments are not finite is left out.

    With `sums_in_16_bits` autograd adds gradients up where it leaves them, in the module, and a master gets its sum in
    fp32 when the step begins: until then, while activations take their memory, there are 2 bytes for each parameter
    instead of 4.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        *,
        total_steps: int = 1,
        ema_beta: float | None = None,
        sums_in_16_bits: bool = False,
    ) -> None:
        """`total_steps` is the length of the schedule. `ema_beta` is the decay of an average of the weights, which is
        saved in their place; with None no average is kept."""
        super().__init__(module)
        self._max_norm = optimizer.max_norm
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._masters = {name: self._master_of(p, add_up=not sums_in_16_bits) for name, p in self._trained.items()}
        self._shadowed = [(p, self._masters[name]) for name, p in self._trained.items() if self._masters[name] is not p]
        self._optimizers = ScheduledOptimizers(
            make_optimizers(module, optimizer, stands_for=self._masters),
            rate_factor(optimizer, total_steps=total_steps),
        )
        self._average = None if ema_beta is None else WeightAverage(self._masters, beta=ema_beta)
        self._parking = Parking()
        # Gradients pass through frozen weights too.
        self._scale = LossScale() if any(p.dtype == torch.float16 for p in module.parameters()) else None
        self._left_out: LeftOut | None = None
        self._guard = StateGuard(self._state)
        self._guard.remember()

    @staticmethod
    def _master_of(parameter: nn.Parameter, *, add_up: bool) -> nn.Parameter:
        """`add_up`: it takes over every gradient of the parameter at once."""
        if parameter.dtype == torch.float32:
            return parameter
        master = nn.Parameter(parameter.detach().float().clone())

        def add_to_master(p: nn.Parameter) -> None:
            assert p.grad is not None
            # One pass over memory: the sum reads 16 bits and adds them in fp32.
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

        if add_up:
            parameter.register_post_accumulate_grad_hook(add_to_master)
        return master

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def learning_rate(self) -> float:
        return self._optimizers.learning_rate

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale.value if self._scale else loss).backward()

    @property
    def left_out(self) -> LeftOut | None:
        return self._left_out

    def step(self) -> float:
        for parameter, master in self._shadowed:
            if parameter.grad is not None:  # a sum in 16 bits
                master.grad, parameter.grad = parameter.grad.float(), None
        if self._scale:
            torch._foreach_div_([m.grad for m in self._masters.values() if m.grad is not None], self._scale.value)
        damaged, rounded = self._guard.damaged(), self._not_finite_in_16_bits()
        masters = list(self._masters.values())
        total = nn.utils.get_total_norm([master.grad for master in masters if master.grad is not None])
        norm, self._left_out = float(total), None
        if damaged or rounded or not math.isfinite(norm):
            self._left_out = self._leave_out(damaged, norm)
            return norm if not math.isfinite(norm) else math.nan
        if self._max_norm:
            nn.utils.clip_grads_with_norm_(masters, self._max_norm, total)
        self._optimizers.step()
        self._round_into_module()
        if self._average:
            self._average.update()
        if self._scale:
            self._scale.after_good_step()
        self._guard.remember()
        return norm

    def _leave_out(self, damaged: Mapping[str, list[str]], norm: float) -> LeftOut:
        gradients = {name: m.grad for name, m in self._masters.items() if m.grad is not None}
        of = some(not_finite(gradients)) if not math.isfinite(norm) else ""
        self.drop_gradients()
        said = [*self._mend(damaged), *self._round_again()]
        if said:
            return LeftOut("; ".join(said))
        if self._scale:
            self._scale.after_overflow()
            return LeftOut(
                f"its gradient overflows in fp16: the loss scale is {self._scale.value:g} now", expected=True
            )
        return LeftOut(f"its gradient is {norm}" + (f" (of {of})" if of else ""))

    def require_finite(self) -> list[str]:
        damaged = self._guard.damaged()
        said = [*self._mend(damaged), *self._round_again()]
        if bad := self.weights_not_finite():
            raise NotFiniteError(f"weights are not finite: {some(bad)}")
        return said

    def _mend(self, damaged: Mapping[str, list[str]]) -> list[str]:
        said, lost = self._guard.mend(damaged)
        if lost:
            raise NotFiniteError(f"{some(lost)} are not finite, and what they were is not known any more")
        return said

    def _not_finite_in_16_bits(self) -> list[str]:
        return not_finite({name: p for name, p in self._trained.items() if self._masters[name] is not p})

    def _round_again(self) -> list[str]:
        """Weights in 16 bits that are not finite, from their masters."""
        bad = self._not_finite_in_16_bits()
        if not bad:
            return []
        self._round_into_module()
        return [f"weights of {some(bad)} were not finite and are rounded from fp32 again"]

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that a step reads and writes."""
        state: dict[str, dict[str, Tensor]] = {PARAMETERS: {n: m.detach() for n, m in self._masters.items()}}
        for name, master in self._masters.items():
            for kind, tensor in self._optimizers.kept_for(master).items():
                state.setdefault(kind, {})[name] = tensor
        if self._average:
            state[AVERAGE] = {name: self._average.of(name) for name in self._masters}
        return state

    def gradients(self) -> list[Tensor | None]:
        """The sum of gradients since the last optimizer step, in fp32, of each trained parameter; None: it has none.

        To be read at once: what follows adds to these very tensors.
        """
        found = []
        for name, parameter in self._trained.items():
            own = parameter.grad if self._masters[name].grad is None else self._masters[name].grad
            own = None if own is None else own.float()
            found.append(own / self._scale.value if own is not None and self._scale else own)
        return found

    def drop_gradients(self) -> None:
        self._module.zero_grad()
        self._optimizers.zero_grad()

    def retry_blocker(self) -> None:
        return None

    def sleep(self) -> None:
        own = [master for _, master in self._shadowed]
        kept = [t for master in self._masters.values() for t in self._optimizers.kept_for(master).values()]
        averages = [self._average.of(name) for name in self._masters] if self._average else []
        self._parking.park([*own, *kept, *averages, *self._guard.parities])

    def wake(self) -> None:
        self._parking.fetch()

    def weights_to_save(self) -> contextlib.AbstractContextManager[None]:
        return self._average.swapped_into(self._trained) if self._average else contextlib.nullcontext()

    def scalar_state(self) -> dict[str, Any]:
        return {"steps": self._optimizers.steps} | (self._scale.scalar_state() if self._scale else {})

    def tensor_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield f"{PARAMETERS}/{name}", master.detach()
            for kind, tensor in self._optimizers.kept_for(master).items():
                yield f"{kind}/{name}", tensor
            if self._average:
                yield f"{AVERAGE}/{name}", self._average.of(name)

    @torch.no_grad()
    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        kinds = {name: self._optimizers.kinds(master) for name, master in self._masters.items()}
        require_names(tensors, kinds)
        for name, master in self._masters.items():
            master.copy_(whole(tensors, f"{PARAMETERS}/{name}", master.shape))
            kept = [kind for kind in kinds[name] if f"{kind}/{name}" in tensors]
            self._optimizers.keep_for(master, {kind: tensors[f"{kind}/{name}"] for kind in kept})
            if self._average:
                self._average.of(name).copy_(tensors.get(f"{AVERAGE}/{name}", master))
        self._round_into_module()
        self._optimizers.steps = numbers["steps"]
        if self._scale:
            self._scale.load(numbers)
        for kind, names in self._guard.damaged().items():
            raise ValueError(f"its {kind} of {some(names)} are not finite")
        self._guard.remember()

    @torch.no_grad()
    def _round_into_module(self) -> None:
        for parameter, master in self._shadowed:
            parameter.copy_(master)


class Distribution:
    """One process, which holds every model whole."""

    name = "torch"
    computes_together = False
    shards_weights = False

    def __init__(self, ranks: Ranks = ALONE, ds: BackendSection | None = None) -> None:
        self.ranks = ranks
        self._ds = ds or BackendSection()

    @classmethod
    def check(cls, ds: BackendSection, launch: Launch) -> None:
        needs_deepspeed = {
            f"{launch.count} processes": launch.count > 1,
            "--ds.adam_offload": ds.adam_offload,
            ds.share_in_flags: ds.ranks_per_share > 1,
        }
        for reason, given in needs_deepspeed.items():
            if given:
                raise ConfigError(f"--train.backend torch is one process with all its state: {reason} needs deepspeed")

    @classmethod
    def start(cls, ds: BackendSection) -> Distribution:
        return cls(join(), ds)

    def loading(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def train(
        self, module: nn.Module, optimizer: OptimizerSection, *, total_steps: int, ema_beta: float | None = None
    ) -> TorchBackend:
        in_16_bits = sum_dtype(self._ds, trained_dtype(module)) != torch.float32
        return TorchBackend(module, optimizer, total_steps=total_steps, ema_beta=ema_beta, sums_in_16_bits=in_16_bits)

    def freeze(self, module: nn.Module, *, offload: bool = False) -> nn.Module:
        """An offloaded module is moved to the device for each forward (`backends.offload.on_device`)."""
        module.requires_grad_(False)
        return module.to("cpu") if offload else module


ONE_PROCESS = Distribution()


if TYPE_CHECKING:
    from openrlhf.backends import base

    _: tuple[type[base.Backend], type[base.Distribution]] = (TorchBackend, Distribution)
