"""Checkpoints of a run: everything that is needed to continue as if it had not been interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from safetensors import SafetensorError
from torch import Tensor, nn

from openrlhf.backends.base import Backend, whole_shape
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.backends.state import NotFiniteError
from openrlhf.checkpoint.folder import TRAINING_STATE, CheckpointError, CheckpointFolder
from openrlhf.checkpoint.training_state import (
    random_state,
    read_state,
    read_training_state,
    restore_random_state,
    write_state,
    write_training_state,
)
from openrlhf.checkpoint.universal import LATEST, read_universal

logger = logging.getLogger(__name__)


class Checkpointer(Protocol):
    """Keeps the state of a run: what is trained, which it knows, and the loop's own, which it is given."""

    def save(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        """`best`: no evaluation was better; kept until one is."""
        ...

    def keep_best(self, step: int) -> None:
        """The one that was saved last, after `step`, has turned out to be the best: it is kept until another is."""
        ...

    def load(self, take_up: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Restore what is trained from the latest checkpoint, and give the loop's own state to `take_up`.

        Returns that state. None: there is no checkpoint, and the run starts anew.
        """
        ...


class NoCheckpoints:
    """Keeps nothing."""

    def save(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        pass

    def keep_best(self, step: int) -> None:
        pass

    def load(self, take_up: Callable[[dict[str, Any]], None]) -> None:
        return None


T = TypeVar("T")
State = dict[str, Any]


class CheckpointedModel(Protocol):
    """A model that a checkpoint holds, wherever it is trained."""

    def expected_bytes(self, *, resumable: bool) -> int:
        """About what `write` needs on disk."""
        ...

    def write(self, folder: Path, state: State, *, resumable: bool) -> None:
        """A Hugging Face folder, given the loop's state; `resumable` adds training state. Raises CheckpointError."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what a resumable `write` left there, or from DeepSpeed's universal checkpoint.

        Raises CheckpointError.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalCheckpointedModel:
    """A model of this process, or this rank's part of one: methods are collective."""

    backend: Backend
    export: Callable[[Path, State, Mapping[str, Tensor] | None], object]
    """Writes it as a Hugging Face folder, on the main rank; given the loop's state, and the weights to write where the
    module does not hold them."""
    ranks: Ranks = ALONE
    module: nn.Module | None = None
    """The model that the backend trains, under whose names universal checkpoints are read. None: none are."""

    def expected_bytes(self, *, resumable: bool) -> int:
        """The model in its dtype, and its trained parameters in fp32 with two moments."""
        parameters = list(self.backend.module.parameters())
        total = sum(whole_shape(p).numel() * p.element_size() for p in parameters)
        return total + (sum(whole_shape(p).numel() * 12 for p in parameters if p.requires_grad) if resumable else 0)

    def write(self, folder: Path, state: State, *, resumable: bool) -> None:
        try:
            self.backend.require_finite()
        except NotFiniteError as error:
            raise CheckpointError(f"nothing is saved: {error}") from error
        with self.backend.weights_to_save() as weights:
            run_on_all_ranks(self.ranks, lambda: self.export(folder, state, weights) if self.ranks.is_main else None)
        if resumable:
            target, numbers, tensors = folder / TRAINING_STATE, self.backend.scalar_state(), self.backend.tensor_state()
            run_on_all_ranks(
                self.ranks, lambda: write_training_state(target, numbers, tensors, writes=self.ranks.is_main)
            )

    def load(self, folder: Path) -> None:
        is_universal = self.module is not None and (folder / LATEST).exists()
        try:
            if self.module is not None and is_universal:
                self.backend.load(*read_universal(folder, self.module))
            else:
                self.backend.load(*read_training_state(folder / TRAINING_STATE))
        except ValueError as error:
            where = folder if is_universal else folder.parent
            raise CheckpointError(f"{where} cannot be continued: {error}") from error
        except NOT_OURS as error:
            raise foreign(folder / TRAINING_STATE, error) from error


NOT_OURS = (LookupError, TypeError, AttributeError)
"""The errors of reading a file whose content is not what we have written."""


def foreign(place: Path, why: Exception | str) -> CheckpointError:
    """`place`: a file or folder of a checkpoint that is whole, and was not written by this version of openrlhf."""
    reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    return CheckpointError(
        f"{place} does not hold what a checkpoint of this version has there ({reason}): restore it, remove its "
        "checkpoint to go on from the one before, or name another --ckpt.path"
    )


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint to continue from, with its state except that of backends."""

    path: Path
    state: State

    @property
    def notes(self) -> State:
        """The description that the run has stored in its checkpoint."""
        return self.state["notes"]

    def require_same(self, identity: Mapping[str, str]) -> None:
        """CheckpointError if a run with this identity would not be the same run."""
        for name, now in identity.items():
            then = self.state["identity"].get(name, now)  # older checkpoints do not have all of them
            if then != now:
                raise CheckpointError(
                    f"{self.path} cannot be continued: {name} was {then}, and is {now} now; resume with the same, name "
                    "another --ckpt.path, or leave --ckpt.load_enable out and start from the checkpoint's model folder"
                )

    def changes(self, settings: Mapping[str, Any]) -> list[str]:
        """Flags that were different in the run which wrote it, a line for each."""
        then = self.state.get("settings", {})  # older checkpoints have none
        return [
            f"--{name} was {_shown(then[name])} up to {self.path.name}, and is {_shown(now)} from here on"
            for name, now in settings.items()
            if name in then and then[name] != now
        ]


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


PARTS: dict[str, type] = {"resumable": bool, "identity": dict, "notes": dict, "random": list, "loop": dict}
"""The keys of a checkpoint's state.json, and the types of their values."""


def _read_state(checkpoint: Path) -> State:
    """Raises CheckpointError for a state that is not ours."""
    file = checkpoint / "state.json"
    try:
        state = read_state(checkpoint)
    except (OSError, ValueError, SafetensorError, *NOT_OURS) as error:
        raise foreign(file, error) from error
    if not isinstance(state, dict):
        raise foreign(file, f"it is a {type(state).__name__}, not an object")
    for name, kind in PARTS.items():
        if not isinstance(state.get(name), kind):
            raise foreign(file, f"its {name!r} is missing or of another kind")
    return state


def read_notes_of(checkpoint: Path) -> State:
    """What the run that wrote a checkpoint noted in it: its folder. Raises CheckpointError."""
    return _read_state(checkpoint)["notes"]


def find_checkpoint(folder: CheckpointFolder, *, ranks: Ranks = ALONE) -> ResumePoint | None:
    """The one to continue from: the newest that is whole; None if there is none. Raises CheckpointError."""
    mine = run_on_all_ranks(ranks, lambda: folder.newest_complete() if ranks.is_main else None)
    path = next((path for path in ranks.gather(mine) if path is not None), None)
    if path is None:
        return None
    return run_on_all_ranks(ranks, lambda: read_checkpoint(path))


def read_checkpoint(path: Path) -> ResumePoint:
    """A checkpoint that is known to be whole. Raises CheckpointError where it cannot be continued from."""
    state = _read_state(path)
    if not state["resumable"]:
        raise CheckpointError(
            f"{path} has no training state (--ckpt.disable_ds): start a new run from its model folder, with another "
            "--ckpt.path"
        )
    return ResumePoint(path, state)


class CheckpointManager:
    """Writes and reads whole checkpoints."""

    def __init__(
        self,
        folder: CheckpointFolder,
        models: Mapping[str, CheckpointedModel],
        *,
        found: ResumePoint | None = None,
        identity: Mapping[str, str],
        notes: State,
        settings: Mapping[str, Any] | None = None,
        resumable: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        """`models`: by the folder each has in a checkpoint. `found`: what `load` continues from.

        `identity`: what a run may not change when it continues, by the names users know it by. `settings`: flags, as
        JSON has them, that it may change; it is said then. `resumable` False leaves the training state out, which is
        most of the size.
        """
        self._folder = folder
        self._models = models
        self._found = found
        self._identity = dict(identity)
        self._notes = notes
        self._settings = dict(settings or {})
        self._resumable = resumable
        self._ranks = ranks

    def save(self, step: int, state: State, *, best: bool = False) -> None:
        """Collective. Raises CheckpointError; what was there before is then still there."""
        draft = self._folder.draft(step)
        whole = {
            "resumable": self._resumable,
            "identity": self._identity,
            "notes": self._notes,
            "settings": self._settings,
            "random": self._ranks.gather(random_state()),
            "loop": state,
        }
        expected = sum(model.expected_bytes(resumable=self._resumable) for model in self._models.values())
        self._on_main(lambda: self._folder.require_room(expected))
        try:
            self._on_main(lambda: self._folder.begin(step))
            for name, model in self._models.items():
                model.write(draft / name, state, resumable=self._resumable)
            self._on_main(lambda: write_state(draft, whole))
            self._on_main(lambda: self._folder.commit(step, best=best))
        except CheckpointError:
            self._on_main(lambda: self._folder.discard(step))
            raise

    def keep_best(self, step: int) -> None:
        """Collective. Raises CheckpointError."""
        self._on_main(lambda: self._folder.keep_best(step))

    def load(self, take_up: Callable[[State], None]) -> State | None:
        """Models and generators become as they were. Flags that have changed since are said, or refused.

        Raises CheckpointError.
        """
        found = self._found
        if found is None:
            return None
        found.require_same(self._identity)
        if self._ranks.is_main:
            for change in found.changes(self._settings):
                logger.warning("%s", change)
        for name, model in self._models.items():
            model.load(found.path / name)
        try:
            states = found.state["random"]
            if self._ranks.index < len(states):
                restore_random_state(states[self._ranks.index])
            take_up(found.state["loop"])
        except NOT_OURS as error:
            raise foreign(found.path / "state.json", error) from error
        return found.state["loop"]

    def _on_main(self, work: Callable[[], object]) -> None:
        run_on_all_ranks(self._ranks, lambda: work() if self._ranks.is_main else None)


def run_on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """All ranks do it. What goes wrong on one is a CheckpointError on all: none waits for another in vain."""
    result, failure = None, None
    try:
        result = work()
    except CheckpointError as error:
        failure = str(error)
    except (OSError, SafetensorError) as error:
        failure = f"a checkpoint cannot be written or read: {error}"
    first = ranks.agree(failure)
    if first is not None:
        raise CheckpointError(first)
    return result  # type: ignore[return-value]


if TYPE_CHECKING:
    _: tuple[type[CheckpointedModel], type[Checkpointer], type[Checkpointer]] = (
        LocalCheckpointedModel,
        CheckpointManager,
        NoCheckpoints,
    )
