"""The agent interface that every run goes through: token in, token out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openrlhf.types import SamplingParams, Segment

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an executor returns: the recorded tokens, and the reward if the agent has one of its own."""

    segments: tuple[Segment, ...]
    text: str
    """Prompt and everything after it, decoded with special tokens."""
    truncated: bool
    """A token or turn limit cut it short."""
    reward: float | None = None
    """None: somebody else (a reward function, a server, a model) judges it."""
    score: float | None = None
    extra_logs: dict[str, float] = field(default_factory=dict)


class AgentExecutorBase(ABC):
    """Runs one episode. One executor serves many episodes at once, so `execute` keeps no state on `self`."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
    ) -> Episode:
        """Play the episode that begins with `prompt`, in at most `max_length` tokens."""
