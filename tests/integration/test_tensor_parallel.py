"""Ranks that share every layer train what one process trains, in RL as elsewhere, and go on from each other's state."""

import json
from pathlib import Path

import pytest
from preloaded import run_ranks

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).resolve().parents[1] / "support"
CASES = ["ppo zero 0", "ppo zero 1", "ppo zero 2", "ppo zero 3", "kl loss", "tied", "lora zero 0", "lora zero 3"]


@pytest.fixture(scope="module")
def rounds(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("tensor")
    file = folder / "out.json"
    words = [str(SUPPORT / "tensor_ranks.py"), str(file)]
    run_ranks(2, words, cwd=folder, said=folder / "said.txt", environment={})
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", CASES)
def test_rounds_of_rl_are_those_of_one_process(rounds, case):
    """Policy, critic and a reference that is cut too, in three rounds: metrics, and weights to 1e-5."""
    ran = rounds[case]
    assert ran["gap"] < 1e-5
    for found, expected in zip(ran["found"], ran["expected"], strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name != "critic_clip_ratio":  # a count of values on either side of an edge
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("case", CASES)
def test_every_model_is_cut(rounds, case):
    """Two layers of seven matrices each; Qwen2 has three biases beside them. Of adapters one factor in two is cut."""
    per_model = {"tied": 20, "lora zero 0": 28, "lora zero 3": 28}.get(case, 14)
    policy, *others = rounds[case]["cut"]
    assert policy == per_model
    assert others
    # The reference has no adapter of its own here.
    assert others[-1] == (14 if case.startswith("lora") else per_model)


@pytest.mark.parametrize("who", ["one process", "zero 3"])
def test_a_state_of_cut_layers_is_continued_by_others(rounds, who):
    """Two rounds by ranks of stage 1, the third by one process, and by ranks that shard what is cut."""
    assert rounds["continued"][who] < 1e-5
