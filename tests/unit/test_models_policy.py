"""A policy's log-probs and gradients are those of the model, however the sequences are laid out."""

import itertools
import logging

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.models.support import UnsupportedModelError, examine
from openrlhf.types import PackedTokens

VOCAB = 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that attending to a wrong token changes the log-probs visibly.
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

PACKED = {
    "qwen2": lambda: hf.Qwen2Config(**SMALL),
    "qwen2 window": lambda: hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: hf.Qwen3Config(**SMALL),
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=4),
    "gemma": lambda: hf.GemmaConfig(**SMALL),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gemma3 soft-capped head": lambda: hf.Gemma3TextConfig(**SMALL, sliding_window=4, final_logit_softcapping=2.0),
    "mixtral": lambda: hf.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4),
    "cohere": lambda: hf.CohereConfig(**SMALL, logit_scale=0.5),
    "granite": lambda: hf.GraniteConfig(**SMALL, logits_scaling=4.0),
}
ONE_BY_ONE = {
    "gemma2": (lambda: hf.Gemma2Config(**SMALL, sliding_window=4), "caps attention scores at 50.0"),
    "gpt_oss": (lambda: hf.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), "s_aux"),
    "mamba": (
        lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
        "linear_attention",
    ),
    "qwen3_next": (
        lambda: hf.Qwen3NextConfig(
            **SMALL,
            **EXPERTS,
            num_experts=4,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "linear_attention",
    ),
    "bloom": (
        lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        "0 of its 2 layers attend by plan",
    ),
}


def make_model(config):
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def make_policy(config):
    model = make_model(config)
    support = examine(model, native_attention=model.config._attn_implementation)
    return Policy(model, packed=support.packed, transform=support.transform)


@pytest.fixture(scope="module")
def qwen():
    return make_policy(hf.Qwen2Config(**SMALL))


def make_sequences(lengths, *, seed=0):
    """Random ids; every third token is an observation, the others actions."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    return sequences, [torch.arange(n) % 3 != 0 for n in lengths]


def one_by_one(model, sequences, masks, *, temperature=1.0):
    """Reference: the model's own forward and logits, a sequence at a time → log-probs and entropies of the actions."""
    logprobs, entropies = [], []
    for sequence, mask in zip(sequences, masks, strict=True):
        logp = torch.log_softmax(model(sequence[None], use_cache=False).logits[0].float() / temperature, -1)[:-1]
        logprobs.append(logp.gather(1, sequence[1:, None]).squeeze(1)[mask[1:]])
        entropies.append(-(logp.exp() * logp).sum(-1)[mask[1:]])
    return torch.cat(logprobs), torch.cat(entropies)


def check_against_own_forward(config, policy):
    sequences, masks = make_sequences([9, 5, 12, 5, 1, 9])
    reference = make_model(config)
    reference.load_state_dict(policy.model.state_dict())
    with torch.no_grad():
        expected, entropy = one_by_one(reference, sequences, masks, temperature=0.7)
        out = policy(PackedTokens.from_sequences(sequences, masks), temperature=0.7, with_entropy=True)
    torch.testing.assert_close(out.logprobs_A, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy_A, entropy, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", PACKED)
def test_packed_families_give_their_own_log_probs(name):
    policy = make_policy(PACKED[name]())
    assert policy.packed
    assert policy.model.config._attn_implementation == ATTENTION
    check_against_own_forward(PACKED[name](), policy)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_families_that_packing_cannot_express_run_one_by_one(name, caplog):
    make_config, reason = ONE_BY_ONE[name]
    config = make_config()
    with caplog.at_level(logging.WARNING, logger="openrlhf.models.support"):
        policy = make_policy(config)
    assert not policy.packed
    assert policy.model.config._attn_implementation != ATTENTION
    (warning,) = [record for record in caplog.records if record.name == "openrlhf.models.support"]
    assert config.model_type in warning.getMessage()
    assert reason in warning.getMessage()
    check_against_own_forward(make_config(), policy)


class TestNeverWrong:
    """The probe finds what no configuration says."""

    def test_a_model_that_hides_its_window_from_attention_is_not_packed(self):
        """A window of 100 is longer than the probe's sequences, so no number could tell."""
        model = make_model(hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=100, max_window_layers=1))
        model.model.layers[1].self_attn.sliding_window = None
        support = examine(model, native_attention="sdpa")
        assert not support.packed
        assert "window" in support.reason

    def test_a_layer_that_mixes_tokens_besides_attention_is_not_packed(self):
        model = make_model(hf.LlamaConfig(**SMALL))
        model.model.layers[0].register_forward_hook(lambda module, args, out: out + out.cumsum(1))
        support = examine(model, native_attention="sdpa")
        assert not support.packed
        assert "differ" in support.reason

    def test_logits_that_do_not_come_from_the_head_alone_are_refused_by_name(self):
        model = make_model(hf.LlamaConfig(**SMALL))
        model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits * 1.5) or out)
        with pytest.raises(UnsupportedModelError, match=r"llama.*logits"):
            examine(model, native_attention="sdpa")

    def test_a_head_that_is_no_plain_matrix_is_refused(self, qwen):
        class Adapted(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x) + 1.0

        policy = make_policy(hf.Qwen2Config(**SMALL))
        policy.model.lm_head = Adapted(32, VOCAB, bias=False)
        sequences, masks = make_sequences([5])
        with pytest.raises(TypeError, match="lm_head"):
            policy(PackedTokens.from_sequences(sequences, masks), temperature=1.0)


