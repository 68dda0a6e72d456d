"""MLPs in tiles: the same numbers and gradients, of long sequences only, and less memory."""

import copy

import pytest
import torch
from small_sections import optimizer
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from openrlhf.backends.torch import TorchBackend
from openrlhf.config.backend import LoraSection
from openrlhf.models import tiles
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import RouterLog
from openrlhf.models.context import Context, share_streams
from openrlhf.models.exchange import play
from openrlhf.models.policy import Policy
from openrlhf.models.tiles import TiledMLP, tile_mlps
from openrlhf.types import PackedTokens

SMALL = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {"head_dim": 4, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


def make_model(config=Qwen2Config, causal=Qwen2ForCausalLM, **options):
    torch.manual_seed(0)
    return causal._from_config(config(**SMALL, **options), attn_implementation=ATTENTION)


def tiled_pair(model, *, long=8, tile=3):
    """The model as it is, and in tiles of three tokens from eight on."""
    plain = Policy(copy.deepcopy(model))
    tile_mlps(model, long=long, tile=tile)
    return plain, Policy(model)


def tokens(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    sequences = [torch.randint(13, (length,), generator=generator) for length in lengths]
    return PackedTokens.from_sequences(sequences, [torch.arange(length) > 0 for length in lengths])


def logprobs_and_gradient(policy, stream):
    policy.zero_grad()
    logprobs = policy(stream, temperature=1.0).logprobs_A
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def assert_alike(plain, tiled, stream):
    expected, found = logprobs_and_gradient(plain, stream), logprobs_and_gradient(tiled, stream)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(tiled(stream, temperature=1.0).logprobs_A, expected[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def tile_sizes(monkeypatch):
    """How many tokens each call of the MLP's own forward had."""
    sizes = []
    plain = TiledMLP.untiled

    def untiled(self, hidden):
        sizes.append(hidden.flatten(0, -2).shape[0])
        return plain(self, hidden)

    monkeypatch.setattr(TiledMLP, "untiled", untiled)
    return sizes


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointing", "reentrant"])
def test_a_long_sequence_gives_the_same_numbers_in_tiles(tile_sizes, reentrant):
    model = make_model()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plain, tiled = tiled_pair(model)
    assert_alike(plain, tiled, tokens(11, 2))
    forward = [3, 3, 3, 3, 1] * 2
    assert tile_sizes[:10] == forward
    assert max(tile_sizes) == 3


def test_sequences_that_are_short_are_not_tiled_however_many_there_are(tile_sizes):
    plain, tiled = tiled_pair(make_model())
    assert_alike(plain, tiled, tokens(7, 7, 7, 7))
    assert tile_sizes == []


def test_a_model_that_runs_one_sequence_at_a_time_has_tiles_too(tile_sizes):
    model = make_model()
    model.set_attn_implementation("sdpa")
    plain, tiled = tiled_pair(model)
    plain.packed = tiled.packed = False
    assert_alike(plain, tiled, tokens(9, 2))
    assert tile_sizes[:6] == [3, 3, 3] * 2


def with_adapter(model, **options):
    add_adapter(model, LoraSection(rank=2, **options), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def test_an_adapter_inside_is_trained(tile_sizes):
    """It comes after the tiles, as in loading."""
    plain, tiled = tiled_pair(make_model())
    for policy in (plain, tiled):
        with_adapter(policy.model)
    assert_alike(plain, tiled, tokens(11, 2))
    assert max(tile_sizes) == 3


def test_dropout_of_an_adapter_drops_the_same_in_the_second_forward():
    _, tiled = tiled_pair(make_model())
    mlp = with_adapter(tiled.model, dropout=0.5).model.layers[0].mlp
    hidden, weights = torch.randn(11, 8, requires_grad=True), [p for p in mlp.parameters() if p.requires_grad]
    torch.manual_seed(7)
    expected = torch.cat([mlp.untiled(part) for part in hidden.split(3)])
    gradients = torch.autograd.grad(expected.square().sum(), [hidden, *weights])
    torch.manual_seed(7)
    output = tiles._in_tiles(mlp, hidden)
    torch.testing.assert_close(output, expected)
    torch.manual_seed(8)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), [hidden, *weights]), gradients)


@pytest.mark.parametrize(
    ("config", "causal", "options", "count"),
    [
        (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}, 2),
        (Qwen2MoeConfig, Qwen2MoeForCausalLM, {**EXPERTS, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1}, 2),
        (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**EXPERTS, "mlp_only_layers": [0]}, 1),
    ],
    ids=["biases", "what all experts share", "a dense layer among experts"],
)  # fmt: skip
def test_what_is_dense_is_tiled_and_routers_are_logged_as_ever(config, causal, options, count):
    options = {
        name: value for name, value in options.items() if name != "head_dim" or causal is not Qwen2MoeForCausalLM
    }
    plain, tiled = tiled_pair(make_model(config, causal, **options))
    assert sum(isinstance(module, TiledMLP) for module in tiled.modules()) == count
    stream = tokens(11, 2)
    assert_alike(plain, tiled, stream)
    if "num_experts" in options:
        logs = RouterLog(), RouterLog()
        for policy, log in zip((plain, tiled), logs, strict=True):
            policy(stream, temperature=1.0, router_log=log)
        torch.testing.assert_close(logs[1].logits, logs[0].logits, rtol=1e-5, atol=1e-6)


