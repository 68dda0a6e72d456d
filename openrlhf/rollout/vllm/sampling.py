"""Our sampling parameters in vLLM's words. Imports no vLLM: a mapping is data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.types import SamplingParams


def sampling_arguments(
    params: SamplingParams,
    *,
    room: int,
    end_ids: Sequence[int],
    deterministic: bool,
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams`.

    Args:
        room: tokens that the prompt leaves in the context.
        end_ids: every id that ends a sequence. vLLM itself knows the tokenizer's alone, so all are named; vLLM leaves
            those out under `ignore_eos` only if they are its own.
        deterministic: whether the seed is passed on. A seeded request has a generator of its own, which costs vLLM its
            batched sampling.
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
        # 0: the sampled token's alone. Each one more would be sorted out of the vocabulary.
        "logprobs": 0 if params.wants_logprobs else None,
        # Lists of numbers; otherwise vLLM makes a dictionary and an object for every token.
        "flat_logprobs": True,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        # Only stop strings need the text of every token; others are decoded once, at their end.
        "detokenize": bool(params.stop),
    }
