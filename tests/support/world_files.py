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

    def records(self, *, count, seed):
        for index in range(count):
            rng = random.Random(f"{seed} {index}")
            label = {"say": rng.choice("abcd"), "index": index}
            yield {"input": f"Say {label['say']}.", "label": label, "datasource": self.tasks[0][0], "difficulty": index % 3}

    def begin(self, label, *, seed):
        return Counting(self, label, seed)

    def modules(self):
        return sorted(sys.modules)

    def process(self):
        return os.getpid()

    def child(self):
        return subprocess.Popen(["sleep", "600"]).pid


class Counting:
    def __init__(self, world, label, seed):
        self.world, self.label, self.seed, self.turn, self.closed = world, label, seed, 0, False
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
        self.closed = True
"""


def counting_world(folder: Path, *, threads: bool = False, head: str = "") -> str:
    """The path of the file."""
    file = folder / "counting.py"
    text = COUNTING.replace("class World:\n", "class World:\n    THREADS = True\n\n") if threads else COUNTING
    file.write_text(head + text, encoding="utf-8")
    return str(file)
