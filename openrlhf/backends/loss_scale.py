"""Loss scaling: gradients of fp16 models are computed large enough not to round to 0, and made small again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.backends.finite import NotFiniteError

INITIAL = 2.0**16
FACTOR = 2.0
GROWS_AFTER = 2_000
"""Good steps in a row."""


@dataclass(slots=True)
class LossScale:
    """What losses are multiplied with, and gradients divided by before a step.

    Doubled after `GROWS_AFTER` good steps in a row; halved when a gradient overflows, and that step is left out
    (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).
    """

    value: float = INITIAL
    good_steps: int = 0

    def after_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == GROWS_AFTER:
            self.value, self.good_steps = self.value * FACTOR, 0

    def after_overflow(self) -> None:
        """Raises NotFiniteError where scaling is not what makes gradients overflow."""
        if self.value <= 1.0:
            raise NotFiniteError(
                "gradients are infinite or not a number, and no longer scaled up: this model does not train in fp16; "
                "use --ds.param_dtype bf16 or fp32, or a lower learning rate"
            )
        self.value, self.good_steps = self.value / FACTOR, 0

    def numbers(self) -> dict[str, Any]:
        """As `Backend.numbers` keeps it."""
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Of a run in another dtype nothing is kept: begin anew."""
        self.value = float(numbers.get("loss_scale", INITIAL))
        self.good_steps = int(numbers.get("good_steps", 0))
