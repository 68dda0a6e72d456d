"""The demo's environment, in the form every user's agent file has: a right letter is answered by the next clue."""

from typing import Any

from openrlhf.demo.hunt import letter_at
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    """The environment of one hunt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.found = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.row, self.clues = states["observation"][:-1], states["label"]
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        right = states["action_text"] == letter_at(self.row, self.clues[self.found]) + "<eos>"
        self.found += right
        won = self.found == len(self.clues)
        return {
            "rewards": right / len(self.clues),
            "scores": float(won),
            "environment_feedback": self.clues[self.found] if right and not won else "",
            "done": won or not right,
            "extra_logs": {"found": self.found},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(AgentInstance)
