"""On a device whose memory really runs out: the step is begun again in smaller micro-batches, and is the same step."""

import copy
import logging

import pytest
import torch
import transformers as hf
from small_sections import optimizer

from openrlhf.algorithms.losses import LossSettings, get_policy_loss
from openrlhf.algorithms.reduction import Aggregation
from openrlhf.backends.torch import TorchBackend
from openrlhf.learners.accumulation import DoesNotFitError, MicroBatching
from openrlhf.learners.policy import PolicyLearner, PolicySettings
from openrlhf.learners.scorer import Scorer, logprobs
from openrlhf.learners.steps import StepSettings, optimizer_steps
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.types import SampleKey, Segment, TrainingBatch, TrainingSample

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SAMPLES, LENGTH, VOCABULARY = 32, 512, 1000
SETTINGS = PolicySettings(
    loss=get_policy_loss("ppo"), clip=LossSettings(clip_low=0.2, clip_high=0.2), temperature=1.0, entropy_coef=0.0
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = hf.Qwen2Config(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
                            num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    return hf.Qwen2ForCausalLM(config)


@pytest.fixture(autouse=True)
def room():
    """All of it again afterwards."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def make_policy(model):
    own = copy.deepcopy(model).to(CUDA)
    support = examine(own, native_attention="sdpa")
    return Policy(own, packed=support.packed, transform=support.transform)


def make_batch():
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(LENGTH) >= 16
    samples = [
        TrainingSample(
            key=SampleKey(index, 0),
            segment=Segment(
                token_ids=torch.randint(VOCABULARY, (LENGTH,), generator=generator),
                action_mask=mask,
                rollout_logprobs=torch.zeros(LENGTH),
                versions=torch.where(mask, 0, -1).int(),
                turn_rewards=torch.zeros(LENGTH),
            ),
            rewards_A=torch.zeros(LENGTH - 16),
        )
        for index in range(SAMPLES)
    ]
    batch = TrainingBatch(samples=samples)
    batch.advantages_A = torch.randn(batch.num_actions, generator=generator)
    return batch


def limit_to(extra_bytes):
    """This process may have so much more than it holds now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra_bytes) / total)


def update(model, *, tokens, extra_bytes=None):
    """Two rounds of one optimizer step; metrics of both, and the weights after them."""
    policy = make_policy(model)
    backend = TorchBackend(policy, optimizer(lr=1e-4))
    learner = PolicyLearner(backend, SETTINGS, device=CUDA)
    settings = StepSettings(
        epochs=1, batch_size=1000, batching=MicroBatching(tokens=tokens), aggregation=Aggregation.TOKEN, seed=0
    )
    values = []
    for number in (1, 2):
        steps = optimizer_steps(make_batch(), settings, round_index=number)
        if extra_bytes is not None and number == 1:
            limit_to(extra_bytes)
        values.append(learner.update(steps).values())
    return (
        values,
        torch.cat([p.detach().cpu().flatten() for p in policy.parameters()]),
        torch.cuda.max_memory_allocated(),
    )


def test_a_step_that_does_not_fit_is_the_same_in_smaller_pieces(model, caplog):
    """All 16,384 tokens at once need more than the optimizer's state and a quarter of the activations' memory."""
    expected, weights, _ = update(model, tokens=2048)
    parameters = sum(p.numel() for p in model.parameters()) * 4
    torch.cuda.reset_peak_memory_stats()
    _, _, peak = update(model, tokens=10**6)
    activations = peak - 4 * parameters
    with caplog.at_level(logging.WARNING):
        values, tight, _ = update(model, tokens=10**6, extra_bytes=3 * parameters + activations // 3)
    assert "memory ran out in a micro-batch of 16384 tokens (rank 0)" in caplog.text
    for one, other in zip(values, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert float((tight - weights).abs().max()) < 1e-4


def test_scoring_that_does_not_fit(model):
    policy, batch = make_policy(model).requires_grad_(False), make_batch()
    expected = Scorer(policy, logprobs(1.0), batching=MicroBatching(tokens=2048), device=CUDA).score(batch)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = Scorer(policy, logprobs(1.0), batching=MicroBatching(tokens=10**6), device=CUDA)
    whole.score(batch)
    limit_to((torch.cuda.max_memory_allocated() - before) // 2)
    scores = Scorer(policy, logprobs(1.0), batching=MicroBatching(tokens=10**6), device=CUDA).score(batch)
    assert torch.allclose(scores, expected, atol=1e-3)


def test_a_sequence_that_does_not_fit_by_itself(model):
    with pytest.raises(DoesNotFitError, match="on a single sample of 512 tokens"):
        update(model, tokens=512, extra_bytes=2 * 2**20)
