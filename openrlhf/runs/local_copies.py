"""Models and data that ModelScope has (--use_ms), as folders of this machine: everything else reads folders."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import re
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from openrlhf.config.commands import RLConfig, ServeRMConfig, SupervisedConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.schema import value_at
from openrlhf.data.sources import FILE_KINDS
from openrlhf.utils import waits

logger = logging.getLogger(__name__)

MODEL, DATASET = "model", "dataset"
"""Kinds of repositories, as ModelScope calls them."""
NAMED_BY = {
    "actor.model_name_or_path": MODEL,
    "critic.model_name_or_path": MODEL,
    "ref.model_name_or_path": MODEL,
    "reward.model_name_or_path": MODEL,
    "teacher.model_name_or_path": MODEL,
    "model.model_name_or_path": MODEL,
    "data.prompt_dataset": DATASET,
    "data.dataset": DATASET,
    "eval.dataset": DATASET,
}
"""The flags that name something to be loaded; each takes a comma list, or one name."""
OTHER_FORMATS = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "original/*"]
"""Files of models in formats that nobody here reads."""
DOWNLOAD_SECONDS = 6 * 3600.0
"""The time for which a process waits for another one on its machine that downloads the same."""
ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")

LoadingConfig = TypeVar("LoadingConfig", bound=RLConfig | SupervisedConfig | ServeRMConfig)


def local_copies(config: LoadingConfig) -> LoadingConfig:
    """The configuration with the folder of a local copy in the place of every ModelScope id, downloaded if need be.

    Without --use_ms it is the same one. What exists here as a file or folder stays what it is. Every process that reads
    models calls it with the user's own names: it finds the copy that another process of its machine, or of machines
    with a common cache, has downloaded, and downloads it where there is none. Raises ConfigError.
    """
    if not config.use_ms:
        return config
    changed: Any = config
    for path, kind in NAMED_BY.items():
        try:
            value = value_at(config, path)
        except AttributeError:
            continue  # of another command
        if value:
            changed = _with(changed, path.split("."), local_copy(value, kind, flag=f"--{path}"))
    return changed


def _with(section: Any, path: list[str], value: str) -> Any:
    name, *rest = path
    return dataclasses.replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def local_copy(names: str, kind: str, *, flag: str) -> str:
    """A comma list of names, in which the folder of its copy takes the place of every ModelScope id. Raises
    ConfigError."""
    return ",".join(_local(name.strip(), kind, flag=flag) for name in names.split(","))


def _local(name: str, kind: str, *, flag: str) -> str:
    """Of data an id may be followed by @ and a folder within."""
    plain, at, inside = name.partition("@") if kind == DATASET else (name, "", "")
    is_here = Path(name).expanduser().exists() or Path(plain).expanduser().exists()
    is_file = kind == DATASET and Path(name).suffix.lower() in (*FILE_KINDS, ".py")
    if is_here or is_file or not ID.fullmatch(plain):
        if not is_here and "/" not in name:
            raise ConfigError(
                f"--use_ms: {flag} {name} is no file or folder here (looked in {Path.cwd()}), and no ModelScope id, "
                "which has the form owner/name"
            )
        return name
    return f"{_downloaded(plain, kind, flag=flag)}{at}{inside}"


@functools.cache
def _downloaded(name: str, kind: str, *, flag: str) -> str:
    """The folder of an id's copy. One process of a machine downloads, and the others wait for it."""
    try:
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"--use_ms: {flag} {name} is to come from ModelScope, whose package is not installed: "
            "pip install -e '.[modelscope]' in the repository"
        ) from error
    place = _place(f"{kind} {name}")
    lock, noted = FileLock(place.with_suffix(".lock")), place.with_suffix(".folder")
    try:
        with waits.waiting(f"for another process that downloads {name} from ModelScope", deadline=DOWNLOAD_SECONDS):
            lock.acquire(timeout=DOWNLOAD_SECONDS)
    except Timeout:
        raise ConfigError(
            f"--use_ms: {flag} {name}: another process has been downloading it for {DOWNLOAD_SECONDS / 3600:g} hours; "
            f"if there is none, remove {lock.lock_file}"
        ) from None
    try:
        folder = snapshot_download(name, repo_type=kind, ignore_patterns=OTHER_FORMATS if kind == MODEL else None)
        noted.write_text(folder, encoding="utf-8")
    except Exception as error:  # of several libraries: no network, no such id, no permission, no room
        why = f"{flag} {name} cannot be downloaded from ModelScope: {_first_line(error)}"
        if not noted.exists():
            raise ConfigError(f"--use_ms: {why}") from error
        folder = noted.read_text(encoding="utf-8")
        logger.warning("%s; it is read as it was downloaded earlier", why)
    finally:
        lock.release()
    if not Path(folder).is_dir() or not any(Path(folder).iterdir()):
        noted.unlink(missing_ok=True)
        raise ConfigError(f"--use_ms: {flag} {name}: there are no files in {folder}, where ModelScope's copy should be")
    logger.info("%s %s is read from %s", flag, name, folder)
    return folder


def _first_line(error: Exception) -> str:
    return " ".join(str(error).partition("\n")[0].split()) or type(error).__name__


def _place(what: str) -> Path:
    """A file beside ModelScope's cache, without suffix: who shares the one shares the other."""
    cache = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()
    folder = cache / ".openrlhf"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
