"""A user's `AgentExecutor` class, in any of the shapes that documents show, as something that plays episodes.

                      made                                       plays
MultiTurnAgentExecutor, SingleTurnAgentExecutor, OpenAIServerAgentExecutor
                      once, without arguments                    our own `play`
execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
                      once, without arguments                    returns the documented dict
execute(prompt, label, sampling_params), or none
                      per episode, with `LEGACY_ARGS`            returns it, or puts it on `result_queue`
execute_group(prompt, label, [sampling_params], max_length, hf_tokenizer, [llm_engine], images)
                      once, without arguments                    returns a list of documented dicts, one for each sample
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import AgentExecutorBase, Episode, FailedEpisode
from openrlhf.agents.host_worker import run_user
from openrlhf.agents.images import images_of
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor, episodes_of
from openrlhf.agents.openai_server import OpenAIServerAgentExecutor
from openrlhf.agents.recording_engine import RecordingEngine
from openrlhf.agents.results import check_group, parse_episode, parse_fork
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.agents.user_calls import (
    AgentError,
    AgentResultError,
    CallPlan,
    UserFileError,
    accepts,
    describe_error,
    load_module,
    place_of,
    plan_call,
    public_functions,
    users_code,
)
from openrlhf.agents.values import BadValueError
from openrlhf.types import SamplingParams

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine

LEGACY_ARGS = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
"""What the constructor of an executor took in OpenRLHF before 0.9.1: it got its engine when it was made, and gave its
result through a queue."""

MANY_STEPS = 10_000
"""The value of `max_steps` when the run has no limit: their loops count up to it."""


ARGUMENTS = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine", "images")
"""The arguments that `execute` can take, in this order."""

GROUP_ARGUMENTS = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engines", "images")
"""The arguments that `execute_group` can take, in this order."""

NAME = "AgentExecutor"

LOOP_BOUND = (asyncio.Lock, asyncio.Semaphore, asyncio.Event, asyncio.Condition, asyncio.Queue)
"""Objects that belong to the event loop that first waits for them."""


def load_agent(path: str | os.PathLike[str]) -> UserAgent:
    """The agent of a user's file. Raises UserFileError, in one line, when its class fits no known shape."""
    file = Path(path).expanduser().resolve()
    module = load_module(file)
    cls = getattr(module, NAME, None)
    if cls is None:
        there = ", ".join(public_functions(module)) or "no classes"
        raise UserFileError(
            f"{file} defines no class {NAME}; it has {there}. Expected class {NAME}(MultiTurnAgentExecutor), "
            "of openrlhf.utils.agent"
        )
    if not inspect.isclass(cls):
        raise UserFileError(f"{file}: {NAME} must be a class, got {type(cls).__name__}")
    agent = UserAgent(cls, file=file)
    agent.shared_loop = _wants_shared_loop(module, agent.executor)
    return agent


