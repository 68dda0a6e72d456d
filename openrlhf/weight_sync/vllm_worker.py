"""The inside of a vLLM worker: receives buckets of weights. Importing it registers our transfer engines, and has the
worker end with the process that its engine belongs to.

RpcWeightTransferEngine   needs nothing but the call: a bucket travels as its argument. So it works on a CPU, between
                          processes and between machines, and leaves nothing behind when one of them dies.
IpcWeightTransferEngine   for a worker on the trainer's device: the call says where in its memory the bucket is.
GroupWeightTransferEngine the call says what comes; the bucket comes through a process group, NCCL or gloo.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from openrlhf.utils.parent_death import exit_with_parent
from openrlhf.weight_sync.buckets import Bucket, Entry
from openrlhf.weight_sync.device_blocks import DeviceBlock, handle_of, payload_of
from openrlhf.weight_sync.groups import Meeting, TransferGroup
from openrlhf.weight_sync.vllm_names import GROUP_BACKEND, IPC_BACKEND, OWNER, RPC_BACKEND, SOCKETS


@dataclass
class RpcInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""

    engine: int = 0
    """Which of the engines this one is."""


@dataclass
class RpcUpdateInfo(WeightTransferUpdateInfo):
    """A bucket as it travels: plain values, which every transport of vLLM's carries."""

    entries: list[list[Any]]
    payload: bytes
    checksum: int | None = None

    @classmethod
    def of(cls, bucket: Bucket, *, with_checksum: bool) -> dict[str, Any]:
        return {
            "entries": [[entry.name, entry.dtype, list(entry.shape), entry.start] for entry in bucket.entries],
            "payload": bucket.payload,
            "checksum": bucket.checksum() if with_checksum else None,
        }

    def bucket(self) -> Bucket:
        """The bucket again. Raises if it is not the one that was sent."""
        entries = tuple(Entry(name, dtype, tuple(shape), start) for name, dtype, shape, start in self.entries)
        bucket = Bucket(entries, bytearray(self.payload))
        if self.checksum is not None and bucket.checksum() != self.checksum:
            names = f"{entries[0].name} … {entries[-1].name}"
            raise ValueError(f"weights {names} arrived damaged: checksum {bucket.checksum()}, sent {self.checksum}")
        return bucket


class RpcWeightTransferEngine(WeightTransferEngine[RpcInitInfo, RpcUpdateInfo]):
    """Loads buckets into the worker's model as vLLM's own engines do: layer by layer, as if from a checkpoint."""

    init_info_cls = RpcInitInfo
    update_info_cls = RpcUpdateInfo

    def init_transfer_engine(self, init_info: RpcInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._forget_unfinished()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator, which a CPU is not.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RpcUpdateInfo) -> None:
        self.model.load_weights(update_info.bucket().tensors())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._pack_again()

    def _pack_again(self) -> None:
        """On a CPU layers multiply with packed copies of their weights, and two kinds of them nobody else would renew.

        A tied head is loaded as an embedding; experts are packed only when their kernel is first made.
        """
        head = getattr(self.model, "lm_head", None)
        if hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)
        for layer in self.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

    def _forget_unfinished(self) -> None:
        """Layers that an update broke off in wait for the rest, and would take the start of the next for it."""
        unfinished = [info for info in map(get_layerwise_info, self.model.modules()) if info.can_load()]
        for info in unfinished:
            info.load_numel = 0
            info.loaded_weights.clear()
        if unfinished:
            finalize_layerwise_reload(self.model, self.model_config)  # the tensors from before are in place again

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.26, and gone later; there too the trainer's side is a class of its own."""
        raise NotImplementedError


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
    """A block as its place travels: a handle for each device that has one."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    handles: dict[str, list[Any]]

    @classmethod
    def of(cls, block: DeviceBlock, handles: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            "names": list(block.names),
            "shapes": [list(shape) for shape in block.shapes],
            "dtype": block.dtype,
            "handles": handles,
        }


class IpcWeightTransferEngine(RpcWeightTransferEngine):
    """Reads blocks from the memory of a trainer on this worker's device, and loads them in the same way."""

    update_info_cls = IpcUpdateInfo

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        own = device_name(self.device)
        if own not in update_info.handles:
            raise ValueError(f"no trainer shares {own}; there are {', '.join(update_info.handles)}")
        payload = payload_of(update_info.handles[own], device=self.device)
        shapes = tuple(map(tuple, update_info.shapes))
        tensors = DeviceBlock(tuple(update_info.names), shapes, update_info.dtype, payload).tensors()
        # The trainer lets the block go when this call is answered, whatever this process's stream has done by then.
        torch.cuda.synchronize(self.device)
        del payload
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        torch.cuda.synchronize(self.device)


