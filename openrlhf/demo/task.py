"""The demo's task: add two two-digit numbers, `37+48=` → `85`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REWARD_FILE = Path(__file__).with_name("reward.py")
"""What a user would pass as --reward.remote_url."""

RESPONSE_TOKENS = 4
"""Up to three digits and the end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One addition."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All 8,100 problems, cut in two. a+b and b+a are always on the same side of the cut."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def make_task(*, seed: int, held_out: int = 500) -> Task:
    """`held_out` problems to measure on; all others, mirrored ones left out, to train on."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    # A held-out pair is asked in one random order, and trained on in neither.
    unseen = [Problem(*rng.sample(pair, 2)) for pair in pairs[:held_out]]
    seen = [Problem(x, y) for a, b in pairs[held_out:] for x, y in {(a, b), (b, a)}]
    rng.shuffle(seen)
    return Task(train=tuple(seen), held_out=tuple(unseen))


def write_problems(problems: Sequence[Problem], path: Path) -> None:
    """A prompt data set as users have them: one JSON object per line."""
    lines = (json.dumps({"input": p.prompt, "label": p.answer, "datasource": "addition"}) for p in problems)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
