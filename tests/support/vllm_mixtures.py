"""Small mixtures of experts of many families, with random weights, that transformers, the embedded engine and vLLM run.

Their shapes are the smallest that vLLM's CPU build has kernels for: heads of 32 (MLA: 576 keys, 512 values), widths of
experts that can be divided by 32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM

from openrlhf.models.attention import ATTENTION

VOCABULARY = 360
EXPERTS = 8
TOP_K = 2
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_OWN_WIDTH = {"moe_intermediate_size": 32, "num_experts_per_tok": TOP_K}
_GROUPS = {
    **_OWN_WIDTH,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
"""Words of DeepSeek's configurations."""
_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""DeepSeek's attention, which keeps one latent for all heads, with the positions of its checkpoints: plain ones vLLM's
CPU build rotates wrongly there."""

FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3_moe": lambda **more: hf.Qwen3MoeConfig(
        **_SIZES | _OWN_WIDTH | {"head_dim": 32, "num_experts": EXPERTS, "norm_topk_prob": True} | more
    ),
    "qwen3_moe_dense_first": lambda **more: hf.Qwen3MoeConfig(
        **_SIZES | _OWN_WIDTH | {"head_dim": 32, "num_experts": EXPERTS, "mlp_only_layers": [0]} | more
    ),
    "mixtral": lambda **more: hf.MixtralConfig(
        **_SIZES | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K} | more
    ),
    "olmoe": lambda **more: hf.OlmoeConfig(
        **_SIZES | {"num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K} | more
    ),
    "gpt_oss": lambda **more: hf.GptOssConfig(
        **_SIZES
        | {
            "head_dim": 32,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        }
        | more
    ),
    "qwen2_moe": lambda **more: hf.Qwen2MoeConfig(
        **_SIZES | _OWN_WIDTH | {"shared_expert_intermediate_size": 64, "num_experts": EXPERTS} | more
    ),
    "granitemoe": lambda **more: hf.GraniteMoeConfig(
        **_SIZES
        | {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
        }
        | more
    ),
    "granitemoeshared": lambda **more: hf.GraniteMoeSharedConfig(
        **_SIZES | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "shared_intermediate_size": 64} | more
    ),
    "phimoe": lambda **more: hf.PhimoeConfig(
        **_SIZES
        | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "attention_bias": True, "lm_head_bias": True}
        | more
    ),
    "ernie4_5_moe": lambda **more: hf.Ernie4_5_MoeConfig(
        **_SIZES
        | {
            "moe_intermediate_size": 32,
            "moe_k": TOP_K,
            "moe_num_experts": EXPERTS,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        }
        | more
    ),
    "glm4_moe": lambda **more: hf.Glm4MoeConfig(**_SIZES | _GROUPS | {"head_dim": 32, "use_qk_norm": True} | more),
    "dots1": lambda **more: hf.Dots1Config(**_SIZES | _GROUPS | {"head_dim": 32} | more),
    "deepseek_v2": lambda **more: hf.DeepseekV2Config(
        **_SIZES | _GROUPS | _LATENT | {"topk_method": "greedy", "norm_topk_prob": False} | more
    ),
    "deepseek_v3": lambda **more: hf.DeepseekV3Config(
        **_SIZES | _GROUPS | _LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"} | more
    ),
    "minimax_m2": lambda **more: hf.MiniMaxM2Config(
        **_SIZES | {"head_dim": 32, "rotary_dim": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K} | more
    ),
    "flex_olmo": lambda **more: hf.FlexOlmoConfig(
        **_SIZES | {"num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K} | more
    ),
    "hunyuan_v1_moe": lambda **more: hf.HunYuanMoEV1Config(
        **_SIZES | {"head_dim": 32, "num_experts": EXPERTS, "moe_topk": TOP_K} | more
    ),
    "exaone_moe": lambda **more: hf.ExaoneMoeConfig(
        **_SIZES | _OWN_WIDTH | {"head_dim": 32, "num_experts": EXPERTS, "num_shared_experts": 1} | more
    ),
    "cohere2_moe": lambda **more: hf.Cohere2MoeConfig(
        **_SIZES
        | _OWN_WIDTH
        | {"head_dim": 32, "num_experts": EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True}
        | more
    ),
    "afmoe": lambda **more: hf.AfmoeConfig(
        **_SIZES | _OWN_WIDTH | {"head_dim": 32, "num_experts": EXPERTS, "num_dense_layers": 1} | more
    ),
    "jetmoe": lambda **more: hf.JetMoeConfig(
        **{k: v for k, v in _SIZES.items() if k != "num_attention_heads"}
        | {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "kv_channels": 32}
        | more
    ),
}


def make_mixture(family: str, *, seed: int = 0, packed: bool = True, dtype: torch.dtype = torch.float32, **more: Any):
    """A model of this family, in evaluation mode. Routers know what they want, and every number is random: also those
    that models begin with at 0 or 1 (biases, sinks, norms, corrections of routers)."""
    torch.manual_seed(seed)
    config = FAMILIES[family](**more)
    attention = ATTENTION if packed else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    jiggle(model)
    return model


@torch.no_grad()
def jiggle(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and (tensor.dim() == 1 or "bias" in name) and "inv_freq" not in name:
            tensor.add_(0.1 * torch.randn(tensor.shape).to(tensor))


def write_mixture(family: str, folder: Path, tokenizer: Any, **more: Any):
    """`make_mixture`, and its folder."""
    model = make_mixture(family, **more)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@torch.no_grad()
def change_weights(policy: torch.nn.Module, *, seed: int) -> None:
    """As an update would, only more so; also buffers that files hold."""
    torch.manual_seed(seed)
    for tensor in policy.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.3 * tensor.float().std().nan_to_num() * torch.randn(tensor.shape).to(tensor))


def expert_stacks(policy: torch.nn.Module, *, layer: int, only: str = "") -> list[torch.Tensor]:
    """The stacked tensors of the experts of a layer: matrices, and biases where they have them."""
    found = [p for n, p in policy.named_parameters() if f"layers.{layer}." in n and ".experts." in n and only in n]
    assert found
    return [parameter.data for parameter in found]
