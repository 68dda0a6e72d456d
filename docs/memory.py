"""The memory that training takes on each rank, predicted: the tables of docs/long_sequences.md (`make docs`)."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.runs.device_memory import (
    BUCKETS,
    GIB,
    LONG,
    TILES,
    Layout,
    ModelShape,
    activation_bytes,
    gradient_bytes,
    optimizer_bytes,
    tile_bytes,
    token_bytes,
    weight_bytes,
)

DEVICE_GIB = 139
"""Of an H200."""
USABLE = 0.9
"""The share of it that a layout may fill: the rest is for what fragments, and for longer samples."""


def shape(parameters: float, layers: int, hidden: int, intermediate: int) -> ModelShape:
    number = int(parameters)
    return ModelShape(parameters=number, trained=number, layers=layers, hidden=hidden, intermediate=intermediate)


SHAPES = {
    "0.5B": shape(0.49e9, 24, 896, 4864),
    "1.5B": shape(1.54e9, 28, 1536, 8960),
    "7B": shape(7.62e9, 28, 3584, 18944),
    "32B": shape(32.8e9, 64, 5120, 27648),
    "70B": shape(70.6e9, 80, 8192, 28672),
}
LENGTHS = (8_192, 32_768, 131_072)
PLAIN, CHECKPOINTED = Layout(), Layout(checkpointing=True)


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


def state_bytes(shape: ModelShape, layout: Layout) -> float:
    """Weights, sums of gradients, masters and moments."""
    return weight_bytes(shape, layout) + gradient_bytes(shape, layout) + optimizer_bytes(shape, layout)


def rank_gib(
    shape: ModelShape, tokens: int, layout: Layout, *, sequence: int | None = None, one_micro_batch: bool = False
) -> float:
    """All of it on one rank, for streams of so many tokens. `sequence`: of the longest in them; None: there is one.

    `one_micro_batch`: of a step. Its gradients grow while its activations go; later ones find all of them there.
    """
    activations = activation_bytes(shape, layout, tokens=tokens, sequence=sequence)
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


def smallest(shape: ModelShape, tokens: int) -> Layout:
    return next(one for one in layouts() if rank_gib(shape, tokens, one) <= USABLE * DEVICE_GIB)


def longest(shape: ModelShape, layout: Layout) -> int:
    """Tokens of the longest sequence that fits, to the thousand; 0 where the model does not."""
    left = USABLE * DEVICE_GIB - rank_gib(shape, 0, layout)
    found = 0
    for tiled in (False, True):
        each = token_bytes(shape, layout, tiled=tiled)
        room = left - (tile_bytes(shape, layout) / GIB if tiled else 0)
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
    for name, shape in SHAPES.items():
        parts = [_gib(part(shape, PLAIN) / GIB) for part in (weight_bytes, gradient_bytes, optimizer_bytes)]
        parts += [
            f"{token_bytes(shape, layout, tiled=tiled) / 1024:,.0f} KiB"
            for tiled in (False, True)
            for layout in (PLAIN, CHECKPOINTED)
        ]
        lines.append(f"| {name} | {' | '.join(parts)} |")
    return "\n".join(lines)


def predictions() -> str:
    """The smallest layout for each shape and length."""
    lines = [
        "| shape | tokens | activations | checkpointed | fits in | each rank takes | measured |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    for name, shape in SHAPES.items():
        for tokens in LENGTHS:
            activations = [
                _gib(activation_bytes(shape, layout, tokens=tokens) / GIB) for layout in (PLAIN, CHECKPOINTED)
            ]
            layout = smallest(shape, tokens)
            found = MEASURED.get((name, tokens, layout))
            values = [name, f"{tokens:,}", *activations, str(layout), _gib(rank_gib(shape, tokens, layout))]
            lines.append(f"| {' | '.join(values)} | {'' if found is None else _gib(found)} |")
    return "\n".join(lines)


def comparisons() -> str:
    """Everything that was measured, beside what is predicted."""
    lines = ["| shape | tokens | | predicted | measured |", "|---|---:|---|---:|---:|"]
    for (name, tokens, layout), found in MEASURED.items():
        several = PACKED.get(tokens)
        predicted = rank_gib(SHAPES[name], tokens, layout, sequence=several, one_micro_batch=several is None)
        lines.append(f"| {name} | {tokens:,} | {layout} | {_gib(predicted)} | {_gib(found)} |")
    return "\n".join(lines)


def limits() -> str:
    """The longest sequences on one device, and on eight that share them."""
    lines = ["| shape | | as it is | with checkpointing |", "|---|---|---:|---:|"]
    for name, shape in SHAPES.items():
        for ranks, zero, context in ((1, 0, 1), (8, 2, 1), (8, 3, 8)):
            found = [longest(shape, Layout(ranks, zero, context, checkpointing=on)) for on in (False, True)]
            if found[1]:
                values = [f"{tokens:,}" if tokens else "does not fit" for tokens in found]
                lines.append(f"| {name} | {Layout(ranks, zero, context)} | {' | '.join(values)} |")
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
