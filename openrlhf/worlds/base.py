"""What a world is: the contract between an adapter, which runs beside its package, and the run that trains on it.

A file of a world has a class `World`. It lives in a *world process* with a Python of its own (`server.py`), in which
neither torch nor anything else of the run is installed. So this file imports the standard library alone, and an adapter
also this file and, only when a world is made, the world's own package.

>>> class World:
...     def __init__(self, settings): ...
...     def records(self, *, count, seed):
...         yield {"input": "Guess my number, from 1 to 9.", "label": 7}
...     def begin(self, label, *, seed):
...         return Guessing(label)

>>> class Guessing:
...     def __init__(self, number):
...         self.number = number
...         self.start = Start([{"role": "user", "content": "Guess my number, from 1 to 9."}])
...     def step(self, message):
...         right = message["content"].strip() == str(self.number)
...         return Turn(reward=float(right), done=right, messages=[] if right else [{"role": "user", "content": "No."}])
...     def close(self): ...

An episode may also be a *game* of several agents (`Game`: who moves next is the world's to say), or *drive* itself
(`Driven`: its own loop asks the policy at a URL, as it would ask OpenAI).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
ROLES = ("system", "user", "assistant", "tool")


class WorldError(Exception):
    """A world, or a task of it, cannot be used as it was asked for. The text says why, for people: which names there
    are, which option is wrong. Another attempt gives the same."""


@dataclass(frozen=True)
class WorldSettings:
    """How a run asks for a world."""

    tasks: tuple[tuple[str, float], ...] = ()
    """Names and weights of `--world.tasks`, in its order. What a name means is the world's business."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`--world.options key=value,…`: what only this world knows. Values are JSON."""
    seed: int = 0
    """Of the run."""
    held_out: tuple[int, int] | None = None
    """The records (count, seed) on which the run evaluates. A world of which other seeds give the same questions leaves
    these out of what it gives for training."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.tasks]
        if len(set(names)) != len(names):
            raise WorldError(f"a task is named twice: {', '.join(names)}")
        for name, weight in self.tasks:
            if not math.isfinite(weight) or weight <= 0:
                raise WorldError(f"the weight of task {name} must be a positive number, got {weight}")

    def option(self, name: str, default: Any, *, choices: Sequence[Any] = ()) -> Any:
        """The option, or `default`. Raises WorldError when it has another type than the default, or is none of
        `choices`."""
        value = self.options.get(name, default)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if default is not None and type(value) is not type(default):
            raise WorldError(f"--world.options {name}={shown(value)}: expected a {type(default).__name__}")
        if choices and value not in choices:
            raise WorldError(f"--world.options {name}={shown(value)}: there are {', '.join(map(str, choices))}")
        return value

    def check_options(self, known: Sequence[str]) -> None:
        """Raises WorldError when there is an option that the world does not know."""
        unknown = [name for name in self.options if name not in known]
        if unknown:
            there = ", ".join(known) or "none"
            raise WorldError(f"--world.options {unknown[0]}: this world has no such option; it has {there}")

    def as_json(self) -> dict[str, Any]:
        return {
            "tasks": [list(task) for task in self.tasks],
            "options": dict(self.options),
            "seed": self.seed,
            "held_out": None if self.held_out is None else list(self.held_out),
        }

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> WorldSettings:
        tasks = tuple((str(name), float(weight)) for name, weight in told["tasks"])
        count_and_seed = told.get("held_out")
        return WorldSettings(
            tasks=tasks,
            options=dict(told["options"]),
            seed=int(told["seed"]),
            held_out=None if count_and_seed is None else (int(count_and_seed[0]), int(count_and_seed[1])),
        )


@dataclass(frozen=True)
class Start:
    """What the policy reads first."""

    messages: Sequence[Mapping[str, Any]]
    """In the form of chat templates: `role`, `content`. The last one is the one it answers."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that it may call, in OpenAI's schema. They are the same for the whole episode."""

    def __post_init__(self) -> None:
        check_messages(self.messages, what="the first messages")
        if not self.messages:
            raise ValueError("an episode must begin with at least one message")

    def as_json(self) -> dict[str, Any]:
        return {"messages": list(self.messages), "tools": None if self.tools is None else list(self.tools)}

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> Start:
        return Start(told["messages"], told["tools"])


