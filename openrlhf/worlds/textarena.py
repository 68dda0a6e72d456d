"""TextArena's games for one player and for several, as text.

A player reads what is new since it last spoke. The other players' thoughts (`<think>…</think>`) are not for it.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from openrlhf.worlds.base import GameStart, GameTurn, Start, Turn, WorldError, WorldSettings, shown

if TYPE_CHECKING:
    from openrlhf.worlds.base import Episode, Game

OPTIONS = ("game", "players", "rules", "show")
MOST_PLAYERS = 15
RANDOM = "random"
PLAIN_MOVES = (
    *(f"[{i}]" for i in range(10)),
    *(f"[{i} {j}]" for i in range(10) for j in range(10)),
    *(f"[{letter}{i}]" for letter in "abcdefgh" for i in range(10)),
)
"""The moves that the random player tries, beside those that it has read of."""


class World:
    """Games of TextArena's registry. A task is an id such as `TicTacToe-v0`."""

    opponents = (RANDOM,)

    def __init__(self, settings: WorldSettings) -> None:
        """Options:

        game      arguments of the games, as JSON: game={"piles":[2,3]}
        players   of games that several numbers can play; the fewest if left out
        rules     false: a player does not read the game's rules, only what goes on
        show      `all` that a player is told, or the `board` without what leads to it: moves and their descriptions
        """
        import textarena

        settings.check_options(OPTIONS)
        if not settings.tasks:
            raise WorldError(
                "--world.tasks names no game; there are TicTacToe-v0, GuessTheNumber-v0, KuhnPoker-v0 and "
                f"{len(_games(textarena)) - 3} others"
            )
        self._textarena = textarena
        self._tasks = settings.tasks
        self._arguments = settings.option("game", {})
        self._rules = settings.option("rules", True)
        self._show = settings.option("show", "all", choices=("all", "board"))
        wanted = settings.option("players", 0)
        self._players = {name: self._count_players(name, wanted) for name, _ in settings.tasks}
        self.agents = max(self._players.values())

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Each with the first player's first observation."""
        names, weights = zip(*self._tasks, strict=True)
        for index in range(count):
            rng = random.Random(f"{seed} {index}")
            label = {"game": rng.choices(names, weights)[0], "seed": rng.randrange(1 << 31)}
            start = self.begin(label, seed=0).start
            messages = start.turn.messages if isinstance(start, GameStart) else start.messages
            yield {"input": list(messages), "label": label, "datasource": label["game"]}

    def begin(self, label: Mapping[str, Any], *, seed: int) -> Alone | Together:
        """The beginning is that of the label's seed; what chance decides later is this sample's own."""
        name = label["game"]
        if name not in self._players:
            raise WorldError(f"the prompt is of game {name}, which is not among --world.tasks")
        table = Table(self._textarena, self._make(name), self._players[name], label["seed"], seed)
        table.rules, table.board_only = self._rules, self._show == "board"
        return Alone(table) if self._players[name] == 1 else Together(table)

    def _make(self, name: str) -> Any:
        there = _games(self._textarena)
        if name not in there:
            family = name.split("-")[0].lower()
            close = [other for other in there if family in other.lower()] or ["TicTacToe-v0", "GuessTheNumber-v0"]
            raise WorldError(f"TextArena has no game {name}; it has {', '.join(close)} …")
        try:
            return self._textarena.make(name, **self._arguments)
        except Exception as error:
            raise _unusable(name, error) from error

    def _count_players(self, name: str, wanted: int) -> int:
        """Games do not say how many may play, but refuse to begin with others."""
        refusals = []
        for players in [wanted] if wanted else range(1, MOST_PLAYERS + 1):
            env = self._make(name)
            try:
                table = Table(self._textarena, env, players, 0, 0)
                if players == 1 and not isinstance(table.state, self._textarena.SinglePlayerState):
                    raise ValueError("one is not enough")  # some begin all the same
            except (AssertionError, KeyError, ValueError, IndexError) as error:
                refusals.append(f"{players}: {' '.join(str(error).split()) or type(error).__name__}")
            except Exception as error:
                raise _unusable(name, error) from error
            else:
                return players
        if wanted:
            raise WorldError(f"--world.options players={wanted}: {name} cannot be played so ({refusals[0]})")
        raise WorldError(f"{name} can be played by no number of players up to {MOST_PLAYERS} ({refusals[-1]})")


