"""The few things checkpoints do to a file system: in one place, so that tests can stop them at every one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Disk:
    """What a method has done survives a crash of the machine when it returns; `rename` is all or nothing."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write_text(self, path: Path, text: str) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def sync_tree(self, folder: Path) -> None:
        """Everything in it, whoever wrote it."""
        for parent, _, names in os.walk(folder):
            for name in names:
                _sync(Path(parent, name))
            _sync(Path(parent))

    def rename(self, old: Path, new: Path) -> None:
        """Within one folder. A file that is called `new` is replaced."""
        os.replace(old, new)
        _sync(new.parent)

    def link_tree(self, source: Path, target: Path, *, without: str | None = None) -> None:
        """The files of `source` under a second name, but not its folder `without`."""
        ignored = shutil.ignore_patterns(without) if without else None
        shutil.copytree(source, target, copy_function=_link, ignore=ignored)
        self.sync_tree(target)

    def remove(self, path: Path) -> None:
        """A folder with all that is in it, or a file."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
