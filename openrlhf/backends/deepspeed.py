"""DeepSpeed: ZeRO 0–3 over several ranks, offload, tensor parallelism. On CPU it runs on gloo."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.backends.base import GATHERED_BYTES, Wanted, everything, meta_tensor, saved_buffers, whole_shape
from openrlhf.backends.offload import Parking
from openrlhf.backends.optimizer import (
    GOOD_STEPS_BEFORE_GROWTH,
    INITIAL_LOSS_SCALE,
    STATE_KINDS,
    LossScale,
    ScheduledOptimizers,
    divided,
    make_adamw,
    muon_arguments,
    rate_factor,
    sum_dtype,
    trained_dtype,
)
from openrlhf.backends.ranks import DEADLINE, Launch, Ranks, join
from openrlhf.backends.sharded_muon import Piece, ShardedMuon, Sharing
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
from openrlhf.backends.tensor_parallel import cut_dimensions, cut_layers, tensor_group
from openrlhf.config.backend import BackendSection
from openrlhf.config.fields import ConfigError
from openrlhf.config.training import OptimizerSection
from openrlhf.models.context import Context, share_streams
from openrlhf.models.exchange import ProcessExchange
from openrlhf.utils import waits

logger = logging.getLogger(__name__)

STEP = "step"
_PIECE = " (this rank's piece)"
_MASTERS = (
    ("fp32_partitioned_groups_flat", "fp16_groups"),
    ("single_partition_of_fp32_groups", "bit16_groups"),
    ("fp32_groups_flat_partition", "bf16_groups"),
)
"""Attributes of DeepSpeed's optimizers: a rank's master weights, and the parameters that they are pieces of."""


def deepspeed_config(
    ds: BackendSection,
    *,
    dtype: torch.dtype,
    sums: torch.dtype = torch.float32,
    max_norm: float = 0.0,
    offload_parameters: bool = False,
) -> dict[str, Any]:
    """DeepSpeed's configuration. Losses come weighted over the whole step, so DeepSpeed is told no batch sizes.

    `sums`: the dtype of sums of gradients. `offload_parameters`: in stage 3 each rank's share of the parameters lives
    in CPU memory.
    """
    sharing: dict[str, Any] = {
        "stage": ds.zero_stage,
        # Below stage 2 gradients are reduced once, in step(): there is nothing left to overlap with.
        "overlap_comm": ds.overlap_comm and ds.zero_stage >= 2,
        "contiguous_gradients": True,
    }
    if ds.zero_stage == 3:
        sharing["zero_hpz_partition_size"] = ds.zpg
    in_cpu_memory = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if ds.adam_offload:
        sharing["offload_optimizer"] = in_cpu_memory
    if offload_parameters:
        sharing["offload_param"] = in_cpu_memory
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Any number of backward calls, then one step.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_norm,
        "zero_optimization": sharing,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {
            "enabled": dtype == torch.float16,
            "initial_scale_power": round(math.log2(INITIAL_LOSS_SCALE)),
            "loss_scale_window": GOOD_STEPS_BEFORE_GROWTH,
            "hysteresis": 1,
        },
        "data_types": {"grad_accum_dtype": "fp32" if sums == torch.float32 else ds.grad_accum_dtype},
        "steps_per_print": sys.maxsize,
    }
    if ds.tensor_parallel_size > 1:
        config["tensor_parallel"] = {"autotp_size": ds.tensor_parallel_size}
    return config


class DeepSpeedBackend:
    """A module trained by several ranks, with torch's own AdamW and Muon's steps inside.

    Every rank computes its share of a step's losses, which are weighted over the whole step, and gradients add up.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        ds: BackendSection,
        *,
        total_steps: int = 1,
        ema_beta: float | None = None,
    ) -> None:
        """Collective. `total_steps` and `ema_beta` as in `TorchBackend`."""
        self._module = module
        self._max_norm = optimizer.max_norm
        self._ema_beta = ema_beta
        self._parking = Parking()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        base, self._kinds = _one_optimizer(module, optimizer, trained)
        self._rates = ScheduledOptimizers([base], rate_factor(optimizer, total_steps=total_steps))
        dtype = trained_dtype(module)
        ds, sums = _with_sums(ds, dtype)
        # Without ZeRO nobody measures the gradient, and it is whole only inside step(): we do it there, and clip too.
        self._unwrapped = ds.zero_stage == 0
        config = deepspeed_config(ds, dtype=dtype, sums=sums, max_norm=0.0 if self._unwrapped else optimizer.max_norm)
        self._ds = ds
        self._engine = _start(module, config, base, ds)
        zero_2 = hasattr(self._engine.optimizer, "process_gradients")
        self._order = _OneOrder(self._engine.optimizer, module) if zero_2 else None
        self._tensor_group = tensor_group(ds)
        self._splits = cut_dimensions(module)
        self._sharded = ds.zero_stage == 3 or bool(self._splits)
        # Gradients are averaged over the ranks that have different samples; ours are to be summed.
        self._shares = dist.get_world_size() // ds.tensor_parallel_size
        self._base: torch.optim.Optimizer = base
        self._norm_unwrapped = math.nan
        if self._unwrapped:
            self._step_taken = base.step
            base.step = self._clipped_step  # type: ignore[method-assign, assignment]  # DeepSpeed calls it
        # AutoTP has put its own layers, with their own parameters, in place of some.
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._begin_optimizer_state()
        if isinstance(base, ShardedMuon):
            base.sharing = self._sharing()
        self._scaler: Any = self._engine.optimizer.loss_scaler if dtype == torch.float16 else None
        self._left_out: LeftOut | None = None
        self._damaged = False
        self._guard = StateGuard(self._state)
        self._guard.remember()

    # ------------------------------------------------------------------------------------------------ training

    @property
    def module(self) -> nn.Module:
        return self._engine

    @property
    def learning_rate(self) -> float:
        return self._rates.learning_rate

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._shares)

    @property
    def left_out(self) -> LeftOut | None:
        return self._left_out

    def step(self) -> float:
        damaged, in_module = self._guard.damaged(), self._not_finite_in_module()
        self._damaged, self._left_out = self._on_any(bool(damaged or in_module)), None
        said = self._mend(damaged) if self._damaged else []
        with self._overflowing() if self._damaged else contextlib.nullcontext():
            self._engine.step()
        if not self._engine.was_step_applied():
            self._left_out = self._why_left_out(said)
            return math.inf
        norm = self._norm_unwrapped if self._unwrapped else self._engine.get_global_grad_norm()
        self._rates.steps += 1
        self._update_average()
        self._guard.remember()
        return math.nan if norm is None else float(norm)

    def _why_left_out(self, said: list[str]) -> LeftOut:
        said = [*said, *self._round_again()]
        if said:
            return LeftOut("; ".join(said))
        if self._scaler is not None:
            scale = self._scaler.cur_scale
            return LeftOut(f"its gradient overflows in fp16: the loss scale is {scale:g} now", expected=True)
        return LeftOut("its gradient is not finite")

    @contextlib.contextmanager
    def _overflowing(self) -> Iterator[None]:
        """While open, DeepSpeed finds the gradient infinite: it drops it, and knows best where its parts are."""
        if self._unwrapped:
            yield
            return
        infinite = torch.tensor(math.inf, device=self._engine.device)
        answers: dict[str, Any] = {
            "_get_norm_groups": [infinite],  # stage 3
            "scaled_global_norm": infinite,  # stages 1 and 2
            "get_grads_for_norm": ([infinite.view(1)], {}),  # bf16, whose stage 1 is another
        }
        optimizer = self._engine.optimizer
        asked = next((name for name in answers if hasattr(optimizer, name)), None)
        if asked is None:
            raise TypeError(f"this DeepSpeed measures its gradient elsewhere: {type(optimizer).__name__}")
        setattr(optimizer, asked, lambda *arguments, **options: answers[asked])
        try:
            yield
        finally:
            delattr(optimizer, asked)

    def require_finite(self) -> list[str]:
        damaged, said = self._guard.damaged(), []
        if self._on_any(bool(damaged)):
            said = self._mend(damaged)
        said += self._round_again()
        if bad := self.weights_not_finite():
            raise NotFiniteError(f"weights are not finite: {some(bad)}")
        return said

    def weights_not_finite(self) -> list[str]:
        bad = not_finite(self._module_tensors())
        return _gathered_texts(bad) if self._on_any(bool(bad)) else []

    def _mend(self, damaged: Mapping[str, list[str]]) -> list[str]:
        """Collective."""
        mended = self._guard.mend(damaged)
        lost = _gathered_texts(mended.lost)
        if lost:
            raise NotFiniteError(f"{some(lost)} are not finite, and what they were is not known any more")
        return _gathered_texts(mended.said)

    def _round_again(self) -> list[str]:
        """Weights that are not finite, from their fp32 masters. Collective."""
        bad = self._not_finite_in_module()
        if not self._on_any(bool(bad)):
            return []
        for name, parameter in self._trained.items():
            self._set(name, parameter, PARAMETERS, self._whole(name, parameter, PARAMETERS))
        return [f"weights of {some(_gathered_texts(bad))} were not finite and are taken from the fp32 masters again"]

    def _not_finite_in_module(self) -> list[str]:
        """Trained weights of which there are fp32 masters, as far as this rank has them."""
        found = [] if self._unwrapped else not_finite(self._module_tensors())
        return [name for name in found if name.removesuffix(_PIECE) in self._trained]

    def _module_tensors(self) -> dict[str, Tensor]:
        """This rank's tensors of the module's weights, by name."""
        named = dict(self._module.named_parameters())
        pieces = {f"{name}{_PIECE}": p.ds_tensor for name, p in named.items() if hasattr(p, "ds_tensor")}
        return {**named, **pieces}

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that a step of this rank reads and writes."""
        state: dict[str, dict[str, Tensor]] = {PARAMETERS: {}}
        for master, names in self._masters_and_parameters():
            name = some(names)
            state[PARAMETERS][name] = master.detach()
            for kind, tensor in self._base.state[master].items():
                state.setdefault(kind, {})[name] = tensor
        return state

    def _on_any(self, here: bool) -> bool:
        """Whether it is so on any rank. Collective."""
        flag = torch.tensor(float(here), device=self._engine.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def drop_gradients(self) -> None:
        optimizer = self._engine.optimizer
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):  # sums of ZeRO 1 and 2, by group
            sums = getattr(optimizer, name, {})
            sums.update(dict.fromkeys(sums))
        for bucket in getattr(optimizer, "ipg_buckets", {}).values():  # waiting to be added up with the other ranks'
            bucket.clear()
        getattr(optimizer, "extra_large_param_to_reduce", {}).clear()
        if self._order is not None:
            self._order.drop()
        if not self._unwrapped:
            optimizer.exit_backward()

    def retry_blocker(self) -> str | None:
        if self._ds.zero_stage == 3 or self._ds.ranks_per_share > 1:
            return "its ranks compute every layer together, and the others are waiting for this one"
        if self._ds.adam_offload:
            return "--ds.adam_offload adds gradients up in CPU memory"
        if any(getattr(self._engine.optimizer, "params_already_reduced", ())):
            return "its ranks were already adding up the gradients of this micro-batch"
        return None

    def _clipped_step(self) -> None:
        """Without ZeRO: DeepSpeed calls it when the gradient is whole, and asks for `overflow` afterwards."""
        self._measure()
        left_out = self._damaged or not math.isfinite(self._norm_unwrapped)
        self._base.overflow = left_out  # type: ignore[attr-defined]
        if not left_out:
            self._step_taken()

    def _measure(self) -> None:
        own = [p for name, p in self._trained.items() if name not in self._splits]
        norm = nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])
        if self._splits:
            parts = [self._trained[name].grad for name in self._splits if name in self._trained]
            squares = nn.utils.get_total_norm([part for part in parts if part is not None]) ** 2
            dist.all_reduce(squares, group=self._tensor_group)
            norm = (norm**2 + squares).sqrt()
        nn.utils.clip_grads_with_norm_(self._trained.values(), self._max_norm or math.inf, norm)
        self._norm_unwrapped = float(norm)

    def sleep(self) -> None:
        if self._moves_states:
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

            kinds = {Kind.optim_states, Kind.hp_params, Kind.lp_grads, Kind.contiguous_grad_buffer}
            self._engine.offload_states(include=kinds, pin_memory=torch.cuda.is_available())
            self._parking.park(self._guard.parities)
            return
        kept = [tensor for state in self._masters_state() for tensor in state.values()]
        # Elsewhere masters are the module's own weights, or views of them are about that would keep their memory.
        masters = self._masters() if hasattr(self._engine.optimizer, "fp32_partitioned_groups_flat") else []
        self._parking.park([*masters, *kept, *self._guard.parities])

    def wake(self) -> None:
        if self._moves_states:
            self._engine.reload_states()
        self._parking.fetch()

    @property
    def _moves_states(self) -> bool:
        """Stages 1 and 2 can by themselves; stage 3 only with an optimizer that has to be compiled."""
        return hasattr(self._engine.optimizer, "single_partition_of_fp32_groups")

    # ------------------------------------------------------------------------------------------- state, whole

    @contextlib.contextmanager
    def weights_to_save(self) -> Iterator[dict[str, Tensor] | None]:
        if self._ema_beta is None and not self._sharded:
            yield None
            return
        weights = {}
        for name, tensor in self.whole_weights() if self._ema_beta is None else self._averaged_weights():
            if dist.get_rank() == 0:
                weights[name] = tensor.to("cpu", copy=True)
        yield weights

    def whole_weights(
        self, *, max_bytes: int = GATHERED_BYTES, only: Wanted = everything
    ) -> Iterator[tuple[str, Tensor]]:
        wanted = ((name, parameter) for name, parameter in self._module.named_parameters() if only(name))
        for group in _together(wanted, max_bytes=max_bytes):
            with _gathered([parameter for _, parameter in group]):
                for name, parameter in group:
                    yield name, self._join(name, parameter.detach())
            waits.mark_progress()
        yield from ((name, buffer) for name, buffer in saved_buffers(self._module) if only(name))

    def weight_shapes(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, meta_tensor(self._whole_shape(name, parameter), parameter.dtype)
        for name, buffer in saved_buffers(self._module):
            yield name, meta_tensor(buffer.shape, buffer.dtype)

    def _averaged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `whole_weights`, with the average of what is trained."""
        for name, parameter in self._module.named_parameters():
            if name in self._trained:
                yield name, self._whole(name, parameter, AVERAGE).to(parameter.dtype)
            else:
                with _gathered([parameter]):
                    yield name, self._join(name, parameter.detach())
        yield from saved_buffers(self._module)

    def scalar_state(self) -> dict[str, Any]:
        if self._scaler is None:
            return {"steps": self._rates.steps}
        good_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        scale = LossScale(self._scaler.cur_scale, good_steps % GOOD_STEPS_BEFORE_GROWTH)
        return {"steps": self._rates.steps} | scale.scalar_state()

    def tensor_state(self) -> Iterator[tuple[str, Tensor]]:
        updates = next((float(state[STEP]) for state in self._masters_state() if STEP in state), self._rates.steps)
        for name, parameter in self._trained.items():
            yield f"{PARAMETERS}/{name}", self._whole(name, parameter, PARAMETERS)
            for kind in self._kinds[name] if updates else ():
                kept = torch.tensor(float(updates)) if kind == STEP else self._whole(name, parameter, kind)
                yield f"{kind}/{name}", kept
            if self._ema_beta is not None:
                yield f"{AVERAGE}/{name}", self._whole(name, parameter, AVERAGE)

    @torch.no_grad()
    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        require_names(tensors, self._kinds)
        updates = 0.0
        for name, parameter in self._trained.items():
            weight = whole(tensors, f"{PARAMETERS}/{name}", self._whole_shape(name, parameter))
            self._set(name, parameter, PARAMETERS, weight)
            # One count for all: the masters of many parameters lie in one flat tensor.
            updates = max(updates, float(tensors.get(f"{STEP}/{name}", 0.0)))
            for kind in self._moments(name):
                kept = tensors.get(f"{kind}/{name}")
                self._set(name, parameter, kind, torch.zeros_like(weight) if kept is None else kept)
            if self._ema_beta is not None:
                self._set(name, parameter, AVERAGE, tensors.get(f"{AVERAGE}/{name}", weight))
        for state in self._masters_state():
            if STEP in state:
                state[STEP].fill_(updates)
        self._rates.steps = numbers["steps"]
        if self._scaler is not None:
            scale = LossScale()
            scale.load(numbers)
            self._scaler.cur_scale = scale.value
            self._scaler.last_overflow_iter = self._scaler.cur_iter - scale.good_steps - 1
        damaged = self._guard.damaged()
        if self._on_any(bool(damaged)):
            found = _gathered_texts([f"{kind} of {some(names)}" for kind, names in damaged.items()])
            raise ValueError(f"its {some(found)} are not finite")
        self._guard.remember()

    # --------------------------------------------------------------------------- DeepSpeed's own bookkeeping

    def _masters(self) -> list[Tensor]:
        """The tensors that this rank's optimizer updates: flat fp32 pieces of many parameters; without ZeRO the
        parameters."""
        return [master for master, _ in self._masters_and_parameters()]

    def _masters_and_parameters(self) -> list[tuple[Tensor, list[str]]]:
        """Each with the parameters that it has pieces of, in order."""
        if self._unwrapped:
            return [(parameter, [name]) for name, parameter in self._trained.items()]
        names = {parameter: name for name, parameter in self._trained.items()}
        for masters, parameters in _MASTERS:
            if hasattr(self._engine.optimizer, masters):
                groups = getattr(self._engine.optimizer, parameters)
                pairs = zip(getattr(self._engine.optimizer, masters), groups, strict=True)
                return [(master, [names[p] for p in group]) for master, group in pairs]
        raise TypeError(f"this DeepSpeed keeps its master weights elsewhere: {type(self._engine.optimizer).__name__}")

    def _masters_state(self) -> Iterator[dict[str, Tensor]]:
        return (self._base.state[master] for master in self._masters())

    def _begin_optimizer_state(self) -> None:
        """What the first step would make, made now: then a state can be loaded, and memory runs out at once if at all.

        The average is kept beside the moments, where DeepSpeed finds it in the same way.
        """
        for master, names in self._masters_and_parameters():
            state = self._base.state[master]
            if STEP in self._kinds[names[0]]:
                state[STEP] = torch.zeros((), device=master.device)
            for kind in self._moments(names[0]):
                state[kind] = torch.zeros_like(master, dtype=torch.float32).detach()
            if self._ema_beta is not None:
                state[AVERAGE] = master.detach().clone()
        if link := getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None):
            link()

    def _moments(self, name: str) -> list[str]:
        return [kind for kind in self._kinds[name] if kind != STEP]

    def _sharing(self) -> Sharing:
        """How ranks share out the matrices that Muon needs whole."""
        pieces = {
            master: _pieces({name: self._trained[name] for name in names}, whole=self._unwrapped)
            for master, names in self._masters_and_parameters()
        }
        group = None if self._unwrapped else self._engine.optimizer.dp_process_group
        return Sharing(pieces, group, torch.device(self._engine.device), self._join, self._part)

    @torch.no_grad()
    def _update_average(self) -> None:
        if self._ema_beta is not None:
            averages = [state[AVERAGE] for state in self._masters_state()]
            torch._foreach_lerp_(averages, self._masters(), 1.0 - self._ema_beta)

    def _whole(self, name: str, parameter: nn.Parameter, kind: str) -> Tensor:
        """fp32, of all ranks together. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._unwrapped:
            part = parameter.detach() if kind == PARAMETERS else self._base.state[parameter][kind]
        elif kind == PARAMETERS:
            part = safe_get_full_fp32_param(parameter)
        else:
            part = safe_get_full_optimizer_state(parameter, kind)
        return self._join(name, part.detach())

    @torch.no_grad()
    def _set(self, name: str, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        part = self._part(name, value).to(self._engine.device, torch.float32)
        if self._unwrapped and kind != PARAMETERS:
            self._base.state[parameter][kind].copy_(part)
        elif kind != PARAMETERS:
            safe_set_full_optimizer_state(parameter, part, kind)
        else:
            safe_set_full_fp32_param(parameter, part)
            with _gathered([parameter], modifier_rank=0):
                if parameter.numel():
                    parameter.copy_(part)

    def _whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        shape = list(whole_shape(parameter))
        if name in self._splits:
            shape[self._splits[name]] *= dist.get_world_size(self._tensor_group)
        return torch.Size(shape)

    def _join(self, name: str, part: Tensor) -> Tensor:
        """The parts of all ranks that share a layer, put together."""
        if name not in self._splits:
            return part
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self._tensor_group))]
        dist.all_gather(parts, part.contiguous(), group=self._tensor_group)
        return torch.cat(parts, dim=self._splits[name])

    def _part(self, name: str, value: Tensor) -> Tensor:
        if name not in self._splits:
            return value
        parts = value.chunk(dist.get_world_size(self._tensor_group), dim=self._splits[name])
        return parts[dist.get_rank(self._tensor_group)].contiguous()


class _OneOrder:
    """ZeRO 2 is given gradients in the same order on every rank: from the last parameter of the module to the first.

    It lays them out side by side as they come, and adds the rows of all ranks up, whatever is in them. They come as
    autograd computes them, and that differs between ranks of which one has a long sequence in tiles, or could not
    compile its layers. The order is that of a backward pass, so that hardly a layer's gradients have to wait.
    """

    def __init__(self, optimizer: Any, module: nn.Module) -> None:
        self._take = optimizer.process_gradients
        self._finish = optimizer.overlapping_partition_gradients_reduce_epilogue
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._places = {id(parameter): place for place, parameter in enumerate(reversed(trained))}
        self.drop()
        optimizer.process_gradients = self._came
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._finish_all

    def drop(self) -> None:
        self._waiting: dict[int, tuple[nn.Parameter, int]] = {}
        self._next = 0

    def _came(self, parameter: nn.Parameter, group: int) -> None:
        self._waiting[self._places[id(parameter)]] = (parameter, group)
        while self._next in self._waiting:
            self._take(*self._waiting.pop(self._next))
            self._next += 1

    def _finish_all(self) -> None:
        """After those that no gradient has come for."""
        for _, came in sorted(self._waiting.items()):
            self._take(*came)
        self.drop()
        self._finish()


def shard_frozen(module: nn.Module, ds: BackendSection, *, offload: bool = False) -> nn.Module:
    """A module that is only run forward, its parameters sharded over ranks as stage 3 does. Collective."""
    own = BackendSection(zero_stage=3, zpg=ds.zpg, tensor_parallel_size=ds.tensor_parallel_size)
    config = deepspeed_config(own, dtype=next(module.parameters()).dtype, offload_parameters=offload)
    return _start(module.requires_grad_(False), config, None, own)


class Distribution:
    """Ranks of DeepSpeed, which share out optimizer state (ZeRO 1), gradients (2), weights (3) or layers (TP)."""

    name = "deepspeed"

    def __init__(self, ranks: Ranks, ds: BackendSection) -> None:
        """Collective."""
        self.ranks = ranks
        self._ds = ds
        self._context = _context(ds)

    @classmethod
    def check(cls, ds: BackendSection, launch: Launch) -> None:
        if launch.count % ds.ranks_per_share:
            raise ConfigError(
                f"{ds.share_in_flags}: {launch.count} processes cannot be divided into groups of {ds.ranks_per_share} "
                "that share their samples; start a multiple of it"
            )

    @classmethod
    def start(cls, ds: BackendSection) -> Distribution:
        try:
            takes_fp16 = computes_in(torch.float16)  # a missing DeepSpeed is found before the model is loaded
        except ImportError as error:
            raise ConfigError(str(error)) from error
        if ds.param_dtype == "fp16" and not takes_fp16:
            raise ConfigError(
                "--ds.param_dtype fp16: DeepSpeed does not compute in fp16 on this machine; use bf16 or fp32, or one "
                "process with --train.backend torch"
            )
        return cls(join(ranks_per_share=ds.ranks_per_share, also_alone=True), ds)

    def loading(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
        return sharded_loading(self._ds, dtype=dtype)

    def train(
        self, module: nn.Module, optimizer: OptimizerSection, *, total_steps: int, ema_beta: float | None = None
    ) -> DeepSpeedBackend:
        share_streams(module, self._context)
        return DeepSpeedBackend(module, optimizer, self._ds, total_steps=total_steps, ema_beta=ema_beta)

    def freeze(self, module: nn.Module, *, offload: bool = False) -> nn.Module:
        """A sharded module fetches its weights by itself, layer by layer."""
        module.requires_grad_(False)
        share_streams(module, self._context)
        if self.shards_weights:
            return shard_frozen(module, self._ds, offload=offload)
        if self._ds.tensor_parallel_size > 1:
            require_deepspeed()
            cut_layers(module, self._ds)
        return module.to("cpu") if offload else module

    @property
    def computes_together(self) -> bool:
        return dist.get_world_size() > 1 and (self.shards_weights or self._ds.ranks_per_share > 1)

    @property
    def shards_weights(self) -> bool:
        return self._ds.zero_stage == 3


@contextlib.contextmanager
def sharded_loading(ds: BackendSection, *, dtype: torch.dtype) -> Iterator[None]:
    """While open, transformers loads models of stage 3 shard by shard: no rank ever holds one whole.

    Tensor parallelism needs them whole: it cuts layers before ZeRO does.
    """
    if ds.zero_stage < 3 or ds.tensor_parallel_size > 1:
        yield
        return
    require_deepspeed()
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # Transformers knows of it for as long as the object lives.
    announced = HfDeepSpeedConfig(deepspeed_config(ds, dtype=dtype))
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del announced


# ------------------------------------------------------------------------------------------------- starting


def require_deepspeed() -> None:
    """Import DeepSpeed for the devices that are there, and for machines without a compiler. Raises ImportError."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError("this run needs DeepSpeed: pip install -e '.[deepspeed]' in the repository") from error
    # Collectives through shared memory would be compiled at the first start. Gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def computes_in(dtype: torch.dtype) -> bool:
    """Whether DeepSpeed takes models of this dtype here. Not every CPU multiplies in fp16."""
    require_deepspeed()
    from deepspeed.accelerator import get_accelerator

    return dtype in get_accelerator().supported_dtypes()


