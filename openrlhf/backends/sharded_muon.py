"""Muon for matrices that ranks share out: the same steps as torch's, which wants each matrix whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True)
class Piece:
    """The piece of a matrix in a rank's flat tensor."""

    matrix: str
    shape: torch.Size
    """The shape of the matrix; under tensor parallelism that of this rank's part of it."""
    start: int
    """The first element of the matrix that is here …"""
    at: int
    """… and where."""
    count: int
    """0: nothing of it is here."""


class Sharing(NamedTuple):
    """How ranks share out what an optimizer updates."""

    pieces: Mapping[Tensor, Sequence[Piece]]
    """The pieces of every tensor that is updated; every rank has the same matrices in the same order."""
    group: dist.ProcessGroup | None
    """The ranks among which pieces are; None: each has all of them."""
    device: torch.device
    """The device on which ranks exchange pieces."""
    join: Callable[[str, Tensor], Tensor] = lambda name, part: part
    part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole
    """How tensor parallelism splits a matrix, and how to undo it."""


class ShardedMuon(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer, for libraries that take one and give it flat pieces of many parameters.

    Momentum is kept where a piece is. In every step each rank puts some of the matrices together, orthogonalises them
    and gives the result to the others. Collective.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        adamw: torch.optim.AdamW | None,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
    ) -> None:
        """`adamw` updates the rest: its groups become this one's."""
        self._adamw = adamw
        self.sharing: Sharing | None = None
        settings = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        muon = {"params": list(matrices), "lr": lr, **settings}
        super().__init__([muon, *(adamw.param_groups if adamw else [])], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody here gives it a closure
        for group in self.param_groups:
            if "ns_steps" in group:
                for master in group["params"]:
                    if master.grad is not None:
                        self._update(master, group)
        if self._adamw is not None:
            self._adamw.param_groups = [group for group in self.param_groups if "ns_steps" not in group]
            self._adamw.state = self.state
            self._adamw.step()

    def _update(self, master: Tensor, group: Mapping[str, Any]) -> None:
        gradient = master.grad
        assert gradient is not None
        momentum = self.state[master].setdefault(MOMENTUM, torch.zeros_like(master))
        momentum.lerp_(gradient, 1.0 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        master.mul_(1.0 - group["lr"] * group["weight_decay"])
        weights = master.view(-1)
        for piece, step in self._whole_steps(master, direction.view(-1), ns_steps=group["ns_steps"]):
            own = step.view(-1)[piece.start : piece.start + piece.count].to(weights.device)
            weights[piece.at : piece.at + piece.count].add_(own, alpha=group["lr"])

    def _whole_steps(self, master: Tensor, direction: Tensor, *, ns_steps: int) -> Iterator[tuple[Piece, Tensor]]:
        sharing = self.sharing
        if sharing is None:
            raise RuntimeError("nobody has said how the matrices are shared out")
        ranks = 1 if sharing.group is None else dist.get_world_size(sharing.group)
        me = 0 if sharing.group is None else dist.get_rank(sharing.group)
        pieces = sharing.pieces[master]
        for first in range(0, len(pieces), ranks):
            turn = pieces[first : first + ranks]
            matrices = [_spread(piece, direction, sharing.device) for piece in turn]
            if sharing.group is not None:
                for owner, matrix in enumerate(matrices):
                    dist.reduce(matrix, group=sharing.group, group_dst=owner)
            if me < len(turn):
                name = turn[me].matrix
                step = orthogonal_step(sharing.join(name, matrices[me]), ns_steps=ns_steps)
                matrices[me] = sharing.part(name, step).contiguous()
            if sharing.group is not None:
                for owner, matrix in enumerate(matrices):
                    dist.broadcast(matrix, group=sharing.group, group_src=owner)
            yield from zip(turn, matrices, strict=True)


def orthogonal_step(direction: Tensor, *, ns_steps: int) -> Tensor:
    """−√max(1, rows / columns) · O for the matrix D ≈ O S: the step of torch's Muon at rate 1, without momentum."""
    moved = nn.Parameter(torch.zeros_like(direction))
    moved.grad = direction
    settings: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": "original"}
    torch.optim.Muon([moved], lr=1.0, ns_steps=ns_steps, **settings).step()
    return moved.detach()


def _spread(piece: Piece, flat: Tensor, device: torch.device) -> Tensor:
    """A piece in its place in the matrix, with zeros around it: those of all ranks add up to the matrix."""
    matrix = torch.zeros(piece.shape, dtype=torch.float32, device=device)
    own = flat[piece.at : piece.at + piece.count]
    matrix.view(-1)[piece.start : piece.start + piece.count] = own.to(device, torch.float32)
    return matrix
