"""The real `openai` client against the server: what it is told, what is recorded, what happens when things go wrong."""

import asyncio
import base64
import contextlib
import copy
import gc
import importlib.util
import io
import json
import socket
import threading
from pathlib import Path

import openai
import pytest
import torch
from agent_program import ANY_JSON, Door, Program, places, play, put
from chat_model import CALCULATOR, Speaker, chat_model, chat_tokenizer, learn_by_heart
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import patience
from scripted_engine import bpe_tokenizer
from vision_models import TURNS, image, vision_tokenizer

from openrlhf.agents.tool_calls import split_thoughts, with_thoughts
from openrlhf.agents.user_calls import AgentError, AgentResultError
from openrlhf.models.policy import Policy
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import PackedTokens, SamplingParams
from openrlhf.utils.agent import OpenAIServerAgentExecutor

TOKENIZER = chat_tokenizer()
EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "agent_func_openai_server_executor.py"
HI = [{"role": "user", "content": "hi"}]
MOST_BYTES = (1 << 20) + 64 * 500
"""Of a request where prompt and answer have 500 tokens at most."""
CALL = 'I add.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'


def create(client, messages=HI, **fields):
    return client.chat.completions.create(model="any", messages=messages, **fields)


class TestReplies:
    def test_a_reply_is_openais_with_the_tokens_behind_it(self):
        engine = Speaker(TOKENIZER, "the answer")
        episode, reply = play(lambda client: create(client, logprobs=True), engine)
        choice = reply.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "the answer",
            "stop",
        )
        asked = engine.asked[0][0]
        written = [*engine.spell("the answer"), TOKENIZER.eos_token_id]
        assert reply.token_ids == {"prompt_token_ids": asked, "completion_token_ids": written}
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(asked), len(written))
        assert reply.model == "any"
        assert [item.token for item in choice.logprobs.content] == [*"the answer", "<|im_end|>"]
        assert [item.logprob for item in choice.logprobs.content] == [-i / 100 for i in range(11)]
        assert choice.logprobs.content[0].bytes == [ord("t")]
        (segment,) = episode.segments
        assert segment.token_ids.tolist() == asked + written
        assert segment.turn_rewards.tolist() == [0.0] * (len(segment) - 1) + [1.0]
        assert episode.text == "hithe answer<|im_end|>"
        assert not episode.truncated

    def test_a_stream_comes_while_it_is_sampled(self):
        """Two chunks with content are there before the last token, and what they say is what was said."""
        engine = Speaker(TOKENIZER, "the answer is 12", seconds_per_token=0.01)

        async def body(client):
            chunks, sampled = [], []
            async for chunk in await create(client, stream=True, stream_options={"include_usage": True}, logprobs=True):
                chunks.append(chunk)
                sampled.append(engine.sampled)
            return chunks, sampled

        episode, (chunks, sampled) = play(body, engine)
        written = [*engine.spell("the answer is 12"), TOKENIZER.eos_token_id]
        assert chunks[0].choices[0].delta.role == "assistant"
        with_content = [i for i, chunk in enumerate(chunks) if chunk.choices and chunk.choices[0].delta.content]
        assert sampled[with_content[1]] < len(written)
        assert "".join(chunks[i].choices[0].delta.content for i in with_content) == "the answer is 12"
        *_, last, usage = chunks
        assert last.choices[0].finish_reason == "stop"
        assert last.token_ids["completion_token_ids"] == written
        assert usage.choices == []
        assert usage.usage.completion_tokens == len(written)
        logprobs = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
        assert [item.logprob for items in logprobs for item in items] == [-i / 100 for i in range(len(written))]
        assert episode.segments[0].token_ids.tolist()[-len(written) :] == written

    def test_calls_of_tools(self):
        async def body(client):
            return await create(client, tools=[CALCULATOR])

        _, reply = play(body, Speaker(TOKENIZER, CALL))
        choice = reply.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I add."
        assert (call.type, call.function.name) == ("function", "calculator")
        assert json.loads(call.function.arguments) == {"expression": "2+3"}

    @pytest.mark.parametrize("fields", [{}, {"tools": [CALCULATOR], "tool_choice": "none"}])
    def test_nothing_is_a_call_where_no_tools_are(self, fields):
        _, reply = play(lambda client: create(client, **fields), Speaker(TOKENIZER, CALL))
        assert reply.choices[0].message.tool_calls is None
        assert "calculator" in reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "stop"

    def test_streamed_calls_come_at_the_end(self):
        async def body(client):
            return [chunk.choices[0] async for chunk in await create(client, tools=[CALCULATOR], stream=True)]

        _, choices = play(body, Speaker(TOKENIZER, CALL))
        assert "".join(choice.delta.content or "" for choice in choices) == "I add."
        (call,) = (call for choice in choices for call in choice.delta.tool_calls or ())
        assert (call.index, call.function.name) == (0, "calculator")
        assert choices[-1].finish_reason == "tool_calls"

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
    def test_thoughts_that_a_client_keeps_beside_the_content(self, name):
        """Given back where other servers put them, they are the policy's own thoughts: the conversation goes on."""

        async def body(client):
            said = (await create(client)).choices[0].message.content
            thoughts, answer = split_thoughts(said)
            kept = {"role": "assistant", name: thoughts, "content": answer}
            await create(client, [*HI, kept, {"role": "user", "content": "sure?"}])

        episode, _ = play(body, Speaker(TOKENIZER, with_thoughts("hm", "yes")))
        assert len(episode.segments) == 1

    def test_models_and_tokens(self):
        async def body(client):
            models = [model.id async for model in await client.models.list()]
            session = str(client.base_url).removesuffix("/v1/")
            root = session.split("/session")[0]
            tokens = await client.post(f"{session}/tokenize", body={"prompt": "hi"}, cast_to=object)
            chat = await client.post(f"{session}/tokenize", body={"messages": HI}, cast_to=object)
            health = await client.get(f"{root}/health", cast_to=object)
            await create(client)
            return models, tokens, chat, health

        engine = Speaker(TOKENIZER, "yes")
        _, (models, tokens, chat, health) = play(body, engine)
        assert models == ["policy"]
        assert tokens["tokens"] == TOKENIZER("hi")["input_ids"]
        assert (chat["tokens"], chat["count"]) == (engine.asked[0][0], len(engine.asked[0][0]))
        assert health["status"] == "ok"


