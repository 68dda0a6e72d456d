"""Tensor parallelism: which layers of a model are cut, and the cut, into the layers of DeepSpeed's AutoTP.

Transformers has a plan for every family of models that says which linear layers are cut by their outputs (columns) and
which by their inputs (rows). That plan is followed here, for the decoder alone: embeddings, heads, experts and vision
towers stay whole on every rank. Adapters are cut with their layers: beside a layer that is cut by columns B is, and
beside one that is cut by rows A is; the other factor stays whole and has the same gradient on every rank.

AutoTP's own rules go by the names of layers, and know nothing of adapters, nor of norms that act on single heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from openrlhf.config.backend import BackendSection
from openrlhf.config.fields import ConfigError
from openrlhf.models.body import decoder_body
from openrlhf.models.vision import language_model


class Cut(StrEnum):
    """How a linear layer is cut, as transformers' plans call it."""

    COLUMNS = "colwise"
    """Each rank has some of the outputs. The gradient of the input is a sum over ranks."""
    ROWS = "rowwise"
    """Each rank has some of the inputs. The output is a sum over ranks."""


_SUMMED = "replicated_with_grad_allreduce"
"""A norm of single heads: whole on every rank, which has heads of its own. Its gradient is a sum over ranks."""
_WHOLE = {"colwise_rep", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise"}
"""Layers whose inputs and outputs are whole: each can stay whole, whatever becomes of the others."""
_EXPERTS = {
    "packed_colwise",
    "packed_rowwise",
    "moe_tp_experts",
    "grouped_gemm",
    "ep_router",
    "ep_dispatch_experts",
    "moe_identity_expert",
}
"""Experts in one tensor, which is no linear layer and stays whole."""
_FACTORS = {Cut.COLUMNS: "lora_B", Cut.ROWS: "lora_A"}
"""The factor of an adapter that is cut like its layer."""
_HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key/value heads"}
_COUNTS = ("num_heads", "n_heads", "num_kv_heads", *_HEADS)
"""Attributes of attention modules that say how many heads they compute."""


class CutPlan(NamedTuple):
    """What becomes of a model's modules and parameters, by name."""

    layers: dict[str, Cut]
    summed: list[str]
    """Trained parameters that are whole, and whose gradients are summed over ranks."""


def cut_plan(module: nn.Module, ds: BackendSection) -> CutPlan:
    """How a `Policy` or a `ValueModel` is cut. Raises ConfigError for a model that cannot be."""
    asked = f"--ds.tensor_parallel_size {ds.tensor_parallel_size}"
    body = decoder_body(module.model)
    decoder: Any = language_model(body) or body
    kind = type(decoder).__name__
    prefix = next(name for name, part in module.named_modules() if part is decoder)
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    layers: dict[str, Cut] = {}
    summed: list[str] = []
    for names, style in (getattr(decoder.config, "base_model_tp_plan", None) or {}).items():
        pattern = rf"{re.escape(prefix)}\.{re.escape(names).replace(re.escape('*'), '[^.]+')}"
        own = [name for name in linear if re.fullmatch(rf"{pattern}(\.base_layer)?", name)]
        if style in (Cut.COLUMNS, Cut.ROWS):
            factor = _FACTORS[Cut(style)]
            own += [name for name in linear if re.fullmatch(rf"{pattern}\.{factor}\.[^.]+", name)]
            layers |= dict.fromkeys(own, Cut(style))
        elif style == _SUMMED:
            trained = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
            summed += [name for name in trained if re.fullmatch(rf"{pattern}\.(weight|bias)", name)]
        elif style not in _WHOLE and (own or style not in _EXPERTS):
            raise ConfigError(f"{asked}: transformers cuts {kind} in a way ({style}) that is not known here")
    if not layers:
        raise ConfigError(f"{asked}: transformers has no plan by which {kind} can be cut; leave it out")
    _require_divisible(decoder.config, {name: linear[name] for name in layers}, layers, ds.tensor_parallel_size, asked)
    return CutPlan(layers, summed)


def _require_divisible(
    config: Any, linear: Mapping[str, nn.Linear], layers: Mapping[str, Cut], size: int, asked: str
) -> None:
    if any(re.search(r"attn|attention", name) for name in layers):
        for field, said in _HEADS.items():
            count = getattr(config, field, None)
            if count is not None and count % size:
                raise ConfigError(f"{asked}: the model has {count} {said}, which {size} ranks cannot share evenly")
    for name, layer in linear.items():
        if type(layer) is not nn.Linear:
            raise ConfigError(f"{asked}: {name} is a {type(layer).__name__}, and only plain linear layers can be cut")
        width = layer.out_features if layers[name] is Cut.COLUMNS else layer.in_features
        if width % size:
            raise ConfigError(f"{asked}: {name} is {width} wide, which {size} ranks cannot share evenly")


def cut_layers(module: nn.Module, ds: BackendSection) -> None:
    """Each rank keeps its part of the layers, in place; parameters stay the objects they are. Collective."""
    import deepspeed
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode
    from deepspeed.utils import groups

    plan = cut_plan(module, ds)
    deepspeed.init_distributed(verbose=False)  # torch's own group, which it finds
    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(tensor_model_parallel_size=ds.tensor_parallel_size)
    group = tensor_group(ds)
    kinds = {Cut.COLUMNS: LinearLayer, Cut.ROWS: LinearAllreduce}
    for name, cut in plan.layers.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, kinds[cut](module.get_submodule(name), group, name=name))
    for owner in {_owner(name) for name in plan.layers}:
        _divide_heads(module.get_submodule(owner), ds.tensor_parallel_size)
    for name in plan.summed:
        module.get_parameter(name).register_hook(lambda gradient: _summed(gradient, group))
    module.ds_autotp_parsed = True  # type: ignore[assignment]  # DeepSpeed cuts no further


def _owner(layer: str) -> str:
    """The module that a layer is a part of, looking through its adapter."""
    return re.sub(r"\.(base_layer|lora_[AB]\.[^.]+)$", "", layer).rpartition(".")[0]


def _divide_heads(module: nn.Module, size: int) -> None:
    """Most attention modules read the number of heads off their tensors; some off themselves."""
    for field in _COUNTS:
        if isinstance(count := getattr(module, field, None), int):
            setattr(module, field, count // size)


def _summed(gradient: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    gradient = gradient.contiguous()
    dist.all_reduce(gradient, group=group)
    return gradient


def tensor_group(ds: BackendSection) -> dist.ProcessGroup | None:
    """The ranks that share this rank's layers; None: it has its own. DeepSpeed makes it when a model is cut."""
    if ds.tensor_parallel_size == 1:
        return None
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()


def cut_dimensions(module: nn.Module) -> dict[str, int]:
    """Parameter → the dimension in which it was cut, evenly."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    dimensions: dict[str, int] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, LinearLayer):
            dimensions |= {f"{name}.{own}": 0 for own, _ in layer.named_parameters(recurse=False)}
        elif isinstance(layer, LinearAllreduce):
            dimensions[f"{name}.weight"] = 1
    return dimensions
