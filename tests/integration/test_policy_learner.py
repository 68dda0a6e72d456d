"""The update's gradient depends on the samples alone, not on how they are cut, ordered or packed."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import make_mixture, random_routes
from small_sections import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.kl import get_kl_estimator
from openrlhf.algorithms.losses import POLICY_LOSSES, LossSettings, get_policy_loss
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.backends.state import NotFiniteError
from openrlhf.backends.torch import TorchBackend
from openrlhf.learners.accumulation import MicroBatching
from openrlhf.learners.policy import CorrectionSettings, PolicyLearner, PolicySettings, SeenColumns
from openrlhf.learners.scorer import Scorer, logprobs
from openrlhf.learners.steps import StepSettings, optimizer_steps
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.types import SampleKey, Segment, Supports, TrainingBatch, TrainingSample

CPU = torch.device("cpu")
VOCABULARY = 13


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        attn_implementation=ATTENTION,
    )
    return Policy(model)


class RecordingBackend:
    """A backend that remembers each step's gradient and changes nothing."""

    learning_rate = 0.0
    left_out = None

    def __init__(self, module: Policy) -> None:
        self.module = module
        self.gradients: list[torch.Tensor] = []

    def require_finite(self) -> list[str]:
        return []

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> float:
        gradient = torch.cat([p.grad.flatten() for p in self.module.parameters()])
        self.module.zero_grad()
        self.gradients.append(gradient)
        return float(gradient.norm())


def make_batch(lengths: list[tuple[int, int]], *, seed: int = 0) -> TrainingBatch:
    """Samples of (prompt, response) lengths with random tokens and advantages."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt, response) in enumerate(lengths):
        total = prompt + response
        mask = torch.arange(total) >= prompt
        samples.append(
            TrainingSample(
                key=SampleKey(index, 0),
                segment=Segment(
                    token_ids=torch.randint(VOCABULARY, (total,), generator=generator),
                    action_mask=mask,
                    rollout_logprobs=torch.where(mask, -1.0, 0.0),
                    versions=torch.where(mask, 0, -1).int(),
                    turn_rewards=torch.zeros(total),
                ),
                rewards_A=torch.zeros(response),
            )
        )
    batch = TrainingBatch(samples=samples)
    batch.advantages_A = torch.randn(batch.num_actions, generator=generator)
    return batch


def make_steps(batch: TrainingBatch, batching: MicroBatching, **changes):
    settings = {
        "epochs": 1,
        "batch_size": 1000,
        "aggregation": Aggregation.TOKEN,
        "constant_length": 7,
        "seed": 0,
        **changes,
    }
    return optimizer_steps(batch, StepSettings(batching=batching, **settings), round_index=1)


POLICY = PolicySettings(
    loss=get_policy_loss("ppo"),
    clip=LossSettings(clip_low=0.2, clip_high=0.2),
    temperature=0.7,
    entropy_coef=0.0,
)


def update(policy: Policy, batch: TrainingBatch, batching: MicroBatching, settings: PolicySettings = POLICY, **changes):
    backend = RecordingBackend(policy)
    learner = PolicyLearner(backend, settings, device=CPU)
    changes = {"chosen": settings.loss.chosen} | changes
    metrics = learner.update(make_steps(batch, batching, **changes), kl_coef=0.3)
    return backend.gradients, metrics.values()


def relative_gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


WHOLE = MicroBatching(tokens=10**6)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=9),
    budget=st.integers(15, 60),
    seed=st.integers(0, 99),
)
def test_gradient_and_means_do_not_depend_on_the_cut_or_the_order(policy, aggregation, lengths, budget, seed):
    batch = make_batch(lengths)
    (whole,), values = update(policy, batch, WHOLE, aggregation=aggregation)
    cuts = [MicroBatching(tokens=budget), MicroBatching(samples=1), MicroBatching(samples=3)]
    for cut in cuts:
        (gradient,), cut_values = update(policy, batch, cut, aggregation=aggregation, seed=seed)
        assert relative_gap(gradient, whole) < 1e-5
        assert cut_values == pytest.approx(values, rel=1e-5, abs=1e-6)


def with_supports(batch: TrainingBatch, *, seed: int = 0) -> TrainingBatch:
    """Of every kind; the second sample's distributions were whole."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, sample in enumerate(batch.samples):
        told = []
        for token in sample.segment.token_ids[sample.segment.action_mask].tolist():
            others = [other for other in torch.randperm(VOCABULARY, generator=generator).tolist() if other != token]
            size = int(torch.randint(-1, 5, (), generator=generator))
            told.append(None if size < 0 else sorted([token, *others[:size]]))
        supports = None if index == 1 else Supports.of(told)
        segment = dataclasses.replace(sample.segment, supports=supports)
        samples.append(dataclasses.replace(sample, segment=segment))
    made = TrainingBatch(samples=samples)
    made.advantages_A, made.old_logprobs_A = batch.advantages_A, batch.old_logprobs_A
    return made


