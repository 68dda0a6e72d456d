"""From a round to optimizer steps, and from a step to micro-batches, for critic and policy alike.

`assign_to_ranks` says which rank gets which samples; `optimizer_steps` cuts and packs them once. Ranks compute
together: a rank with fewer micro-batches than another runs a `filler` that counts for nothing.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
from torch import Tensor

from openrlhf.algorithms.covariance import TokenChoice, chosen_tokens
from openrlhf.algorithms.reduction import Aggregation, sample_weights
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.data.packing import by_middle, evenly
from openrlhf.learners.accumulation import MicroBatching, MicroBatchSizer
from openrlhf.types import PackedBatch, PackedTokens, SampleKey, TrainingBatch, TrainingSample
from openrlhf.utils.randomness import derive_seed, uniforms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How a round is cut into optimizer steps."""

    epochs: int
    batch_size: int
    """Samples of an optimizer step, at most."""
    batching: MicroBatching
    aggregation: Aggregation
    """The aggregation of the policy loss."""
    regulariser_aggregation: Aggregation = Aggregation.TOKEN
    """The aggregation of KL and entropy terms."""
    constant_length: int | None = None
    """Divisor of constant aggregation."""
    skip_idle: bool = False
    """Samples whose advantages are all 0 get no forward. Right only where nothing but the advantage pulls at them."""
    chosen: TokenChoice | None = None
    """Tokens that the policy loss treats differently, chosen from old log-probs, which every sample needs then.
    None: there are none."""
    seed: int

    def steps_per_epoch(self, samples: int) -> int:
        """Optimizer steps in one pass over a round of so many samples: as few as have room for all."""
        return -(-samples // self.batch_size)

    def on_policy(self, samples: int) -> bool:
        """Whether a round of so many samples is one optimizer step: what it updates are the weights that sampled."""
        return self.epochs * self.steps_per_epoch(samples) <= 1


class MicroBatch(NamedTuple):
    """A packed batch and what each of its action tokens weighs in the step's losses."""

    packed: PackedBatch
    policy_weights_A: Tensor
    regulariser_weights_A: Tensor
    value_weights_A: Tensor
    token_share: float
    """Its tokens as a part of the step's, of all ranks."""
    is_filler: bool = False
    """It weighs nothing and is in no metric."""
    keys: tuple[SampleKey, ...] = ()
    """The keys of its samples."""
    chosen_A: Tensor | None = None
    """bool [A]: the tokens that were chosen by `StepSettings.chosen`."""


def filler() -> PackedBatch:
    """Two tokens, one of them an action. Its columns are 0, except old log-probs: those are the current ones."""
    tokens = PackedTokens.from_sequences([torch.zeros(2, dtype=torch.int64)], [torch.tensor([False, True])])
    zero = torch.zeros(1)
    return PackedBatch(
        tokens=tokens,
        rows=torch.zeros(1, dtype=torch.int64),
        rollout_logprobs_A=zero,
        reference_logprobs_A=zero,
        values_A=zero,
        returns_A=zero,
        advantages_A=zero,
        teacher_logprobs_A=zero,
        teacher_ids_AK=torch.zeros(1, 1, dtype=torch.int32),
        teacher_logprobs_AK=zero[:, None],
    )


FILLER = MicroBatch(filler(), torch.zeros(1), torch.zeros(1), torch.zeros(1), token_share=0.0, is_filler=True)


SUSPICIOUS = {
    "advantages_A": "the advantage",
    "returns_A": "the return",
    "old_logprobs_A": "the log-prob before the update",
    "reference_logprobs_A": "the reference's log-prob",
    "rollout_logprobs_A": "the sampled log-prob",
    "values_A": "the value",
    "teacher_logprobs_A": "the teacher's log-prob",
}
"""Columns that a loss is made of, as people call them."""
MOST_NAMED = 5
"""Samples in a message."""


def named(keys: Sequence[SampleKey]) -> str:
    """
    >>> named([SampleKey(17, 0), SampleKey(17, 3)])
    'prompt 17 sample 0, prompt 17 sample 3'
    """
    unique = list(dict.fromkeys((key.prompt, key.sample) for key in keys))
    more = f" and {len(unique) - MOST_NAMED} more" if len(unique) > MOST_NAMED else ""
    return ", ".join(f"prompt {prompt} sample {sample}" for prompt, sample in unique[:MOST_NAMED]) + more


class LazyMicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are packed when they are first asked for: the first one is computed while others are packed.
    Those that were packed stay, for a second model."""

    def __init__(self, cut: Sequence[Sequence[int]], pack: Callable[[Sequence[int]], MicroBatch]) -> None:
        self._cut = cut
        self._pack = pack
        self._packed: list[MicroBatch | None] = [None] * len(cut)

    def fill_up(self, count: int) -> None:
        self._packed += [FILLER] * (count - len(self))

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._packed[index]
        if found is None:
            found = self._packed[index] = self._pack(self._cut[index])
        return found


class Step:
    """One optimizer step: this rank's samples, cut into micro-batches, and cut again where these do not fit."""

    filler = FILLER

    def __init__(
        self,
        batch: TrainingBatch,
        kept: list[int],
        columns: list[Tensor],
        *,
        tokens: int,
        chosen_A: Tensor | None,
        fitting: MicroBatchSizer,
        ranks: Ranks,
    ) -> None:
        """`kept`: samples of this rank that are run. `columns`: what each action token of the batch weighs, in the
        order of `MicroBatch`. `tokens`: of the step, on all ranks. `chosen_A`: of the batch, as in `MicroBatch`."""
        self.fitting = fitting
        self._batch = batch
        self._kept = kept
        self._columns = columns
        self._tokens = tokens
        self._chosen_A = chosen_A
        self._ranks = ranks
        self._cut_by = fitting.batching
        self._micro_batches = self._cut()

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches())

    def __len__(self) -> int:
        return len(self._micro_batches)

    def micro_batches(self) -> LazyMicroBatches:
        """The micro-batches, as many on every rank. Collective where they do not fit any more, which all ranks know."""
        if self._cut_by is not self.fitting.batching:
            self._cut_by = self.fitting.batching
            self._micro_batches = self._cut()
            self.fill_up(max(self._ranks.gather(len(self))))
        return self._micro_batches

    def single_samples(self) -> Iterator[MicroBatch]:
        """Each sample that is run as a micro-batch of its own. It weighs what it weighs in the step."""
        return (self._pack([index]) for index in self._kept)

    def fill_up(self, count: int) -> None:
        """Add fillers, which count for nothing, until there are `count` micro-batches, and at least one."""
        self._micro_batches.fill_up(max(1, count))

    def lacks(self, name: str) -> bool:
        """Whether a column of the batch is missing, or no number, for a sample that is run."""
        column = getattr(self._batch, name)
        return any(column is None or bool(column[self._batch.actions_of(i)].isnan().any()) for i in self._kept)

    def size(self, micro: MicroBatch) -> tuple[int, int]:
        """Tokens and samples."""
        return micro.packed.tokens.num_tokens, micro.packed.tokens.num_sequences

    def suspects(self, odd: Sequence[MicroBatch]) -> list[str]:
        """Why this rank's part of the step may not be finite: which columns are not, on which samples; else whose
        losses are not, in `odd`."""
        found = []
        for name, said in SUSPICIOUS.items():
            column = getattr(self._batch, name)
            if column is not None:
                # A rollout log-prob that is no number was never asked for.
                good_A = ~column.isinf() if name == "rollout_logprobs_A" else column.isfinite()
                keys = [self._batch.samples[i].key for i in self._kept if not good_A[self._batch.actions_of(i)].all()]
                found += [f"{said} of {named(keys)}"] if keys else []
        earned = [s.key for s in (self._batch.samples[i] for i in self._kept) if not s.rewards_A.isfinite().all()]
        found = [f"the reward of {named(earned)}", *found] if earned else found
        keys = [key for micro in odd for key in micro.keys]
        return found or ([f"the loss of {named(keys)}"] if keys else [])

    def _cut(self) -> LazyMicroBatches:
        return LazyMicroBatches(self._cut_by.cut(self._batch, self._kept), self._pack)

    def _pack(self, micro: Sequence[int]) -> MicroBatch:
        packed = self._batch.pack(micro)
        share = packed.tokens.num_tokens / self._tokens
        policy_A, regulariser_A, value_A = (column[packed.rows] for column in self._columns)
        keys = tuple(self._batch.samples[i].key for i in micro)
        chosen_A = None if self._chosen_A is None else self._chosen_A[packed.rows]
        return MicroBatch(packed, policy_A, regulariser_A, value_A, token_share=share, keys=keys, chosen_A=chosen_A)


