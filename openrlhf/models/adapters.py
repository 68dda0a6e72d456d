"""LoRA through PEFT: small trained matrices beside the frozen ones of a loaded model.

The model stays the object it is; only its linear layers are replaced by layers that add to their output. So attention
plans, shared prefixes and the embedded engine see no difference. PEFT takes seconds to import, and is only where an
adapter is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALL_LINEAR = "all-linear"
_NAME = "default"
"""What PEFT calls an adapter that has no other name; part of its parameters' names, and not of its files."""


class AdapterError(ValueError):
    """The model cannot have such an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """y = W x + (alpha / rank) · B A dropout(x), with W frozen (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Modules by the end of their names; `all-linear`: every linear layer but the head."""
    dropout: float = 0.0
    """In training mode only."""
    seed: int = 0
    """Of A. B starts at 0: an adapter changes nothing until it is trained."""


def add_adapter(model: Any, settings: LoraSettings, *, dtype: torch.dtype) -> None:
    """Give a Hugging Face model an adapter in `dtype`, in place, and freeze everything else. Raises `AdapterError`."""
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(model, settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if settings.targets == (ALL_LINEAR,) else list(settings.targets),
    )
    # The same matrices on every rank, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:  # a module that is no linear layer
            raise AdapterError(f"--ds.lora.target_modules {' '.join(settings.targets)}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
        if _is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def has_adapter(model: nn.Module) -> bool:
    return any(_is_adapter(name) for name, _ in model.named_parameters())


def adapter_config(model: Any) -> Any:
    """A copy of the adapter's PEFT configuration, its modules by the last part of their names."""
    config = copy.deepcopy(model.peft_config[_NAME])
    config.target_modules = sorted({name.rpartition(".")[2] for name in config.target_modules})
    return config


def adapter_tensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's part of a state, by the names that PEFT's files have below their prefix."""
    return {name.replace(f".{_NAME}", ""): tensor for name, tensor in state_dict.items() if _is_adapter(name)}


def base_names(state_dict: Mapping[str, Tensor]) -> set[str]:
    """The names that the tensors of the frozen model had before the adapter came."""
    return {name.replace(".base_layer.", ".") for name in state_dict if not _is_adapter(name)}


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


def _is_adapter(parameter: str) -> bool:
    return ".lora_" in parameter and f".{_NAME}" in parameter


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
