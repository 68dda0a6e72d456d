"""The parts that preference objectives share: packed pairs of answers, and the log-probs of the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf.backends.offload import on_device
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.types import PackedTokens, PlacedImage

if TYPE_CHECKING:
    from openrlhf.data.preferences import Pair


def pack_pairs(pairs: Sequence[Pair]) -> PackedTokens:
    """The sequences chosen 0, rejected 0, chosen 1, rejected 1, …; the targets of both are the actions.

    The tokens that both answers of a pair begin with (the prompt, and equal first tokens of the answers) are computed
    once for both.
    """
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    images = [answer.images for answer in answers]
    shared = [
        n
        for pair, chosen, rejected in zip(pairs, images[0::2], images[1::2], strict=True)
        for n in (0, common_beginning(pair.chosen.token_ids, pair.rejected.token_ids, chosen, rejected))
    ]
    return PackedTokens.from_sequences(
        [answer.token_ids for answer in answers],
        [answer.target_mask for answer in answers],
        shared_prefixes=shared,
        images=images,
    )


def common_beginning(
    first: Tensor,
    second: Tensor,
    first_images: Sequence[PlacedImage] = (),
    second_images: Sequence[PlacedImage] = (),
) -> int:
    """The number of equal tokens at the beginning of both. Each keeps at least one token of its own.

    Other images may have the same tokens: those and what follows are not shared, and no image is shared in part.
    """
    room = min(len(first), len(second)) - 1
    differs = (first[:room] != second[:room]).nonzero()
    common = int(differs[0]) if len(differs) else room
    for one, other in zip(first_images, second_images, strict=False):
        if one.start < common and (one.end > common or one.image.digest != other.image.digest):
            return one.start
    return common


def answer_logprobs(module: nn.Module, tokens: PackedTokens) -> Tensor:
    """float32 [N]: log π(y|x) of each sequence, the sum over its targets."""
    logprobs_A = module(tokens, temperature=1.0).logprobs_A
    return logprobs_A.new_zeros(tokens.num_sequences).index_add(0, tokens.action_sequences(), logprobs_A)


class Reference:
    """The frozen model that the policy's preferences are compared with."""

    def __init__(self, module: nn.Module, *, device: torch.device, offload: bool = False) -> None:
        """`offload`: the weights are on `device` only while they are used."""
        module.eval()
        self._module = module
        self._device = device
        self._offload = offload

    @torch.no_grad()
    def answer_logprobs(self, tokens: PackedTokens) -> Tensor:
        with on_device(self._module, self._device, offload=self._offload):
            return answer_logprobs(self._module, tokens.to(self._device))


class ReferenceLogprobs:
    """The reference's log-probs of a data set's answers, K per sample. Each is computed once, since the reference
    does not learn."""

    def __init__(
        self, samples: int, per_sample: int, compute: Callable[[Sequence[int]], Tensor], *, ranks: Ranks = ALONE
    ) -> None:
        """`compute` gives the log-probs of some samples, float32 [n, K]."""
        self._known_SK = torch.full((samples, per_sample), float("nan"))
        self._compute = compute
        self._ranks = ranks

    def complete(self, samples: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> None:
        """Compute what is missing for `samples`: each rank computes its own micro-batches, then all ranks exchange.

        Every rank must run the same number of forwards, since ranks that share weights run them together. So a
        micro-batch that has nothing left to compute runs one sample, and its result is dropped.
        """
        missing = {i for i in samples if bool(self._known_SK[i].isnan().any())}
        if not missing:
            return
        own: dict[int, Tensor] = {}
        for micro in micro_batches:
            wanted = [i for i in micro if i in missing]
            values = self._compute(wanted or [min(missing)]).cpu()
            own |= dict(zip(wanted, values, strict=False))
        for computed in self._ranks.gather(own):
            for i, values_K in computed.items():
                self._known_SK[i] = values_K

    def of(self, indices: Sequence[int]) -> Tensor:
        """The log-probs of these samples, float32 [n, K], on the CPU. `complete` must have computed them before."""
        return self._known_SK[list(indices)]

    def state_dict(self) -> dict[str, Any]:
        """The log-probs are saved, because a resumed run would compute them in other micro-batches, with other last
        bits."""
        return {"logprobs": self._known_SK.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known_SK.copy_(state["logprobs"])
