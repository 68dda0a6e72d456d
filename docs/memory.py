"""The memory that training takes on each rank, predicted: the tables of docs/long_sequences.md (`make docs`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GIB = 1 << 30
DEVICE_GIB = 139
"""Of an H200."""
USABLE = 0.9
"""The share of it that a layout may fill: the rest is for what fragments, and for longer samples."""
TILES = 2 * (128 << 20)
"""Logits in fp32: two tiles of `models/logprobs.py` on a GPU."""
LONG, TILE = 16_384, 4_096
"""Tokens of a sequence on a rank from which MLPs are computed in tiles, and of a tile (`models/tiles.py`)."""
BUCKETS = {0: 0, 2: 2 * GIB, 3: 4 * GIB}
"""DeepSpeed's buffers, by stage: gradients on their way, and in stage 3 the layers that are gathered."""


@dataclass(frozen=True)
class Shape:
    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int


SHAPES = [
    Shape("0.5B", 0.49e9, 24, 896, 4864),
    Shape("1.5B", 1.54e9, 28, 1536, 8960),
    Shape("7B", 7.62e9, 28, 3584, 18944),
    Shape("32B", 32.8e9, 64, 5120, 27648),
    Shape("70B", 70.6e9, 80, 8192, 28672),
]
LENGTHS = (8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Layout:
    """How a model is trained. `zero` 0 is plain torch in one process."""

    ranks: int
    zero: int
    context: int = 1
    tensor: int = 1
    checkpointing: bool = False

    def __str__(self) -> str:
        parts = [f"{self.ranks} GPU{'s' if self.ranks > 1 else ''}"]
        parts += [f"ZeRO-{self.zero}"] if self.zero else []
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        return ", ".join(parts + (["checkpointing"] if self.checkpointing else []))


MEASURED: dict[tuple[str, int, Layout], float] = {
    ("1.5B", 16_384, Layout(1, 0)): 73,
    ("1.5B", 16_384, Layout(1, 2)): 67,
    ("1.5B", 8_192, Layout(1, 0)): 40.7,
    ("1.5B", 32_768, Layout(1, 0)): 38.4,
    ("1.5B", 131_072, Layout(1, 0)): 89.8,
    ("1.5B", 8_192, Layout(1, 0, checkpointing=True)): 26.6,
    ("1.5B", 32_768, Layout(1, 0, checkpointing=True)): 27.0,
    ("1.5B", 131_072, Layout(1, 0, checkpointing=True)): 35.6,
}
"""GiB, from bench/RESULTS.md."""


PACKED = {16_384: 4_096}
"""Tokens of a stream that was measured → those of its sequences, where it has several. Such a step had several
micro-batches; the others had one."""


def token_bytes(shape: Shape, *, tensor: int = 1, checkpointing: bool = False, tiled: bool = False) -> float:
    """Activations in bf16 for one token of a stream. `tiled`: without MLPs, of which one tile is there.

    With checkpointing the layer at work counts with the gradients of its activations; otherwise these are little.
    """
    intermediate = 0 if tiled else shape.intermediate
    layer = 2 * (4 * shape.hidden + (2.6 * shape.hidden + 4 * intermediate) / tensor)
    if not checkpointing:
        return layer * shape.layers
    gradients = 2 * (5 * shape.hidden + 2 * intermediate / tensor)
    return layer + gradients + 2 * shape.hidden * shape.layers


def tile_bytes(shape: Shape, *, tensor: int = 1) -> float:
    """Activations of a tile, twice, with their gradients; and the gradients of an MLP, summed in fp32."""
    return (2 * TILE * 2 * 4 * shape.intermediate + 4 * 3 * shape.hidden * shape.intermediate) / tensor


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Weights in bf16, sums of gradients, masters and moments in fp32."""
    own = shape.parameters / layout.tensor
    shares = layout.ranks / layout.tensor
    weights = 2 * own / (shares if layout.zero == 3 else 1)
    return weights + gradient_bytes(shape, layout) + 12 * own / (shares if layout.zero >= 1 else 1)


def gradient_bytes(shape: Shape, layout: Layout) -> float:
    return 4 * shape.parameters / (layout.ranks if layout.zero >= 2 else layout.tensor)


def rank_gib(
    shape: Shape, tokens: int, layout: Layout, *, sequence: int | None = None, one_micro_batch: bool = False
) -> float:
    """All of it on one rank, for streams of so many tokens. `sequence`: of the longest in them; None: there is one.

    `one_micro_batch`: of a step. Its gradients grow while its activations go; later ones find all of them there.
    """
    tiled = (tokens if sequence is None else sequence) / layout.context >= LONG
    each = token_bytes(shape, tensor=layout.tensor, checkpointing=layout.checkpointing, tiled=tiled)
    activations = tokens / layout.context * each
    activations += tile_bytes(shape, tensor=layout.tensor) if tiled else 0
    if one_micro_batch:
        activations = max(0, activations - gradient_bytes(shape, layout))
    return (state_bytes(shape, layout) + activations + TILES + BUCKETS[layout.zero]) / GIB


def layouts() -> Iterator[Layout]:
    """Fewest GPUs first; for each number what is fastest first."""
    yield Layout(1, 0)
    yield Layout(1, 0, checkpointing=True)
    for ranks in (2, 4, 8, 16, 32, 64):
        for zero in (2, 3):
            for context in (1, 2, 4, 8):
                for checkpointing in (False, True):
                    if context <= ranks:
                        yield Layout(ranks, zero, context, checkpointing=checkpointing)


def smallest(shape: Shape, tokens: int) -> Layout:
    return next(one for one in layouts() if rank_gib(shape, tokens, one) <= USABLE * DEVICE_GIB)


def longest(shape: Shape, layout: Layout) -> int:
    """Tokens of the longest sequence that fits, to the thousand; 0 where the model does not."""
    left = USABLE * DEVICE_GIB - rank_gib(shape, 0, layout)
    found = 0
    for tiled in (False, True):
        each = token_bytes(shape, tensor=layout.tensor, checkpointing=layout.checkpointing, tiled=tiled)
        room = left - (tile_bytes(shape, tensor=layout.tensor) / GIB if tiled else 0)
        tokens = int(room * GIB / each * layout.context)
        least, most = (LONG * layout.context, tokens) if tiled else (0, LONG * layout.context - 1)
        if tokens >= least:
            found = max(found, min(tokens, most))
    return found // 1000 * 1000


def states() -> str:
    """What a model takes, and a token of its streams."""
    lines = [
        "| shape | weights | gradients | masters, moments | a token | checkpointed | MLP in tiles | both |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        parts = [_gib(factor * shape.parameters / GIB) for factor in (2, 4, 12)]
        parts += [
            f"{token_bytes(shape, checkpointing=on, tiled=tiled) / 1024:,.0f} KiB"
            for tiled in (False, True)
            for on in (False, True)
        ]
        lines.append(f"| {shape.name} | {' | '.join(parts)} |")
    return "\n".join(lines)


def predictions() -> str:
    """The smallest layout for each shape and length."""
    lines = [
        "| shape | tokens | activations | checkpointed | fits in | each rank takes | measured |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    for shape in SHAPES:
        for tokens in LENGTHS:
            tiled = tokens >= LONG
            activations = [
                _gib((tokens * token_bytes(shape, checkpointing=on, tiled=tiled) + tiled * tile_bytes(shape)) / GIB)
                for on in (False, True)
            ]
            layout = smallest(shape, tokens)
            found = MEASURED.get((shape.name, tokens, layout))
            values = [shape.name, f"{tokens:,}", *activations, str(layout), _gib(rank_gib(shape, tokens, layout))]
            lines.append(f"| {' | '.join(values)} | {'' if found is None else _gib(found)} |")
    return "\n".join(lines)


def comparisons() -> str:
    """Everything that was measured, beside what is predicted."""
    shapes = {shape.name: shape for shape in SHAPES}
    lines = ["| shape | tokens | | predicted | measured |", "|---|---:|---|---:|---:|"]
    for (name, tokens, layout), found in MEASURED.items():
        several = PACKED.get(tokens)
        predicted = rank_gib(shapes[name], tokens, layout, sequence=several, one_micro_batch=several is None)
        lines.append(f"| {name} | {tokens:,} | {layout} | {_gib(predicted)} | {_gib(found)} |")
    return "\n".join(lines)


def limits() -> str:
    """The longest sequences on one device, and on eight that share them."""
    lines = ["| shape | | as it is | with checkpointing |", "|---|---|---:|---:|"]
    for shape in SHAPES:
        for ranks, zero, context in ((1, 0, 1), (8, 2, 1), (8, 3, 8)):
            found = [longest(shape, Layout(ranks, zero, context, checkpointing=on)) for on in (False, True)]
            if found[1]:
                values = [f"{tokens:,}" if tokens else "does not fit" for tokens in found]
                lines.append(f"| {shape.name} | {Layout(ranks, zero, context)} | {' | '.join(values)} |")
    return "\n".join(lines)


TABLES = {"states": states, "predictions": predictions, "comparisons": comparisons, "limits": limits}


def filled(text: str) -> str:
    """A document with each of these tables between its comments, `<!-- states -->` and `<!-- /states -->`."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


def _gib(value: float) -> str:
    return f"{value:,.0f} GiB" if value >= 10 else f"{value:.1f} GiB"


if __name__ == "__main__":
    for table in TABLES.values():
        print(f"{table()}\n")
