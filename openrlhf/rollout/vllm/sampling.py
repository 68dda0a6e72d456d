"""Our sampling parameters in vLLM's words. Imports no vLLM: a mapping is data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from openrlhf.types import UNTOLD, SamplingParams, Supports


def sampling_arguments(
    params: SamplingParams,
    *,
    room: int,
    end_ids: Sequence[int],
    deterministic: bool,
    likeliest: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`.

    Args:
        room: tokens that the prompt leaves in the context.
        end_ids: every id that ends a sequence. vLLM itself knows the tokenizer's alone, so all are named; vLLM leaves
            those out under `ignore_eos` only if they are its own.
        deterministic: whether the seed is passed on. A seeded request has a generator of its own, which costs vLLM its
            batched sampling.
        likeliest: the number of tokens whose log-probs come along with a sampled one (`likeliest_told`).
    """
    ends = () if params.ignore_eos else end_ids
    return {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": int(params.top_k),
        "min_p": float(params.min_p),
        "repetition_penalty": float(params.repetition_penalty),
        "presence_penalty": float(params.presence_penalty),
        "frequency_penalty": float(params.frequency_penalty),
        "max_tokens": room if params.max_tokens is None else min(room, int(params.max_tokens)),
        "min_tokens": int(params.min_tokens),
        "stop": list(params.stop) or None,
        "stop_token_ids": sorted({*ends, *params.stop_token_ids}) or None,
        "ignore_eos": params.ignore_eos,
        # torch's generators take 63 bits
        "seed": int(params.seed) % 2**63 if deterministic and params.seed is not None else None,
        # 0: the sampled token's alone. Each one more is sorted out of the vocabulary.
        "logprobs": likeliest if params.wants_logprobs or likeliest else None,
        # Lists of numbers; otherwise vLLM makes a dictionary and an object for every token.
        "flat_logprobs": True,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        # Only stop strings need the text of every token; others are decoded once, at their end.
        "detokenize": bool(params.stop),
    }


def likeliest_told(params: SamplingParams, *, vocab_size: int) -> int:
    """How many of the likeliest tokens vLLM must tell to say what a token was chosen among: one more than it may be,
    because only a token without a probability shows that there are no others. vLLM keeps more than `top_k` tokens where
    several are as likely as the last."""
    if not params.wants_supports:
        return 0
    most = min(params.supports, params.top_k) if params.top_k > 0 else params.supports
    return min(most + 1, vocab_size)


class Told(NamedTuple):
    """What vLLM's flat lists say of sampled tokens."""

    logprobs: list[float]
    """Of each sampled token."""
    supports: Supports


def read_told(found: Any, *, vocab_size: int) -> Told:
    """From vLLM's `FlatLogprobs`, whose entries of a token are itself and then the likeliest ones. The token may be
    there a second time, among the likeliest; not in parts of a stream that vLLM has put together."""
    starts, ends = np.array(found.start_indices, dtype=np.int64), np.array(found.end_indices, dtype=np.int64)
    ids, logprobs = np.array(found.token_ids, dtype=np.int32), np.array(found.logprobs, dtype=np.float64)
    rows = np.repeat(np.arange(len(starts)), ends - starts)
    again = ids == ids[starts][rows]
    again[starts] = False
    kept = np.isfinite(logprobs) & ~again
    counts = np.bincount(rows, weights=~again, minlength=len(starts))
    sizes = np.bincount(rows, weights=kept, minlength=len(starts)).astype(np.int32)
    sizes[(sizes == counts) & (counts < vocab_size)] = UNTOLD
    kept &= (sizes != UNTOLD)[rows]
    return Told(logprobs[starts].tolist(), Supports(torch.from_numpy(sizes), torch.from_numpy(ids[kept])))
