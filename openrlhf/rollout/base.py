"""What the rest of the system knows of an engine: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from openrlhf.types import Generation, SamplingParams


class EngineError(RuntimeError):
    """The engine cannot start, or has stopped working: no request will be answered any more. The text says why."""


class LostRequestError(RuntimeError):
    """An engine was lost after it had given a part of its answer. Asked again, another one answers from the start."""


class Engine(Protocol):
    """Samples from the policy. Any number of `generate` calls may be under way; the engine batches them."""

    @property
    def version(self) -> int:
        """Weight version it samples with now."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and response together, that one request may reach."""
        ...

    async def generate(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> Generation:
        """Continue `token_ids`. Cancelling the call gives the request up. Raises EngineError."""
        ...

    def stream(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> AsyncGenerator[Generation]:
        """`generate` in parts, each with what is new; the last one says why it ended. Closing it gives it up.

        Raises LostRequestError too.
        """
        ...


def check_prompt(token_ids: Sequence[int], *, max_model_len: int, vocab_size: int) -> int:
    """How many tokens of room a prompt leaves; ValueError for one that no engine could continue."""
    if not token_ids:
        raise ValueError("a prompt needs at least one token")
    room = max_model_len - len(token_ids)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(token_ids)} tokens leaves no room in a context of {max_model_len} "
            "(max_model_len): shorten the prompt or raise the limit"
        )
    outside = [token for token in (min(token_ids), max(token_ids)) if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"prompt ids must be in 0 … {vocab_size - 1}, got {outside[0]}")
    return room
