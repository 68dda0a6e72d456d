"""Which optimizer updates which parameter, and that Muon's steps are Muon's."""

import math

import pytest
import torch
import transformers as hf
from torch import nn

from openrlhf.backends.optimizer import (
    MuonSettings,
    OptimizerSettings,
    muon_parameters,
    no_decay,
    vocabulary_tables,
)
from openrlhf.backends.torch import TorchBackend
from openrlhf.models.policy import Policy

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ATTENTION = {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def names(module: nn.Module, parameters: set[nn.Parameter]) -> set[str]:
    """Without the layer's prefix."""
    found = {name for name, p in module.named_parameters() if p in parameters}
    return {name.split("layers.0.")[-1].split("h.0.")[-1] for name in found}


def policy(config) -> Policy:
    torch.manual_seed(0)
    return Policy(hf.AutoModelForCausalLM.from_config(config))


class TestWhoUpdatesWhat:
    @pytest.mark.parametrize("tied", [True, False])
    def test_muon_gets_the_matrices_of_the_layers(self, tied):
        module = policy(hf.Qwen2Config(**SMALL, tie_word_embeddings=tied))
        assert names(module, muon_parameters(module)) == ATTENTION | MLP
        assert len(vocabulary_tables(module)) == (1 if tied else 2)

    def test_a_tied_table_is_found_whatever_its_name(self):
        module = policy(hf.Qwen2Config(**SMALL, tie_word_embeddings=True))
        shared = module.model.model.embed_tokens.weight
        module.first = nn.Linear(8, 11, bias=False)
        module.first.weight = shared
        module = nn.ModuleList([module.first, module])  # named after the alias, which comes first
        assert [name for name, p in module.named_parameters() if p is shared] == ["0.weight"]
        assert shared not in muon_parameters(module)

    def test_position_embeddings_are_a_table(self):
        module = policy(hf.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2))
        wanted = {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}
        assert names(module, muon_parameters(module)) == wanted

    def test_stacked_experts_are_left_to_adamw_and_their_router_is_not(self):
        config = hf.Qwen3MoeConfig(
            **SMALL, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, mlp_only_layers=[]
        )
        module = policy(config)
        assert names(module, muon_parameters(module)) == ATTENTION | {"mlp.gate.weight"}

    def test_one_row_is_a_vector(self):
        """The head of a critic."""
        assert muon_parameters(nn.Linear(8, 1)) == set()

    def test_no_decay_covers_the_documented_names_and_every_other_vector(self):
        vector, matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 3))
        for name in ("layer_norm.weight", "input_layernorm.weight", "norm.weight", "ln_f.weight", "ln_1.weight"):
            assert no_decay(name, vector)
        assert no_decay("experts.gate_up_proj_bias", matrix)
        assert not no_decay("mlp.up_proj.weight", matrix)

    @pytest.mark.parametrize("module", [nn.Linear(4, 3, bias=False), nn.LayerNorm(4)], ids=["matrices", "vectors"])
    def test_either_optimizer_may_have_nothing_to_do(self, module):
        backend = TorchBackend(module, OptimizerSettings(lr=0.5, muon=MuonSettings(lr=0.25)))
        before = module.weight.detach().clone()
        backend.backward((module.weight * torch.arange(1.0, 5.0)).sum())
        backend.step()
        assert not torch.equal(module.weight, before)


