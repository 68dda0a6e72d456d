"""Values and gradients of every loss, derived by hand in each docstring."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.losses import (
    POLICY_LOSSES,
    LossInputs,
    LossSettings,
    TokenLoss,
    binary_kl,
    get_policy_loss,
    value_loss,
)
from openrlhf.algorithms.reduction import sample_weights

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3)


def loss_of(
    name: str,
    ratios: list[float],
    advantages: list[float],
    *,
    sequences: list[int] | None = None,
    old: float = 0.0,
    settings: LossSettings = SETTINGS,
) -> tuple[TokenLoss, torch.Tensor]:
    """The loss of tokens with these ratios, and d(Σ loss) / d log π of each. One sequence unless told."""
    logprobs = (torch.tensor(ratios).log() + old).requires_grad_()
    inputs = LossInputs(
        logprobs,
        torch.full_like(logprobs, old).detach(),
        torch.tensor(advantages),
        torch.tensor(sequences or [0] * len(ratios)),
    )
    result = get_policy_loss(name).function(inputs, settings)
    result.loss_A.sum().backward()
    return result, logprobs.grad


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_reads_the_bounds_that_its_entry_says(name):
    """Ratios far below and above 1, advantages of both signs: another clip range changes the result of a loss that
    clips, and of no other; so does a dual clip where the entry takes one. The token of ratio 0.3 goes from a
    probability of 0.5 to 0.15: a total variation of 0.35 and a KL of 0.34, between the two ranges."""

    def result(**settings):
        given = LossSettings(**{"clip_low": 0.2, "clip_high": 0.2} | settings)
        loss, gradient = loss_of(
            name, [0.3, 5.0, 0.3, 5.0], [1.0, 1.0, -1.0, -1.0], settings=given, sequences=[0, 1, 2, 3], old=-0.7
        )
        return [*loss.loss_A.tolist(), *gradient.tolist()]

    entry = POLICY_LOSSES[name]
    assert (result(clip_low=0.4, clip_high=0.6) != result()) == entry.clips
    if entry.takes_dual_clip:
        assert result(dual_clip=3.0) != result()


def test_losses_whose_ratio_is_that_of_the_policy_that_sampled():
    """Under off-policy correction: those of whole sequences, and DPPO, whose papers take it so."""
    found = {name for name, loss in POLICY_LOSSES.items() if loss.corrects_itself}
    assert found == {"gspo", "luspo", "vespo", "dppo_tv", "dppo_kl"}


def test_an_unknown_loss_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=f"known: {', '.join(POLICY_LOSSES)}"):
        get_policy_loss("ppp")


def test_ppo_by_hand():
    """ε_low = 0.2, ε_high = 0.3; old log-prob 0, so ρ = exp(logp) and dρ/dlogp = ρ.

    ρ    A    min(ρA, clip(ρ)A)         loss    d loss / d logp
    1    2    2                          -2      -2           (= -ρA)
    1.5  2    min(3, 2.6) = 2.6          -2.6     0           clipped above
    1.5 -1    min(-1.5, -1.3) = -1.5      1.5     1.5         (= -ρA: the pessimistic side is never clipped)
    0.5  2    min(1, 1.6) = 1            -1      -1
    0.5 -1    min(-0.5, -0.8) = -0.8      0.8     0           clipped below
    """
    result, gradient = loss_of("ppo", [1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -1.0, 2.0, -1.0])
    assert result.loss_A.tolist() == pytest.approx([-2, -2.6, 1.5, -1, 0.8])
    assert result.clipped_A.tolist() == [False, True, False, False, True]
    assert gradient.tolist() == pytest.approx([-2, 0, 1.5, -1, 0], abs=1e-6)


def test_dual_clip_by_hand():
    """c = 3 on top of the above.

    ρ    A    min(…)     max(min(…), cA)      loss    d loss / d logp
    2   -1    -2         max(-2, -3) = -2      2       2      below c: as before
    5   -1    -5         max(-5, -3) = -3      3       0      bounded by c
    0.5 -1    -0.8       max(-0.8, -3) = -0.8  0.8     0      clipped below, as before
    5    1     1.3       (A >= 0: untouched)  -1.3     0      clipped above, as before
    0.5  1     0.5       (A >= 0: untouched)  -0.5    -0.5
    """
    dual = LossSettings(clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    result, gradient = loss_of("ppo", [2.0, 5.0, 0.5, 5.0, 0.5], [-1.0, -1.0, -1.0, 1.0, 1.0], settings=dual)
    assert result.loss_A.tolist() == pytest.approx([2, 3, 0.8, -1.3, -0.5])
    assert result.clipped_A.tolist() == [False, True, True, True, False]
    assert gradient.tolist() == pytest.approx([2, 0, 0, 0, -0.5], abs=1e-6)


@pytest.mark.parametrize("bound", [1.0, 0.5, -3.0])
def test_a_dual_clip_that_bounds_likely_tokens_is_refused(bound):
    with pytest.raises(ValueError, match="must be > 1"):
        LossSettings(clip_low=0.2, clip_high=0.2, dual_clip=bound)


def test_gspo_by_hand():
    """Three sequences, each of one advantage; the token losses of a sequence are all −min(sA, clip(s)A).

    ratios     A    s = (Π ratios)^(1/|o|)     loss per token         d (Σ loss) / d logp, each token
    2, 1/2     3    1                          −3                     −As = −3 (two tokens, each −As·(1/2) twice)
    4, 1       1    2, clipped to 1.3          −1.3                    0
    4, 1      −1    2: min(−2, −1.3) = −2       2                      2
    """
    ratios, advantages = [2.0, 0.5, 4.0, 1.0, 4.0, 1.0], [3.0, 3.0, 1.0, 1.0, -1.0, -1.0]
    result, gradient = loss_of("gspo", ratios, advantages, sequences=[0, 0, 1, 1, 2, 2], old=-1.5)
    assert result.loss_A.tolist() == pytest.approx([-3, -3, -1.3, -1.3, 2, 2], rel=1e-6)
    assert result.clipped_A.tolist() == [False, False, True, True, False, False]
    assert gradient.tolist() == pytest.approx([-3, -3, 0, 0, 2, 2], rel=1e-5, abs=1e-6)


def test_gspo_under_its_aggregation_is_the_sequence_loss_of_the_paper():
    """L = (1/N) Σ_i −min(s_i A_i, clip(s_i) A_i) written down directly, s_i differentiated through its mean.

    Sequences of 1, 3 and 2 tokens: the first inside the clip, the second clipped, the third on the pessimistic side.
    """
    sizes, advantages = [1, 3, 2], [2.0, 1.0, -1.0]
    differences = torch.tensor([0.1, 0.5, 0.2, 0.9, 1.0, 0.4])
    sequences = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))

    ours = differences.clone().requires_grad_()
    loss = get_policy_loss("gspo")
    result = loss.function(LossInputs(ours, torch.zeros(6), torch.tensor(advantages)[sequences], sequences), SETTINGS)
    weights = torch.tensor(sample_weights(loss.aggregation, sizes))[sequences]
    total = (weights * result.loss_A).sum()
    total.backward()

    direct = differences.clone().requires_grad_()
    paper = torch.tensor(0.0)
    for piece, advantage in zip(direct.split(sizes), advantages, strict=True):
        ratio = piece.mean().exp()
        paper = paper - torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage) / len(sizes)
    paper.backward()

    torch.testing.assert_close(total, paper)
    torch.testing.assert_close(ours.grad, direct.grad)
    assert (direct.grad == 0).tolist() == [False, True, True, True, False, False]


def test_gspo_leaves_each_token_its_own_credit():
    """One sequence, s = 1, advantages 1 and −2 (a good turn and a bad one): d loss / d logp is −A_t s = −1 and 2, not
    the average −(1 − 2)/2 for both."""
    _, gradient = loss_of("gspo", [2.0, 0.5], [1.0, -2.0])
    assert gradient.tolist() == pytest.approx([-1, 2], rel=1e-6)


def test_cispo_by_hand():
    """ε as above, old log-prob −1, so log π = log ρ − 1; w = clip(ρ, 0.8, 1.3), held fixed.

    ρ    A    w     loss = −w A log π         d loss / d logp = −w A
    1    2    1     −2 · (−1) = 2             −2
    1.5  2    1.3   −2.6 (log 1.5 − 1)        −2.6       bounded, yet it learns
    0.5 −1    0.8    0.8 (log 0.5 − 1)         0.8       bounded, yet it learns
    1.2 −1    1.2    1.2 (log 1.2 − 1)         1.2
    """
    result, gradient = loss_of("cispo", [1.0, 1.5, 0.5, 1.2], [2.0, 2.0, -1.0, -1.0], old=-1.0)
    expected = [2, -2.6 * (math.log(1.5) - 1), 0.8 * (math.log(0.5) - 1), 1.2 * (math.log(1.2) - 1)]
    assert result.loss_A.tolist() == pytest.approx(expected, rel=1e-5)
    assert result.clipped_A.tolist() == [False, True, True, False]
    assert gradient.tolist() == pytest.approx([-2, -2.6, 0.8, 1.2], rel=1e-5)


def test_sapo_by_hand():
    """f = (4/τ) σ(τ(ρ−1)) and df/dlogp = 4 σ(1−σ) ρ; τ is 1 for A > 0 and 1.05 for A < 0. loss = −f A.

    ρ           A    τ(ρ−1)    σ          loss                d loss / d logp
    1           2    0         1/2        −2 · 4/2 = −4       −2 · 4/4 · 1 = −2
    1          −1    0         1/2        4/1.05/2             1
    1 + log 3   1    log 3     3/4        −3                  −4 · 3/16 · (1 + log 3) = −0.75 (1 + log 3)
    1 + log(3)/1.05
               −1    log 3     3/4        3/1.05               0.75 (1 + log(3)/1.05)
    """
    likelier, likelier_negative = 1 + math.log(3), 1 + math.log(3) / 1.05
    result, gradient = loss_of("sapo", [1.0, 1.0, likelier, likelier_negative], [2.0, -1.0, 1.0, -1.0])
    assert result.loss_A.tolist() == pytest.approx([-4, 2 / 1.05, -3, 3 / 1.05], rel=1e-6)
    assert gradient.tolist() == pytest.approx([-2, 1, -0.75 * likelier, 0.75 * likelier_negative], rel=1e-5)
    assert not result.clipped_A.any()


def test_gmpo_by_hand():
    """ε bounds log ratios d: at most 0.3 where A > 0, at least −0.2 where A < 0. g = exp(mean of what is left).

    d             A    c            g          loss per token    d (Σ loss) / d logp
    log 2, −0.1    1    0.3, −0.1    e^0.1      −g                0, −g           (the first is clipped)
    0.5, −0.4     −2    0.5, −0.2    e^0.15     2 g               2 g, 0          (the second is)
    """
    ratios = [2.0, math.exp(-0.1), math.exp(0.5), math.exp(-0.4)]
    result, gradient = loss_of("gmpo", ratios, [1.0, 1.0, -2.0, -2.0], sequences=[0, 0, 1, 1], old=-1.0)
    up, down = math.exp(0.1), math.exp(0.15)
    assert result.loss_A.tolist() == pytest.approx([-up, -up, 2 * down, 2 * down], rel=1e-5)
    assert result.clipped_A.tolist() == [True, False, False, True]
    assert gradient.tolist() == pytest.approx([0, -up, 2 * down, 0], rel=1e-5, abs=1e-6)


def sequence_form(name: str, paper: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    """Three sequences of one advantage each: the loss under its aggregation is the mean of `paper` (of the log ratios of
    a sequence and its advantage), with the same gradient."""
    sizes, advantages = [1, 3, 2], [2.0, 1.0, -1.0]
    differences = torch.tensor([0.1, 0.5, 0.2, 0.9, 1.0, -0.4])
    sequences = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    ours = differences.clone().requires_grad_()
    loss = get_policy_loss(name)
    result = loss.function(LossInputs(ours, torch.zeros(6), torch.tensor(advantages)[sequences], sequences), SETTINGS)
    total = (torch.tensor(sample_weights(loss.aggregation, sizes))[sequences] * result.loss_A).sum()
    total.backward()
    direct = differences.clone().requires_grad_()
    pieces = zip(direct.split(sizes), advantages, strict=True)
    expected = torch.stack([paper(piece, advantage) for piece, advantage in pieces]).mean()
    expected.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(ours.grad, direct.grad)


def test_gmpo_is_the_sequence_loss_of_its_paper():
    """−A Π_t |min(ρ_t^s A', clip(ρ_t^s) A')|^(1/|o|) with s the sign of A and A' = 1: the minimum is taken of log ratios
    here, which is the same."""

    def paper(differences: torch.Tensor, advantage: float) -> torch.Tensor:
        sign = math.copysign(1, advantage)
        least = torch.minimum(sign * differences, sign * differences.clamp(-0.2, 0.3))
        return -advantage * (sign * least).mean().exp()

    sequence_form("gmpo", paper)


def test_luspo_is_gspo_times_the_length():
    """Equation of arXiv:2602.05261: the mean over samples of −min(s A, clip(s) A) · |o|."""

    def paper(differences: torch.Tensor, advantage: float) -> torch.Tensor:
        ratio = differences.mean().exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage) * len(differences)

    sequence_form("luspo", paper)


def test_vespo_by_hand():
    """φ(W) = W² e^{3(1 − W)} for A > 0, W³ e^{2(1 − W)} for A < 0; W of a sequence is the product of its ratios.

    ratios       A    W      φ             loss per token       d loss / d logp
    2, 1/2       3    1      1             −3 log π             −3
    2            1    2      4 e^−3        −φ log π             −φ
    1/2, 1/2    −1    1/4    e^1.5 / 64     φ log π              φ
    """
    ratios, advantages = [2.0, 0.5, 2.0, 0.5, 0.5], [3.0, 3.0, 1.0, -1.0, -1.0]
    result, gradient = loss_of("vespo", ratios, advantages, sequences=[0, 0, 1, 2, 2], old=-1.0)
    kernel = [1, 1, 4 * math.exp(-3), math.exp(1.5) / 64, math.exp(1.5) / 64]
    expected = [-k * a for k, a in zip(kernel, advantages, strict=True)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5)
    logprobs = [math.log(ratio) - 1 for ratio in ratios]
    assert result.loss_A.tolist() == pytest.approx([g * p for g, p in zip(expected, logprobs, strict=True)], rel=1e-5)
    assert not result.clipped_A.any()


def test_vespo_has_its_largest_weight_where_the_paper_says():
    """c1/W = c2 at W = c1/c2: φ is (2/3)² e for A > 0 and (3/2)³ / e for A < 0, and less on both sides."""
    for advantage, peak, largest in ((1.0, 2 / 3, 4 / 9 * math.e), (-1.0, 3 / 2, 27 / 8 / math.e)):
        weights = [
            abs(float(loss_of("vespo", [peak * factor], [advantage])[1])) for factor in (0.01, 0.9, 1.0, 1.1, 30.0)
        ]
        assert weights[2] == pytest.approx(largest, rel=1e-5)
        assert weights[0] < weights[1] < weights[2] > weights[3] > weights[4]


HALF = math.log(0.5)


def test_dppo_with_total_variation_by_hand():
    """π_old = 1/2, so D = |ρ − 1|/2; its bound is 0.3 where A > 0, and 0.2 where A < 0. Weight min(ρ, 20) where kept.

    ρ      A    D       kept?                                   d loss / d logp
    1.5    2    0.25    yes                                     −3
    1.8    2    0.4     no: above the bound, and A pulls up      0
    1.8   −1    0.4     yes: A pulls back                        1.8
    0.5   −1    0.25    no: above the bound, and A pulls down    0
    0.3    2    0.35    yes: A pulls back                       −0.6

    With π_old = e^−7 a ratio of 25 moves 0.02 of probability: kept, with the weight 20.
    """
    ratios, advantages = [1.5, 1.8, 1.8, 0.5, 0.3], [2.0, 2.0, -1.0, -1.0, 2.0]
    result, gradient = loss_of("dppo_tv", ratios, advantages, old=HALF)
    assert result.clipped_A.tolist() == [False, True, False, True, False]
    expected = [-3, 0, 1.8, 0, -0.6]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5)
    logprobs = [math.log(ratio / 2) for ratio in ratios]
    assert result.loss_A.tolist() == pytest.approx([g * p for g, p in zip(expected, logprobs, strict=True)], rel=1e-5)
    result, gradient = loss_of("dppo_tv", [25.0], [1.0], old=-7.0)
    assert not result.clipped_A.any()
    assert gradient.tolist() == pytest.approx([-20], rel=1e-5)


def test_dppo_with_kl_by_hand():
    """π_old = 1/2: KL = −½ log(4 p (1 − p)), with bounds of 0.3 where A > 0 and 0.2 where A < 0.

    p       ρ      A    KL       kept?
    0.75    1.5    1    0.144    yes
    0.9     1.8    1    0.511    no
    0.9     1.8   −1    0.511    yes: A pulls back
    0.2     0.4   −1    0.223    no
    0.1     0.2    1    0.511    yes: A pulls back
    """
    ratios, advantages = [1.5, 1.8, 1.8, 0.4, 0.2], [1.0, 1.0, -1.0, -1.0, 1.0]
    result, gradient = loss_of("dppo_kl", ratios, advantages, old=HALF)
    assert result.clipped_A.tolist() == [False, True, False, True, False]
    assert gradient.tolist() == pytest.approx([-1.5, 0, 1.8, 0, -0.2], rel=1e-5)


def test_the_kl_of_two_events_by_hand():
    """½ log(½/¾) + ½ log(½/¼) = −½ log ¾; of equal ones 0; of a token that was certain, and is at ½: log 2."""
    p, q = torch.tensor([0.5, 0.3, 1.0]).log(), torch.tensor([0.75, 0.3, 0.5]).log()
    assert binary_kl(p, q).tolist() == pytest.approx([-0.5 * math.log(0.75), 0, math.log(2)], abs=1e-6)
    assert torch.isfinite(binary_kl(q, p)).all()


def test_clip_cov_and_kl_cov_by_hand():
    """ρ = 1.5, 1.2, 0.5, 1.2 with A = 2, −1, 2, 1; the last two tokens are chosen.

    clip_cov   −min(ρA, clip(ρ)A) = −2.6, 1.2, −1 → 0, −1.2 → 0          gradients 0 (clipped), 1.2, 0, 0
    kl_cov     −ρA = −3, 1.2, and −1 + log 2, −1.2 + log 1.2             gradients −3, 1.2, −1 − 1, −1.2 + 1
    """
    ratios, advantages = [1.5, 1.2, 0.5, 1.2], torch.tensor([2.0, -1.0, 2.0, 1.0])
    found = {}
    for name in ("clip_cov", "kl_cov"):
        logprobs = torch.tensor(ratios).log().requires_grad_()
        chosen = torch.tensor([False, False, True, True])
        inputs = LossInputs(logprobs, torch.zeros(4), advantages, torch.zeros(4).long(), chosen)
        result = get_policy_loss(name).function(inputs, SETTINGS)
        result.loss_A.sum().backward()
        found[name] = (result.loss_A.tolist(), logprobs.grad.tolist(), result.clipped_A.tolist())
    assert found["clip_cov"][0] == pytest.approx([-2.6, 1.2, 0, 0])
    assert found["clip_cov"][1] == pytest.approx([0, 1.2, 0, 0], abs=1e-6)
    assert found["clip_cov"][2] == [True, False, True, True]
    assert found["kl_cov"][0] == pytest.approx([-3, 1.2, -1 + math.log(2), -1.2 + math.log(1.2)])
    assert found["kl_cov"][1] == pytest.approx([-3, 1.2, -2, -0.2])
    assert not any(found["kl_cov"][2])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_the_old_policy_every_loss_has_the_plain_gradient(name):
    """ρ = 1: d loss / d logp = −A, whatever the loss."""
    advantages = [1.5, -0.5, 0.0, 2.0]
    result, gradient = loss_of(name, [1.0] * 4, advantages, sequences=[0, 0, 1, 1], old=-0.7)
    assert gradient.tolist() == pytest.approx([-a for a in advantages], rel=1e-6)
    assert not result.clipped_A.any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_wild_ratio_stays_finite(name):
    logprobs = torch.tensor([500.0, -500.0, -0.1], requires_grad=True)
    inputs = LossInputs(logprobs, torch.zeros(3), torch.tensor([-1.0, 1.0, 1.0]), torch.tensor([0, 1, 2]))
    loss = get_policy_loss(name).function(inputs, SETTINGS).loss_A
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


TOKENS = st.tuples(*[st.floats(-2, 2, width=32)] * 3)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(deadline=None, max_examples=30)
@given(
    samples=st.lists(st.lists(TOKENS, min_size=1, max_size=5), min_size=1, max_size=5),
    random=st.randoms(use_true_random=False),
)
def test_a_sample_s_loss_does_not_depend_on_its_company(name, samples, random):
    def one_batch(chosen: list[list[tuple[float, float, float]]]) -> list[list[float]]:
        logprobs, old, advantages = torch.tensor([token for sample in chosen for token in sample]).T
        sizes = [len(sample) for sample in chosen]
        sequences = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor(sizes))
        loss = get_policy_loss(name).function(LossInputs(logprobs, old, advantages, sequences), SETTINGS).loss_A
        return [piece.tolist() for piece in loss.split(sizes)]

    order = list(range(len(samples)))
    random.shuffle(order)
    whole = one_batch(samples)
    assert [one_batch([sample])[0] for sample in samples] == [
        pytest.approx(piece, rel=1e-5, abs=1e-6) for piece in whole
    ]
    shuffled = one_batch([samples[i] for i in order])
    assert shuffled == [pytest.approx(whole[i], rel=1e-5, abs=1e-6) for i in order]


def test_value_loss_and_gradient_in_each_region():
    """ε = 1, v_old = 0, so v_clip = clamp(v, −1, 1); where v itself counts, d loss / d v = v − R.

     v    R    v_clip    (v_clip − R)²    (v − R)²    loss    d loss / d v
     0.5  2    0.5       2.25             2.25        1.125   −1.5     within the band
     3    4    1         9                1           4.5      0       moved far towards R already: held
     3    0    1         1                9           4.5      3       moved away from R: pulled back
    −3   −5   −1         16               4           8        0       the same, downwards
    −3    0   −1         1                9           4.5     −3
     3    1.9  1         0.81             1.21        0.605    1.1     past R: v is the worse, pulled back
    """
    values = torch.tensor([0.5, 3.0, 3.0, -3.0, -3.0, 3.0], requires_grad=True)
    returns = torch.tensor([2.0, 4.0, 0.0, -5.0, 0.0, 1.9])
    result = value_loss(values, torch.zeros(6), returns, value_clip=1.0)
    assert result.loss_A.tolist() == pytest.approx([1.125, 4.5, 4.5, 8, 4.5, 0.605], rel=1e-6)
    assert result.clipped_A.tolist() == [False, True, False, True, False, False]
    result.loss_A.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.5, 0, 3, 0, -3, 1.1], rel=1e-6)


def test_the_band_lies_around_the_old_value():
    """v_old = 10, ε = 0.5, v = 11, R = 12: v_clip = 10.5, loss ½ · 1.5² = 1.125, held."""
    values = torch.tensor([11.0], requires_grad=True)
    result = value_loss(values, torch.tensor([10.0]), torch.tensor([12.0]), value_clip=0.5)
    result.loss_A.sum().backward()
    assert (result.loss_A.tolist(), values.grad.tolist()) == ([1.125], [0])
