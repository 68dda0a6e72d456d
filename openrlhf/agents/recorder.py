"""The one writer of token bookkeeping: ids, action mask, log-probs, versions and rewards grow together here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from openrlhf.types import Generation, PlacedImage, Segment, Supports


class TokenRecorder:
    """Records one token history as it happens. Nothing is ever tokenised twice.

    >>> recorder = TokenRecorder(prompt_ids)
    >>> recorder.append_action(await engine.generate(recorder.token_ids, params))
    >>> recorder.reward_turn(0.5)
    >>> recorder.append_observation(feedback_ids)
    >>> segment = recorder.segment()
    """

    def __init__(self, prompt_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """`images` are those among the prompt's tokens."""
        self._token_ids: list[int] = []
        self._action_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._rewards: list[float] = []
        self._turn_ends: list[bool] = []
        self._images: list[PlacedImage] = []
        self._routes: np.ndarray | None = None
        self._supports: list[tuple[Supports | None, int]] = []
        self._has_logprobs = True
        self._turns = 0
        if not prompt_ids:
            raise ValueError("an episode must begin with at least one prompt token")
        self.append_observation(prompt_ids, images)

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far; a copy, so that what an engine was given cannot change under it."""
        return list(self._token_ids)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images among the tokens so far."""
        return tuple(self._images)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def turns(self) -> int:
        """Actions recorded so far."""
        return self._turns

    def append_observation(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Tokens that the policy reads: the prompt, or an environment's feedback. An image's `start` counts from the
        first of these tokens."""
        n, before = len(token_ids), len(self._token_ids)
        self._images += [PlacedImage(before + start, image) for start, image in images]
        self._grow(token_ids, [False] * n, [0.0] * n, [-1] * n)

    def append_action(self, generation: Generation, *, rewards: Sequence[float] | None = None) -> None:
        """Tokens that the policy sampled, with what each has earned where that is known already."""
        if not generation.token_ids:
            return
        if generation.logprobs is None:
            self._has_logprobs = False
        n = len(generation.token_ids)
        if generation.routes is not None:
            self._take_routes(generation.routes, read=len(self) + n - 1)
        self._supports.append((generation.supports, n))
        self._grow(generation.token_ids, [True] * n, generation.logprobs or [0.0] * n, generation.versions, rewards)
        self._turn_ends[-1] = True
        self._turns += 1

    def reward_turn(self, reward: float) -> None:
        """Add a reward to the last action token so far: the one that earned it."""
        for index in range(len(self._token_ids) - 1, -1, -1):
            if self._action_mask[index]:
                self._rewards[index] += reward
                return
        raise ValueError("a reward was given before the first action")

    def segment(self) -> Segment:
        """The recorded tokens as tensors."""
        return Segment(
            token_ids=_column(self._token_ids, np.int64),
            action_mask=_column(self._action_mask, np.bool_),
            rollout_logprobs=_column(self._logprobs, np.float32) if self._has_logprobs else None,
            versions=_column(self._versions, np.int32),
            turn_rewards=_column(self._rewards, np.float32),
            turn_ends=_column(self._turn_ends, np.bool_),
            images=self.images,
            routes=None if self._routes is None else torch.from_numpy(self._routes),
            supports=Supports.joined(self._supports),
        )

    def _take_routes(self, routes: np.ndarray, *, read: int) -> None:
        """Those of a later turn are of the whole history: what was read again may have been routed anew."""
        if len(routes) != read:
            raise ValueError(f"the engine gave routes of {len(routes)} tokens, and has read {read}")
        self._routes = routes

    def _grow(
        self,
        token_ids: Sequence[int],
        action_mask: list[bool],
        logprobs: list[float],
        versions: list[int],
        rewards: Sequence[float] | None = None,
    ) -> None:
        n = len(token_ids)
        rewards = [0.0] * n if rewards is None else rewards
        if not n == len(action_mask) == len(logprobs) == len(versions) == len(rewards):
            raise ValueError(
                f"columns of {n}, {len(action_mask)}, {len(logprobs)}, {len(versions)}, {len(rewards)} tokens"
            )
        self._token_ids.extend(token_ids)
        self._action_mask.extend(action_mask)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._rewards.extend(rewards)
        self._turn_ends.extend([False] * n)


def _column(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
    """The list as a tensor, by way of numpy, which reads a list in a third of the time."""
    return torch.from_numpy(np.array(values, dtype=dtype))
