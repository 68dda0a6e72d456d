"""A process group for weights alone: one sender, and every worker of every engine. Imports no vLLM.

It is none of torch's registered groups: trainers and vLLM's workers each have theirs, and these do not meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

from openrlhf.weight_sync.base import WeightSyncError

MEETING_SECONDS = 300.0
"""For all to be there. Workers of an engine that starts have been waited for before."""
BROADCAST_SECONDS = 600.0
"""Of one block."""
_PREFIX, _PRESENT = "weights", "present"
_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where members meet, and how many they are."""

    address: str
    port: int
    size: int
    transport: str
    """nccl, between devices, or gloo, between processes' memory."""


class TransferGroup:
    """A member. Rank 0 sends."""

    def __init__(self, group: Any, store: Store) -> None:
        self._group = group
        self._store = store  # NCCL meets again when it first sends

    @staticmethod
    def opened(address: str, *, size: int, transport: str, invite: Callable[[Meeting], Future[None]]) -> TransferGroup:
        """The sender's. `invite` tells the others where, and its future ends when they are members. Raises
        WeightSyncError, or whatever the future does."""
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        invited = invite(Meeting(address, store.port, size, transport))
        deadline = time.monotonic() + MEETING_SECONDS
        while (present := store.add(_PRESENT, 0)) < size - 1:
            _raise_if_failed(invited)
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"{present} of {size - 1} workers came to {address} for weights in {MEETING_SECONDS:g} s: "
                    "every node of the engines must reach the actor's first one"
                )
            time.sleep(0.01)
        member = TransferGroup(_process_group(store, 0, size, transport), store)
        invited.result(MEETING_SECONDS)
        return member

    @staticmethod
    def joined(meeting: Meeting, *, rank: int) -> TransferGroup:
        """A worker's."""
        store = TCPStore(meeting.address, meeting.port, is_master=False, timeout=timedelta(seconds=MEETING_SECONDS))
        store.add(_PRESENT, 1)
        return TransferGroup(_process_group(store, rank, meeting.size, meeting.transport), store)

    def send(self, block: Tensor, *, taking: Future[None]) -> None:
        """To all. `taking`: the call that has them receive it; if it fails, nobody waits for the block any more."""
        sent = self._broadcast(block)
        deadline = time.monotonic() + BROADCAST_SECONDS
        while not sent.is_completed():
            try:
                _raise_if_failed(taking)
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"engines took no weights for {BROADCAST_SECONDS:g} s")
            except BaseException:
                self._group.abort()
                raise
            time.sleep(_POLL_SECONDS)
        sent.wait()

    def receive(self, block: Tensor) -> None:
        self._broadcast(block).wait()

    def _broadcast(self, block: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([block], options)


def _process_group(store: Store, rank: int, size: int, transport: str) -> Any:
    timeout = timedelta(seconds=BROADCAST_SECONDS)
    if transport == "gloo":
        return dist.ProcessGroupGloo(PrefixStore(_PREFIX, store), rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore(_PREFIX, store), rank, size, options)


def _raise_if_failed(call: Future[None]) -> None:
    if call.done():
        call.result()
