"""How blocks of weights get from the policy's ranks to the workers of engines. Knows no engine.

RpcSender     the bytes travel inside the call. It works on CPUs, between processes and between machines, and leaves
              nothing behind when one of them dies
IpcSender     for workers on the trainers' devices: the call has a handle by which a worker reads the block's memory
GroupSender   the call says what comes; the bytes come through a process group, NCCL or gloo
BlockReceiver the worker's side of all three: a block says itself where its bytes are

vLLM has packed transfers of this kind too. Its handles need pickles allowed in every worker; and those of 0.26 export a
block once and release it with every read, so that its memory never comes back to the trainer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.weight_sync.blocks import WeightBlock, WeightSyncError, checksum_of, pack

NamedTensors = Iterable[tuple[str, Tensor]]
Deliver = Callable[[WeightBlock], None]
"""Has all engines take a block, and returns when they have."""

BLOCK_BYTES = 256 * 2**20
DEVICE_BLOCK_BYTES = 512 * 2**20
"""The size of a block that stays on the device; the worker copies it there, so twice as much is needed for a moment."""


class WeightSender(Protocol):
    """The trainer's side of a transport."""

    def send(self, weights: NamedTensors, deliver: Deliver) -> int:
        """All weights, block by block; returns the number of blocks. Collective: every rank of the policy calls it and
        iterates over all weights, and the first one delivers."""
        ...


class RpcSender:
    def __init__(self, *, ranks: Ranks = ALONE, block_bytes: int = BLOCK_BYTES, checksums: bool = False) -> None:
        """`checksums`: whether receivers compare what arrives with what was sent."""
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._checksums = checksums

    def send(self, weights: NamedTensors, deliver: Deliver) -> int:
        return _iterated(weights, lambda tensors: self._send(tensors, deliver) if self._ranks.is_main else 0)

    def _send(self, tensors: Iterator[tuple[str, Tensor]], deliver: Deliver) -> int:
        count = 0
        for block in pack(tensors, max_bytes=self._block_bytes):
            checksum = checksum_of(block.payload) if self._checksums else None
            deliver(replace(block, payload=block.payload.numpy(), checksum=checksum))
            count += 1
        return count


def _iterated(weights: NamedTensors, send: Callable[[Iterator[tuple[str, Tensor]]], int]) -> int:
    """Whatever becomes of the sending, this rank iterates to the end: the other ranks gather, and wait for it."""
    tensors = iter(weights)
    try:
        return send(tensors)
    finally:
        for _ in tensors:
            pass


# ---------------------------------------------------------------------------------------- memory of a shared device


@dataclass(frozen=True, slots=True)
class DeviceHandles:
    """A payload: handles to the block's memory, by the name of the device that it is on."""

    handles: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class HandlesOfReaders:
    """A payload: the same for several processes on each device, which read the block one by one."""

    readers: tuple[DeviceHandles, ...]


