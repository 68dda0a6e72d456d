"""Gymnasium's environments with discrete actions, as text.

    --world.tasks FrozenLake-v1,Taxi-v4:2     environments by id, with weights; unset: FrozenLake-v1
    --world.options FrozenLake-v1.is_slippery=false     an argument of `gymnasium.make`
                    steps=100                 turns after which an episode is cut; unset: the environment's own limit
                    lake=4                    FrozenLake: each record has a lake of this size of its own, made at random
                    brief=false               true: the actions are listed in the first message alone
                    penalty=0.0               the reward of an answer in which no action is found; it is no step

The policy reads what it sees and which actions there are, and answers with one in brackets: `[left]`. The last brackets
of an answer that hold an action's name or number count; without brackets, an answer that is nothing but an action.

`SHOWN` has words for the environments that are usual; of others a picture in text (`render_mode="ansi"`) is shown where
there is one, else the observation as numbers with the bounds of its space, and actions have numbers.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.worlds.base import Start, Turn, WorldError, WorldSettings, shown

MOST_NUMBERS = 64
"""Of an observation that is shown as numbers."""
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Shown(NamedTuple):
    """How an environment looks to someone who reads."""

    rules: str
    actions: tuple[str, ...]
    see: Callable[[Any, Any], str] | None = None
    """From the environment, unwrapped, and its observation; None: its picture in text."""
    success: Callable[[float, bool], float] | None = None
    """From the sum of rewards, and whether the end was the environment's own, to a score in [0, 1]; None: the sum."""


def _frozen_lake(env: Any, state: Any) -> str:
    rows = [[cell.decode() for cell in row] for row in env.desc]
    row, column = divmod(int(state), env.ncol)
    rows[row][column] = "P"
    return "\n".join(" ".join(row) for row in rows)


def _cliff(env: Any, state: Any) -> str:
    height, width = env.shape
    rows = [["."] * width for _ in range(height)]
    rows[-1] = ["S", *["C"] * (width - 2), "G"]
    row, column = divmod(int(state), width)
    rows[row][column] = "P"
    return "\n".join(" ".join(row) for row in rows)


def _taxi(env: Any, state: Any) -> str:
    places = ("red", "green", "yellow", "blue")
    row, column, passenger, goal = env.decode(int(state))
    lines = [bytes(line).decode() if not isinstance(line, str) else line for line in map(_joined, env.desc)]
    at = 2 * column + 1
    lines[row + 1] = lines[row + 1][:at] + "T" + lines[row + 1][at + 1 :]
    where = "in the taxi" if passenger == 4 else f"at {places[passenger]}"
    return "\n".join(lines) + f"\nThe passenger is {where} and wants to go to {places[goal]}."


def _joined(line: Sequence[bytes]) -> str:
    return b"".join(line).decode()


def _blackjack(env: Any, seen: Any) -> str:
    mine, dealer, ace = seen
    return (
        f"Your hand counts {int(mine)}{', with an ace that counts 11' if ace else ''}. The dealer shows {int(dealer)}."
    )


def _cart_pole(env: Any, seen: Any) -> str:
    position, speed, angle, turning = map(float, seen)
    return (
        f"cart position {position:+.2f} (the track ends at 2.40), cart speed {speed:+.2f}, "
        f"pole angle {angle:+.3f} (it falls at 0.209; to the right is positive), pole speed {turning:+.2f}"
    )


SHOWN: dict[str, Shown] = {
    "FrozenLake": Shown(
        "You (P) cross a frozen lake to the goal (G). S is where you began, F is ice, H is a hole: whoever steps into "
        "one has lost. Moves against an edge leave you where you are. Where the ice is slippery you may slide aside.",
        ("left", "down", "right", "up"),
        _frozen_lake,
    ),
    "CliffWalking": Shown(
        "You (P) walk to the goal (G). Every step costs 1. A step into the cliff (C) costs 100, and takes you back to "
        "the start (S).",
        ("up", "right", "down", "left"),
        _cliff,
        lambda total, ended: float(ended),
    ),
    "Taxi": Shown(
        "You drive a taxi (T) in a town with walls (|) and four places: R red, G green, Y yellow, B blue. Pick the "
        "passenger up where they are, and drop them off where they want to go (+20). Every step costs 1, a wrong "
        "pickup or dropoff 10. Colons can be crossed. South is down.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
        lambda total, ended: float(ended),
    ),
    "Blackjack": Shown(
        "You play blackjack: come closer to 21 than the dealer, who draws up to 17, and not above it.",
        ("stick", "hit"),
        _blackjack,
        lambda total, ended: (max(-1.0, min(1.0, total)) + 1) / 2,
    ),
    "CartPole": Shown(
        "A pole stands on a cart. Push the cart so that the pole does not fall and the cart stays on its track. Every "
        "step earns 1.",
        ("left", "right"),
        _cart_pole,
    ),
}
"""By the id without its version."""


