"""The memory of a device on which a policy is trained and an engine samples: what each needs, and how it is divided.

Layout, …_bytes    what training takes on each rank, by the formulas of docs/long_sequences.md
TrainingNeed       the same of all models of a process, with a margin
EngineNeed         weights, working memory, and keys and values of the sequences that are sampled at once
divide             both at once where both fit; otherwise in turns
review             the division beside what the first update really took

Everything follows from shapes and flags: it is known before a weight is loaded. Bytes, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openrlhf.models.tiles import LONG, TILE

GIB = 2**30
TILES = 2 * (128 << 20)
"""Logits in fp32: two tiles of `models/logprobs.py` on a GPU."""
BUCKETS = {0: 0, 1: 2 * GIB, 2: 2 * GIB, 3: 4 * GIB}
"""DeepSpeed's buffers, by stage: gradients on their way, and in stage 3 the layers that are gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures of a model from which its memory follows."""

    parameters: int
    trained: int
    """Of the parameters: few with an adapter, none of a model that only runs forward."""
    layers: int
    hidden: int
    intermediate: int
    """Of an MLP; of a mixture, that of all experts of a token, with half a hidden size for each."""
    vocabulary: int = 0
    cache_numbers: int = 0
    """Keys and values of a token in all layers."""
    kv_heads: int = 1
    """That they have; an engine's devices share them out, and each has one at least."""
    image_numbers: int = 0
    """What a vision tower that is trained keeps for one token of an image."""
    element_bytes: int = 2
    stored: float = 1.0
    """The part of their size that a trainer's weights take: less than all in 4 bits."""


@dataclass(frozen=True)
class Layout:
    """How a model is trained. `zero` 0 is plain torch in one process."""

    ranks: int = 1
    zero: int = 0
    context: int = 1
    tensor: int = 1
    checkpointing: bool = False

    def __str__(self) -> str:
        parts = [f"{self.ranks} GPU{'s' if self.ranks > 1 else ''}"]
        parts += [f"ZeRO-{self.zero}"] if self.zero else []
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return ", ".join(parts + (["checkpointing"] if self.checkpointing else []))


def weight_bytes(shape: ModelShape, layout: Layout) -> float:
    whole = shape.stored * shape.element_bytes * shape.parameters
    return whole / (layout.ranks if layout.zero == 3 else layout.tensor)


def optimizer_bytes(shape: ModelShape, layout: Layout) -> float:
    """Two moments, and masters of 16-bit weights, in fp32."""
    each = 12 if shape.element_bytes < 4 else 8
    return each * shape.trained / (layout.ranks if layout.zero >= 1 else layout.tensor)


def gradient_bytes(shape: ModelShape, layout: Layout) -> float:
    """Sums in fp32."""
    return 4 * shape.trained / (layout.ranks if layout.zero >= 2 else layout.tensor)


def token_bytes(shape: ModelShape, layout: Layout, *, tiled: bool = False) -> float:
    """Activations for one token of a stream. `tiled`: without MLPs, of which one tile is there.

    With checkpointing the layer at work counts with the gradients of its activations; otherwise these are little.
    """
    intermediate, size = 0 if tiled else shape.intermediate, shape.element_bytes
    layer = size * (4 * shape.hidden + (2.6 * shape.hidden + 4 * intermediate) / layout.tensor)
    if not layout.checkpointing:
        return layer * shape.layers + size * shape.image_numbers
    gradients = size * (5 * shape.hidden + 2 * intermediate / layout.tensor)
    return layer + gradients + size * (shape.hidden * shape.layers + shape.image_numbers)


def tile_bytes(shape: ModelShape, layout: Layout) -> float:
    """Activations of a tile, twice, with their gradients; and the gradients of an MLP, summed in fp32."""
    each = 2 * TILE * shape.element_bytes * 4 * shape.intermediate + 4 * 3 * shape.hidden * shape.intermediate
    return each / layout.tensor


def activation_bytes(shape: ModelShape, layout: Layout, *, tokens: int, sequence: int | None = None) -> float:
    """Of a stream of so many tokens, on one rank. `sequence`: of the longest in it; None: there is one."""
    tiled = (tokens if sequence is None else sequence) / layout.context >= LONG
    found = tokens / layout.context * token_bytes(shape, layout, tiled=tiled)
    return found + tile_bytes(shape, layout) if tiled else found


# ------------------------------------------------------------------------------------------------ what each needs

