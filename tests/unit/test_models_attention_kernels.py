"""Under gradient checkpointing attention is computed once, and the gradient is what it is without."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.models import attention_kernels as kernels
from openrlhf.models.attention import ATTENTION
from openrlhf.models.packed import PackedAttention, attend_rows
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(vocab_size=40, num_hidden_layers=3, **sizes)
    return Policy(Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION)).train()


STREAMS = {
    "one sequence": ([9], ()),
    "several lengths": ([5, 9, 5, 7], ()),
    "shared prompts": ([9, 8, 9, 6], (0, 4, 4, 0)),
}


def stream(name: str) -> PackedTokens:
    lengths, shared = STREAMS[name]
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(40, (length,), generator=generator) for length in lengths]
    for i, common in enumerate(shared):
        sequences[i][:common] = sequences[i - 1][:common] if common else sequences[i][:common]
    masks = [torch.arange(length) >= min(4, length - 1) for length in lengths]
    return PackedTokens.from_sequences(sequences, masks, shared_prefixes=shared)


def gradient(policy: Policy, tokens: PackedTokens) -> torch.Tensor:
    policy.zero_grad()
    policy(tokens, temperature=0.7).logprobs_A.square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_a_second_forward_takes_the_outputs_of_the_first_and_the_gradient_is_the_same(
    policy, name, reentrant, monkeypatch
):
    tokens, again = stream(name), copy.deepcopy(policy)
    again.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        again.model.enable_input_require_grads()
    expected = gradient(policy, tokens)
    calls: list[str] = []
    monkeypatch.setattr(kernels, "cpu_kernel", lambda scaling, made=kernels.cpu_kernel: counted(made(scaling), calls))
    assert torch.equal(gradient(again, tokens), expected)
    # Prefixes and whole sequences go through this kernel, each length once in each of three layers; tails of a prompt
    # have more keys than queries, and another.
    kinds = {"one sequence": 1, "several lengths": 3, "shared prompts": 2}
    assert calls == ["forward"] * 3 * kinds[name] + ["backward"] * 3 * kinds[name]


def counted(kernel: kernels.Kernel, calls: list[str]) -> kernels.Kernel:
    def forward(*arguments):
        calls.append("forward")
        return kernel.forward(*arguments)

    def backward(*arguments):
        calls.append("backward")
        return kernel.backward(*arguments)

    return kernels.Kernel(forward, backward)


def test_without_checkpointing_or_gradients_nothing_is_kept(policy, monkeypatch):
    plans = []
    init = PackedAttention.__init__
    monkeypatch.setattr(PackedAttention, "__init__", lambda self, *a: (init(self, *a), plans.append(self))[0])
    again = copy.deepcopy(policy)
    again.model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.no_grad():
        again(stream("one sequence"), temperature=1.0)
    policy(stream("one sequence"), temperature=1.0)
    again.eval()(stream("one sequence"), temperature=1.0)
    assert [plan.kept for plan in plans] == [None] * 3


def test_outputs_are_kept_where_they_are_little_beside_the_memory():
    """28 layers × 1,000 tokens × 12 heads × (128 × 2 + 4) bytes: 87.36 MB, a tenth of 873.6 MB."""
    sizes = {"tokens": 1000, "heads": 12, "head_dim": 128, "layers": 28, "element_bytes": 2}
    assert kernels.worth_keeping(**sizes, memory=873_600_000)
    assert not kernels.worth_keeping(**sizes, memory=873_599_000)


def test_padding_behind_a_sequence_changes_nothing_of_it():
    """As for cuDNN, whose lengths are rounded up: here by the CPU's kernel, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(14, 2, 8, generator=generator, requires_grad=True) for _ in range(3))
    grad = torch.randn(14, 2, 8, generator=generator)

    def attended(padded: int) -> torch.Tensor:
        rows = (kernels.rows_of(x, count=2, length=7, padded=padded) for x in (q, k, v))
        out = kernels.attend(*rows, kernels.cpu_kernel(0.3))
        return out.transpose(1, 2)[:, :7].flatten(0, 1)

    plain, longer = attended(7), attended(16)
    assert torch.allclose(plain, longer, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (plain, longer)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    rows = (kernels.rows_of(x, count=2, length=7, padded=7) for x in (q, k, v))
    expected = attend_rows(*rows, scaling=0.3, window=None, dropout=0.0).transpose(1, 2).flatten(0, 1)
    assert torch.allclose(plain, expected, atol=1e-6)


def test_lengths_are_rounded_up_to_few():
    assert [kernels.rounded_up(length) for length in (8192, 8193, 16_384, 20_000)] == [8192, 9216, 16_384, 20_480]
