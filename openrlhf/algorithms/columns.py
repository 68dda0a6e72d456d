"""Arithmetic on columns: one number per action token, several samples end to end, each sample by itself.

A column says where its samples lie in one of two ways: `sequences_A` (int64 [A], ascending) names the sample of each
token, `offsets` (N + 1 ascending numbers from 0 to A) gives sample i the tokens `offsets[i] : offsets[i + 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


def sequence_means(values_A: Tensor, sequences_A: Tensor) -> Tensor:
    """Each token's entry becomes the mean over its own sample; differentiable."""
    counts_N = sequences_A.bincount().clamp(min=1)
    return sequence_sums(values_A, sequences_A) / counts_N[sequences_A]


def sequence_sums(values_A: Tensor, sequences_A: Tensor) -> Tensor:
    """Each token's entry becomes the sum over its own sample; differentiable."""
    return values_A.new_zeros(len(sequences_A.bincount())).index_add(0, sequences_A, values_A)[sequences_A]


def shift_left(values_A: Tensor, offsets: Sequence[int]) -> Tensor:
    """y_t = x_{t+1} within each sample, and 0 for its last token."""
    layout = _Layout.of(offsets, like=values_A)
    return values_A.roll(-1).where(layout.following_A > 0, 0.0)


def discounted_sums(values_A: Tensor, offsets: Sequence[int], *, decay: float) -> Tensor:
    """y_t = x_t + decay · y_{t+1} within each sample, with y = 0 behind its last token.

    Takes log2(longest sample) passes over the column instead of one step per token: after the pass with stride s,
    y_t = Σ_{k < 2s} decay^k x_{t+k}, as far as the sample reaches. A pass beyond a sample's length adds nothing to
    it, so its numbers are the same to the bit whatever stands beside it.
    """
    layout = _Layout.of(offsets, like=values_A)
    sums_A = values_A.clone()
    stride = 1
    while stride < layout.longest:
        ahead_A = decay**stride * sums_A[stride:]
        sums_A[:-stride] += ahead_A.where(layout.following_A[:-stride] >= stride, 0.0)
        stride *= 2
    return sums_A


class _Layout(NamedTuple):
    following_A: Tensor
    """int64 [A]: how many tokens of the same sample follow each token."""
    longest: int

    @staticmethod
    def of(offsets: Sequence[int], *, like: Tensor) -> _Layout:
        import torch  # here, so that the registries that use columns import without it

        bounds = torch.tensor(offsets, dtype=torch.long)
        lengths_N = bounds.diff()
        sequences_A = torch.repeat_interleave(torch.arange(len(lengths_N)), lengths_N)
        following_A = bounds[1:][sequences_A] - 1 - torch.arange(len(sequences_A))
        longest = int(lengths_N.max()) if len(lengths_N) else 0
        return _Layout(following_A.to(like.device), longest)
