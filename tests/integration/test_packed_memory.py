"""A long packed stream costs memory in proportion to its tokens: no T×T mask is ever built."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, resource, sys
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens

config = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, **json.loads(sys.argv[2]),
)
config._attn_implementation = ATTENTION
policy = Policy(Qwen2ForCausalLM(config))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def step(sequences):
    ids = [torch.randint(64, (256,)) for _ in range(sequences)]
    tokens = PackedTokens.from_sequences(ids, [torch.arange(256) > 0] * sequences)
    out = policy(tokens, temperature=1.0, with_entropy=True)
    (out.logprobs_A.mean() + out.entropy_A.mean()).backward()

step(1)
before = peak()
step(int(sys.argv[1]) // 256)
print(peak() - before)
"""


def growth(tokens, **config):
    """Bytes that forward and backward of `tokens` tokens in 256-token sequences add to a fresh process's peak."""
    command = [sys.executable, "-c", _PROGRAM, str(tokens), json.dumps(config)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


@pytest.mark.parametrize(
    "config", [{}, {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}], ids=["causal", "window"]
)
def test_32k_tokens_take_less_than_the_smallest_mask_would(config):
    """A T×T mask of 32,768 tokens is 1.07 GB in bytes and 4.3 GB in floats. The whole step, the activations of both
    layers included, takes less than that: about 40 floats per token, layer and hidden unit are 0.34 GB."""
    assert growth(32_768, **config) < 0.8e9
