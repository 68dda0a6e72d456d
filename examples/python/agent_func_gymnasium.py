"""A text game through Gymnasium's API: walk to the treasure.

    pip install gymnasium
    python -m openrlhf.cli.train_ppo_ray --train.agent_func_path examples/python/agent_func_gymnasium.py \
        --data.prompt_dataset games.jsonl --data.input_key prompt --data.label_key label …

A record is {"prompt": "You walk on a grid, one word at a time: north, south, east or west.\\n", "label": 7}; the label
is the game's seed, so every sample of a prompt plays the same game.

`Treasure` is an ordinary `gymnasium.Env` whose observations and actions are text, and `GymnasiumInstance` lets a policy
play any such environment: for one of yours, replace `make`.
"""

import re
import string

import gymnasium
from gymnasium.spaces import Text

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

MOVES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
SPECIAL_TOKEN = re.compile(r"<[^<>\s]+>")


class Treasure(gymnasium.Env):
    """A grid with a treasure; the player is told where it lies. A step towards it earns a little, finding it 1."""

    def __init__(self, size=5):
        self.size = size
        self.observation_space = Text(max_length=200, charset=string.printable)
        self.action_space = Text(max_length=1000, charset=string.printable)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        cells = self.np_random.choice(self.size**2, size=2, replace=False)
        self.player, self.treasure = ([int(cell) % self.size, int(cell) // self.size] for cell in cells)
        return self.look(), {}

    def step(self, action):
        words = re.findall("[a-z]+", action.lower())
        move = next((word for word in words if word in MOVES), None)
        if move is None:
            return f"You can go {', '.join(MOVES)}. {self.look()}", -0.05, False, False, {"understood": False}
        before = self.distance()
        for axis, by in enumerate(MOVES[move]):
            self.player[axis] = min(max(self.player[axis] + by, 0), self.size - 1)
        found = self.distance() == 0
        reward = 1.0 if found else 0.1 * (before - self.distance())
        return "You found it!" if found else self.look(), reward, found, False, {"understood": True}

    def look(self):
        (x, y), (px, py) = self.treasure, self.player
        where = [f"{abs(y - py)} {'north' if y > py else 'south'}"] if y != py else []
        where += [f"{abs(x - px)} {'east' if x > px else 'west'}"] if x != px else []
        return f"The treasure lies {' and '.join(where)} of you."

    def distance(self):
        return sum(abs(a - b) for a, b in zip(self.player, self.treasure, strict=True))


class GymnasiumInstance(AgentInstanceBase):
    """Plays an environment of text: what it shows is what the policy reads, what the policy says is its action.

    Success is that the environment ended the game, and not its time limit; an environment that knows better says so
    with `info["success"]`. What else `info` holds in numbers is logged.
    """

    def __init__(self, *args, **kwargs):
        self.env = self.make()

    def make(self):
        return gymnasium.wrappers.TimeLimit(Treasure(), max_episode_steps=12)

    # Not `async`: each episode's calls then have a thread of their own, and environments may take their time.
    def reset(self, states, **kwargs):
        observation, _ = self.env.reset(seed=int(states["label"]))
        return {"observation": f"{states['observation']}{observation}\n> "}

    def step(self, states, **kwargs):
        action = SPECIAL_TOKEN.sub("", states["action_text"]).strip()
        observation, reward, terminated, truncated, info = self.env.step(action)
        done = terminated or truncated
        if done:
            self.env.close()
        return {
            "rewards": reward,
            "scores": float(info.get("success", terminated)),
            "environment_feedback": f"\n{observation}\n> ",
            "done": done,
            "extra_logs": {"out_of_time": truncated}
            | {name: value for name, value in info.items() if isinstance(value, (bool, int, float))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(GymnasiumInstance)