class TestSampling:
    def asked(self, *, settings=None, params=None, **fields):
        engine = Speaker(TOKENIZER, "yes")
        episode, _ = play(Program(lambda client: create(client, **fields), **settings or {}), engine, **params or {})
        return engine.asked[0][1], episode

    def test_requests_choose(self):
        params, _ = self.asked(temperature=0.5, top_p=0.9, stop="\n", max_tokens=2, presence_penalty=0.1)
        assert (params.temperature, params.top_p, params.presence_penalty) == (0.5, 0.9, 0.1)
        assert (params.stop, params.max_tokens) == (["\n"], 2)

    def test_what_they_do_not_choose_is_the_runs(self):
        params, _ = self.asked(params={"temperature": 0.7, "top_k": 5, "max_tokens": 50})
        assert (params.temperature, params.top_k, params.max_tokens) == (0.7, 5, 50)

    def test_the_runs_limit_holds(self):
        params, episode = self.asked(params={"max_tokens": 2}, max_completion_tokens=100)
        assert params.max_tokens == 2
        assert episode.truncated

    def test_an_executor_may_keep_the_runs_sampling(self):
        params, _ = self.asked(settings={"client_sampling": False}, temperature=0, seed=3, max_tokens=2)
        assert (params.temperature, params.max_tokens) == (1.0, 2)

    def test_a_programs_own_seed_differs_between_episodes_and_repeats_within_one(self):
        def seeds(episode_seed):
            async def body(client):
                for seed in (1, 1, 2):
                    await create(client, seed=seed)

            engine = Speaker(TOKENIZER, "yes")
            play(body, engine, seed=episode_seed)
            return [params.seed for _, params in engine.asked]

        first, second = seeds(7), seeds(8)
        assert first[0] == first[1] != first[2]
        assert not set(first) & set(second)

    def test_without_one_each_request_has_its_own(self):
        async def body(client):
            await create(client)
            await create(client)

        engine = Speaker(TOKENIZER, "yes")
        play(body, engine)
        assert engine.asked[0][1].seed != engine.asked[1][1].seed


