"""The demo's multi-turn task: a hunt. A clue is a place in a row of letters; naming the letter there earns the next.

    dkbxsph5  s  2  k  7  h  1  d        found

All but the first clue come from the environment, each after a right answer; a wrong answer ends the hunt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from openrlhf.demo.task import Task, WorkedTurn

AGENT_FILE = Path(__file__).with_name("agent.py")
"""The value that a user would pass as --train.agent_func_path."""

LETTERS = 7
CLUES = 4


@dataclass(frozen=True, slots=True)
class Hunt:
    """A row of letters and the clues in order: places in the row, from 1 on."""

    row: str
    clues: str

    @property
    def image(self) -> None:
        return None

    @property
    def prompt(self) -> str:
        return self.row + self.clues[0]

    @property
    def label(self) -> str:
        return self.clues

    def worked(self, rng: random.Random) -> list[WorkedTurn]:
        answers = [letter_at(self.row, clue) for clue in self.clues]
        return [WorkedTurn(*turn) for turn in zip(answers, [*self.clues[1:], ""], strict=True)]


def letter_at(row: str, clue: str) -> str:
    """The answer to a clue."""
    return row[int(clue) - 1]


def make_task(*, seed: int, train: int = 8000, held_out: int = 500) -> Task:
    """Distinct rows of different letters, of three billion that there are."""
    rng = random.Random(seed)
    places = "".join(str(place) for place in range(1, LETTERS + 1))
    rows: dict[str, None] = {}
    while len(rows) < train + held_out:
        rows["".join(rng.sample(ascii_lowercase, LETTERS))] = None
    problems = tuple(Hunt(row, "".join(rng.sample(places, CLUES))) for row in rows)
    return Task(
        name="hunt",
        description=f"find {CLUES} letters of a row, such as `{problems[0].row}`, by their places; each right answer "
        "earns the next place",
        characters=ascii_lowercase + places,
        train=problems[:train],
        held_out=problems[train:],
        warm_up_until=0.04,
        steps=50,
        flags={
            "train.agent_func_path": str(AGENT_FILE),
            # Of each turn: a letter and the end-of-sequence token.
            "rollout.max_new_tokens": 2,
            "data.max_len": 32,
            "actor.adam.lr": 1e-4,
        },
    )


if TYPE_CHECKING:
    from openrlhf.demo.task import Problem

    _: type[Problem] = Hunt
