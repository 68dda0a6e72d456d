"""The inside of the reward host: the user's file, loaded once, and calls of its `reward_func`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openrlhf.agents.host_worker import run_user
from openrlhf.agents.user_calls import UserFileError, describe_error, load_module, place_of, plan_call, public_functions
from openrlhf.agents.values import BadValueError
from openrlhf.rewards.values import RewardValues, parse_rewards

PARAMETERS = ("queries", "prompts", "labels")


class RewardFunctionError(UserFileError):
    """`reward_func` raised. Another attempt may succeed: perhaps it asked a service that was busy."""


class RewardFunction:
    """`reward_func` of one file."""

    shared_loop = True
    """Calls of a coroutine share an event loop, and with it the clients that the file keeps."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).expanduser().resolve()
        module = load_module(self._file)
        function = getattr(module, "reward_func", None)
        if not callable(function):
            there = ", ".join(public_functions(module)) or "no functions"
            raise UserFileError(
                f"{self._file} defines no function reward_func(queries, prompts, labels); it has {there}"
            )
        self._place = place_of(function, unknown=self._file)
        self._function = adapt(function, place=self._place)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    async def score(self, queries: list[str], prompts: list[str], labels: list[Any]) -> RewardValues:
        """Its judgement of the samples of one prompt."""
        try:
            returned = await run_user(self._function, queries, prompts, labels, thread=not self._is_async)
        except BaseException as error:  # sys.exit() in a call is an error of that call
            raise RewardFunctionError(describe_error(error, file=self._file)) from error
        try:
            return parse_rewards(returned, count=len(prompts))
        except BadValueError as error:
            raise UserFileError(f"{self._place}: what reward_func returned cannot be used: {error}") from None


def adapt(function: Callable[..., Any], *, place: str) -> Callable[[list[str], list[str], list[Any]], Any]:
    """`function` as one of (queries, prompts, labels), whichever of them it takes, in whatever order.

    Parameters that bear these names are passed by name; others by position, if it takes three.
    """
    plan = plan_call(function, PARAMETERS, fewest=len(PARAMETERS))
    if plan is None:
        raise UserFileError(
            f"{place}: reward_func takes {inspect.signature(function)}, but is called with (queries, prompts, labels)"
        )
    return lambda *lists: plan.call(function, dict(zip(PARAMETERS, lists, strict=True)))
