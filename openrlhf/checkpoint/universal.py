"""DeepSpeed's universal checkpoints: weights and moments, read one by one to begin a run with. None are written.

A supervised run has one in <folder>, the folder of --ckpt.path; a run of RL has two, in <folder>/_actor and
<folder>/_critic. The part of each:

<folder>/latest_universal              the name of the one to begin with
<folder>/<name>/zero/<parameter>/      fp32.pt, exp_avg.pt, exp_avg_sq.pt, and step.pt unless it comes from stage 3
<folder>/<name>/*model_states.pt       steps taken; of stage 3 the shapes, too: its tensors are flat. Of an actor the
                                       rounds done (global_step) and the prompts taken (total_consumed_prompts)
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf.backends.state import PARAMETERS
from openrlhf.checkpoint.folder import CheckpointError

if TYPE_CHECKING:
    from openrlhf.checkpoint.manager import CheckpointedModel, Checkpointer

LATEST = "latest_universal"
FILES = {PARAMETERS: "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
STEP = "step"


@dataclass(frozen=True, slots=True)
class UniversalCheckpoint:
    """One that was found."""

    path: Path
    steps: int
    """Optimizer steps that were taken."""
    shapes: Mapping[str, torch.Size]
    """The shapes of its parameters, by their names there; empty where the tensors have them."""
    rounds: int | None = None
    """Rounds of RL that were done. None: it does not say."""
    prompts: int | None = None
    """Prompts that these rounds took, those of rejected groups among them. None: it does not say."""

    def tensors(self, names: Iterable[str], *, aliases: Mapping[str, str] | None = None) -> UniversalTensors:
        """For `Backend.load` of something that trains these parameters.

        `aliases`: what files call a module of ours, the head of a reward model for one.
        """
        return UniversalTensors(self, names, aliases or {})


def find_universal(folder: Path) -> UniversalCheckpoint:
    """The one that `latest_universal` names. Raises CheckpointError."""
    try:
        path = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"--ds.use_universal_ckpt: {folder / LATEST} cannot be read; make a universal checkpoint with "
            "python -m deepspeed.checkpoint.ds_to_universal --input_folder FOLDER/global_stepN "
            "--output_folder FOLDER/global_stepN_uni"
        ) from error
    model_states = sorted(path.glob("*model_states.pt"))
    if not model_states or not (path / "zero").is_dir():
        raise CheckpointError(f"--ds.use_universal_ckpt: {path} is no universal checkpoint: it has no zero/ folder")
    state = _load(model_states[0])
    try:
        steps = int(state["global_steps"]) - int(state.get("skipped_steps", 0))
        rounds, prompts = (
            None if state.get(name) is None else int(state[name]) for name in ("global_step", "total_consumed_prompts")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{model_states[0]} does not say how many steps were taken") from error
    shapes = {name: shape for group in state.get("param_shapes") or [] for name, shape in group.items()}
    return UniversalCheckpoint(path, steps, shapes, rounds, prompts)


def read_universal(folder: Path, module: nn.Module) -> tuple[dict[str, Any], UniversalTensors]:
    """What `Backend.load` asks for, for a backend that trains this module. Raises CheckpointError."""
    checkpoint = find_universal(folder)
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    head = getattr(module, "head_prefix", None)  # what files call the head of a critic or a reward model
    tensors = checkpoint.tensors(trained, aliases={"head": head} if head else {})
    return {"steps": checkpoint.steps}, tensors


class UniversalTensors(Mapping[str, Tensor]):
    """The tensors `<kind>/<parameter>`, under the caller's names; each is read from its file on access."""

    def __init__(self, checkpoint: UniversalCheckpoint, names: Iterable[str], aliases: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        zero = checkpoint.path / "zero"
        stored = {file.parent.relative_to(zero).as_posix() for file in zero.glob(f"*/{FILES[PARAMETERS]}")}
        ours = {_plain(name, aliases): name for name in names}
        # What nobody asks for keeps its name, for the message that it is not trained.
        self._folders = {ours.get(_plain(name, {}), name): name for name in stored}
        if len(self._folders) < len(stored):
            raise CheckpointError(f"{checkpoint.path}: several parameters there could be the same one of this model")
        self._names = {
            f"{kind}/{name}": zero / folder / file
            for name, folder in self._folders.items()
            for kind, file in {**FILES, STEP: "step.pt"}.items()
            if kind == STEP or (zero / folder / file).exists()
        }

    def __getitem__(self, name: str) -> Tensor:
        file = self._names[name]
        kind, _, parameter = name.partition("/")
        if kind == STEP:
            steps = _load(file) if file.exists() else self._checkpoint.steps
            return torch.as_tensor(steps, dtype=torch.float32).reshape(())
        held = _load(file)
        tensor = held["param"] if isinstance(held, Mapping) else held
        shape = self._checkpoint.shapes.get(self._folders[parameter])
        return tensor if shape is None else tensor.reshape(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it, as Mapping would

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class UniversalStart:
    """Begins with universal checkpoints; what is saved from then on are checkpoints of our own."""

    def __init__(
        self,
        models: Mapping[Path, CheckpointedModel],
        saver: Checkpointer,
        *,
        loop_state: Callable[[], dict[str, Any]],
    ) -> None:
        """`models`: by the folder that has each one's `latest_universal`. `loop_state`: the loop's where they end."""
        self._models = models
        self._saver = saver
        self._loop_state = loop_state

    def save(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        self._saver.save(step, state, best=best)

    def keep_best(self, step: int) -> None:
        self._saver.keep_best(step)

    def load(self, take_up: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        for folder, model in self._models.items():
            model.load(folder)
        state = self._loop_state()
        take_up(state)
        return state


if TYPE_CHECKING:
    _: type[Checkpointer] = UniversalStart


def _plain(name: str, aliases: Mapping[str, str]) -> str:
    """Without the modules that wrap a model: DeepSpeed's `module`, a trainer's or Hugging Face's `model`."""
    inner = re.sub(r"^(?:(?:module|model)\.)+", "", name)
    module, dot, rest = inner.partition(".")
    return aliases.get(module, module) + dot + rest


def _load(file: Path) -> Any:
    """Tensors and plain values: nothing in the file is run."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        first = str(error).partition("\n")[0]
        raise CheckpointError(f"--ds.use_universal_ckpt: {file} cannot be read: {first}") from error
