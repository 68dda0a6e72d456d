"""Muon on flat pieces takes the steps that torch's takes on whole matrices. Over several ranks: `test_deepspeed.py`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from openrlhf.backends.sharded_muon import Piece, ShardedMuon, Sharing, orthogonal_step

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "ns_steps": 5}
CPU = torch.device("cpu")
TALL, WIDE = torch.Size([6, 3]), torch.Size([4, 5])


@pytest.fixture
def alone():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in (TALL, WIDE)]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in (TALL, WIDE)]


def torchs(**changes) -> list[nn.Parameter]:
    """After four steps of torch's own, and two of AdamW for a vector."""
    own = matrices()
    optimizer = torch.optim.Muon(own, adjust_lr_fn="original", **{**SETTINGS, **changes})
    for step in range(4):
        for parameter, gradient in zip(own, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return own


@pytest.mark.parametrize("changes", [{}, {"nesterov": False}, {"ns_steps": 3}, {"momentum": 0.5}, {"weight_decay": 0}])
def test_flat_pieces_move_as_whole_matrices_do(alone, changes):
    """Both matrices in one flat tensor of 2 + 18 + 1 + 20 elements, what lies between them belonging to nobody."""
    flat = nn.Parameter(torch.zeros(41))
    at = (2, 21)
    with torch.no_grad():
        for start, matrix in zip(at, matrices(), strict=True):
            flat[start : start + matrix.numel()] = matrix.view(-1)
    optimizer = ShardedMuon([flat], None, **{**SETTINGS, **changes})
    pieces = [Piece("tall", TALL, 0, at[0], 18), Piece("wide", WIDE, 0, at[1], 20)]
    optimizer.sharing = Sharing({flat: pieces}, alone, CPU)
    for step in range(4):
        flat.grad = torch.zeros(41)
        for start, gradient in zip(at, gradients(step), strict=True):
            flat.grad[start : start + gradient.numel()] = gradient.view(-1)
        optimizer.step()
    for start, expected in zip(at, torchs(**changes), strict=True):
        measured = flat[start : start + expected.numel()].view(expected.shape)
        assert torch.allclose(measured, expected, atol=1e-6)


def test_whole_matrices_need_no_group():
    own = matrices()
    optimizer = ShardedMuon(own, None, **SETTINGS)
    optimizer.sharing = Sharing({m: [Piece("m", m.shape, 0, 0, m.numel())] for m in own}, None, CPU)
    for step in range(4):
        for parameter, gradient in zip(own, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for measured, expected in zip(own, torchs(), strict=True):
        assert torch.allclose(measured, expected, atol=1e-6)


def test_sharded_muon_leaves_other_parameters_to_adamw():
    """Its groups are of one optimizer now: a rate that is set there counts."""
    vectors = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    adamw = torch.optim.AdamW([vectors[0]], lr=0.1)
    optimizer = ShardedMuon(matrices()[:1], torch.optim.AdamW([vectors[1]], lr=0.7), **SETTINGS)
    optimizer.param_groups[1]["lr"] = 0.1
    for step in range(3):
        for vector in vectors:
            vector.grad = torch.full((3,), float(step + 1))
        adamw.step()
        optimizer.step()
    assert torch.equal(vectors[0], vectors[1])
    assert optimizer.state[vectors[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_a_step_is_orthogonal_and_as_long_as_its_shape_says():
    """Singular values of O are within about 0.7 and 1.2 after five iterations; of a tall matrix √(rows/columns) more."""
    for shape, scale in ((TALL, 2.0**0.5), (WIDE, 1.0)):
        torch.manual_seed(1)
        values = torch.linalg.svdvals(orthogonal_step(torch.randn(shape), ns_steps=5))
        assert ((values > 0.6 * scale) & (values < 1.3 * scale)).all(), values


def test_a_step_does_not_depend_on_the_size_of_the_gradient():
    torch.manual_seed(1)
    direction = torch.randn(TALL)
    assert torch.allclose(
        orthogonal_step(direction, ns_steps=5), orthogonal_step(direction * 1024, ns_steps=5), atol=1e-2
    )
