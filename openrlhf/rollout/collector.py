"""Where training batches come from: prompts in, judged groups out. Sync: one round at a time."""

from __future__ import annotations

import asyncio

from openrlhf.data.prompts import PromptStream
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.types import Group, SamplingParams


class SyncCollector:
    """Plays `batch_size` prompts at once and waits for all of them."""

    def __init__(
        self,
        *,
        prompts: PromptStream,
        runner: EpisodeRunner,
        loop: asyncio.Runner,
        batch_size: int,
        samples_per_prompt: int,
        sampling_params: SamplingParams,
    ) -> None:
        self._prompts = prompts
        self._runner = runner
        self._loop = loop
        self._batch_size = batch_size
        self._samples_per_prompt = samples_per_prompt
        self._sampling_params = sampling_params

    def next_batch(self) -> list[Group]:
        """The next round's groups in the order of their prompts; fewer than `batch_size` at the end of the data."""
        groups = self._loop.run(
            self._runner.play_all(
                self._prompts.take(self._batch_size),
                n=self._samples_per_prompt,
                sampling_params=self._sampling_params,
            )
        )
        if not any(group.scored for group in groups):
            reasons = {t.error for group in groups for t in group.trajectories if t.failed}
            raise RolloutError(f"all {len(groups)} groups of a round failed; first reason: {min(reasons)}")
        return groups

    def state_dict(self) -> dict[str, object]:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._prompts.load_state_dict(state["prompts"])