MARGIN = 1.7
"""Times the predicted activations are set aside. `bench.sft` saw 73 GiB of streams of equal sequences and 93 of
long-tailed ones, of which 26 are the state, where 39 of activations are predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNeed:
    """What the models of one process take on its device."""

    weights: int
    """Of all of them; a model that only runs forward has nothing else."""
    states: int
    """Masters and moments."""
    work: int
    """Gradients, activations and buffers of the update, with a margin."""
    states_stay: bool = True
    """Whether masters and moments are on the device while an engine samples."""

    @property
    def total(self) -> int:
        return self.weights + self.states + self.work

    @property
    def staying(self) -> int:
        """What is on the device while an engine samples, in turns."""
        return self.weights + (self.states if self.states_stay else 0)


class TrainedModel(NamedTuple):
    shape: ModelShape
    layout: Layout


def training_need(
    trained: Sequence[TrainedModel],
    *,
    frozen: Sequence[TrainedModel] = (),
    tokens: int,
    longest: int,
    states_stay: bool = True,
    offloaded: bool = False,
    averaged: bool = False,
) -> TrainingNeed:
    """Of models that are trained one after the other.

    `tokens`: of a stream of several sequences, over all ranks that share one. `longest`: of a sequence, which may be a
    stream by itself. `offloaded`: masters and moments are in CPU memory. `averaged`: an average of the first model's
    weights is kept.
    """

    def at_work(model: TrainedModel) -> float:
        short = min(longest, LONG * model.layout.context - 1)  # the longest whose MLPs are whole
        streams = [(tokens, 0), (longest, longest), (short, short)]
        activations = max(activation_bytes(*model, tokens=size, sequence=one) for size, one in streams)
        return gradient_bytes(*model) + MARGIN * activations + TILES + BUCKETS[model.layout.zero]

    states = sum(optimizer_bytes(*model) for model in trained)
    if averaged:
        states += optimizer_bytes(*trained[0]) / 3
    return TrainingNeed(
        weights=int(sum(weight_bytes(*model) for model in (*trained, *frozen))),
        states=0 if offloaded else int(states),
        work=int(max(at_work(model) for model in trained)),
        states_stay=states_stay,
    )


BLOCK = 16
"""Tokens of a block of vLLM's cache."""
STEP_TOKENS = 8192
"""Of one step of vLLM (`VllmSettings.max_num_batched_tokens`)."""
LIBRARIES, GRAPHS, ENCODER = 3 * GIB // 2, GIB, 4 * GIB
"""Of an engine: CUDA context and kernels' own memory, captured graphs, and the largest images that it tries."""
SAMPLER_COPIES = 5
"""Of the logits of a step, in fp32, where it samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """What an engine takes on each of its devices."""

    weights: int
    working: int
    """Its context, its graphs, and what a step holds for a moment."""
    sequence_bytes: int
    """Keys and values of the longest sequence."""
    sequence_tokens: int
    sequences: int
    """That it has places for."""
    needed: int
    """Of these, the ones that a round has at once; an evaluation may have more."""

    @property
    def wish(self) -> int:
        """Keys and values of all sequences at their longest: more would be of no use."""
        return self.sequences * self.sequence_bytes

    @property
    def least(self) -> int:
        """A quarter of what a round has, and one sequence: with less, sampling would lose more than sleeping costs."""
        return max(self.needed * self.sequence_bytes // 4, self.sequence_bytes)

    @property
    def fixed(self) -> int:
        return self.weights + self.working


def engine_need(
    shape: ModelShape,
    *,
    max_len: int,
    needed: int,
    places: int,
    tensor: int = 1,
    stages: int = 1,
    graphs: bool = True,
    images: bool = False,
    processes: int = 1,
) -> EngineNeed:
    """`needed`: sequences of a round that are in play at a time. `places`: sequences of vLLM's largest step. `tensor`,
    `stages`: how the engine shares its layers out over devices. `processes`: on each of them, which share sequences and
    have weights of their own."""
    needed, places = -(-needed // processes), -(-places // processes)
    size = shape.element_bytes
    forward = max(STEP_TOKENS, places) * size * (4 * shape.hidden + 3 * shape.intermediate / tensor)
    sampler = SAMPLER_COPIES * 4 * places * shape.vocabulary
    sequence_numbers = -(-max_len // BLOCK) * BLOCK * shape.cache_numbers
    heads_here = -(-shape.kv_heads // tensor) / shape.kv_heads
    return EngineNeed(
        weights=processes * size * shape.parameters // (tensor * stages),
        working=processes * int(LIBRARIES + GRAPHS * graphs + ENCODER * images + forward + sampler),
        sequence_bytes=int(size * sequence_numbers * heads_here / stages),
        sequence_tokens=max_len,
        sequences=processes * max(needed, places),
        needed=processes * needed,
    )


# ------------------------------------------------------------------------------------------------- how it is divided

SPARE = 3 * GIB
"""Left over in any case: the trainer's context, weights on their way, what does not fit into gaps."""
MOST = 0.95
"""The most of a device that an engine takes, and what it takes of a device of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    total: int
    others: int = 0
    """In use by processes that have nothing to do with the run."""
    loaded: int = 0
    """In use by this process: models that are loaded already."""

    @property
    def usable(self) -> int:
        return self.total - self.others - SPARE


class EngineMemory(NamedTuple):
    """What an engine may take."""

    share: float
    """Of the device's memory."""
    sleeps: bool
    """It gives its memory away while the policy is trained."""
    cache_bytes: int | None = None
    """Of keys and values; None: what its share leaves, which vLLM measures when it starts."""


class DoesNotFitError(ValueError):
    """Not even in turns. The text says how much is missing; what to do about it, the caller knows."""