def data_uri(picture) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def shows(text, *pictures, role="user"):
    parts = [{"type": "image_url", "image_url": {"url": data_uri(picture)}} for picture in pictures]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


class TestImages:
    @pytest.mark.parametrize("stream", [False, True])
    def test_images_of_a_conversation_are_read_and_recorded_once(self, stream):
        tokenizer = vision_tokenizer("qwen2_5_vl")
        engine = Speaker(tokenizer, "7", "8")

        async def ask(client, messages):
            if not stream:
                return (await create(client, messages)).choices[0].message.content
            parts = [part async for part in await create(client, messages, stream=True)]
            return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

        async def body(client):
            messages = [shows("which?", image(0))]
            messages += [{"role": "assistant", "content": await ask(client, messages)}]
            messages += [shows("and?", image(1, width=40), image(2))]
            return await ask(client, messages), messages

        # The policy ends with a token that the template does not write.
        tokenizer = copy.copy(tokenizer)
        tokenizer.tokenizer = copy.deepcopy(tokenizer.tokenizer)
        eos = tokenizer.tokenizer.eos_token
        tokenizer.tokenizer.chat_template = TURNS.replace("{%- endif %}!", "{%- endif %}" + eos).replace(
            "{{ IMAGE }}", "<|vision_start|><|image_pad|><|vision_end|>"
        )
        episode, (last, messages) = play(body, engine, tokenizer=tokenizer)
        assert last == "8"
        for message in messages[::2]:
            message["content"] = [{"type": "image"} if "image_url" in part else part for part in message["content"]]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        reader = tokenizer.episode_images
        pictures = [image(0), image(1, width=40), image(2)]
        whole = reader.processor.expand(text, [reader.prepare_one(picture) for picture in pictures])
        (segment,) = episode.segments
        assert segment.token_ids.tolist()[:-2] == whole.token_ids
        assert [(at, shown.digest) for at, shown in segment.images] == [
            (at, shown.digest) for at, shown in whole.images
        ]
        assert [len(shown) for shown in engine.shown] == [1, 3]
        assert engine.shown[1][0].image is engine.shown[0][0].image
        assert episode.text.count("<|image_pad|>") == 2  # of the second question

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (shows("a") | {"content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}, "3 bytes"),
            (
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://127.0.0.1:1/a.png"}}]},
                "--data.allow_image_urls",
            ),
            (shows("a", image(0), role="assistant"), "those of user and tool may"),
            (shows("a<|image_pad|>", image(0)), "or a message spells the token"),
        ],
    )
    def test_images_that_cannot_be_read_are_named(self, message, text):
        async def body(client):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(client, [message])
            await create(client)
            return caught.value.body["message"]

        tokenizer = vision_tokenizer("qwen2_5_vl")
        _, said = play(body, Speaker(tokenizer, "7"), tokenizer=tokenizer)
        assert text in said

    def test_images_that_leave_no_room_make_the_episode_truncated(self):
        async def body(client):
            await create(client, [{"role": "user", "content": "a"}])
            with pytest.raises(openai.BadRequestError, match="maximum context length is 30 tokens"):
                await create(client, [shows("a", image(0, width=64, height=64))])

        tokenizer = vision_tokenizer("qwen2_5_vl")
        episode, _ = play(body, Speaker(tokenizer, "7"), tokenizer=tokenizer, max_length=30)
        assert episode.truncated


