"""Plain torch training: fp32 masters, gradients that add up, clipping, the schedule at work, state, averages."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers as hf
from small_sections import optimizer
from torch import nn

from openrlhf.backends.optimizer import LossScale
from openrlhf.backends.ranks import ALONE
from openrlhf.backends.torch import Distribution, TorchBackend
from openrlhf.checkpoint.export import export_policy
from openrlhf.config.backend import BackendSection
from openrlhf.config.training import MuonSection
from openrlhf.models.policy import Policy


def linear(dtype=torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).to(dtype)


def copied_state(backend: TorchBackend) -> tuple[dict, dict]:
    """As a file keeps it: nothing is shared with the backend, and numbers are JSON."""
    return json.loads(json.dumps(backend.scalar_state())), {
        name: tensor.clone() for name, tensor in backend.tensor_state()
    }


def descend(backend: TorchBackend) -> TorchBackend:
    backend.backward(sum((p.float() ** 2).sum() for p in backend.module.parameters()))
    backend.step()
    return backend


def test_first_adam_step_is_the_learning_rate_in_the_gradients_direction():
    """At step 1 Adam's bias-corrected update is lr · g/|g| per element (eps aside)."""
    module = linear()
    before = module.weight.detach().clone()
    backend = TorchBackend(module, optimizer(lr=0.1, max_norm=0))
    backend.backward((module.weight * torch.tensor([[1.0, -2.0, 3.0, -4.0]])).sum())
    backend.step()
    assert torch.allclose(module.weight, before - 0.1 * torch.tensor([1.0, -1.0, 1.0, -1.0]), atol=1e-6)


def test_the_reported_norm_is_before_clipping():
    """Gradient 3, 4 on two weights: norm 5, whatever the clip."""
    for max_norm in (0, 1.0):
        module = nn.Linear(2, 1, bias=False)
        backend = TorchBackend(module, optimizer(lr=0.0, max_norm=max_norm))
        backend.backward((module.weight * torch.tensor([[3.0, 4.0]])).sum())
        assert backend.step() == pytest.approx(5.0)


def test_micro_batches_add_up_in_fp32_under_bf16():
    """1 + 256 · 2^-9 = 1.5; in bf16 each 2^-9 added to 1 is lost and the sum stays 1."""
    module = linear(torch.bfloat16)
    backend = TorchBackend(module, optimizer(lr=0.0, max_norm=0))
    backend.backward(module.bias.sum())
    for _ in range(256):
        backend.backward(module.bias.sum() * 2**-9)
    assert backend.step() == pytest.approx(1.5 * math.sqrt(3), rel=1e-6)


def test_sums_in_16_bits_are_kept_where_autograd_leaves_them():
    """256 + 1 + 1: the number after 256 is 258 in bf16, so each 1 is lost; fp16 has 257. The fp32 gradient is there in
    the step alone."""
    for dtype, in_16_bits, total in [
        (torch.bfloat16, True, 256.0),
        (torch.bfloat16, False, 258.0),
        (torch.float16, True, 258.0),
        (torch.float32, True, 258.0),
    ]:
        module = linear(dtype)
        backend = TorchBackend(module, optimizer(lr=0.0, max_norm=0), sums_in_16_bits=in_16_bits)
        if dtype == torch.float16:
            backend._scale.value = 16.0  # 2^16 · 256 would not fit
        for gradient in (256.0, 1.0, 1.0):
            backend.backward(module.bias.sum() * gradient)
        if dtype == torch.bfloat16:
            assert (module.bias.grad is None) is not in_16_bits
            assert (backend._masters["bias"].grad is None) is in_16_bits
        assert backend.step() == pytest.approx(total * math.sqrt(3), rel=1e-6)
        backend.backward(module.bias.sum() * 256.0)
        backend.drop_gradients()
        backend.backward(module.bias.sum())
        assert backend.step() == pytest.approx(math.sqrt(3)), "a sum that was dropped leaves nothing behind"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_one_micro_batch_steps_alike_in_16_bits_and_fp32(dtype):
    """With clipping, weight decay and Muon: nothing but the sum is different."""
    first, second = (
        TorchBackend(
            linear(dtype), optimizer(lr=0.1, weight_decay=0.1, muon=MuonSection(lr=0.02)), sums_in_16_bits=in_16_bits
        )
        for in_16_bits in (False, True)
    )
    for _ in range(3):
        descend(first), descend(second)
    numbers, tensors = copied_state(second)
    assert numbers == copied_state(first)[0]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in copied_state(first)[1].items())


