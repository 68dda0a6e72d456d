"""vLLM engines that die or stop answering in the middle of a run: the run ends as if nothing had been.

Minutes: `make test-faults`; `tests/integration/test_cluster_faults.py` has the first of each kind.
"""

import asyncio
import contextlib
import functools
import signal

import psutil
import pytest
from faulty_runs import (
    PROMPTS,
    ROUNDS,
    SAMPLES,
    actor_of,
    assert_every_prompt_once,
    column,
    core_of,
    kill,
    samples,
    strike,
)

from openrlhf.cluster.health import HealthWatch, ReplacementBudget
from openrlhf.rollout.base import EngineError, LostRequestError
from openrlhf.runs.rl_assembly import train
from openrlhf.types import SamplingParams

pytestmark = pytest.mark.slow

ROUND = PROMPTS * SAMPLES


@pytest.fixture(scope="module")
def undisturbed(inputs, cluster, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(inputs.config(run_dir), make_launcher=cluster.make_launcher)
    assert_every_prompt_once(run_dir)
    assert column(run_dir, "rollout/engines_replaced") == [0] * ROUNDS
    return samples(run_dir)


@pytest.mark.parametrize(
    ("victims", "at"),
    [
        ([(actor_of, 0)], 3),
        ([(core_of, 0)], 3),
        ([(core_of, 1)], ROUND + 5),
        ([(actor_of, 1)], 2 * ROUND + 2),
        ([(core_of, 0), (actor_of, 1)], ROUND + 3),  # nobody is left, until one is back with the current weights
    ],
    ids=["actor, first round", "core, first round", "core, second round", "actor, last round", "both"],
)
def test_a_killed_engine_changes_nothing(
    inputs, cluster, engines, undisturbed, results, tmp_path, caplog, request, victims, at
):
    blow = lambda: kill(*(process(engines, engine) for process, engine in victims))  # noqa: E731
    with strike(engines, blow, at=at):
        train(inputs.config(tmp_path / "run"), make_launcher=cluster.make_launcher)
    assert_every_prompt_once(tmp_path / "run")
    assert samples(tmp_path / "run") == undisturbed
    assert sum(column(tmp_path / "run", "rollout/engines_replaced")) + engines.take_replaced() == len(victims)
    assert max(column(tmp_path / "run", "sync/probe_gap")) < 1e-4
    assert caplog.text.count("another one starts in its place") == len(victims)
    outcome = "every sample once, with the text and reward that it would have had"
    row = {"killed": request.node.callspec.id, "at request": at, "replaced": len(victims), "outcome": outcome}
    results.add("Engines of a run on Ray, kill -9", **row)


def test_one_that_stops_answering_is_replaced(inputs, cluster, engines, undisturbed, tmp_path, caplog):
    """It is stopped, not killed: nobody would ever hear from it."""
    watch = HealthWatch(engines._at_work, timeout=8.0, give_up=engines._unwell)
    watch.start()
    with strike(engines, lambda: kill(core_of(engines, 1), with_signal=signal.SIGSTOP), at=3):
        train(inputs.config(tmp_path / "run"), make_launcher=cluster.make_launcher)
    watch.stop()
    assert samples(tmp_path / "run") == undisturbed
    assert "vLLM engine 1" in caplog.text
    assert "it has not answered for 8 s; another one starts in its place" in caplog.text


def test_one_that_dies_in_the_middle_of_a_push_does_not_hold_it_up(inputs, cluster, engines, undisturbed, tmp_path):
    """After it was told to pause, before it gets weights: the ranks' sending fails, and is repeated without it."""
    whole, pushes = engines.pause, 0

    async def pause():
        nonlocal pushes
        await whole()
        pushes += 1
        if pushes == 2:
            kill(core_of(engines, 0))

    engines.pause = pause
    try:
        train(inputs.config(tmp_path / "run"), make_launcher=cluster.make_launcher)
    finally:
        del engines.pause
    assert_every_prompt_once(tmp_path / "run")
    assert samples(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("partial", [False, True], ids=["async", "partial"])
def test_asynchronous_runs_lose_nothing(inputs, cluster, engines, tmp_path, partial):
    """Both engines die, some while a round is trained on: what is in play waits, and so does who waits for it."""
    pipeline = {"train__async_enable": True, "train__partial_rollout_enable": partial or None}
    blow = functools.partial(kill, actor_of(engines, 0), core_of(engines, 1))
    with strike(engines, blow, at=ROUND + 5):
        train(inputs.config(tmp_path / "run", **pipeline), make_launcher=cluster.make_launcher)
    assert_every_prompt_once(tmp_path / "run")
    assert max(column(tmp_path / "run", "sync/probe_gap")) < 1e-4


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Again(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        done = self.turns == 3
        reward = float(sum(map(ord, states["action_text"])) % 7)
        return {"rewards": reward, "scores": reward, "environment_feedback": "" if done else ">", "done": done}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Again)
"""


def test_an_agent_in_its_second_turn_notices_nothing(inputs, cluster, engines, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    multi_turn = {
        "train__agent_func_path": tmp_path / "agent.py",
        "reward__remote_url": None,
        "rollout__max_new_tokens": 6,
        "actor__adam__lr": 0,
    }
    for name in ("straight", "struck"):
        (tmp_path / name).mkdir()
    train(inputs.config(tmp_path / "straight" / "run", **multi_turn), make_launcher=cluster.make_launcher)
    with strike(engines, lambda: kill(core_of(engines, 0), core_of(engines, 1)), at=ROUND + 4):
        train(inputs.config(tmp_path / "struck" / "run", **multi_turn), make_launcher=cluster.make_launcher)
    assert_every_prompt_once(tmp_path / "struck" / "run")
    assert samples(tmp_path / "struck" / "run") == samples(tmp_path / "straight" / "run")


def test_an_answer_that_has_begun_cannot_go_on_elsewhere(engines):
    """Whoever has read its beginning is told; asked again, another engine answers."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)

    async def whole() -> int:
        return sum([len(part.token_ids) async for part in engines.stream([5, 6, 7], params)])

    async def broken() -> None:
        async for _ in engines.stream([5, 6, 7], params):
            (busy,) = [engine for engine, running in enumerate(engines._router.running) if running]
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(core_of(engines, busy))

    async def main() -> int:
        with pytest.raises(LostRequestError, match="vLLM engine"):
            await broken()
        return await whole()

    assert asyncio.run(main()) == 24
    engines.wait_for_replacements()


def test_one_that_keeps_dying_ends_the_run(inputs, cluster, engines, tmp_path):
    engines.budget = ReplacementBudget(0)
    with (
        strike(engines, lambda: kill(core_of(engines, 0)), at=3),
        pytest.raises(EngineError, match=r"vLLM engine 0 on [\d.]+.*replaced 0 times within 60 minutes"),
    ):
        train(inputs.config(tmp_path / "run"), make_launcher=cluster.make_launcher)
    engines.budget, engines._failure = ReplacementBudget(), None
    engines._replace(0, "the next test needs it")
