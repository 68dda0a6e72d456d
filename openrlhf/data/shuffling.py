"""The order of a pass over the data: a pure function of (seed, epoch)."""

from __future__ import annotations

import numpy as np


def shuffled(n: int, *, seed: int, epoch: int) -> np.ndarray:
    """int64 [n]: ranks of n raw random words. Raw words never change between numpy versions; `permutation` may."""
    words = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(n)
    return np.argsort(words, kind="stable")
