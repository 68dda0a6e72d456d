"""The protocol of rewards: a request about the finished samples of one prompt, answered later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from openrlhf.rewards.steps import StepRewards
from openrlhf.rewards.values import RewardValues
from openrlhf.types import PlacedImage, Prompt, RewardPart, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The samples of one prompt group, as users' reward functions see them: three lists of equal length."""

    queries: tuple[str, ...]
    """Prompt and response; `queries[i]` begins with exactly `prompts[i]`."""
    prompts: tuple[str, ...]
    labels: tuple[object, ...]
    name: str
    """The name of the prompt in errors, e.g. `record 4 of train.jsonl`."""
    token_ids: tuple[Tensor, ...] = ()
    """The tokens that the policy read and wrote, int64 [T] each: the same samples as `queries`, before they were text.
    Empty when there is only text."""
    images: tuple[tuple[PlacedImage, ...], ...] = ()
    """The images among the tokens of each. Empty when no sample has any."""
    action_masks: tuple[Tensor, ...] = ()
    """bool [T] each: the tokens that the policy wrote. Empty when there is only text."""

    def __post_init__(self) -> None:
        if not len(self.queries) == len(self.prompts) == len(self.labels) > 0:
            raise ValueError("queries, prompts and labels must have equal, positive lengths")
        if len(self.token_ids) not in (0, len(self.queries)):
            raise ValueError(f"{len(self.token_ids)} token sequences for {len(self.queries)} queries")
        if [len(mask) for mask in self.action_masks] not in ([], [len(ids) for ids in self.token_ids]):
            raise ValueError("action masks are not those of the token sequences")
        if len(self.images) not in (0, len(self.token_ids)):
            raise ValueError(f"images of {len(self.images)} samples for {len(self.token_ids)} token sequences")

    @staticmethod
    def of(prompt: Prompt, samples: Sequence[Trajectory]) -> RewardRequest:
        """The request for rewards of a prompt's finished samples."""
        return RewardRequest(
            queries=tuple(t.text for t in samples),
            prompts=(prompt.text,) * len(samples),
            labels=(prompt.label,) * len(samples),
            name=prompt.where or f"prompt {prompt.ordinal}",
            # The last segment is the history that the last answer was given to; earlier ones were rewritten.
            token_ids=tuple(t.segments[-1].token_ids for t in samples),
            images=images if any(images := tuple(t.segments[-1].images for t in samples)) else (),
            action_masks=tuple(t.segments[-1].action_mask for t in samples),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One sample's judgement."""

    reward: float
    score: float | None = None
    """Success in [0, 1] for filtering and evaluation; None: the reward."""
    extra_logs: dict[str, float] = field(default_factory=dict)
    size: float | None = None
    """Sum of the absolute values of what the reward was added up from; None: it is one number of one source."""
    parts: tuple[RewardPart, ...] = ()
    """What the reward is the weighted sum of, by name; empty: it is one number."""
    steps: StepRewards | None = None
    """Where it was earned, step by step; None: at the end."""

    @staticmethod
    def each(values: RewardValues) -> list[Reward]:
        """Sample by sample, what a function or server returned for all of them."""
        scores: Sequence[float | None] = values.scores or [None] * len(values.rewards)
        judged = []
        for i, (reward, score) in enumerate(zip(values.rewards, scores, strict=True)):
            parts = tuple(
                RewardPart(name, column[i], values.weights.get(name, 1.0)) for name, column in values.parts.items()
            )
            logs = {f"reward_{part.name}": part.value for part in parts}
            logs |= {name: column[i] for name, column in values.extra_logs.items()}
            size = sum(abs(part.weight * part.value) for part in parts) if parts else None
            judged.append(Reward(reward=reward, score=score, extra_logs=logs, size=size, parts=parts))
        return judged


class RewardError(Exception):
    """A reward call failed. The text names the user's file and line (or the server) and what to do."""


class RewardGoneError(Exception):
    """The source of rewards is gone: no request will be answered any more. The text is all that a user needs."""


class NoReward:
    """Of a run that is taught by something else: every sample earns 0."""

    async def start(self) -> None:
        pass

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        return [Reward(reward=0.0)] * len(request.queries)

    async def close(self) -> None:
        pass


class RewardSource(Protocol):
    """Judges finished samples. Calls may overlap."""

    async def start(self) -> None:
        """Load what is needed; raises RewardError when it cannot ever work."""
        ...

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        """One `Reward` per query, in order; raises RewardError when this request cannot be judged."""
        ...

    async def close(self) -> None: ...


if TYPE_CHECKING:
    _: type[RewardSource] = NoReward
