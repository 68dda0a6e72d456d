"""The plans of docs/scale.md, some of their numbers held against a computation by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

from openrlhf.planning.hardware import GIB

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("docs_scale", ROOT / "docs" / "scale.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_document_has_the_tables_of_its_script(scale):
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert scale.filled(text) == text


def test_70b_on_64_devices_by_hand(scale):
    """70,553,706,496 parameters. ZeRO-3 on 64: 18 bytes / 64 of each. An engine of 4: a quarter of 2 bytes of each.
    The update: 8,192 samples in micro-batches of 6 (16,384 // 2,560), so that six share a prompt: 2,048 + 512/6 tokens
    each. Matrices of layers 68.5B: 4 forwards' worth of 2; the head 1.05B on responses: 3; attention 3 · 4 · 8,192 · 80
    for each pair. 40 % of 989 TFLOP/s on each of 64."""
    plan = scale.planned(scale.SETUPS[scale.DENSE][1])
    P = 70_553_706_496
    phases = {phase.phase: {part.name: part.bytes for part in phase.parts} for phase in plan.pools[0].phases}
    state = sum(phases["update"][name] for name in ("actor weights", "optimizer", "gradients"))
    assert state == pytest.approx(18 * P / 64)
    assert phases["generate"]["engine weights"] == pytest.approx(2 * P / 4)
    assert state / GIB == pytest.approx(18.5, abs=0.1)

    tokens = 8192 * (2048 + 512 / 6)
    pairs = 8192 * (512**2 / 12 + 512 * 2048 + 2048**2 / 2)
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672
    linear = 80 * layer * tokens * 8 + 128_256 * 8192 * 8192 * 2048 * 6
    seconds = (linear + 12 * 8192 * 80 * pairs) / (64 * 0.4 * 989e12)
    update = next(time.seconds for time in plan.times if time.name == "update")
    assert update.compute == pytest.approx(seconds, rel=0.02)


def test_235b_is_bound_by_gathering_weights(scale):
    """64 ranks at 12,288 tokens: 4 samples of 2,560 in a micro-batch, 32 of them on each rank. Each is gathered for three
    passes: 470 GB · 63/64 at 70 % of 50 GB/s. Then gradients are summed and weights given back, 8 bytes of each."""
    plan = scale.planned(scale.SETUPS[scale.LARGE][1])
    update = next(time.seconds for time in plan.times if time.name == "update")
    gathers = 32 * 3 * 2 * 235_093_634_560 * 63 / 64 / (0.7 * 50e9)
    sums = 8 * 235_093_634_560 / (0.7 * 50e9)
    assert update.traffic + update.compute == pytest.approx(gathers + sums, rel=0.001)
    assert update.traffic > update.compute
