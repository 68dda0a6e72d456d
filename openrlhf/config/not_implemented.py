"""What the flags promise and this version does not do yet. Building a feature means deleting its entry here.

Every flag parses and prints; a run that one of these entries would change is refused before it starts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrlhf.config.commands import Config, DPOConfig, LoraCombinerConfig, RLConfig, RMConfig, ServeRMConfig, SFTConfig
from openrlhf.config.fields import NotBuiltError


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """One missing feature."""

    flags: str
    """The flag or flags that ask for it, as the user would write them."""
    asked: Callable[[Any], bool]
    """Whether this configuration would be changed by it."""
    missing: str
    remedy: str


RL: tuple[Unbuilt, ...] = (
    Unbuilt("--ds.ring_attn_size", lambda c: c.ds.ring_attn_size > 1, "context parallelism", "leave it out"),
)

UNBUILT: dict[type, tuple[Unbuilt, ...]] = {
    RLConfig: RL,
    SFTConfig: (),
    RMConfig: (),
    DPOConfig: (),
    ServeRMConfig: (),
    LoraCombinerConfig: (),
}


def refuse_unbuilt(config: Config) -> None:
    """Raise `NotBuiltError` listing every feature this run asks for and this version lacks."""
    missing = [entry for entry in UNBUILT[type(config)] if entry.asked(config)]
    if missing:
        lines = [f"{entry.flags}: not built yet ({entry.missing}); {entry.remedy}" for entry in missing]
        raise NotBuiltError("\n".join(lines))
