"""Randomness as a function of where a token stands, never of a shared generator."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, e.g. (run seed, prompt ordinal, sample, turn).

    Retries, batching, order and resume do not change the parts, so they do not change what is sampled.
    """
    digest = blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
