"""Weights for a vLLM on the trainer's device, as far as a machine without one goes: all but the mapping of memory.

The trainer's half, vLLM's serialisation and the worker's half are the real ones. A handle leads to a block in this
process instead of another's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from module_weights import Parameters, mixed_model, sent
from torch.storage import TypedStorage

from openrlhf.weight_sync import device_blocks, vllm_transfer
from openrlhf.weight_sync.vllm_compat import connect
from openrlhf.weight_sync.vllm_transfer import IpcTrainerInfo
from openrlhf.weight_sync.vllm_worker import IpcWeightTransferEngine

WORKER_DEVICE = 5


class OneDevice:
    """Blocks by handle, each of which may be read once. CUDA's names for what a CPU has not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exported: list[torch.Tensor] = []
        self.read: list[int] = []
        monkeypatch.setattr(device_blocks, "reduce_tensor", self.reduce)
        monkeypatch.setattr(device_blocks, "rebuild_cuda_tensor", self.rebuild)
        monkeypatch.setattr(vllm_transfer, "pack_on_device", self.pack)
        for name, stand_in in {
            "get_device_properties": lambda device: SimpleNamespace(uuid="GPU-1"),
            "current_device": lambda: 0,
            "current_stream": lambda device: SimpleNamespace(synchronize=lambda: None),
            "ipc_collect": lambda: None,
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @staticmethod
    def pack(named: Any, *, max_bytes: int, device: torch.device) -> Any:
        assert device.type == "cuda"
        return device_blocks.pack_on_device(named, max_bytes=max_bytes, device="cpu")

    def reduce(self, payload: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        number = len(self.exported)
        self.exported.append(payload)
        shape = (payload.size(), payload.stride(), 0)
        memory = (0, number.to_bytes(64, "big"), payload.numel(), 0)
        return None, (torch.Tensor, *shape, TypedStorage, torch.uint8, *memory, False, b"c", number, b"e", True)

    def rebuild(self, cls: type, size: tuple, stride: tuple, offset: int, storage: type, dtype: Any, device: int,
                handle: bytes, *counting: Any) -> torch.Tensor:  # fmt: skip
        assert (cls, storage, dtype, device) == (torch.Tensor, TypedStorage, torch.uint8, WORKER_DEVICE)
        number = int.from_bytes(handle, "big")
        self.read.append(number)
        return self.exported[number].as_strided(size, stride, offset)


class Worker:
    """vLLM's engine in a worker, with a model that keeps what it is given; and the wire between."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        config = SimpleNamespace(parallel_config=None, model_config=None)
        model = SimpleNamespace(load_weights=lambda weights: self.loaded.update(weights))
        self.engine = IpcWeightTransferEngine(None, config, SimpleNamespace(index=WORKER_DEVICE), model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(sent(init_info)))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self.engine.update_weights(sent(update_info))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def test_every_weight_arrives_bit_for_bit_and_no_pickle_is_needed(monkeypatch):
    """fp32 and bf16 side by side, a tensor larger than a block, and each handle read once: torch counts the readers of
    each, and memory whose count is off is never the trainer's again."""
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    device, worker = OneDevice(monkeypatch), Worker()
    model = mixed_model()
    trainer = connect(IpcTrainerInfo(rank=0, block_bytes=4096), client=worker, source=Parameters(model))
    for push in (1, 2):
        trainer.send_weights()
        assert worker.loaded.keys() == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert worker.loaded[name].dtype == parameter.dtype
            assert torch.equal(worker.loaded[name], parameter)
        assert worker.calls == ["start", *["update"] * 4, "finish"] * push
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    assert device.read == list(range(8))


def test_a_worker_on_a_device_that_no_trainer_has_says_so(monkeypatch):
    OneDevice(monkeypatch)
    message = {"names": [], "shapes": [], "dtype": "float32", "handles": {"GPU-2": []}}
    with pytest.raises(ValueError, match="no trainer shares GPU-1; there are GPU-2"):
        Worker().update_weights(message)
