"""The demo's task with images: read a handwritten digit.

The images are the 1,797 of scikit-learn, 8 × 8 pixels each, drawn by 43 people. The warm-up shows the form of an answer
and nothing else: its answers are random digits.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.config.fields import ConfigError
from openrlhf.data.image_places import MARK
from openrlhf.demo.task import Task, WorkedTurn

REWARD_FILE = Path(__file__).with_name("reward.py")
DIGITS = "0123456789"
PROMPT = f"{MARK}="


@dataclass(frozen=True, slots=True)
class Digit:
    """An image of a digit."""

    image: bytes
    """A PNG."""
    label: str

    @property
    def prompt(self) -> str:
        return PROMPT

    def worked(self, rng: random.Random) -> list[WorkedTurn]:
        return [WorkedTurn(rng.choice(DIGITS))]


def make_task(*, seed: int, held_out: int = 360) -> Task:
    """Raises ConfigError where scikit-learn is not installed."""
    problems = _problems()
    random.Random(seed).shuffle(problems)
    return Task(
        name="digits",
        description=f"read a handwritten digit: an image of 8 × 8 pixels, then `=` → `{problems[0].label}`",
        characters=DIGITS + "=",
        train=tuple(problems[held_out:]),
        held_out=tuple(problems[:held_out]),
        warm_up_until=0.09,
        steps=120,
        epochs=12,
        flags={
            "reward.remote_url": str(REWARD_FILE),
            "data.max_images_per_prompt": 1,
            # A digit and the end-of-sequence token.
            "rollout.max_new_tokens": 2,
            "data.max_len": 16,
            "actor.adam.lr": 5e-4,
        },
    )


def _problems() -> list[Digit]:
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            f"openrlhf demo --images needs {error.name}, which is not installed: pip install -e '.[demo-images]' in "
            "the repository"
        ) from error
    found: Any = load_digits()
    problems = []
    for pixels, digit in zip(found.images, found.target, strict=True):
        buffer = io.BytesIO()
        Image.fromarray((pixels * (255 / 16)).astype("uint8")).save(buffer, "PNG")
        problems.append(Digit(buffer.getvalue(), str(digit)))
    return problems


if TYPE_CHECKING:
    from openrlhf.demo.task import Problem

    _: type[Problem] = Digit
