"""Plays episodes of worlds: the policy's tokens here, the world in its own process, messages between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from openrlhf.agents.base import Episode, FailedEpisode
from openrlhf.agents.chat_history import ChatHistory, ChatPrompt, Conversation, TemplateError
from openrlhf.agents.multi_turn import episodes_of
from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.results import after_prompt
from openrlhf.agents.tool_calls import THINK, Reply, parse_reply, split_thoughts
from openrlhf.agents.user_calls import AgentError, AgentResultError, UserFileError
from openrlhf.types import FinishReason, SamplingParams, Segment
from openrlhf.utils.randomness import derive_seed
from openrlhf.worlds.base import DrivenStart, GameStart, Start
from openrlhf.worlds.driven import Endpoint, play_driven
from openrlhf.worlds.games import (
    SELF,
    ModelSeat,
    ScriptedSeat,
    Seat,
    all_of,
    episode_of,
    no_games,
    opponent_of,
    play_game,
    seats_of_samples,
    uneven,
)
from openrlhf.worlds.opponents import LoadedModel, OpponentError, ServedModel, ServedSeat, load_model
from openrlhf.worlds.process import WorldDeath, WorldEpisode, WorldFailure, WorldPlan, WorldProcess

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine

MOST_SEED = 2**31
"""What a world is told is less: many packages take no more than 32 bits."""
MOST_DISTURBANCES = 100
"""How often an episode begins again because others have ended its process."""
T = TypeVar("T")


class DisturbedError(AgentError):
    """The process of an episode ended while it did something for others."""


class WorldPlayer:
    """A `Player` of the episodes of one world, in processes that its episodes share."""

    shared_loop = True
    """What it does waits for engines and worlds, so that no episode needs a thread of its own."""

    def __init__(self, plan: WorldPlan) -> None:
        """Starts one process, which finds out what is wrong with the settings. Raises UserFileError."""
        self._plan = plan
        self._processes = [plan.process(index) for index in range(plan.processes)]
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        try:
            about = self._processes[0].start_now()
        except WorldFailure as error:
            raise UserFileError(str(error)) from error
        self._endpoint = Endpoint()
        self._scripted: list[str] = about["opponents"]
        self._models: dict[str, LoadedModel | ServedModel] = {}
        self.group_play = self._seat_agents(about["agents"]) if about["agents"] > 1 else self._seat_none()
        """How the samples of a prompt are played together, for people; "": they are not."""

    def _seat_none(self) -> str:
        """Raises UserFileError where an opponent was named."""
        plan = self._plan.games
        for flag, name in (("--world.opponent", plan.opponent), ("--world.eval_opponent", plan.eval_opponent)):
            if name not in (None, SELF):
                raise UserFileError(no_games(self._plan.target, flag, str(name)))
        return ""

    def _seat_agents(self, agents: int) -> str:
        """Raises UserFileError where the policy and its opponents cannot play games of so many agents."""
        plan = self._plan.games
        try:
            for name in filter(None, (plan.opponent, plan.eval_opponent)):
                self._opponent(name)
        except OpponentError as error:
            raise UserFileError(str(error)) from error
        for flag, samples in plan.samples if plan.opponent == SELF else ():
            if samples % agents:
                raise UserFileError(uneven(agents, samples, flag))
        for flag, samples in plan.samples[:1]:
            if samples < agents * plan.members:
                raise UserFileError(
                    f"{flag} {samples}: games have {agents} agents, and each sample is compared with others of the "
                    f"same agent: give {agents * plan.members} or more"
                )
        if plan.opponent == SELF:
            return f"the samples of a prompt play games of {agents} agents among themselves"
        return f"each sample plays one agent of a game, against {plan.opponent}"

    def _opponent(self, name: str) -> LoadedModel | ServedModel | None:
        """The model of this name; None: it is the policy, or a player of the world's own. Raises OpponentError."""
        if name == SELF or name in self._scripted:
            return None
        if name not in self._models:
            if name.startswith(("http://", "https://")):
                self._models[name] = ServedModel(name)
            elif Path(name).expanduser().is_dir():
                self._models[name] = load_model(name)
            else:
                there = ", ".join([SELF, *self._scripted])
                raise OpponentError(
                    f"--world.opponent {name}: there is no such folder; of this world's players there are {there}; "
                    "a server is named by its URL, http://…/v1"
                )
        return self._models[name]

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
        """One episode, in at most `max_length` tokens and `max_steps` turns.

        First messages that leave no room for a turn lose their beginning. Where a limit ends the episode, the world is
        not told more than that it is over.
        """
        told = (prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, max_steps)
        return await self._undisturbed(functools.partial(self._play_once, *told))

    async def _undisturbed(self, play: Callable[[], Awaitable[T]]) -> T:
        """Play, and again where the process has ended under a call of others: that is no attempt of this episode's."""
        disturbed = 0
        while True:
            try:
                return await play()
            except DisturbedError as error:
                disturbed += 1
                if self._closed or disturbed > MOST_DISTURBANCES:
                    raise AgentError(str(error)) from error

    async def _play_once(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        max_steps: int | None,
    ) -> Episode:
        async with self._begun(label, sampling_params) as world:
            most = min(max_length, llm_engine.max_model_len)
            if isinstance(world.start, DrivenStart):
                return await play_driven(
                    world,
                    self._endpoint,
                    prompt,
                    sampling_params=sampling_params,
                    max_length=most,
                    tokenizer=hf_tokenizer,
                    engine=llm_engine,
                    max_steps=max_steps,
                )
            if not isinstance(world.start, Start):
                raise AgentResultError(
                    f"{self._plan.target}: a game of several agents began, but World has no `agents`"
                )
            dialogue = Dialogue(
                world.start,
                sampling_params=sampling_params,
                max_length=most,
                tokenizer=hf_tokenizer,
                engine=llm_engine,
            )
            return await _play(world, dialogue, prompt, max_steps=max_steps)

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
        """All samples of a prompt. In a game of several agents they play each other, or each an opponent; in a game for
        one each plays by itself. `max_steps` holds for each agent."""
        opponent = opponent_of(label, self._plan.games.opponent)

        async def alone(params: SamplingParams) -> Episode:
            return await self.play(
                prompt, label, params, max_length, hf_tokenizer, llm_engine, images, max_steps=max_steps
            )

        async def game(policys: Sequence[str], params: Sequence[SamplingParams]) -> list[Episode | FailedEpisode]:
            async with self._begun(label, params[0]) as world:
                assert isinstance(world.start, GameStart)
                seats: dict[str, Seat] = {
                    agent: self._opponents_seat(opponent, world, agent, params[0], max_length)
                    for agent in world.start.agents
                    if agent not in policys
                }
                own = {}
                for agent, sampled in zip(policys, params, strict=True):
                    own[agent] = seats[agent] = ModelSeat(
                        functools.partial(
                            Dialogue,
                            sampling_params=sampled,
                            max_length=min(max_length, llm_engine.max_model_len),
                            tokenizer=hf_tokenizer,
                            engine=llm_engine,
                        )
                    )
                result = await play_game(world, seats, max_steps=max_steps)
                return [episode_of(agent, own[agent], result, prompt) for agent in policys]

        agents = await self._undisturbed(functools.partial(self._agents_of, label, sampling_params[0]))
        failures = (AgentError, AgentResultError)
        if not agents:
            return episodes_of(await all_of([alone(params) for params in sampling_params], failures))
        try:
            seatings = seats_of_samples(agents, len(sampling_params), label, self_play=opponent == SELF)
        except ValueError as error:
            raise AgentResultError(str(error)) from None
        playing, taken = [], 0
        for policys in seatings:
            params = sampling_params[taken : taken + len(policys)]
            playing.append(self._undisturbed(functools.partial(game, policys, params)))
            taken += len(policys)
        played: list[Any] = []
        for policys, games in zip(seatings, await all_of(playing, failures), strict=True):
            played += [games] * len(policys) if isinstance(games, Exception) else games
        if all(isinstance(one, Exception) for one in played):
            raise played[0]
        return [
            FailedEpisode(error=str(one), agent=agent) if isinstance(one, Exception) else one
            for one, agent in zip(played, (agent for policys in seatings for agent in policys), strict=True)
        ]

    async def _agents_of(self, label: Any, params: SamplingParams) -> Sequence[str]:
        """Those of the game that begins with this label; none: it is an episode of one agent."""
        async with self._begun(label, params) as world:
            return world.start.agents if isinstance(world.start, GameStart) else ()

    def _opponents_seat(
        self, name: str, world: WorldEpisode, agent: str, params: SamplingParams, max_length: int
    ) -> Seat:
        try:
            model = self._opponent(name)
        except OpponentError as error:
            raise AgentResultError(str(error)) from error
        seed = None if params.seed is None else derive_seed(params.seed, "opponent", agent)
        params = params.copy(seed=seed, logprobs=False)
        if isinstance(model, ServedModel):
            return ServedSeat(model, params)
        if model is None:
            return ScriptedSeat(world, agent, name)
        return ModelSeat(
            functools.partial(
                Dialogue,
                sampling_params=params,
                max_length=min(max_length, model.engine.max_model_len),
                tokenizer=model.tokenizer,
                engine=model.engine,
            )
        )

    @contextlib.asynccontextmanager
    async def _begun(self, label: Any, params: SamplingParams) -> AsyncGenerator[WorldEpisode]:
        """An episode, and the errors of what is done with it as those of an agent."""
        try:
            world = await self._least_busy().begin(label, seed=_seed(params))
            try:
                yield world
            finally:
                await self._close(world)
        except WorldFailure as error:
            if isinstance(error, WorldDeath) and error.others:
                raise DisturbedError(str(error)) from error
            raise (AgentError if error.retry else AgentResultError)(str(error)) from error
        except OpponentError as error:
            raise AgentError(str(error)) from error
        except TemplateError as error:
            raise AgentResultError(f"{self._plan.target}: {error}") from error

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        for process in self._processes:
            process.close()

    def _least_busy(self) -> WorldProcess:
        return min(self._processes, key=lambda process: process.playing)

    async def _close(self, world: WorldEpisode) -> None:
        """An episode that is given up does not wait until its world has said good-bye."""
        closing = asyncio.ensure_future(world.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            await closing


async def _play(world: WorldEpisode, dialogue: Dialogue, prompt: str, *, max_steps: int | None) -> Episode:
    total = score = 0.0
    logs: dict[str, float] = {}
    turns = 0
    while True:
        said = await dialogue.answer()
        if said is None:
            break
        turns += 1
        turn = await world.step(said)
        dialogue.reward(turn.reward)
        total += turn.reward
        score = total if turn.score is None else turn.score
        logs |= turn.logs
        if turn.done:
            break
        if turns == max_steps:
            dialogue.truncated = True
            break
        dialogue.read(turn.messages)
    return Episode(
        segments=dialogue.segments(),
        text=dialogue.text(prompt),
        truncated=dialogue.truncated,
        reward=total,
        score=score,
        extra_logs=logs,
    )


class Dialogue:
    """What one agent reads and says in an episode: messages to a world, tokens to the engine and to the trainer.

    The tokens that the policy has sampled are kept as they are; only what is new is rendered and tokenised, as the chat
    template puts it after them. Where the template shows what has been said otherwise than it was said (it leaves
    thoughts of earlier turns out, say), what follows is another segment.
    """

    def __init__(
        self, start: Start, *, sampling_params: SamplingParams, max_length: int, tokenizer: Any, engine: Engine
    ) -> None:
        """
        Args:
            start: what the agent reads first, and its tools.
            sampling_params: of a turn, with the seed of the episode.
            max_length: most tokens of what is read and said.
        """
        self.truncated = False
        """Whether a limit has cut an answer, or the dialogue, short."""
        self.turns = 0
        self._messages: list[Mapping[str, Any]] = list(start.messages)
        self._tools = list(start.tools) if start.tools else None
        self._params = sampling_params
        self._max_length = max_length
        self._tokenizer = tokenizer
        self._engine = engine
        self._history = ChatHistory(tokenizer)
        self._recorders: list[TokenRecorder] = []
        self._first_text = ""

    def read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What the agent reads before its next answer."""
        self._messages += messages

    async def answer(self) -> dict[str, Any] | None:
        """What the policy says next, as worlds read it (`base.Episode.step`); None where there is no room for that: the
        dialogue ends as if it had been cut. Raises TemplateError."""
        prompt = self._history.prompt(Conversation(list(self._messages), self._tools))
        if not self._recorders:
            most = max(1, self._max_length - (self._params.max_tokens or 1))
            prompt = prompt._replace(token_ids=prompt.token_ids[-most:])
            self._first_text = prompt.text
        room = self._max_length - len(prompt.token_ids)
        if room < 1:
            self.truncated = True
            return None
        params = self._params.copy(
            max_tokens=min(self._params.max_tokens or room, room),
            seed=None if self._params.seed is None else derive_seed(self._params.seed, "turn", self.turns),
            skip_special_tokens=self._tools is None,  # calls may be spelled with special tokens
            detokenize=True,
        )
        recorder = self._recorder(prompt)
        generation = await self._engine.generate(recorder.token_ids, params)
        if not generation.token_ids:
            raise RuntimeError(f"the engine answered {len(recorder)} tokens with none ({generation.finish_reason})")
        recorder.append_action(generation)
        self.turns += 1
        cut = generation.finish_reason is FinishReason.LENGTH
        self.truncated = self.truncated or cut
        reply = parse_reply(generation.text) if self._tools else Reply(generation.text)
        self._history.remember(prompt, generation.token_ids, reply)
        said = self._as_message(reply)
        self._messages.append(said)
        thoughts = split_thoughts(reply.content, begun=prompt.text.rstrip().endswith(THINK))
        told: dict[str, Any] = {
            "role": "assistant",
            "content": reply.content if thoughts is None else thoughts.answer,
            "truncated": cut,
            "text": self._tokenizer.decode(generation.token_ids, skip_special_tokens=False),
        }
        if thoughts is not None:
            told["thoughts"] = thoughts.thoughts
        if reply.tool_calls:
            told["tool_calls"] = [
                {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                for call in said["tool_calls"]
            ]
        return told

    def reward(self, reward: float) -> None:
        """The last answer has earned it."""
        self._recorders[-1].reward_turn(reward)

    def segments(self) -> tuple[Segment, ...]:
        """All that was read and said."""
        return tuple(recorder.segment() for recorder in self._recorders)

    def text(self, prompt: str) -> str:
        """The text of `prompt`, and what followed it. A prompt that was no more than a stand-in stays where it was."""
        before = self._first_text if self._first_text.startswith(prompt) else prompt
        after = after_prompt(self._recorders[-1].segment(), self._tokenizer)
        return before + str(self._tokenizer.decode(after, skip_special_tokens=False))

    def _recorder(self, prompt: ChatPrompt) -> TokenRecorder:
        """The one that goes on with these tokens. The last one has the last answer, in which rewards are written."""
        if self._recorders:
            last = self._recorders[-1]
            if prompt.token_ids[: len(last)] == last.token_ids:
                last.append_observation(prompt.token_ids[len(last) :])
                return last
        self._recorders.append(TokenRecorder(prompt.token_ids))
        return self._recorders[-1]

    def _as_message(self, reply: Reply) -> dict[str, Any]:
        """As chat templates read it."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{self.turns}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(reply.tool_calls, start=1)
            ]
        return message


def _seed(params: SamplingParams) -> int:
    """The world's own randomness of a sample; that of the policy has others."""
    seed = random.getrandbits(31) if params.seed is None else derive_seed(params.seed, "world")
    return seed % MOST_SEED


if TYPE_CHECKING:
    from openrlhf.agents.base import GroupPlayer

    _: type[GroupPlayer] = WorldPlayer