def _wants_shared_loop(module: ModuleType, executor: Any) -> bool:
    """What the file's `SHARED_LOOP` says, else whether it keeps something of asyncio between episodes: in the module,
    on one of its classes, or on the executor that plays them all."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    owners = [module, *(value for value in own if inspect.isclass(value)), executor]
    kept = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    return bool(getattr(module, "SHARED_LOOP", any(isinstance(value, LOOP_BOUND) for value in kept)))


class UserAgent:
    """A `Player` made of a user's class."""

    shared_loop = False
    """Whether its episodes want to share one event loop."""

    def __init__(self, cls: type, *, file: Path) -> None:
        self._file = file
        self._cls = cls
        self._construction = _construction(cls)
        self._group_call = _group_call(cls)
        self._call = None if self._group_call else _call(cls, is_legacy=self._construction is not None)
        if self._construction is not None and issubclass(cls, AgentExecutorBase) and not _plays(cls):
            self._cls = with_legacy_turns(cls)
        self.executor = None if self._construction is not None else self._make()
        """The one that plays all episodes; None: each episode has one of its own."""
        self.group_play = str(getattr(self.executor, "group_play", ""))
        """How all samples of a prompt are played together, for people; "": they are not."""
        if self._group_call is not None:
            self.group_play = "execute_group plays all samples of a prompt"
        if self.group_play and self._call is not None:
            raise UserFileError(
                f"{place_of(cls)}: {NAME} has an execute of its own, for each sample by itself, but its environment "
                "says fork_after_reset: define execute_group instead of execute, or leave both out"
            )

    async def play(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
        *,
        max_steps: int | None = None,
    ) -> Episode:
        reader = images_of(hf_tokenizer)
        recording = RecordingEngine(llm_engine, sampling_params=sampling_params, max_length=max_length, images=reader)
        values: dict[str, Any] = {
            "prompt": prompt,
            "label": label,
            "sampling_params": sampling_params.copy(),
            "max_length": max_length,
            "hf_tokenizer": hf_tokenizer,
            "llm_engine": recording,
            "images": images if reader is None or not images or self._call is None else await reader.pixels(images),
            "max_steps": max_steps or MANY_STEPS,
            "result_queue": asyncio.Queue(),
        }
        try:
            executor = self.executor
            if executor is None:
                with users_code(self._file):
                    assert self._construction is not None
                    executor = self._construction.call(self._cls, values)
            if self._call is None:
                return await executor.play(
                    prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images, max_steps=max_steps
                )
            if isinstance(executor, MultiTurnAgentExecutor):
                executor.turn_limit = max_steps
            with users_code(self._file):
                returned = await run_user(self._call.bind(executor.execute, values))
        except AgentError as error:
            if recording.failure is not None and error.__cause__ is recording.failure:
                raise recording.failure from None
            raise
        try:
            return parse_episode(
                _answer(returned, values["result_queue"]),
                prompt=prompt,
                engine=recording,
                hf_tokenizer=hf_tokenizer,
                max_length=max_length,
                images=images,
            )
        except BadValueError as error:
            raise AgentResultError(f"{place_of(executor.execute)}: {error}") from None

    async def play_group(
        self,
        prompt: str,
        label: Any,
        sampling_params: Sequence[SamplingParams],
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
        *,
        max_steps: int | None = None,
    ) -> Sequence[Episode | FailedEpisode]:
        """The episodes of all samples of a prompt, in the order of `sampling_params`."""
        executor: Any = self.executor
        if self._group_call is None:
            played: Sequence[Episode | FailedEpisode] = await executor.play_group(
                prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images, max_steps=max_steps
            )
            return played
        reader = images_of(hf_tokenizer)
        first = RecordingEngine(llm_engine, sampling_params=sampling_params[0], max_length=max_length, images=reader)
        engines = [first, *(first.of_sample(params) for params in sampling_params[1:])]
        values: dict[str, Any] = {
            "prompt": prompt,
            "label": label,
            "sampling_params": [params.copy() for params in sampling_params],
            "max_length": max_length,
            "hf_tokenizer": hf_tokenizer,
            "llm_engines": engines,
            "images": images if reader is None or not images else await reader.pixels(images),
        }
        place = place_of(executor.execute_group)
        try:
            with users_code(self._file):
                returned = await run_user(self._group_call.bind(executor.execute_group, values))
        except AgentError as error:
            _raise_engine_failure(error, engines)
            raise
        try:
            results = check_group(returned, samples=len(engines))
        except BadValueError as error:
            raise AgentResultError(f"{place}: {error}") from None
        episodes: list[Episode | Exception] = []
        for sample, (result, engine) in enumerate(zip(results, engines, strict=True)):
            if isinstance(result, BaseException):
                try:
                    with users_code(self._file):
                        raise result
                except AgentError as error:
                    _raise_engine_failure(error, engines)
                    episodes.append(error)
                continue
            try:
                one = parse_episode(
                    result,
                    prompt=prompt,
                    engine=engine,
                    hf_tokenizer=hf_tokenizer,
                    max_length=max_length,
                    images=images,
                )
                episodes.append(dataclasses.replace(one, fork=parse_fork(result, one, sample=sample, of=episodes)))
            except BadValueError as error:
                raise AgentResultError(f"{place}: sample {sample}: {error}") from None
        return episodes_of(episodes)

    def _make(self) -> Any:
        try:
            executor = self._cls()
        except UserFileError:
            raise
        except (Exception, SystemExit) as error:
            raise UserFileError(f"{describe_error(error, file=self._file)} (while {NAME} was made)") from error
        if isinstance(executor, MultiTurnAgentExecutor) and not hasattr(executor, "agent_instance_cls"):
            raise UserFileError(f"{place_of(self._cls)}: {NAME}.__init__ does not call super().__init__(AgentInstance)")
        return executor


def _construction(cls: Any) -> CallPlan | None:
    """How to make the executor of an episode; None: one, made without arguments, plays them all."""
    parameters = inspect.signature(cls).parameters.values()
    takes_anything = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    given_engine = None if _lacks_execute(cls) else plan_call(cls.execute, ARGUMENTS, fewest=6, bound=False)
    serves_all = given_engine is not None and given_engine.takes("llm_engine")
    if accepts(cls) and (serves_all or not takes_anything):
        return None
    plan = plan_call(cls, LEGACY_ARGS, fewest=len(LEGACY_ARGS))
    if plan is None:
        raise UserFileError(
            f"{place_of(cls)}: {NAME} is made without arguments, or with ({', '.join(LEGACY_ARGS)}), but takes "
            f"{inspect.signature(cls)}"
        )
    return plan


