"""Small adapters between the loop's parts and worker groups on Ray.

GroupSleep               optimizer states that leave their device and come back
NodeUsage                how busy and how full the devices of a run are, node by node
RewardRanks              reward models on their ranks: a forward that the driver waits for
RemoteCheckpointedModel  models that ranks train, for the checkpoints that the driver writes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.checkpoint.folder import CheckpointError
from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.services import Sequences
from openrlhf.cluster.workers import WorkerError, WorkerGroup
from openrlhf.data.packing import by_middle
from openrlhf.observability.usage import Usage
from openrlhf.rewards.base import RewardGoneError
from openrlhf.rewards.batching import Forward, Item
from openrlhf.utils.event_loops import LoopRunner

SLEEP_DEADLINE = 600.0
"""Seconds in which state must have moved off a device, or back."""


@dataclass(frozen=True, slots=True)
class GroupSleep:
    """The optimizer states of a group."""

    group: WorkerGroup

    def sleep(self) -> None:
        self.group.call("sleep", deadline=SLEEP_DEADLINE)

    def wake(self) -> None:
        self.group.call("wake", deadline=SLEEP_DEADLINE)


USAGE_DEADLINE = 60.0
"""Seconds in which a rank must have answered."""


class NodeUsage:
    """The use of all devices of the run, by node. A node's name in metrics is its address."""

    def __init__(self, groups: Iterable[WorkerGroup], engines: RayEngines, loop: LoopRunner) -> None:
        self._groups = list(dict.fromkeys(groups))
        self._engines = engines
        self._loop = loop

    def __call__(self) -> dict[str, Usage]:
        answers = [answer for group in self._groups for answer in group.usage(deadline=USAGE_DEADLINE)]
        return by_node([*answers, *self._loop.run(self._engines.usage())])


def by_node(answers: Sequence[tuple[str, Usage]]) -> dict[str, Usage]:
    """The mean of how busy a node's devices were, and the most that one of them held."""
    nodes: dict[str, list[Usage]] = {}
    for node, usage in answers:
        nodes.setdefault(node, []).append(usage)
    return {
        node: Usage(sum(one.busy for one in seen) / len(seen), max(one.peak_gb for one in seen))
        for node, seen in nodes.items()
    }


REWARD_DEADLINE = 600.0
"""Seconds that one forward of a reward model may take."""


class RewardRanks:
    """Reward models on ranks. It is made before the ranks have started; `bind` connects it to them."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None
        self.threads = ThreadPoolExecutor(thread_name_prefix="reward-ranks")
        """The threads that wait for forwards, so that the event loop goes on."""

    def bind(self, group: WorkerGroup) -> None:
        self._group = group

    def forward(self, model: int) -> Forward:
        """The forward of the reward model with this index."""
        return lambda items: self._judge(model, items)

    def _judge(self, model: int, items: Sequence[Item]) -> list[float]:
        assert self._group is not None, "rewards are asked for after the ranks have started"
        shares = split(items, self._group.share_count)
        try:
            scores = self._group.call(
                "judge", model, shares=[(Sequences.of(share),) for share in shares], deadline=REWARD_DEADLINE
            )
        except WorkerError as error:
            raise RewardGoneError(str(error)) from error
        return [score for share in self._group.by_share(scores) for score in share]


def split(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Split items into so many shares, with about as many tokens each. Adjacent items stay together: they share a
    prompt, which is then computed once."""
    shares: list[list[Item]] = [[] for _ in range(count)]
    for item, share in zip(items, by_middle([len(item.token_ids) for item in items], parts=count), strict=True):
        shares[share].append(item)
    return shares


CHECKPOINT_DEADLINE = 3600.0
"""Seconds that writing or reading a model may take."""


@dataclass(frozen=True, slots=True)
class RemoteCheckpointedModel:
    """A model on the ranks of a group, which see the same file system as the driver."""

    group: WorkerGroup
    name: str
    """The name of the model's folder in a checkpoint, and of the model on its ranks."""

    def expected_bytes(self, *, resumable: bool) -> int:
        return self._call("expected_bytes", resumable=resumable)

    def write(self, folder: Path, state: dict[str, Any], *, resumable: bool) -> None:
        self._call("write", folder, state, resumable=resumable)

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return self.group.call(method, self.name, *arguments, **options, deadline=CHECKPOINT_DEADLINE)[0]
        except WorkerError as error:
            if isinstance(error.reason, CheckpointError):
                raise CheckpointError(str(error.reason)) from error
            raise


if TYPE_CHECKING:
    from openrlhf.checkpoint.manager import CheckpointedModel
    from openrlhf.trainers.hybrid import SleepingBackend

    _: tuple[type[CheckpointedModel], type[SleepingBackend]] = (RemoteCheckpointedModel, GroupSleep)
