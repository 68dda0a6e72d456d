"""What the routers of a mixture of experts say in a forward, for whoever asks for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RouterLog:
    """Goes into a forward empty and comes out with the logits of its routers: tensors [T, E], one for each layer.

    Every token of the given stream has its row, also one that shares the forward of its prefix with others. No list,
    which wrappers around modules take apart.
    """

    def __init__(self) -> None:
        self.logits: list[Tensor] = []


class NoRoutersError(ValueError):
    """The model has no experts, or keeps to itself how it chooses them."""


def experts_per_token(config: Any, *, flag: str) -> int:
    """How many experts a token has, from a model's configuration. Raises `NoRoutersError`."""
    text = config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None)
    if not hasattr(text, "output_router_logits") or not isinstance(top_k, int):
        raise NoRoutersError(
            f"{flag}: {text.model_type} has no experts, or transformers does not show how it chooses them; leave it out"
        )
    return top_k
