"""What the supervised trainers minimise, against plain forwards of one sequence at a time; and invariances."""

import copy
import dataclasses
import math

import pytest
import torch
from small_supervised import (
    CPU,
    Judged,
    Samples,
    example,
    make_policy,
    make_reward_model,
    pair,
    random_pairs,
)

from openrlhf.algorithms.preferences import get_reward_loss
from openrlhf.config.models import DPOModelSection
from openrlhf.data.packing import by_tokens
from openrlhf.trainers.dpo import DPOObjective
from openrlhf.trainers.kto import KTOObjective, Mismatched
from openrlhf.trainers.preferences import Reference, common_beginning, pack_pairs
from openrlhf.trainers.reward_model import RewardObjective, reward_statistics
from openrlhf.trainers.sft import SFTObjective
from openrlhf.trainers.supervised import WholeSet, measure
from openrlhf.types import ImageInput, PlacedImage

PAIRS = random_pairs(8)
EXAMPLES = Samples(p.chosen for p in PAIRS)
ANSWERS = Samples(Judged(example=e, desirable=i % 3 != 0) for i, e in enumerate(EXAMPLES))


@pytest.fixture(scope="module")
def policy():
    return make_policy(hidden=16)


@pytest.fixture(scope="module")
def other():
    """A reference that has moved away."""
    return make_policy(seed=1, hidden=16)


@pytest.fixture(scope="module")
def scorer():
    return make_reward_model(hidden=16)


def dpo(reference, pairs=PAIRS, **settings):
    return DPOObjective(
        pairs, DPOModelSection(beta=0.5, **settings), reference=Reference(reference, device=CPU), device=CPU
    )


def kto(reference, answers=ANSWERS, *, budget=10_000):
    return KTOObjective(
        answers,
        beta=0.5,
        reference=Reference(reference, device=CPU),
        max_len=12,
        tokens_per_forward=budget,
        seed=0,
        device=CPU,
    )


def rewards(pairs=PAIRS, *, loss="sigmoid", margins=True):
    return RewardObjective(pairs, loss=get_reward_loss(loss), margins=margins, device=CPU)


def run(objective, module, micro_batches):
    """Loss, gradient and metrics of one step cut like this."""
    module = copy.deepcopy(module)
    compute_loss = objective.begin(module, WholeSet([i for micro in micro_batches for i in micro], micro_batches))
    loss, metrics = 0.0, None
    for micro in micro_batches:
        computed = compute_loss(micro)
        computed.loss.backward()
        loss += float(computed.loss.detach())
        if metrics is None:
            metrics = computed.metrics
        else:
            metrics.merge(computed.metrics)
    return loss, torch.cat([p.grad.flatten() for p in module.parameters()]), metrics.values()


def token_logprobs(policy, example):
    """log-probs of the targets by one plain forward of this sequence alone."""
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(example.token_ids[None]).logits[0].log_softmax(-1)
    targets = example.target_mask.nonzero().flatten()
    return logits[targets - 1, example.token_ids[targets]]


def scores(model, examples):
    body = copy.deepcopy(model.model)
    body.set_attn_implementation("eager")
    with torch.no_grad():
        return [float(model.head(body(e.token_ids[None])[0][0, -1:])) for e in examples]


# ------------------------------------------------------------------------------------------ against plain forwards


def test_sft_is_the_mean_over_all_targets(policy):
    logprobs = torch.cat([token_logprobs(policy, e) for e in EXAMPLES])
    loss, _, metrics = run(SFTObjective(EXAMPLES, device=CPU), policy, [range(8)])
    assert loss == pytest.approx(-float(logprobs.mean()), rel=1e-5)
    assert metrics == {"gpt_loss": pytest.approx(loss, rel=1e-5)}
    evaluated = measure(SFTObjective(EXAMPLES, device=CPU), policy, tokens_per_forward=16)
    assert evaluated == {"eval gpt_loss": pytest.approx(loss, rel=1e-5)}


