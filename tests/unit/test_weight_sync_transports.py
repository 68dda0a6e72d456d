"""Senders and receivers of weights: bytes inside calls, handles to a device's memory, a process group.

Both halves are the real ones, and messages pass a serialiser as vLLM's does. A handle leads to a block in this process
instead of another's, workers are threads, and a group is gloo's: NCCL's is the same code (`tests/gpu`).
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from patience import patience
from torch.storage import TypedStorage

from openrlhf.weight_sync import transports
from openrlhf.weight_sync.blocks import WeightBlock, WeightSyncError, pack
from openrlhf.weight_sync.transports import (
    BlockReceiver,
    DeviceHandles,
    GroupSender,
    IpcSender,
    RpcSender,
    block_from,
    message_of,
    plain_arguments,
    rebuild_arguments,
)

BLOCK_BYTES = 4096
CPU = torch.device("cpu")
WORKER_DEVICE = 5
OTHER_RANK = SimpleNamespace(is_main=False)


def mixed_model() -> torch.nn.ModuleDict:
    """fp32 and bf16 side by side, and in blocks of 4,096 bytes a tensor that is larger than one: four blocks."""
    torch.manual_seed(0)
    parts = {"a": torch.nn.Linear(30, 20), "b": torch.nn.Linear(7, 3).bfloat16(), "c": torch.nn.Embedding(40, 33)}
    return torch.nn.ModuleDict(parts | {"d": torch.nn.LayerNorm(5)})


class Weights:
    """A module's parameters, and which of them were asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.asked: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            self.asked.append(name)
            yield name, parameter.detach()


class Workers:
    """So many workers, each with what it was given. Every block goes to all of them at once, as plain values."""

    def __init__(self, count: int, device: Any = CPU) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        self.receivers = [BlockReceiver(device) for _ in range(count)]
        self.calls = 0
        self._threads = ThreadPoolExecutor(count)

    def take(self, block: WeightBlock) -> None:
        self.calls += 1
        for taken in [self.take_alone(i, block) for i in range(len(self.receivers))]:
            taken.result()

    def take_alone(self, i: int, block: WeightBlock, *, begun: threading.Event | None = None) -> Future[None]:
        """One worker takes a block, in a thread of its own. `begun` is set when it does."""
        wire = msgspec.msgpack.encode(message_of(block))

        def receive() -> None:
            if begun is not None:
                begun.set()
            self.loaded[i].update(self.receivers[i].tensors(block_from(msgspec.msgpack.decode(wire))))

        return self._threads.submit(receive)

    def have(self, model: torch.nn.Module) -> bool:
        wanted = dict(model.named_parameters())
        return all(
            loaded.keys() == wanted.keys()
            and all(loaded[name].dtype == p.dtype and torch.equal(loaded[name], p) for name, p in wanted.items())
            for loaded in self.loaded
        )


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def rpc(**options: Any) -> RpcSender:
    return RpcSender(block_bytes=BLOCK_BYTES, **options)


def group(workers: int, **options: Any) -> GroupSender:
    return GroupSender(address="127.0.0.1", workers=workers, backend="gloo", block_bytes=BLOCK_BYTES, **options)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    ("make", "count"), [(rpc, 2), (lambda **options: group(4, **options), 4)], ids=["rpc", "group"]
)
def test_every_worker_gets_every_weight_bit_for_bit(make: Callable[..., Any], count: int, checksums: bool):
    """One call per block, in push after push."""
    model, workers = mixed_model(), Workers(count)
    sender = make(checksums=checksums)
    for push in (1, 2):
        assert sender.send(Weights(model), workers.take) == 4
        assert workers.have(model)
        assert workers.calls == 4 * push
        change(model)


@pytest.mark.parametrize("make", [rpc, lambda **options: group(1, **options)], ids=["rpc", "group"])
def test_other_ranks_of_the_policy_gather_all_and_send_nothing(make: Callable[..., Any]):
    weights, workers = Weights(mixed_model()), Workers(1)
    assert make(ranks=OTHER_RANK).send(weights, workers.take) == 0
    assert weights.asked == [name for name, _ in weights.module.named_parameters()]
    assert workers.calls == 0


def test_a_rank_whose_sending_fails_gathers_to_the_end():
    """The other ranks wait for it in every gather."""
    weights = Weights(mixed_model())

    def refused(block: WeightBlock) -> None:
        raise ConnectionError("engine 0 has died")

    with pytest.raises(ConnectionError):
        rpc().send(weights, refused)
    assert weights.asked == [name for name, _ in weights.module.named_parameters()]


# ---------------------------------------------------------------------------------------------------------- group


def test_a_block_that_changed_on_its_way_through_a_group_is_noticed(monkeypatch):
    send = transports.TransferGroup.send

    def damaged(self, payload, *, taking):
        payload[5] ^= 1
        send(self, payload, taking=taking)

    monkeypatch.setattr(transports.TransferGroup, "send", damaged)
    with pytest.raises(ValueError, match=r"weights a.weight … a.bias arrived damaged"):
        group(1, checksums=True).send(Weights(mixed_model()), Workers(1).take)


