"""Tiny mixtures of experts of several families, and the routes that they choose themselves."""

import contextlib
import copy

import torch
import transformers as hf

from openrlhf.models.body import decoder_layers
from openrlhf.models.policy import Policy
from openrlhf.models.routes import install_routers
from openrlhf.models.support import examine, examine_replay
from openrlhf.types import PackedTokens

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTURES = {
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**SIZES, "max_position_embeddings": 131072},
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmoe": lambda: hf.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3),
    # With a shared expert, and a first layer without experts.
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **SIZES,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[0],
    ),
}


def make_mixture(name: str = "qwen3_moe", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> Policy:
    """A policy whose routers take routes."""
    torch.manual_seed(seed)
    config = MIXTURES[name]()
    config.update(changes)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    support = examine(model, native_attention="eager")
    routers = install_routers(model, decoder_layers(model), replay=True)
    return Policy(model, packed=support.packed, routers=examine_replay(model, routers, packed=support.packed))


def plain_twin(policy: Policy) -> Policy:
    """The same weights, as transformers computes with them."""
    config = copy.deepcopy(policy.model.config)
    implementation = config._attn_implementation
    model = type(policy.model)._from_config(config, attn_implementation=implementation, dtype=policy.model.dtype)
    model.load_state_dict(policy.model.state_dict())
    return Policy(model, packed=policy.packed)


@contextlib.contextmanager
def choices(policy: Policy):
    """While open, the experts that the routers choose are listed: (layer, [T, K]) for each of their calls."""
    found, handles = [], []
    shape = policy.routers.shape
    for index, layer in enumerate(decoder_layers(policy.model)):
        for module in layer.modules():
            if getattr(module, "top_k", None) == shape.per_token and hasattr(module, "weight"):

                def listen(_, __, output, index=index):
                    ids = next(x for x in output if not x.is_floating_point())
                    found.append((index, ids.detach().reshape(-1, shape.per_token)))

                handles.append(module.register_forward_hook(listen))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def own_routes(policy: Policy, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """[T - 1, L, K] of each sequence, as an engine would tell them that has the policy's weights."""
    shape, routes = policy.routers.shape, []
    for ids in sequences:
        known = torch.zeros(len(ids), shape.layers, shape.per_token, dtype=torch.uint8)
        with choices(policy) as found:
            policy(stream([ids]), temperature=1.0)
        for layer, chosen in found:
            known[:, layer] = chosen.to(torch.uint8)
        routes.append(known[:-1])
    return routes


def random_routes(policy: Policy, sequences: list[torch.Tensor], *, seed: int = 0) -> list[torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(seed), policy.routers.shape
    orders = [torch.rand(len(ids) - 1, shape.layers, shape.experts, generator=generator) for ids in sequences]
    return [order.argsort(-1)[..., : shape.per_token].to(torch.uint8) for order in orders]


def random_ids(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 32, (length,), generator=generator) for length in lengths]


def stream(sequences, routes=(), *, shared=()) -> PackedTokens:
    """Every token but the first of each sequence is an action."""
    masks = [torch.arange(len(ids)) >= 1 for ids in sequences]
    return PackedTokens.from_sequences(sequences, masks, routes=routes, shared_prefixes=shared)