@dataclass(frozen=True, slots=True, order=True)
class SampleInfo:
    """What every rank knows of a sample, also of one that lies on another rank."""

    key: SampleKey
    actions: int
    tokens: int
    rank: int
    index: int
    """Its place in its rank's batch."""

    @property
    def episode(self) -> SampleKey:
        """The same for all segments of an episode."""
        return self.key._replace(segment=0)


def gather_sample_info(batch: TrainingBatch, ranks: Ranks = ALONE) -> list[SampleInfo]:
    """The round's samples in an order that does not depend on how they are shared out. Collective."""
    counts = [end - start for start, end in itertools.pairwise(batch.action_offsets)]
    own = [(sample.key, count, len(sample)) for sample, count in zip(batch.samples, counts, strict=True)]
    return sorted(
        SampleInfo(key, actions, tokens, rank, index)
        for rank, share in enumerate(ranks.gather(own))
        for index, (key, actions, tokens) in enumerate(share)
    )


def optimizer_steps(
    batch: TrainingBatch,
    settings: StepSettings,
    *,
    round_index: int,
    fitting: MicroBatchSizer | None = None,
    ranks: Ranks = ALONE,
) -> list[Step]:
    """This rank's part of the round's optimizer steps. Collective.

    n samples are ⌈n / batch size⌉ steps per epoch, as even as they can be; an episode is one sample, and its segments
    are in one step. So a round that lost some samples to failures keeps its number of steps, and one of few samples
    has few steps. Which samples are in a step, and what they weigh, follows from all ranks' samples, before any is
    skipped or packed: an idle sample costs no forward and still counts in the denominators, of which it is a part.
    Every rank has the same number of micro-batches in a step, and at least one: a gradient of 0 is a step too, for the
    optimizer's momentum goes on.

    `fitting`: how steps are cut at the moment; None: as the settings say.
    """
    fitting = fitting or MicroBatchSizer(settings.batching)
    listed = gather_sample_info(batch, ranks)
    steps = []
    for epoch in range(settings.epochs):
        parts = split(listed, settings, round_index=round_index, epoch=epoch)
        draws_A = None if settings.chosen is None else _draws(batch, round_index, epoch)
        steps += [_step(batch, [listed[i] for i in part], settings, fitting, ranks, draws_A) for part in parts]
    sizes = zip(*ranks.gather([len(step) for step in steps]), strict=True)
    for step, size in zip(steps, sizes, strict=True):
        step.fill_up(max(size))
    return steps


