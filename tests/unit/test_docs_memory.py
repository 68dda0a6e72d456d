"""The memory that docs/long_sequences.md predicts: hand-derived numbers, and the estimate that runs make themselves."""

import importlib.util
import sys
from pathlib import Path

import pytest

from openrlhf.runs.engines import TrainedShape, training_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def memory():
    spec = importlib.util.spec_from_file_location("docs_memory", ROOT / "docs" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_process_is_predicted_as_runs_estimate_it(memory, checkpointing):
    for shape in memory.SHAPES:
        estimate = training_bytes(
            TrainedShape(
                parameters=int(shape.parameters),
                layers=shape.layers,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                element_bytes=2,
                checkpointing=checkpointing,
            ),
            tokens=8192,
        )
        predicted = memory.rank_gib(shape, 8192, memory.Layout(1, 0, checkpointing=checkpointing)) * memory.GIB
        assert predicted - memory.TILES == pytest.approx(estimate + 2 * shape.parameters, rel=1e-6)


def test_ranks_share_state_by_stage_and_tokens_by_context(memory):
    """2 layers, 1,000 parameters, hidden size 1 and intermediate 2: a layer keeps 2 (7 + (5 + 8)/t) bytes a token."""
    shape, Layout = memory.Shape("x", 1000, 2, 1, 2), memory.Layout
    assert [memory.state_bytes(shape, Layout(4, zero)) for zero in range(4)] == [18_000, 9_000, 6_000, 4_500]
    assert memory.state_bytes(shape, Layout(4, 2, tensor=2)) == 2 * 500 + 16 * 250
    assert memory.state_bytes(shape, Layout(4, 3, tensor=2)) == 18 * 250
    assert memory.token_bytes(shape) == 2 * 2 * 20
    assert memory.token_bytes(shape, tensor=13) == 2 * 2 * 8
    assert memory.token_bytes(shape, checkpointing=True) == 2 * 20 + 2 * 2
    whole, shared = (memory.rank_gib(shape, 10**9, Layout(8, 2, context)) for context in (1, 8))
    fixed = memory.rank_gib(shape, 0, Layout(8, 2))
    assert (whole - fixed) / (shared - fixed) == pytest.approx(8, rel=1e-4)


def test_a_long_sequence_has_the_mlp_of_one_tile(memory):
    """The same shape: of a layer 2 · 12 bytes a token are left; a tile has 2 · 2 · 8 bytes for each of its tokens, and
    the three matrices of an MLP have 6 parameters."""
    from openrlhf.models.tiles import LONG, TILE

    assert (memory.LONG, memory.TILE) == (LONG, TILE)
    shape, alone = memory.Shape("x", 1000, 2, 1, 2), memory.Layout(1, 0)
    fixed = memory.rank_gib(shape, 0, alone)
    taken = [(memory.rank_gib(shape, tokens, alone) - fixed) * memory.GIB for tokens in (LONG - 1, LONG)]
    assert taken[0] == pytest.approx(80 * (LONG - 1))
    assert taken[1] == pytest.approx(48 * LONG + 32 * TILE + 24)
    packed = (memory.rank_gib(shape, LONG, alone, sequence=LONG - 1) - fixed) * memory.GIB
    assert packed == pytest.approx(80 * LONG)


def test_what_was_measured_is_near_what_is_predicted(memory):
    shapes = {shape.name: shape for shape in memory.SHAPES}
    for (name, tokens, layout), found in memory.MEASURED.items():
        predicted = memory.rank_gib(shapes[name], tokens, layout, sequence=memory.PACKED.get(tokens))
        assert predicted == pytest.approx(found, rel=0.25)
