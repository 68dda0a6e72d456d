"""examples/python/agent_func_gymnasium.py: a proper Gymnasium environment, played by text."""

import asyncio
import importlib.util
import re
import warnings
from pathlib import Path

import pytest
from scripted_engine import CharTokenizer, ScriptedEngine, says

from openrlhf.agents.user_agent import load_agent
from openrlhf.types import SamplingParams

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "agent_func_gymnasium.py"
checker = pytest.importorskip("gymnasium.utils.env_checker")


def play(engine, *, label=7):
    return asyncio.run(
        load_agent(EXAMPLE).play("Walk!\n", label, SamplingParams(max_tokens=40), 4000, CharTokenizer(), engine)
    )


def follower() -> ScriptedEngine:
    """Goes where the last line says."""

    def go(prompt, params):
        (direction, *_) = re.findall(r"\d (\w+)", "".join(map(chr, prompt)).splitlines()[-2])
        return [ord(c) for c in f"I go {direction}<|im_end|>"]

    return ScriptedEngine(go)


def test_gymnasium_environment_follows_its_api():
    spec = importlib.util.spec_from_file_location("agent_func_gymnasium", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checker.check_env(module.Treasure(), skip_render_check=True)


@pytest.mark.parametrize("seed", range(5))
def test_gymnasium_example_can_be_solved(seed):
    """1 for the last step and 0.1 for each before it."""
    episode = play(follower(), label=seed)
    assert episode.score == 1.0
    turns = int(sum(r != 0 for r in episode.segments[0].turn_rewards.tolist()))
    assert episode.reward == pytest.approx(1 + 0.1 * (turns - 1))
    assert episode.text.startswith("Walk!\nThe treasure lies ")
    assert episode.text.endswith("\nYou found it!\n> ")


def test_the_label_is_the_seed():
    first, again, other = (play(follower(), label=label).text for label in (1, 1, 2))
    assert first == again != other


def test_nonsense_is_fined_until_time_is_up():
    episode = play(says("where am I"))
    assert (episode.score, episode.extra_logs) == (0.0, {"out_of_time": 1.0, "understood": 0.0})
    assert episode.reward == pytest.approx(12 * -0.05)
