"""Episodes that drive themselves: the world's own loop asks the policy at an endpoint, which records every call."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import Episode
from openrlhf.agents.chat_protocol import MODEL
from openrlhf.agents.openai_session import ChatSession
from openrlhf.agents.recording_engine import RecordingEngine, segments_from_calls
from openrlhf.agents.results import after_prompt
from openrlhf.agents.user_calls import AgentResultError
from openrlhf.types import SamplingParams
from openrlhf.worlds.process import WorldEpisode, WorldFailure

if TYPE_CHECKING:
    from openrlhf.agents.openai_http import AgentServer
    from openrlhf.rollout.base import Engine

KEY = "none"
"""The session's URL is the secret."""


class Endpoint:
    """The policy as a server of OpenAI's protocol, on loopback, for all episodes of a host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: AgentServer | None = None

    @property
    def server(self) -> AgentServer:
        """Started when it is first needed."""
        with self._lock:
            if self._server is None:
                from openrlhf.agents.openai_http import AgentServer

                self._server = AgentServer()
            return self._server


async def play_driven(
    world: WorldEpisode,
    endpoint: Endpoint,
    prompt: str,
    *,
    sampling_params: SamplingParams,
    max_length: int,
    tokenizer: Any,
    engine: Engine,
    max_steps: int | None,
) -> Episode:
    """One episode, in at most `max_steps` answers. `max_length` holds for each prompt with its answer. The run decides
    how answers are sampled, whatever the world's loop asks for. Raises WorldFailure."""
    recording = RecordingEngine(engine, sampling_params=sampling_params, max_length=max_length)
    session = ChatSession(
        recording,
        tokenizer,
        sampling_params=sampling_params,
        max_length=max_length,
        max_turns=max_steps,
        client_sampling=False,
    )
    server = endpoint.server
    server.open(session)
    try:
        outcome = await world.run(
            f"{server.url}/session/{session.id}/v1", KEY, MODEL, waited=lambda: session.busy_seconds
        )
    except WorldFailure:
        if recording.failure is not None:  # not the world's fault
            raise recording.failure from None
        raise
    finally:
        await server.close(session)
    segments = segments_from_calls(recording.calls, reward=outcome.reward)
    if not segments:
        raise AgentResultError("the world's loop has ended without asking the policy")
    return Episode(
        segments=segments,
        text=prompt + str(tokenizer.decode(after_prompt(segments[-1], tokenizer), skip_special_tokens=False)),
        truncated=session.truncated,
        reward=outcome.reward,
        score=outcome.score,
        extra_logs=dict(outcome.logs),
    )
