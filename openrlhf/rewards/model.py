"""Rewards from a reward model in this process: the score of a sample's last token.

Who waits on whom:
    score      puts its samples in the queue, waits for their futures
    _drive     one task while anything is queued: yields to the loop, takes what has come meanwhile up to the token
               budget, runs one packed forward, resolves its futures; ends when the queue is empty
As in the embedded engine everything happens between two turns of the caller's event loop: forwards of the reward model
overlap neither each other nor a decoding step, and there are no locks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrlhf.models.value import ValueModel, sequence_ends
from openrlhf.rewards.base import Reward, RewardError, RewardRequest
from openrlhf.types import PackedTokens

logger = logging.getLogger(__name__)


class _Sample(NamedTuple):
    token_ids: Tensor
    """int64 [T], on CPU."""
    shared: int
    """Leading tokens it has in common with the sample queued before it."""
    score: asyncio.Future[float]


class RewardModelSource:
    """Judges samples with one `ValueModel`, many requests to a forward.

    The model reads the tokens that the policy read and wrote, if each of the policy's tokens has the same id in the
    model's own tokenizer; otherwise their text, as the policy's template made it, tokenised once. What is longer than
    `max_length` loses its beginning: the score is read at the end of the answer, which must be the real one.
    """

    def __init__(
        self,
        model: ValueModel,
        tokenizer: Any,
        *,
        policy_tokenizer: Any,
        max_length: int,
        max_batch_tokens: int,
        name: str,
    ) -> None:
        """
        Args:
            model: in eval mode; stays the caller's.
            max_batch_tokens: most tokens in a forward; a longer sample goes alone.
            name: how errors call the model.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._max_batch_tokens = max_batch_tokens
        self._name = name
        self._embeddings = model.model.get_input_embeddings()
        self._reads_tokens = policy_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()
        self._waiting: deque[_Sample] = deque()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if not self._reads_tokens:
            logger.info(
                "reward model %s has another vocabulary than the policy: it reads the text, not the tokens",
                self._name,
            )

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        sequences = self._sequences(request)
        # One number for the whole request, not one per pair: samples that share the same beginning form one group.
        shared = _common_prefix(sequences)
        loop = asyncio.get_running_loop()
        samples = [_Sample(sequence, shared if i else 0, loop.create_future()) for i, sequence in enumerate(sequences)]
        self._waiting.extend(samples)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drive(), name="reward model")
        try:
            scores = await asyncio.gather(*(sample.score for sample in samples))
        except Exception as error:
            raise RewardError(f"{request.name}: reward model {self._name} failed: {error}") from error
        if not all(map(math.isfinite, scores)):
            raise RewardError(
                f"{request.name}: reward model {self._name} gave {scores}: its weights are damaged, or out of range in "
                "the dtype of --ds.param_dtype"
            )
        return [Reward(reward=score) for score in scores]

    async def close(self) -> None:
        """Nothing to give back: the model goes with this object."""

    def _sequences(self, request: RewardRequest) -> list[Tensor]:
        if self._reads_tokens and request.token_ids:
            sequences = [token_ids.cpu() for token_ids in request.token_ids]
        else:
            # No special tokens are added: a text made by a template has those it needs.
            encoded = self._tokenizer(list(request.queries), add_special_tokens=False)["input_ids"]
            sequences = [torch.tensor(token_ids, dtype=torch.int64) for token_ids in encoded]
        for sequence in sequences:
            if not len(sequence):
                raise RewardError(f"{request.name}: the text is empty for the tokenizer of reward model {self._name}")
            # On a GPU an id out of range ends the process, not the call.
            if int(sequence.max()) >= self._embeddings.num_embeddings:
                raise RewardError(
                    f"{request.name}: token {int(sequence.max())} is beyond the {self._embeddings.num_embeddings} "
                    f"embeddings of reward model {self._name}: is the tokenizer in its folder its own?"
                )
        return [sequence[-self._max_length :] for sequence in sequences]

    async def _drive(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)
            batch = self._take()
            if not batch:
                continue
            try:
                scores = self._forward(batch)
            except Exception as error:
                for sample in batch:
                    sample.score.set_exception(error)
            else:
                for sample, score in zip(batch, scores, strict=True):
                    sample.score.set_result(score)

    def _take(self) -> list[_Sample]:
        """Samples for one forward, in order of arrival. Those whose request was cancelled are dropped."""
        batch: list[_Sample] = []
        tokens = 0
        while self._waiting:
            sample = self._waiting[0]
            if sample.score.done():
                self._waiting.popleft()
                continue
            if batch and tokens + len(sample.token_ids) > self._max_batch_tokens:
                break
            tokens += len(sample.token_ids)
            batch.append(self._waiting.popleft())
        return batch

    @torch.no_grad()
    def _forward(self, batch: Sequence[_Sample]) -> list[float]:
        sequences = [sample.token_ids for sample in batch]
        tokens = PackedTokens.from_sequences(sequences, [torch.zeros_like(s, dtype=torch.bool) for s in sequences])
        tokens = dataclasses.replace(tokens, shared_prefixes=(0, *(sample.shared for sample in batch[1:])))
        tokens = tokens.to(self._embeddings.weight.device)
        return self._model(tokens, positions=sequence_ends(tokens)).tolist()


def _common_prefix(sequences: Sequence[Tensor]) -> int:
    """How many tokens all sequences begin with, each keeping at least one of its own."""
    room = min(len(sequence) for sequence in sequences) - 1
    first = sequences[0][:room]
    for other in sequences[1:]:
        differs = (first != other[: len(first)]).nonzero()
        first = first[: int(differs[0])] if len(differs) else first
    return len(first)
