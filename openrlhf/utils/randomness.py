"""Random seeds and orders as pure functions of a position in the run, never of a shared generator."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, e.g. (run seed, prompt ordinal, sample, turn).

    Retries, batching, order and resume do not change the parts, so they do not change what is sampled.
    """
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def shuffled(n: int, *, seed: int, epoch: int) -> np.ndarray:
    """int64 [n]: ranks of n raw random words. Raw words never change between numpy versions; `permutation` may."""
    words = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(n)
    return np.argsort(words, kind="stable")


def uniforms(n: int, *, seed: int) -> np.ndarray:
    """float64 [n] in [0, 1), from raw random words, which never change between numpy versions."""
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(n)
    return (words >> np.uint64(11)) * 2.0**-53