def test_a_sum_in_fp16_that_overflows_costs_a_step_and_half_the_scale():
    """Each 2^15 · 1 fits in fp16, whose largest number is 65504; two of them do not."""
    module = linear(torch.float16)
    backend = TorchBackend(module, optimizer(lr=0.1), sums_in_16_bits=True)
    backend._scale.value = 2.0**15
    for _ in range(2):
        backend.backward(module.bias.sum())
    assert not math.isfinite(backend.step())
    assert backend.left_out.expected
    assert backend.scalar_state()["loss_scale"] == 2.0**14
    for _ in range(2):
        backend.backward(module.bias.sum())
    assert backend.step() == pytest.approx(2 * math.sqrt(3))


def test_the_flag_says_how_gradients_are_summed(caplog):
    caplog.set_level("INFO")
    for flag, dtype, total in [
        (None, torch.bfloat16, 258.0),
        ("fp32", torch.bfloat16, 258.0),
        ("bf16", torch.bfloat16, 256.0),
        ("bf16", torch.float32, 258.0),
    ]:
        module = linear(dtype)
        distribution = Distribution(ALONE, BackendSection(grad_accum_dtype=flag))
        backend = distribution.train(module, optimizer(lr=0.0, max_norm=0), total_steps=1)
        for gradient in (256.0, 1.0, 1.0):
            backend.backward(module.bias.sum() * gradient)
        assert backend.step() == pytest.approx(total * math.sqrt(3), rel=1e-6)
    assert caplog.messages == ["--ds.grad_accum_dtype bf16 is not used: trained weights are fp32 here"]


def test_small_updates_survive_in_the_master_under_bf16():
    """1e-4 a step is below bf16's resolution at 1; after 100 steps the module must have moved by 1e-2."""
    module = linear(torch.bfloat16)
    with torch.no_grad():
        module.bias.fill_(1.0)
    backend = TorchBackend(module, optimizer(lr=1e-4, max_norm=0))
    for _ in range(100):
        backend.backward(module.bias.sum())
        backend.step()
    assert module.bias.float().tolist() == pytest.approx([0.99] * 3, abs=2e-3)
    assert module.bias.dtype == torch.bfloat16


def test_weight_decay_spares_vectors():
    module = linear()
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    backend = TorchBackend(module, optimizer(lr=0.1, weight_decay=0.5, max_norm=0))
    backend.backward((module.weight.sum() + module.bias.sum()) * 0)
    backend.step()
    assert torch.allclose(module.weight, weight * 0.95)
    assert torch.equal(module.bias, bias)


def test_torch_backend_steps_by_the_scheduled_rate():
    """Under a constant gradient g Adam's update is lr·g/|g|, so weights move by exactly the rates, here of `linear`
    with 2 of 5 steps of warm-up: ½, 1, 1, ⅔, ⅓."""
    module = linear()
    backend = TorchBackend(module, optimizer(lr=0.1, max_norm=0, scheduler="linear", warmup_ratio=0.4), total_steps=5)
    for factor in (1 / 2, 1.0, 1.0, 2 / 3, 1 / 3):
        before = module.bias.detach().clone()
        assert backend.learning_rate == pytest.approx(0.1 * factor)
        backend.backward(module.bias.sum())
        backend.step()
        assert torch.allclose(before - module.bias, torch.full((3,), 0.1 * factor), atol=1e-6)
    assert backend.learning_rate == 0.0


