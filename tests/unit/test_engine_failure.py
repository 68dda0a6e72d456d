"""An engine that fails or does not answer ends the run, in words, whoever waits for it."""

import asyncio
import threading
import time

import pytest
from patience import patience
from small_tokenizers import tokenizer as small_tokenizer
from transformers import Qwen2Config

from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes, EpisodeError
from openrlhf.rollout.base import EngineError, LostRequestError
from openrlhf.types import Generation, Prompt, SamplingParams
from openrlhf.utils.event_loops import LoopThread

SURVIVES = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, **kwargs):
        try:
            await llm_engine.generate([1, 2, 3], sampling_params)
        except Exception:
            raise RuntimeError("my own words")
"""


class DeadEngine:
    version = 0
    max_model_len = 100

    async def generate(self, token_ids, sampling_params, images=()):
        raise EngineError("the engine has died")

    async def stream(self, token_ids, sampling_params, images=()):
        raise EngineError("the engine has died")
        yield


@pytest.fixture
def thread():
    thread = LoopThread("test")
    yield thread
    thread.close()
    thread.close()


def test_a_wait_says_what_it_was_for_and_cancels_the_work(thread):
    cancelled = threading.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError, match=r"waited 0\.05 s for an answer"):
        thread.run(work(), "for an answer", deadline=0.05)
    assert cancelled.wait(patience(5))


def test_the_works_own_timeout_is_not_taken_for_the_wait(thread):
    async def work():
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        thread.run(work(), "for an answer", deadline=60)


def test_a_loop_that_hangs_does_not_keep_its_owner(monkeypatch):
    monkeypatch.setattr("openrlhf.utils.event_loops._CLOSING_SECONDS", 0.05)
    thread, release = LoopThread("hangs"), threading.Event()

    async def hang():
        release.wait()

    thread.submit(hang())
    before = time.monotonic()
    thread.close()
    assert time.monotonic() - before < patience(5)
    release.set()


def play(engine, agent: str, folder) -> None:
    """One episode of an agent with that file, in this process."""
    (folder / "agent.py").write_text(agent)
    small_tokenizer().save_pretrained(folder)
    Qwen2Config().save_pretrained(folder)
    settings = EpisodeSettings(
        agent_file=str(folder / "agent.py"),
        tokenizer=str(folder),
        use_fast=True,
        trust_remote_code=False,
        max_length=50,
        max_steps=None,
        max_model_len=100,
    )

    async def one() -> None:
        episodes = AgentEpisodes(settings, engine=engine, hosts=0, step_timeout=60)
        await episodes.start()
        try:
            await episodes.play(Prompt(ordinal=0, text="q"), SamplingParams(max_tokens=4))
        finally:
            await episodes.close()

    asyncio.run(one())


def test_no_agent_hides_that_its_engine_died(tmp_path):
    """The agent turns every error into its own, which would be retried and then counted as a failed sample."""
    with pytest.raises(EngineError, match="the engine has died"):
        play(DeadEngine(), SURVIVES, tmp_path)


STREAMS = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, **kwargs):
        return [part async for part in llm_engine.stream([1, 2, 3], sampling_params)]
"""


class LostEngine(DeadEngine):
    """One of several, which dies in the middle of an answer."""

    async def stream(self, token_ids, sampling_params, images=()):
        yield Generation(token_ids=[4], logprobs=None, versions=[0], finish_reason=None, stop_reason=None, text="d")
        raise LostRequestError("vLLM engine 1 on 10.0.0.9 is gone")


def test_an_answer_that_was_begun_and_lost_makes_its_episode_begin_again(tmp_path):
    with pytest.raises(EpisodeError, match=r"vLLM engine 1 on .* is gone") as caught:
        play(LostEngine(), STREAMS, tmp_path)
    assert caught.value.retry