@pytest.mark.parametrize("cut", [MicroBatching(tokens=20), MicroBatching(samples=1), MicroBatching(samples=3)])
def test_over_supports_the_gradient_does_not_depend_on_the_cut_or_the_order(policy, cut):
    """With entropy, and with a prompt that samples share."""
    batch = with_supports(make_batch([(3, 6), (2, 4), (5, 7), (6, 1), (1, 9), (4, 4), (4, 3)]))
    shared = batch.samples[5].segment
    ids = torch.cat([shared.token_ids[:4], batch.samples[6].segment.token_ids[4:]])
    segment = dataclasses.replace(batch.samples[6].segment, token_ids=ids)
    batch.samples[6] = dataclasses.replace(batch.samples[6], segment=segment)
    assert any(batch.pack(range(7)).tokens.shared_prefixes)
    entropic = dataclasses.replace(POLICY, entropy_coef=0.1)
    (whole,), values = update(policy, batch, WHOLE, entropic)
    for seed in (0, 1):
        (gradient,), cut_values = update(policy, batch, cut, entropic, seed=seed)
        assert relative_gap(gradient, whole) < 1e-5
        assert cut_values == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_over_supports_the_update_is_that_of_the_definition(policy):
    """log π and H of each token over its support alone, from the model's own logits; the reference's numbers, and those
    before the update, are over the same supports."""
    batch = with_supports(make_batch([(3, 6), (2, 4), (5, 7)]))
    scored_A = Scorer(policy, logprobs(0.7), batching=WHOLE, device=CPU).score(batch)
    entropic = dataclasses.replace(POLICY, entropy_coef=0.1)
    (gradient,), values = update(policy, batch, WHOLE, entropic)
    own_config = copy.deepcopy(policy.model.config)  # it is written to, and other tests use this policy
    plain = Qwen2ForCausalLM._from_config(own_config, attn_implementation="eager")
    plain.load_state_dict(policy.model.state_dict())
    loss, entropies, column = torch.zeros(()), [], []
    for index, sample in enumerate(batch.samples):
        segment = sample.segment
        logits = plain(segment.token_ids[None]).logits[0] / 0.7
        told = [[]] * segment.num_actions if segment.supports is None else segment.supports.tolist()
        positions = segment.action_mask.nonzero().flatten().tolist()
        for position, ids, advantage in zip(positions, told, batch.advantages_A[batch.actions_of(index)], strict=True):
            own = ids or list(range(VOCABULARY))
            log_p = logits[position - 1, own].log_softmax(-1)
            chosen = log_p[own.index(int(segment.token_ids[position]))]
            entropies.append(-(log_p.exp() * log_p).sum())
            column.append(chosen.detach())
            loss = loss - (chosen * advantage + 0.1 * entropies[-1]) / batch.num_actions
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    torch.testing.assert_close(scored_A, torch.stack(column), rtol=1e-5, atol=1e-5)
    assert relative_gap(gradient, expected) < 1e-5
    assert values["entropy_loss"] == pytest.approx(float(torch.stack(entropies).detach().mean()), rel=1e-5)
    whole, _ = update(policy, make_batch([(3, 6), (2, 4), (5, 7)]), WHOLE, entropic)
    assert relative_gap(whole[0], expected) > 0.1