def newton_schulz(update: torch.Tensor, steps: int) -> torch.Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, from X = G/‖G‖: the published coefficients, here in fp64.

    https://kellerjordan.github.io/posts/muon. A tall matrix gives the same from the other side: (aX + X(bB + cB²)) with
    B = XᵀX.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.double() / update.double().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class TestMuon:
    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=["tall", "wide"])
    def test_two_steps_are_momentum_and_newton_schulz(self, shape, nesterov):
        """m ← 0.9m + 0.1g; u = 0.1g + 0.9m with Nesterov, else m; W ← W − 0.02·√max(1, rows/columns)·NS₅(u).

        Torch iterates in bf16, so singular values near 1 agree to about 1 %.
        """
        torch.manual_seed(0)
        module = nn.Linear(shape[1], shape[0], bias=False)
        settings = MuonSettings(lr=0.02, momentum=0.9, nesterov=nesterov)
        backend = TorchBackend(module, OptimizerSettings(lr=1.0, muon=settings, max_norm=0))
        momentum = torch.zeros(shape)
        for _ in range(2):
            before = module.weight.detach().clone()
            gradient = torch.randn(shape)
            momentum = 0.9 * momentum + 0.1 * gradient
            update = 0.1 * gradient + 0.9 * momentum if nesterov else momentum
            backend.backward((module.weight * gradient).sum())
            backend.step()
            scale = 0.02 * math.sqrt(max(1.0, shape[0] / shape[1]))
            step = (before - module.weight.detach()).double() / scale
            assert torch.allclose(step, newton_schulz(update, 5), atol=0.03)

    def test_one_iteration_on_a_diagonal(self):
        """G = diag(3, 4): X = diag(0.6, 0.8). The quintic 3.4445σ − 4.775σ³ + 2.0315σ⁵ acts on each:
        0.6 → 2.06670 − 1.03140 + 0.15797 = 1.19327 and 0.8 → 2.75560 − 2.44480 + 0.66568 = 0.97648."""
        module = nn.Linear(2, 2, bias=False)
        before = module.weight.detach().clone()
        settings = MuonSettings(lr=1.0, ns_steps=1)
        backend = TorchBackend(module, OptimizerSettings(lr=1.0, muon=settings, max_norm=0))
        backend.backward((module.weight * torch.tensor([[3.0, 0.0], [0.0, 4.0]])).sum())
        backend.step()
        step = before - module.weight.detach()
        assert torch.allclose(step, torch.diag(torch.tensor([1.19327, 0.97648])), atol=0.01)

    def test_everything_else_moves_as_under_adamw(self):
        """Same gradients, same AdamW: embeddings, norms and biases agree bit for bit, matrices do not."""
        config = hf.Qwen2Config(**SMALL, tie_word_embeddings=True)
        modules = [policy(config), policy(config)]
        for module, muon in zip(modules, (MuonSettings(lr=0.02), None), strict=True):
            backend = TorchBackend(module, OptimizerSettings(lr=1e-3, weight_decay=0.1, muon=muon))
            for seed in range(3):
                torch.manual_seed(seed)
                backend.backward(sum((p * torch.randn(p.shape)).sum() for p in module.parameters()))
                backend.step()
        chosen = muon_parameters(modules[0])
        for (name, ours), plain in zip(modules[0].named_parameters(), modules[1].parameters(), strict=True):
            assert torch.equal(ours, plain) == (ours not in chosen), name

    def test_one_schedule_scales_both_peaks(self):
        """`linear` after 1 of 4 steps is at ¾: the bias moves by ¾ of 0.1, and without momentum the same gradient moves
        the matrix by ¾ of what its first step did. The third step's rate is ½ of Muon's 0.4."""
        module = nn.Linear(3, 3)
        settings = OptimizerSettings(
            lr=0.1, muon=MuonSettings(lr=0.4, momentum=0.0), max_norm=0, scheduler="linear", total_steps=4
        )
        backend = TorchBackend(module, settings)
        moves = []
        for _ in range(2):
            weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
            backend.backward((module.weight * torch.eye(3)).sum() + module.bias.sum())
            backend.step()
            moves.append(((weight - module.weight).detach(), (bias - module.bias).detach()))
        assert backend.learning_rate == pytest.approx(0.4 * 0.5)
        (weight_1, bias_1), (weight_2, bias_2) = moves
        assert torch.allclose(weight_2, 0.75 * weight_1, atol=1e-6)
        assert torch.allclose(bias_1, torch.full((3,), 0.1), atol=1e-6)
        assert torch.allclose(bias_2, torch.full((3,), 0.075), atol=1e-6)

    def test_weight_decay_is_the_flags_and_not_torchs(self):
        """1 − 0.1·0.5 = 0.95 with a zero gradient; by default none at all, where torch would decay by 0.1."""
        for decay, factor in ((0.5, 0.95), (0.0, 1.0)):
            module = nn.Linear(4, 3, bias=False)
            before = module.weight.detach().clone()
            settings = OptimizerSettings(lr=1.0, weight_decay=decay, muon=MuonSettings(lr=0.1))
            backend = TorchBackend(module, settings)
            backend.backward(module.weight.sum() * 0)
            backend.step()
            assert torch.allclose(module.weight, factor * before)

    def test_the_size_of_a_gradient_does_not_matter_to_its_first_step(self):
        steps = []
        for scale in (1.0, 64.0):
            torch.manual_seed(0)
            module = nn.Linear(4, 3, bias=False)
            before = module.weight.detach().clone()
            gradient = torch.randn(3, 4)
            backend = TorchBackend(module, OptimizerSettings(lr=1.0, muon=MuonSettings(lr=0.1), max_norm=0))
            backend.backward((module.weight * gradient * scale).sum())
            backend.step()
            steps.append(before - module.weight.detach())
        assert torch.allclose(steps[0], steps[1], atol=1e-3)
        assert float(steps[0].norm()) > 0.05

    def test_steps_below_bf16_resolution_add_up_in_the_master(self):
        """Near 1, bf16 values lie 2^-8 apart below and 2^-7 above. The gradient is the identity, whose steps are
        diagonal and all equal: 0.7 … 1.2 times 1e-3, lost one by one, and together between 0.05 and 0.1 in 80 steps."""
        module = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            module.weight.fill_(1.0)
        backend = TorchBackend(module, OptimizerSettings(lr=1.0, muon=MuonSettings(lr=1e-3), max_norm=0))
        for _ in range(80):
            backend.backward((module.weight * torch.eye(2, dtype=torch.bfloat16)).sum())
            backend.step()
        assert module.weight.dtype == torch.bfloat16
        (changed, still), _ = module.weight.tolist()
        assert 0.9 <= changed <= 0.95
        assert still == 1.0