@pytest.mark.parametrize(("loss", "margins"), [("sigmoid", True), ("sigmoid", False), ("logexp", True)])
def test_reward_model_by_single_scores(scorer, loss, margins):
    chosen = scores(scorer, [p.chosen for p in PAIRS])
    rejected = scores(scorer, [p.rejected for p in PAIRS])
    used = [p.margin if margins and loss == "sigmoid" else 0.0 for p in PAIRS]
    expected = [math.log1p(math.exp(-(c - r - m))) for c, r, m in zip(chosen, rejected, used, strict=True)]
    got, _, metrics = run(rewards(loss=loss, margins=margins), scorer, [range(8)])
    assert got == pytest.approx(sum(expected) / 8, rel=1e-5)
    everything = torch.tensor(chosen + rejected, dtype=torch.float64)
    assert metrics == {
        "loss": pytest.approx(got, rel=1e-5),
        "acc": sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 8,
        "chosen_reward": pytest.approx(sum(chosen) / 8, rel=1e-4, abs=1e-6),
        "reject_reward": pytest.approx(sum(rejected) / 8, rel=1e-4, abs=1e-6),
        "reward_mean": pytest.approx(float(everything.mean()), rel=1e-4, abs=1e-6),
        "reward_std": pytest.approx(float(everything.std(correction=0)), rel=1e-4),
    }
    evaluated = measure(rewards(loss=loss, margins=margins), scorer, tokens_per_forward=24)
    assert evaluated == {
        "eval_loss": pytest.approx(metrics["loss"], rel=1e-5),
        "acc_mean": metrics["acc"],
        "reward_mean": pytest.approx(metrics["reward_mean"], rel=1e-4, abs=1e-6),
        "reward_std": pytest.approx(metrics["reward_std"], rel=1e-4),
    }


def test_statistics_of_an_evaluation():
    assert reward_statistics({"reward_mean": 0.5, "reward_std": 2.0}) == (0.5, 2.0)
    assert reward_statistics({"reward_mean": 0.5, "reward_std": 0.0}) is None
    assert reward_statistics({}) is None


@pytest.mark.parametrize(
    ("settings", "of_gap"),
    [
        ({}, lambda h: math.log1p(math.exp(-0.5 * h))),
        (
            {"label_smoothing": 0.2},
            lambda h: 0.8 * math.log1p(math.exp(-0.5 * h)) + 0.2 * math.log1p(math.exp(0.5 * h)),
        ),
        ({"ipo_enable": True}, lambda h: (h - 1.0) ** 2),
    ],
)
def test_dpo_by_sums_of_log_probs(policy, other, settings, of_gap):
    """β = 0.5; h from four plain forwards a pair; rewards are β (log π − log π_ref)."""
    sums = [
        [float(token_logprobs(model, answer).sum()) for model in (policy, other) for answer in (p.chosen, p.rejected)]
        for p in PAIRS
    ]
    gaps = [(c - r) - (c_ref - r_ref) for c, r, c_ref, r_ref in sums]
    loss, _, metrics = run(dpo(other, **settings), policy, [range(8)])
    assert loss == pytest.approx(sum(map(of_gap, gaps)) / 8, rel=1e-5)
    assert metrics == {
        "loss": pytest.approx(loss, rel=1e-5),
        "acc": sum(h > 0 for h in gaps) / 8,
        "chosen_reward": pytest.approx(sum(0.5 * (c - c_ref) for c, _, c_ref, _ in sums) / 8, rel=1e-4, abs=1e-5),
        "reject_reward": pytest.approx(sum(0.5 * (r - r_ref) for _, r, _, r_ref in sums) / 8, rel=1e-4, abs=1e-5),
    }
    evaluated = measure(dpo(other, **settings), policy, tokens_per_forward=40)
    assert evaluated == {"eval_loss": pytest.approx(loss, rel=1e-5), "acc_mean": metrics["acc"]}


