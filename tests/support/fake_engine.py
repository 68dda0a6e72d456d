"""An engine that fulfils the whole contract with a table of logits, and notes what happens to it in which order."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.rollout.base import NoWeightsError, check_prompt
from openrlhf.types import FinishReason, Generation, SamplingParams
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock

PROBLEMS = ("132", "213", "231", "312", "321")
"""The demo's task with three digits: `312>` → `123`. What stands behind `>` only names a prompt."""


class TablePolicy(nn.Module):
    """The smallest policy: logits [problem, place, digit]."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(len(PROBLEMS), 3, 3))

    def logprobs(self, problem: str) -> Tensor:
        """[place, digit]"""
        return self.logits[PROBLEMS.index(problem)].log_softmax(-1)


class FakeEngine:
    """Samples one digit per turn of the event loop. `events` has the requests, and each call that changed something."""

    max_model_len = 64

    def __init__(self, policy: TablePolicy, events: list[str], *, shares_weights: bool = False, asleep: bool = False):
        """`policy` is the engine's own, or with `shares_weights` the one that is trained."""
        self.policy, self.events, self.shares_weights = policy, events, shares_weights
        self.version = 0
        self.asleep = asleep
        self.has_weights = shares_weights or not asleep
        self.needs_base = not shares_weights
        self.loading: set[str] = set()
        """What came since the last pause: "base", "adapter"."""
        self.adapter: dict[str, Tensor] = {}
        """Its tensors, by their names in the blocks. Nothing is computed with them."""
        self.running = asyncio.Event()
        if not asleep:
            self.running.set()
        self.stops: dict[str, tuple[int, asyncio.Event]] = {}
        """By a prompt's name: at which place its requests stop, and what lets them go on."""

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[Any] = ()
    ) -> Generation:
        parts = [part async for part in self.stream(token_ids, sampling_params)]
        return Generation(
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[logprob for part in parts for logprob in part.logprobs or ()],
            versions=[version for part in parts for version in part.versions],
            finish_reason=parts[-1].finish_reason,
        )

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[Any] = ()
    ) -> AsyncGenerator[Generation]:
        check_prompt(token_ids, max_model_len=self.max_model_len, vocab_size=128)
        problem, _, name = "".join(map(chr, token_ids)).partition(">")
        self.events.append(f"generate {name}")
        rng = random.Random(sampling_params.seed)
        for place in range(3):
            await asyncio.sleep(0)
            if name in self.stops and self.stops[name][0] == place:
                await self.stops[name][1].wait()
            await self.running.wait()
            of_digits = self.policy.logprobs(problem)[place].tolist()
            digit = rng.choices(range(3), [2.718281828459045**x for x in of_digits])[0]
            if place == 2:
                self.events.append(f"answer {name}")
            yield Generation(
                token_ids=[ord("1") + digit],
                logprobs=[of_digits[digit]],
                versions=[self.version],
                finish_reason=FinishReason.STOP if place == 2 else None,
            )

    async def pause(self) -> None:
        if self.running.is_set():
            self.running.clear()
            self.events.append("pause")
        self.loading.clear()

    async def resume(self, version: int) -> None:
        if not self.has_weights:
            raise NoWeightsError("an engine that slept has no weights before the next push")
        if "base" in self.loading:
            self.needs_base = "adapter" not in self.loading and not self.shares_weights
        elif "adapter" in self.loading and self.needs_base:
            raise NoWeightsError("an adapter came without its base")
        self.loading.clear()
        if not self.running.is_set() or version != self.version:
            self.version = version
            self.running.set()
            self.events.append(f"resume {version}")

    async def sleep(self) -> None:
        if not self.asleep:
            self.running.clear()
            self.asleep, self.has_weights, self.needs_base = True, self.shares_weights, not self.shares_weights
            self.events.append("sleep")

    async def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self.events.append("wake")

    async def load_weights(self, blocks: Sequence[WeightBlock], *, adapter: AdapterSpec | None = None) -> None:
        assert not self.running.is_set(), "weights are loaded into an engine that samples"
        assert not self.asleep, "weights are loaded into memory that was given away"
        if adapter is not None:
            self.loading.add("adapter")
            self.adapter |= {name: tensor.clone() for block in blocks for name, tensor in block.tensors()}
            self.events.append("load_adapter")
            return
        self.loading.add("base")
        self.needs_base = not self.shares_weights
        self.adapter = {}
        for name, tensor in (pair for block in blocks for pair in block.tensors()):
            self.policy.get_parameter(name).data.copy_(tensor)
        self.has_weights = True
        self.events.append("load_weights")

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[Any] = ()) -> list[float]:
        """Of a problem's answer; its prompt is certain."""
        problem, _, answer = "".join(map(chr, token_ids)).partition(">")
        of_places = self.policy.logprobs(problem)
        return [0.0] * len(problem) + [of_places[i, int(digit) - 1].item() for i, digit in enumerate(answer)]

    async def take_draft_counts(self) -> None: ...

    async def check_health(self) -> None: ...
