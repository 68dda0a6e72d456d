"""Packed streams of random tokens in which the samples of each prompt begin with it."""

from collections.abc import Sequence

import torch

from openrlhf.types import PackedTokens, Segment


def prompted_segment(token_ids: torch.Tensor, prompt: int) -> Segment:
    """Everything after the first `prompt` tokens was sampled."""
    T = len(token_ids)
    return Segment(
        token_ids=token_ids,
        action_mask=torch.arange(T) >= prompt,
        rollout_logprobs=None,
        versions=torch.zeros(T, dtype=torch.int32),
        turn_rewards=torch.zeros(T),
    )


def prompted_stream(
    groups: Sequence[tuple[int, Sequence[int]]], *, lowest: int = 0, vocabulary: int = 512, seed: int = 0
) -> PackedTokens:
    """`groups`: (prompt length, response lengths) of each prompt. Token ids are `lowest` … `vocabulary` - 1."""
    generator = torch.Generator().manual_seed(seed)
    segments = []
    for prompt_length, responses in groups:
        prompt = torch.randint(lowest, vocabulary, (prompt_length,), generator=generator)
        for response in responses:
            answer = torch.randint(lowest, vocabulary, (response,), generator=generator)
            segments.append(prompted_segment(torch.cat([prompt, answer]), prompt_length))
    return PackedTokens.from_segments(segments)
