"""What the rest of the system knows of an engine: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from openrlhf.types import Generation, SamplingParams


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
        """Continue `token_ids`. Cancelling the call gives the request up."""
        ...

    def stream(self, token_ids: Sequence[int], sampling_params: SamplingParams) -> AsyncGenerator[Generation]:
        """`generate` in parts, each with what is new; the last one says why it ended. Closing it gives it up."""
        ...