def _start(
    module: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None, ds: BackendSection
) -> Any:
    require_deepspeed()
    import deepspeed

    if ds.tensor_parallel_size > 1:
        cut_layers(module, ds)
    if config["zero_optimization"]["stage"] == 3:
        _gather_whole(module)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for what machines read
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if getattr(engine, "first_dataloader_check", None):
        engine.first_dataloader_check.remove()  # it compares inputs with ==, which records of tensors do not have
    if config["zero_optimization"]["stage"] == 3:
        _register_head(module)
    return engine


def _gathered_texts(own: Sequence[str]) -> list[str]:
    """The texts of all ranks, each once. Collective."""
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, list(own))
    return list(dict.fromkeys(text for texts in all_of_them for text in texts))


def _gather_whole(module: nn.Module) -> None:
    """Some modules want all parameters of the modules inside of them at once.

    MLPs in tiles use their matrices once for each tile, and ranks have different numbers of tiles. Routers take theirs
    in fp32 before they call them. Experts that are modules of their own, in models that bring their own code, are
    called by ranks that have tokens for them, and these would wait for those that have none; stacked experts are one
    module already.
    """
    from deepspeed.utils import set_z3_leaf_modules

    from openrlhf.models.body import expert_blocks, has_separate_experts
    from openrlhf.models.routes import Router
    from openrlhf.models.tiles import TiledMLP

    kinds: set[type[nn.Module]] = set()
    for one in module.modules():
        if isinstance(one, TiledMLP):
            kinds.add(TiledMLP)
        elif isinstance(one, Router) and any(True for child in one.children() for _ in child.parameters()):
            kinds.add(type(one))
    if hasattr(module, "model") and has_separate_experts(module.model):
        _check_calls(module)
        kinds |= {type(block) for block in expert_blocks(module.model)}
    if kinds:
        set_z3_leaf_modules(module, list(kinds))


