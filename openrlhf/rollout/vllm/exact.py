"""The exact forward (`models.exact`) inside a vLLM worker: its model computes with the trainer's functions.

vLLM schedules, keeps the cache of keys and values, and samples. The decoder, the head and the log-probs are those of
`models.exact`, on the weights that vLLM holds. Layers are not compiled and no CUDA graphs are captured. On a CPU the
worker has one thread (`settings.worker_environment`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from openrlhf.models.exact import (
    ExactDecoder,
    KeyPlaces,
    LayerWeights,
    Matrix,
    log_softmax,
)


def keep_plain_weights() -> None:
    """Before a model loads. On a CPU vLLM would pack matrices for a kernel of its own, and drop them."""
    if not torch.cuda.is_available():
        setattr(UnquantizedLinearMethod, "process_weights_after_loading", lambda self, layer: None)  # noqa: B010


class ExactModel:
    """Takes the place of a worker's decoder, head and log-probs, from here on."""

    def __init__(self, worker: Any) -> None:
        runner = worker.model_runner
        self._model = runner.get_model()
        self._decoder = ExactDecoder(worker.vllm_config.model_config.hf_config)
        self._model.model.forward = self._forward
        self._model.compute_logits = self._logits
        runner.sampler.compute_logprobs = log_softmax
        draw = runner.sampler.topk_topp_sampler.forward

        def with_exact_logprobs(logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            # Sampling may change the logits where they are.
            logprobs = log_softmax(logits)
            return draw(logits, *arguments, **options)[0], logprobs

        runner.sampler.topk_topp_sampler.forward = with_exact_logprobs

    @torch.inference_mode()
    def _forward(self, input_ids: Tensor, positions: Tensor, *_: Any, **__: Any) -> Tensor:
        body, metadata = self._model.model, get_forward_context().attn_metadata
        x_TD = body.embed_tokens(input_ids)
        if metadata is None:  # a forward that measures memory
            return x_TD
        steps: dict[int, _Step] = {}
        for layer in body.layers:
            attention = layer.self_attn.attn
            own = metadata[attention.layer_name]
            if id(own) not in steps:
                steps[id(own)] = _Step(own, attention.kv_cache, self._decoder)
            attend = partial(steps[id(own)].attend, attention.kv_cache)
            x_TD = self._decoder.layer(x_TD, _layer_weights(layer), positions, attend)
        return self._decoder.last_norm(x_TD, body.norm.weight)

    def _logits(self, hidden_TD: Tensor, *_: Any) -> Tensor:
        head = self._model.lm_head
        size = self._decoder.vocabulary  # vLLM's matrix may have more rows
        return self._decoder.logits(hidden_TD, Matrix(head.weight[:size], None))


class _Step:
    """Attention in one step: where new keys go, and where those of each request are. Layers share it."""

    def __init__(self, metadata: Any, cache: Tensor, decoder: ExactDecoder) -> None:
        self._decoder = decoder
        self._tokens: int = metadata.num_actual_tokens
        self._new = metadata.slot_mapping[: self._tokens].long()
        requests = len(metadata.seq_lens)
        slots = _slots(cache, decoder)
        page = len(slots) // len(cache)
        place_L = torch.arange(metadata.max_seq_len, device=cache.device)
        blocks_SL = metadata.block_table[:requests].long()[:, place_L // page]
        self._places = KeyPlaces(
            metadata.query_start_loc[: requests + 1],
            metadata.seq_lens,
            blocks_SL * page + place_L % page,
            metadata.max_query_len,
        )

    def attend(self, cache: Tensor, q_THE: Tensor, k_THE: Tensor, v_THE: Tensor) -> Tensor:
        slots, count = _slots(cache, self._decoder), self._tokens
        slots[self._new, 0], slots[self._new, 1] = k_THE[:count], v_THE[:count]
        out = torch.zeros_like(q_THE)  # of tokens that fill a batch up
        out[:count] = self._decoder.attend(q_THE[:count], slots[:, 0], slots[:, 1], self._places)
        return out


def _slots(cache: Tensor, decoder: ExactDecoder) -> Tensor:
    """[slots, 2, H, E]: a layer's memory for keys and values, whatever vLLM's own kernels call its dimensions: nobody
    else reads it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    assert extent == cache.numel(), "the cache of a layer is one piece of memory"
    flat = torch.as_strided(cache, (cache.numel(),), (1,))
    return flat.view(-1, 2, decoder.key_heads, decoder.head_dim)


def _layer_weights(layer: Any) -> LayerWeights:
    """As the model's files have them: vLLM puts some matrices below each other. Parts have the same sizes, and so the
    same sums, as the trainer's."""
    attention, mlp = layer.self_attn, layer.mlp
    queries, keys = attention.q_size, attention.kv_size
    query, key, value = _parts(attention.qkv_proj, [queries, keys, keys])
    gate, up = _parts(mlp.gate_up_proj, [len(mlp.gate_up_proj.weight) // 2] * 2)
    (output,), (down,) = (_parts(module, [len(module.weight)]) for module in (attention.o_proj, mlp.down_proj))
    return LayerWeights(
        norm_D=layer.input_layernorm.weight,
        query=query,
        key=key,
        value=value,
        query_norm_E=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm_E=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=output,
        mlp_norm_D=layer.post_attention_layernorm.weight,
        gate=gate,
        up=up,
        down=down,
    )


def _parts(module: Any, sizes: list[int]) -> list[Matrix]:
    biases = [None] * len(sizes) if module.bias is None else module.bias.split(sizes)
    return [Matrix(*part) for part in zip(module.weight.split(sizes), biases, strict=True)]
