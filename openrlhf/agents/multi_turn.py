"""Multi turn: the policy speaks, the user's environment answers, until it is done or a limit is met."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import Coroutine, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import AgentExecutorBase, Episode, FailedEpisode
from openrlhf.agents.host_worker import run_user
from openrlhf.agents.images import (
    BadImageError,
    EpisodeImages,
    begin_recording,
    check_readable,
    images_of,
    read_text,
)
from openrlhf.agents.results import Start, describe_episode, parse_reset, parse_step
from openrlhf.agents.user_calls import (
    AgentError,
    AgentResultError,
    check_instance_class,
    file_of,
    make_instance,
    place_of,
    users_code,
)
from openrlhf.agents.values import BadValueError
from openrlhf.types import FinishReason, SamplingParams, StepResult
from openrlhf.utils.randomness import derive_seed

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays episodes against a class with `reset` and `step`, one instance per episode.

    >>> class AgentExecutor(MultiTurnAgentExecutor):
    ...     def __init__(self):
    ...         super().__init__(AgentInstance)
    """

    turn_limit: int | None = None
    """Turns that an `execute` called by users' code may take; `play` is told."""

    def __init__(self, agent_instance_cls: type) -> None:
        check_instance_class(agent_instance_cls)
        self.agent_instance_cls = agent_instance_cls

    @property
    def group_play(self) -> str:
        """Whether a prompt's samples go on from one environment that was reset."""
        forks = getattr(self.agent_instance_cls, "fork_after_reset", False)
        return "one environment is reset for a prompt, and each sample goes on with a fork of it" if forks else ""

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
        """One episode. Each turn may take `sampling_params.max_tokens` tokens and the whole `max_length`.

        A first observation that leaves no room for a turn is cut from the left. Feedback becomes tokens when a turn
        follows it: what nobody reads is in the text only, and its images are nowhere.
        """
        environment = Environment(self.agent_instance_cls, hf_tokenizer)
        start = await environment.reset(prompt, label, images)
        return await self._play_on(
            environment, start, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images, max_steps
        )

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
        """All samples of a prompt: one environment is reset, and each sample goes on with a fork of it.

        A sample whose fork or `step` fails has failed alone. Where all of them have, the group has.
        """
        first = Environment(self.agent_instance_cls, hf_tokenizer)
        start = await first.reset(prompt, label, images)

        async def go_on(params: SamplingParams) -> Episode:
            environment = await first.fork()
            return await self._play_on(
                environment, start, prompt, label, params, max_length, hf_tokenizer, llm_engine, images, max_steps
            )

        return episodes_of(await _all([go_on(params) for params in sampling_params]))

    async def _play_on(
        self,
        environment: Environment,
        start: Start,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any,
        max_steps: int | None,
    ) -> Episode:
        params = sampling_params.copy()
        with environment.blamed_for_images("reset") if start.images else contextlib.nullcontext():
            first = _first_images(start, images or (), images_of(hf_tokenizer))
            read = await read_text(hf_tokenizer, start.observation, first)
            most = max_length - (params.max_tokens or 1)
            recorder = begin_recording(read, most=most, what="the first observation")
        observation_text = start.observation
        score, total, truncated = 0.0, 0.0, False
        extra_logs: dict[str, float] = {}
        seen = [*first]
        for turn in count():
            room = max_length - len(recorder)
            turn_params = _turn_params(params, room=room, turn=turn)
            generation = await llm_engine.generate(recorder.token_ids, turn_params, images=recorder.images)
            if not generation.token_ids:  # the episode would never end
                raise RuntimeError(f"the engine answered {len(recorder)} tokens with none ({generation.finish_reason})")
            recorder.append_action(generation)
            truncated = truncated or generation.finish_reason is FinishReason.LENGTH
            action_text = hf_tokenizer.decode(generation.token_ids, skip_special_tokens=False)
            result = await environment.step(observation_text, action_text, label, params)
            recorder.reward_turn(result.reward)
            total += result.reward
            score = total if result.score is None else result.score
            extra_logs |= result.extra_logs
            seen += result.images
            observation_text += action_text + result.feedback
            with environment.blamed_for_images("step"):
                check_readable(hf_tokenizer, result.images)
                if result.done:
                    break
                feedback = await read_text(hf_tokenizer, result.feedback, result.images)
            if turn + 1 == max_steps or len(recorder) + len(feedback.token_ids) >= max_length:
                truncated = True
                break
            recorder.append_observation(feedback.token_ids, feedback.images)
            if result.sampling_params is not None:
                # An episode's randomness goes on when parameters made from nothing name no seed.
                seed = params.seed if result.sampling_params.seed is None else result.sampling_params.seed
                params = result.sampling_params.copy(seed=seed, logprobs=params.logprobs, supports=params.supports)
        # Reward functions split the text where the prompt ends, also when `reset` has rewritten the prompt.
        begins_with_prompt = start.observation.startswith(prompt)
        return Episode(
            segments=(recorder.segment(),),
            text=observation_text if begins_with_prompt else prompt + observation_text[len(start.observation) :],
            truncated=truncated,
            reward=total,
            score=score,
            extra_logs=extra_logs,
            images=tuple(seen),
        )

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """The same as a dict, for users' executors that add to it."""
        episode = await self.play(
            prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images, max_steps=self.turn_limit
        )
        return describe_episode(episode, prompt=prompt, label=label)


