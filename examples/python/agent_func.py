"""A multi-turn agent: guess a secret number, with a hint after each guess.

    python -m openrlhf.cli.train_ppo_ray --train.agent_func_path examples/python/agent_func.py --max_steps 8 \
        --data.prompt_dataset numbers.jsonl --data.input_key prompt --data.label_key label …

A record is {"prompt": "I think of a number from 1 to 100. Guess!", "label": "42"}.

`AgentExecutor` plays the episodes; `AgentInstance` is the environment of one episode, so its state lives on `self`.
This file runs in processes of its own, many episodes at a time: use `await` for whatever takes long. An error in it
fails its episode, which is counted and played again, never scored 0. `openrlhf check FILE.py` tries a file like this.
"""

import re

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

NUMBER = re.compile(r"-?\d+")
MOST_GUESSES = 6


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.guesses = 0
        self.nearest = None

    async def reset(self, states, **kwargs):
        """What the policy reads first. `states` is {"observation": the prompt, "label": the record's label}."""
        self.secret = int(states["label"])
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        """Answers one action.

        `states["action_text"]` is what the policy said, end-of-turn token included; `states["observation_text"]` all
        that stood before it. Feedback is read as it is: a chat model wants its template's turn markers around it, for
        ChatML "\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\n".
        """
        self.guesses += 1
        numbers = NUMBER.findall(states["action_text"])
        guess = int(numbers[-1]) if numbers else None
        reward, feedback = self.judge(guess)
        won = guess == self.secret
        return {
            # Earned by this turn; the episode's reward is the sum, and each turn's stays with its own tokens.
            "rewards": reward,
            # Success in [0, 1], for dynamic filtering and pass@k.
            "scores": float(won),
            "environment_feedback": feedback,
            "done": won or self.guesses == MOST_GUESSES,
            "extra_logs": {"guesses": self.guesses, "no_number": guess is None},
        }

    def judge(self, guess):
        """1 for the secret, a little for coming nearer than ever before, a small fine for saying no number."""
        if guess is None:
            return -0.1, "\nThat is not a number. Your next guess: "
        if guess == self.secret:
            return 1.0, "\nYes!"
        distance = abs(guess - self.secret)
        nearer = self.nearest is not None and distance < self.nearest
        self.nearest = distance if self.nearest is None else min(distance, self.nearest)
        hint = "higher" if guess < self.secret else "lower"
        return 0.1 if nearer else 0.0, f"\nIt is {hint}. Your next guess: "


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