class Reads(TorchDispatchMode):
    """Remembers the operations for which a process waits until a device has computed what it launched there."""

    WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in self.WAITING:
            self.events.append(str(function))
        return function(*args, **(kwargs or {}))


EVERYTHING = {
    name: PolicySettings(
        loss=get_policy_loss(name),
        clip=LossSettings(clip_low=0.2, clip_high=0.3),
        temperature=0.7,
        entropy_coef=0.1,
        kl_loss=get_kl_estimator("k3"),
        correction=CorrectionSettings(name="seq-mask-tis", low=0.5, high=2.0),
    )
    for name in POLICY_LOSSES
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_nothing_is_read_from_a_device_before_all_micro_batches_are_launched(policy, name):
    """A GPU would be idle after each of them, until the next one has reached it."""
    batch = make_batch([(3, 5), (2, 7), (4, 4), (1, 8)])
    batch.old_logprobs_A = batch.reference_logprobs_A = torch.full((batch.num_actions,), -2.0)
    chosen = get_policy_loss(name).chosen
    backend, steps = RecordingBackend(policy), make_steps(batch, MicroBatching(samples=1), chosen=chosen)
    reads = Reads()
    backend.backward = lambda loss: (loss.backward(), reads.events.append("backward"))
    learner = PolicyLearner(backend, EVERYTHING[name], device=CPU)
    assert len(list(steps[0])) == 4  # they are packed here; what packing reads is in this process's memory
    with reads:
        learner.update(steps, kl_coef=0.3, seen=SeenColumns())
    first = reads.events.index("backward")
    assert reads.events[first : first + 4] == ["backward"] * 4


def test_seen_columns_are_those_of_the_last_pass(policy):
    """Two passes in micro-batches of one sample; between them the weights move. A sample in no micro-batch has NaN."""
    batch, seen = make_batch([(3, 5), (2, 7), (4, 4)]), SeenColumns()
    batch.advantages_A[batch.actions_of(1)] = 0.0
    mine = copy.deepcopy(policy)
    backend, outputs = RecordingBackend(mine), []

    def move() -> float:
        outputs.append(Scorer(mine, logprobs(0.7), batching=WHOLE, device=CPU).score(batch))
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.mul_(0.9)
        mine.zero_grad()
        return 0.0

    backend.step = move
    steps = make_steps(batch, MicroBatching(samples=1), epochs=2, skip_idle=True)
    PolicyLearner(backend, POLICY, device=CPU).update(steps, seen=seen)
    columns = seen.columns(batch.num_actions)
    idle_A = torch.zeros(batch.num_actions, dtype=torch.bool)
    idle_A[batch.actions_of(1)] = True
    assert not torch.allclose(*outputs)
    assert torch.equal(columns["new_logprobs"].isnan(), idle_A)
    assert torch.allclose(columns["new_logprobs"][~idle_A], outputs[1][~idle_A], atol=1e-6)
    assert columns.keys() == {"new_logprobs", "entropy", "clipped", "losses"}


@pytest.mark.parametrize("name", EVERYTHING)
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=9),
    budget=st.integers(15, 60),
    seed=st.integers(0, 99),
)
def test_with_every_term_switched_on_too(policy, name, lengths, budget, seed):
    """Old, reference and rollout log-probs around the current ones: ratios on both sides of every bound."""
    batch = make_batch(lengths)
    current = Scorer(policy, logprobs(0.7), batching=WHOLE, device=CPU).score(batch)
    noise = torch.Generator().manual_seed(seed)
    for column in ("old_logprobs_A", "reference_logprobs_A", "rollout_logprobs_A"):
        setattr(batch, column, current + 0.4 * torch.randn(len(current), generator=noise))
    flags = {"aggregation": Aggregation.SEQUENCE}
    if (chosen := EVERYTHING[name].loss.chosen) is not None:  # many tokens, of these few
        flags["chosen"] = dataclasses.replace(chosen, share=0.3, between=chosen.between and (0.0, 1.0))
    (whole,), values = update(policy, batch, WHOLE, EVERYTHING[name], **flags)
    for cut in (MicroBatching(tokens=budget), MicroBatching(samples=1), MicroBatching(samples=3)):
        (gradient,), cut_values = update(policy, batch, cut, EVERYTHING[name], **flags, seed=seed)
        assert relative_gap(gradient, whole) < 1e-5
        assert cut_values == pytest.approx(values, rel=1e-5, abs=1e-6)


