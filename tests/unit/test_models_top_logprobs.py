"""Log-probs of several tokens at a time and their gradients are those of the full logits; memory is that of tiles."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.distillation import DIVERGENCES, top_k_divergence
from openrlhf.models.logprobs import LogitTransform
from openrlhf.models.top_logprobs import chosen_logprobs, top_logprobs

TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=2.0, softcap=3.0)]


def make(tokens, vocab, hidden=6, *, bias=False, seed=0):
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab + seed)
    hidden_AD = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight_VD = torch.randn(vocab, hidden, generator=generator).requires_grad_()
    bias_V = torch.randn(vocab, generator=generator).requires_grad_() if bias else None
    return hidden_AD, weight_VD, bias_V


def in_full(hidden_AD, weight_VD, bias_V, *, temperature=1.0, transform=TRANSFORMS[0]):
    """float64 [A, V]"""
    logits = hidden_AD.double() @ weight_VD.double().t()
    logits = transform.scaled(logits if bias_V is None else logits + bias_V.double())
    banned = torch.zeros(len(weight_VD), dtype=torch.bool)
    banned[list(transform.banned)] = True
    return torch.log_softmax((logits / temperature).masked_fill(banned, -1e30), dim=-1)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(3, 23),
    k=st.integers(1, 23),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    transform=st.sampled_from(TRANSFORMS),
    bias=st.booleans(),
)
def test_chosen_and_rest_and_their_gradients_equal_the_full_computation(
    tokens, vocab, k, tile, temperature, transform, bias
):
    inputs = make(tokens, vocab, bias=bias)
    k = min(k, vocab)
    ids_AK = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(i))[:k] for i in range(tokens)])
    shared = {"temperature": temperature, "transform": transform}
    actual = chosen_logprobs(*inputs[:2], ids_AK, bias_V=inputs[2], tile=tile, **shared)
    full_AV = in_full(*inputs, **shared)
    wanted_AK = full_AV.gather(1, ids_AK)
    others = torch.ones_like(full_AV, dtype=torch.bool).scatter(1, ids_AK, False)
    torch.testing.assert_close(actual.logprobs_AK.double(), wanted_AK, rtol=1e-4, atol=1e-5)
    assert (actual.rest_A is None) == (k == vocab)

    weights_AK = torch.randn(tokens, k, generator=torch.Generator().manual_seed(7))
    mine, theirs = (weights_AK * actual.logprobs_AK).sum(), (weights_AK * wanted_AK).sum()
    if actual.rest_A is not None:
        rest_A = full_AV.masked_fill(~others, -torch.inf).logsumexp(1)
        torch.testing.assert_close(actual.rest_A.double(), rest_A, rtol=1e-4, atol=1e-5)
        mine, theirs = mine + (actual.rest_A * 0.7).sum(), theirs + (rest_A * 0.7).sum()
    leaves = [leaf for leaf in inputs if leaf is not None]
    for a, b in zip(torch.autograd.grad(mine, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(3, 23),
    k=st.integers(1, 23),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    transform=st.sampled_from([*TRANSFORMS, LogitTransform(banned=(1,))]),
)
def test_the_likeliest_tokens_are_those_of_the_full_logits(tokens, vocab, k, tile, transform):
    inputs, k = make(tokens, vocab, bias=True), min(k, vocab)
    found = top_logprobs(*inputs[:2], k, bias_V=inputs[2], temperature=0.8, transform=transform, tile=tile)
    wanted = in_full(*inputs, temperature=0.8, transform=transform).topk(k, dim=1)
    assert torch.equal(found.token_ids_AK.long(), wanted.indices)
    likely = wanted.values > -1e20
    torch.testing.assert_close(
        found.logprobs_AK.double()[likely], wanted.values[likely], rtol=1e-4, atol=1e-5, check_dtype=False
    )


def test_tokens_beyond_the_vocabulary_do_not_exist():
    hidden_AD, weight_VD, _ = make(4, 20)
    found = top_logprobs(hidden_AD, weight_VD, 12, vocabulary=12)
    assert int(found.token_ids_AK.max()) == 11
    torch.testing.assert_close(found.logprobs_AK.exp().sum(1), torch.ones(4))
    with pytest.raises(ValueError, match="no 13 likeliest of 12"):
        top_logprobs(hidden_AD, weight_VD, 13, vocabulary=12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_divergence_over_all_tokens_is_the_full_one_to_a_millionth(name):
    """k = V, with values and gradients of autograd over a float64 softmax of the whole vocabulary."""
    hidden_AD, weight_VD, _ = make(12, 37)
    teacher = top_logprobs(*make(12, 37, seed=1)[:2], 37)
    own = chosen_logprobs(hidden_AD, weight_VD, teacher.token_ids_AK)
    actual_A = top_k_divergence(DIVERGENCES[name].function, own.logprobs_AK, own.rest_A, teacher.logprobs_AK)
    log_p = in_full(*make(12, 37, seed=1)).detach()
    log_q = in_full(hidden_AD, weight_VD, None)
    p, q = log_p.exp(), log_q.exp()
    middle = ((p + q) / 2).log()
    wanted_A = {
        "reverse": (q * (log_q - log_p)).sum(1),
        "forward": (p * (log_p - log_q)).sum(1),
        "js": 0.5 * (q * (log_q - middle)).sum(1) + 0.5 * (p * (log_p - middle)).sum(1),
    }[name]
    assert float((actual_A - wanted_A).detach().abs().max()) < 1e-6 * float(wanted_A.detach().max())
    for a, b in zip(
        torch.autograd.grad(actual_A.mean(), (hidden_AD, weight_VD)),
        torch.autograd.grad(wanted_A.mean(), (hidden_AD, weight_VD)),
        strict=True,
    ):
        assert float((a - b).norm() / b.norm()) < 1e-6


@pytest.mark.parametrize("name", DIVERGENCES)
def test_fewer_tokens_give_a_lower_bound_that_grows_to_the_full_divergence(name):
    """The data-processing inequality; and the gradient is that of the lumped distributions."""
    student, teacher_inputs = make(12, 37), make(12, 37, seed=1)[:2]
    values = []
    for k in (1, 4, 16, 37):
        teacher = top_logprobs(*teacher_inputs, k)
        own = chosen_logprobs(*student[:2], teacher.token_ids_AK)
        values.append(top_k_divergence(DIVERGENCES[name].function, own.logprobs_AK, own.rest_A, teacher.logprobs_AK))
    for fewer_A, more_A in itertools.pairwise(values):
        assert bool((fewer_A >= -1e-6).all())
        assert bool((fewer_A <= more_A + 1e-5).all())
