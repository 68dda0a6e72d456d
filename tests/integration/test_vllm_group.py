"""Weights through a process group of the trainer and all workers: gloo here, NCCL between devices, the same code.

The trainer's half, the group and the workers' half are the real ones; workers are threads, with models that keep what
they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from module_weights import Parameters, mixed_model, sent

from openrlhf.weight_sync import groups
from openrlhf.weight_sync.base import WeightSyncError
from openrlhf.weight_sync.vllm_compat import connect
from openrlhf.weight_sync.vllm_transfer import GroupTrainerInfo
from openrlhf.weight_sync.vllm_worker import GroupWeightTransferEngine


class Engines:
    """So many engines of so many workers. Every call goes to all workers at once, by the wire of vLLM's calls."""

    def __init__(self, engines: int, parts: int) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in range(engines * parts)]
        self.calls: list[str] = []
        self._parts = parts
        self._workers = [
            GroupWeightTransferEngine(
                None,
                SimpleNamespace(parallel_config=SimpleNamespace(world_size=parts, rank=i % parts), model_config=None),
                torch.device("cpu"),
                SimpleNamespace(load_weights=loaded.update),
            )
            for i, loaded in enumerate(self.loaded)
        ]
        self._threads = ThreadPoolExecutor(len(self._workers))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def begin(i: int) -> None:
            info = sent({**init_info, "engine": i // self._parts})
            self._workers[i].init_transfer_engine(self._workers[i].parse_init_info(info))

        self._all(begin)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append("update")
        self._all(lambda i: self._workers[i].update_weights(sent(update_info)))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def _all(self, work: Callable[[int], None]) -> None:
        for _ in self._threads.map(work, range(len(self._workers))):
            pass


@pytest.fixture
def model() -> torch.nn.ModuleDict:
    return mixed_model()


def info(workers: int, **options: Any) -> GroupTrainerInfo:
    return GroupTrainerInfo(rank=0, workers=workers, block_bytes=4096, **options)


@pytest.mark.parametrize("checksums", [False, True])
def test_every_worker_gets_every_weight_bit_for_bit(model, checksums):
    """Two engines of two parts; fp32 and bf16 side by side, and a tensor larger than a block. One call per block."""
    engines = Engines(2, 2)
    trainer = connect(info(4, checksums=checksums), client=engines, source=Parameters(model))
    for push in (1, 2):
        trainer.send_weights()
        for loaded in engines.loaded:
            assert loaded.keys() == {name for name, _ in model.named_parameters()}
            for name, parameter in model.named_parameters():
                assert loaded[name].dtype == parameter.dtype
                assert torch.equal(loaded[name], parameter)
        assert engines.calls == ["start", *["update"] * 4, "finish"] * push
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)


def test_other_ranks_of_the_policy_gather_and_send_nothing(model):
    engines = Engines(1, 1)
    asked = []

    class Watched(Parameters):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                asked.append(name)
                yield name, tensor

    trainer = connect(GroupTrainerInfo(rank=1, workers=1), client=engines, source=Watched(model))
    asked.clear()
    trainer.send_weights()
    assert asked == [name for name, _ in model.named_parameters()]
    assert engines.calls == []


def test_a_block_that_changed_on_its_way_is_noticed(model, monkeypatch):
    engines = Engines(1, 1)
    trainer = connect(info(1, checksums=True), client=engines, source=Parameters(model))
    send = groups.TransferGroup.send

    def damaged(self, block, *, taking):
        block[5] ^= 1
        send(self, block, taking=taking)

    monkeypatch.setattr(groups.TransferGroup, "send", damaged)
    with pytest.raises(ValueError, match=r"weights a.weight … a.bias arrived damaged"):
        trainer.send_weights()


def test_nobody_waits_for_an_engine_that_takes_nothing(model):
    """Its call fails: the sender would otherwise sit in the broadcast until its deadline, minutes later."""
    engines = Engines(2, 1)
    trainer = connect(info(2), client=engines, source=Parameters(model))

    def dead(update_info: dict[str, Any]) -> None:
        raise ConnectionError("engine 1 has died")

    engines.update_weights = dead
    with pytest.raises(ConnectionError, match="engine 1 has died"):
        trainer.send_weights()


def test_nobody_waits_for_an_engine_that_does_not_come(model, monkeypatch):
    class Dead(Engines):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise ConnectionError("engine 0 has died")

    with pytest.raises(ConnectionError, match="engine 0 has died"):
        connect(info(1), client=Dead(1, 1), source=Parameters(model))
    monkeypatch.setattr(groups, "MEETING_SECONDS", 0.5)
    with pytest.raises(WeightSyncError, match=r"1 of 2 workers came to 127\.0\.0\.1 for weights in 0\.5 s"):
        connect(info(2), client=Engines(1, 1), source=Parameters(model))


def test_who_is_left_after_a_death_meets_anew(model):
    """Engine 0 dies when an update begins. It is ended for engine 1 too, where it has begun: vLLM starts none while
    another is open. Then there is a group without engine 0."""
    both = Engines(2, 1)
    trainer = connect(info(2), client=both, source=Parameters(model))

    def start() -> None:
        both.calls.append("start")
        raise ConnectionError("engine 0 has died")

    both.start_weight_update = start
    with pytest.raises(ConnectionError, match="engine 0 has died"):
        trainer.send_weights()
    assert both.calls == ["start", "finish"]

    left = Engines(1, 1)
    left._workers, left.loaded = both._workers[1:], both.loaded[1:]
    connect(info(1), client=left, source=Parameters(model)).send_weights()
    assert both.loaded[0] == {}
    for name, parameter in model.named_parameters():
        assert torch.equal(left.loaded[0][name], parameter)
