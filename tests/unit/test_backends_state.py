"""Numbers that are none: a step that meets one never happens, and what is damaged comes back bit by bit."""

import math

import pytest
import torch
from small_sections import optimizer
from torch import nn

from openrlhf.backends.state import (
    NotFiniteError,
    StateGuard,
    not_finite,
    some,
)
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.training import MuonSection

HARMED = 3
"""The step that meets the number."""


def harm_gradient(backend: TorchBackend) -> None:
    handle = backend.module.weight.register_hook(lambda gradient: (handle.remove(), gradient * math.nan)[1])


@torch.no_grad()
def harm_weights(backend: TorchBackend) -> None:
    backend.module.weight[1, 2] = math.nan


@torch.no_grad()
def harm_whole_weight(backend: TorchBackend) -> None:
    backend.module.weight.fill_(math.inf)


@torch.no_grad()
def harm_master(backend: TorchBackend) -> None:
    backend._masters["weight"][1, 2] = -math.inf


@torch.no_grad()
def harm_optimizer(backend: TorchBackend) -> None:
    for tensor in backend._optimizers.kept_for(backend._masters["weight"]).values():
        tensor.view(-1)[-1] = math.nan


@torch.no_grad()
def harm_whole_moment(backend: TorchBackend) -> None:
    kept = backend._optimizers.kept_for(backend._masters["weight"])
    next(tensor for kind, tensor in kept.items() if kind != "step").fill_(math.nan)


@torch.no_grad()
def harm_average(backend: TorchBackend) -> None:
    backend._average.of("weight")[0, 0] = math.nan


HARMS = [
    harm_gradient,
    harm_weights,
    harm_whole_weight,
    harm_master,
    harm_optimizer,
    harm_whole_moment,
    harm_average,
]


def make(dtype: torch.dtype, muon: MuonSection | None = None, *, max_norm: float = 1.0) -> TorchBackend:
    torch.manual_seed(0)
    settings = optimizer(lr=0.01, muon=muon, scheduler="linear", warmup_ratio=0.5, max_norm=max_norm)
    return TorchBackend(nn.Linear(4, 3).to(dtype), settings, total_steps=10, ema_beta=0.9)


def train(backend: TorchBackend, *, harm=None, leave_out: bool = False, size: float = 1.0) -> list[str]:
    """Six steps with gradients that differ; returns what was said of those left out."""
    said = []
    for step in range(6):
        if harm is not None and step == HARMED:
            harm(backend)
        module = backend.module
        loss = (module.weight.float() ** 2).sum() * (step + 1) + (module.bias.float() ** 3).sum()
        backend.backward(loss * size)
        if leave_out and step == HARMED:
            backend.drop_gradients()
            continue
        norm = backend.step()
        assert math.isfinite(norm) == (backend.left_out is None)
        if backend.left_out is not None:
            said.append(f"{step}: {backend.left_out.reason}")
    return said


def same(a: TorchBackend, b: TorchBackend) -> bool:
    left, right = dict(a.tensor_state()), dict(b.tensor_state())
    modules = zip(a.module.parameters(), b.module.parameters(), strict=True)
    return (
        left.keys() == right.keys()
        and all(torch.equal(left[n], right[n]) for n in left)
        and all(torch.equal(p, q) for p, q in modules)
    )


