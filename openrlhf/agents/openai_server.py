"""An executor for programs that speak to OpenAI or Anthropic: each episode gets an endpoint, and what is asked there is
recorded."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import AgentExecutorBase, Episode
from openrlhf.agents.host_worker import run_user, say
from openrlhf.agents.images import images_of
from openrlhf.agents.openai_session import ChatSession
from openrlhf.agents.recording_engine import RecordingEngine, segments_from_calls
from openrlhf.agents.results import after_prompt, parse_judgement
from openrlhf.agents.user_calls import (
    AgentError,
    AgentResultError,
    CallPlan,
    UserFileError,
    file_of,
    place_of,
    plan_call,
    users_code,
)
from openrlhf.agents.values import BadValueError
from openrlhf.types import SamplingParams, Segment

if TYPE_CHECKING:
    from openrlhf.agents.openai_http import AgentServer
    from openrlhf.rollout.base import Engine

ARGUMENTS = ("prompt", "label", "session_id", "base_url", "images", "anthropic_base_url")
"""The arguments that `run_agent` can take: by name, or the first three in this order."""

_starting = threading.Lock()


class OpenAIServerAgentExecutor(AgentExecutorBase):
    """Runs an agent program as it is, against the policy: any that has an `openai` or `anthropic` client with a base
    URL.

    >>> class AgentExecutor(OpenAIServerAgentExecutor):
    ...     async def run_agent(self, prompt, label, base_url):
    ...         client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
    ...         answer = await my_program(client, question=prompt)
    ...         return {"reward": float(answer == label)}

    What the client reads and gets is the episode, token by token. A conversation that goes on is one segment; one whose
    history was rewritten begins another. See `docs/openai_agents.md`.
    """

    client_sampling: bool = True
    """Whether requests may choose temperature, seed and the like. False: the run's hold, for a program that asks for
    temperature 0, with which the samples of a prompt would all be the same."""

    _running: AgentServer | None = None

    def __init__(self) -> None:
        self._plan()

    @abstractmethod
    async def run_agent(self, prompt: str, label: Any, session_id: str) -> dict[str, Any]:
        """Play one episode; async or not. It may take, by name:

            prompt, label, images   of the record
            base_url                of this episode alone: `http://127.0.0.1:<port>/session/<id>/v1`
            anthropic_base_url      the same for a client of Anthropic's, which adds `/v1` itself
            session_id              for a client of `self.base_url`, which all episodes share: in the path, the header
                                    `X-Session-Id` or `extra_body={"session_id": …}`

        Returns {"reward": number, or None if somebody else judges it, "scores": success in [0, 1], "extra_logs"}.
        """

    @property
    def base_url(self) -> str:
        """The address that all episodes share: requests to it must name their session."""
        return f"{self._server.url}/v1"

    async def play(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Engine,
        images: Any = None,
        *,
        max_steps: int | None = None,
    ) -> Episode:
        """One episode: all that its program asks for, in at most `max_steps` answers.

        `max_length` holds for each prompt and its answer.
        """
        plan = self._plan()
        place = place_of(self.run_agent)
        if not getattr(hf_tokenizer, "chat_template", None):
            raise AgentResultError(
                f"{place}: the tokenizer of {_name(hf_tokenizer)} has no chat template, so it cannot read messages"
            )
        most = min(max_length, llm_engine.max_model_len)
        reader = images_of(hf_tokenizer)
        engine = RecordingEngine(llm_engine, sampling_params=sampling_params, max_length=most, images=reader)
        session = ChatSession(
            engine,
            hf_tokenizer,
            sampling_params=sampling_params,
            max_length=most,
            max_turns=max_steps,
            client_sampling=self.client_sampling,
        )
        values = {
            "prompt": prompt,
            "label": label,
            "session_id": session.id,
            "base_url": f"{self._server.url}/session/{session.id}/v1",
            "anthropic_base_url": f"{self._server.url}/session/{session.id}",
            "images": images if reader is None or not images else await reader.pixels(images),
        }
        self._server.open(session)
        try:
            with users_code(file_of(type(self).run_agent)):
                returned = await run_user(plan.bind(self.run_agent, values))
        except AgentError:
            if engine.failure is not None:  # not the program's fault
                raise engine.failure from None
            raise
        finally:
            await self._server.close(session)
        self._note_sampling(session)
        if session.history.spells_tools:
            say(
                f"{file_of(type(self))}: the chat template of {_name(hf_tokenizer)} leaves tools out; a system message "
                "describes them instead (docs/openai_agents.md)"
            )
        try:
            judged = parse_judgement(returned, of="run_agent")
        except BadValueError as error:
            raise AgentResultError(f"{place}: {error}") from None
        segments = segments_from_calls(engine.calls, reward=judged.reward)
        if not segments:
            raise AgentResultError(
                f"{place}: the agent never asked the model; its client's base URL must be base_url (anthropic_base_url "
                "for Anthropic's client)"
            )
        return Episode(
            segments=segments,
            text=prompt + _decode(hf_tokenizer, segments[-1]),
            truncated=session.truncated,
            reward=judged.reward,
            score=judged.score,
            extra_logs=judged.extra_logs,
            images=tuple(images or ()),
        )

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """The same as a dict, for users' executors that add to it. The tokens are what `llm_engine` was asked."""
        episode = await self.play(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        return {
            "prompt": prompt,
            "label": label,
            "reward": episode.reward,
            "scores": episode.score,
            "extra_logs": dict(episode.extra_logs),
            "truncated": episode.truncated,
            "images": list(episode.images),
        }

    @property
    def _server(self) -> AgentServer:
        """Started when it is first needed: a subclass may have an `__init__` that does not call ours."""
        with _starting:
            if self._running is None:
                from openrlhf.agents.openai_http import AgentServer

                self._running = AgentServer()
            return self._running

    def _plan(self) -> CallPlan:
        plan = plan_call(self.run_agent, ARGUMENTS, fewest=3)
        if plan is None:
            raise UserFileError(
                f"{place_of(self.run_agent)}: run_agent is called with prompt, label and session_id, and by name with "
                "base_url, anthropic_base_url and images; it takes others"
            )
        return plan

    def _note_sampling(self, session: ChatSession) -> None:
        """Gradients are taken as if the run's own parameters had been used."""
        if session.foreign_sampling:
            asked = ", ".join(f"{name} {value}" for name, value in sorted(session.foreign_sampling.items()))
            became = (
                "gets it; with client_sampling = False it would sample as the run does"
                if self.client_sampling
                else "does not get it (client_sampling is False)"
            )
            say(f"{file_of(type(self))}: the agent asks for {asked}, unlike the run, and {became}")


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or "this model"


def _decode(tokenizer: Any, segment: Segment) -> str:
    text: str = tokenizer.decode(after_prompt(segment, tokenizer), skip_special_tokens=False)
    return text
