"""An environment of OpenEnv in a few lines: guess a number, by its hints. Needs the package openenv.

python examples/openenv/guess.py 8000
"""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    text: str


class Guessing(Environment):
    """A number from 1 to 7. A third of the reward is lost with each wrong guess."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = random.Random(seed).randint(1, 7)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text="Guess my number, from 1 to 7. Answer with a number alone.")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        guess = action.text.strip()
        if guess == str(self._number):
            return Hint(text="Right.", done=True, reward=max(0.0, 1.0 - (self._state.step_count - 1) / 3))
        hint = "no number" if not guess.isdigit() else "too low" if int(guess) < self._number else "too high"
        return Hint(text=f"Wrong: {hint}.", done=self._state.step_count == 4, reward=0.0)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
