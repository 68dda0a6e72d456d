"""Rewards from a reward model, in this process or elsewhere: the score of a sample's last token."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openrlhf.backends.offload import on_device
from openrlhf.models.value import ValueModel, sequence_ends
from openrlhf.rewards.base import Reward, RewardError, RewardGoneError, RewardRequest
from openrlhf.rewards.batching import Batcher, Forward, Item
from openrlhf.rewards.steps import StepReader, StepRewards
from openrlhf.types import PackedTokens, moved

logger = logging.getLogger(__name__)


class UnreadableError(RewardError):
    """A sequence that the model cannot read."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        """The place of the text among those given."""


class RewardReader:
    """Turns texts into the tokens that a reward model reads, and refuses scores that are not numbers.

    A text that is longer than `max_length` loses its beginning: the score is read at the end of the answer, which must
    be the real end.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, max_length: int, name: str) -> None:
        """`tokenizer`: the model's own. `vocab_size`: how many embeddings it has. `name`: how errors call it."""
        self.name = name
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length

    def knows(self, tokenizer: Any) -> bool:
        """Whether each token of this tokenizer has the same id in the model's own."""
        return tokenizer.get_vocab().items() <= self._tokenizer.get_vocab().items()

    def read(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of texts, int64 [T] each; raises UnreadableError."""
        # No special tokens are added: a text made by a template has those it needs.
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return self.cut([torch.tensor(token_ids, dtype=torch.int64) for token_ids in encoded])

    def cut(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The last `max_length` tokens of each; raises UnreadableError."""
        for index, sequence in enumerate(sequences):
            if not len(sequence):
                raise UnreadableError(index, f"the text is empty for the tokenizer of reward model {self.name}")
            # On a GPU an id out of range ends the process, not the call.
            if int(sequence.max()) >= self._vocab_size:
                raise UnreadableError(
                    index,
                    f"token {int(sequence.max())} is beyond the {self._vocab_size} embeddings of reward model "
                    f"{self.name}: is the tokenizer in its folder its own?",
                )
        return [sequence[-self._max_length :] for sequence in sequences]

    def checked(self, scores: Sequence[float]) -> Sequence[float]:
        """The same, if all are numbers; raises RewardError."""
        if not all(map(math.isfinite, scores)):
            raise RewardError(
                f"reward model {self.name} gave {list(scores)}: its weights are damaged, or out of range in the dtype "
                "of --ds.param_dtype"
            )
        return scores


class RewardModel(RewardReader):
    """A `ValueModel` and its tokenizer: scores of many sequences in one forward."""

    def __init__(
        self,
        model: ValueModel,
        tokenizer: Any,
        *,
        max_length: int,
        name: str,
        device: torch.device | None = None,
        offload: bool = False,
    ) -> None:
        """`model`: in eval mode; stays the caller's. `device`: where it computes, by default where it is. `offload`: it
        is there only then."""
        embeddings = model.model.get_input_embeddings()
        super().__init__(tokenizer, vocab_size=embeddings.num_embeddings, max_length=max_length, name=name)
        self._model = model
        self._device = device or embeddings.weight.device
        self._offload = offload

    @torch.no_grad()
    def score(self, batch: Sequence[Item]) -> list[float]:
        """One packed forward; neighbours compute what they share once. As `Forward`."""
        sequences = [item.token_ids for item in batch]
        tokens = PackedTokens.from_sequences(
            sequences,
            [torch.zeros_like(s, dtype=torch.bool) for s in sequences],
            images=[item.images for item in batch],
        )
        tokens = dataclasses.replace(tokens, shared_prefixes=(0, *(item.shared for item in batch[1:])))
        tokens = tokens.to(self._device)
        with on_device(self._model, self._device, offload=self._offload):
            return self._model(tokens, positions=_judged_positions(tokens, batch)).tolist()


def _judged_positions(tokens: PackedTokens, batch: Sequence[Item]) -> Tensor:
    """int64 [P]: the places of the items, in the stream that they make."""
    ends = sequence_ends(tokens)
    if not any(item.places for item in batch):
        return ends
    starts = tokens.cu_seqlens[:-1].tolist()
    positions = [
        start + place
        for start, item in zip(starts, batch, strict=True)
        for place in item.places or (len(item.token_ids) - 1,)
    ]
    return moved(torch.tensor(positions), ends.device)


class RewardModelSource:
    """Judges samples with one reward model, many requests to a forward.

    The model reads the tokens that the policy read and wrote, if each of the policy's tokens has the same id in the
    model's own tokenizer; otherwise their text, as the policy's template made it, tokenised once. Steps are read in the
    policy's tokens, so that a model that judges steps must know them.

    Without an `executor` everything happens between two turns of the caller's event loop, as in the embedded engine:
    forwards of the reward model overlap neither each other nor a decoding step, and there are no locks.
    """

    def __init__(
        self,
        reader: RewardReader,
        forward: Forward,
        *,
        policy_tokenizer: Any,
        max_batch_tokens: int,
        executor: Executor | None = None,
        steps: StepReader | None = None,
    ) -> None:
        """`max_batch_tokens`: most tokens in a forward; a longer sample goes alone. `executor`: of a forward that only
        waits for others. `steps`: each step is judged; None: the whole sample."""
        self._steps = steps
        self._reader = reader
        self._reads_tokens = reader.knows(policy_tokenizer)
        self._batcher = Batcher(forward, max_tokens=max_batch_tokens, executor=executor)

    async def start(self) -> None:
        if self._steps is not None and not self._reads_tokens:
            raise RewardError(
                f"--reward.steps judges the policy's own tokens, and reward model {self._reader.name} has another "
                "vocabulary: take one that was made from the same model, or leave --reward.steps out"
            )
        if not self._reads_tokens:
            logger.info(
                "reward model %s has another vocabulary than the policy: it reads the text, not the tokens",
                self._reader.name,
            )

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        try:
            if self._steps is not None:
                return await self._score_steps(self._steps, request)
            scores = self._reader.checked(await self._batcher.score(self._sequences(request), request.images))
        except RewardError as error:
            raise RewardError(f"{request.name}: {error}") from error
        except RewardGoneError:
            raise
        except Exception as error:
            raise RewardError(f"{request.name}: reward model {self._reader.name} failed: {error}") from error
        return [Reward(reward=score) for score in scores]

    async def _score_steps(self, reader: StepReader, request: RewardRequest) -> list[Reward]:
        if not request.action_masks:
            raise RewardError("--reward.steps judges the tokens that the policy wrote, and here there is only text")
        sequences = self._sequences(request)
        ends, places = [], []
        for whole, mask, read in zip(request.token_ids, request.action_masks, sequences, strict=True):
            ends.append(reader.ends(whole, mask))
            cut = len(whole) - len(read)
            if ends[-1] and ends[-1][0] < cut:
                raise RewardError("a sample is longer than --data.max_len, and would lose its first steps")
            places.append(tuple(end - cut for end in ends[-1]))
        judged = []
        for own, values in zip(ends, await self._batcher.score_places(sequences, places, request.images), strict=True):
            rewards = reader.rewards(self._reader.checked(values))
            logs = {"steps": float(len(own)), "step_reward_mean": math.fsum(rewards) / len(rewards)}
            # A sample in which the policy wrote nothing was judged at its last token, which is no step.
            steps = StepRewards(own, tuple(rewards)) if own else None
            judged.append(Reward(reward=math.fsum(rewards), extra_logs=logs, steps=steps))
        return judged

    async def close(self) -> None:
        """The model goes with this object, so that there is nothing to release."""

    def _sequences(self, request: RewardRequest) -> list[Tensor]:
        if self._reads_tokens and request.token_ids:
            whole = [token_ids.cpu() for token_ids in request.token_ids]
            read = self._reader.cut(whole)
            if request.images and any(len(one) < len(all_) for one, all_ in zip(read, whole, strict=True)):
                raise RewardError("a sample with images is longer than --data.max_len, and would lose its beginning")
            return read
        if request.images:
            raise RewardError(
                f"reward model {self._reader.name} has another vocabulary than the policy, so it cannot read the "
                "tokens of images: take one that was made from the same model"
            )
        return self._reader.read(request.queries)


if TYPE_CHECKING:
    from openrlhf.rewards.base import RewardSource

    _: type[RewardSource] = RewardModelSource
