"""A compiler for tests, torch's own up to the generation of code, for which a machine needs a C++ compiler; and a model."""

import contextlib
import copy
import dataclasses
import random

import torch
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as shapes
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from openrlhf.models import attention, compilation, routes, tiles
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens


class Compiling:
    """What has been compiled."""

    @property
    def pieces(self) -> int:
        return counters["stats"]["unique_graphs"]


def as_it_is(graph, inputs):
    """The operations of a piece, one by one."""
    return graph.forward


@contextlib.contextmanager
def compiling_with(inductor):
    """While open, `--ds.deepcompile` has this function in the place of inductor, and nothing compiled or failed before.

    Afterwards torch is as it was.
    """
    import torch._dynamo

    torch._dynamo.reset()
    counters.clear()
    kept, compilation._inductor = compilation._inductor, inductor
    in_tiles, route = tiles._in_tiles, routes._route
    dynamo = torch._dynamo.config
    try:
        with dynamo.patch(suppress_errors=False, recompile_limit=8), shapes.patch(use_duck_shape=True):
            yield Compiling()
    finally:
        compilation._inductor, tiles._in_tiles, routes._route = kept, in_tiles, route
        compilation._COMPILER.stop()
        AttentionInterface.register(attention.ATTENTION, attention._attend)
        torch._dynamo.reset()


SMALL = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PIECES = 4
"""Of a layer: the norm before attention; matrices and rotation; the matrix after it; the rest."""


def make_model(*, layers=2, **options):
    torch.manual_seed(0)
    config = Qwen2Config(**SMALL, num_hidden_layers=layers, **options)
    return Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION)


def compiled_pair(model):
    """The model as it is, and compiled."""
    plain = Policy(copy.deepcopy(model))
    compilation.compile_layers(model)
    return plain, Policy(model)


def streams(count, *, seed=0):
    """Every other one with a prompt that its sequences share; the first has a single sequence of two tokens."""
    rng = random.Random(seed)
    for number in range(count):
        lengths = [rng.randint(2, 9) for _ in range(rng.randint(1, 5))] if number else [2]
        prompt = [rng.randrange(13) for _ in range(rng.randint(1, 4))] if number % 2 else []
        sequences = [torch.tensor([*prompt, *(rng.randrange(13) for _ in range(n))]) for n in lengths]
        shared = tuple(len(prompt) if i else 0 for i in range(len(lengths)))
        tokens = PackedTokens.from_sequences(sequences, [torch.arange(len(ids)) > 0 for ids in sequences])
        yield dataclasses.replace(tokens, shared_prefixes=shared)


def scored(policy, tokens):
    policy.eval()
    with torch.no_grad():
        return policy(tokens, temperature=1.0).logprobs_A


def gradient(policy, tokens):
    policy.train().zero_grad()
    policy(tokens, temperature=1.0).logprobs_A.sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def assert_alike(plain, compiled, tokens):
    torch.testing.assert_close(scored(compiled, tokens), scored(plain, tokens), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient(compiled, tokens), gradient(plain, tokens), rtol=1e-4, atol=1e-5)
