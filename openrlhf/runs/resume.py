"""Where a run's checkpoints are, what it continues from, and which run directory goes on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.checkpoint.folder import CheckpointError, CheckpointFolder, Retention
from openrlhf.checkpoint.manager import Found, find_checkpoint, together
from openrlhf.checkpoint.universal import UniversalCheckpoint, find_universal
from openrlhf.config.commands import Config
from openrlhf.config.errors import ConfigError
from openrlhf.config.reporting import LoggerSection, RLCheckpointSection, SupervisedCheckpointSection
from openrlhf.config.schema import to_dict

logger = logging.getLogger(__name__)


class Checkpoints(NamedTuple):
    """What a run knows about checkpoints before it loads anything."""

    folder: CheckpointFolder | None
    """None: it neither writes nor reads any."""
    found: Found | None
    """To be continued from."""
    universal: UniversalCheckpoint | None = None
    """To be begun with, where there is none of our own."""


@contextlib.contextmanager
def opened_checkpoints(
    section: SupervisedCheckpointSection | RLCheckpointSection,
    *,
    model: str,
    use_universal: bool = False,
    ranks: Ranks = ALONE,
) -> Iterator[Checkpoints]:
    """The folder belongs to this run while open. `model`: the part of a checkpoint that `--ckpt.save_hf` links.

    `use_universal`: without a checkpoint of our own, begin with DeepSpeed's universal one there.

    Raises CheckpointError, and ConfigError for a new run that would replace what another one left.
    """
    if section.period is None and not section.resumes:
        yield Checkpoints(None, None)
        return
    folder = CheckpointFolder(
        Path(section.folder).expanduser().resolve(),
        Retention(max_num=section.max_num, max_gib=section.max_mem),
        link_model=model if section.save_hf else None,
    )
    together(ranks, lambda: folder.open() if ranks.is_main else None)
    try:
        found, universal = None, None
        if section.resumes:
            found = find_checkpoint(folder, ranks=ranks)
            if found is None and use_universal:
                universal = together(ranks, lambda: find_universal(folder.path))
            elif found is None and folder.has_deepspeeds:
                raise CheckpointError(
                    f"--ckpt.path {section.folder} holds checkpoints in DeepSpeed's format: make a universal one of "
                    "the last (python -m deepspeed.checkpoint.ds_to_universal) and add --ds.use_universal_ckpt, or "
                    "name another folder"
                )
            elif found is None:
                logger.info("no checkpoint in %s, a new run begins", folder.path)
        elif folder.steps:
            raise ConfigError(
                f"--ckpt.path {section.folder} holds checkpoints of an earlier run, up to "
                f"global_step{folder.steps[-1]}: continue it with --ckpt.load_enable or --ckpt.auto_resume, "
                "name another folder, or remove them"
            )
        yield Checkpoints(folder, found, universal)
    finally:
        if ranks.is_main:
            folder.close()


def run_directory_of(section: LoggerSection, found: Found | None) -> tuple[str, bool]:
    """Where this run writes its logs, and whether it goes on with what is there.

    A continued run goes on in the directory it began in, unless that is gone or another one is asked for. (One whose
    name was taken has a number behind it.)
    """
    noted = found.notes.get("run_directory") if found else None
    begun = Path(noted) if isinstance(noted, str) else None
    if begun is not None and begun.is_dir():
        if section.run_dir is None:
            return str(begun), True
        wanted = Path(section.run_dir).expanduser().resolve()
        if begun.parent == wanted.parent and re.fullmatch(re.escape(wanted.name) + r"(-\d+)?", begun.name):
            return str(begun), True
    return section.directory, False


def recorded_settings(config: Config) -> dict[str, Any]:
    """Flag → value, as JSON has it: what a checkpoint remembers of the run that wrote it.

    Where things are written is left out: that has no influence on what is trained.
    """
    return dict(_flat({name: value for name, value in to_dict(config).items() if name not in ("ckpt", "logger")}))


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")
SAMPLES, SAMPLE_BYTES = 16, 4096


def weights_digest(model: str) -> str:
    """Tells a model's weights from others, also of the same shape, wherever its folder is; a Hub's name is its own.

    Of every file of weights a few blocks are read: enough for weights that were trained, and nothing beside loading.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