def split(samples: Sequence[SampleInfo], settings: StepSettings, *, round_index: int, epoch: int) -> list[list[int]]:
    """Which of the round's samples are in each optimizer step of an epoch, by their places in the list."""
    episodes: dict[SampleKey, list[int]] = {}
    for index in shuffled(samples, seed=derive_seed(settings.seed, "order", round_index, epoch)):
        episodes.setdefault(samples[index].episode, []).append(index)
    parts = evenly(list(episodes.values()), parts=settings.steps_per_epoch(len(episodes)))
    return [[index for episode in part for index in episode] for part in parts]


def shuffled(samples: Sequence[SampleInfo], *, seed: int) -> list[int]:
    """The samples in random order, those of a prompt side by side: they share its forward."""
    by_prompt: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.key.prompt, []).append(index)
    prompts = list(by_prompt.values())
    random.Random(seed).shuffle(prompts)
    return [index for prompt in prompts for index in prompt]


def trained_samples(batch: TrainingBatch, settings: StepSettings) -> list[int]:
    """Samples that an update will run forward: all, or those whose advantages are not all 0."""
    if not settings.skip_idle or batch.advantages_A is None:
        return list(range(len(batch)))
    return [i for i in range(len(batch)) if bool(batch.advantages_A[batch.actions_of(i)].any())]


