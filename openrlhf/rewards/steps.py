"""Steps of an answer: where they end in the policy's own tokens, and what of their rewards is recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor


class StepRewards(NamedTuple):
    """The rewards of an answer's steps, whose sum is the answer's reward."""

    ends: tuple[int, ...]
    """The last token of each step, ascending: places in the tokens that were judged."""
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReader:
    """How a reward model judges steps.

    With ℓ_j the model's number at the last token of step j of K, and p_j = σ(ℓ_j), or ℓ_j itself with `logits`, the
    rewards that stand on the steps are

        sum     p_j
        mean    p_j / K
        min     p_j at the first of the worst steps, 0 at the others
        last    p_K at the last step, 0 at the others

    so that their sum is the answer's score. `min` is how Math-Shepherd (arXiv:2312.08935) scores an answer, and the
    credit of PURE (arXiv:2504.15275): with γ = 1 the return of all tokens up to the worst step is its reward, and that
    of later ones 0.
    """

    tokenizer: Any
    """The policy's."""
    separator: str | None
    """What ends a step; None: every token of the policy is a step."""
    total: Literal["sum", "mean", "min", "last"] = "min"
    logits: bool = False

    def ends(self, token_ids: Tensor, action_mask: Tensor) -> tuple[int, ...]:
        """The last token of each step of the policy's own tokens; nothing where it wrote none."""
        if self.separator is None:
            return tuple(action_mask.nonzero().flatten().tolist())
        return step_ends(token_ids, action_mask, self.tokenizer, separator=self.separator)

    def rewards(self, values: Sequence[float]) -> list[float]:
        """What stands on each step, from what the model gave it."""
        judged = list(values) if self.logits else [_sigmoid(value) for value in values]
        if self.total == "sum":
            return judged
        if self.total == "mean":
            return [value / len(judged) for value in judged]
        kept = judged.index(min(judged)) if self.total == "min" else len(judged) - 1
        return [value if step == kept else 0.0 for step, value in enumerate(judged)]


def step_ends(token_ids: Tensor, action_mask: Tensor, tokenizer: Any, *, separator: str) -> tuple[int, ...]:
    """The tokens with which a separator is complete, in the policy's own tokens, and the last token of each turn.

    A token that holds the end of a separator and more ends the step: its text is not divided. A step without text, such
    as what follows a separator at the end of an answer, belongs to the step before it, or, at the beginning of a turn,
    to the one after.
    """
    ids, ends = token_ids.tolist(), []
    for start, stop in _runs(action_mask.tolist()):
        own: list[int] = []
        while start < stop:
            end = _separated(ids, start, stop, tokenizer, separator)
            text = decoded(tokenizer, ids[start:end], skip_special_tokens=True)
            if text.replace(separator, "").strip():
                own.append(end - 1)
            elif own:
                own[-1] = end - 1
            elif end == stop:
                own = [end - 1]
            start = end
        ends += own
    return tuple(ends)


def _separated(ids: list[int], start: int, stop: int, tokenizer: Any, separator: str) -> int:
    """One past the first token with which the text from `start` on has a separator; `stop` if it never has.

    The text grows by doubling, and then the token is found by halving, so that texts of about the length of the step
    are decoded, and few of them. Tokens are decoded together: one of them alone may be a part of a character.
    """

    def has(end: int) -> bool:
        return separator in decoded(tokenizer, ids[start:end], skip_special_tokens=False)

    low, high = start, min(start + 16, stop)
    while not has(high):
        if high == stop:
            return stop
        low, high = high, min(start + 2 * (high - start), stop)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has(middle) else (middle, high)
    return high


def decoded(tokenizer: Any, ids: list[int], *, skip_special_tokens: bool) -> str:
    """The text of tokens, with its spaces as they are."""
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Where runs of True begin, and one past where they end."""
    edges = [i for i, (before, here) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if before != here]
    return list(zip(edges[0::2], edges[1::2], strict=True))


def _sigmoid(value: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * value))
