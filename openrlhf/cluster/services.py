"""The service of a rank: the samples of the current round, the models of this process, and the calls they answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from openrlhf.checkpoint.manager import CheckpointedModel
from openrlhf.checkpoint.training_state import random_state, restore_random_state
from openrlhf.cluster.engines import EngineHandles
from openrlhf.cluster.transport import Column, PackedSamples, SampleColumns, unpacked
from openrlhf.learners.rank import CriticLearners, RankLearners
from openrlhf.learners.scorer import Scorer
from openrlhf.learners.teacher import Teacher
from openrlhf.observability.metrics import Metrics
from openrlhf.rewards.batching import Forward, Item
from openrlhf.types import PlacedImage, SampleKey, TrainingBatch
from openrlhf.weight_sync.base import Pushed
from openrlhf.weight_sync.probe import Probe


class Sequences(NamedTuple):
    """The sequences that a reward model is to judge, in the form in which Ray carries them to a rank."""

    token_ids: list[np.ndarray]
    others: list[tuple[int, tuple[PlacedImage, ...], tuple[int, ...]]]
    """The rest of each `rewards.batching.Item`."""

    @staticmethod
    def of(items: Sequence[Item]) -> Sequences:
        return Sequences([item.token_ids.numpy() for item in items], [item[1:] for item in items])

    def items(self) -> list[Item]:
        return [
            Item(torch.from_numpy(ids.copy()), *rest) for ids, rest in zip(self.token_ids, self.others, strict=True)
        ]


class Sleeper(Protocol):
    """Something whose state can leave the device and come back."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Sent(NamedTuple):
    """The result of sending weights to engines."""

    pushed: Pushed
    version: int
    """The number of rounds that the weights were trained for."""
    probed: list[float]
    """The policy's log-probs of a probe; empty if no probe was asked for."""


class SentWeights(Protocol):
    """A rank's part in sending the policy's weights. Methods are collective."""

    def send(self, engines: EngineHandles, *, needs_base: bool) -> Pushed:
        """Send the weights to these engines (`PolicyWeights.send`)."""
        ...

    def probe(self, probe: Probe) -> list[float]:
        """The policy's log-probs of the probe's tokens."""
        ...


class RankService:
    """A rank of models that share a process. Each method is called on all ranks of a group at the same time."""

    def __init__(
        self,
        *,
        kept: Mapping[str, CheckpointedModel] | None = None,
        judges: Sequence[Forward] = (),
        sleepers: Sequence[Sleeper] = (),
    ) -> None:
        """`kept`: trained models, by their folder in a checkpoint. `judges`: reward models."""
        self._batch = TrainingBatch(samples=[])
        self._kept = kept or {}
        self._judges = judges
        self._sleepers = sleepers

    def load_samples(self, *parts: PackedSamples) -> None:
        """The samples of this rank's share."""
        self._batch = TrainingBatch(samples=unpacked(parts))

    def export_column(self, name: str) -> Column:
        return Column.of(self._batch, name)

    def import_column(self, name: str, *parts: Column) -> None:
        setattr(self._batch, name, Column.for_batch(self._batch, parts))

    def judge(self, model: int, sequences: Sequences) -> list[float]:
        return list(self._judges[model](sequences.items()))

    def expected_bytes(self, name: str, *, resumable: bool) -> int:
        return self._kept[name].expected_bytes(resumable=resumable)

    def write(self, name: str, folder: Path, state: dict[str, Any], *, resumable: bool) -> None:
        self._kept[name].write(folder, state, resumable=resumable)

    def load(self, name: str, folder: Path) -> None:
        self._kept[name].load(folder)

    def random_state(self) -> dict[str, Any]:
        return random_state()

    def restore_random_state(self, state: dict[str, Any]) -> None:
        restore_random_state(state)

    def sleep(self) -> None:
        for sleeper in self._sleepers:
            sleeper.sleep()

    def wake(self) -> None:
        for sleeper in self._sleepers:
            sleeper.wake()

    def release(self) -> None:
        """Return the memory that this process's allocator caches to the device."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def peak_bytes(self) -> int:
        """The most memory of the device that this process's allocator has had."""
        return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


class PolicyService(RankService):
    """A rank of the policy, and of the models that share its process."""

    def __init__(self, learners: RankLearners, weights: SentWeights, **service_options: Any) -> None:
        super().__init__(**service_options)
        self._learners = learners
        self._weights = weights

    def score(self) -> None:
        self._learners.score(self._batch)

    def assign_advantages(self) -> Metrics:
        return self._learners.assign_advantages(self._batch)

    def update(self, *, keep: bool = False) -> Metrics:
        return self._learners.update(self._batch, keep=keep)

    def columns(self, keys: Collection[SampleKey]) -> SampleColumns:
        return SampleColumns.of(self._learners.columns(self._batch, keys))

    def send_weights(self, engines: EngineHandles, needs_base: bool, probe: Probe | None = None) -> Sent:
        pushed = self._weights.send(engines, needs_base=needs_base)
        return Sent(pushed, self._learners.rounds, [] if probe is None else self._weights.probe(probe))

    def state_dict(self) -> dict[str, Any]:
        return self._learners.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learners.load_state_dict(state)


class CriticService(RankService):
    """A rank of a critic that has processes of its own."""

    def __init__(self, learners: CriticLearners, **service_options: Any) -> None:
        super().__init__(**service_options)
        self._learners = learners

    def score(self) -> None:
        self._learners.score(self._batch)

    def update(self) -> Metrics:
        return self._learners.update(self._batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learners.load_state_dict(state)


class FrozenService(RankService):
    """A rank of a reference model, a teacher or both, which have processes of their own."""

    def __init__(self, *, reference: Scorer | None = None, teacher: Teacher | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._reference = reference
        self._teacher = teacher

    def score(self) -> None:
        if self._reference is not None:
            self._batch.reference_logprobs_A = self._reference.score(self._batch)
        if self._teacher is not None:
            self._teacher.tell(self._batch)
