"""Models with a scalar head: a critic values states, a reward model whole sequences. Packed tokens in, numbers out.

`forward` does it all — body, choice of positions, head — so that hooks on the module (ZeRO-3, DDP) see every parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.models.body import RouterLog, decoder_body, hidden_states, with_any_image
from openrlhf.models.context import Context
from openrlhf.types import ImageInput, PackedTokens, moved


class Normalisation(NamedTuple):
    """v → (v − mean) / std: values in the units of the rewards that a reward model gave when it was evaluated."""

    mean: float
    std: float


class ScalarHead(nn.Linear):
    """hidden · w, in fp32 whatever the weights' dtype.

    Rewards and values are compared by their differences, and bf16 has three digits: 5.30 and 5.31 would be one number.
    One column costs nothing.
    """

    def __init__(self, hidden_size: int, *, bias: bool = False) -> None:
        super().__init__(hidden_size, 1, bias=bias)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """float32 [P]"""
        bias: Tensor | None = self.bias  # None without one
        return F.linear(hidden_PD.float(), self.weight.float(), None if bias is None else bias.float()).squeeze(-1)


class ValueModel(nn.Module):
    """The body of a Hugging Face decoder and a scalar head. Made by `models.loading.load_value_model`."""

    def __init__(
        self,
        model: Any,
        head: ScalarHead,
        *,
        head_prefix: str = "score",
        packed: bool = True,
        normalisation: Normalisation | None = None,
        config_changes: dict[str, float] | None = None,
        stored_dtype: torch.dtype | None = None,
        blank: ImageInput | None = None,
    ) -> None:
        """`model` has no head of its own. `head_prefix` is what files call ours.

        `packed`, `config_changes`, `stored_dtype` and `blank` as in `Policy`. `normalisation` acts in training as in
        evaluation: what a loss compares must be in the same units as what was predicted.
        """
        super().__init__()
        self.model = model
        self.head = head
        self.head_prefix = head_prefix
        self.packed = packed
        self.normalisation = normalisation
        self.config_changes = config_changes or {}
        self.stored_dtype = stored_dtype
        self.blank = blank
        self.context: Context | None = None
        """As that of a `Policy`."""

    def forward(self, tokens: PackedTokens, *, positions: Tensor, router_log: RouterLog | None = None) -> Tensor:
        """float32 [P]: the value at each of these stream positions, of the tokens of its sequence up to there.

        `router_log` is filled, if there is one.
        """
        hidden_pD, share = hidden_states(
            decoder_body(self.model),
            with_any_image(tokens.without_routes(), self.blank),
            positions=positions,
            packed=self.packed,
            router_log=router_log,
            context=self.context,
        )
        values_P = share.whole(self.head(hidden_pD))
        if self.normalisation is None:
            return values_P
        return (values_P - self.normalisation.mean) / self.normalisation.std


def sequence_ends(tokens: PackedTokens) -> Tensor:
    """int64 [N]: where a reward model looks: the last token of each sequence."""
    return moved(tokens.cu_seqlens[1:].long() - 1, tokens.token_ids.device)
