"""The executor of OpenRLHF before 0.9.1: wired to its engine when it is made, answering through a queue."""

from __future__ import annotations

from typing import Any

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.types import SamplingParams

LEGACY_ARGS = ("max_steps", "max_length", "llm_engine", "hf_tokenizer", "result_queue")
"""The arguments of such a constructor."""

MANY_STEPS = 10_000
"""The value of `max_steps` when the run has no limit: their loops count up to it."""


class LegacyTurns(AgentExecutorBase):
    """The base class that such classes call as `super()`: it keeps the arguments and plays the turns."""

    def __init__(
        self,
        agent_instance_cls: type,
        max_steps: int,
        max_length: int,
        llm_engine: Any,
        hf_tokenizer: Any,
        result_queue: Any,
    ) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue

    async def execute(  # type: ignore[override]
        self, prompt: str, label: Any, sampling_params: SamplingParams, images: Any = None
    ) -> dict[str, Any]:
        """One episode; its dict is returned, and stands on the queue."""
        turns = MultiTurnAgentExecutor(self.agent_instance_cls)
        turns.turn_limit = self.max_steps
        result = await turns.execute(
            prompt, label, sampling_params, self.max_length, self.hf_tokenizer, self.llm_engine, images
        )
        await self.result_queue.put(result)
        return result


def wired(cls: type) -> type:
    """`cls` with `LegacyTurns` between it and `AgentExecutorBase`: an own `execute` stays, `super()` finds ours."""
    return type(cls.__name__, (cls, LegacyTurns), {"__module__": cls.__module__, "__doc__": cls.__doc__})