class IpcSender:
    """Every rank has whole weights on a device of its own, packs them there, and the workers of that device read them.
    The first rank delivers the handles of all."""

    def __init__(self, *, ranks: Ranks = ALONE, block_bytes: int = DEVICE_BLOCK_BYTES, readers: int = 1) -> None:
        """`readers`: processes on each device that take what is delivered (`HandlesOfReaders`)."""
        self._ranks = ranks
        self._readers = readers
        self._block_bytes = block_bytes

    def send(self, weights: NamedTensors, deliver: Deliver) -> int:
        return _iterated(weights, lambda tensors: self._send(tensors, deliver))

    def _send(self, tensors: Iterator[tuple[str, Tensor]], deliver: Deliver) -> int:
        device, count = torch.device("cuda", torch.cuda.current_device()), 0
        for block in pack(tensors, max_bytes=self._block_bytes, device=device):
            # A reader in another process knows nothing of this process's stream.
            torch.cuda.current_stream(device).synchronize()
            self._hand_out(block, device, deliver)
            count += 1
        # Blocks that readers have let go are the allocator's again.
        torch.cuda.ipc_collect()
        return count

    def _hand_out(self, block: WeightBlock, device: torch.device, deliver: Deliver) -> None:
        """The workers of the other ranks read too: no rank lets its block go before the call is answered, or failed."""
        own = [handle_of(block.payload) for _ in range(self._readers)]
        found = self._ranks.gather_processes((device_name(device), own))
        readers = tuple(
            DeviceHandles({name: handles[reader] for name, handles in found}) for reader in range(self._readers)
        )
        payload = readers[0] if self._readers == 1 else HandlesOfReaders(readers)
        failure = None
        if self._ranks.is_main:
            try:
                deliver(replace(block, payload=payload))
            except Exception as error:
                failure = error
        failed = self._ranks.agree(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if failed is not None:
            raise WeightSyncError(failed)


_DEVICE = 6
_IMPLIED = {0: torch.Tensor, 4: TypedStorage, 5: torch.uint8}
"""Of the arguments of torch's `rebuild_cuda_tensor`, those that are classes: the same for every block."""


def handle_of(payload: Tensor) -> list[Any]:
    """What another process needs to read a block of this device, as plain values. For one reader, once."""
    _, arguments = reduce_tensor(payload)
    return plain_arguments(arguments)


def payload_of(handle: Sequence[Any], *, device: torch.device) -> Tensor:
    """The block itself, in the other process, which may number its devices otherwise."""
    arguments = list(rebuild_arguments(handle))
    arguments[_DEVICE] = device.index
    return rebuild_cuda_tensor(*arguments)


def plain_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Without the classes, which vLLM carries only as pickles."""
    for place, expected in _IMPLIED.items():
        if arguments[place] is not expected:
            raise TypeError(f"a block is a plain tensor of bytes, not {arguments[place]}")
    return [
        None if place in _IMPLIED else list(value) if isinstance(value, tuple) else value
        for place, value in enumerate(arguments)
    ]


def rebuild_arguments(plain: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of `rebuild_cuda_tensor` again."""
    return tuple(
        _IMPLIED.get(place, tuple(value) if isinstance(value, list) else value) for place, value in enumerate(plain)
    )


def device_name(device: torch.device) -> str:
    """The same in every process, however it numbers its devices."""
    return str(torch.cuda.get_device_properties(device).uuid)


# ------------------------------------------------------------------------------------------------- a process group

MEETING_SECONDS = 300.0
"""How long all members may take to come. Workers of an engine that starts have been waited for before."""
BROADCAST_SECONDS = 600.0
"""How long one block may take."""
_PREFIX, _PRESENT = "weights", "present"
_POLL_SECONDS = 0.0005
_aborted: list[Any] = []
"""Groups with a block that was not taken. Gloo's destructor waits for the block until its deadline, in whatever thread
lets the last reference go, so they stay."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of a group meet, and how many they are. As a payload: the bytes come through this group."""

    address: str
    port: int
    size: int
    backend: str
    """nccl, between devices, or gloo, between processes' memory."""


class GroupSender:
    """The sender is member 0 of a group for weights alone; every worker of every engine is another. It is none of
    torch's registered groups: trainers and workers each have theirs, and these do not meet.

    Workers join when the first block is announced. After a failure the next `send` meets anew.
    """

    def __init__(
        self,
        *,
        address: str,
        workers: int,
        backend: str,
        ranks: Ranks = ALONE,
        block_bytes: int = BLOCK_BYTES,
        checksums: bool = False,
    ) -> None:
        """`address`: this rank's, for the workers. `workers`: those of all engines."""
        self._address = address
        self._workers = workers
        self._backend = backend
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._checksums = checksums
        self._group: TransferGroup | None = None
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="weights")
        """Calls that announce a block run here, while this thread sends it."""

    def send(self, weights: NamedTensors, deliver: Deliver) -> int:
        return _iterated(weights, lambda tensors: self._send(tensors, deliver) if self._ranks.is_main else 0)

    def _send(self, tensors: Iterator[tuple[str, Tensor]], deliver: Deliver) -> int:
        nccl, count = self._backend == "nccl", 0
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        group, self._group = self._group or TransferGroup.opened(self._address, 1 + self._workers, self._backend), None
        for block in pack(tensors, max_bytes=self._block_bytes, device=device):
            checksum = checksum_of(block.payload) if self._checksums else None
            announced = replace(block, payload=group.meeting, checksum=checksum)
            taking = self._calls.submit(deliver, announced)
            group.send(block.payload, taking=taking)
            taking.result()
            count += 1
        self._group = group
        return count