def test_what_mixes_tokens_is_left_alone():
    class MixingMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, hidden):
            return self.down(self.up(hidden).cumsum(-2))

    model = make_model()
    model.model.layers[0].mlp = MixingMLP()
    assert tile_mlps(model) == 1
    assert type(model.model.layers[0].mlp) is MixingMLP


def test_a_16_bit_gradient_is_rounded_once_and_added_once():
    """Tiles of one token each: sums of as many roundings as tokens would be off by far more."""
    torch.manual_seed(0)
    model = make_model().to(torch.bfloat16)
    _, tiled = tiled_pair(model, tile=1)
    mlp = tiled.model.model.layers[0].mlp
    hidden, weight = torch.randn(300, 8).bfloat16(), mlp.down_proj.weight
    (found,) = torch.autograd.grad(tiles._in_tiles(mlp, hidden).sum(), [weight])
    inner = torch.nn.functional.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden)
    expected = inner.detach().double().sum(0).expand(8, 12)
    assert float((found.double() - expected).norm() / expected.norm()) < 2**-8
    backend, calls = TorchBackend(tiled, optimizer(lr=0.1)), []
    weight.register_post_accumulate_grad_hook(calls.append)
    backend.backward(backend.module(tokens(11), temperature=1.0).logprobs_A.sum())
    assert len(calls) == 1


def test_ranks_that_share_a_stream_tile_their_own_part(tile_sizes):
    """A sequence of 18 tokens is one of 9 on each of two ranks."""
    plain, tiled = tiled_pair(make_model(), long=9)
    stream = tokens(18)
    expected = plain(stream, temperature=1.0).logprobs_A

    def run(exchange):
        policy = Policy(tiled.model)
        share_streams(policy, Context(exchange=exchange))
        with torch.no_grad():
            return policy(stream, temperature=1.0).logprobs_A

    for found in play(2, run):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert tile_sizes == [3] * (3 * 2 * 2)
    tile_sizes.clear()
    tiled(tokens(8), temperature=1.0)
    assert tile_sizes == []


def test_only_the_input_of_an_mlp_is_held_until_the_backward_pass():
    plain, tiled = tiled_pair(make_model())
    held = {}
    for name, policy in (("plain", plain), ("tiled", tiled)):
        widths = []

        def pack(tensor, widths=widths):
            widths.append(tensor.shape[-1] if tensor.dim() > 1 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy(tokens(11), temperature=1.0)
        held[name] = widths.count(SMALL["intermediate_size"])
    assert held["plain"] > 0
    assert held["tiled"] == 0


def test_a_forward_that_ends_badly_leaves_no_trace(monkeypatch):
    _, tiled = tiled_pair(make_model())

    def broken(self, hidden):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TiledMLP, "untiled", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        tiled(tokens(11), temperature=1.0)
    assert not tiles._STREAM.long
