"""Pushes of a policy's weights into a running vLLM, through vLLM's weight-transfer API.

VllmWeightSync.push    hold the engine · send · go on with the new version · verify, if asked to
RpcTrainerEngine       the trainer's side of our transfer engine: buckets, one call each
IpcTrainerEngine       the same for a worker on the trainer's device: the call has a handle to the bucket
EngineClient           vLLM's calls to one engine in this process
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.weight_sync.buckets import cut_into_buckets
from openrlhf.weight_sync.device_blocks import pack_on_device
from openrlhf.weight_sync.probe import Probe
from openrlhf.weight_sync.vllm_compat import configuration, connect
from openrlhf.weight_sync.vllm_names import IPC_BACKEND, RPC_BACKEND
from openrlhf.weight_sync.vllm_worker import IpcUpdateInfo, RpcUpdateInfo, handle_on

BUCKET_BYTES = 256 * 2**20
BLOCK_BYTES = 512 * 2**20
"""Of a bucket that stays on the device; the worker copies it there, so twice as much is needed for a moment."""


@dataclass
class RpcTrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = RPC_BACKEND

    bucket_bytes: int = BUCKET_BYTES
    checksums: bool = False
    """Whether workers compare what arrives with what was sent."""


@dataclass
class IpcTrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = IPC_BACKEND

    block_bytes: int = BLOCK_BYTES
    ranks: Ranks = ALONE
    """Each has whole weights on a device of its own, where its workers read them."""


class RpcTrainerEngine(TrainerWeightTransferEngine):
    """Sends buckets as arguments of calls. Every rank gathers; the first one sends."""

    init_info_cls: type[TrainerInitInfo] = RpcTrainerInfo

    def __init__(self, info: Any, *, client: Any, source: WeightSource) -> None:
        super().__init__(*configuration(info.backend), client=client, source=source, is_sender=info.is_sender)
        self._info = info

    @classmethod
    def trainer_init(
        cls, config: Any = None, init_info: Any = None, *, client: Any, source: WeightSource
    ) -> RpcTrainerEngine:
        """`config` is vLLM 0.26's, and says nothing that `init_info` does not say."""
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        if self.is_sender:
            self.client.start_weight_update()
        self._send_buckets()
        if self.is_sender:
            self.client.finish_weight_update()

    def _send_buckets(self) -> None:
        for bucket in cut_into_buckets(self.source, max_bytes=self._info.bucket_bytes):
            if self.is_sender:
                self.client.update_weights(RpcUpdateInfo.of(bucket, with_checksum=self._info.checksums))


class IpcTrainerEngine(RpcTrainerEngine):
    """Packs buckets on the device and sends handles. Every rank packs, and its workers read; the first one sends."""

    init_info_cls = IpcTrainerInfo

    def _send_buckets(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        ranks = self._info.ranks
        for block in pack_on_device(self.source, max_bytes=self._info.block_bytes, device=device):
            # A reader in another process knows nothing of this one's stream.
            torch.cuda.current_stream(device).synchronize()
            handles = dict(ranks.gather(handle_on(device, block)))
            if self.is_sender:
                self.client.update_weights(IpcUpdateInfo.of(block, handles))
            # The other ranks' workers read too: nobody lets a block go before the call is answered.
            ranks.barrier("weights read")
        # Blocks that readers have let go are the allocator's again.
        torch.cuda.ipc_collect()


if RPC_BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(RPC_BACKEND, RpcTrainerEngine)
    WeightTransferTrainerFactory.register_engine(IPC_BACKEND, IpcTrainerEngine)


class EngineClient:
    """The control side of vLLM's weight transfer, for an engine in this process."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.num_updates = 0
        """Calls that carried weights."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        request = WeightTransferInitRequest(init_info)
        self._engine.call(self._engine.llm.init_weight_transfer_engine(request), "to meet who sends weights")

    def start_weight_update(self) -> None:
        self._engine.call(self._engine.llm.start_weight_update(), "to begin with new weights")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.num_updates += 1
        request = WeightTransferUpdateRequest(update_info)
        self._engine.call(self._engine.llm.update_weights(request), "to take weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Versions are ours: `VllmEngine` counts them, whatever vLLM knows of them."""
        self._engine.call(self._engine.llm.finish_weight_update(), "to finish with new weights")


class VllmWeightSync:
    """The loop's push, for one vLLM engine."""

    def __init__(
        self, engine: VllmEngine, source: WeightSource, *, init_info: TrainerInitInfo, probe: Probe | None = None
    ) -> None:
        """`init_info` chooses the transport: ours (`RpcTrainerInfo`), or vLLM's for `ipc` or `nccl`. With a `probe`
        every push is verified."""
        self._engine = engine
        self._probe = probe
        self.client = EngineClient(engine)
        self._trainer = connect(init_info, client=self.client, source=source)

    def push(self, *, version: int) -> None:
        """Requests under way stop, and go on with the new weights; what was cached of old ones is gone."""
        self._engine.hold()
        self._trainer.send_weights()
        self._engine.go_on(version=version)
        if self._probe is not None:
            self._probe.check(self._engine, version=version)
