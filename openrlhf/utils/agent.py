"""What users' agent files import."""

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.agents.single_turn import SingleTurnAgentExecutor

__all__ = ["AgentExecutorBase", "SingleTurnAgentExecutor"]
