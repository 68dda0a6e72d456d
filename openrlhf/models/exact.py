"""A forward whose bits do not depend on what else is computed with it: the engine's and the trainer's are the same.

Usual kernels choose how they add up a sum by the shape of the whole batch, so a token's log-prob in a decoding step and
in a training step differ in the last bits, and by more after many layers. Here every row has its own sums, in an order
that is a function of the model alone, and engine (`rollout.vllm.exact`) and trainer call the same functions:

    linear, rms_norm, log_softmax, attend    sums; on a GPU kernels with fixed tiles (`models.exact_triton`), on a CPU
                                             one row after the other
    the rest                                 element by element; on a GPU torch's own, which is the same for each

The models are decoders in the form of Llama (Llama, Mistral, Qwen2, Qwen3 and others): the parts of a layer have known
names, and a probe compares the whole with the model's own forward before it is trusted.

The trainer computes the ordinary forward too, for the gradient: the value of each layer's output is replaced by the
exact one (`with_value`). The gradient is that of the ordinary layers at the exact inputs.

Shapes: T tokens, D hidden size, N outputs, H heads, E head dimension, S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel
from transformers.activations import ACT2FN

from openrlhf.models.logprobs import IDENTITY, LogitTransform

_ROWS = 256
"""Rows of logits that the trainer holds at once."""


class InexactModelError(ValueError):
    """The model has no exact forward; the message says why."""


class Matrix(NamedTuple):
    """A linear layer."""

    weight_ND: Tensor
    bias_N: Tensor | None


class LayerWeights(NamedTuple):
    """What a decoder layer computes with."""

    norm_D: Tensor
    query: Matrix
    key: Matrix
    value: Matrix
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    output: Matrix
    mlp_norm_D: Tensor
    gate: Matrix
    up: Matrix
    down: Matrix


class KeyPlaces(NamedTuple):
    """Where the keys of each sequence are, and which of its tokens ask. The ends of queries and keys are aligned."""

    query_starts: Tensor
    """int32 [S+1]: the first query of each sequence among all."""
    lengths: Tensor
    """int32 [S]: keys of each sequence."""
    slots_SL: Tensor
    """int32 or int64 [S, L]: the row of each key of a sequence; what is behind its length is not read."""
    most_queries: int
    """Of one sequence."""


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [T, H, E], and keys and values [T, Hkv, E] of the same tokens → [T, H, E]."""