def _games(textarena: Any) -> list[str]:
    """Without the variants that differ in how observations are put together: that is done here."""
    names: list[str] = list(textarena.envs.registration.ENV_REGISTRY)
    return [name for name in names if not name.endswith(("-raw", "-train"))]


def _unusable(name: str, error: Exception) -> WorldError:
    text = str(error)
    if "nltk" in text:
        found = re.search(r"nltk\.download\('(\w+)'\)", text)
        data = found.group(1) if found else "words"
        return WorldError(
            f"{name} needs data of nltk that is not on this machine: {data}. With the Python of this world, run: "
            f"python -m nltk.downloader {data}"
        )
    return WorldError(f"{name} cannot be made: {type(error).__name__}: {' '.join(text.split())}")


class Table:
    """One game under way, with a stream of chance of its own."""

    def __init__(self, textarena: Any, env: Any, players: int, seed: int, own_seed: int) -> None:
        self.kinds = textarena.ObservationType
        self.players = players
        self.rules = True
        self.board_only = False
        self._env = env
        self._base = env
        while isinstance(self._base, textarena.Wrapper):
            self._base = self._base.env
        self._chance = _chance_of(f"{seed}")
        with self._own_chance():
            self._base.reset(num_players=players, seed=seed)
        self._chance = _chance_of(f"{seed} {own_seed}")
        self._heard: list[list[tuple[int, str, Any]]] = [[] for _ in range(players)]
        self._first: list[str] = [""] * players
        self._last: list[str] = [""] * players
        self.done = False
        self._listen()

    @property
    def state(self) -> Any:
        return self._base.state

    @property
    def turn_of(self) -> int:
        return int(self.state.current_player_id)

    def play(self, message: Mapping[str, Any]) -> None:
        """The player whose turn it is says this."""
        with self._own_chance():
            self.done = bool(self._env.step(spoken(message))[0])
        if not self.done:
            self._listen()

    def tell(self) -> list[dict[str, str]]:
        """What is new to the player whose turn it is."""
        player = self.turn_of
        heard, self._heard[player] = self._heard[player], []
        text = self._text(player, heard) or "It is your turn."
        self._last[player] = "\n".join(str(text) for _, text, _ in heard)
        self._first[player] = self._first[player] or self._last[player]
        return [{"role": "user", "content": text}]

    def results(self) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
        """By player: rewards, and numbers for logs."""
        rewards, info = self._base.close()
        rewards = {player: float((rewards or {}).get(player, 0.0)) for player in range(self.players)}
        logs = {
            player: {
                "invalid_move": float(bool(info[player].get("invalid_move"))),
                "turns": float(self.state.turn),
            }
            for player in range(self.players)
        }
        return rewards, logs

    def random_move(self) -> str:
        """One of the legal moves among those that the player has read of in brackets, and numbers in brackets."""
        player = self.turn_of
        named = re.findall(r"\[[^\[\]\n]{1,24}\]", f"{self._first[player]}\n{self._last[player]}")
        moves = sorted({*named, *PLAIN_MOVES})
        with self._own_chance():
            random.shuffle(moves)
        for move in moves:
            if self._is_legal(move, player):
                return move
        raise WorldError(
            f"the player {RANDOM} knows no move of {self._base.env_id} after {shown(self._last[player])}: choose "
            "another --world.opponent"
        )

    def _is_legal(self, move: str, player: int) -> bool:
        kept = self._chance
        try:
            with self._own_chance():
                trial = copy.deepcopy(self._env)
                trial.step(move)
        except Exception:
            return False
        finally:
            self._chance = kept
        state = trial.state
        foul = state.game_info[player].get("invalid_move") or player in getattr(state, "elimination_order", ())
        return not foul and not (state.current_player_id == player and getattr(state, "error_count", 0))

    def _listen(self) -> None:
        """An observation is handed out once."""
        player, news = self._base.get_observation()
        for item in news:
            # In a few games the parts are in another order.
            kind = next((part for part in item if isinstance(part, self.kinds)), None)
            text = next((part for part in item if isinstance(part, str)), "")
            sender = next((part for part in item if isinstance(part, int)), -1)
            self._heard[player].append((sender, text, kind))

    def _text(self, player: int, heard: Sequence[tuple[int, str, Any]]) -> str:
        kinds = self.kinds
        boards = [at for at, (_, _, kind) in enumerate(heard) if kind == kinds.GAME_BOARD]
        lines = []
        for at, (sender, text, kind) in enumerate(heard):
            if sender == player or (kind == kinds.PROMPT and not self.rules):
                continue
            if self.board_only and (
                kind in (kinds.PLAYER_ACTION, kinds.GAME_ACTION_DESCRIPTION)
                or (kind == kinds.GAME_BOARD and at != boards[-1])
            ):
                continue
            name = self.state.role_mapping.get(sender, f"Player {sender}")
            lines.append(f"[{name}] {text.strip()}" if sender in range(self.players) else text.strip())
        return "\n".join(line for line in lines if line)

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Games draw from the shared generators of Python, and some from numpy's."""
        shared = _chance()
        _set_chance(self._chance)
        try:
            yield
        finally:
            self._chance = _chance()
            _set_chance(shared)


