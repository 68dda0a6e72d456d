"""How token losses become the loss of one optimizer step: L = Σ_i w_i Σ_t l_{i,t}, one weight per sequence.

An episode is one sample, in however many sequences (segments) its tokens come: o_i is all that the policy wrote in it,
and N counts episodes. The weights are functions of the whole step's samples, worked out before it is cut into
micro-batches. So a micro-batch contributes its plain weighted sum, and the gradient is the same however the step is cut
or ordered.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import StrEnum
from math import comb


class Aggregation(StrEnum):
    """Which mean over a step's action tokens the loss is."""

    TOKEN = "token"
    """Over all tokens alike (DAPO, arXiv:2503.14476): w_i = 1 / Σ_j |o_j|."""
    SEQUENCE = "sequence"
    """Over samples, each the mean over its own tokens (GRPO, arXiv:2402.03300): w_i = 1 / (N |o_i|)."""
    CONSTANT = "constant"
    """Over samples, each a sum divided by a fixed length L (Dr. GRPO, arXiv:2503.20783): w_i = 1 / (N L)."""
    PROMPT_MEAN = "prompt_mean"
    """Over prompts, each the mean over all tokens of its samples (ScaleRL, arXiv:2510.13786): with P prompts and T_p
    tokens of prompt p's samples in the step, w_i = 1 / (P T_p)."""
    TOKEN_SUM = "token_sum"
    """Over samples, each the sum over its own tokens: w_i = 1 / N."""


AGGREGATION_SYNONYMS = (
    ("token_mean", Aggregation.TOKEN),
    ("token-mean", Aggregation.TOKEN),
    ("sequence_mean", Aggregation.SEQUENCE),
    ("seq_mean", Aggregation.SEQUENCE),
    ("sample_mean", Aggregation.SEQUENCE),
    ("seq-mean-token-mean", Aggregation.SEQUENCE),
    ("seq-mean-token-sum-norm", Aggregation.CONSTANT),
    ("seq_mean_token_sum_norm", Aggregation.CONSTANT),
    ("seq-mean-token-sum", Aggregation.TOKEN_SUM),
)
"""Other tools' words, which --algo.loss_agg takes as well."""


def sample_weights(
    aggregation: Aggregation,
    action_counts: Sequence[int],
    *,
    episodes: Sequence[Hashable] | None = None,
    prompts: Sequence[Hashable] | None = None,
    constant_length: int | None = None,
) -> list[float]:
    """w for each sequence of a step, from their numbers of action tokens. Sequences without one weigh 0.

    `episodes` and `prompts` name the episode and the prompt of each sequence; None: each is one of its own.
    """
    names = range(len(action_counts)) if episodes is None else episodes
    lengths: dict[Hashable, int] = {}
    for name, count in zip(names, action_counts, strict=True):
        lengths[name] = lengths.get(name, 0) + count
    total = sum(lengths.values())
    samples = sum(length > 0 for length in lengths.values())
    if total == 0:
        return [0.0] * len(action_counts)
    match aggregation:
        case Aggregation.TOKEN:
            weights = dict.fromkeys(lengths, 1.0 / total)
        case Aggregation.SEQUENCE:
            weights = {name: 1.0 / (samples * length) for name, length in lengths.items() if length}
        case Aggregation.TOKEN_SUM:
            weights = dict.fromkeys(lengths, 1.0 / samples)
        case Aggregation.PROMPT_MEAN:
            prompt_of = dict(zip(names, names if prompts is None else prompts, strict=True))
            tokens: dict[Hashable, int] = {}
            for name, length in lengths.items():
                tokens[prompt_of[name]] = tokens.get(prompt_of[name], 0) + length
            asked = sum(count > 0 for count in tokens.values())
            weights = {name: 1.0 / (asked * tokens[prompt_of[name]]) for name, length in lengths.items() if length}
        case Aggregation.CONSTANT:
            if not constant_length:
                raise ValueError("constant aggregation needs the length to divide by")
            weights = dict.fromkeys(lengths, 1.0 / (samples * constant_length))
    return [weights[name] if count else 0.0 for name, count in zip(names, action_counts, strict=True)]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of "at least one of k samples is right" from n samples of which `correct` are.

    pass@k = 1 − C(n − c, k) / C(n, k)   (arXiv:2107.03374)
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    return 1.0 - comb(n - correct, k) / comb(n, k)
