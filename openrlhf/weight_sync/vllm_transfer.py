"""Pushes of a policy's weights into a running vLLM, through vLLM's weight-transfer API.

VllmWeightSync         the loop's push, for an engine in this process (`pushing.push`)
RpcTrainerEngine       the trainer's side of our transfer engine: buckets, one call each
IpcTrainerEngine       the same for a worker on the trainer's device: the call has a handle to the bucket
GroupTrainerEngine     the same through a process group: the call says what comes
EngineClient           vLLM's calls to one engine in this process
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
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
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSyncError
from openrlhf.weight_sync.buckets import cut_into_buckets
from openrlhf.weight_sync.device_blocks import DeviceBlock, pack_on_device
from openrlhf.weight_sync.groups import TransferGroup
from openrlhf.weight_sync.probe import LocalProbe
from openrlhf.weight_sync.pushing import push
from openrlhf.weight_sync.vllm_compat import configuration, connect
from openrlhf.weight_sync.vllm_names import GROUP_BACKEND, IPC_BACKEND, RPC_BACKEND
from openrlhf.weight_sync.vllm_source import PolicyWeights
from openrlhf.weight_sync.vllm_worker import GroupUpdateInfo, IpcUpdateInfo, RpcUpdateInfo, handle_on

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


@dataclass
class GroupTrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = GROUP_BACKEND

    address: str = "127.0.0.1"
    """Of this rank, for the workers."""
    workers: int = 1
    """Of all engines."""
    transport: str = "gloo"
    block_bytes: int = BUCKET_BYTES
    checksums: bool = False


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
        tensors = iter(self.source)
        try:
            self._send(tensors)
        finally:
            # Whatever became of the sending: the other ranks gather to the end, and wait for this one.
            for _ in tensors:
                pass

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if not self.is_sender:
            return
        with self._update():
            for bucket in cut_into_buckets(tensors, max_bytes=self._info.bucket_bytes):
                self.client.update_weights(RpcUpdateInfo.of(bucket, with_checksum=self._info.checksums))

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        try:
            self.client.start_weight_update()  # of several engines some may start, and others not
            yield
        except Exception:
            # vLLM starts no update while another is open. Where it has failed itself it has none, and says so.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update()


class IpcTrainerEngine(RpcTrainerEngine):
    """Packs buckets on the device and sends handles. Every rank packs, and its workers read; the first one sends."""

    init_info_cls = IpcTrainerInfo

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        with self._update() if self.is_sender else contextlib.nullcontext():
            for block in pack_on_device(tensors, max_bytes=self._info.block_bytes, device=device):
                # A reader in another process knows nothing of this one's stream.
                torch.cuda.current_stream(device).synchronize()
                self._hand_out(block, device)
        # Blocks that readers have let go are the allocator's again.
        torch.cuda.ipc_collect()

    def _hand_out(self, block: DeviceBlock, device: torch.device) -> None:
        """The other ranks' workers read too: nobody lets a block go before the call is answered, or has failed."""
        ranks, failure = self._info.ranks, None
        handles = dict(ranks.gather(handle_on(device, block)))
        try:
            if self.is_sender:
                self.client.update_weights(IpcUpdateInfo.of(block, handles))
        except Exception as error:
            failure = error
        failures = [text for text in ranks.gather(str(failure) if failure else None) if text is not None]
        if failures:
            raise failure or WeightSyncError(failures[0])


class GroupTrainerEngine(RpcTrainerEngine):
    """Sends buckets to all workers at once, from the first rank."""

    init_info_cls = GroupTrainerInfo

    def __init__(self, info: Any, *, client: Any, source: WeightSource) -> None:
        super().__init__(info, client=client, source=source)
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="weights")  # one at a time, and nobody waits for two
        self._group: TransferGroup | None = None

    @classmethod
    def trainer_init(
        cls, config: Any = None, init_info: Any = None, *, client: Any, source: WeightSource
    ) -> GroupTrainerEngine:
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            engine._group = TransferGroup.opened(
                init_info.address,
                size=1 + init_info.workers,
                transport=init_info.transport,
                invite=lambda meeting: engine._calls.submit(
                    client.init_weight_transfer_engine, {"meeting": dataclasses.asdict(meeting)}
                ),
            )
        return engine

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        if self._group is None:
            return
        info = self._info
        device = torch.device("cuda", torch.cuda.current_device()) if info.transport == "nccl" else torch.device("cpu")
        with self._update():
            for block in pack_on_device(tensors, max_bytes=info.block_bytes, device=device):
                update = GroupUpdateInfo.of(block, with_checksum=info.checksums)
                taking = self._calls.submit(self.client.update_weights, update)
                self._group.send(block.used, taking=taking)
                taking.result()


def trainer_info(backend: str, *, checksums: bool, ranks: Ranks = ALONE, **meeting: Any) -> TrainerInitInfo:
    """Of the trainer's side of transfers by one of our backends. `meeting`: of a process group, `GroupTrainerInfo`'s
    address, workers and transport."""
    if backend == IPC_BACKEND:
        return IpcTrainerInfo(rank=ranks.index, ranks=ranks)
    if backend == GROUP_BACKEND:
        return GroupTrainerInfo(rank=ranks.index, checksums=checksums, **meeting)
    return RpcTrainerInfo(rank=ranks.index, checksums=checksums)


if RPC_BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(RPC_BACKEND, RpcTrainerEngine)
    WeightTransferTrainerFactory.register_engine(IPC_BACKEND, IpcTrainerEngine)
    WeightTransferTrainerFactory.register_engine(GROUP_BACKEND, GroupTrainerEngine)


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
        self,
        engine: VllmEngine,
        source: WeightSource,
        *,
        init_info: TrainerInitInfo,
        loop: LoopRunner,
        probe: LocalProbe | None = None,
    ) -> None:
        """`init_info` chooses the transport: ours (`RpcTrainerInfo`), or vLLM's for `ipc` or `nccl`. With a `probe`
        every push is verified."""
        self._engine = engine
        self._loop = loop
        self._probe = probe
        self.client = EngineClient(engine)
        self._source = source
        self._trainer = connect(init_info, client=self.client, source=source)

    def push(self, *, version: int) -> Metrics:
        gap = None if self._probe is None else lambda: self._gap(self._probe, version=version)
        return push(self._engine, version=version, loop=self._loop, send=self._send, probe_gap=gap)

    def _gap(self, probe: LocalProbe, *, version: int) -> float:
        found = self._loop.run(self._engine.logprobs(probe.probe.token_ids))
        return probe.check(found, version=version)

    def _send(self) -> int:
        if isinstance(self._source, PolicyWeights):
            self._source.require_finite()
        before = self.client.num_updates
        self._trainer.send_weights()
        return self.client.num_updates - before