def _call(cls: Any, *, is_legacy: bool) -> CallPlan | None:
    """How to call its `execute`; None: it has our own `play`."""
    if _plays(cls):
        return None
    signature = f"execute(self, {', '.join(ARGUMENTS)})"
    if _lacks_execute(cls):
        if is_legacy and issubclass(cls, AgentExecutorBase):
            return CallPlan(by_name=ARGUMENTS[:3])
        raise UserFileError(f"{place_of(cls)}: {NAME} does not define {signature}")
    execute = cls.execute
    plan = plan_call(execute, ARGUMENTS, fewest=6, bound=False)
    if plan is None and is_legacy:
        plan = plan_call(execute, ARGUMENTS[:3], fewest=3, bound=False)
    if plan is None:
        raise UserFileError(
            f"{place_of(execute)}: execute takes {inspect.signature(execute)}, but is called as {signature}"
        )
    if not is_legacy and not plan.takes("llm_engine"):
        raise UserFileError(
            f"{place_of(execute)}: execute takes {inspect.signature(execute)}, without llm_engine, and {NAME} is made "
            f"without one; expected {signature}"
        )
    return plan


def _group_call(cls: Any) -> CallPlan | None:
    """How to call its `execute_group`; None: it has none."""
    execute_group = getattr(cls, "execute_group", None)
    if execute_group is None:
        return None
    plan = plan_call(execute_group, GROUP_ARGUMENTS, fewest=6, bound=False)
    if plan is None or not plan.takes("llm_engines") or not accepts(cls):
        raise UserFileError(
            f"{place_of(execute_group)}: execute_group takes {inspect.signature(execute_group)}, but is called as "
            f"execute_group(self, {', '.join(GROUP_ARGUMENTS)}), of one {NAME} that is made without arguments"
        )
    return plan


def _raise_engine_failure(error: AgentError, engines: Sequence[RecordingEngine]) -> None:
    """An error of the engine itself is not the fault of the code that asked it."""
    for engine in engines:
        if engine.failure is not None and error.__cause__ is engine.failure:
            raise engine.failure from None


def _lacks_execute(cls: type) -> bool:
    execute = getattr(cls, "execute", None)
    return execute is None or getattr(execute, "__isabstractmethod__", False)


def _plays(cls: type) -> bool:
    """Whether its `execute` is our own."""
    ours = (SingleTurnAgentExecutor.execute, MultiTurnAgentExecutor.execute, OpenAIServerAgentExecutor.execute)
    return getattr(cls, "execute", None) in ours


def _answer(returned: Any, queue: asyncio.Queue[Any]) -> Any:
    """The value that `execute` returned, or else the only one that it put on the queue."""
    if isinstance(returned, Mapping) or queue.empty():
        return returned
    if queue.qsize() > 1:
        raise BadValueError(f"execute put {queue.qsize()} results on result_queue for one episode")
    return queue.get_nowait()


class LegacyTurns(AgentExecutorBase):
    """The base class that executors of OpenRLHF before 0.9.1 expect: it keeps `LEGACY_ARGS` and plays the turns."""

    def __init__(
        self,
        agent_instance_cls: type,
        max_steps: int,
        max_length: int,
        llm_engine: Any,
        hf_tokenizer: Any,
        result_queue: Any,
    ) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue

    async def execute(  # type: ignore[override]
        self, prompt: str, label: Any, sampling_params: SamplingParams, images: Any = None
    ) -> dict[str, Any]:
        """Play one episode. Its dict is returned, and is put on the queue."""
        turns = MultiTurnAgentExecutor(self.agent_instance_cls)
        turns.turn_limit = self.max_steps
        result = await turns.execute(
            prompt, label, sampling_params, self.max_length, self.hf_tokenizer, self.llm_engine, images
        )
        await self.result_queue.put(result)
        return result


def with_legacy_turns(cls: type) -> type:
    """`cls` with `LegacyTurns` between it and `AgentExecutorBase`: an own `execute` stays, `super()` finds ours."""
    return type(cls.__name__, (cls, LegacyTurns), {"__module__": cls.__module__, "__doc__": cls.__doc__})


if TYPE_CHECKING:
    from openrlhf.agents.base import GroupPlayer

    _: type[GroupPlayer] = UserAgent
