"""The parts of a demo: problems, and how a beginner works through them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class WorkedTurn(NamedTuple):
    """One turn of a worked solution: the action, and the environment's answer to it."""

    action: str
    """The action without the end-of-sequence token, which ends every action."""
    feedback: str = ""


class Problem(Protocol):
    """One record of a demo's data."""

    @property
    def prompt(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def image(self) -> bytes | None:
        """The image that belongs to the prompt, in a file's format; None: there is none."""
        ...

    def worked(self, rng: random.Random) -> Sequence[WorkedTurn]:
        """An example of how to go about it, for the warm-up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The task of a demo: everything in which one demo differs from another."""

    name: str
    """The name under which evaluation reports the task."""
    description: str
    characters: str
    """The characters that prompts, actions and feedback are written with."""
    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    """Problems to measure on. No prompt is on both sides."""
    warm_up_until: float
    """How likely the warmed-up model acts as a worked example does, end to end."""
    steps: int
    """The RL steps after which the model has learned the task."""
    flags: Mapping[str, Any]
    """The flags that a user would pass for this task."""
    epochs: int = 1
    """How often every problem may be asked."""

    @property
    def has_images(self) -> bool:
        return any(problem.image is not None for problem in self.train)

    def max_steps(self, prompts: int) -> int:
        """The steps of so many prompts after which every problem has been asked as often as it may be."""
        return self.epochs * len(self.train) // prompts

    @property
    def score(self) -> str:
        """The metric that evaluation follows."""
        return f"eval_{self.name}_pass1"

    def write(self, folder: Path) -> None:
        """`train.jsonl` and `held_out.jsonl`, as users have them: one JSON object per line, images as files."""
        for side in ("train", "held_out"):
            records = []
            for i, problem in enumerate(getattr(self, side)):
                record = {"input": problem.prompt, "label": problem.label, "datasource": self.name}
                if problem.image is not None:
                    file = folder / side / f"{i:04d}.png"
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(problem.image)
                    record["images"] = f"{side}/{file.name}"
                records.append(record)
            (folder / f"{side}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
