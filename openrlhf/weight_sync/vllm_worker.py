"""The inside of a vLLM worker: receives buckets of weights. Importing it registers our transfer engine.

vLLM's own engines speak CUDA (`ipc`, `nccl`). Ours needs nothing but the call: a bucket travels as its argument, so
it works on a CPU, between processes and between machines, and leaves nothing behind when one of them dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from openrlhf.weight_sync.buckets import Bucket, Entry
from openrlhf.weight_sync.vllm_names import RPC_BACKEND


@dataclass
class RpcInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


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


class WorkerExtension:
    """Named in vLLM's configuration, so that every worker imports this file. Adds nothing to the worker."""


if RPC_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(RPC_BACKEND, RpcWeightTransferEngine)
