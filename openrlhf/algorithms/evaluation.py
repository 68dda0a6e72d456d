"""Estimates of success from repeated samples."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of "at least one of k samples is right" from n samples of which `correct` are.

    pass@k = 1 − C(n − c, k) / C(n, k)   (arXiv:2107.03374)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    return 1.0 - comb(n - correct, k) / comb(n, k)
