"""The contract of an engine. A further engine is one folder that implements it, and one entry in a registry.

Engine             what rollouts need: tokens in, tokens out
EngineControl      what pipelines and weight transports need: when it samples, with which weights, in whose memory
ControlledEngine   both: what a launcher builds
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from openrlhf.types import Generation, PlacedImage, SamplingParams

if TYPE_CHECKING:
    from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock


class EngineError(RuntimeError):
    """The engine cannot start, or has stopped working: no request will be answered any more. The text says why."""


class NoWeightsError(EngineError):
    """The engine has slept and was to sample before it got its weights back. It works: a push is all that it needs."""


class LostRequestError(RuntimeError):
    """An engine was lost after it had given a part of its answer. Asked again, another one answers from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What became of drafts of the next tokens: sums over requests and steps, which can be added up."""

    steps: int = 0
    """In which a request has sampled something, counted for every request."""
    tokens: int = 0
    """Sampled in them."""
    open_steps: int = 0
    """Those of the steps that could have had a draft: drafts were on, and the batch left room for one."""
    drafted: int = 0
    """Tokens of drafts."""
    accepted: int = 0
    """Those of them that were kept."""

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            open_steps=self.open_steps + other.open_steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
        )

    @staticmethod
    def of_all(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
        """Of several engines together; None: none of them drafts anything."""
        found = [one for one in counts if one is not None]
        return sum(found, DraftCounts()) if found else None

    @property
    def gain(self) -> float:
        """Tokens that drafts have added to a step that could have had one."""
        return self.accepted / self.open_steps if self.open_steps else 0.0


class Engine(Protocol):
    """Samples from the policy. Any number of `generate` calls may be under way; the engine batches them."""

    @property
    def version(self) -> int:
        """The version of the weights that it samples with now."""
        ...

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one request may reach."""
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Continue `token_ids`, which have the tokens of these `images` already (`ImageInput.token_ids`). Tokens that
        stand for images are never sampled. Cancelling the call gives the request up. Raises EngineError."""
        ...

    def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        """`generate` in parts, each with what is new; the last one says why it ended. Closing it gives it up.

        Raises LostRequestError too.
        """
        ...


class EngineControl(Protocol):
    """The life of an engine beside its requests: the same for one engine in this process and for many on a cluster.

    Every method may be called again when its effect is there already, and then changes nothing. Each one raises
    EngineError when the engine has stopped working. The order of a push of new weights:

        await engine.pause()
        await engine.wake()                  # only has an effect if the engine sleeps
        await engine.load_weights(blocks)    # any number of times: the first call begins an update
        await engine.resume(version)         # which finishes the update

    A push brings all weights, or, for a policy with an adapter, the frozen base and the adapter; where the engine has
    the base already (`needs_base`), the adapter alone. A push that breaks off leaves the engine paused, with some
    weights old and some new. The next `pause` forgets what was unfinished, and the next push starts over.
    """

    @property
    def shares_weights(self) -> bool:
        """Whether it samples with the very tensors that are trained. If so, they change under it: it has to be paused
        from the beginning of an update of the policy until the push after it, and a push has nothing to load."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether the next push of an adapter has to bring its base too: the engine is new, or has slept since it got
        one, or got a part of one, or weights without an adapter, which may have one merged into them. After a `pause`
        it is known."""
        ...

    async def pause(self) -> None:
        """Sample nothing until `resume`. Requests under way stay, and wait. An unfinished load of weights is forgotten,
        and keys and values from before the pause are not used after it."""
        ...

    async def resume(self, version: int) -> None:
        """Sample again; tokens from here on carry `version`. Requests under way go on with the weights there are now.

        Raises NoWeightsError for an engine that has slept and has not got its weights back, or that got an adapter and
        still needs its base; and WeightSyncError for an adapter that reaches other modules than its spec says. After
        either it samples nothing.
        """
        ...

    async def sleep(self) -> None:
        """Give the device's memory away, weights included. An engine that sleeps is paused."""
        ...

    async def wake(self) -> None:
        """Take back the memory that weights need, so that `load_weights` can fill it. The engine stays paused."""
        ...

    async def load_weights(self, blocks: Sequence[WeightBlock], *, adapter: AdapterSpec | None = None) -> None:
        """Take over some of the policy's weights, while paused. Raises ValueError for a block that arrived damaged.

        `adapter`: the blocks hold tensors of this adapter. From `resume` on all samples and log-probs are those of the
        base with it, until a push brings weights without one.
        """
        ...

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """log π of each token but the first given those before it, at temperature 1. The engine must not be paused."""
        ...

    async def take_draft_counts(self) -> DraftCounts | None:
        """What became of drafts since the last call, which ends a round for whoever decides whether drafts pay. None:
        the engine drafts nothing."""
        ...

    async def check_health(self) -> None:
        """Ask whatever samples for a sign of life."""
        ...


class ControlledEngine(Engine, EngineControl, Protocol):
    """Both sides of an engine."""


def check_prompt(token_ids: Sequence[int], *, max_model_len: int, vocab_size: int) -> int:
    """How many tokens of room a prompt leaves; ValueError for one that no engine could continue."""
    if not token_ids:
        raise ValueError("a prompt needs at least one token")
    room = max_model_len - len(token_ids)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(token_ids)} tokens leaves no room in a context of {max_model_len} "
            "(max_model_len): shorten the prompt or raise the limit"
        )
    outside = [token for token in (min(token_ids), max(token_ids)) if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"prompt ids must be in 0 … {vocab_size - 1}, got {outside[0]}")
    return room


def check_images(token_ids: Sequence[int], images: Sequence[PlacedImage], *, unsampled: Sequence[int] = ()) -> None:
    """ValueError for images that are not in their order, each on its own tokens, and for a token of `unsampled`, which
    stands for an image, that belongs to none."""
    end, outside = 0, list[int]()
    for start, image in images:
        if start < end:
            raise ValueError(f"the image at token {start} stands before token {end}, where the one before it ends")
        outside += token_ids[end:start]
        end = start + len(image)
        if tuple(token_ids[start:end]) != image.token_ids:
            raise ValueError(f"the tokens from {start} on are not those of the image {image.digest}")
    outside += token_ids[end:]
    if stray := sorted(set(unsampled).intersection(outside)):
        raise ValueError(f"the prompt has the token {stray[0]}, which stands for an image, and no image belongs to it")
