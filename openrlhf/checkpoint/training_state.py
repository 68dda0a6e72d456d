"""State on disk, exact to the bit: a backend's tensors in sharded safetensors, nested dicts as JSON and safetensors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from openrlhf.utils import waits

SHARD_BYTES = 1 << 30
NUMBERS, INDEX = "numbers.json", "index.json"
TENSOR = "$tensor"
"""The only key of what stands in JSON for a tensor."""


def write_training_state(
    folder: Path,
    numbers: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    writes: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """What `Backend.numbers` and `Backend.tensors` give, to a new folder: files of about `shard_bytes`, and an index.

    Collective: a rank that does not write (`writes`) still asks for every tensor, and one that fails to write does so
    too, before it raises: the others wait for it.
    """
    error: OSError | None = None
    writer = _ShardWriter(folder, shard_bytes) if writes else None
    for name, tensor in tensors:
        if writer is not None and error is None:
            try:
                writer.add(name, tensor)
            except OSError as failed:
                error = failed
    if error is not None:
        raise error
    if writer is not None:
        writer.finish(numbers)


def read_training_state(folder: Path) -> tuple[dict[str, Any], SavedTensors]:
    """Numbers, and tensors that are read when they are asked for."""
    return _read_json(folder / NUMBERS), SavedTensors(folder, _read_json(folder / INDEX))


class SavedTensors(Mapping[str, Tensor]):
    """Tensors by name, each read from its file when asked for."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self._folder / file), framework="pt")
        return self._open[file].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # without reading it, as Mapping would

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _ShardWriter:
    def __init__(self, folder: Path, shard_bytes: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: dict[str, str] = {}
        self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._held_bytes + size > self._shard_bytes:
            self._flush()
        self._shard[name] = _copy(tensor)
        waits.mark_progress()
        self._held_bytes += size

    def _flush(self) -> None:
        self._count += 1
        file = f"tensors-{self._count:05}.safetensors"
        _save(self._shard, self._folder / file)
        self._files |= dict.fromkeys(self._shard, file)
        self._shard, self._held_bytes = {}, 0

    def finish(self, numbers: Mapping[str, Any]) -> None:
        if self._shard:
            self._flush()
        (self._folder / NUMBERS).write_text(json.dumps(dict(numbers)), encoding="utf-8")
        (self._folder / INDEX).write_text(json.dumps(self._files), encoding="utf-8")


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """A nested dict with JSON values and tensors: `state.json`, and `state.safetensors` with the tensors."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_without_tensors(state, "", tensors))
    if tensors:
        _save(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(text, encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The state that `write_state` wrote; tuples have become lists."""
    state = _read_json(folder / "state.json")
    file = folder / "state.safetensors"
    return _with_tensors(state, SavedTensors(folder, _names_in(file)) if file.exists() else {})


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = _copy(value)
        return {TENSOR: path}
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str) or key == TENSOR]:
            raise TypeError(f"{path or 'the state'} has the key {odd[0]!r}: JSON would not give it back")
        return {key: _without_tensors(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensors[value[TENSOR]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    return value


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(tensors), path)
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise OSError(f"{path.name}: {error}") from error


def _names_in(file: Path) -> dict[str, str]:
    with safe_open(str(file), framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file.name)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, of its own: what is given may change before it is written."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def random_state() -> dict[str, Any]:
    """Where they stand: JSON values and tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)  # its stubs know one type for the whole tuple
    state = {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set them to where they stood. What was saved without a GPU leaves its generator alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
