"""The inside of the reward host: the user's file, loaded once, and calls of its `reward_func`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openrlhf.agents.user_file import UserFileError, describe_error, load_module, public_functions
from openrlhf.rewards.values import RewardValueError, RewardValues, parse_rewards

PARAMETERS = ("queries", "prompts", "labels")


class RewardFunctionError(UserFileError):
    """`reward_func` raised. Another attempt may succeed: perhaps it asked a service that was busy."""


class RewardFunction:
    """`reward_func` of one file."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).expanduser().resolve()
        module = load_module(self._file)
        function = getattr(module, "reward_func", None)
        if not callable(function):
            there = ", ".join(public_functions(module)) or "no functions"
            raise UserFileError(
                f"{self._file} defines no function reward_func(queries, prompts, labels); it has {there}"
            )
        self._place = _place(function, self._file)
        self._function = adapt(function, place=self._place)

    def score(
        self, queries: list[str], prompts: list[str], labels: list[Any]
    ) -> RewardValues | Awaitable[RewardValues]:
        """Its judgement of the samples of one prompt; a coroutine when `reward_func` is one."""
        try:
            returned = self._function(queries, prompts, labels)
        except BaseException as error:  # sys.exit() in a call is an error of that call
            raise self._raised(error) from error
        if inspect.isawaitable(returned):
            return self._finish(returned, count=len(prompts))
        return self._checked(returned, count=len(prompts))

    async def _finish(self, pending: Awaitable[Any], *, count: int) -> RewardValues:
        try:
            returned = await pending
        except BaseException as error:
            raise self._raised(error) from error
        return self._checked(returned, count=count)

    def _raised(self, error: BaseException) -> RewardFunctionError:
        return RewardFunctionError(describe_error(error, file=self._file))

    def _checked(self, returned: Any, *, count: int) -> RewardValues:
        try:
            return parse_rewards(returned, count=count)
        except RewardValueError as error:
            raise UserFileError(f"{self._place}: what reward_func returned cannot be used: {error}") from None


def adapt(function: Callable[..., Any], *, place: str) -> Callable[[list[str], list[str], list[Any]], Any]:
    """`function` as one of (queries, prompts, labels), whichever of them it takes, in whatever order.

    Parameters that bear these names are passed by name; others by position, if it takes three.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins: nothing is known of them
        return function
    parameters = signature.parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [p.name for p in parameters if p.name in PARAMETERS and p.kind in by_name]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        named = list(PARAMETERS)
    if named and _accepts(signature, **dict.fromkeys(named)):
        return lambda *lists: function(**{name: lists[PARAMETERS.index(name)] for name in named})
    if _accepts(signature, None, None, None):
        return function
    raise UserFileError(f"{place}: reward_func takes {signature}, but is called with (queries, prompts, labels)")


def _accepts(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _place(function: Any, file: Path) -> str:
    """`reward.py:12`: where the function begins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else str(file)
