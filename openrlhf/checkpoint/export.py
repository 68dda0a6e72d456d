"""Writing a policy as a Hugging Face folder that anyone's `from_pretrained` loads."""

from __future__ import annotations

import copy
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.models.policy import Policy


def export_policy(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write weights (safetensors), configuration, generation settings and tokenizer to `directory`; returns it.

    The folder appears complete or not at all: it is written beside its place and renamed. One that is already there is
    replaced. `state_dict` stands in for the policy's own weights (names of `policy.model`), for backends that shard.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        _write(policy, tokenizer, draft, state_dict)
        _replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    state_dict: Mapping[str, Tensor] | None,
) -> None:
    policy.model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))
    # The running configuration carries our attention's name and the values that loading replaced; the file must not.
    config = copy.deepcopy(policy.model.config)
    for name, value in policy.config_changes.items():
        setattr(config.get_text_config(), name, value)
    config._attn_implementation = None
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _replace(draft: Path, target: Path) -> None:
    """Put `draft` in the place of `target`; a folder cannot be renamed onto another, so an old one steps aside."""
    if not target.exists():
        draft.rename(target)
        return
    old = draft.with_suffix(".old")
    target.rename(old)
    draft.rename(target)
    shutil.rmtree(old)
