"""MLPs over a long sequence, a tile of tokens at a time, each computed again in the backward pass.

Micro-batches are cut as small as memory wants them, but a sequence cannot be cut. Its MLPs hold the most: in a layer of
Qwen2.5-1.5B four times 8,960 numbers per token, beside some ten times 1,536 of everything else. In tiles they hold
their input, and the rest for one tile; the gradient is the same, for one more forward of the MLP. So it is done only
where a sequence is long: from `LONG` tokens on, which without it take 2 GB in one layer of a 7B model and 33 GB in all
layers of that of 1.5B.

The number of tiles differs between ranks, and what they do together must not. So tiles are made inside one call of the
MLP: ZeRO-3 gathers the whole MLP around that call (`backends.deepspeed`), and each parameter gets its gradient once.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from openrlhf.models.body import decoder_layers

LONG = 16_384
"""Tokens of a sequence on this rank from which its MLPs are computed in tiles."""
TILE = 4_096
"""Tokens of a tile: matrices as efficient as ever, and 0.3 GB in a layer of 1.5B's."""


def tile_mlps(model: Any, *, long: int = LONG, tile: int = TILE) -> int:
    """Let the model's dense MLPs, and those that all tokens of a mixture of experts share, work in tiles; returns how
    many there are.

    An MLP is what it does: matrices and activations, the same for a token whatever its neighbours. What of it cannot be
    seen, because its weights are shared out over ranks, is taken for granted.
    """
    found, seen = 0, {}
    for layer in decoder_layers(model) or ():
        own = [module for module in layer.modules() if _looks_like_one(module)]
        for mlp in own:
            if type(mlp) not in seen:
                seen[type(mlp)] = _is_per_token(mlp)
            if seen[type(mlp)]:
                _make_tiled(mlp, tile)
                found += 1
        if own:
            layer._compiled_call_impl = LayerCall(layer, long)
    return found


class _Stream(threading.local):
    long = False


_STREAM = _Stream()
"""What the layer that is running in this thread was called with."""


class LayerCall:
    """A call of a decoder layer, of which its MLPs know whether it has a long sequence.

    It stands where torch has the compiled call of a module, so that a second forward, by gradient checkpointing, goes
    this way too.
    """

    def __init__(self, layer: nn.Module, long: int) -> None:
        self.run: Callable[..., Any] = layer._compiled_call_impl or layer._call_impl
        self._long = long

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        plan = options.get("attention_plan")
        longest = arguments[0].shape[-2] if plan is None else getattr(plan, "longest", 0)  # 0: a step of decoding
        before, _STREAM.long = _STREAM.long, longest >= self._long
        try:
            return self.run(*arguments, **options)
        finally:
            _STREAM.long = before


class TiledMLP(nn.Module):
    """What is put before the class of an MLP. A class, and not a forward of its own for each, because compiled layers
    share their code."""

    _tile: int

    def forward(self, hidden: Tensor) -> Tensor:
        if _STREAM.long:
            return _in_tiles(self, hidden)
        return super().forward(hidden)

    def untiled(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def hide_from_compiler() -> None:
    """Compiled layers leave tiles out: a version for each number of tiles would be compiled."""
    global _in_tiles
    _in_tiles = torch.compiler.disable(_in_tiles)


def _make_tiled(mlp: nn.Module, tile: int) -> None:
    plain = type(mlp)
    if plain not in _CLASSES:
        # The same name: others know modules by it.
        _CLASSES[plain] = type(plain.__name__, (TiledMLP, plain), {"__module__": plain.__module__})
    mlp.__class__ = _CLASSES[plain]
    cast(TiledMLP, mlp)._tile = tile


_CLASSES: dict[type, type] = {}


def _looks_like_one(module: nn.Module) -> bool:
    """Two matrices or three, and activations without parameters, in the class's own forward."""
    if isinstance(module, TiledMLP) or not type(module).__name__.endswith("MLP") or "forward" in vars(module):
        return False
    children = list(module.children())
    matrices = [child for child in children if isinstance(child, nn.Linear)]
    others = [child for child in children if not isinstance(child, nn.Linear)]
    rest = [*module.parameters(recurse=False), *(p for child in others for p in child.parameters())]
    return len(matrices) in (2, 3) and not rest


@torch.no_grad()
def _is_per_token(mlp: nn.Module) -> bool:
    """Whether each of three random tokens gets alone what it gets beside the others."""
    weights = list(mlp.parameters())
    if any(weight.is_meta or not weight.numel() or not weight.is_floating_point() for weight in weights):
        return True
    width = next(child.in_features for child in mlp.children() if isinstance(child, nn.Linear))
    dtype, device = weights[0].dtype, weights[0].device
    tokens_3D = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    together, alone = mlp(tokens_3D), torch.cat([mlp(token_D[None]) for token_D in tokens_3D])
    if together.shape != tokens_3D.shape:
        return False
    return bool((together - alone).float().norm() <= 0.02 * alone.float().norm())


def _in_tiles(mlp: TiledMLP, hidden: Tensor) -> Tensor:
    hidden_TD = hidden.flatten(0, -2)
    if len(hidden_TD) <= mlp._tile:
        return mlp.untiled(hidden)
    if torch.is_grad_enabled():
        trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
        output_TD = _Tiles.apply(mlp, hidden_TD, *trained)
    else:
        output_TD = torch.cat([mlp.untiled(part) for part in hidden_TD.split(mlp._tile)])
    return output_TD.view(hidden.shape)


class _Tiles(torch.autograd.Function):
    """Parameters are arguments, so that their gradients leave once, summed in fp32, and hooks on them see one."""

    @staticmethod
    def forward(ctx: Any, mlp: TiledMLP, hidden_TD: Tensor, *trained: nn.Parameter) -> Tensor:
        ctx.mlp = mlp
        ctx.randomness = _Randomness(hidden_TD) if _is_random(mlp) else None
        ctx.save_for_backward(hidden_TD)
        return torch.cat([mlp.untiled(part) for part in hidden_TD.split(mlp._tile)])

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TD,), mlp = ctx.saved_tensors, ctx.mlp
        wanted = ctx.needs_input_grad[1]
        trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
        grads = []
        with ctx.randomness.again() if ctx.randomness else contextlib.nullcontext():
            for part, grad in zip(hidden_TD.split(mlp._tile), grad_TD.split(mlp._tile), strict=True):
                part = part.detach().requires_grad_(wanted)
                with torch.enable_grad():
                    output = mlp.untiled(part)
                inputs = [part, *trained] if wanted else trained
                found = list(torch.autograd.grad(output, inputs, grad, allow_unused=True, materialize_grads=True))
                if wanted:
                    grads.append(found.pop(0))
                torch._foreach_add_(sums, [one.float() for one in found])
        own = (total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True))
        return None, torch.cat(grads) if wanted else None, *own


def _is_random(mlp: nn.Module) -> bool:
    """An adapter may have dropout."""
    return any(isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in mlp.modules())


class _Randomness:
    """The state of the random generators, for drawing the same numbers again."""

    def __init__(self, tensor: Tensor) -> None:
        self._own = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._own)
            set_device_states(self._devices, self._states)
            yield
