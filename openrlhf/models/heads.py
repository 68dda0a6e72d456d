"""Facts in a model's weight files that transformers does not report after loading: a scalar head, and the dtype."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def stored_dtype(path: str | os.PathLike[str]) -> torch.dtype | None:
    """The dtype of most numbers in the (first) weight file of the model at `path`; None for a kind that is not trained
    as it is (8 bits, 64 bits)."""
    numbers: Counter[torch.dtype | None] = Counter()
    for file in _weight_files(path):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, it is no mapping
                    entry = tensors.get_slice(name)
                    numbers[_DTYPES.get(entry.get_dtype())] += math.prod(entry.get_shape())
        else:
            for tensor in _load_pickled(file).values():
                numbers[tensor.dtype if tensor.dtype in _DTYPES.values() else None] += tensor.numel()
        break
    return numbers.most_common(1)[0][0] if numbers else None


def read_tensor(path: str | os.PathLike[str], name: str) -> Tensor | None:
    """The tensor of this name in the files of the model at `path` (a folder or a Hub name); None: there is none."""
    for file in _weight_files(path, holding=name):
        if file.suffix != ".safetensors":
            return _load_pickled(file).get(name)
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118, it is no mapping
                return tensors.get_tensor(name)
    return None


def scalar_heads(path: str | os.PathLike[str]) -> list[str]:
    """Names of what could be a scalar head: a `<name>.weight` of shape [1, D] that is part of no numbered layer."""
    shapes: dict[str, list[int]] = {}
    for file in _weight_files(path):
        if file.suffix != ".safetensors":
            shapes |= {name: list(tensor.shape) for name, tensor in _load_pickled(file).items()}
            continue
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return sorted(
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and shape[0] == 1
        if not any(part.isdigit() for part in name.split("."))
    )


def _weight_files(path: str | os.PathLike[str], *, holding: str | None = None) -> Iterator[Path]:
    """The files with the model's weights; where an index says which tensor lies where, those that hold this one."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if file := _find(path, name):
            yield file
            return
        if index := _find(path, f"{name}.index.json"):
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = {shard for tensor, shard in places.items() if holding in (None, tensor)}
            yield from (file for shard in sorted(shards) if (file := _find(path, shard)))
            return


def _find(path: str | os.PathLike[str], name: str) -> Path | None:
    try:
        found = cached_file(os.path.expanduser(path), name)
    except OSError:
        return None
    return None if found is None else Path(found)


def _load_pickled(file: Path) -> dict[str, Tensor]:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
