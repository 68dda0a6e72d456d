"""The demo's task: put five different digits in order, `73914>` → `13479`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.demo.task import Task, WorkedTurn

REWARD_FILE = Path(__file__).with_name("reward.py")
"""The value that a user would pass as --reward.remote_url."""

CHARACTERS = "0123456789>"
DIGITS = 5
RESPONSE_TOKENS = DIGITS + 1
"""The digits and the end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class Sorting:
    """Digits out of order."""

    digits: str

    @property
    def image(self) -> None:
        return None

    @property
    def prompt(self) -> str:
        return f"{self.digits}>"

    @property
    def label(self) -> str:
        return "".join(sorted(self.digits))

    def worked(self, rng: random.Random) -> list[WorkedTurn]:
        return [WorkedTurn(self.label)]


def make_task(*, seed: int, train: int = 8000, held_out: int = 500) -> Task:
    """Distinct problems. A tenth of the 252 possible answers is set apart for measuring: none is on both sides."""
    rng = random.Random(seed)
    answers = ["".join(digits) for digits in combinations("0123456789", DIGITS)]
    rng.shuffle(answers)
    apart = len(answers) // 10
    problems = _shuffled(answers[apart:], count=train, rng=rng)
    return Task(
        name="sorting",
        description=f"put digits in order, `{problems[0].prompt}` → `{problems[0].label}`",
        characters=CHARACTERS,
        train=problems,
        held_out=_shuffled(answers[:apart], count=held_out, rng=rng),
        warm_up_until=0.04,
        steps=50,
        flags={
            "reward.remote_url": str(REWARD_FILE),
            "rollout.max_new_tokens": RESPONSE_TOKENS,
            "data.max_len": 16,
            "actor.adam.lr": 1e-4,
        },
    )


def _shuffled(answers: Sequence[str], *, count: int, rng: random.Random) -> tuple[Sorting, ...]:
    """`count` distinct orders of the digits of randomly chosen answers."""
    problems: dict[Sorting, None] = {}
    while len(problems) < count:
        problems[Sorting("".join(rng.sample(rng.choice(answers), DIGITS)))] = None
    return tuple(problems)


if TYPE_CHECKING:
    from openrlhf.demo.task import Problem

    _: type[Problem] = Sorting