@pytest.mark.parametrize("muon", [None, MuonSection(lr=0.02)], ids=["adam", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_number_that_is_none_costs_one_step_and_nothing_else(harm, dtype, muon):
    """Weights, moments, average and schedule are, to the bit, those of a run in which that step was not taken."""
    harmed, without = make(dtype, muon), make(dtype, muon)
    said = train(harmed, harm=harm)
    train(without, leave_out=True)
    assert same(harmed, without)
    assert harmed.scalar_state() == without.scalar_state() == {"steps": 5}
    assert [line[0] for line in said] == [str(HARMED)]


def test_fp16_takes_it_for_an_overflow_and_halves_its_scale():
    harmed, without = make(torch.float16), make(torch.float16)
    said = train(harmed, harm=harm_gradient, size=2**-8)
    train(without, leave_out=True, size=2**-8)
    assert same(harmed, without)
    assert said == ["3: its gradient overflows in fp16: the loss scale is 32768 now"]
    assert harmed.left_out is None


def test_damaged_state_is_named():
    assert train(make(torch.float32), harm=harm_gradient) == ["3: its gradient is nan (of weight)"]
    assert train(make(torch.float32), harm=harm_optimizer) == [
        "3: step of weight were not finite and are again what they were; exp_avg of weight were not finite and are "
        "again what they were; exp_avg_sq of weight were not finite and are again what they were"
    ]
    assert train(make(torch.bfloat16), harm=harm_weights) == [
        "3: weights of weight were not finite and are rounded from fp32 again"
    ]


def test_a_gradient_that_is_not_clipped_is_looked_at_too():
    harmed, without = make(torch.float32, max_norm=0), make(torch.float32, max_norm=0)
    train(harmed, harm=harm_gradient)
    train(without, leave_out=True)
    assert same(harmed, without)


def test_before_the_first_step_weights_come_back_too():
    harmed, untouched = make(torch.float32), make(torch.float32)
    harm_weights(harmed)
    assert harmed.require_finite() == ["parameters of weight were not finite and are again what they were"]
    assert same(harmed, untouched)
    assert harmed.require_finite() == []


def test_moments_that_cannot_come_back_begin_anew():
    """Of both tensors at the same place: the XOR of two unknowns is known, and neither of them is."""
    backend = make(torch.float32)
    train(backend)
    for name in ("weight", "bias"):
        backend._optimizers.kept_for(backend._masters[name])["exp_avg"].fill_(math.nan)
    (said,) = backend.require_finite()
    assert said == "exp_avg of weight, bias were not finite and begin anew at 0 there"
    assert not not_finite(dict(backend.tensor_state()))


def test_weights_that_cannot_come_back_end_the_run():
    backend = make(torch.float32)
    train(backend)
    with torch.no_grad():
        for parameter in backend.module.parameters():
            parameter.fill_(math.nan)
    backend.backward(backend.module.weight.sum())
    with pytest.raises(NotFiniteError, match="parameters of weight, parameters of bias are not finite"):
        backend.step()


def test_weights_that_somebody_else_has_changed_are_not_guessed():
    """A parity of another state would give numbers, and wrong ones."""
    backend = make(torch.float32)
    with torch.no_grad():
        backend.module.weight[0, 0] += 1.0
        backend.module.bias[2] = math.nan
    with pytest.raises(NotFiniteError, match="parameters of bias"):
        backend.require_finite()


def test_a_state_that_is_not_finite_is_not_continued_from():
    backend = make(torch.float32)
    train(backend)
    for kind in ("parameters", "exp_avg_sq"):
        state = {name: tensor.clone() for name, tensor in backend.tensor_state()}
        state[f"{kind}/weight"][0, 0] = math.nan
        with pytest.raises(ValueError, match=f"its {kind} of weight are not finite"):
            make(torch.float32).load(backend.scalar_state(), state)


def test_frozen_weights_are_looked_at_before_anybody_gets_them():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))
    backend = TorchBackend(module, optimizer(lr=0.1))
    with torch.no_grad():
        module[1].bias[0] = math.inf
    with pytest.raises(NotFiniteError, match=r"weights are not finite: 1\.bias"):
        backend.require_finite()


# ------------------------------------------------------------------------------------------------------ parities


@pytest.mark.parametrize("places", [3, 4, 100])
def test_a_parity_shorter_than_its_tensors_brings_back_what_does_not_meet(monkeypatch, places):
    """10 and 3 numbers laid over each other in pieces of 3, 4 or 10: one number always comes back."""
    monkeypatch.setattr("openrlhf.backends.state.PLACES", places)
    state = {"parameters": {"a": torch.randn(2, 5), "b": torch.randn(3)}}
    before = {name: tensor.clone() for name, tensor in state["parameters"].items()}
    guard = StateGuard(lambda: state)
    guard.remember()
    state["parameters"]["a"][1, 3] = math.nan
    assert guard.mend(guard.damaged()).lost == []
    assert all(torch.equal(state["parameters"][name], before[name]) for name in before)
    assert len(guard.parities[0]) == min(places, 10)


def test_tensors_that_are_no_rows_in_memory_come_back():
    state = {"parameters": {"a": torch.randn(3, 4).T}}
    before = state["parameters"]["a"].clone()
    guard = StateGuard(lambda: state)
    guard.remember()
    state["parameters"]["a"][2, 1] = math.inf
    guard.mend(guard.damaged())
    assert torch.equal(state["parameters"]["a"], before)


def test_large_numbers_are_finite():
    """Their squares are not."""
    assert not_finite({"a": torch.tensor([3e38, -3e38]), "b": torch.tensor([1.0, math.nan]), "c": torch.zeros(0)}) == [
        "b"
    ]
    assert not_finite({"a": torch.tensor([1e38, -math.inf], dtype=torch.bfloat16), "i": torch.tensor([1])}) == ["a"]


def test_damaged_state_names_only_some():
    assert some(["a", "b"]) == "a, b"
    assert some("abcde") == "a, b, c and 2 more"