class ExactDecoder:
    """The arithmetic of one model: what its configuration says, and no weights."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        self.heads: int = text.num_attention_heads
        self.key_heads: int = getattr(text, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(text, "head_dim", None) or text.hidden_size // self.heads
        self.eps: float = text.rms_norm_eps
        self.vocabulary: int = text.vocab_size
        self._activation = ACT2FN[text.hidden_act]
        self._tables = _rotary_tables(text)

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    def layer(self, x_TD: Tensor, weights: LayerWeights, positions_T: Tensor, attend: Attend) -> Tensor:
        h = rms_norm(x_TD, weights.norm_D, self.eps)
        query, key, value = (
            linear(h, matrix).unflatten(-1, (heads, self.head_dim))
            for matrix, heads in (
                (weights.query, self.heads),
                (weights.key, self.key_heads),
                (weights.value, self.key_heads),
            )
        )
        if weights.query_norm_E is not None and weights.key_norm_E is not None:
            query = rms_norm(query, weights.query_norm_E, self.eps)
            key = rms_norm(key, weights.key_norm_E, self.eps)
        cos_TE, sin_TE = self._rotation(positions_T, like=query)
        attended = attend(_rotated(query, cos_TE, sin_TE), _rotated(key, cos_TE, sin_TE), value.contiguous())
        x_TD = x_TD + linear(attended.flatten(1), weights.output)
        h = rms_norm(x_TD, weights.mlp_norm_D, self.eps)
        gated = elementwise(self._activation, linear(h, weights.gate)) * linear(h, weights.up)
        return x_TD + linear(gated, weights.down)

    def last_norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_TD, weight_D, self.eps)

    def logits(self, hidden_TD: Tensor, head: Matrix) -> Tensor:
        """fp32 [T, V]"""
        return linear(hidden_TD, head, dtype=torch.float32)

    def attend(self, q_THE: Tensor, k_KHE: Tensor, v_KHE: Tensor, places: KeyPlaces) -> Tensor:
        """Causal attention of each sequence's queries to its keys, wherever these are among the K rows of the two."""
        if q_THE.is_cuda:
            from openrlhf.models.exact_triton import attend

            return attend(q_THE, k_KHE, v_KHE, places, scaling=self.scaling)
        return _attend_by_rows(q_THE, k_KHE, v_KHE, places, scaling=self.scaling)

    def _rotation(self, positions_T: Tensor, *, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._tables[0].device != like.device:
            self._tables = tuple(table.to(like.device) for table in self._tables)
        cos, sin = (table[positions_T].to(like.dtype)[:, None] for table in self._tables)
        return cos, sin


def _rotary_tables(text: Any) -> tuple[Tensor, ...]:
    """fp32 [positions, E]: cosines and sines, computed on the CPU by the model's own module, on both sides alike."""
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
        raise InexactModelError(f"its {kind!r} rotary embedding depends on the longest sequence of a batch")
    with torch.device("meta"):
        body = AutoModel.from_config(text)
    rotary = getattr(body, "rotary_emb", None)
    if rotary is None:
        raise InexactModelError("it has no rotary embedding")
    with torch.no_grad(), one_thread():
        module = type(rotary)(config=text)
        positions = torch.arange(text.max_position_embeddings)
        return tuple(table[0].float() for table in module(torch.empty(0), positions[None]))


def _rotated(x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    first, second = x_THE.chunk(2, dim=-1)
    return x_THE * cos_T1E + torch.cat([-second, first], dim=-1) * sin_T1E


def linear(x_TD: Tensor, matrix: Matrix, *, dtype: torch.dtype | None = None) -> Tensor:
    """x W' + b, rounded once, to `dtype` (default: that of x)."""
    dtype = dtype or x_TD.dtype
    if x_TD.is_cuda:
        from openrlhf.models.exact_triton import linear

        return linear(x_TD, matrix.weight_ND, matrix.bias_N, dtype=dtype)
    weight, bias = matrix
    if dtype != x_TD.dtype:
        x_TD, weight, bias = x_TD.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    weight = _aligned(weight)
    products = by_rows(lambda row: F.linear(row, weight), x_TD)
    return products if bias is None else products + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension of [T, …]."""
    if x.is_cuda:
        from openrlhf.models.exact_triton import rms_norm

        return rms_norm(x, weight, eps)
    return by_rows(lambda row: F.rms_norm(row, (row.shape[-1],), weight, eps), x)


def log_softmax(logits_TV: Tensor) -> Tensor:
    """fp32 [T, V]"""
    if logits_TV.is_cuda:
        from openrlhf.models.exact_triton import log_softmax

        return log_softmax(logits_TV.float())
    return by_rows(lambda row: F.log_softmax(row.float(), dim=-1), logits_TV)


def elementwise(function: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    """A function with exponentials in it: on a CPU the last few elements of a tensor have another one than those that
    fill a vector register, so each row is a tensor of its own."""
    return function(x_TD) if x_TD.is_cuda else by_rows(function, x_TD)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """One call for each row: all have the same shape and place in memory, and so the same sums."""
    if not len(x):
        return function(x)
    return torch.cat([function(_aligned(row)) for row in x.split(1)])


def _aligned(x: Tensor) -> Tensor:
    """At an address that is a multiple of a cache line, as new memory is: sums of the CPU's libraries begin at such a
    one, wherever the numbers begin."""
    return x if x.is_contiguous() and x.data_ptr() % 64 == 0 else x.clone(memory_format=torch.contiguous_format)


def _attend_by_rows(q_THE: Tensor, k_KHE: Tensor, v_KHE: Tensor, places: KeyPlaces, *, scaling: float) -> Tensor:
    out = torch.empty_like(q_THE)
    starts, lengths = places.query_starts.tolist(), places.lengths.tolist()
    groups = q_THE.shape[1] // k_KHE.shape[1]
    for sequence, length in enumerate(lengths):
        begin, end = starts[sequence], starts[sequence + 1]
        slots = places.slots_SL[sequence, :length]
        keys_HEL = k_KHE[slots].permute(1, 2, 0).contiguous()
        values_HLE = v_KHE[slots].transpose(0, 1).contiguous()
        for query in range(begin, end):
            seen = length - (end - 1 - query)
            q_HGE = _aligned(q_THE[query].unflatten(0, (-1, groups)))
            scores = torch.bmm(q_HGE, _aligned(keys_HEL[:, :, :seen])) * scaling
            weights = scores.float().softmax(-1).to(q_THE.dtype)
            out[query] = torch.bmm(weights, _aligned(values_HLE[:, :seen])).flatten(0, 1)
    return out


@contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU sums may be shared out over threads, of which two processes have different numbers."""
    if (threads := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_LAYER_PARTS = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
}


def trained_layer(layer: Any) -> LayerWeights:
    """The weights of a layer of a Hugging Face model."""
    attention, mlp = layer.self_attn, layer.mlp

    def matrix(module: Any) -> Matrix:
        return Matrix(module.weight, module.bias)

    return LayerWeights(
        norm_D=layer.input_layernorm.weight,
        query=matrix(attention.q_proj),
        key=matrix(attention.k_proj),
        value=matrix(attention.v_proj),
        query_norm_E=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm_E=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=matrix(attention.o_proj),
        mlp_norm_D=layer.post_attention_layernorm.weight,
        gate=matrix(mlp.gate_proj),
        up=matrix(mlp.up_proj),
        down=matrix(mlp.down_proj),
    )


class ExactForward:
    """The exact values of a policy's hidden states and log-probs. Hooks on the model's layers put them in place."""

    def __init__(self, model: Any, body: Any, *, transform: LogitTransform = IDENTITY) -> None:
        """`transform`: of the model's logits. Raises `InexactModelError`."""
        if transform != IDENTITY:
            raise InexactModelError("its logits are scaled or capped")
        layers = getattr(body, "layers", None)
        if layers is None or not hasattr(body, "norm"):
            raise InexactModelError("it is no decoder with layers and a last norm")
        for layer in layers:
            parts = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
            if unknown := sorted(parts - _LAYER_PARTS):
                raise InexactModelError(f"its layers have {', '.join(unknown)}")
        if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
            raise InexactModelError("its layers attend within a window")
        self._decoder = ExactDecoder(model.config)
        self._probe(model, body)
        for layer in layers:
            layer.register_forward_hook(self._replace_layer, with_kwargs=True)
        body.norm.register_forward_hook(self._replace_norm)

    def logprobs(
        self, ordinary_A: Tensor, hidden_AD: Tensor, head: nn.Linear, targets_A: Tensor, temperature: float
    ) -> Tensor:
        """The exact log-probs of these tokens, with the gradient of the ordinary ones."""
        with torch.no_grad(), _threads_for(hidden_AD):
            exact_A = [
                self._logprobs(hidden, head, targets, temperature=temperature)
                for hidden, targets in zip(hidden_AD.split(_ROWS), targets_A.split(_ROWS), strict=True)
            ]
        return with_value(ordinary_A, torch.cat(exact_A) if exact_A else ordinary_A)

    def _logprobs(self, hidden: Tensor, head: nn.Linear, targets: Tensor, *, temperature: float) -> Tensor:
        logits = self._decoder.logits(hidden, Matrix(head.weight, head.bias))
        logits = logits / torch.tensor(temperature or 1.0, device=logits.device)
        return log_softmax(logits).gather(1, targets[:, None]).squeeze(1)

    def _replace_layer(
        self, layer: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any], output: Any
    ) -> Any:
        ordinary = output[0] if isinstance(output, tuple) else output
        x_TD = (arguments[0] if arguments else options["hidden_states"]).squeeze(0)
        plan, positions_T = options["attention_plan"], options["position_ids"].squeeze(0)
        with torch.no_grad(), _threads_for(x_TD):
            attend = partial(self._decoder.attend, places=_places(plan, x_TD.device))
            exact = self._decoder.layer(x_TD, trained_layer(layer), positions_T, attend).unsqueeze(0)
        replaced = with_value(ordinary, exact)
        return (replaced, *output[1:]) if isinstance(output, tuple) else replaced

    def _replace_norm(self, norm: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        x = arguments[0]
        with torch.no_grad(), _threads_for(x):
            return_value = self._decoder.last_norm(x.squeeze(0), norm.weight).unsqueeze(0)
        return with_value(output, return_value)

    @torch.no_grad()
    def _probe(self, model: Any, body: Any) -> None:
        """The last hidden states of a few tokens, with the model's own attention, whichever it is."""
        from openrlhf.models.attention import ATTENTION
        from openrlhf.models.packed import PackedAttention

        device = next(body.parameters()).device
        token_ids = (torch.arange(7, device=device) * 11 + self._decoder.vocabulary // 3) % self._decoder.vocabulary
        positions = torch.arange(len(token_ids), device=device)
        plan = PackedAttention(torch.tensor([0, len(token_ids)], dtype=torch.int32), len(token_ids))
        options: dict[str, Any] = {"position_ids": positions[None], "use_cache": False}
        if model.config._attn_implementation == ATTENTION:
            options["attention_plan"] = plan
        expected = body(input_ids=token_ids[None], **options)[0].squeeze(0).float()
        with _threads_for(expected):
            x = body.embed_tokens(token_ids)
            attend = partial(self._decoder.attend, places=_places(plan, device))
            for layer in body.layers:
                x = self._decoder.layer(x, trained_layer(layer), positions, attend)
            found = self._decoder.last_norm(x, body.norm.weight).float()
        error = ((found - expected).norm() / expected.norm()).item()
        if not error <= (1e-3 if body.dtype == torch.float32 else 5e-2):
            raise InexactModelError(
                f"its layers compute something else: a forward in the form of Llama is {error:.0e} off"
            )


def with_value(ordinary: Tensor, exact: Tensor) -> Tensor:
    """The value of `exact`, with the gradient of `ordinary`."""
    return _WithValue.apply(ordinary, exact)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ordinary: Tensor, exact: Tensor) -> Tensor:
        return exact.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _places(plan: Any, device: torch.device) -> KeyPlaces:
    """The keys of a packed stream, one sequence after the other; made once for each plan."""
    if (found := getattr(plan, "key_places", None)) is None:
        starts = plan.cu_seqlens.to(device)
        slots = starts[:-1, None] + torch.arange(plan.longest, device=device, dtype=starts.dtype)
        found = plan.key_places = KeyPlaces(starts, starts.diff(), slots, plan.longest)
    return found


def _threads_for(x: Tensor) -> Any:
    return torch.no_grad() if x.is_cuda else one_thread()
