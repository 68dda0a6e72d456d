"""Merging an adapter into its base model: W + (alpha / rank) · B A, for causal language models and reward models."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from openrlhf.checkpoint.export import VALUE_HEAD_FILE, export_policy, export_value_model
from openrlhf.config.backend import ServeBackendSection
from openrlhf.config.commands import LoraCombinerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.models import TrustSection
from openrlhf.models.loading import (
    LoadSettings,
    ModelLoadError,
    has_tokenizer,
    load_policy,
    load_value_model,
    silence_progress_bars,
)
from openrlhf.models.value import Normalisation
from openrlhf.utils.foreign_lines import start_logging

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
"""Before every name in PEFT's files."""
_ADAPTER = "default"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtype that `--ds.param_dtype` asks for; otherwise that of the base model's files."""


def merge_adapter(config: LoraCombinerConfig) -> int:
    """Write the merged model and its tokenizer; returns the process's exit status."""
    start_logging()
    silence_progress_bars()
    try:
        _merge(config)
    except ModelLoadError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def merge_folders(base: str, adapter: str, output: str, *, trust_remote_code: bool = False) -> None:
    """Write the merged model of an adapter's folder, a reward model's too. Raises ModelLoadError."""
    is_rm = _read_adapter(adapter).head is not None
    trust = TrustSection(trust_remote_code=trust_remote_code)
    _merge(LoraCombinerConfig(model_path=base, lora_path=adapter, output_path=output, is_rm=is_rm, model=trust))


def adapter_base(folder: Path) -> str:
    """The model that an adapter is for, as its folder names it. Raises ModelLoadError."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError):
        base = None
    if not base:
        raise ModelLoadError(
            f"{folder}: its adapter_config.json names no base_model_name_or_path: merge it with openrlhf lora-combine, "
            "and name the result"
        )
    return str(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """The content of an adapter's folder."""

    config: Any
    tensors: dict[str, Tensor]
    """Without the head. Names of the model that the adapter is for."""
    head: Tensor | None
    """[1, D]: the score of a reward model."""
    facts: dict[str, Any]
    """The name, mean and std of the head; empty where they were not written."""


def _merge(config: LoraCombinerConfig) -> None:
    base, folder, output = (str(path) for path in (config.model_path, config.lora_path, config.output_path))
    for flag, path in (("--model_path", base), ("--lora_path", folder)):
        if os.path.realpath(os.path.expanduser(path)) == os.path.realpath(os.path.expanduser(output)):
            raise ConfigError(f"--output_path {output} is {flag} too, and would be overwritten: name another folder")
    adapter = _read_adapter(folder)
    if adapter.head is not None and not config.is_rm:
        raise ModelLoadError(f"--lora_path {folder}: this adapter comes with the head of a reward model: add --is_rm")
    prefix = adapter.facts.get("value_head_prefix", "score")
    # In fp32: sums are rounded once, at the end.
    ds = ServeBackendSection(param_dtype="fp32", value_head_prefix=prefix)
    settings = LoadSettings(device="cpu", ds=ds, model=config.model, flag="--model_path")
    if not config.is_rm:
        policy = load_policy(base, settings)
        policy.model = _merged(policy.model, adapter, config)
        policy.stored_dtype = _DTYPES.get(config.ds.param_dtype, policy.stored_dtype)
        export_policy(policy, _tokenizer(config), Path(output).expanduser())
    else:
        model = load_value_model(base, settings, fresh_head=adapter.head is not None)
        if adapter.head is not None:
            if adapter.head.shape != model.head.weight.shape:
                raise _wrong_base(config, f"heads of {adapter.head.shape[1]} and {model.head.weight.shape[1]} numbers")
            model.head.weight.data = adapter.head.float()
            model.head_prefix = prefix
        model.model = _merged(model.model, adapter, config)
        known = {"mean", "std"} <= adapter.facts.keys()
        statistics = Normalisation(adapter.facts["mean"], adapter.facts["std"]) if known else None
        model.stored_dtype = _DTYPES.get(config.ds.param_dtype, model.stored_dtype)
        export_value_model(model, _tokenizer(config), Path(output).expanduser(), statistics=statistics)
    logger.info("merged model in %s", output)


def _read_adapter(path: str) -> _Adapter:
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    folder = Path(path).expanduser()
    what = f"--lora_path {path}"
    if not folder.is_dir():
        raise ModelLoadError(f"{what}: no such folder")
    if not (folder / "adapter_config.json").is_file():
        raise ModelLoadError(f"{what}: no adapter_config.json here. Name the folder that a LoRA run wrote.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
        stored = load_peft_weights(str(folder), device="cpu")
    except (OSError, ValueError, TypeError) as error:
        raise ModelLoadError(f"{what}: cannot read the adapter: {error}") from error
    if config.base_model_name_or_path:
        logger.info("the adapter was trained on %s", config.base_model_name_or_path)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    heads = [
        name
        for name, tensor in tensors.items()
        if config.task_type == "SEQ_CLS" and ".lora_" not in name and tensor.dim() == 2 and tensor.shape[0] == 1
    ]
    head = tensors.pop(heads[0]) if heads else None
    facts = folder / VALUE_HEAD_FILE
    return _Adapter(
        config=config,
        tensors=tensors,
        head=head,
        facts=json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {},
    )


def _merged(model: Any, adapter: _Adapter, config: LoraCombinerConfig) -> Any:
    """`model`, a whole one or a body, with the adapter added to its weights."""
    from peft import PeftModel
    from peft.utils import set_peft_model_state_dict

    settings, tensors = adapter.config, adapter.tensors
    if adapter.config.task_type == "SEQ_CLS":
        # The adapter is for a classifier, whose body this is.
        place = f"{model.base_model_prefix}."
        tensors = {name.removeprefix(place): tensor for name, tensor in tensors.items()}
        if not isinstance(settings.target_modules, str):
            settings.target_modules = {name.removeprefix(place) for name in settings.target_modules}
        settings.modules_to_save = settings.task_type = None
    try:
        wrapped = PeftModel(model, settings, adapter_name=_ADAPTER)
        found: Any = set_peft_model_state_dict(
            wrapped, {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}, adapter_name=_ADAPTER
        )
    except (ValueError, RuntimeError) as error:  # modules that are not there; other shapes
        raise _wrong_base(config, str(error)) from error
    strange = [*found.unexpected_keys, *(name for name in found.missing_keys if ".lora_" in name)]
    if strange:
        raise _wrong_base(config, f"{len(strange)} tensors without a counterpart, such as {strange[0]}")
    return wrapped.merge_and_unload()


def _wrong_base(config: LoraCombinerConfig, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"--lora_path {config.lora_path} does not fit --model_path {config.model_path}: {why}. Name the model that the "
        "adapter was trained on."
    )


def _tokenizer(config: LoraCombinerConfig) -> Any | None:
    """The adapter's, else the base model's; None where neither folder has one."""
    for path in (os.path.expanduser(str(path)) for path in (config.lora_path, config.model_path)):
        if not os.path.isdir(path) or has_tokenizer(Path(path)):
            return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    logger.warning("neither folder has a tokenizer: none is written")
    return None
