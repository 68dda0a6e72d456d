"""Which rank gets which samples of a round."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.agents.seeds import derive_seed
from openrlhf.data.packing import by_middle, evenly
from openrlhf.learners.steps import StepSettings, roster, shuffled
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
    order = shuffled(listed, seed=derive_seed(settings.seed, "order", round_index, 0))
    rank_of: dict[SampleKey, int] = {}
    for part in evenly(order, parts=settings.steps_per_epoch):
        tokens: dict[SampleKey, int] = {}
        for i in part:
            episode = listed[i].key._replace(segment=0)
            if episode not in rank_of:
                tokens[episode] = tokens.get(episode, 0) + listed[i].tokens
        rank_of |= zip(tokens, by_middle(list(tokens.values()), parts=ranks), strict=True)
    shares: list[list[TrainingSample]] = [[] for _ in range(ranks)]
    for sample in samples:
        shares[rank_of[sample.key._replace(segment=0)]].append(sample)
    return shares
