"""A prompt's samples share its forward and backward, and nobody can tell from the numbers."""

import dataclasses

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from prompted_streams import prompted_segment, prompted_stream
from test_models_policy import PACKED, SMALL, VOCAB, make_policy

from openrlhf.models import packed
from openrlhf.models.prefixes import share_prefixes
from openrlhf.types import PackedTokens


def make_stream(groups, *, seed=0):
    return prompted_stream(groups, lowest=3, vocabulary=VOCAB, seed=seed)


GROUPS = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=4
)


def logprobs_and_gradient(policy, tokens):
    policy.zero_grad()
    out = policy(tokens, temperature=1.0).logprobs_A
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def qwen():
    return make_policy(hf.Qwen2Config(**SMALL))


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, block=st.sampled_from([1, 3, 1024]))
def test_sharing_changes_neither_log_probs_nor_gradient(qwen, groups, block):
    tokens = make_stream(groups)
    alone = dataclasses.replace(tokens, shared_prefixes=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_MAX_BLOCK", block)  # small blocks cut the queries of short tails too
        patch.setattr(packed, "_MIN_BLOCK", 1)
        actual, gradient = logprobs_and_gradient(qwen, tokens)
    expected, expected_gradient = logprobs_and_gradient(qwen, alone)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


@pytest.mark.parametrize("name", PACKED)
def test_every_packable_model_shares(name):
    policy = make_policy(PACKED[name]())
    tokens = make_stream([(5, [4, 6, 4]), (3, [2]), (9, [5, 5])])
    actual, gradient = logprobs_and_gradient(policy, tokens)
    expected, expected_gradient = logprobs_and_gradient(policy, dataclasses.replace(tokens, shared_prefixes=()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (gradient - expected_gradient).norm() <= 1e-4 * expected_gradient.norm()


def test_the_body_sees_a_shared_prompt_once(qwen):
    """Prompts of 5, 3 and 9 tokens; 3, 1 and 2 responses: (5 + 4+6+4) + (3+2) + (9 + 5+5) = 43 tokens, not 62."""
    tokens = make_stream([(5, [4, 6, 4]), (3, [2]), (9, [5, 5])])
    seen = []
    hook = qwen.model.get_input_embeddings().register_forward_hook(lambda *a: seen.append(a[1][0].numel()))
    qwen(tokens, temperature=1.0)
    hook.remove()
    assert tokens.num_tokens == 62
    assert seen == [43]


def test_the_computed_stream_and_the_way_back():
    """Prompt `7 8` with responses of 2, 1, 2 tokens, then a sequence of its own: the prefix first, tails by length.

    A sequence without a prefix counts as a tail of its whole length, and stands before those that have one.
    """
    ids = [[7, 8, 10, 11], [7, 8, 12], [7, 8, 13, 14], [9, 15]]
    tokens = PackedTokens.from_segments([prompted_segment(torch.tensor(row), 1 if row[0] == 9 else 2) for row in ids])
    assert tokens.shared_prefixes == (0, 2, 2, 0)
    shared = share_prefixes(tokens)
    assert shared.tokens.token_ids.tolist() == [7, 8, 9, 15, 12, 10, 11, 13, 14]
    assert shared.tokens.position_ids.tolist() == [0, 1, 0, 1, 2, 2, 3, 2, 3]
    assert shared.tokens.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 9]
    assert shared.tokens.token_ids[shared.back_T].tolist() == tokens.token_ids.tolist()


def test_prompts_that_only_look_alike_are_not_shared():
    """Same length and other ids; same ids and another length; equal up to a longer prompt."""
    a, b, c = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 5, 3, 4]), torch.tensor([1, 2, 3, 9, 9])
    tokens = PackedTokens.from_segments(
        [prompted_segment(a, 2), prompted_segment(b, 2), prompted_segment(a, 2), prompted_segment(c, 3)]
    )
    assert tokens.shared_prefixes == ()
    assert share_prefixes(tokens) is None


def test_neighbouring_prompts_of_one_length_stay_apart(qwen):
    """Two groups side by side, prompts of 4 tokens each: two prefixes, not one."""
    tokens = make_stream([(4, [3, 3]), (4, [3, 3])])
    assert tokens.shared_prefixes == (0, 4, 0, 4)
    assert share_prefixes(tokens).tokens.num_tokens == 4 + 6 + 4 + 6


def test_packed_tokens_need_a_shared_prefix_for_each_sequence_or_none():
    tokens = make_stream([(4, [3, 3])])
    with pytest.raises(ValueError, match="1 shared prefixes for 2 sequences"):
        dataclasses.replace(tokens, shared_prefixes=(0,))
