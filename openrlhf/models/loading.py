"""Loading a Hugging Face folder into a policy and its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from openrlhf.models.policy import Policy
from openrlhf.models.support import UnsupportedModelError, examine

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "merges.txt")


class ModelLoadError(ValueError):
    """A model or tokenizer that the user named cannot be loaded."""


def silence_progress_bars() -> None:
    """Loading and saving say nothing: a run has a progress display of its own."""
    transformers_logging.disable_progress_bar()


def load_policy(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    gradient_checkpointing: bool = False,
    gradient_checkpointing_reentrant: bool = False,
    flag: str = "--actor.model_name_or_path",
) -> Policy:
    """The causal language model at `path`, in training mode, its dropout off.

    Attention is packed whatever `attn_implementation` says, except "eager" and "sdpa", which name the implementation of
    models that have to run one sequence at a time. Gradient checkpointing acts in training mode only. `flag` is what
    errors call the path.
    """
    check_model_path(path, flag=flag)
    config = _load(AutoConfig, path, flag=flag, trust_remote_code=trust_remote_code)
    changed = _switch_dropout_off(config.get_text_config())
    native = attn_implementation if attn_implementation in ("eager", "sdpa") else None
    model = _load(
        AutoModelForCausalLM,
        path,
        flag=flag,
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=native,
    ).to(device)
    # Transformers has chosen a native implementation that the model supports; it serves where packing does not.
    try:
        support = examine(model, native_attention=model.config._attn_implementation)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{flag} {path}: {error}") from error
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": gradient_checkpointing_reentrant})
    policy = Policy(model, packed=support.packed, transform=support.transform, config_changes=changed)
    return policy.train()


def load_tokenizer(
    path: str | os.PathLike[str],
    *,
    use_fast: bool = True,
    trust_remote_code: bool = False,
    flag: str = "--actor.model_name_or_path",
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`; its padding token is the end-of-sequence token if the model knows no other.

    The model's embeddings keep their size: a padding token beyond them, as transformers adds by default to a few
    tokenizer classes, does not count as one.
    """
    check_model_path(path, flag=flag)
    _check_tokenizer_files(Path(path).expanduser(), flag=flag)
    config = _load(AutoConfig, path, flag=flag, trust_remote_code=trust_remote_code)
    tokenizer = _load(AutoTokenizer, path, flag=flag, use_fast=use_fast, trust_remote_code=trust_remote_code)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or len(tokenizer)
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= vocabulary:
        raise ModelLoadError(
            f"{flag} {path}: the tokenizer has no end-of-sequence token among the model's {vocabulary} entries. "
            "Set eos_token in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocabulary:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_model_path(path: str | os.PathLike[str], *, flag: str) -> None:
    """Fail early, and in the user's words, on a folder that is not there or holds no model.

    What does not look like a folder ("org/name") is left to the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"{flag} {path}: this folder has no config.json, so it holds no Hugging Face model. "
                "Name the folder that save_pretrained wrote."
            )
    elif folder.exists():
        raise ModelLoadError(f"{flag} {path}: this is a file. Name the model's folder.")
    elif folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1:
        raise ModelLoadError(f"{flag} {path}: no such folder.")


def _check_tokenizer_files(folder: Path, *, flag: str) -> None:
    """Transformers makes an empty tokenizer for a folder that has none, and says nothing."""
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelLoadError(
            f"{flag} {folder}: cannot load the tokenizer: the folder has none. Copy the files that its base model has "
            "(tokenizer.json, tokenizer_config.json) beside the weights."
        )


def _load(loader: Any, path: str | os.PathLike[str], *, flag: str, **kwargs: Any) -> Any:
    what = {AutoTokenizer: "tokenizer", AutoConfig: "configuration"}.get(loader, "model")
    try:
        return loader.from_pretrained(os.path.expanduser(path), **kwargs)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{flag} {path}: cannot load the {what}: {error}") from error


def _switch_dropout_off(config: Any) -> dict[str, float]:
    """Set every source of randomness in the forward to 0; returns what it was, for the export to write back.

    Old and new log-probs must come from the same function of the weights.
    """
    changed = {}
    for name, value in list(vars(config).items()):
        # attention_dropout, resid_pdrop, layerdrop, …: families agree on no name.
        random = "drop" in name or name == "router_jitter_noise"
        if random and isinstance(value, float) and value > 0:
            changed[name] = value
            setattr(config, name, 0.0)
    return changed
