"""The parts of `openrlhf prove` that need no trial: how proofs are tried, sizes, words of a command, the plain formulas."""

import dataclasses
import io
import math
from types import SimpleNamespace

import pytest
import torch

from openrlhf.algorithms.corrections import CORRECTIONS, CorrectionInputs, get_correction
from openrlhf.algorithms.covariance import chosen_tokens
from openrlhf.algorithms.losses import POLICY_LOSSES, LossInputs
from openrlhf.algorithms.reduction import sample_weights
from openrlhf.cli.prove import _command, _launcher, _own
from openrlhf.config import parse
from openrlhf.proving import reference
from openrlhf.proving.registry import Disproved, Proof, Status, Verdict, tried
from openrlhf.proving.report import Report, print_report
from openrlhf.proving.sizes import LARGEST, SMALLEST, sizes_for
from openrlhf.runs.rl_models import policy_settings
from openrlhf.utils.randomness import derive_seed, uniforms


def made(name: str, run, **changes) -> Proof:
    fields = {"title": f"the title of {name}", "shows": "what is so", "remedy": "what to do", "kinds": ("rl",)}
    fields |= {"unless": lambda trial: None, "cost": 1.0, "first": False}
    return Proof(name=name, run=run, **fields | changes)


def disproved(trial):
    raise Disproved("it is 2, and 3 by the formula")


def broken(trial):
    raise KeyError("gone")


def test_every_proof_is_a_verdict():
    trial = SimpleNamespace(kind="rl", blocked=None)
    proofs = [
        made("good", lambda trial: "seen"),
        made("bad", disproved),
        made("broken", broken),
        made("elsewhere", broken, unless=lambda trial: "there is no critic"),
        made("supervised", broken, kinds=("sft",)),
    ]
    verdicts = tried(trial, proofs)
    assert [(v.proof.name, str(v.status)) for v in verdicts] == [
        ("good", "pass"),
        ("bad", "fail"),
        ("broken", "fail"),
        ("elsewhere", "does not apply"),
    ]
    assert verdicts[1].detail == "it is 2, and 3 by the formula"
    assert verdicts[2].detail.startswith("KeyError: 'gone' (")
    assert "test_proving.py:" in verdicts[2].detail, "what breaks is found"


def test_what_there_is_no_time_for_is_not_proved():
    """A clock that goes on by one second at each look: the second proof begins after the deadline of 1.5 s."""
    clock = iter(range(10))
    trial = SimpleNamespace(kind="rl", blocked=None)
    first, second = tried(
        trial, [made("a", lambda t: ""), made("b", lambda t: "")], deadline=1.5, now=lambda: next(clock)
    )
    assert (first.status, second.status) == (Status.PASS, Status.UNTRIED)
    report = Report(title="m", verdicts=[first, second], notes=[], shown=[], seconds=3.0)
    assert report.status == 1


def test_nothing_is_tried_on_a_trial_that_plays_nothing():
    trial = SimpleNamespace(kind="rl", blocked="nothing was played")
    verdicts = tried(trial, [made("rollouts", disproved, first=True), made("loss", lambda t: "")])
    assert [v.status for v in verdicts] == [Status.FAIL, Status.UNTRIED]


def test_a_failure_is_told_with_what_to_do():
    verdict = Verdict(proof=made("loss", disproved), status=Status.FAIL, detail="it is 2", seconds=0.1)
    written = io.StringIO()
    print_report(Report(title="m · rl", verdicts=[verdict], notes=["in fp32"], shown=[], seconds=1.0), written)
    lines = written.getvalue()
    for said in ("the title of loss", "loss failed: it is 2", "it should be: what is so", "what to do:   what to do"):
        assert said in lines
    assert "note: in fp32" in lines
    assert "1 fail; 1 s" in lines


@pytest.mark.parametrize(
    ("words", "place", "command", "own", "launcher"),
    [
        ("rl --pretrain sft", 0, "train_ppo_ray", "", ""),
        ("--json --minutes 3 train_dpo --x 1", 3, "train_dpo", "--json --minutes 3", ""),
        ("python3 -m openrlhf.cli.train_sft --x", 2, "train_sft", "", ""),
        ("--json /v/bin/torchrun --nproc-per-node 2 -m openrlhf.cli.train_rm", 5, "train_rm", "--json", "torchrun"),
        ("ray job submit -- python -m openrlhf.cli.train_ppo_ray", 6, "train_ppo_ray", "", ""),
    ],
)
def test_a_command_is_found_among_its_words(words, place, command, own, launcher):
    words = words.split()
    assert _command(words) == (place, command)
    assert _own(words[:place]) == own.split()
    assert _launcher(words[:place]) == launcher


def test_a_larger_model_has_a_smaller_trial():
    sizes = [
        sizes_for(parameters, minutes=5, speed=3e10, prompt_tokens=50, gradients=25)
        for parameters in (10**5, 10**8, 10**10)
    ]
    assert sizes[0] == LARGEST
    assert sizes[-1] == SMALLEST
    tokens = [one.samples * (50 + one.response) for one in sizes]
    assert tokens == sorted(tokens, reverse=True)


def rl(**flags):
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse("train_ppo_ray", ["--algo.kl.init_coef", "0", *words])


def episode(prompt, *turns, truncated=False):
    """Turns: (tokens, reward)."""
    lengths, rewards = zip(*turns, strict=True)
    return reference.PlainEpisode(group=(prompt, ""), turns=list(lengths), rewards=list(rewards), truncated=truncated)