def test_the_nll_term_is_a_mean_of_means_over_chosen_answers(policy, other):
    plain, _, _ = run(dpo(other), policy, [range(8)])
    nll = sum(-float(token_logprobs(policy, p.chosen).mean()) for p in PAIRS) / 8
    loss, _, metrics = run(dpo(other, nll_loss_coef=0.3), policy, [range(8)])
    assert metrics["nll_loss"] == pytest.approx(nll, rel=1e-5)
    assert loss == pytest.approx(plain + 0.3 * nll, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


def test_kto_by_sums_of_log_probs(policy, other):
    """β = 0.5; z₀ is the mean log-ratio of the mismatched pairs of the step, held at 0."""
    strangers = Mismatched(ANSWERS, max_len=12, seed=0)

    def ratio(e):
        return float(token_logprobs(policy, e).sum() - token_logprobs(other, e).sum())

    z0 = max(0.0, sum(map(ratio, strangers)) / 8)
    values = [0.5 * (ratio(a.example) - z0) * (1 if a.desirable else -1) for a in ANSWERS]
    loss, _, metrics = run(kto(other), policy, [range(8)])
    assert loss == pytest.approx(sum(1 - 1 / (1 + math.exp(-v)) for v in values) / 8, rel=1e-5)
    assert metrics["kl"] == pytest.approx(z0, rel=1e-4, abs=1e-6)
    assert metrics["acc"] == sum(v > 0 for v in values) / 8
    desirable = [0.5 * ratio(a.example) for a in ANSWERS if a.desirable]
    assert metrics["chosen_reward"] == pytest.approx(sum(desirable) / len(desirable), rel=1e-4, abs=1e-5)


def test_kto_reference_point_is_above_zero_where_the_policy_left_its_reference():
    """The other way round: then z₀ is not held at 0, and the loss depends on it."""
    policy, other = make_policy(seed=1, hidden=16), make_policy(hidden=16)
    points = [run(kto(b), a, [range(8)])[2]["kl"] for a, b in ((policy, other), (other, policy))]
    assert min(points) == 0.0
    assert max(points) > 0.0


# ------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("name", ["sft", "rm", "dpo", "ipo", "nll", "kto"])
@pytest.mark.parametrize("cut", ["budget 40", "one at a time", "reversed", "uneven"])
def test_cutting_and_order_change_nothing(name, cut, policy, other, scorer):
    module = scorer if name == "rm" else policy
    make = {
        "sft": lambda: SFTObjective(EXAMPLES, device=CPU),
        "rm": rewards,
        "dpo": lambda: dpo(other),
        "ipo": lambda: dpo(other, ipo_enable=True),
        "nll": lambda: dpo(other, nll_loss_coef=0.3),
        "kto": lambda: kto(other, budget=13),
    }[name]
    objective = make()
    cuts = {
        "budget 40": by_tokens(range(8), objective.lengths, budget=40),
        "one at a time": [[i] for i in range(8)],
        "reversed": [list(range(8))[::-1]],
        "uneven": [[3], [7, 0, 1, 2, 4], [6, 5]],
    }
    whole_loss, whole_gradient, whole_metrics = run(make(), module, [range(8)])
    loss, gradient, metrics = run(objective, module, cuts[cut])
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert (gradient - whole_gradient).norm() <= 1e-5 * whole_gradient.norm()
    assert whole_gradient.norm() > 1e-3
    assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)


def test_pairs_share_what_they_begin_with(policy, other):
    """Chosen 2 3 4 5, rejected 2 3 4 6 7: three tokens in common, one of the answer among them."""
    pairs = Samples([pair([2, 3], [4, 5], [4, 6, 7]), pair([8], [9], [9, 9])])
    packed = pack_pairs(pairs)
    assert packed.shared_prefixes == (0, 3, 0, 1)
    assert packed.cu_seqlens.tolist() == [0, 4, 9, 11, 14]
    assert packed.action_positions.tolist() == [2, 3, 6, 7, 8, 10, 12, 13]
    apart = -sum(float(token_logprobs(policy, p.chosen).sum()) for p in pairs)
    together = policy(packed, temperature=1.0).logprobs_A[torch.tensor([0, 1, 5])].sum()
    assert -float(together.detach()) == pytest.approx(apart, rel=1e-5)


def test_common_beginnings_leave_a_token_of_each():
    def of(a, b):
        return common_beginning(torch.tensor(a), torch.tensor(b))

    assert of([1, 2, 3], [1, 2, 4]) == 2
    assert of([1, 2, 3], [1, 2, 3]) == 2
    assert of([1, 2], [1, 2, 3]) == 1
    assert of([1], [1, 2]) == 0
    assert of([5, 2], [1, 2]) == 0