BAD = [
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "content[0].type must be text or image"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content[0].image_url.url must be text"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
            ]
        },
        "1 came, but the policy of this run reads no images",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
        "must be a data URI or an http(s) URL",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be a list"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "arguments is not JSON",
    ),
    ({"n": 2}, "ask n times"),
    ({"temperature": -1}, "temperature must be >= 0"),
    ({"temperature": "hot"}, "temperature must be >= 0"),
    ({"max_tokens": 0}, "max_tokens must be >= 1"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens must be a whole number"),
    ({"top_logprobs": 5}, "only the sampled token's"),
    ({"tools": [{"type": "function"}]}, "tools[0].function must be an object"),
    ({"tools": [CALCULATOR], "tool_choice": "required"}, "nothing here forces a call"),
    ({"response_format": {"type": "json_object"}}, "nothing here forces a format"),
    ({"stop": [3]}, "stop must be text"),
    ({"functions": []}, "use tools"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
    ({"chat_template": "{{ 1 }}"}, "rendered with the model's own template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template is not for requests"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize is not for requests"),
    ({"messages": [{"role": [], "content": "hi"}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "the request is not JSON"),
    ({"temperature": 10**400}, "temperature must be >= 0 and finite"),
    ({"repetition_penalty": 1e39}, "repetition_penalty must be > 0 and finite"),
    ({"top_k": 1 << 40}, "top_k must be -1 (no limit) or > 0"),
    ({"seed": 1 << 70}, "seed must fit in 64 bits"),
]


class TestErrors:
    def test_bad_requests_are_named_and_the_episode_goes_on(self):
        async def body(client):
            said = []
            for fields, _ in BAD:
                content = json.dumps({"messages": HI} | fields).encode()
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.post("/chat/completions", content=content, cast_to=object)
                said.append(caught.value.body["message"])
                assert caught.value.type == "invalid_request_error"
            await create(client)
            return said

        episode, said = play(body, Speaker(TOKENIZER, "yes"))
        for (fields, expected), message in zip(BAD, said, strict=True):
            assert expected in message, fields
        assert len(episode.segments) == 1

    def test_paths_sessions_and_bodies_that_are_not_there(self):
        async def body(client):
            await create(client)
            root = str(client.base_url).split("/session")[0]
            outcomes = []
            for path, content in [
                ("/v1/nothing", "{}"),
                ("/session/none/v1/chat/completions", "{}"),
                ("/v1/chat/completions", "{}"),
                ("/v1/chat/completions", "{"),
                ("/v1/chat/completions", "[]"),
                ("/v1/chat/completions", " " * (MOST_BYTES + 1)),
                ("/v1/chat/completions", '{"temperature": 1e999}'),
                ("/v1/chat/completions", '{"temperature": NaN}'),
                ("/v1/chat/completions", "[" * 100_000),
            ]:
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.post(f"{root}{path}", content=content.encode(), cast_to=object)
                outcomes.append((caught.value.status_code, caught.value.body["message"]))
            return outcomes

        _, outcomes = play(body, Speaker(TOKENIZER, "yes"))
        assert [status for status, _ in outcomes] == [404, 404, 400, 400, 400, 413, 400, 400, 400]
        for expected, (_, message) in zip(
            [
                *("/v1/nothing", "there is no session none", "names no session", "is not JSON", "JSON object"),
                *("Too Large", "1e999 is too large", "NaN is no number of JSON", "nested too deeply"),
            ],
            outcomes,
            strict=True,
        ):
            assert expected in message

    def test_a_prompt_that_is_too_long_is_refused_as_clients_expect(self):
        async def body(client):
            await create(client)
            with pytest.raises(openai.BadRequestError) as caught:
                await create(client, [{"role": "user", "content": "x" * 400}])
            return caught.value

        episode, error = play(body, Speaker(TOKENIZER, "yes"), max_length=100)
        assert error.code == "context_length_exceeded"
        assert "maximum context length is 100 tokens" in error.message
        assert episode.truncated

    def test_a_program_that_makes_room_is_not_cut_short(self):
        async def body(client):
            with pytest.raises(openai.BadRequestError):
                await create(client, [{"role": "user", "content": "x" * 400}])
            await create(client)

        assert not play(body, Speaker(TOKENIZER, "yes"), max_length=100)[0].truncated

    def test_the_turn_limit(self):
        async def body(client):
            await create(client)
            await create(client)
            with pytest.raises(openai.BadRequestError) as caught:
                await create(client)
            return caught.value.code

        episode, code = play(body, Speaker(TOKENIZER, "yes"), max_steps=2)
        assert code == "turn_limit_exceeded"
        assert episode.truncated
        assert len(episode.segments) == 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_engine_that_fails_is_not_the_programs_fault(self, stream):
        class Broken(Speaker):
            async def stream(self, token_ids, sampling_params, images=()):
                raise RuntimeError("out of memory")
                yield

        async def body(client):
            answer = await create(client, stream=stream)
            return [chunk async for chunk in answer] if stream else answer

        with pytest.raises(RuntimeError, match="out of memory"):
            play(body, Broken(TOKENIZER, ""))

    def test_a_program_that_fails_is_named(self):
        class Agent(OpenAIServerAgentExecutor):
            async def run_agent(self, prompt, label, base_url):
                raise LookupError("no such tool")

        with pytest.raises(AgentError, match=r"test_openai_server\.py:\d+ \(in run_agent\): LookupError: no such tool"):
            play(Agent(), Speaker(TOKENIZER, "yes"))

    @pytest.mark.parametrize(
        ("returned", "expected"),
        [
            (None, "run_agent returned None"),
            ({"scores": 1}, "run_agent returned a dict without 'reward'"),
            ({"reward": "good"}, "run_agent's 'reward' must be one number"),
            ({"reward": 1, "extra_logs": {"a": "b"}}, "run_agent's 'extra_logs'"),
        ],
    )
    def test_what_run_agent_returns_is_checked(self, returned, expected):
        class Agent(OpenAIServerAgentExecutor):
            async def run_agent(self, prompt, label, session_id):
                return returned

        with pytest.raises(AgentResultError, match=r"test_openai_server\.py:\d+: ") as caught:
            play(Agent(), Speaker(TOKENIZER, "yes"))
        assert expected in str(caught.value)

    def test_a_tokenizer_without_a_template(self):
        async def main():
            await Program(create).play("hi", "", SamplingParams(), 100, bpe_tokenizer(), Speaker(TOKENIZER, "yes"))

        with pytest.raises(AgentResultError, match="the tokenizer of this model has no chat template"):
            asyncio.run(main())

    def test_a_program_that_never_asks(self):
        async def body(client):
            pass

        with pytest.raises(AgentResultError, match="the agent never asked the model"):
            play(body, Speaker(TOKENIZER, "yes"))


class TestSessions:
    def test_a_session_may_be_named_in_three_ways_and_run_agent_may_block(self):
        """`run_agent` as documents have it: three arguments, a client that is not async."""

        class Agent(OpenAIServerAgentExecutor):
            def __init__(self):  # does not call ours
                self.client = openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0)

            def run_agent(self, prompt, label, session_id):
                create(self.client, extra_body={"session_id": session_id})
                create(self.client, extra_headers={"X-Session-Id": session_id})
                root = self.base_url.removesuffix("/v1")
                create(self.client.with_options(base_url=f"{root}/session/{session_id}/v1"))
                self.ended = session_id
                return {"reward": 0.5, "scores": 1, "extra_logs": {"turns": 3}}

        agent = Agent()

        async def main():
            # The call has a thread of its own only in a host; here it is lent one.
            run = agent.run_agent
            agent.run_agent = lambda prompt, label, session_id: asyncio.to_thread(run, prompt, label, session_id)
            return await agent.play("hi", "", SamplingParams(), 100, TOKENIZER, Speaker(TOKENIZER, "a", "b", "c"))

        episode = asyncio.run(main())
        assert len(episode.segments) == 3
        assert (episode.reward, episode.score, episode.extra_logs) == (0.5, 1.0, {"turns": 3.0})
        with pytest.raises(openai.NotFoundError, match="there is no session"):
            create(agent.client, extra_body={"session_id": agent.ended})

    def test_episodes_and_requests_at_once_do_not_mix(self):
        """16 episodes of 4 concurrent requests on one server: each is answered for its own words, and has 4 segments."""

        class Echo(Speaker):
            async def stream(self, token_ids, sampling_params, images=()):
                text = TOKENIZER.decode(token_ids).split("user\n")[1].split("<|im_end|>")[0]
                async for part in Speaker(TOKENIZER, text).stream(token_ids, sampling_params):
                    yield part

        class Agent(OpenAIServerAgentExecutor):
            async def run_agent(self, prompt, label, base_url):
                async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
                    asked = [f"{prompt}{i}" for i in range(4)]
                    replies = await asyncio.gather(*(create(client, [{"role": "user", "content": a}]) for a in asked))
                assert [reply.choices[0].message.content for reply in replies] == asked
                return {"reward": 1.0}

        async def main():
            agent = Agent()
            return await asyncio.gather(
                *(
                    agent.play(f"p{i}-", "", SamplingParams(seed=i), 100, TOKENIZER, Echo(TOKENIZER, ""))
                    for i in range(16)
                )
            )

        for index, episode in enumerate(asyncio.run(main())):
            assert len(episode.segments) == 4
            assert all(f"p{index}-" in TOKENIZER.decode(segment.token_ids) for segment in episode.segments)
            assert sum(segment.turn_rewards.sum().item() for segment in episode.segments) == 1.0

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_away_gives_its_answer_up(self, stream):
        engine = Speaker(TOKENIZER, "x" * 400, "yes", seconds_per_token=0.005)

        async def body(client):
            if stream:
                answer = await create(client, stream=True)
                async for chunk in answer:
                    if chunk.choices[0].delta.content:
                        break
                await answer.close()
            else:
                with contextlib.suppress(openai.APITimeoutError):
                    await create(client, timeout=0.1)
            async with asyncio.timeout(patience(5)):
                while not engine.given_up:
                    await asyncio.sleep(0.01)
            await create(client)

        episode, _ = play(body, engine)
        assert engine.given_up == 1
        assert engine.sampled < 300
        assert [TOKENIZER.decode(s.token_ids[s.action_mask]) for s in episode.segments] == ["yes<|im_end|>"]

    def test_what_is_under_way_when_the_program_ends_is_given_up(self):
        engine = Speaker(TOKENIZER, "yes", "x" * 400, seconds_per_token=0.005)
        left = []

        async def body(client):
            await create(client)
            client = client.copy()
            left.append(asyncio.ensure_future(create(client)))
            await asyncio.sleep(0.1)

        episode, _ = play(body, engine)
        assert engine.given_up == 1
        assert len(episode.segments) == 1

    def test_the_server_ends_with_its_executor(self):
        program = Program(create)
        play(program, Speaker(TOKENIZER, "yes"))
        port = program._server.port
        threads = {thread for thread in threading.enumerate() if thread.name == "openai-server"}
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        del program
        gc.collect()
        for thread in threads:
            thread.join(timeout=patience(5))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)

    def test_a_wrong_signature_is_found_when_it_is_made(self):
        class Agent(OpenAIServerAgentExecutor):
            async def run_agent(self, question):
                pass

        with pytest.raises(Exception, match=r"test_openai_server\.py:\d+: run_agent is called with prompt, label"):
            Agent()


# ------------------------------------------------------------------------------------ a real engine


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def adept(example):
    """A tiny policy that has learned a dialogue of the example by heart."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = chat_model(TOKENIZER)
    call = {"name": "calculator", "arguments": {"expression": "2+3"}}
    messages = [
        {"role": "system", "content": example.SYSTEM},
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    learn_by_heart(model, TOKENIZER, TOKENIZER.apply_chat_template(messages, tools=example.TOOLS, tokenize=False))
    yield model.eval()
    torch.set_num_threads(threads)


COOL = 0.3
"""Temperature at which a slip of the policy is out of the question."""


def rescored(model, segments):
    with torch.no_grad():
        return Policy(model)(PackedTokens.from_segments(segments), temperature=COOL).logprobs_A


def rollout_logprobs(segments):
    return torch.cat([segment.rollout_logprobs[segment.action_mask] for segment in segments])


class SlowTokenizer:
    """Tokenises when it may."""

    def __init__(self):
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def __call__(self, text, **options):
        self.began.set()
        assert self.may_go_on.wait(60)
        return TOKENIZER(text, **options)


GOOD = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ],
    "tools": [CALCULATOR],
    **dict.fromkeys(("tool_choice", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k")),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "n", "logprobs")),
    **dict.fromkeys(("top_logprobs", "logit_bias", "response_format", "functions", "modalities", "model", "stream")),
    **dict.fromkeys(("stream_options", "chat_template_kwargs", "chat_template", "session_id", "prompt")),
}


class TestDoor:
    def test_every_route_needs_a_session(self):
        door = Door()
        for method, path, body in [
            ("GET", "/v1/models", None),
            ("POST", "/tokenize", {"prompt": "hi"}),
            ("POST", "/tokenize", {"messages": HI}),
            ("POST", "/v1/chat/completions", {"messages": HI}),
        ]:
            status, reply = door.ask(method, path, body)
            assert (status, reply["error"]["message"][:30]) == (400, "the request names no session: ")
            assert door.ask(method, f"/session/other{path}", body)[0] == 404
            assert door.ask(method, f"/session/ID{path}", body)[0] == 200
            assert door.ask(method, path, body, **{"X-Session-Id": door.session.id})[0] == 200
        assert door.ask("GET", "/health") == (200, {"status": "ok"})

    def test_a_limit_that_fits_the_context(self):
        """1 MiB and 64 bytes for each token; the session's own limit holds, also beside one that has a larger one."""
        small, large = Door(max_length=100), Door(max_length=200_000)
        small.server.open(large.session)
        long = {"prompt": "x" * (MOST_BYTES + 1)}
        for path, fields in [("/session/ID/tokenize", {}), ("/tokenize", {"session_id": small.session.id})]:
            status, reply = small.ask("POST", path, long | fields)
            assert (status, reply["error"]["code"]) == (413, "request_too_large")
        assert small.session.refused_for_length
        assert small.ask("POST", "/tokenize", long | {"session_id": large.session.id})[0] == 200

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Host": "localhost:1234"}, 200),
            ({"Host": "[::1]:1234"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Host": "127.0.0.1.evil.example:80"}, 403),
            ({"Host": "10.0.0.1"}, 403),
            ({"Host": ""}, 403),
            ({"Host": "[::1"}, 403),
            ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
        ],
    )
    def test_names_and_pages_that_are_not_the_servers(self, headers, status):
        """A page in a browser may reach the port, by a name of its own that means 127.0.0.1 or from its own origin."""
        door = Door()
        for path in ("/health", "/session/ID/v1/models"):
            assert door.ask("GET", path, **headers)[0] == status

    def test_others_are_answered_while_a_long_text_is_tokenised(self):
        tokenizer = SlowTokenizer()
        door = Door(tokenizer)
        replies = []
        asking = threading.Thread(
            target=lambda: replies.append(door.ask("POST", "/session/ID/tokenize", {"prompt": "a"}))
        )
        asking.start()
        assert tokenizer.began.wait(60)
        assert door.ask("GET", "/session/ID/v1/models")[0] == 200
        assert replies == []
        tokenizer.may_go_on.set()
        asking.join(60)
        assert replies[0][0] == 200

    def test_no_request_is_the_servers_fault(self):
        """Whatever stands wherever in a request: it is answered, or refused with OpenAI's error object."""
        door = Door()
        assert door.ask("POST", "/session/ID/v1/chat/completions", GOOD)[0] == 200

        @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(path=st.sampled_from(places(GOOD)), new=ANY_JSON, stream=st.booleans(), route=st.booleans())
        def ask(path, new, stream, route):
            body = put(GOOD | {"stream": stream}, path, new)
            where = "/session/ID/v1/chat/completions" if route else "/session/ID/tokenize"
            status, reply = door.ask("POST", where, body)
            assert status in (200, 400), reply
            assert "server_error" not in str(reply), reply
            assert (status == 200) != (isinstance(reply, dict) and isinstance(reply.get("error", 0), dict)), reply

        ask()

    @pytest.mark.parametrize(
        ("content", "headers"),
        [
            (b"\xff\xfe", {}),
            (b"", {}),
            (b'{"messages": [{"role": "user", "content": "\xff"}]}', {}),
            (b'{"max_tokens": ' + b"9" * 5000 + b"}", {}),
            (b'{"tools": ' + b"[" * 900 + b"]" * 900 + b"}", {}),
            (b"{}", {"Content-Type": "application/json; charset=nonsense"}),
        ],
    )
    def test_bodies_that_are_no_request(self, content, headers):
        for path in ("/session/ID/v1/chat/completions", "/session/ID/tokenize"):
            status, reply = Door().ask("POST", path, content, **headers)
            assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


class TestRealEngine:
    def engine(self, model):
        return EmbeddedEngine(model, TOKENIZER, max_model_len=600, max_batch_size=8)

    def test_the_example_uses_its_tool_and_every_token_is_known(self, adept, example):
        async def main():
            engine, agent = self.engine(adept), example.AgentExecutor()
            return await asyncio.gather(
                *(
                    agent.play("2+3?", "5", SamplingParams(seed=i, temperature=COOL), 600, TOKENIZER, engine)
                    for i in range(2)
                )
            )

        episodes = asyncio.run(main())
        for episode in episodes:
            (segment,) = episode.segments
            assert episode.reward == pytest.approx(1.1)
            assert (episode.score, episode.extra_logs) == (1.0, {"calculations": 1.0})
            assert int(segment.action_mask.int().diff().eq(1).sum()) == 2  # two turns
        segments = [segment for episode in episodes for segment in episode.segments]
        assert torch.allclose(rescored(adept, segments), rollout_logprobs(segments), atol=1e-4)

    def test_streams_tools_and_rewritten_histories(self, adept, example):
        """A client that streams, calls, and then drops what came before: two segments, the reward once, and the
        log-probs are those of the tokens."""

        async def body(client):
            messages = [{"role": "system", "content": example.SYSTEM}, {"role": "user", "content": "2+3?"}]
            calls = []
            async for chunk in await create(client, messages, tools=example.TOOLS, stream=True):
                calls += chunk.choices[0].delta.tool_calls or ()
            messages.append({"role": "assistant", "content": None, "tool_calls": [calls[0].model_dump()]})
            messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "5"})
            await create(client, messages, tools=example.TOOLS)
            await create(client, messages[:2], max_tokens=20)

        episode, _ = play(body, self.engine(adept), temperature=COOL)
        assert [segment.turn_rewards.sum().item() for segment in episode.segments] == [0.0, 1.0]
        assert torch.allclose(rescored(adept, episode.segments), rollout_logprobs(episode.segments), atol=1e-4)

    def test_a_model_that_thinks_and_a_program_that_rewrites(self):
        """With a template as Qwen3's: thoughts go at the next question, the program sums up and goes on from that, and
        edits a tool's result. Every token is trained with the log-prob that the engine sampled it with."""
        tokenizer = chat_tokenizer("qwen3")
        model = chat_model(tokenizer)
        said = with_thoughts(
            "add", '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
        )
        dialogue = tokenizer.apply_chat_template(HI, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        learn_by_heart(model, tokenizer, f"{dialogue}{said}<|im_end|>")

        async def body(client):
            messages = list(HI)

            async def ask():
                message = (await create(client, messages, tools=[CALCULATOR], max_tokens=80)).choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                return message

            (call,) = (await ask()).tool_calls  # the first sequence, with thoughts
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "1"})
            await ask()
            messages.append({"role": "user", "content": "so?"})
            await ask()  # the second: the template leaves the thoughts out
            messages[2]["content"] = "one"
            await ask()  # the third: another result of the tool
            messages[:] = [{"role": "system", "content": "We were kind."}, {"role": "user", "content": "hi"}]
            await ask()  # the fourth: compacted

        episode, _ = play(
            body,
            EmbeddedEngine(model.eval(), tokenizer, max_model_len=1000),
            tokenizer=tokenizer,
            temperature=COOL,
            max_length=1000,
        )
        torch.set_num_threads(threads)
        assert len(episode.segments) == 4
        assert [segment.turn_rewards.sum().item() for segment in episode.segments] == [0.0, 0.0, 0.0, 1.0]
        counts = [int(segment.action_mask.int().diff().eq(1).sum()) for segment in episode.segments]
        assert counts == [2, 1, 1, 1]
        assert torch.allclose(rescored(model, episode.segments), rollout_logprobs(episode.segments), atol=1e-4)

    def test_chunks_arrive_before_the_last_token_is_sampled(self):
        engine = self.engine(chat_model(TOKENIZER))

        async def body(client):
            return [
                engine.stats.generated_tokens
                async for chunk in await create(client, stream=True, max_tokens=200, seed=1)
                if chunk.choices[0].delta.content
            ]

        _, sampled = play(body, engine)
        assert sampled[1] < engine.stats.generated_tokens