@pytest.mark.parametrize("muon", [None, MuonSection(lr=0.02)], ids=["adam", "muon"])
@pytest.mark.parametrize("ema_beta", [None, 0.9], ids=["live", "ema"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_continues_bit_for_bit(dtype, ema_beta, muon):
    def advance(backend: TorchBackend, steps: range) -> None:
        for step in steps:
            loss = (backend.module.weight.float() ** 2).sum() + (backend.module.bias.float() ** 2).sum()
            backend.backward(loss * (step + 1))
            backend.step()

    def saved(backend: TorchBackend) -> tuple[torch.Tensor, torch.Tensor]:
        with backend.weights_to_save():
            return backend.module.weight.detach().clone(), backend.module.bias.detach().clone()

    settings = optimizer(lr=0.01, muon=muon, scheduler="cosine")
    straight = TorchBackend(linear(dtype), settings, total_steps=10, ema_beta=ema_beta)
    advance(straight, range(6))
    first = TorchBackend(linear(dtype), settings, total_steps=10, ema_beta=ema_beta)
    advance(first, range(3))
    second = TorchBackend(nn.Linear(4, 3).to(dtype), settings, total_steps=10, ema_beta=ema_beta)
    second.load(*copied_state(first))
    advance(second, range(3, 6))
    assert torch.equal(second.module.weight, straight.module.weight)
    assert torch.equal(second.module.bias, straight.module.bias)
    assert all(torch.equal(a, b) for a, b in zip(saved(second), saved(straight), strict=True))
    assert second.learning_rate == straight.learning_rate


# ------------------------------------------------------------------------------------------------------- fp16


def push(backend: TorchBackend, gradient: float) -> float:
    """One step with this gradient at every bias, which autograd rounds to the module's dtype."""
    backend.backward((backend.module.bias.float() * gradient).sum())
    return backend.step()


def test_gradients_below_fp16_are_seen():
    """2^-30 rounds to 0 in fp16, whose smallest number is 2^-24; 2^16 times as much does not. Adam's first step is the
    learning rate whatever the gradient's size, so a lost one would leave the bias where it is."""
    module = linear(torch.float16)
    before = module.bias.detach().clone()
    backend = TorchBackend(module, optimizer(lr=0.5, max_norm=0, eps=1e-20))
    assert push(backend, 2**-30) == pytest.approx(2**-30 * math.sqrt(3))
    assert torch.allclose(before - module.bias, torch.full((3,), 0.5, dtype=torch.float16), atol=1e-2)


def test_a_gradient_that_overflows_costs_a_step_and_half_the_scale():
    """2 · 2^16 is beyond fp16's 65504, and so is 2 · 2^15; 2 · 2^14 is not. Nothing moves before: neither weights, nor
    the schedule, nor the average."""
    module = linear(torch.float16)
    backend = TorchBackend(module, optimizer(lr=0.1, max_norm=0, scheduler="linear"), total_steps=4, ema_beta=0.5)
    before, (_, tensors) = module.bias.detach().clone(), copied_state(backend)
    for left in (2.0**15, 2.0**14):
        assert not math.isfinite(push(backend, 2.0))
        assert backend.scalar_state() == {"steps": 0, "loss_scale": left, "good_steps": 0}
        assert torch.equal(module.bias, before)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in backend.tensor_state())
        assert backend.learning_rate == 0.1
    assert push(backend, 2.0) == pytest.approx(2.0 * math.sqrt(3))
    assert backend.scalar_state() == {"steps": 1, "loss_scale": 2.0**14, "good_steps": 1}
    assert backend.learning_rate == pytest.approx(0.075)
    assert not torch.equal(module.bias, before)


def test_clipping_sees_gradients_as_they_are():
    """Norm 0.6, below the clip of 1: nothing is clipped, though the scaled norm is 0.6 · 2^16."""
    weights = []
    for dtype in (torch.float16, torch.float32):
        module = linear(torch.float16).to(dtype)
        backend = TorchBackend(module, optimizer(lr=0.1, max_norm=1.0))
        for gradient in (0.6 / math.sqrt(3), 0.3 / math.sqrt(3)):
            assert push(backend, gradient) == pytest.approx(gradient * math.sqrt(3), rel=1e-3)
        weights.append(dict(backend.tensor_state())["parameters/bias"])
    assert torch.allclose(*weights, atol=1e-4)


def test_the_scale_doubles_after_many_good_steps_in_a_row():
    scale = LossScale()
    for _ in range(1_999):
        scale.after_good_step()
    scale.after_overflow()
    for _ in range(1_999):
        scale.after_good_step()
    assert scale.scalar_state() == {"loss_scale": 2.0**15, "good_steps": 1_999}
    scale.after_good_step()
    assert scale.scalar_state() == {"loss_scale": 2.0**16, "good_steps": 0}


def test_the_scale_goes_on_where_it_was():
    first = TorchBackend(linear(torch.float16), optimizer(lr=0.1))
    push(first, 2.0)
    push(first, 0.1)
    second = TorchBackend(linear(torch.float16), optimizer(lr=0.1))
    second.load(*copied_state(first))
    assert second.scalar_state() == first.scalar_state() == {"steps": 1, "loss_scale": 2.0**15, "good_steps": 1}


def test_a_state_in_another_dtype_begins_with_a_scale_of_its_own():
    half, full = (TorchBackend(linear(dtype), optimizer(lr=0.1)) for dtype in (torch.float16, torch.float32))
    push(half, 2.0)
    full.load(*copied_state(half))
    assert full.scalar_state() == {"steps": 0}
    half.load(*copied_state(full))
    assert half.scalar_state() == {"steps": 0, "loss_scale": 2.0**16, "good_steps": 0}


def test_frozen_weights_in_fp16_have_their_gradients_scaled_too():
    """An adapter in fp32 behind which fp16 layers are frozen: what flows through them could vanish."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).to(torch.float16).requires_grad_(False))
    assert "loss_scale" in TorchBackend(module, optimizer(lr=0.1)).scalar_state()


def test_gradients_that_are_never_finite_end_the_run():
    backend = TorchBackend(linear(torch.float16), optimizer(lr=0.1))
    for _ in range(16):
        push(backend, math.nan)
    with pytest.raises(FloatingPointError, match=r"--ds.param_dtype bf16"):
        push(backend, math.nan)


# ------------------------------------------------------------------------------------------------------ state

ADAMW, MUON = optimizer(lr=0.1), optimizer(lr=0.1, muon=MuonSection(lr=0.1))


def test_a_state_names_each_tensor_by_its_kind_and_parameter():
    """Muon has the matrix, AdamW the bias; all in fp32, whatever the module computes in."""
    backend = descend(TorchBackend(linear(torch.bfloat16), MUON, ema_beta=0.9))
    tensors = dict(backend.tensor_state())
    kinds = {"weight": {"momentum_buffer"}, "bias": {"step", "exp_avg", "exp_avg_sq"}}
    assert set(tensors) == {f"{k}/{name}" for name in kinds for k in kinds[name] | {"parameters", "average"}}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert backend.scalar_state() == {"steps": 1}


def test_before_its_first_step_a_state_is_its_parameters():
    backend = TorchBackend(linear(), ADAMW)
    assert [name for name, _ in backend.tensor_state()] == ["parameters/weight", "parameters/bias"]


def test_a_state_from_before_the_first_step_forgets_what_came_after():
    """Loaded into a backend that has gone on: its moments must go too."""
    state = copied_state(TorchBackend(linear(), ADAMW))
    backend = descend(TorchBackend(linear(), ADAMW))
    backend.load(*state)
    descend(backend)
    assert torch.equal(backend.module.weight, descend(TorchBackend(linear(), ADAMW)).module.weight)


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (nn.Linear(5, 3), ADAMW, r"parameters/weight has shape \(3, 4\), in this run \(3, 5\)"),
        (nn.Linear(4, 3, bias=False), ADAMW, "has bias, which is not trained now"),
        (nn.Sequential(nn.Linear(4, 3)), ADAMW, "no 0.weight and 1 more, which is trained now"),
        (nn.Linear(4, 3), MUON, "another optimizer: for weight it has exp_avg"),
    ],
    ids=["shape", "less", "more", "optimizer"],
)
def test_a_state_of_something_else_is_refused(module, settings, said):
    state = copied_state(descend(TorchBackend(linear(), ADAMW)))
    with pytest.raises(ValueError, match=said):
        TorchBackend(module, settings).load(*state)


def descend_steps(backend: TorchBackend, steps: int) -> None:
    """Under a constant gradient of ones Adam moves every weight down by the learning rate."""
    for _ in range(steps):
        backend.backward(sum(p.sum() for p in backend.module.parameters() if p.requires_grad))
        backend.step()


def to_save(backend: TorchBackend) -> dict[str, torch.Tensor]:
    with backend.weights_to_save():
        return {name: p.detach().clone() for name, p in backend.module.named_parameters()}


def ones(dtype=torch.float32) -> nn.Linear:
    module = nn.Linear(2, 3).to(dtype)
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(1.0)
    return module


def test_closed_form_after_three_steps():
    """θ_k = 1 − 0.1k, β = ½: ⅛θ₀ + ⅛θ₁ + ¼θ₂ + ½θ₃ = 1 − 0.1·(⅛·0 + ⅛·1 + ¼·2 + ½·3) = 1 − 0.2125."""
    backend = TorchBackend(ones(), optimizer(lr=0.1, max_norm=0), ema_beta=0.5)
    descend_steps(backend, 3)
    saved = to_save(backend)
    assert torch.allclose(saved["weight"], torch.full((3, 2), 0.7875), atol=1e-6)
    assert torch.allclose(saved["bias"], torch.full((3,), 0.7875), atol=1e-6)
    assert torch.allclose(backend.module.weight, torch.full((3, 2), 0.7), atol=1e-6)


def test_before_the_first_step_it_is_the_start():
    module = nn.Linear(2, 3)
    backend = TorchBackend(module, optimizer(lr=0.1), ema_beta=0.5)
    assert torch.equal(to_save(backend)["weight"], module.weight)


def test_under_bf16_it_averages_the_masters():
    """θ_k = 1 − 1e-4·k, far below what bf16 resolves at 1 (2^-8). With β = ½ after 10 steps the average lags by
    1e-4·(1 − 2^-10): 1 − 1e-4·(10 − 1 + 2^-10) = 0.9990999; a bf16 module still holds 1."""
    module = ones(torch.bfloat16)
    backend = TorchBackend(module, optimizer(lr=1e-4, max_norm=0), ema_beta=0.5)
    descend_steps(backend, 10)
    average = dict(backend.tensor_state())["average/bias"]
    assert average.dtype == torch.float32
    assert average.tolist() == pytest.approx([0.9990999] * 3, abs=2e-6)
    assert module.bias.tolist() == [1.0] * 3
    assert to_save(backend)["bias"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_leaves_training_where_it_was_even_when_it_fails(dtype):
    """The very same tensors come back: an engine may hold their addresses."""
    backend, other = (TorchBackend(ones(dtype), optimizer(lr=0.1), ema_beta=0.9) for _ in range(2))
    descend_steps(backend, 2)
    descend_steps(other, 2)
    live, address = backend.module.weight.detach().clone(), backend.module.weight.data_ptr()

    def fail_to_export() -> None:
        with backend.weights_to_save():
            assert not torch.equal(backend.module.weight, live)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_to_export()
    assert torch.equal(backend.module.weight, live)
    assert backend.module.weight.data_ptr() == address
    descend_steps(backend, 2)
    descend_steps(other, 2)
    assert torch.equal(backend.module.weight, other.module.weight)
    assert torch.equal(to_save(backend)["weight"], to_save(other)["weight"])


def test_frozen_parameters_have_no_average():
    module = ones()
    module.weight.requires_grad_(False)
    backend = TorchBackend(module, optimizer(lr=0.1), ema_beta=0.5)
    descend_steps(backend, 1)
    assert [name for name, _ in backend.tensor_state() if name.startswith("average/")] == ["average/bias"]
    assert torch.equal(to_save(backend)["weight"], torch.ones(3, 2))


def test_torch_backend_saves_live_weights_without_an_average():
    backend = TorchBackend(ones(), optimizer(lr=0.1))
    descend_steps(backend, 2)
    assert not any(name.startswith("average/") for name, _ in backend.tensor_state())
    assert torch.equal(to_save(backend)["weight"], backend.module.weight)


def test_a_state_without_one_starts_it_from_its_weights():
    """Switched on in the middle of a run: the average must not remember the weights the process started with."""
    plain = TorchBackend(ones(), optimizer(lr=0.1))
    descend_steps(plain, 2)
    backend = TorchBackend(nn.Linear(2, 3), optimizer(lr=0.1), ema_beta=0.9)
    backend.load(plain.scalar_state(), dict(plain.tensor_state()))
    assert torch.equal(to_save(backend)["weight"], plain.module.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_holds_the_average_and_the_policy_stays_live(tmp_path, dtype):
    """One step of 0.1 with β = ¾: what is written has moved by 0.025, embeddings tied to the head included."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    policy = Policy(hf.Qwen2ForCausalLM(config).to(dtype))
    start = {name: p.detach().float().clone() for name, p in policy.model.named_parameters()}
    backend = TorchBackend(policy, optimizer(lr=0.1, max_norm=0), ema_beta=0.75)
    descend_steps(backend, 1)
    with backend.weights_to_save():
        export_policy(policy, None, tmp_path / "export")
    written = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    atol = 1e-6 if dtype == torch.float32 else 4e-3
    for name, p in written.named_parameters():
        assert torch.allclose(p, start[name] - 0.025, atol=atol), name
    for name, p in policy.model.named_parameters():
        assert torch.allclose(p.float(), start[name] - 0.1, atol=atol), name
    assert written.lm_head.weight is written.model.embed_tokens.weight
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
