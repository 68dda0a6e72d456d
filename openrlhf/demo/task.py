"""The demo's task: put five different digits in order, `73914>` → `13479`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

REWARD_FILE = Path(__file__).with_name("reward.py")
"""What a user would pass as --reward.remote_url."""

DIGITS = 5
RESPONSE_TOKENS = DIGITS + 1
"""The digits and the end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Digits out of order."""

    digits: str

    @property
    def prompt(self) -> str:
        return f"{self.digits}>"

    @property
    def answer(self) -> str:
        return "".join(sorted(self.digits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems to train on and problems to measure on; no answer is on both sides."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def make_task(*, seed: int, train: int = 8000, held_out: int = 500) -> Task:
    """Distinct problems. A tenth of the 252 possible answers is set apart for measuring."""
    rng = random.Random(seed)
    answers = ["".join(digits) for digits in combinations("0123456789", DIGITS)]
    rng.shuffle(answers)
    apart = len(answers) // 10
    return Task(
        train=_shuffled(answers[apart:], count=train, rng=rng),
        held_out=_shuffled(answers[:apart], count=held_out, rng=rng),
    )


def _shuffled(answers: Sequence[str], *, count: int, rng: random.Random) -> tuple[Problem, ...]:
    """`count` distinct orders of the digits of randomly chosen answers."""
    problems: dict[Problem, None] = {}
    while len(problems) < count:
        problems[Problem("".join(rng.sample(rng.choice(answers), DIGITS)))] = None
    return tuple(problems)


def write_problems(problems: Sequence[Problem], path: Path) -> None:
    """A prompt data set as users have them: one JSON object per line."""
    lines = (json.dumps({"input": p.prompt, "label": p.answer, "datasource": "sorting"}) for p in problems)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
