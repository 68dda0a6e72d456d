"""Pushes of a policy's weights into a running vLLM, through vLLM's weight-transfer API.

VllmWeightSync.push    hold the engine · send · go on with the new version · verify, if asked to
RpcTrainerEngine       the trainer's side of our transfer engine: buckets, one call each
EngineClient           vLLM's calls to one engine in this process
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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

from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.weight_sync.buckets import cut_into_buckets
from openrlhf.weight_sync.probe import Probe
from openrlhf.weight_sync.vllm_compat import configuration, connect
from openrlhf.weight_sync.vllm_names import RPC_BACKEND
from openrlhf.weight_sync.vllm_worker import RpcUpdateInfo

BUCKET_BYTES = 256 * 2**20


@dataclass
class RpcTrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = RPC_BACKEND

    bucket_bytes: int = BUCKET_BYTES
    checksums: bool = False
    """Whether workers compare what arrives with what was sent."""


class RpcTrainerEngine(TrainerWeightTransferEngine[RpcTrainerInfo]):
    """Sends buckets as arguments of calls. Every rank gathers; the first one sends."""

    init_info_cls = RpcTrainerInfo

    def __init__(self, info: RpcTrainerInfo, *, client: Any, source: WeightSource) -> None:
        super().__init__(*configuration(RPC_BACKEND), client=client, source=source, is_sender=info.is_sender)
        self._info = info

    @classmethod
    def trainer_init(
        cls, config: Any = None, init_info: RpcTrainerInfo | None = None, *, client: Any, source: WeightSource
    ) -> RpcTrainerEngine:
        """`config` is vLLM 0.26's, and says nothing that `init_info` does not say."""
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def send_weights(self) -> None:
        if self.is_sender:
            self.client.start_weight_update()
        for bucket in cut_into_buckets(self.source, max_bytes=self._info.bucket_bytes):
            if self.is_sender:
                self.client.update_weights(RpcUpdateInfo.of(bucket, with_checksum=self._info.checksums))
        if self.is_sender:
            self.client.finish_weight_update()


if RPC_BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(RPC_BACKEND, RpcTrainerEngine)


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