@dataclass(frozen=True)
class Turn:
    """A world's answer to what the policy said."""

    messages: Sequence[Mapping[str, Any]] = ()
    """What the policy reads next; none, where the episode is over. Roles `user`, `tool` and `system`."""
    reward: float = 0.0
    """Earned by this turn alone. The episode's reward is the sum."""
    done: bool = False
    score: float | None = None
    """Success in [0, 1]; None: the rewards so far. The last turn's counts."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """Of each name the last one counts."""

    def __post_init__(self) -> None:
        check_messages(self.messages, what="the messages of a turn")
        if not self.done and not self.messages:
            raise ValueError("a turn that does not end the episode must have a message for the policy")
        for name, value in {"reward": self.reward, "score": self.score, **self.logs}.items():
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise ValueError(f"{name} of a turn must be a finite number, got {shown(value)}")

    def as_json(self) -> dict[str, Any]:
        return {
            "messages": list(self.messages),
            "reward": float(self.reward),
            "done": bool(self.done),
            "score": None if self.score is None else float(self.score),
            "logs": {name: float(value) for name, value in self.logs.items()},
        }

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> Turn:
        return Turn(**told)


@dataclass(frozen=True)
class GameTurn:
    """Where a game of several agents stands: whose turn it is, and what has been earned."""

    agent: str = ""
    """Who speaks next; "": the game is over."""
    messages: Sequence[Mapping[str, Any]] = ()
    """What this agent reads first: all that is new to it since it spoke last. Roles `user`, `tool` and `system`."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By agent, earned by this turn alone. The reward of an agent is the sum of its own."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """By agent, success in [0, 1]; who has none, has the rewards so far. The last one counts."""
    logs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By agent. Of each name the last one counts."""

    def __post_init__(self) -> None:
        check_messages(self.messages, what="the messages of a turn")
        if bool(self.agent) != bool(self.messages):
            raise ValueError("a turn has messages for the agent that speaks next, and neither where the game is over")
        numbers = {f"the reward of {agent}": value for agent, value in self.rewards.items()}
        numbers |= {f"the score of {agent}": value for agent, value in self.scores.items()}
        numbers |= {f"{name} of {agent}": value for agent, logs in self.logs.items() for name, value in logs.items()}
        for name, value in numbers.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {shown(value)}")

    def as_json(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "messages": list(self.messages),
            "rewards": {agent: float(value) for agent, value in self.rewards.items()},
            "scores": {agent: float(value) for agent, value in self.scores.items()},
            "logs": {agent: {name: float(v) for name, v in logs.items()} for agent, logs in self.logs.items()},
        }

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> GameTurn:
        return GameTurn(**told)


@dataclass(frozen=True)
class GameStart:
    """How a game of several agents begins."""

    agents: Sequence[str]
    """Their names. They are roles: samples are compared with those of the same name, so `player 0` is a better name
    than that of who plays it."""
    turn: GameTurn

    def __post_init__(self) -> None:
        if len(self.agents) < 2 or len(set(self.agents)) != len(self.agents) or not all(self.agents):
            raise ValueError(f"a game has two or more agents with a name each, got {shown(self.agents)}")
        if self.turn.agent not in self.agents:
            raise ValueError(f"a game begins with the turn of {', '.join(self.agents)}, not of {self.turn.agent!r}")

    def as_json(self) -> dict[str, Any]:
        return {"agents": list(self.agents), "turn": self.turn.as_json()}

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> GameStart:
        return GameStart(told["agents"], GameTurn.of_json(told["turn"]))


@dataclass(frozen=True)
class DrivenStart:
    """An episode that drives itself begins when it is told to `run`."""

    def as_json(self) -> dict[str, Any]:
        return {"driven": True}


@dataclass(frozen=True)
class Outcome:
    """How an episode that drove itself has ended."""

    reward: float
    score: float | None = None
    """Success in [0, 1]; None: the reward."""
    logs: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, "score": self.score, **self.logs}.items():
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise ValueError(f"{name} of an outcome must be a finite number, got {shown(value)}")

    def as_json(self) -> dict[str, Any]:
        return {
            "reward": float(self.reward),
            "score": None if self.score is None else float(self.score),
            "logs": {name: float(value) for name, value in self.logs.items()},
        }

    @staticmethod
    def of_json(told: Mapping[str, Any]) -> Outcome:
        return Outcome(**told)


AnyStart = Start | GameStart | DrivenStart


def start_of_json(told: Mapping[str, Any]) -> AnyStart:
    """Which of the three an episode is."""
    if "agents" in told:
        return GameStart.of_json(told)
    return DrivenStart() if "driven" in told else Start.of_json(told)


class Episode(Protocol):
    """One episode under way."""

    start: Start

    def step(self, message: Mapping[str, Any]) -> Turn:
        """Answer the policy. `message` is {"role": "assistant", "content": text, "truncated": bool, "text": str}, and
        where it called tools {"tool_calls": [{"id", "name", "arguments": dict}]}.

        `content` is without special tokens, without the calls, and without the thoughts that the policy began with
        (`<think>…</think>`), which are under "thoughts" where it had some; `text` is all that was sampled, decoded with
        special tokens; `truncated` says that a limit of tokens cut it short.
        """
        ...

    def close(self) -> None:
        """The episode is over, also where a limit ended it. Called once."""
        ...


class Game(Protocol):
    """An episode of several agents, each with a conversation of its own. The policy plays them all, or one of them
    against an opponent."""

    start: GameStart

    def step(self, agent: str, message: Mapping[str, Any]) -> GameTurn:
        """`agent`, whose turn it was, says this. `message` is that of `Episode.step`."""
        ...

    def scripted(self, agent: str, name: str) -> str:
        """What the world's own player `name`, one of `World.opponents`, says in place of `agent`, whose turn it is.
        It is then given to `step`."""
        ...

    def close(self) -> None:
        """The game is over, also where a limit ended it. Called once."""
        ...


class Driven(Protocol):
    """An episode whose own loop asks the policy."""

    start: DrivenStart

    def run(self, base_url: str, api_key: str, model: str) -> Outcome:
        """Play it. At `base_url` the policy answers as OpenAI would (`{base_url}/chat/completions`); the URL is this
        episode's own, and what is asked there is what the policy is trained on."""
        ...

    def close(self) -> None: ...