def test_plain_advantages_by_hand():
    """Two samples of one prompt that earned 1 and 0: z-scores ±1/√2 (unbiased deviation √½); the other prompt's agree.

    RLOO: each less the other. REINFORCE with γ = ½ and two turns that earn 0 and 1: returns ½·½·1, ½·1, 1 of three
    tokens, whitened over all.
    """
    group = [episode(0, (2, 1.0)), episode(0, (1, 0.0)), episode(1, (1, 0.5)), episode(1, (2, 0.5))]
    normed = reference.advantages(group, rl(advantage_estimator="group_norm"))
    half = 1 / math.sqrt(2)
    assert normed == [pytest.approx([half] * 2), pytest.approx([-half]), [0.0], [0.0, 0.0]]
    assert reference.advantages(group[:2], rl(advantage_estimator="rloo")) == [[1.0, 1.0], [-1.0]]
    plain = reference.advantages([episode(0, (1, 0.0), (2, 1.0))], rl(advantage_estimator="reinforce", gamma=0.5))
    values = [0.25, 0.5, 1.0]
    mean = sum(values) / 3
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    assert plain == [pytest.approx([(v - mean) / deviation for v in values])]


def test_plain_loss_by_hand():
    """Ratios 4 and 1 with advantages −1 and 2: −max(min(−4, −1.2), −3) = 3 with a dual clip of 3, and −2; their mean."""
    sample = reference.PlainSample(
        episode=0,
        prompt=0,
        current=torch.tensor([math.log(4.0), 0.0]),
        old=torch.zeros(2),
        advantages=torch.tensor([-1.0, 2.0]),
    )
    config = rl(**{"actor.dual_clip": 3, "advantage_estimator": "group_norm"})
    assert float(reference.policy_loss([sample], config, kl_coef=0.0)) == pytest.approx((3 - 2) / 2)
    without = rl(advantage_estimator="group_norm")
    assert float(reference.policy_loss([sample], without, kl_coef=0.0)) == pytest.approx((4 - 2) / 2)


def both_losses(config, samples: list[reference.PlainSample]) -> list[tuple[float, list[float]]]:
    """The policy loss of a step and its gradient along the log-probs: by the trainer's functions, and by the plain one."""
    leaf = torch.cat([sample.current for sample in samples]).requires_grad_()
    sizes = [len(sample.current) for sample in samples]
    old, advantages, rollout = (
        torch.cat([getattr(sample, name) for sample in samples]) for name in ("old", "advantages", "rollout")
    )
    sequences = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes))
    settings = policy_settings(config)
    base = rollout if config.corrects_off_policy and settings.loss.corrects_itself else old
    chosen = None
    if settings.loss.chosen is not None:
        seeds = [derive_seed("chosen", 1, 0, *sample.key) for sample in samples]
        drawn = [torch.from_numpy(uniforms(size, seed=seed)) for size, seed in zip(sizes, seeds, strict=True)]
        chosen = chosen_tokens(advantages, old, torch.cat(drawn), settings.loss.chosen)
        assert int(chosen.sum()) == 1
    token_losses = settings.loss.function(LossInputs(leaf, base, advantages, sequences, chosen), settings.clip).loss_A
    if settings.correction is not None and not settings.loss.corrects_itself:
        name, low, high = settings.correction.name, settings.correction.low, settings.correction.high
        inputs = CorrectionInputs(old, rollout, sequences)
        token_losses = get_correction(name)(inputs, low=low, high=high).weights_A * token_losses
    weights = sample_weights(config.loss_aggregation, sizes, prompts=[sample.prompt for sample in samples])
    ours = (torch.tensor(weights, dtype=leaf.dtype)[sequences] * token_losses).sum()
    pieces = leaf.split(sizes)
    plain = reference.policy_loss(
        [dataclasses.replace(sample, current=piece) for sample, piece in zip(samples, pieces, strict=True)],
        config,
        kl_coef=0.0,
    )
    return [(loss.item(), torch.autograd.grad(loss, leaf, retain_graph=True)[0].tolist()) for loss in (ours, plain)]


@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_plain_loss_is_the_trainer_s(loss, correction):
    """Five samples of two prompts, probabilities from rare to certain, ratios on both sides of every bound."""
    flags = {"policy_loss_type": loss, "advantage_estimator": "group_norm"}
    if correction is not None:
        flags |= {"enable_vllm_is_correction": True, "vllm_is_correction_type": correction}
    if loss == "ppo":
        flags["actor.dual_clip"] = 3
    random, samples = torch.Generator().manual_seed(1), []
    for index, size in enumerate((1, 7, 4, 12, 6)):
        current = (0.02 + 0.98 * torch.rand(size, generator=random, dtype=torch.float64)).log()
        old, rollout = (
            current + 0.5 * torch.randn(size, generator=random, dtype=torch.float64) - gap for gap in (0.1, 0.2)
        )
        advantages = torch.randn(size, generator=random, dtype=torch.float64)
        samples.append(
            reference.PlainSample(
                episode=index,
                prompt=index // 3,
                current=current,
                old=old,
                advantages=advantages,
                rollout=rollout,
                key=(index // 3, index, 0),
            )
        )
    (ours, gradient), (plain, plain_gradient) = both_losses(rl(**flags), samples)
    assert ours == pytest.approx(plain, rel=1e-6)
    assert gradient == pytest.approx(plain_gradient, rel=1e-6, abs=1e-12)
    assert max(map(abs, gradient)) > 1e-3


def test_a_gradient_that_is_missing_is_a_difference():
    one, two = {"a": torch.tensor([3.0])}, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert reference.gradient_gap(one, two) == (pytest.approx(4 / 5), "b")
    assert reference.gradient_gap(two, two) == (0.0, "")
    assert reference.gradient_gap({"a": torch.tensor([math.nan])}, one)[1] == "a"
