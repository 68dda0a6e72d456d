"""Functions of the program that called a run: told of every step and evaluation, and able to end the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from openrlhf.config.fields import ConfigError

Callback = Callable[[int, dict[str, float]], object]
"""Called with a step, the first is 1, and its metrics by name. Returning False ends the training."""


class StopTraining(Exception):
    """Raised by a callback, it ends the training after the step: the run saves a checkpoint, if it saves any, writes
    its model and returns. The text says why."""


class EndedEarly(Exception):
    """A callback has ended the training, and what was due after the step is done."""


class Callbacks:
    """The callbacks of one run, and whether one of them has ended it. What else one raises ends the run as an error."""

    def __init__(self, on_step: Callback | None = None, on_evaluation: Callback | None = None) -> None:
        for name, function in (("on_step", on_step), ("on_evaluation", on_evaluation)):
            if function is not None and (not callable(function) or inspect.iscoroutinefunction(function)):
                raise ConfigError(f"{name} must be a plain function of (step, metrics), got {function!r}")
        self._on_step = on_step
        self._on_evaluation = on_evaluation
        self.ended: str | None = None
        """Why the training is to end; None: it goes on."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(self._on_step, "on_step", step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(self._on_evaluation, "on_evaluation", step, metrics)

    def check(self) -> None:
        """Raise EndedEarly if the training is to end."""
        if self.ended is not None:
            raise EndedEarly(self.ended)

    def _call(self, function: Callback | None, name: str, step: int, metrics: Mapping[str, float]) -> None:
        if function is None:
            return
        try:
            answer = function(step, dict(metrics))
        except StopTraining as stop:
            self.ended = str(stop) or f"{name} raised StopTraining"
        else:
            if answer is False:
                self.ended = f"{name} returned False"
