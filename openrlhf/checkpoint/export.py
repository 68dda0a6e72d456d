"""Writing a model as a Hugging Face folder that anyone's `from_pretrained` loads; of an adapted one, its adapter."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from openrlhf.models.adapters import adapter_config, adapter_tensors, base_names, has_adapter
from openrlhf.models.image_processor import has_vision
from openrlhf.models.policy import Policy
from openrlhf.models.value import Normalisation, ValueModel

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""An image-text model's processor. A model has one or more of them."""
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""A processor's chat template. That of the tokenizer, where it has one, is the one that was trained with."""
VALUE_HEAD_FILE = "value_head.json"
"""Beside the adapter of a value model: what `config.json` says of a whole one. With a `config.json` the folder would
pass for a whole model, and transformers would look for its weights."""
_DESCRIPTIONS = ("config.json", "adapter_config.json", VALUE_HEAD_FILE)


def export_policy(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write weights (safetensors), configuration, generation settings and tokenizer to `directory`; returns it. Of an
    image-text model also the files of its processor.

    Everything is written beside its place first: a new folder appears complete or not at all; in one that is already
    there the model's files are replaced one by one, and other files stay. Of a policy with an adapter the adapter is
    written, as `peft.PeftModel.from_pretrained(base, directory)` loads it. `state_dict` stands in for the policy's own
    weights (names of `policy`), for backends that shard. Whole models are written in `stored_dtype`, the dtype of the
    files that they were read from.
    """
    with _draft_of(Path(directory)) as draft:
        _write(policy, tokenizer, draft, state_dict)
    return Path(directory)


def export_value_model(
    model: ValueModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    *,
    statistics: Normalisation | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a critic or reward model as its family's sequence classifier with one label; returns the directory.

    `AutoModelForSequenceClassification` loads it with its head (and reads the score at the last token that is not the
    configuration's padding token; ours is the last token), and so does `load_value_model`. A family without such a
    class is written as its bare body with the head beside it, for `load_value_model`. The head's name is stored as
    `value_head_prefix`, `statistics` (default: the model's own normalisation) as `mean` and `std`. An adapter is
    written together with the head, and `value_head.json` holds what `config.json` would. `state_dict` stands in for
    the model's own weights (names of `model`). The rest as in `export_policy`.
    """
    with _draft_of(Path(directory)) as draft:
        _write_value_model(model, draft, statistics or model.normalisation, state_dict)
        _write_readers(model.model.config, tokenizer, draft)
    return Path(directory)


@contextlib.contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """A folder beside `target`, to be filled; moved there if nothing goes wrong, gone in any case."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield draft
        _move_in(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    state_dict: Mapping[str, Tensor] | None,
) -> None:
    own = None if state_dict is None else {name.removeprefix("model."): t for name, t in state_dict.items()}
    if has_adapter(policy.model):
        tensors = adapter_tensors(policy.model.state_dict() if own is None else own)
        _write_adapter(policy.model, folder, tensors, task="CAUSAL_LM")
    else:
        dtype = policy.stored_dtype or policy.model.dtype
        weights = policy.model.state_dict() if own is None else own
        policy.model.save_pretrained(folder, state_dict=_in_dtype(policy.model, weights, dtype))
        _users_config(policy.model.config, policy.config_changes, dtype=dtype).save_pretrained(folder)
    _write_readers(policy.model.config, tokenizer, folder)


def _write_readers(config: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """The tokenizer; and of an image-text model its processor's files, as they are where the model was read from."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    source = os.path.expanduser(config.name_or_path)
    if not source or not has_vision(config):
        return
    templates = () if (folder / TEMPLATE_FILES[0]).exists() else TEMPLATE_FILES
    found = {name: path for name in (*PROCESSOR_FILES, *templates) if (path := _file_of(source, name))}
    for name, path in found.items():
        shutil.copyfile(path, folder / name)
    if not found.keys() & {*PROCESSOR_FILES}:
        # The weights are worth more than these: a run of days does not end without them.
        logger.warning("%s: the files of its image processor are not there any more: copy them into the export", source)


def _file_of(source: str, name: str) -> str | None:
    """A file of a model's folder or of its repository; None where there is none."""
    quiet = ("missing_entries", "gated_repo", "connection_errors")
    try:
        return cached_file(source, name, **{f"_raise_exceptions_for_{kind}": False for kind in quiet})
    except (OSError, ValueError):
        return None


def _in_dtype(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """`weights`, of `model`, as files of this dtype hold them.

    What transformers keeps in fp32 in such a model, and what is no parameter, stays as it is. Weights that are tied
    stay one tensor, by which they are recognised.
    """
    buffers = {name for name, _ in model.named_buffers()}
    exact = model._keep_in_fp32_modules_strict or ()
    cast: dict[tuple[int, torch.Size], Tensor] = {}

    def written(name: str, tensor: Tensor) -> Tensor:
        stays = name in buffers or not tensor.is_floating_point() or any(part in name for part in exact)
        if stays or tensor.dtype == dtype:
            return tensor
        return cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.detach().to(dtype))

    return {name: written(name, tensor) for name, tensor in weights.items()}


def _users_config(running: Any, changes: Mapping[str, float], *, dtype: torch.dtype) -> Any:
    """The running configuration without our attention's name and with the values that loading replaced."""
    config = copy.deepcopy(running)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    for name, value in changes.items():
        place, _, own = name.rpartition(".")  # "vision_config.attention_dropout"; those of the decoder have no place
        setattr(getattr(config, place) if place else config.get_text_config(), own, value)
    config._attn_implementation = None
    return config


def _write_adapter(
    model: Any, folder: Path, tensors: Mapping[str, Tensor], *, task: str, heads: Sequence[str] = ()
) -> None:
    """`tensors` by their names in the model that the adapter is for; `heads`: which of its modules come whole."""
    config = adapter_config(model)
    base = model.config.name_or_path
    config.base_model_name_or_path = os.path.abspath(os.path.expanduser(base)) if os.path.exists(base) else base
    config.task_type = task
    config.modules_to_save = list(heads) or None
    config.inference_mode = True
    config.save_pretrained(folder)
    whole = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _write_value_model(
    model: ValueModel, folder: Path, statistics: Normalisation | None, state_dict: Mapping[str, Tensor] | None
) -> None:
    weights = model.state_dict() if state_dict is None else state_dict
    head = weights["head.weight"]
    body = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}

    dtype = model.stored_dtype or model.model.dtype
    config = _users_config(model.model.config, model.config_changes, dtype=dtype)
    config.num_labels = 1
    config.value_head_prefix = model.head_prefix
    if statistics is not None:
        config.mean, config.std = statistics

    writer, family, place = model.model, model.head_prefix, ""
    if classifier := _classifier(config, dtype=dtype):
        prefix = f"{classifier.base_model_prefix}."
        heads = set(classifier.state_dict()) - {f"{prefix}{name}" for name in base_names(body)}
        # What is neither body nor one plain matrix would be left random in the file, and change every score.
        if len(heads) == 1 and classifier.get_parameter(*heads).shape == head.shape:
            writer, family, place = classifier, next(iter(heads)).removesuffix(".weight"), prefix
    if has_adapter(model.model):
        tensors = {f"{place}{name}": tensor for name, tensor in adapter_tensors(body).items()}
        _write_adapter(model.model, folder, tensors | {f"{family}.weight": head}, task="SEQ_CLS", heads=[family])
        facts = {"value_head_prefix": model.head_prefix} | (statistics._asdict() if statistics else {})
        (folder / VALUE_HEAD_FILE).write_text(json.dumps(facts), encoding="utf-8")
        return
    tensors = {f"{place}{name}": tensor for name, tensor in _in_dtype(model.model, body, dtype).items()}
    # Under both names where they differ: the family's for its class, the given one for who was told it.
    tensors |= {f"{name}.weight": head.detach().to(dtype, copy=True) for name in (family, model.head_prefix)}
    writer.save_pretrained(folder, state_dict=tensors)
    config.architectures = [type(writer).__name__]
    config.save_pretrained(folder)


def _classifier(config: Any, *, dtype: torch.dtype) -> Any | None:
    """The family's sequence classifier without storage, for its names; None where transformers has none."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return None
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)


def _move_in(draft: Path, target: Path) -> None:
    """Put the files of `draft` in place. What else is in `target` (checkpoints, notes) stays, old weights do not.

    An old adapter would be taken for the model, and an old configuration for that of an adapter, which has none.
    """
    if not target.exists():
        draft.rename(target)
        return
    new = {path.name for path in draft.iterdir()}
    for path in target.iterdir():
        weights = path.name.startswith(("model", "adapter_model")) and ".safetensors" in path.name
        if path.name not in new and (weights or path.name in _DESCRIPTIONS):
            path.unlink()
    for path in sorted(draft.iterdir(), key=lambda p: p.name in _DESCRIPTIONS):
        os.replace(path, target / path.name)