@dataclass
class GroupInitInfo(RpcInitInfo):
    """Where to meet."""

    meeting: dict[str, Any] = field(default_factory=dict)


@dataclass
class GroupUpdateInfo(WeightTransferUpdateInfo):
    """What is in the block that comes."""

    names: list[str]
    shapes: list[list[int]]
    dtype: str
    num_bytes: int
    checksum: int | None = None

    @classmethod
    def of(cls, block: DeviceBlock, *, with_checksum: bool) -> dict[str, Any]:
        return {
            "names": list(block.names),
            "shapes": [list(shape) for shape in block.shapes],
            "dtype": block.dtype,
            "num_bytes": block.used.numel(),
            "checksum": checksum_of(block.used) if with_checksum else None,
        }


class GroupWeightTransferEngine(RpcWeightTransferEngine):
    """Receives blocks in a process group with whoever sends them, and loads them in the same way."""

    init_info_cls = GroupInitInfo
    update_info_cls = GroupUpdateInfo

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        meeting = Meeting(**init_info.meeting)
        parallel = self.parallel_config
        rank = 1 + init_info.engine * parallel.world_size + parallel.rank
        self._group = TransferGroup.joined(meeting, rank=rank)
        self._receives_on = self.device if meeting.transport == "nccl" else torch.device("cpu")

    def receive_weights(self, update_info: GroupUpdateInfo) -> None:
        payload = torch.empty(update_info.num_bytes, dtype=torch.uint8, device=self._receives_on)
        self._group.receive(payload)
        if update_info.checksum is not None and checksum_of(payload) != update_info.checksum:
            names = f"{update_info.names[0]} … {update_info.names[-1]}"
            raise ValueError(f"weights {names} arrived damaged: not the checksum that was sent")
        shapes = tuple(map(tuple, update_info.shapes))
        self.model.load_weights(DeviceBlock(tuple(update_info.names), shapes, update_info.dtype, payload).views())

    def shutdown(self) -> None:
        self._group = None


def checksum_of(payload: torch.Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy())


def device_name(device: torch.device) -> str:
    """The same in every process, however it numbers its devices."""
    return str(torch.cuda.get_device_properties(device).uuid)


def handle_on(device: torch.device, block: DeviceBlock) -> tuple[str, list[Any]]:
    """This rank's entry of `IpcUpdateInfo.handles`."""
    return device_name(device), handle_of(block.payload)


class WorkerExtension:
    """Named in vLLM's configuration, so that every worker imports this file. Part of the worker's class."""

    model_runner: Any

    def run_once(self) -> None:
        """A stage of a pipeline makes room for what the stage before sends it in its first forward with nothing in it,
        which on a CPU, without compilation, nobody runs."""
        self.model_runner.profile_run()


if (_owner := int(os.environ.get(OWNER, os.getpid()))) != os.getpid():
    # vLLM's processes do not notice when the one that started them is killed.
    exit_with_parent(_owner, leaving_nothing_in=os.environ.get(SOCKETS))

if RPC_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(RPC_BACKEND, RpcWeightTransferEngine)
    WeightTransferEngineFactory.register_engine(IPC_BACKEND, IpcWeightTransferEngine)
    WeightTransferEngineFactory.register_engine(GROUP_BACKEND, GroupWeightTransferEngine)
