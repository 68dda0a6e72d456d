"""The classes and functions that users' agent files import."""

from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase
from openrlhf.agents.chat_history import action_text, next_user_turn
from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.openai_server import OpenAIServerAgentExecutor
from openrlhf.agents.single_turn import SingleTurnAgentExecutor

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "MultiTurnAgentExecutor",
    "OpenAIServerAgentExecutor",
    "SingleTurnAgentExecutor",
    "action_text",
    "next_user_turn",
]
