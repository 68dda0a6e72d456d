"""LoRA through PEFT: small trained matrices beside the frozen ones of a loaded model.

The model stays the object it is; only its linear layers are replaced by layers that add to their output. So attention
plans, shared prefixes and the embedded engine see no difference. PEFT takes seconds to import, and is only where an
adapter is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.config.backend import LoraSection
from openrlhf.models.vision import DECODERS

ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the head. Other targets are modules by the end of their names."""
_NAME = "default"
"""PEFT's name of an adapter that was given none. It is part of its parameters' names, but not in its files."""
_BASE = ".base_layer"
"""The part that PEFT adds to the names of a layer's own parameters."""
_OUTSIDE_OF_DECODERS = rf"(?!.*\b({'|'.join(DECODERS)})\.).*"
"""Matches the modules of an image-text model that are not part of its decoder."""


class AdapterError(ValueError):
    """The model cannot have such an adapter."""


def add_adapter(
    model: Any, lora: LoraSection, *, dtype: torch.dtype, seed: int = 0, only_decoder: bool = False
) -> None:
    """Give a Hugging Face model an adapter in `dtype`, in place, and freeze everything else. Raises `AdapterError`.

    y = W x + (alpha / rank) · B A dropout(x), with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685). Dropout
    acts in training mode only. A is drawn with `seed`; B starts at 0: an adapter changes nothing until it is trained.
    `only_decoder`: the vision tower of an image-text model has none.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora.target_modules
    _check_targets(model, targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        exclude_modules=_OUTSIDE_OF_DECODERS if only_decoder else None,
    )
    # The same matrices on every rank, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:  # a module that is no linear layer
            raise AdapterError(f"--ds.lora.target_modules {' '.join(targets)}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name, in a model or in a policy, is part of an adapter."""
    return ".lora_" in parameter and f".{_NAME}" in parameter


def has_adapter(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def adapter_config(model: Any) -> Any:
    """A copy of the adapter's PEFT configuration, its modules by the last part of their names.

    By their whole names where other modules end in the same: the blocks of a vision tower end in a number as layers in
    a list do, and its `proj` may be a convolution.
    """
    config = copy.deepcopy(model.peft_config[_NAME])
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if is_adapter(name)}
    ends = {name.rpartition(".")[2] for name in adapted}
    own = (name for name, _ in model.named_modules() if ".lora_" not in name and not name.endswith(_BASE))
    alone = all(name in adapted for name in own if name.rpartition(".")[2] in ends)
    config.target_modules = sorted(ends if alone else adapted)
    return config


def adapter_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's part of a state, by the names that PEFT's files have below their prefix."""
    return {name.replace(f".{_NAME}", ""): tensor for name, tensor in state_dict.items() if is_adapter(name)}


def base_names(state_dict: Mapping[str, Tensor]) -> set[str]:
    """The names that the tensors of the frozen model had before the adapter came."""
    return {name.replace(_BASE, "") for name in state_dict if not is_adapter(name)}


def without_adapter(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the frozen model, by the names that they had before the adapter came."""
    return ((name.replace(_BASE, ""), tensor) for name, tensor in named if not is_adapter(name))


def merged(model: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that does without its adapter: W + (alpha / rank) · B A, by the name that W had before.

    `named`: whole tensors by their names in `model`, which stays as it is; so do they. The sum is made in fp32, and
    rounded to W's dtype. A layer's W is held until its A and B have come. Raises `AdapterError` for an adapter that is
    no such sum.
    """
    if not has_adapter(model):
        yield from named
        return
    layers = adapted_weights(model)
    parts = {
        factor: (weight, side)
        for weight, adapted in layers.items()
        for factor, side in zip(adapted.factors, "ab", strict=True)
    }
    parts |= {weight: (weight, "weight") for weight in layers}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        if name in parts:
            weight, part = parts[name]
            found = waiting.setdefault(weight, {})
            found[part] = tensor
            if len(found) == 3:
                yield weight.replace(_BASE, ""), _sum(layers[weight].layer, **waiting.pop(weight))
        elif is_adapter(name):
            raise AdapterError(f"the adapter's {name} is not one of two matrices that can be added to a weight")
        else:
            yield name.replace(_BASE, ""), tensor


class AdaptedWeight(NamedTuple):
    """A weight that an adapter adds to."""

    path: str
    """Of `layer` in the model: its two factors are parameters below it."""
    layer: Any
    """PEFT's."""

    @property
    def factors(self) -> tuple[str, str]:
        """The names of A and B in the model."""
        return f"{self.path}.lora_A.{_NAME}.weight", f"{self.path}.lora_B.{_NAME}.weight"

    @property
    def rank(self) -> int:
        return self.layer.r[_NAME]

    @property
    def scaling(self) -> float:
        """alpha / rank"""
        return self.layer.scaling[_NAME]

    @property
    def experts(self) -> int:
        """Of a stack of experts how many there are; 1 for a matrix."""
        return getattr(self.layer, "num_experts", 1)

    @property
    def outputs(self) -> int:
        """Of a matrix, or of each expert."""
        return self.layer.lora_B[_NAME].out_features


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """By the weights' names in the model. A layer that adds to one of several stacks has another one below it."""
    from peft.tuners.lora import LoraLayer

    weights = {}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            below, inner = f"{path}{_BASE}", layer.base_layer
            while isinstance(inner, LoraLayer):
                below, inner = f"{below}{_BASE}", inner.base_layer
            weights[f"{below}.{getattr(layer, 'parameter_name', 'weight')}"] = AdaptedWeight(path, layer)
    return weights


@torch.no_grad()
def _sum(layer: Any, *, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.float(), b.float()
    if weight.dim() == 2:
        change = b @ a
        transposed = layer.fan_in_fan_out
    else:  # a stack of experts: A has theirs one below the other, B's columns take turns
        a_ERI, b_ORE = a.view(len(weight), -1, a.shape[1]), b.view(len(b), -1, len(weight))
        change = torch.einsum("ore,eri->eoi", b_ORE, a_ERI)
        transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    change = layer.scaling[_NAME] * (change.mT if transposed else change)
    return (weight.float() + change).to(weight.dtype)


@contextlib.contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """While open, `module` computes what its frozen weights compute alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class WithoutAdapter(nn.Module):
    """A model as it was before its adapter, for a reference that needs no weights of its own."""

    def __init__(self, adapted: nn.Module) -> None:
        super().__init__()
        self.adapted = adapted

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with adapter_off(self.adapted):
            return self.adapted(*args, **kwargs)


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    """PEFT is content when one of several names is found; a head is multiplied with elsewhere, without its layer."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    for target in targets if targets != (ALL_LINEAR,) else ():
        found = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        flag = f"--ds.lora.target_modules {target}"
        if not found:
            linear = sorted({name.rpartition(".")[2] for name, m in modules.items() if isinstance(m, nn.Linear)})
            raise AdapterError(f"{flag}: the model has no such module. Its linear ones: {', '.join(linear)}.")
        if head is not None and any(module is head for module in found):
            raise AdapterError(f"{flag}: this is the model's head, which takes no adapter. Leave it out.")