class World:
    """Environments of `gymnasium.make` with discrete actions. An episode is one of theirs, step by step."""

    def __init__(self, settings: WorldSettings) -> None:
        import gymnasium

        self._gymnasium: Any = gymnasium
        self._tasks = settings.tasks or (("FrozenLake-v1", 1.0),)
        names = [name for name, _ in self._tasks]
        self._arguments: dict[str, dict[str, Any]] = {name: {} for name in names}
        for option, value in settings.options.items():
            task = next((name for name in names if option.startswith(f"{name}.")), None)
            if task is not None:
                self._arguments[task][option.removeprefix(f"{task}.")] = value
            else:
                one = WorldSettings(options={option: value})
                one.check_options(("steps", "lake", "brief", "penalty", *(f"{name}.ARGUMENT" for name in names[:3])))
        self.steps = settings.options.get("steps")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise WorldError(f"--world.options steps={shown(self.steps)}: expected a number of turns")
        self.brief = settings.option("brief", False)
        self.penalty = settings.option("penalty", 0.0)
        self._lake = settings.options.get("lake")
        if self._lake is not None and (not isinstance(self._lake, int) or not 2 <= self._lake <= 20):
            raise WorldError(f"--world.options lake={shown(self._lake)}: expected a size from 2 to 20")
        for name in names:
            self.make(name).close()

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Each record is a task and the seed of its `reset`, so that all samples of a prompt begin alike."""
        rng = random.Random(f"gymnasium {seed}")
        names, weights = zip(*self._tasks, strict=True)
        for _ in range(count):
            name = rng.choices(names, weights)[0]
            label = {"task": name, "seed": rng.randrange(2**31)}
            episode = self.begin(label, seed=0)
            yield {"input": list(episode.start.messages), "label": label, "datasource": name}
            episode.close()

    def begin(self, label: Any, *, seed: int) -> _Play:
        try:
            name, reset = label["task"], int(label["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise WorldError(f"a label of gymnasium is what its records have, got {shown(label)}") from error
        return _Play(self, name, self.make(name, reset), reset=reset, seed=seed)

    def make(self, name: str, seed: int = 0) -> Any:
        """The environment. Raises WorldError where there is none, or one that text cannot play."""
        arguments = dict(self._arguments.get(name, {}))
        if self._lake is not None and name.startswith("FrozenLake"):
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            arguments["desc"] = generate_random_map(self._lake, seed=seed)
        if self.steps is not None:
            arguments["max_episode_steps"] = self.steps
        try:
            spec = self._gymnasium.spec(name)
            if _look(name) is None and "ansi" in _render_modes(spec):
                arguments.setdefault("render_mode", "ansi")
            env = self._gymnasium.make(name, **arguments)
        except self._gymnasium.error.DependencyNotInstalled as error:
            raise WorldError(f"{name} needs more than Gymnasium itself: {error}") from error
        except (self._gymnasium.error.Error, TypeError, AssertionError, ValueError) as error:
            near = difflib.get_close_matches(name, self._gymnasium.registry, n=3)
            hint = f" (did you mean {' or '.join(near)}?)" if near and name not in near else ""
            raise WorldError(f"Gymnasium cannot make {name}: {' '.join(str(error).split())}{hint}") from error
        if not isinstance(env.action_space, self._gymnasium.spaces.Discrete):
            raise WorldError(f"{name} has actions {env.action_space}: text plays discrete ones alone")
        if _look(name) is None and env.render_mode != "ansi":
            numbers = self._gymnasium.spaces.flatdim(env.observation_space)
            if numbers > MOST_NUMBERS:
                raise WorldError(f"{name} shows {numbers} numbers at a time, which is no text: {MOST_NUMBERS} at most")
        return env


class _Play:
    """One episode."""

    def __init__(self, world: World, name: str, env: Any, *, reset: int, seed: int) -> None:
        self._world = world
        self._env = env
        self._look = _look(name)
        self._total = 0.0
        self._steps = self._unread = 0
        space = env.action_space
        numbers = [str(int(space.start) + i) for i in range(int(space.n))]
        self.actions = list(self._look.actions) if self._look and len(self._look.actions) == len(numbers) else numbers
        seen, _ = env.reset(seed=reset)
        if env.unwrapped._np_random is not None:  # what happens on the way is this sample's own
            env.unwrapped.np_random = world._gymnasium.utils.seeding.np_random(seed)[0]
        rules = self._look.rules if self._look else f"You play {name}."
        self.start = Start([{"role": "user", "content": f"{rules}\n\n{self._sight(seen)}\n\n{self._ask()}"}])

    def step(self, message: Mapping[str, Any]) -> Turn:
        action = find_action(message["content"], self.actions)
        if action is None:
            self._unread += 1
            self._total += self._world.penalty
            answer = "That has no action in brackets that there is. " + self._ask()
            return self._turn(answer, self._world.penalty, done=self._late(), ended=False)
        seen, reward, ended, cut, _ = self._env.step(int(self._env.action_space.start) + action)
        self._steps += 1
        self._total += float(reward)
        told = f"[{self.actions[action]}] earned {float(reward):g}.\n\n{self._sight(seen)}\n\n{self._ask()}"
        return self._turn(told, float(reward), done=bool(ended or cut or self._late()), ended=bool(ended))

    def _late(self) -> bool:
        """Answers without an action are turns too, of which the environment knows nothing."""
        return self._unread + self._steps >= (self._env.spec.max_episode_steps or 1000)

    def close(self) -> None:
        self._env.close()

    def _turn(self, text: str, reward: float, *, done: bool, ended: bool) -> Turn:
        success = self._look.success if self._look else None
        score = success(self._total, ended) if success and done else 0.0 if success else None
        logs = {"env_steps": self._steps, "unread_actions": self._unread}
        return Turn([] if done else [{"role": "user", "content": text}], reward, done, score, logs)

    def _ask(self) -> str:
        if self._world.brief and self._steps + self._unread:
            return "Your action?"
        choices = ", ".join(f"[{action}]" for action in self.actions)
        return f"Answer with one action in brackets: {choices}."

    def _sight(self, seen: Any) -> str:
        if self._look is not None and self._look.see is not None:
            return self._look.see(self._env.unwrapped, seen)
        if self._env.render_mode == "ansi":
            return _ESCAPES.sub("", str(self._env.render())).strip()
        return f"You observe {_described(seen)}, of {self._env.observation_space}."


def find_action(said: str, actions: Sequence[str]) -> int | None:
    """The index of the action that an answer names; None: of none.

    >>> find_action("Right is blocked, so [down].", ["left", "down"])
    1
    """
    names = {action.lower(): index for index, action in enumerate(actions)}
    numbers = {str(index): index for index in range(len(actions))}
    for text in (*reversed(_BRACKETS.findall(said)), said):
        word = text.strip().strip(".!").lower()
        if word in names:
            return names[word]
        if word in numbers:
            return numbers[word]
    return None


def _look(name: str) -> Shown | None:
    return SHOWN.get(re.sub(r"-v\d+$", "", name.split("/")[-1]).removesuffix("8x8").removesuffix("Slippery"))


def _render_modes(spec: Any) -> Sequence[str]:
    entry = spec.entry_point
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        try:
            entry = getattr(__import__(module, fromlist=[attribute]), attribute)
        except ImportError:
            return ()
    return getattr(entry, "metadata", {}).get("render_modes", ())


def _described(seen: Any) -> str:
    if isinstance(seen, Mapping):
        return ", ".join(f"{key}: {_described(value)}" for key, value in seen.items())
    if isinstance(seen, tuple):
        return f"({', '.join(map(_described, seen))})"
    if hasattr(seen, "tolist"):
        seen = seen.tolist()
    if isinstance(seen, list):
        return f"[{', '.join(map(_described, seen))}]"
    return f"{seen:.4g}" if isinstance(seen, float) else str(seen)
