"""The inside of a vLLM worker that shares its device with the trainer: vLLM's `ipc` engine, given plain handles."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferInitInfo,
    IPCWeightTransferUpdateInfo,
)

from openrlhf.weight_sync.device_blocks import rebuild_arguments


def _packed(info: type) -> dict[str, Any]:
    """That tensors come packed is said with every update in vLLM 0.26, and once at the beginning in 0.32."""
    return {"packed": True} if "packed" in {field.name for field in fields(info)} else {}


class IpcWeightTransferEngine(IPCWeightTransferEngine):
    """Reads blocks from the trainer's memory and loads them as vLLM's own engine does."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> IPCWeightTransferInitInfo:
        return super().parse_init_info({**init_dict, **_packed(IPCWeightTransferInitInfo)})

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        handles = {device: rebuild_arguments(plain) for device, plain in update_dict["ipc_handles"].items()}
        return super().parse_update_info(
            {**update_dict, "ipc_handles": handles, **_packed(IPCWeightTransferUpdateInfo)}
        )