def test_other_images_with_the_same_tokens_are_not_shared():
    """7 is the placeholder: x 7 7 y, and answers that differ at the end."""
    one, same, other = (
        PlacedImage(1, ImageInput(tensors={}, token_ids=(7, 7), placeholder=7, digest=digest)) for digest in "aab"
    )
    first, second = torch.tensor([2, 7, 7, 3, 4, 5]), torch.tensor([2, 7, 7, 3, 6, 5])
    assert common_beginning(first, second, [one], [same]) == 4
    assert common_beginning(first, second, [one], [other]) == 1
    # Images of other sizes begin with the same tokens: neither is shared in part.
    longer = PlacedImage(1, ImageInput(tensors={}, token_ids=(7, 7, 7), placeholder=7, digest="c"))
    assert common_beginning(first, torch.tensor([2, 7, 7, 7, 3, 4]), [one], [longer]) == 1
    assert common_beginning(first[:3], torch.tensor([2, 7, 7, 7, 3, 4]), [one], [longer]) == 1


# ---------------------------------------------------------------------------------------------------- reference


class Counting(torch.nn.Module):
    """A reference that counts the sequences it is shown."""

    def __init__(self, module):
        super().__init__()
        self.module, self.seen = module, 0

    def forward(self, tokens, **options):
        self.seen += tokens.num_sequences
        return self.module(tokens, **options)


@pytest.mark.parametrize(("make", "per_sample"), [(dpo, 2), (kto, 2)])
def test_the_reference_sees_every_answer_once(make, per_sample, policy, other):
    reference = Counting(other)
    objective = make(reference)
    first = run(objective, policy, [[0, 1], [2, 3]])
    assert reference.seen == 4 * per_sample
    again = run(objective, policy, [[0, 1], [2, 3]])
    assert reference.seen == 4 * per_sample
    assert again[0] == first[0]
    run(objective, policy, [[3, 4]])
    assert reference.seen == 5 * per_sample

    unasked = Counting(other)
    resumed = make(unasked)
    resumed.load_state_dict(objective.state_dict())
    run(resumed, policy, [[0, 1, 2], [3, 4]])
    assert unasked.seen == 0


def test_dpo_and_kto_give_the_reference_no_gradient(policy, other):
    reference = copy.deepcopy(other)
    run(dpo(reference), policy, [range(8)])
    run(kto(reference), policy, [range(8)])
    assert all(p.grad is None for p in reference.parameters())


def judged(*examples):
    return [Judged(example=e, desirable=True) for e in examples]


def test_mismatched_pairs_have_the_answer_of_another_prompt():
    """Two prompts of three answers each, in whatever order: each prompt gets an answer of the other one."""
    answers = judged(
        *(example([2, 3], [10, 10 + i]) for i in range(3)), *(example([4], [13, 13, 13]) for _ in range(3))
    )
    for seed in range(8):
        strangers = Mismatched(answers, max_len=9, seed=seed)
        assert strangers.lengths == [5, 5, 5, 3, 3, 3]
        for i, stranger in enumerate(strangers):
            prompt = [2, 3] if i < 3 else [4]
            assert len(stranger.token_ids) == strangers.lengths[i]
            assert stranger.token_ids[: len(prompt)].tolist() == prompt
            assert (stranger.token_ids[len(prompt)] == 13) == (i < 3)
            assert stranger.target_mask.tolist() == [j >= len(prompt) for j in range(strangers.lengths[i])]


def test_mismatched_prompts_may_differ_in_their_images_alone():
    answers = [
        Judged(example=dataclasses.replace(example([2], [10 + i]), image_keys=(i // 2,)), desirable=True)
        for i in range(4)
    ]
    for seed in range(8):
        strangers = [int(e.token_ids[1]) - 10 for e in Mismatched(answers, max_len=9, seed=seed)]
        assert [stranger // 2 for stranger in strangers] == [1, 1, 0, 0]


def test_mismatched_pairs_are_cut_and_always_there():
    """A prompt of 3 and an answer of 4 in 5 tokens; with one prompt only, an answer all the same."""

    def of(*examples):
        return [e.token_ids.tolist() for e in Mismatched(judged(*examples), max_len=5, seed=0)]

    assert of(example([2, 3, 4], [5]), example([6], [7, 8, 9, 10])) == [[2, 3, 4, 7, 8], [6, 5]]
    assert len(of(example([2], [3]), example([2], [4]))) == 2
    assert of(example([2], [3])) == [[2, 3]]
