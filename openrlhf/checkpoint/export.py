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

    Everything is written beside its place first: a new folder appears complete or not at all; in one that is already
    there the model's files are replaced one by one, and other files stay. `state_dict` stands in for the policy's own
    weights (names of `policy.model`), for backends that shard.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        _write(policy, tokenizer, draft, state_dict)
        _move_in(draft, target)
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


def _move_in(draft: Path, target: Path) -> None:
    """Put the files of `draft` in place. What else is in `target` (checkpoints, notes) stays, old weights do not."""
    if not target.exists():
        draft.rename(target)
        return
    new = {path.name for path in draft.iterdir()}
    for path in target.iterdir():
        if path.name not in new and path.name.startswith("model") and ".safetensors" in path.name:
            path.unlink()
    for path in sorted(draft.iterdir(), key=lambda p: p.name == "config.json"):
        os.replace(path, target / path.name)
