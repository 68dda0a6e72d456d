"""Games of several agents: the policy plays them all, or one of them against an opponent."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from openrlhf.agents.base import Episode, FailedEpisode
from openrlhf.worlds.base import GameStart, Start

if TYPE_CHECKING:
    from openrlhf.worlds.executor import Dialogue
    from openrlhf.worlds.process import WorldEpisode

SELF = "self"
"""The opponent of the policy that is the policy."""
OPPONENT = "opponent"
"""The key of a label that names the record's own opponent."""


class GamePlan(NamedTuple):
    """How the policy meets others in games."""

    opponent: str = SELF
    """`self`; the name of a player of the world's own; a folder with a model; or the URL of an OpenAI-compatible
    server."""
    eval_opponent: str | None = None
    """The same for records of evaluations, which name it (`OPPONENT`)."""
    samples: tuple[tuple[str, int], ...] = ()
    """Flags with the numbers of samples of a prompt that play among themselves."""
    members: int = 1
    """Samples of one agent that are compared with each other at least."""


class Seat(Protocol):
    """Who speaks for one agent of a game."""

    def read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """What the agent reads before its next answer."""
        ...

    async def answer(self) -> Mapping[str, Any] | None:
        """What it says, as worlds read it; None where there is no room for that."""
        ...


class ModelSeat:
    """A model: the policy, or another one."""

    def __init__(self, begin: Callable[[Start], Dialogue]) -> None:
        self._begin = begin
        self.dialogue: Dialogue | None = None
        """None until it has something to read."""
        self.earned = 0.0
        """Before its first answer."""

    @property
    def truncated(self) -> bool:
        return self.dialogue is not None and self.dialogue.truncated

    def read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if self.dialogue is None:
            self.dialogue = self._begin(Start(messages))
        else:
            self.dialogue.read(messages)

    async def answer(self) -> Mapping[str, Any] | None:
        assert self.dialogue is not None
        said = await self.dialogue.answer()
        if said is not None and self.earned:
            self.reward(self.earned)
            self.earned = 0.0
        return said

    def reward(self, reward: float) -> None:
        """Its last answer has earned it; else its first one will have."""
        if self.dialogue is not None and self.dialogue.turns:
            self.dialogue.reward(reward)
        else:
            self.earned += reward


class ScriptedSeat:
    """A player of the world's own."""

    def __init__(self, game: WorldEpisode, agent: str, name: str) -> None:
        self._game = game
        self._agent = agent
        self._name = name

    def read(self, messages: Sequence[Mapping[str, Any]]) -> None:
        pass

    async def answer(self) -> Mapping[str, Any]:
        text = await self._game.call("scripted", self._agent, self._name)
        return {"role": "assistant", "content": text, "text": text, "truncated": False}


class Result(NamedTuple):
    """What has become of a game."""

    rewards: dict[str, float]
    scores: dict[str, float]
    logs: dict[str, dict[str, float]]
    cut: bool
    """Whether a limit ended it."""


async def play_game(game: WorldEpisode, seats: Mapping[str, Seat], *, max_steps: int | None) -> Result:
    """Play to the end; or until an agent has no room for an answer, or has given `max_steps` of them. Raises
    WorldFailure."""
    assert isinstance(game.start, GameStart)
    turn = game.start.turn
    result = Result(dict.fromkeys(seats, 0.0), {}, {agent: {} for agent in seats}, cut=False)
    turns = dict.fromkeys(seats, 0)
    while turn.agent:
        agent = turn.agent
        if turns[agent] == max_steps:
            return result._replace(cut=True)
        seats[agent].read(turn.messages)
        said = await seats[agent].answer()
        if said is None:
            return result._replace(cut=True)
        turns[agent] += 1
        turn = await game.move(agent, said)
        for name, reward in turn.rewards.items():
            result.rewards[name] += reward
            if isinstance(seat := seats[name], ModelSeat):
                seat.reward(reward)
        result.scores.update(turn.scores)
        for name, logs in turn.logs.items():
            result.logs[name].update(logs)
    return result


def episode_of(agent: str, seat: ModelSeat, result: Result, prompt: str) -> Episode | FailedEpisode:
    """What one agent has played."""
    if seat.dialogue is None or not seat.dialogue.turns:
        return FailedEpisode(error=f"the game was over before {agent} had spoken", agent=agent)
    reward = result.rewards[agent]
    return Episode(
        segments=seat.dialogue.segments(),
        text=seat.dialogue.text(prompt),
        truncated=seat.truncated or result.cut,
        reward=reward,
        score=result.scores.get(agent, reward),
        extra_logs=result.logs[agent],
        agent=agent,
    )


def seats_of_samples(agents: Sequence[str], samples: int, label: Any, *, self_play: bool) -> list[list[str]]:
    """For each game the agents that the policy plays, one sample each.

    Against an opponent samples take the seats in turn, and prompts begin with different ones. Raises ValueError where
    self-play does not come out even.

    >>> seats_of_samples(["a", "b"], 4, None, self_play=True)
    [['a', 'b'], ['a', 'b']]
    """
    if self_play:
        if samples % len(agents):
            raise ValueError(uneven(len(agents), samples))
        return [list(agents)] * (samples // len(agents))
    first = zlib.crc32(json.dumps(label, sort_keys=True).encode())
    return [[agents[(first + sample) % len(agents)]] for sample in range(samples)]


def uneven(agents: int, samples: int, flag: str = "--rollout.n_samples_per_prompt") -> str:
    """Why so many samples cannot play a game of so many agents among themselves."""
    return (
        f"{flag} {samples}: the samples of a prompt play games of {agents} agents among themselves, so their number "
        f"must be a multiple of {agents}; or give --world.opponent, whom each sample then plays"
    )


def no_games(target: str, flag: str, name: str) -> str:
    """Why nobody can play against the policy."""
    return f"{flag} {name}: {target} has no games of several agents: leave the flag out"


def opponent_of(label: Any, default: str) -> str:
    """A record may name its own."""
    named = label.get(OPPONENT) if isinstance(label, Mapping) else None
    return str(named or default)


async def all_of(playing: Sequence[Any], failures: tuple[type[Exception], ...]) -> list[Any]:
    """The result of each, or its failure. Anything else that one raises ends the others."""

    async def caught(one: Any) -> Any:
        try:
            return await one
        except failures as error:
            return error

    tasks = [asyncio.ensure_future(caught(one)) for one in playing]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