def _check_calls(module: nn.Module) -> None:
    """DeepSpeed has the gradients of such a module after its backward, in which it must have been called once, and
    whole. Torch breaks a second forward off, by gradient checkpointing, where it has what it needs, unless it is a
    reentrant one; and ranks would wait for each other."""
    experts = "--ds.zero_stage 3: the experts of this model are modules of their own"
    again = [getattr(part, "_gradient_checkpointing_func", None) for part in module.modules()]
    if any(getattr(how, "keywords", {}).get("use_reentrant") is False for how in again):
        raise ConfigError(
            f"{experts}, and its ranks would wait for each other in the backward pass: give "
            "--actor.gradient_checkpointing_reentrant too (--model.… outside of RL), or choose stage 2"
        )
    if not getattr(module, "packed", True):
        raise ConfigError(f"{experts}, and it reads one sequence at a time: choose stage 2")


def _register_head(module: nn.Module) -> None:
    """The policy multiplies with its head's weight without calling the head, so hooks there would not gather it."""
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    from openrlhf.models.policy import Policy, output_head

    if isinstance(module, Policy):
        for parameter in output_head(module.model).parameters():
            register_external_parameter(module, parameter)


def _one_optimizer(
    module: nn.Module, section: OptimizerSection, trained: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[str, tuple[str, ...]]]:
    """DeepSpeed takes one. With what it keeps for each parameter."""
    matrices, rest = divided(module, section, trained=trained)
    kinds = {name: STATE_KINDS[torch.optim.Muon] for name, _ in matrices}
    kinds |= {name: STATE_KINDS[torch.optim.AdamW] for name, _ in rest}
    adamw = make_adamw(rest, section, stands_for=trained) if rest else None
    if adamw is not None and not matrices:
        return adamw, kinds
    return ShardedMuon([p for _, p in matrices], adamw, **muon_arguments(section)), kinds


