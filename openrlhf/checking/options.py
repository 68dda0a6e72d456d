"""The options of `openrlhf check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOAD_SECONDS = 60.0
"""The least time allowed for loading a file: importing libraries may take long, however short its calls are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The command line of `openrlhf check`."""

    file: Path
    pretrain: str | None
    prompt_data: str | None
    input_key: str
    label_key: str | None
    apply_chat_template: bool
    n: int
    """Samples per prompt."""
    timeout: float
    max_len: int
    max_new_tokens: int
    max_steps: int
    agent_hosts: int

    @property
    def start_timeout(self) -> float:
        return max(self.timeout, LOAD_SECONDS)