def some_logprobs() -> TrainingBatch:
    """Responses of 3, 2 and 1 tokens with old log-probs of −2; nobody knows with what the second was sampled."""
    batch = make_batch([(2, 3), (2, 2), (2, 1)])
    batch.old_logprobs_A = torch.full((6,), -2.0)
    batch.rollout_logprobs_A = torch.tensor([-1.5, -2.5, -2.0, torch.nan, torch.nan, -1.0])
    return batch


@pytest.mark.parametrize("cut", [WHOLE, MicroBatching(samples=1), MicroBatching(samples=2)])
def test_the_engines_gap_is_a_mean_over_tokens_whose_logprobs_are_known(policy, cut):
    """Gaps of 0.5, −0.5, 0 and 1: their mean is 1/4, that of their sizes 2/4; over all six tokens it would be less."""
    batch = some_logprobs()
    (gradient,), values = update(policy, batch, cut)
    assert values["vllm_kl"] == pytest.approx(0.25)
    assert values["logprobs_diff"] == pytest.approx(0.5)
    assert values["logprobs_diff_p99"] == pytest.approx(1.0, rel=0.02)
    assert values["logprobs_diff_max"] == 1.0
    batch.rollout_logprobs_A = None
    (without,), unknown = update(policy, batch, cut)
    assert relative_gap(gradient, without) < 1e-5
    assert not {"vllm_kl", "logprobs_diff", "logprobs_diff_p99", "logprobs_diff_max"} & unknown.keys()


@pytest.mark.parametrize("loss", ["ppo", *(name for name, entry in POLICY_LOSSES.items() if entry.corrects_itself)])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_needs_the_logprobs_of_every_token(policy, loss, correction):
    settings = dataclasses.replace(
        POLICY, loss=get_policy_loss(loss), correction=CorrectionSettings(name=correction, low=0.5, high=2.0)
    )
    with pytest.raises(ValueError, match="some samples of the batch have none"):
        update(policy, some_logprobs(), WHOLE, settings)


def test_a_round_is_split_evenly_over_its_steps(policy):
    """Seven samples (failures took one of eight) in steps of three are three steps, of 3, 2 and 2; two epochs: six."""
    batch = make_batch([(2, 3)] * 7)
    batch.old_logprobs_A = torch.full((batch.num_actions,), -2.0)
    gradients, _ = update(policy, batch, WHOLE, batch_size=3, epochs=2)
    assert len(gradients) == 6


def test_on_policy_the_first_gradient_is_the_plain_policy_gradient(policy):
    """With ρ = 1 everywhere, ∇L = −Σ_t w A_t ∇log π(t)."""
    batch = make_batch([(2, 4), (3, 2)])
    (gradient,), values = update(policy, batch, WHOLE)
    packed = batch.pack([0, 1])
    logprobs_A = policy(packed.tokens, temperature=0.7).logprobs_A
    expected = torch.autograd.grad(-(packed.advantages_A * logprobs_A).mean(), list(policy.parameters()))
    assert relative_gap(gradient, torch.cat([g.flatten() for g in expected])) < 1e-5
    assert values["ppo_clip_ratio"] == 0
    assert values["ppo_kl"] == 0
    assert values["policy_loss"] == pytest.approx(float(-packed.advantages_A.mean()), rel=1e-5)


def test_old_logprobs_of_the_same_weights_change_nothing(policy):
    """Scored beforehand or detached on the fly: the same gradient, however the scoring was cut."""
    batch = make_batch([(2, 4), (3, 2), (1, 5)])
    (plain,), _ = update(policy, batch, WHOLE)
    batch.old_logprobs_A = Scorer(policy, logprobs(0.7), batching=MicroBatching(samples=2), device=CPU).score(batch)
    (scored,), values = update(policy, batch, WHOLE)
    assert relative_gap(scored, plain) < 1e-5
    assert values["ppo_kl"] == pytest.approx(0, abs=1e-6)


