"""Whatever the driver waits for in vain ends within its deadline, with an error that names it and a file of stacks."""

import asyncio
import contextlib
import json
import sys
import threading
import time

import pytest
from patience import patience
from test_rollout_async_collector import Engine, Runner
from test_rollout_collector import GOOD

from openrlhf.agents.episodes import OwnEpisodes
from openrlhf.agents.host import HostProcess, HostTimeoutError
from openrlhf.data.prompts import PromptSet, PromptStream
from openrlhf.data.sources import load_records
from openrlhf.observability.watchdog import Watchdog
from openrlhf.rewards.base import RewardRequest
from openrlhf.rewards.function_file import FunctionFileReward
from openrlhf.rollout.async_collector import AsyncCollector
from openrlhf.rollout.collector import SyncCollector
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.types import SamplingParams
from openrlhf.utils import waits
from openrlhf.utils.event_loops import BackgroundRunner
from openrlhf.utils.waits import WaitError


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"q{i}"}) + "\n" for i in range(8)))
    return PromptStream(PromptSet(load_records(str(path))), seed=0, num_episodes=1, shuffle=False)


@pytest.fixture
def watched(tmp_path):
    """While open, a run of which nothing is heard for 0.4 s has failed."""

    @contextlib.contextmanager
    def watched():
        with Watchdog(stall_seconds=0.4, tick=0.02, end=lambda _: None) as dog, dog.stalls_count(tmp_path):
            yield tmp_path / "stacks-1.txt"

    return watched


class AsksTheEngine:
    """A player of a single turn."""

    async def play(self, prompt, label, sampling_params, max_length, tokenizer, engine, images):
        return await engine.generate([1], sampling_params)


class SilentEngine:
    version = 0

    async def generate(self, token_ids, sampling_params, images=()):
        await asyncio.Event().wait()


def runner_on(engine):
    episodes = OwnEpisodes(AsksTheEngine(), engine=engine, tokenizer=None, max_length=8)
    return EpisodeRunner(episodes=episodes, reward=None, seed=0)


def test_an_engine_that_never_answers(prompts, watched):
    """Four prompts are in play; which, and who waits where, is in the error, and the coroutine in the stacks."""
    with asyncio.Runner() as loop, waits.during("round 1"):
        collector = SyncCollector(
            prompts=prompts,
            runner=runner_on(SilentEngine()),
            loop=loop,
            batch_size=4,
            samples_per_prompt=2,
            sampling_params=SamplingParams(),
        )
        with pytest.raises(WaitError) as failure, watched() as stacks:
            collector.next_batch()
        assert collector.state_dict()["unserved"] == []  # given back, to be asked again
    assert "round 1: waiting 0 s for 4 of 4 prompts (0, 1, 2, 3): prompt 0 sample 0 at the engine" in str(failure.value)
    assert str(stacks) in str(failure.value)
    assert "await asyncio.Event().wait()" in stacks.read_text()


def test_evaluation_on_such_an_engine(prompts, watched):
    runner = runner_on(SilentEngine())
    playing = runner.play_all(prompts.take(3), n=1, sampling_params=SamplingParams(), purpose="eval")
    named = "for 3 of 3 prompts: prompt 0 sample 0 at the engine"
    with asyncio.Runner() as loop, pytest.raises(WaitError, match=named), watched():
        loop.run(playing)


@pytest.fixture
def ahead(prompts):
    """An asynchronous collector, whose prompts end when they are told to."""
    engine = Engine()
    with BackgroundRunner() as loop:
        runner = Runner([GOOD] * 8, engine, loop)
        made = AsyncCollector(
            prompts=prompts,
            runner=runner,
            engine=engine,
            loop=loop,
            batch_size=2,
            samples_per_prompt=2,
            sampling_params=SamplingParams(),
        )
        yield made, runner, loop


def test_a_queue_whose_producer_is_stuck(ahead, watched):
    collector, runner, _ = ahead
    runner.finish(0)
    with pytest.raises(WaitError, match=r"waiting 0 s for 1 of 2 prompts \(1\)"), watched():
        collector.next_batch()


def test_generation_that_does_not_come_to_rest(ahead, watched):
    collector, _, _ = ahead
    collector.resume()
    with pytest.raises(WaitError, match=r"waiting 0 s for 2 of 2 prompts \(0, 1\)"), watched():
        collector.drain()


@pytest.mark.parametrize("early", [True, False], ids=["before it began", "in the middle"])
def test_a_queue_whose_producer_was_cancelled(ahead, early):
    collector, _, loop = ahead

    async def cancel():
        collector._start_due()
        if not early:
            await asyncio.sleep(0.05)
        for task in collector._tasks.values():
            task.cancel()

    loop.run(cancel())
    with pytest.raises(RolloutError, match="prompt 0 was given up while it was in play"):
        collector.next_batch()


def test_a_queue_whose_thread_is_gone(ahead, monkeypatch):
    """What ends an interpreter ends the loop it is raised on. Whoever asks then is told, and does not wait."""
    collector, _, loop = ahead
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    loop._thread._loop.call_soon_threadsafe(sys.exit, 3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the thread that plays episodes has ended"):
        collector.next_batch()
    assert time.monotonic() - began < patience(5)


def test_a_reward_that_hangs_is_named_while_it_does(tmp_path):
    path = tmp_path / "slow_reward.py"
    path.write_text("import time\ndef reward_func(queries, prompts, labels):\n    time.sleep(60)\n")

    async def main():
        reward = FunctionFileReward(path, timeout=0.5, max_retries=0)
        await reward.start()
        with waits.activity("prompt 17"):
            asked = asyncio.create_task(
                reward.score(RewardRequest(queries=("a",), prompts=("q",), labels=("l",), name="x"))
            )
            await asyncio.sleep(0.3)
            named, stacks = waits.oldest_activity(), reward._host.stacks()
            with pytest.raises(Exception, match=r"slow_reward\.py did not answer in 0\.5 s \(--reward\.timeout\)"):
                await asked
        await reward.close()
        return named, stacks

    named, stacks = asyncio.run(main())
    assert named == "prompt 17 judged by reward_func (slow_reward.py)"
    ((name, text),) = stacks.items()
    assert "slow_reward.py" in name
    assert 'slow_reward.py", line 3 in reward_func' in text


def test_a_step_that_hangs_recovers_and_is_in_the_stacks(watched):
    """Users' code blocks for ever. After 0.4 s nothing has happened: the file shows the line it is in, asked from
    outside. After its own 1 s the call fails, is named, and the next one is answered."""

    async def main():
        host = HostProcess("host_services:Episodes", name="agent agent.py (host 1 of 1)")
        await host.start()
        try:
            stuck = asyncio.create_task(host.call("play_twice", "blocks_for_ever", timeout=1.0))
            with pytest.raises(WaitError), watched() as file, waits.waiting("for a step"):
                await asyncio.shield(stuck)
            with pytest.raises(HostTimeoutError, match=r"blocks_for_ever\(\) took longer than 1 s"):
                await stuck
            assert await host.call("plain", 3, timeout=5.0)
            return file.read_text()
        finally:
            await host.close()

    text = asyncio.run(main())
    assert "== agent agent.py (host 1 of 1), process" in text
    assert "1 calls, 0 of them wait for us" in text
    assert "in blocks_for_ever" in text