async def _all(playing: Sequence[Coroutine[Any, Any, Episode]]) -> list[Episode | Exception]:
    """What became of each, at once. What is no fault of users' code or data ends the others, and is raised."""

    async def caught(one: Coroutine[Any, Any, Episode]) -> Episode | Exception:
        try:
            return await one
        except (AgentError, BadImageError) as error:
            return error

    tasks = [asyncio.ensure_future(caught(one)) for one in playing]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def episodes_of(results: Sequence[Episode | Exception]) -> list[Episode | FailedEpisode]:
    """The results of a group's samples. Raises the first failure where all have failed."""
    failures = [result for result in results if isinstance(result, Exception)]
    if failures and len(failures) == len(results):
        raise failures[0]
    return [FailedEpisode(error=str(one)) if isinstance(one, Exception) else one for one in results]


class Environment:
    """One instance of a user's class: what it is told, what it answers, its errors with file and line."""

    def __init__(self, cls: type, tokenizer: Any, instance: Any = None) -> None:
        self._cls = cls
        self._tokenizer = tokenizer
        self._file = file_of(cls)
        self._instance: Any = instance

    async def reset(self, prompt: str, label: Any, images: Any) -> Start:
        states = {"observation": prompt, "label": label}
        if images:
            reader = images_of(self._tokenizer)
            states["images"] = images if reader is None else await reader.pixels(images)
        with users_code(self._file):
            self._instance = await make_instance(self._cls)
            if not hasattr(self._instance, "reset"):
                return Start(prompt)
            returned = await run_user(self._instance.reset, states)
        try:
            return parse_reset(returned)
        except BadValueError as error:
            raise AgentResultError(f"{place_of(self._cls.reset)}: {error}") from None  # type: ignore[attr-defined]

    async def fork(self) -> Environment:
        """Another one in the same state, which goes its own way."""
        with users_code(self._file):
            fork = getattr(self._instance, "fork", None) or functools.partial(copy.deepcopy, self._instance)
            instance = await run_user(fork)
        if instance is None or instance is self._instance:
            what = "None: is a `return` missing?" if instance is None else "self: its samples would play one game"
            raise AgentResultError(f"{place_of(self._cls.fork)}: fork returned {what}")  # type: ignore[attr-defined]
        return Environment(self._cls, self._tokenizer, instance)

    @contextlib.contextmanager
    def blamed_for_images(self, method: str) -> Iterator[None]:
        """What is wrong with images that `method` has returned, or given no place in its text, is its doing."""
        try:
            yield
        except BadImageError as error:
            place = place_of(getattr(self._cls, method)) if hasattr(self._cls, method) else place_of(self._cls)
            raise AgentResultError(f"{place}: images of {method}: {error}") from None

    async def step(self, observation: str, action: str, label: Any, params: SamplingParams) -> StepResult:
        states = {
            "observation_text": observation,
            "action_text": action,
            "label": label,
            "sampling_params": params.copy(),
            "tokenizer": self._tokenizer,
        }
        with users_code(self._file):
            returned = await run_user(self._instance.step, states)
        try:
            return parse_step(returned)
        except BadValueError as error:
            raise AgentResultError(f"{place_of(self._cls.step)}: {error}") from None  # type: ignore[attr-defined]


def _first_images(start: Start, prompts: Sequence[Any], reader: EpisodeImages | None) -> Sequence[Any]:
    """The images of the first observation: those that `reset` returned; or the prompt's and then those, if that is how
    many marks its text has."""
    if start.images is None:
        return prompts
    marks = 0 if reader is None else reader.count_marks(start.observation)
    return [*prompts, *start.images] if marks == len(prompts) + len(start.images) else start.images


def _turn_params(params: SamplingParams, *, room: int, turn: int) -> SamplingParams:
    return params.copy(
        max_tokens=min(params.max_tokens or room, room),
        seed=None if params.seed is None else derive_seed(params.seed, "turn", turn),
        detokenize=bool(params.stop),  # `play` decodes
    )


if TYPE_CHECKING:
    from openrlhf.agents.base import GroupPlayer

    _: type[GroupPlayer] = MultiTurnAgentExecutor