def test_a_group_does_not_wait_for_an_engine_that_takes_nothing():
    """Its call fails in the second push: the sender would otherwise sit in the broadcast until its deadline."""
    workers, sender = Workers(2), group(2)
    model = mixed_model()
    sender.send(Weights(model), workers.take)

    def dead(block: WeightBlock) -> None:
        raise ConnectionError("engine 1 has died")

    with pytest.raises(ConnectionError, match="engine 1 has died"):
        sender.send(Weights(model), dead)


def test_a_group_does_not_wait_for_an_engine_that_does_not_come(monkeypatch):
    def dead(block: WeightBlock) -> None:
        raise ConnectionError("engine 0 has died")

    with pytest.raises(ConnectionError, match="engine 0 has died"):
        group(1).send(Weights(mixed_model()), dead)
    monkeypatch.setattr(transports, "MEETING_SECONDS", 0.5)
    with pytest.raises(WeightSyncError, match=r"1 of 2 workers came to 127\.0\.0\.1 for weights in 0\.5 s"):
        group(2).send(Weights(mixed_model()), Workers(1).take)


def test_workers_that_are_left_after_a_death_meet_anew():
    """Of two engines that have met, engine 0 dies in the middle of a push: the third block is announced and sent, the
    other one takes it, and engine 0 does not. The sender waits for it no more. Then there is a group without it, and a
    push from the start."""
    model, both, sender = mixed_model(), Workers(2), group(2)
    sender.send(Weights(model), both.take)
    change(model)
    taken: list[Future[None]] = []
    aborted = len(transports._aborted)

    def dying(block: WeightBlock) -> None:
        if both.calls < 6:
            return both.take(block)
        begun = threading.Event()
        taken.append(both.take_alone(1, block, begun=begun))
        assert begun.wait(patience(20))
        raise ConnectionError("engine 0 has died")

    with pytest.raises(ConnectionError, match="engine 0 has died"):
        sender.send(Weights(model), dying)
    assert len(transports._aborted) == aborted + 1
    assert not both.have(model)
    taken[0].exception(patience(20))  # it has its block, or an error, but it does not wait

    left = Workers(1)
    left.receivers = both.receivers[1:]
    assert group(1).send(Weights(model), left.take) == 4
    assert left.have(model)


# ------------------------------------------------------------------------------------------------- shared devices


class OneDevice:
    """Blocks by handle, each of which may be read once. CUDA's names for what a CPU has not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exported: list[torch.Tensor] = []
        self.read: list[int] = []
        monkeypatch.setattr(transports, "reduce_tensor", self.reduce)
        monkeypatch.setattr(transports, "rebuild_cuda_tensor", self.rebuild)
        monkeypatch.setattr(transports, "pack", self.pack)
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
        return pack(named, max_bytes=max_bytes)

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


def test_every_weight_arrives_by_handles_and_each_is_read_once(monkeypatch):
    """torch counts the readers of each, and memory whose count is off is never the trainer's again."""
    device, workers = OneDevice(monkeypatch), Workers(1, SimpleNamespace(index=WORKER_DEVICE))
    model = mixed_model()
    sender = IpcSender(block_bytes=BLOCK_BYTES)
    for push in (1, 2):
        assert sender.send(Weights(model), workers.take) == 4
        for payload in device.exported:
            payload.fill_(0)  # the trainer lets it go when the call is answered
        assert workers.have(model)
        assert device.read == list(range(4 * push))
        change(model)


def test_several_processes_on_a_device_have_handles_of_their_own(monkeypatch):
    device = OneDevice(monkeypatch)
    workers = [Workers(1, SimpleNamespace(index=WORKER_DEVICE)) for _ in range(3)]
    model = mixed_model()

    def deliver(block):
        assert len(block.payload.readers) == 3
        for each, payload in zip(workers, block.payload.readers, strict=True):
            each.take(replace(block, payload=payload))

    assert IpcSender(block_bytes=BLOCK_BYTES, readers=3).send(Weights(model), deliver) == 4
    assert all(each.have(model) for each in workers)
    assert sorted(device.read) == list(range(12))


def test_a_worker_on_a_device_that_no_trainer_has_says_so(monkeypatch):
    OneDevice(monkeypatch)
    block = WeightBlock((), (), "float32", DeviceHandles({"GPU-2": []}))
    with pytest.raises(ValueError, match="no trainer shares GPU-1; there are GPU-2"):
        Workers(1, SimpleNamespace(index=WORKER_DEVICE)).take(block)


def arguments(kind=torch.uint8):
    """Of `rebuild_cuda_tensor`, in its order."""
    sizes = (torch.Size([8]), (1,), 0)
    return (torch.Tensor, *sizes, TypedStorage, kind, 0, b"handle", 8, 0, False, b"counter", 3, b"event", True)


def test_a_handle_is_made_of_plain_values_and_becomes_what_it_was():
    """What a transport makes of tuples is lists; every class of the arguments is known to the reader."""
    plain = plain_arguments(arguments())
    assert {type(value) for value in plain} <= {type(None), list, int, bytes, bool}
    assert rebuild_arguments(pickle.loads(pickle.dumps(plain))) == arguments()


def test_a_handle_to_anything_but_bytes_is_refused():
    with pytest.raises(TypeError, match=r"not torch.float32"):
        plain_arguments(arguments(torch.float32))