class Division(NamedTuple):
    """How a device is divided, and from what that follows."""

    memory: EngineMemory
    device: DeviceMemory
    training: TrainingNeed
    engine: EngineNeed
    cache: int
    """Bytes that are left for keys and values."""

    def __str__(self) -> str:
        training, engine = self.training, self.engine
        return (
            f"one device of {_gib(self.device.total)} for both: training may take {_gib(training.total)} (weights "
            f"{_gib(training.weights)}, masters and moments {_gib(training.states)}, gradients and activations "
            f"{_gib(training.work)}), vLLM {_gib(engine.fixed + self.cache)} (weights {_gib(engine.weights)}, keys and "
            f"values {_gib(self.cache)}, of {_gib(engine.wish)} for {engine.sequences} sequences of "
            f"{engine.sequence_tokens} tokens): {'they take turns' if self.memory.sleeps else 'nobody sleeps'}"
        )


def divide(device: DeviceMemory, training: TrainingNeed, engine: EngineNeed, *, sleeps: bool | None = None) -> Division:
    """What an engine may have of a device that it shares with training. `sleeps`: as asked for; None: if it must.

    1. Beside training, where keys and values of all places fit, or of a quarter of a round: nobody sleeps.
    2. Otherwise in turns: what training leaves while the engine samples.
    It never has more than it can use. Where it may not sleep, and training leaves too little, it has that quarter all
    the same: micro-batches can be cut smaller. Raises DoesNotFitError where weights and states alone are too much.
    """
    beside = device.usable - training.total - engine.fixed
    in_turns = min(device.usable - training.staying, int(MOST * device.total)) - engine.fixed
    if sleeps is not True and beside >= engine.least:
        return _divided(device, training, engine, room=beside, sleeps=False)
    _require_room(device, training, engine)
    if sleeps is False:
        return _divided(device, training, engine, room=min(engine.least, in_turns), sleeps=False)
    return _divided(device, training, engine, room=in_turns, sleeps=True)


def _divided(device: DeviceMemory, training: TrainingNeed, engine: EngineNeed, *, room: int, sleeps: bool) -> Division:
    """`room`: for keys and values. Where it is enough, vLLM is told their bytes: an estimate of its working memory that
    was too low then takes from what is spare, not from them. Otherwise it is told its share, and measures."""
    cache = max(0, min(engine.wish, room))
    exact = cache if room >= engine.wish else None
    return Division(EngineMemory(_share(device, engine, cache), sleeps, exact), device, training, engine, cache)


def _share(device: DeviceMemory, engine: EngineNeed, cache: int) -> float:
    return min(MOST, (engine.fixed + cache) / device.total)


def _require_room(device: DeviceMemory, training: TrainingNeed, engine: EngineNeed) -> None:
    """Of what is known for sure: weights and states."""
    here = device.total - device.others
    if training.weights + training.states > here:
        raise DoesNotFitError(
            f"training needs {_gib(training.weights)} of weights and {_gib(training.states)} of masters and moments, "
            f"and the device has {_gib(here)}"
        )
    if training.staying + engine.weights > here:
        raise DoesNotFitError(
            f"while vLLM samples with {_gib(engine.weights)} of weights, training keeps {_gib(training.staying)}, and "
            f"the device has {_gib(here)}"
        )


def capped(share: float, device: DeviceMemory, training: TrainingNeed) -> float:
    """A share that was asked for, as far as it is free while the engine samples: vLLM does not start where less is."""
    loaded = max(training.weights, device.loaded)
    return max(0.0, min(share, (device.usable - loaded - training.staying + training.weights) / device.total))


def leaves_too_little(share: float, device: DeviceMemory, training: TrainingNeed) -> bool:
    """Whether training does not fit beside an engine that has this share."""
    return training.total > device.total - device.others - share * device.total


REVIEW_MARGIN = 1.15
"""Later updates may have longer sequences than the first."""


def review(division: Division, taken: int) -> str | None:
    """What to say of a division after the first update, of which `taken` is the process's peak; None: nothing.

    Either training took more than was set aside, or it took so little that nobody would have to sleep.
    """
    memory, device, training, engine = division[:4]
    room = device.usable - int(REVIEW_MARGIN * taken) - engine.fixed
    if taken > training.total:
        cache = min(division.cache, room)
        remedy = "--vllm.enable_sleep"
        if not memory.sleeps and cache >= engine.least:
            remedy = f"--vllm.gpu_memory_utilization {_share(device, engine, cache):.2f}, or --vllm.enable_sleep"
        elif memory.sleeps:
            remedy = "a smaller --train.max_tokens_per_gpu"
        return (
            f"training took {_gib(taken)} at its peak, and {_gib(training.total)} were estimated; if memory runs out: "
            f"{remedy}"
        )
    if memory.sleeps and room >= engine.least:
        share = _share(device, engine, min(engine.wish, room))
        return (
            f"training took {_gib(taken)} at its peak, and {_gib(training.total)} were set aside for it: engine and "
            f"training fit beside each other with --vllm.gpu_memory_utilization {share:.2f} --vllm.enable_sleep false, "
            "as long as its micro-batches do not grow"
        )
    return None


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB" if abs(value) < 10 * GIB else f"{value / GIB:.0f} GiB"