def _chance_of(seed: str) -> tuple[Any, Any]:
    """The states of both generators that begin with this seed."""
    import numpy

    rng = random.Random(seed)
    return rng.getstate(), numpy.random.RandomState(rng.getrandbits(32)).get_state()


def _chance() -> tuple[Any, Any]:
    import numpy

    return random.getstate(), numpy.random.get_state()


def _set_chance(states: tuple[Any, Any]) -> None:
    import numpy

    random.setstate(states[0])
    numpy.random.set_state(states[1])


def spoken(message: Mapping[str, Any]) -> str:
    """What is said aloud: not the thoughts before it, and nothing where the thoughts were cut short."""
    text = str(message["content"])
    _, end, answer = text.rpartition("</think>")
    return (answer if end else "" if "<think>" in text else text).strip()


class Alone:
    """A game for one."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.start = Start(table.tell())

    def step(self, message: Mapping[str, Any]) -> Turn:
        self._table.play(message)
        if not self._table.done:
            return Turn(self._table.tell())
        rewards, logs = self._table.results()
        return Turn(reward=rewards[0], done=True, score=min(max(rewards[0], 0.0), 1.0), logs=logs[0])

    def close(self) -> None:
        pass


class Together:
    """A game for several."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names = [f"player {player}" for player in range(table.players)]
        self.start = GameStart(self._names, self._turn())

    def step(self, agent: str, message: Mapping[str, Any]) -> GameTurn:
        if agent != self._names[self._table.turn_of]:
            raise ValueError(f"it is the turn of {self._names[self._table.turn_of]}, not of {agent}")
        self._table.play(message)
        return self._turn()

    def scripted(self, agent: str, name: str) -> str:
        if name != RANDOM:
            raise WorldError(f"there is no player {name}; there is {RANDOM}")
        return self._table.random_move()

    def close(self) -> None:
        pass

    def _turn(self) -> GameTurn:
        table = self._table
        if not table.done:
            return GameTurn(self._names[table.turn_of], table.tell())
        rewards, logs = table.results()
        best, worst = max(rewards.values()), min(rewards.values())
        scores = {
            player: (reward - worst) / (best - worst) if best > worst else 0.5 for player, reward in rewards.items()
        }
        return GameTurn(
            rewards={self._names[player]: reward for player, reward in rewards.items()},
            scores={self._names[player]: score for player, score in scores.items()},
            logs={self._names[player]: numbers for player, numbers in logs.items()},
        )


if TYPE_CHECKING:
    _: tuple[type[Game], type[Episode]] = (Together, Alone)
