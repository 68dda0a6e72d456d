"""Which rank gets which samples of a round."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.data.packing import by_middle
from openrlhf.learners.steps import StepSettings, roster, split
from openrlhf.types import SampleKey, TrainingBatch, TrainingSample


def share_out(
    samples: Sequence[TrainingSample], settings: StepSettings, *, round_index: int, ranks: int
) -> list[list[TrainingSample]]:
    """Every rank's samples, in their order; episodes stay whole.

    Ranks wait for each other at every optimizer step, so tokens are divided evenly within each step of the first
    epoch: laid end to end, a step's episodes go to the rank in whose part of the tokens their middle lies. Neighbours
    thus stay together, and those of a prompt share its forward.
    """
    listed = roster(TrainingBatch(samples=list(samples)))
    rank_of: dict[SampleKey, int] = {}
    for part in split(listed, settings, round_index=round_index, epoch=0):
        tokens: dict[SampleKey, int] = {}
        for i in part:
            tokens[listed[i].episode] = tokens.get(listed[i].episode, 0) + listed[i].tokens
        rank_of |= zip(tokens, by_middle(list(tokens.values()), parts=ranks), strict=True)
    shares: list[list[TrainingSample]] = [[] for _ in range(ranks)]
    for sample in samples:
        shares[rank_of[sample.key._replace(segment=0)]].append(sample)
    return shares
