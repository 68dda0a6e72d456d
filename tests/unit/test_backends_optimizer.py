"""Which optimizer updates which parameter, and learning-rate schedules."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from small_sections import optimizer
from torch import nn

from openrlhf.backends.optimizer import muon_parameters, no_decay, rate_factor, share_of, vocabulary_tables
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.training import SCHEDULES, MuonSection
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
        backend = TorchBackend(module, optimizer(lr=0.5, muon=MuonSection(lr=0.25)))
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
        settings = MuonSection(lr=0.02, momentum=0.9, nesterov=nesterov)
        backend = TorchBackend(module, optimizer(lr=1.0, muon=settings, max_norm=0))
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
        settings = MuonSection(lr=1.0, ns_steps=1)
        backend = TorchBackend(module, optimizer(lr=1.0, muon=settings, max_norm=0))
        backend.backward((module.weight * torch.tensor([[3.0, 0.0], [0.0, 4.0]])).sum())
        backend.step()
        step = before - module.weight.detach()
        assert torch.allclose(step, torch.diag(torch.tensor([1.19327, 0.97648])), atol=0.01)

    def test_everything_else_moves_as_under_adamw(self):
        """Same gradients, same AdamW: embeddings, norms and biases agree bit for bit, matrices do not."""
        config = hf.Qwen2Config(**SMALL, tie_word_embeddings=True)
        modules = [policy(config), policy(config)]
        for module, muon in zip(modules, (MuonSection(lr=0.02), None), strict=True):
            backend = TorchBackend(module, optimizer(lr=1e-3, weight_decay=0.1, muon=muon))
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
        settings = optimizer(lr=0.1, muon=MuonSection(lr=0.4, momentum=0.0), max_norm=0, scheduler="linear")
        backend = TorchBackend(module, settings, total_steps=4)
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
            settings = optimizer(lr=1.0, weight_decay=decay, muon=MuonSection(lr=0.1))
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
            backend = TorchBackend(module, optimizer(lr=1.0, muon=MuonSection(lr=0.1), max_norm=0))
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
        backend = TorchBackend(module, optimizer(lr=1.0, muon=MuonSection(lr=1e-3), max_norm=0))
        for _ in range(80):
            backend.backward((module.weight * torch.eye(2, dtype=torch.bfloat16)).sum())
            backend.step()
        assert module.weight.dtype == torch.bfloat16
        (changed, still), _ = module.weight.tolist()
        assert 0.9 <= changed <= 0.95
        assert still == 1.0


COS_QUARTER = (1 + math.cos(math.pi / 4)) / 2
"""Half a cosine, a quarter of the way down: 0.853553."""


def shifted(k: int) -> float:
    """0.1 + 0.9·½(1 + cos(π·k/16)): a cosine to 0.1, k of 16 steps down."""
    return 0.1 + 0.9 * (1 + math.cos(math.pi * k / 16)) / 2


# 20 steps, of which ceil(20·0.2) = 4 warm up, with 1/4, 2/4, 3/4 and 1. After 0 steps (the first of warm-up), 2 (its
# third), 4 (it is over), then 8, 12 and 20: a quarter, a half and all of the other 16.
EXPECTED = {
    "constant": [1, 1, 1, 1, 1, 1],
    "constant_with_warmup": [1 / 4, 3 / 4, 1, 1, 1, 1],
    "linear": [1 / 4, 3 / 4, 1, 3 / 4, 1 / 2, 0],
    "cosine": [1 / 4, 3 / 4, 1, COS_QUARTER, 1 / 2, 0],
    "cosine_with_restarts": [1 / 4, 3 / 4, 1, COS_QUARTER, 1 / 2, 0],
    # 0.1 + 0.9 times the cosine.
    "cosine_with_min_lr": [1 / 4, 3 / 4, 1, 0.1 + 0.9 * COS_QUARTER, 0.55, 0.1],
    # One step ahead of the others: the first step of warm-up has 1/4, the fourth 1, and after 4 steps the descent is at
    # 1/16; the last of the 20 steps, after 19, has 0.1 and what comes after the end would rise again.
    "cosine_warmup_with_min_lr": [1 / 4, 3 / 4, shifted(1), shifted(5), shifted(9), shifted(17)],
    # Power 1.
    "polynomial": [1 / 4, 3 / 4, 1, 3 / 4, 1 / 2, 0],
    # 1/√(n/4).
    "inverse_sqrt": [1 / 4, 3 / 4, 1, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / math.sqrt(5)],
    # Level until the last 10 %.
    "warmup_stable_decay": [1 / 4, 3 / 4, 1, 1, 1, 0],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_by_hand(name):
    factor = rate_factor(optimizer(scheduler=name, warmup_ratio=0.2), total_steps=20)
    assert [factor(n) for n in (0, 2, 4, 8, 12, 20)] == pytest.approx(EXPECTED[name], abs=1e-9)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_every_step_of_a_warm_up_moves_the_weights(name):
    """⌈10·0.3⌉ = 3 steps with a third, two thirds and all of the rate: none has 0."""
    factor = rate_factor(optimizer(scheduler=name, warmup_ratio=0.3), total_steps=10)
    assert [factor(n) for n in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_of_one_step_is_a_step_at_the_peak(name):
    """⌈8·0.03⌉ = 1: a run of 8 steps takes 8, the first of them in full."""
    factor = rate_factor(optimizer(scheduler=name, warmup_ratio=0.03), total_steps=8)
    assert factor(0) == pytest.approx(1.0)
    assert all(factor(n) > 0 for n in range(8))


def test_the_shifted_cosine_reaches_its_peak_and_its_floor_within_the_run():
    factor = rate_factor(optimizer(scheduler="cosine_warmup_with_min_lr", warmup_ratio=0.2), total_steps=20)
    assert [factor(3), factor(19)] == pytest.approx([1.0, 0.1])


def test_warmup_stable_decay_falls_over_the_last_tenth():
    """The last 4 of 40 steps, along half a cosine: after 36, 37, 38 and 39 steps ½(1 + cos(π·k/4)) for k = 0 … 3."""
    factor = rate_factor(optimizer(scheduler="warmup_stable_decay", warmup_ratio=0.1), total_steps=40)
    falling = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [factor(n) for n in (4, 35, 36, 37, 38, 39, 40)] == pytest.approx([1, 1, *falling, 0])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.95, 1.0])
def test_short_runs_and_long_warm_ups_stay_between_nothing_and_the_peak(name, total, warmup_ratio):
    factor = rate_factor(optimizer(scheduler=name, warmup_ratio=warmup_ratio), total_steps=total)
    assert all(0 <= factor(n) <= 1 for n in range(total + 1))


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(100, 0.03, 3), (10, 0.03, 1), (100, 0.07, 7), (9, 0, 0)])
def test_warm_up_is_rounded_up(steps, ratio, expected):
    """100 · 0.07 is a little more than 7 in floating point and still 7 steps."""
    assert share_of(steps, ratio) == expected