def test_a_step_that_is_not_finite_names_its_samples_and_leaves_no_trace(policy):
    """Two steps of two samples; an advantage of the second sample is no number. What is logged is the other step's."""
    batch = make_batch([(2, 3), (2, 3), (2, 3), (2, 3)])
    batch.advantages_A[4] = math.nan
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    backend = TorchBackend(policy, optimizer(lr=0.0))
    learner = PolicyLearner(backend, POLICY, device=CPU, max_skipped=2)
    metrics = learner.update(make_steps(batch, WHOLE, batch_size=2))
    assert metrics.values()["actor_skipped_steps"] == 1
    assert all(math.isfinite(value) for value in metrics.values().values())
    (note,) = metrics.notes
    assert note.startswith("an optimizer step of the policy was left out: its gradient is nan (of ")
    assert note.endswith("; not finite: the advantage of prompt 1 sample 0")
    batch.advantages_A[:] = math.nan
    with pytest.raises(NotFiniteError, match="2 optimizer steps of the policy in a row were left out"):
        learner.update(make_steps(batch, WHOLE, batch_size=2))
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())


@pytest.mark.parametrize("replays", [True, False])
def test_the_experts_of_a_round_are_told(replays):
    """Of the three samples one has no routes. The longest is compared with what the engine said, in both ways."""
    policy, batch = make_mixture(), make_batch([(4, 5), (3, 2), (4, 3)])
    policy.replays = replays
    samples = [batch.samples[0].segment.token_ids, batch.samples[1].segment.token_ids]
    for sample, routes in zip(batch.samples, random_routes(policy, samples), strict=False):
        object.__setattr__(sample.segment, "routes", routes)
    learner = PolicyLearner(RecordingBackend(policy), POLICY, device=CPU, routers=policy.routers, replays=replays)
    said = learner.update(make_steps(batch, WHOLE), kl_coef=0.3).values()
    told = {name.removeprefix("experts/") for name in said if name.startswith("experts/")}
    assert {"load_min", "load_max"} <= told
    assert 0 <= said["experts/load_min"] <= 1 <= said["experts/load_max"] <= 8 / 3
    if not replays:
        assert told == {"load_min", "load_max"}
        return
    assert told == {"load_min", "load_max", "differ", "missing", "logprobs_diff", "logprobs_diff_own"}
    assert said["experts/missing"] == 6 / (8 + 4 + 6)
    assert said["experts/differ"] > 0.5
    longest = batch.pack([0]).tokens
    for name, tokens in (("", longest), ("_own", longest.without_routes())):
        gap_A = policy(tokens, temperature=0.7).logprobs_A - -1.0
        assert said[f"experts/logprobs_diff{name}"] == pytest.approx(gap_A.abs().mean().item(), rel=1e-5)


def test_the_sample_that_is_compared_is_one_whose_log_probs_the_engine_said():
    """Two steps: of the samples of the first it has said none, of the second those of the longer one."""
    policy, batch = make_mixture(), make_batch([(4, 5), (3, 2), (3, 6), (3, 3)])
    for sample, routes in zip(
        batch.samples, random_routes(policy, [s.segment.token_ids for s in batch.samples]), strict=True
    ):
        object.__setattr__(sample.segment, "routes", routes)
    batch.rollout_logprobs_A[:7] = math.nan
    batch.rollout_logprobs_A[13:] = math.nan
    learner = PolicyLearner(RecordingBackend(policy), POLICY, device=CPU, routers=policy.routers, replays=True)
    said = learner.update(make_steps(batch, WHOLE, batch_size=2), kl_coef=0.3).values()
    gap_A = policy(batch.pack([2]).tokens, temperature=0.7).logprobs_A - -1.0
    assert said["experts/logprobs_diff"] == pytest.approx(gap_A.abs().mean().item(), rel=1e-5)
