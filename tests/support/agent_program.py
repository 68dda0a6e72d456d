"""Agent programs of one function, with the real client of a protocol, played on a server of their own."""

import asyncio
import contextlib
import http.client
import json

import anthropic
import openai
from chat_model import Speaker, chat_tokenizer
from hypothesis import strategies as st

from openrlhf.agents.openai_http import AgentServer
from openrlhf.agents.openai_session import ChatSession
from openrlhf.agents.recording_engine import RecordingEngine
from openrlhf.types import SamplingParams
from openrlhf.utils.agent import OpenAIServerAgentExecutor


class Program(OpenAIServerAgentExecutor):
    """An agent made of one coroutine function of a client, whose result is kept."""

    def __init__(self, body, **settings):
        super().__init__()
        self.body = body
        self.result = None
        vars(self).update(settings)

    async def run_agent(self, prompt, label, base_url):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            self.result = await self.body(client)
        return {"reward": 1.0}


class AnthropicProgram(Program):
    async def run_agent(self, prompt, label, anthropic_base_url):
        async with anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key="none", max_retries=0) as client:
            self.result = await self.body(client)
        return {"reward": 1.0}


def play(program, engine, *, max_length=500, max_steps=None, tokenizer=None, **params):
    """The episode, and what the program found."""
    if not isinstance(program, OpenAIServerAgentExecutor):
        program = Program(program)
    tokenizer = tokenizer or chat_tokenizer()
    params = SamplingParams(**{"seed": 7} | params)

    async def main():
        return await program.play("hi", "5", params, max_length, tokenizer, engine, max_steps=max_steps)

    return asyncio.run(main()), getattr(program, "result", None)


class Door:
    """A server with one session, and requests to it as anybody on this machine could send them."""

    def __init__(self, tokenizer=None, *, max_length=500):
        tokenizer = tokenizer or chat_tokenizer()
        self.server = AgentServer()
        params = SamplingParams(seed=7)
        engine = RecordingEngine(Speaker(chat_tokenizer(), "yes"), sampling_params=params, max_length=max_length)
        self.session = ChatSession(engine, tokenizer, sampling_params=params, max_length=max_length)
        self.server.open(self.session)

    def ask(self, method, path, body=None, **headers):
        """The status, and what is in the reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path.replace("ID", self.session.id), content, headers)
            reply = connection.getresponse()
            text = reply.read().decode()
            return reply.status, text if text.startswith(("data: ", "event: ")) else json.loads(text)


# What a broken client may send: any JSON in any place of a request that would be good otherwise.
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just(10**400)
ANY_JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def places(value, path=()):
    """All ways into it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def put(value, path, new):
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = put(value[path[0]], path[1:], new)
    return copied
