"""On CUDA calls of FlashAttention and cuDNN equal SDPA on each sequence, forward and backward."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.models import attention_kernels as kernels
from openrlhf.models.attention import ATTENTION
from openrlhf.models.attention_kernels import flash_can
from openrlhf.models.logprobs import chunked_logprobs
from openrlhf.models.packed import PackedAttention
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [7, 128, 7, 300, 1, 64]


def make(heads, *, dim, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (1, heads, sum(LENGTHS), dim)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def one_by_one(query, key, value, *, window):
    """fp32 SDPA with an explicit mask on each sequence."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (
        query.float(),
        key.float().repeat_interleave(groups, 1),
        value.float().repeat_interleave(groups, 1),
    )
    outputs = []
    for q, k, v in zip(*(x.split(LENGTHS, dim=2) for x in (query, key, value)), strict=True):
        position = torch.arange(q.shape[2], device="cuda")
        distance = position[:, None] - position[None, :]
        allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("heads", [(4, 4), (12, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_attention_equals_one_sequence_at_a_time(dtype, heads, window, dim):
    """bf16 takes the varlen kernel, fp32 the grouped SDPA calls."""
    query, key, value = (
        make(h, dim=dim, dtype=dtype, seed=seed) for seed, h in enumerate((heads[0], heads[1], heads[1]))
    )
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    assert flash_can(query[0].transpose(0, 1), value[0].transpose(0, 1), dropout=0.0) == (dtype == torch.bfloat16)
    plan = PackedAttention(cu_seqlens, max(LENGTHS))
    actual = plan(None, query, key, value, scaling=dim**-0.5, sliding_window=window, dropout=0.0)
    expected = one_by_one(query, key, value, window=window)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3  # fp32 products may run in TF32
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)

    weights = torch.randn_like(expected)
    mine = torch.autograd.grad((actual.float() * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    # A window of one sees itself alone: the exact gradients of query and key are 0 there, so all are held against the
    # value's.
    scale = theirs[2].float().norm()
    for a, b in zip(mine, theirs, strict=True):
        assert (a.float() - b.float()).norm() < tolerance * max(b.float().norm(), scale)


def test_dropout_leaves_the_kernel_that_has_none():
    query, value = (make(2, dim=64, dtype=torch.bfloat16) for _ in range(2))
    assert not flash_can(query[0].transpose(0, 1), value[0].transpose(0, 1), dropout=0.1)


@pytest.mark.parametrize("heads", [(4, 4), (12, 2)], ids=["mha", "gqa"])
def test_long_sequences_attend_by_cudnn_as_by_flash(heads, monkeypatch):
    """Two lengths, rounded up; the gradient too."""
    lengths, dim = [9000, 8500, 8500], 128
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, count, sum(lengths), dim) for count in (heads[0], heads[1], heads[1])]
    qkv = [torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    weights = torch.randn(1, sum(lengths), heads[0], dim, generator=generator, device="cuda")

    def attended() -> tuple[torch.Tensor, ...]:
        plan = PackedAttention(cu_seqlens, max(lengths))
        out = plan(None, *qkv, scaling=dim**-0.5, sliding_window=None, dropout=0.0)
        return out, *torch.autograd.grad((out.float() * weights).sum(), qkv)

    calls = []
    made = kernels.cudnn_kernel
    monkeypatch.setattr(kernels, "cudnn_kernel", lambda scaling: (calls.append(scaling), made(scaling))[1])
    long = attended()
    assert len(calls) == 1
    monkeypatch.setattr(kernels, "LONG", 10**9)
    for a, b in zip(long, attended(), strict=True):
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm()


@pytest.mark.parametrize("name", ["flash", "cudnn", "shared prompts"])
def test_gradient_checkpointing_attends_once_and_gives_the_same_gradient(name):
    lengths = {"flash": [900, 300, 700], "cudnn": [9000], "shared prompts": [900, 800, 700]}[name]
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(500, (length,), generator=generator) for length in lengths]
    shared = (0, 256, 256) if name == "shared prompts" else ()
    for sequence in sequences[1:] if shared else ():
        sequence[:256] = sequences[0][:256]
    masks = [torch.arange(length) >= 256 for length in lengths]
    tokens = PackedTokens.from_sequences(sequences, masks, shared_prefixes=shared).to("cuda")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16).cuda()
    policy = Policy(model).train()

    def gradient() -> tuple[torch.Tensor, int]:
        policy.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            policy(tokens, temperature=1.0).logprobs_A.mean().backward()
        ran = {event.key: event.count for event in profile.key_averages()}
        forwards = ("aten::_flash_attention_forward", "aten::_scaled_dot_product_cudnn_attention")
        return torch.cat([p.grad.flatten().float() for p in policy.parameters()]), sum(ran.get(f, 0) for f in forwards)

    expected, calls = gradient()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found, calls_again = gradient()
    assert calls == calls_again == 3
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_chunked_log_probs_equal_the_full_ones_in_bounded_memory(dtype):
    """4,096 tokens × 151,936 entries of fp32 logits are 2.5 GB each time they are held; two tiles are 0.27 GB."""
    tokens, vocab, hidden = 4096, 151_936, 896
    torch.manual_seed(0)
    hidden_AD = torch.randn(tokens, hidden, device="cuda").to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, hidden, device="cuda").mul_(0.02).to(dtype).requires_grad_()
    targets_A = torch.randint(vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = chunked_logprobs(hidden_AD, weight_VD, targets_A, temperature=0.9, with_entropy=True)
    mine = torch.autograd.grad((out.logprobs_A - 0.1 * out.entropy_A).mean(), (hidden_AD, weight_VD))
    assert torch.cuda.max_memory_allocated() - before < 1.5e9

    logits = (hidden_AD.float() @ weight_VD.float().t()) / 0.9
    logp_AV = torch.log_softmax(logits, -1)
    logprobs_A = logp_AV.gather(1, targets_A[:, None]).squeeze(1)
    entropy_A = -(logp_AV.exp() * logp_AV).sum(-1)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out.logprobs_A, logprobs_A, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.entropy_A, entropy_A, rtol=tolerance, atol=tolerance)
    theirs = torch.autograd.grad((logprobs_A - 0.1 * entropy_A).mean(), (hidden_AD, weight_VD))
    for a, b in zip(mine, theirs, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < tolerance
