"""The average of the weights: its closed form, its precision, and that only exports see it."""

import pytest
import torch
import transformers as hf
from torch import nn

from openrlhf.backends.optimizer import OptimizerSettings
from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.export import export_policy
from openrlhf.models.policy import Policy


def descend(backend: TorchBackend, steps: int) -> None:
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
    backend = TorchBackend(ones(), OptimizerSettings(lr=0.1, max_norm=0), ema_beta=0.5)
    descend(backend, 3)
    saved = to_save(backend)
    assert torch.allclose(saved["weight"], torch.full((3, 2), 0.7875), atol=1e-6)
    assert torch.allclose(saved["bias"], torch.full((3,), 0.7875), atol=1e-6)
    assert torch.allclose(backend.module.weight, torch.full((3, 2), 0.7), atol=1e-6)


def test_before_the_first_step_it_is_the_start():
    module = nn.Linear(2, 3)
    backend = TorchBackend(module, OptimizerSettings(lr=0.1), ema_beta=0.5)
    assert torch.equal(to_save(backend)["weight"], module.weight)


def test_under_bf16_it_averages_the_masters():
    """θ_k = 1 − 1e-4·k, far below what bf16 resolves at 1 (2^-8). With β = ½ after 10 steps the average lags by
    1e-4·(1 − 2^-10): 1 − 1e-4·(10 − 1 + 2^-10) = 0.9990999; a bf16 module still holds 1."""
    module = ones(torch.bfloat16)
    backend = TorchBackend(module, OptimizerSettings(lr=1e-4, max_norm=0), ema_beta=0.5)
    descend(backend, 10)
    average = dict(backend.tensors())["average/bias"]
    assert average.dtype == torch.float32
    assert average.tolist() == pytest.approx([0.9990999] * 3, abs=2e-6)
    assert module.bias.tolist() == [1.0] * 3
    assert to_save(backend)["bias"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_leaves_training_where_it_was_even_when_it_fails(dtype):
    """The very same tensors come back: an engine may hold their addresses."""
    backend, other = (TorchBackend(ones(dtype), OptimizerSettings(lr=0.1), ema_beta=0.9) for _ in range(2))
    descend(backend, 2)
    descend(other, 2)
    live, address = backend.module.weight.detach().clone(), backend.module.weight.data_ptr()

    def fail_to_export() -> None:
        with backend.weights_to_save():
            assert not torch.equal(backend.module.weight, live)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_to_export()
    assert torch.equal(backend.module.weight, live)
    assert backend.module.weight.data_ptr() == address
    descend(backend, 2)
    descend(other, 2)
    assert torch.equal(backend.module.weight, other.module.weight)
    assert torch.equal(to_save(backend)["weight"], to_save(other)["weight"])


def test_frozen_parameters_have_no_average():
    module = ones()
    module.weight.requires_grad_(False)
    backend = TorchBackend(module, OptimizerSettings(lr=0.1), ema_beta=0.5)
    descend(backend, 1)
    assert [name for name, _ in backend.tensors() if name.startswith("average/")] == ["average/bias"]
    assert torch.equal(to_save(backend)["weight"], torch.ones(3, 2))


def test_without_one_the_live_weights_are_saved():
    backend = TorchBackend(ones(), OptimizerSettings(lr=0.1))
    descend(backend, 2)
    assert not any(name.startswith("average/") for name, _ in backend.tensors())
    assert torch.equal(to_save(backend)["weight"], backend.module.weight)


def test_a_state_without_one_starts_it_from_its_weights():
    """Switched on in the middle of a run: the average must not remember the weights the process started with."""
    plain = TorchBackend(ones(), OptimizerSettings(lr=0.1))
    descend(plain, 2)
    backend = TorchBackend(nn.Linear(2, 3), OptimizerSettings(lr=0.1), ema_beta=0.9)
    backend.load(plain.numbers(), dict(plain.tensors()))
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
    backend = TorchBackend(policy, OptimizerSettings(lr=0.1, max_norm=0), ema_beta=0.75)
    descend(backend, 1)
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
