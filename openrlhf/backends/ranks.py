"""The processes that train one model together: how one of them sees the others, and how they find each other."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, which divide every step's samples into shares. Methods are collective: all call them.

    Ranks that compute each sample together (tensor and context parallelism) are neighbours and have the same share.
    """

    @property
    def index(self) -> int:
        """Which share of the samples this process computes."""
        ...

    @property
    def count(self) -> int:
        """Shares there are."""
        ...

    @property
    def is_main(self) -> bool:
        """One process of all: it logs, and writes what is written once."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every share's value, by index, on every rank. All ranks of a share give the same one."""
        ...

    def gather_processes(self, value: T) -> list[T]:
        """Every process's value, by rank, on every rank: for what is not the same on the ranks of a share."""
        ...

    def agree(self, value: T | None) -> T | None:
        """The first value that is one, of all processes, on every one of them."""
        ...

    def barrier(self, name: str) -> None:
        """Go on when all processes are here. `name` says what for, when one does not come."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Alone:
    """One process trains by itself."""

    index = 0
    count = 1
    is_main = True

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_processes(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, value: Any) -> Any:
        return value

    def barrier(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()

DEADLINE = datetime.timedelta(minutes=30)
"""Seconds that a rank waits for the others. Tokenising a large data set takes longest."""


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those that were started with it."""

    rank: int
    count: int
    local_rank: int
    """Among those of its machine: which device is its own."""


def read_launch(environment: Mapping[str, str]) -> Launch:
    """From what torchrun and deepspeed (RANK …) or SLURM's srun (SLURM_PROCID …) tell a process."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        local = environment.get("LOCAL_RANK", environment["RANK"])
        return Launch(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(local))
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return Launch(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment.get("SLURM_LOCALID", 0)),
        )
    return Launch(0, 1, 0)


def name_the_meeting_place(environment: MutableMapping[str, str], launch: Launch) -> None:
    """Under srun: the first node of the job, and a port that its number gives."""
    environment["RANK"], environment["WORLD_SIZE"] = str(launch.rank), str(launch.count)
    environment["LOCAL_RANK"] = str(launch.local_rank)
    if "SLURM_STEP_NODELIST" in environment:
        environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
        environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000))


def first_host(nodes: str) -> str:
    """The first of SLURM's compressed list: `gpu[07-09,12]-ib,login1` → `gpu07-ib`."""
    first, *_ = re.split(r",(?![^\[]*\])", nodes)
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"not a list of nodes: {nodes!r}")
    return host


def own_device(launch: Launch, visible: int) -> int:
    """Which of the GPUs a process sees is its own. SLURM may show each task only the one it is bound to."""
    return 0 if visible == 1 else launch.local_rank


class ProcessRanks:
    """Ranks of torch's default process group."""

    def __init__(self, *, ranks_per_share: int = 1, owned: bool = True) -> None:
        """So many neighbours have the same samples. `owned`: the group ends with the run."""
        self._owned = owned
        self.index = dist.get_rank() // ranks_per_share
        self.count = dist.get_world_size() // ranks_per_share
        self.is_main = dist.get_rank() == 0
        self._one_each = slice(None, None, ranks_per_share)
        # Records of Python travel over gloo, whatever the tensors take: no device memory, no stream to wait for.
        self._group = dist.new_group(backend="gloo", timeout=DEADLINE)

    def gather(self, value: T) -> list[T]:
        return self.gather_processes(value)[self._one_each]

    def agree(self, value: T | None) -> T | None:
        return next((value for value in self.gather_processes(value) if value is not None), None)

    def gather_processes(self, value: T) -> list[T]:
        values: list[T] = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self, name: str) -> None:
        try:
            dist.monitored_barrier(self._group, timeout=DEADLINE, wait_all_ranks=True)
        except RuntimeError as error:
            raise TimeoutError(f"waited {DEADLINE} for the other ranks: {name} ({error})") from error

    def close(self) -> None:
        if self._owned:
            dist.destroy_process_group()


def join(*, ranks_per_share: int = 1, also_alone: bool = False) -> Ranks:
    """Meet the processes that were started together with this one, unless they have met already.

    `ranks_per_share`: so many neighbours have the same samples. `also_alone`: one process by itself makes a group of
    one, for libraries that ask for a group.
    """
    launch = read_launch(os.environ)
    if torch.cuda.is_available():
        launch = replace(launch, local_rank=own_device(launch, torch.cuda.device_count()))
        torch.cuda.set_device(launch.local_rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_initialized():
        return ProcessRanks(ranks_per_share=ranks_per_share, owned=False)
    if launch.count > 1:
        name_the_meeting_place(os.environ, launch)
        dist.init_process_group(backend, timeout=DEADLINE)
    elif also_alone:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        return ALONE
    return ProcessRanks(ranks_per_share=ranks_per_share)


if TYPE_CHECKING:
    _: tuple[type[Ranks], type[Ranks]] = (Alone, ProcessRanks)