class TransferGroup:
    """One member of a group. Member 0 sends, and the others take their numbers as they come."""

    def __init__(self, meeting: Meeting, store: Store, member: int) -> None:
        self.meeting = meeting
        self._store = store  # kept: NCCL meets again when it first sends
        self._member = member
        self._group: Any = None

    @staticmethod
    def opened(address: str, size: int, backend: str) -> TransferGroup:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return TransferGroup(Meeting(address, store.port, size, backend), store, 0)

    @staticmethod
    def joined(meeting: Meeting) -> TransferGroup:
        store = TCPStore(meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))
        member = TransferGroup(meeting, store, store.add(_PRESENT, 1))
        member._meet()
        return member

    def send(self, payload: Tensor, *, taking: Future[None]) -> None:
        """To all. `taking`: the call that has them receive it; when it fails, the block is waited for no more."""
        if self._group is None:
            self._wait_for_all(taking)
            self._meet()
        sent = self._broadcast(payload)
        deadline = time.monotonic() + BROADCAST_SECONDS
        while not sent.is_completed():
            try:
                _raise_if_failed(taking)
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"engines took no weights for {BROADCAST_SECONDS:g} s")
            except BaseException:
                self._group.abort()
                _aborted.append(self._group)
                raise
            time.sleep(_POLL_SECONDS)
        sent.wait()

    def receive(self, payload: Tensor) -> None:
        self._broadcast(payload).wait()

    def _wait_for_all(self, invited: Future[None]) -> None:
        address, wanted = self.meeting.address, self.meeting.size - 1
        deadline = time.monotonic() + MEETING_SECONDS
        while (present := self._store.add(_PRESENT, 0)) < wanted:
            _raise_if_failed(invited)
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"{present} of {wanted} workers came to {address} for weights in {MEETING_SECONDS:g} s: "
                    "every node of the engines must reach the actor's first one"
                )
            time.sleep(0.01)

    def _meet(self) -> None:
        timeout, store, size = (
            timedelta(seconds=BROADCAST_SECONDS),
            PrefixStore(_PREFIX, self._store),
            self.meeting.size,
        )
        if self.meeting.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, self._member, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, self._member, size, options)

    def _broadcast(self, payload: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([payload], options)


def _raise_if_failed(call: Future[None]) -> None:
    if call.done():
        call.result()


# ----------------------------------------------------------------------------------------------- the worker's side


class BlockReceiver:
    """Gets the bytes of blocks, wherever they are. One per worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: TransferGroup | None = None

    def tensors(self, block: WeightBlock) -> list[tuple[str, Tensor]]:
        """The tensors of a block, by name, in memory that the caller may keep. Raises ValueError."""
        if isinstance(block.payload, DeviceHandles):
            block = replace(block, payload=self._read(block.payload))
        elif isinstance(block.payload, Meeting):
            block = replace(block, payload=self._receive(block.payload, block.num_bytes))
        return block.tensors()

    def _read(self, payload: DeviceHandles) -> Tensor:
        own = device_name(self._device)
        if own not in payload.handles:
            raise ValueError(f"no trainer shares {own}; there are {', '.join(payload.handles)}")
        data = payload_of(payload.handles[own], device=self._device).clone()
        # The trainer lets the block go when this call is answered, whatever this process's stream has done by then.
        torch.cuda.synchronize(self._device)
        return data

    def _receive(self, meeting: Meeting, num_bytes: int) -> Tensor:
        if self._group is None or self._group.meeting != meeting:
            self._group = None  # the old one first: its members may be gone
            self._group = TransferGroup.joined(meeting)
        device = self._device if meeting.backend == "nccl" else torch.device("cpu")
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._group.receive(data)
        return data


def message_of(block: WeightBlock) -> dict[str, Any]:
    """A block as plain values, which every serialiser carries."""
    message = {"names": list(block.names), "shapes": [list(shape) for shape in block.shapes], "dtype": block.dtype}
    payload = block.payload
    plain: Any
    if isinstance(payload, DeviceHandles):
        kind, plain = "handles", dict(payload.handles)
    elif isinstance(payload, Meeting):
        kind, plain = "meeting", dataclasses.asdict(payload)
    else:
        kind, plain = "bytes", (payload.numpy() if isinstance(payload, Tensor) else np.asarray(payload)).data
    return message | {"checksum": block.checksum, kind: plain}


def block_from(message: Mapping[str, Any]) -> WeightBlock:
    """The block of a message again."""
    payload: Any
    if "handles" in message:
        payload = DeviceHandles(message["handles"])
    elif "meeting" in message:
        payload = Meeting(**message["meeting"])
    else:
        payload = bytearray(message["bytes"])  # in memory of its own, which torch may write to
    shapes = tuple(map(tuple, message["shapes"]))
    return WeightBlock(tuple(message["names"]), shapes, message["dtype"], payload, message["checksum"])


if TYPE_CHECKING:
    _: list[type[WeightSender]] = [RpcSender, IpcSender, GroupSender]
