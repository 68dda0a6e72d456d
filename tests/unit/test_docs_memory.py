"""The memory that docs/long_sequences.md predicts: hand-derived numbers, beside what was measured."""

import importlib.util
import sys
from pathlib import Path

import pytest

from openrlhf.models.tiles import LONG, TILE
from openrlhf.runs.device_memory import Layout, ModelShape

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def memory():
    spec = importlib.util.spec_from_file_location("docs_memory", ROOT / "docs" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SHAPE = ModelShape(parameters=1000, trained=1000, layers=2, hidden=5, intermediate=2)
ALONE = Layout(1, 0)


def test_ranks_share_state_by_stage_and_tokens_by_context(memory):
    """2 layers, 1,000 parameters, hidden size 5 and intermediate 2: a layer keeps 2 (20 + (13 + 8)/t) bytes a token,
    and its gradients 2 (25 + 4/t)."""
    assert [memory.state_bytes(SHAPE, Layout(4, zero)) for zero in range(4)] == [18_000, 9_000, 6_000, 4_500]
    assert memory.state_bytes(SHAPE, Layout(4, 2, tensor=2)) == 2 * 500 + 16 * 250
    assert memory.state_bytes(SHAPE, Layout(4, 3, tensor=2)) == 18 * 250
    assert memory.token_bytes(SHAPE, ALONE) == 2 * 2 * 41
    assert memory.token_bytes(SHAPE, Layout(tensor=21)) == 2 * 2 * 21
    assert memory.token_bytes(SHAPE, Layout(checkpointing=True)) == 2 * 41 + 2 * 29 + 2 * 2 * 5
    whole, shared = (memory.rank_gib(SHAPE, 10**9, Layout(8, 2, context)) for context in (1, 8))
    fixed = memory.rank_gib(SHAPE, 0, Layout(8, 2))
    assert (whole - fixed) / (shared - fixed) == pytest.approx(8, rel=1e-4)


def test_a_long_sequence_has_the_mlp_of_one_tile(memory):
    """The same shape: of a layer 2 · 33 bytes a token are left; a tile has 2 · 2 · 8 bytes for each of its tokens, and
    the three matrices of an MLP have 30 parameters."""
    fixed = memory.rank_gib(SHAPE, 0, ALONE)
    taken = [(memory.rank_gib(SHAPE, tokens, ALONE) - fixed) * memory.GIB for tokens in (LONG - 1, LONG)]
    assert taken[0] == pytest.approx(164 * (LONG - 1))
    assert taken[1] == pytest.approx(132 * LONG + 32 * TILE + 120)
    packed = (memory.rank_gib(SHAPE, LONG, ALONE, sequence=LONG - 1) - fixed) * memory.GIB
    assert packed == pytest.approx(164 * LONG)


def test_one_micro_batch_has_its_gradients_when_its_activations_are_gone(memory):
    fixed = memory.rank_gib(SHAPE, 0, ALONE)
    few, many = ((memory.rank_gib(SHAPE, n, ALONE, one_micro_batch=True) - fixed) * memory.GIB for n in (10, 100))
    assert few == pytest.approx(0)  # 1,640 bytes, and 4,000 of gradients
    assert many == pytest.approx(16_400 - 4_000)


def test_what_was_measured_is_near_what_is_predicted(memory):
    for (name, tokens, layout), found in memory.MEASURED.items():
        several = memory.PACKED.get(tokens)
        predicted = memory.rank_gib(
            memory.SHAPES[name], tokens, layout, sequence=several, one_micro_batch=several is None
        )
        assert predicted == pytest.approx(found, rel=0.11), (name, tokens, layout)