def test_packed_equals_right_padded(qwen):
    """The usual way: one padded matrix, an attention mask, SDPA, all logits."""
    sequences, masks = make_sequences([9, 5, 12, 5])
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    attention_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    reference = make_model(hf.Qwen2Config(**SMALL))
    with torch.no_grad():
        logp = torch.log_softmax(reference(padded, attention_mask=attention_mask).logits, -1)[:, :-1]
        logp = logp.gather(2, padded[:, 1:, None]).squeeze(2)
        expected = torch.cat([row[: len(m) - 1][m[1:]] for row, m in zip(logp, masks, strict=True)])
        out = qwen(PackedTokens.from_sequences(sequences, masks), temperature=1.0)
    torch.testing.assert_close(out.logprobs_A, expected, rtol=1e-5, atol=1e-5)
    assert out.entropy_A is None


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=7), seed=st.integers(0, 5))
def test_ragged_batches_give_every_sequence_its_own_log_probs(qwen, lengths, seed):
    sequences, masks = make_sequences(lengths, seed=seed)
    with torch.no_grad():
        together = qwen(PackedTokens.from_sequences(sequences, masks), temperature=1.0, with_entropy=True)
        alone = [
            qwen(PackedTokens.from_sequences([s], [m]), temperature=1.0, with_entropy=True)
            for s, m in zip(sequences, masks, strict=True)
        ]
    torch.testing.assert_close(together.logprobs_A, torch.cat([o.logprobs_A for o in alone]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.entropy_A, torch.cat([o.entropy_A for o in alone]), rtol=1e-5, atol=1e-5)


def gradient(policy, micro_batches):
    """Gradient of the token mean of −log π + 0.1·entropy over all micro-batches, flattened."""
    policy.zero_grad()
    total = sum(int(mask.sum()) for _, masks in micro_batches for mask in masks)
    for sequences, masks in micro_batches:
        out = policy(PackedTokens.from_sequences(sequences, masks), temperature=1.0, with_entropy=True)
        ((0.1 * out.entropy_A - out.logprobs_A).sum() / total).backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(7)), cut_points=st.sets(st.integers(1, 6)))
def test_order_and_split_of_sequences_do_not_change_the_gradient(qwen, order, cut_points):
    sequences, masks = make_sequences([9, 5, 12, 5, 2, 9, 14])
    expected = gradient(qwen, [(sequences, masks)])
    bounds = [0, *sorted(cut_points), 7]
    micro_batches = [
        ([sequences[i] for i in order[a:b]], [masks[i] for i in order[a:b]]) for a, b in itertools.pairwise(bounds)
    ]
    actual = gradient(qwen, micro_batches)
    assert (actual - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    policy = make_policy(PACKED["gemma3"]())
    batch = [make_sequences([9, 5, 12, 5])]
    expected = gradient(policy, batch)
    policy.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    policy.train()
    calls = []
    handle = policy.model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    actual = gradient(policy, batch)
    handle.remove()
    assert len(calls) == 2, "the layer runs again in the backward pass"
    assert (actual - expected).norm() / expected.norm() < 1e-6


def test_log_probs_of_no_tokens_are_empty_and_differentiable(qwen):
    sequences, _ = make_sequences([4, 3])
    tokens = PackedTokens.from_sequences(
        sequences, [torch.zeros(4, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)]
    )
    qwen.zero_grad()
    out = qwen(tokens, temperature=1.0)
    assert out.logprobs_A.shape == (0,)
    out.logprobs_A.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in qwen.parameters())