class World(Protocol):
    """An adapter's class `World`. One is made in each world process.

    Methods are called one after another, in the main thread, unless the class says `THREADS = True`: then calls of
    different episodes come from several threads at once.

    A world with games says so with an attribute `agents`, the most that one of its games has, and may have
    `opponents`, the names of players of its own.
    """

    def __init__(self, settings: WorldSettings) -> None:
        """Import the package and check the settings. Raises WorldError."""

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Prompts of a run, a pure function of (settings, count, seed). Each is a dict:

        input       text, or a list of messages: what the policy reads first, or a stand-in where that is only known
                    when the episode has begun
        label       JSON: all that `begin` needs, so that all samples of a prompt begin alike
        datasource  the task's name
        difficulty  int, optional: the level at which curricula find it
        """
        ...

    def begin(self, label: Any, *, seed: int) -> Episode | Game | Driven:
        """An episode of the record with this label. `seed` is this sample's own: what all samples of a prompt share is
        in the label. Those of a game share the one game, with the seed of the first."""
        ...


def check_messages(messages: Sequence[Mapping[str, Any]], *, what: str) -> None:
    """Raises ValueError that names what is wrong."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise ValueError(f"{what} must be a list of messages, got {shown(messages)}")
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES or "content" not in message:
            expected = f'{{"role": {"|".join(ROLES)}, "content": …}}'
            raise ValueError(f"{what}: a message is {expected}, got {shown(message)}")


class LoopThread:
    """An event loop in a thread of its own, for packages whose clients are asynchronous and whose connections belong to
    one loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="event loop", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there, and wait for what comes of it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


def in_passes(records: Sequence[Any], *, count: int, seed: int) -> Iterator[Any]:
    """`count` of the records: each once, in an order that the seed draws, before any comes again."""
    rng = random.Random(seed)
    left: list[Any] = []
    for _ in range(count):
        if not left:
            left = rng.sample(records, len(records))
        yield left.pop()


def tool_message(call: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """What the policy reads after one of its `tool_calls`."""
    return {"role": "tool", "content": answer, "name": call["name"], "tool_call_id": call["id"]}


def unreadable_call(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the policy is told where its answer has the beginning of a call and no call that could be read, so that it
    may try again; None: it has not."""
    if message.get("tool_calls") or "<tool_call>" not in str(message.get("content", "")):
        return None
    expected = '{"name": …, "arguments": {…}}'
    return {"role": "tool", "content": f"error: the call could not be read: between its marks must stand {expected}"}


def shown(value: Any) -> str:
    """A value for messages, on one line, cut when long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:119] + "…"


def parse_tasks(text: str) -> tuple[tuple[str, float], ...]:
    """`chain_sum,gcd:2` as (("chain_sum", 1.0), ("gcd", 2.0)). Raises WorldError."""
    tasks = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, weight = part.rpartition(":")
        try:
            tasks.append((name.strip(), float(weight)) if colon else (part, 1.0))
        except ValueError:
            tasks.append((part, 1.0))  # a colon of the name's own
    return WorldSettings(tasks=tuple(tasks)).tasks


def parse_options(text: str) -> dict[str, Any]:
    """`rows=4,slippery=false,name=lake` with each value as JSON where it is JSON, else as text. Raises WorldError.

    A comma inside brackets or quotes belongs to a value: `sizes=[4,8],goal={"a": 1}`.
    """
    options: dict[str, Any] = {}
    for part in _split(text):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise WorldError(f"--world.options {part.strip()}: expected key=value")
        try:
            options[name.strip()] = json.loads(value, parse_constant=_refuse)
        except ValueError:
            options[name.strip()] = value.strip()
    return options


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _split(text: str) -> Iterator[str]:
    depth, quoted, part = 0, False, ""
    for at, character in enumerate(text):
        if character == '"' and text[at - 1 : at] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quoted and depth == 0:
            yield part
            part = ""
        else:
            part += character
    if part.strip():
        yield part
