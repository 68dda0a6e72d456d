"""A world for tests, of the standard library alone: it counts, and misbehaves on request."""

from pathlib import Path

COUNTING = """
import os, random, subprocess, sys, time
from openrlhf.worlds.base import Start, Turn, WorldError

print("a package that prints when it is imported")


class World:
    def __init__(self, settings):
        settings.check_options(("turns", "threads"))
        self.turns = settings.option("turns", 2)
        self.tasks = settings.tasks or (("count", 1.0),)
        if self.tasks[0][0] == "unknown":
            raise WorldError("there is no task unknown; there is count")
        self.seed = settings.seed
        self.open = 0

    def records(self, *, count, seed):
        for index in range(count):
            rng = random.Random(f"{seed} {index}")
            label = {"say": rng.choice("abcd"), "index": index}
            yield {"input": f"Say {label['say']}.", "label": label, "datasource": self.tasks[0][0], "difficulty": index % 3}

    def begin(self, label, *, seed):
        self.open += 1
        return Counting(self, label, seed)

    def still_open(self):
        return self.open

    def modules(self):
        return sorted(sys.modules)

    def process(self):
        return os.getpid()

    def child(self, own_session=False):
        return subprocess.Popen(["sleep", "600"], start_new_session=own_session).pid


class Counting:
    def __init__(self, world, label, seed):
        self.world, self.label, self.seed, self.turn = world, label, seed, 0
        self.start = Start([{"role": "user", "content": f"Say {label['say']}."}])
        print("a package that prints")

    def step(self, message):
        misdeed = self.label.get("misdeed")
        once = self.label.get("once")
        if misdeed and (once is None or not os.path.exists(once)):
            if once is not None:
                open(once, "w").close()
            if misdeed == "hang":
                time.sleep(600)
            if misdeed == "crash":
                print("the last words", file=sys.stderr, flush=True)
                os._exit(3)
            if misdeed == "raise":
                raise ValueError("no such move")
            if misdeed == "refuse":
                raise WorldError("the label has no goal")
            if misdeed == "sleep":
                time.sleep(0.2)
        self.turn += 1
        right = message["content"].count(self.label["say"]) > 0
        done = self.turn >= self.world.turns
        answer = [] if done else [{"role": "user", "content": "Again."}]
        return Turn(answer, reward=float(right), done=done, logs={"turns": self.turn, "seed": self.seed % 1000})

    def close(self):
        self.world.open -= 1
"""


def counting_world(folder: Path, *, threads: bool = False, head: str = "") -> str:
    """The path of the file."""
    file = folder / "counting.py"
    text = COUNTING.replace("class World:\n", "class World:\n    THREADS = True\n\n") if threads else COUNTING
    file.write_text(head + text, encoding="utf-8")
    return str(file)


DUEL = """
from openrlhf.worlds.base import GameStart, GameTurn

NAMES = ("player 0", "player 1", "player 2")


class World:
    '''Agents say a digit in turn, for some rounds; each reads what the others have said. The higher sum wins.'''

    opponents = ("low", "echo")

    def __init__(self, settings):
        self.agents = settings.option("agents", 2)
        self.rounds = settings.option("rounds", 2)

    def records(self, *, count, seed):
        for index in range(count):
            yield {"input": f"Begin {index}.", "label": {"first": index % self.agents}, "datasource": "duel"}

    def begin(self, label, *, seed):
        return Duel(self.agents, self.rounds, label, seed)


class Duel:
    def __init__(self, agents, rounds, label, seed):
        self.names, self.rounds, self.label, self.seed = NAMES[:agents], rounds, label, seed
        self.said = []
        self.sums = dict.fromkeys(self.names, 0)
        self.read = dict.fromkeys(self.names, 0)
        self.start = GameStart(self.names, self.turn())

    def next(self):
        return self.names[(self.label["first"] + len(self.said)) % len(self.names)]

    def turn(self):
        name = self.next()
        new = [f"{who} said {digit}." for who, digit in self.said[self.read[name] :] if who != name]
        self.read[name] = len(self.said)
        text = " ".join(new) or f"You are {name}. Say a digit."
        return GameTurn(name, [{"role": "user", "content": text}])

    def step(self, agent, message):
        assert agent == self.next(), (agent, self.next())
        digit = message["content"].strip()
        if self.label.get("misdeed") == "raise":
            raise ValueError("no such move")
        over = not digit.isdigit()
        self.said.append((agent, digit))
        self.sums[agent] += 0 if over else int(digit)
        if over or len(self.said) == self.rounds * len(self.names):
            best = max(self.sums.values())
            won = {name: float(self.sums[name] == best and not over) for name in self.names}
            logs = {name: {"sum": self.sums[name], "seed": self.seed % 1000} for name in self.names}
            return GameTurn(rewards=won, scores=won, logs=logs)
        return self.turn()

    def scripted(self, agent, name):
        if name == "low":
            return "1"
        return self.said[-1][1] if self.said else "5"

    def close(self):
        pass
"""


def duel_world(folder: Path) -> str:
    """The path of a file with a game of several agents."""
    file = folder / "duel.py"
    file.write_text(DUEL, encoding="utf-8")
    return str(file)