def _draws(batch: TrainingBatch, round_index: int, epoch: int) -> Tensor:
    """float64 [A] in [0, 1): of each token of the round its own, whatever stands beside it."""
    seeds = [derive_seed("chosen", round_index, epoch, *sample.key) for sample in batch.samples]
    sizes = [end - start for start, end in itertools.pairwise(batch.action_offsets)]
    drawn = [torch.from_numpy(uniforms(size, seed=seed)) for seed, size in zip(seeds, sizes, strict=True)]
    return torch.cat(drawn) if drawn else torch.empty(0, dtype=torch.float64)


def _chosen(batch: TrainingBatch, rows: Tensor, choice: TokenChoice, draws_A: Tensor, ranks: Ranks) -> Tensor:
    """bool [A] over this rank's batch: the chosen ones among `rows`, which are its tokens of a step. Collective."""
    if batch.old_logprobs_A is None or batch.advantages_A is None:
        raise ValueError("tokens are chosen by their advantages and old log-probs, and the batch has none")
    columns = (batch.advantages_A[rows], batch.old_logprobs_A[rows], draws_A[rows])
    chosen_A = torch.zeros(batch.num_actions, dtype=torch.bool)
    chosen_A[rows] = chosen_tokens(*columns, choice, gather=ranks.gather)
    return chosen_A


def _step(
    batch: TrainingBatch,
    members: Sequence[SampleInfo],
    settings: StepSettings,
    fitting: MicroBatchSizer,
    ranks: Ranks,
    draws_A: Tensor | None,
) -> Step:
    tokens, rank = sum(member.tokens for member in members), ranks.index
    weights = functools.partial(
        sample_weights,
        action_counts=[member.actions for member in members],
        episodes=[member.episode for member in members],
        prompts=[member.key.prompt for member in members],
        constant_length=settings.constant_length,
    )
    columns = [
        _column(batch, members, weights(aggregation), rank)
        for aggregation in (settings.aggregation, settings.regulariser_aggregation, Aggregation.TOKEN)
    ]
    own = [member.index for member in members if member.rank == rank]
    chosen_A = None
    if settings.chosen is not None and draws_A is not None:
        rows = [torch.arange(batch.num_actions)[batch.actions_of(index)] for index in own]
        chosen_A = _chosen(batch, torch.cat([*rows, torch.empty(0).long()]), settings.chosen, draws_A, ranks)
    trained = set(trained_samples(batch, settings))
    kept = [index for index in own if index in trained]
    return Step(batch, kept, columns, tokens=tokens, chosen_A=chosen_A, fitting=fitting, ranks=ranks)


def _column(batch: TrainingBatch, members: Sequence[SampleInfo], weights: Sequence[float], rank: int) -> Tensor:
    """[A] over this rank's batch; 0 outside this step."""
    per_sample = [0.0] * len(batch)
    for member, weight in zip(members, weights, strict=True):
        if member.rank == rank:
            per_sample[member.index] = weight
    return batch.per_action(per_sample)


def assign_to_ranks(
    samples: Sequence[TrainingSample], settings: StepSettings, *, round_index: int, ranks: int
) -> list[list[TrainingSample]]:
    """Every rank's samples, in their order; episodes stay whole.

    Ranks wait for each other at every optimizer step, so tokens are divided evenly within each step of the first
    epoch: laid end to end, a step's episodes go to the rank in whose part of the tokens their middle lies. Neighbours
    thus stay together, and those of a prompt share its forward.
    """
    listed = gather_sample_info(TrainingBatch(samples=list(samples)))
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


if TYPE_CHECKING:
    from openrlhf.learners.accumulation import MicroBatchSource

    _: type[MicroBatchSource[MicroBatch]] = Step