def _pieces(parameters: Mapping[str, nn.Parameter], *, whole: bool) -> list[Piece]:
    """The pieces of these parameters in this rank's flat tensor, where they lie in this order."""
    pieces, end = [], 0
    for name, parameter in parameters.items():
        shape, own = whole_shape(parameter), cast(Any, parameter)  # DeepSpeed has given it attributes
        if whole:
            piece = Piece(name, shape, start=0, at=0, count=shape.numel())
        elif hasattr(own, "ds_tensor"):  # stage 3: equal pieces, the last ones filled up with zeros
            size = own.ds_tensor.ds_numel
            start = min(dist.get_rank(own.ds_process_group) * size, shape.numel())
            piece = Piece(name, shape, start, at=end, count=min(size, shape.numel() - start))
            end += size
        elif (mapping := own._hp_mapping) is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            piece = Piece(name, shape, here.start, at=there.start, count=here.numel)
        else:
            piece = Piece(name, shape, start=0, at=0, count=0)
        pieces.append(piece)
    return pieces


def _with_sums(ds: BackendSection, dtype: torch.dtype) -> tuple[BackendSection, torch.dtype]:
    """What runs for weights of this dtype, and the dtype in which their gradients are summed."""
    sums = sum_dtype(ds, dtype)
    if ds.zero_stage == 0 and dtype != torch.float32:
        # Without ZeRO it cannot sum in fp32 what is computed in 16 bits.
        logger.info("--ds.zero_stage 0 with 16-bit weights runs as stage 1")
        ds = dataclasses.replace(ds, zero_stage=1)
    return ds, sums


