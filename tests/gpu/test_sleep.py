"""A backend that slept trains on as if it had not, and its memory was free meanwhile."""

import copy

import pytest
import torch
import transformers as hf
from small_sections import optimizer

from openrlhf.backends.torch import TorchBackend
from openrlhf.config.backend import BackendSection
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.types import PackedTokens

pytestmark = pytest.mark.gpu
SETTINGS = optimizer(lr=1e-3)


def make_policy(dtype):
    torch.manual_seed(0)
    config = hf.Qwen2Config(vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
                            num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    model = hf.Qwen2ForCausalLM(config).to("cuda", dtype)
    support = examine(model, native_attention="sdpa")
    return Policy(model, packed=support.packed, transform=support.transform)


def train(backend):
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(1000, (n,), generator=generator) for n in (30, 50)]
    tokens = PackedTokens.from_sequences(sequences, [torch.arange(len(s)) > 0 for s in sequences]).to("cuda")
    loss = -backend.module(tokens, temperature=1.0).logprobs_A.mean()
    backend.backward(loss)
    return float(loss.detach()), backend.step()


@pytest.fixture(scope="module")
def group():
    from openrlhf.backends.ranks import join

    ranks = join(also_alone=True)
    yield
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", ["torch", 1, 2, 3])
def test_sleep_and_wake(group, way, dtype):
    from openrlhf.backends.deepspeed import DeepSpeedBackend

    policy = make_policy(dtype)

    def backend_of(module):
        return (
            TorchBackend(module, SETTINGS)
            if way == "torch"
            else DeepSpeedBackend(module, SETTINGS, BackendSection(zero_stage=way))
        )

    awake, sleeper = backend_of(copy.deepcopy(policy)), backend_of(policy)
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        sleeper.sleep()
        freed = before - torch.cuda.memory_allocated()
        sleeper.wake()
        assert train(sleeper) == pytest.approx(train(awake), rel=1e-3)
    parameters = sum(p.numel() for p in make_policy(dtype).parameters())
    assert freed > 7 * parameters  # two moments of four bytes each, masters besides where there are any
