"""Training state: repairs of numbers that are not finite, and checks of a saved state.

A gradient that is not finite is dropped. A weight or a moment that is not finite is worse: the next step would use it.
So every step checks them before it begins. What is damaged is restored from a parity, as RAID restores a failed disk:
all tensors of a kind (weights, first moments, …) are laid over each other, and the XOR of their bits is kept. The
parity takes the memory of one tensor, `PLACES` numbers at most, and not a second copy of the state. A number is
restored bit by bit if no other number at its place is damaged; a whole tensor is if it is the only damaged one of its
kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PLACES = 2**24
"""Most numbers of a parity: 64 MiB."""
MOST_NAMED = 3
"""Tensors in a message."""


class NotFiniteError(FloatingPointError):
    """Numbers are infinite or not a number, and the run cannot go on. The text says which."""


class LeftOut(NamedTuple):
    """Why an optimizer step was left out."""

    reason: str
    expected: bool = False
    """fp16 finds its loss scale in this way: no sign of trouble."""


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those with an infinite number or one that is none. One reduction over all, and one synchronisation."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), {})[name] = tensor.detach()
    found = set()
    for (device, dtype), named in groups.items():
        if device.type == "cpu":  # where a sum is ten times as fast as a largest value
            wide = torch.float32 if dtype == torch.float16 else None
            totals = [tensor.sum(dtype=wide) for tensor in named.values()]
        else:
            totals = list(torch._foreach_norm(list(named.values()), math.inf))
        if not bool(torch.stack(totals).isfinite().all()):
            # A sum overflows also where no number has.
            found |= {name for name, tensor in named.items() if not bool(tensor.isfinite().all())}
    return [name for name in tensors if name in found]


def some(names: Iterable[str]) -> str:
    """
    >>> some(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more


class Mended(NamedTuple):
    """How damage was repaired."""

    said: list[str]
    """The repair in words, for a message."""
    lost: list[str]
    """Weights that are not finite and could not be brought back."""


State = Mapping[str, Mapping[str, Tensor]]
"""Kind → name → tensor, fp32."""


class StateGuard:
    """Looks after the tensors that optimizer steps of this process read and write."""

    def __init__(self, state: Callable[[], State]) -> None:
        """`state`: as it is at the moment."""
        self._state = state
        self._parities: dict[str, Tensor] = {}

    @property
    def parities(self) -> list[Tensor]:
        return list(self._parities.values())

    @torch.no_grad()
    def remember(self) -> None:
        """The present state is the one to come back to."""
        state = self._state()
        self._parities = {
            kind: _folded(tensors.values(), into=self._parities.get(kind)) for kind, tensors in state.items() if tensors
        }

    def damaged(self) -> dict[str, list[str]]:
        """Kind → names of tensors that are not finite; empty if all are."""
        state = self._state()
        flat = {f"{kind}/{name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()}
        found: dict[str, list[str]] = {}
        for entry in not_finite(flat):
            kind, _, name = entry.partition("/")
            found.setdefault(kind, []).append(name)
        return found

    @torch.no_grad()
    def mend(self, damaged: Mapping[str, list[str]]) -> Mended:
        """Bring back what is damaged. Moments that do not come back begin anew at 0; weights are lost."""
        said, lost, state = [], [], self._state()
        for kind, names in damaged.items():
            tensors = state[kind]
            if (parity := self._parities.get(kind)) is not None:
                _restore(tensors, names, parity)
            gone = not_finite({name: tensors[name] for name in names})
            back = [name for name in names if name not in gone]
            if back:
                said.append(f"{kind} of {some(back)} were not finite and are again what they were")
            if gone and kind in (PARAMETERS, AVERAGE):
                lost += [f"{kind} of {name}" for name in gone]
            elif gone:
                for name in gone:
                    tensors[name].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                said.append(f"{kind} of {some(gone)} were not finite and begin anew at 0 there")
        return Mended(said, lost)


def _folded(tensors: Iterable[Tensor], into: Tensor | None = None) -> Tensor:
    """int32 [places]: the XOR of all bits at each place. Tensors are laid over each other in pieces of that length."""
    listed = list(tensors)
    places = min(max(tensor.numel() for tensor in listed), PLACES)
    if into is None or len(into) != places or into.device != listed[0].device:
        into = torch.zeros(places, dtype=torch.int32, device=listed[0].device)
    else:
        into.zero_()
    for tensor in listed:
        for piece in _bits(tensor).to(into.device).split(places):
            into[: len(piece)].bitwise_xor_(piece)
    return into


def _restore(tensors: Mapping[str, Tensor], names: Iterable[str], parity: Tensor) -> None:
    """Write back the numbers that a parity gives; leave those that it cannot."""
    # At a place with one damaged number: its bits as they are, XOR as they were. Everywhere else 0.
    difference = _folded(tensors.values()).bitwise_xor_(parity)
    places = len(parity)
    damage = torch.zeros(places, dtype=torch.int32, device=parity.device)
    for name in names:
        for piece in tensors[name].detach().flatten().to(parity.device).split(places):
            damage[: len(piece)] += ~piece.isfinite()
    if bool(difference[damage == 0].any()):
        return  # something else has changed since: the parity is not that of this state
    for name in names:
        tensor = tensors[name]
        bits = _bits(tensor).to(parity.device).clone()
        for piece in bits.split(places):
            single = ~piece.view(torch.float32).isfinite() & (damage[: len(piece)] == 1)
            piece[single] = piece[single].bitwise_xor(difference[: len(piece)][single])
        tensor.copy_(bits.view(torch.float32).view(tensor.shape))


def _bits(tensor: Tensor) -> Tensor:
    """int32 [n]"""
    return tensor.detach().reshape(-1).view(torch.int32)


PARAMETERS = "parameters"
AVERAGE = "average"


def require_names(saved: Iterable[str], kinds: Mapping[str, Sequence[str]]) -> None:
    """ValueError if `saved` is of other parameters or of other optimizers.

    `kinds`: per trained parameter, what its optimizer keeps. It has all of that or, never updated, nothing.
    """
    found: dict[str, set[str]] = {}
    for name in saved:
        kind, _, parameter = name.partition("/")
        found.setdefault(parameter, set()).add(kind)
    if missing := [name for name in kinds if PARAMETERS not in found.get(name, ())]:
        raise ValueError(f"the saved state has no {_some(missing)}, which is trained now")
    if others := [name for name in found if name not in kinds]:
        raise ValueError(f"the saved state has {_some(others)}, which is not trained now")
    for name, wanted in kinds.items():
        kept = found[name] - {PARAMETERS, AVERAGE}
        if kept and kept != set(wanted):
            raise ValueError(
                f"the saved state was trained with another optimizer: for {name} it has {', '.join(sorted(kept))}, "
                f"and this run's optimizer keeps {', '.join(sorted(wanted))}"
            )


def whole(saved: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """A tensor by its name; ValueError if it has another shape."""
    tensor = saved[name]
    if tensor.shape != shape:
        raise ValueError(f"in the saved state {name} has shape {tuple(tensor.shape)}, in this run {tuple(shape)}")
    return tensor


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