@contextlib.contextmanager
def _gathered(parameters: Sequence[nn.Parameter], *, modifier_rank: int | None = None) -> Iterator[None]:
    """While open parameters of stage 3 are whole on every rank; what `modifier_rank` wrote into them stays."""
    import deepspeed

    shared_out = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if shared_out:
        with deepspeed.zero.GatheredParameters(shared_out, modifier_rank=modifier_rank):
            yield
    else:
        yield


def _together(named: Iterable[tuple[str, nn.Parameter]], *, max_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Neighbours of at most so many bytes in all; one that has more is alone. The same on every rank."""
    group: list[tuple[str, nn.Parameter]] = []
    used = 0
    for name, parameter in named:
        size = whole_shape(parameter).numel() * parameter.element_size()
        if group and used + size > max_bytes:
            yield group
            group, used = [], 0
        group.append((name, parameter))
        used += size
    if group:
        yield group


# ------------------------------------------------------------------------------------------- context parallelism


def _context(ds: BackendSection) -> Context | None:
    """The ranks that share a stream with this one; None: it has its own. Collective: every group is made by all."""
    if ds.ring_attn_size == 1:
        return None
    tensor, context = ds.tensor_parallel_size, ds.ring_attn_size
    own = None
    for first in range(0, dist.get_world_size(), tensor * context):
        for place in range(tensor):
            members = [first + place + i * tensor for i in range(context)]
            group = dist.new_group(members, timeout=DEADLINE)
            if dist.get_rank() in members:
                own = group
    assert isinstance(own, dist.ProcessGroup), "every rank is in one of the groups"
    return Context(exchange=ProcessExchange(own), head_stride=ds.ring_attn_head_stride, tensor=tensor)


if TYPE_CHECKING:
    from openrlhf.backends import base

    _: tuple[type[base.Backend], type[base.Distribution]] = (DeepSpeedBackend, Distribution)
