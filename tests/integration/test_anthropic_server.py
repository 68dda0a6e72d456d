"""The real `anthropic` client against the server: what it is told, what is recorded, what it is refused."""

import base64
import io
import json

import anthropic
import pytest
from agent_program import ANY_JSON, AnthropicProgram, Door, places, play, put
from chat_model import Speaker, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vision_models import image, vision_tokenizer

from openrlhf.utils.agent import OpenAIServerAgentExecutor

TOKENIZER = chat_tokenizer()
HI = [{"role": "user", "content": "hi"}]
CALCULATOR = {
    "name": "calculator",
    "description": "Arithmetic.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
CALL = 'I add.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'

CALL_AS_TEXT = CALL.replace("<tool_call>", "").replace("</tool_call>", "")
"""The marks of calls are special tokens, which only answers with calls are read with."""


def ask(client, messages=HI, **fields):
    return client.messages.create(**{"model": "any", "messages": messages, "max_tokens": 100} | fields)


def played(body, *texts, tokenizer=TOKENIZER, **more):
    """The episode, what the program found, and the engine."""
    engine = Speaker(tokenizer, *texts)
    episode, result = play(AnthropicProgram(body), engine, tokenizer=tokenizer, **more)
    return episode, result, engine


async def streamed(client, messages=HI, **fields):
    """The message that the client makes of the events."""
    async with client.messages.stream(**{"model": "any", "messages": messages, "max_tokens": 100} | fields) as stream:
        return await stream.get_final_message()


def read(engine, call=-1):
    """What the policy has read, as text."""
    return TOKENIZER.decode(engine.asked[call][0])


class TestReplies:
    def test_a_message_is_anthropics_with_the_tokens_behind_it(self):
        episode, said, engine = played(ask, "the answer")
        asked = engine.asked[0][0]
        written = [*engine.spell("the answer"), TOKENIZER.eos_token_id]
        assert (said.type, said.role, said.model, said.stop_reason, said.stop_sequence) == (
            *("message", "assistant", "any", "end_turn"),
            None,
        )
        assert [block.to_dict() for block in said.content] == [{"type": "text", "text": "the answer"}]
        assert (said.usage.input_tokens, said.usage.output_tokens) == (len(asked), len(written))
        assert said.token_ids == {"prompt_token_ids": asked, "completion_token_ids": written}
        (segment,) = episode.segments
        assert segment.token_ids.tolist() == asked + written
        assert read(engine) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_a_stream_has_anthropics_events_while_it_is_sampled(self):
        engine = Speaker(TOKENIZER, "the answer is 12", seconds_per_token=0.01)

        async def body(client):
            events, sampled = [], []
            async for event in await ask(client, stream=True):
                events.append(event)
                sampled.append(engine.sampled)
            return events, sampled

        _, (events, sampled) = play(AnthropicProgram(body), engine)
        kinds = [event.type for event in events]
        deltas = [i for i, kind in enumerate(kinds) if kind == "content_block_delta"]
        assert kinds == [
            *("message_start", "content_block_start"),
            *["content_block_delta"] * len(deltas),
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        assert sampled[deltas[1]] < engine.sampled
        assert "".join(events[i].delta.text for i in deltas) == "the answer is 12"
        assert events[0].message.usage.input_tokens == len(engine.asked[0][0])
        assert events[-2].usage.output_tokens == engine.sampled
        assert len(events[-2].token_ids["completion_token_ids"]) == engine.sampled

    def test_pings_are_sent(self):
        status, text = Door().ask("POST", "/session/ID/v1/messages", {"messages": HI, "stream": True})
        assert status == 200
        assert text.split("\n\n")[1] == 'event: ping\ndata: {"type": "ping"}'

    @pytest.mark.parametrize(
        ("said", "fields", "blocks", "reason"),
        [
            ("", {}, [("text", "")], "end_turn"),
            ("<think>\nhm\n</think>\n\nyes", {}, [("thinking", "hm"), ("text", "yes")], "end_turn"),
            ("<think>\n\n</think>\n\nyes", {}, [("thinking", ""), ("text", "yes")], "end_turn"),
            ("<think>hm, so", {"max_tokens": 9}, [("thinking", "hm")], "max_tokens"),
            ("a <think> b", {}, [("text", "a <think> b")], "end_turn"),
            (CALL, {"tools": [CALCULATOR]}, [("text", "I add."), ("tool_use", {"expression": "2+3"})], "tool_use"),
            (
                f"<think>hm</think>{CALL.removeprefix('I add.')}",
                {"tools": [CALCULATOR]},
                [("thinking", "hm"), ("tool_use", {"expression": "2+3"})],
                "tool_use",
            ),
            (CALL, {"tools": [CALCULATOR], "tool_choice": {"type": "none"}}, [("text", CALL_AS_TEXT)], "end_turn"),
            (CALL, {}, [("text", CALL_AS_TEXT)], "end_turn"),
        ],
    )
    def test_blocks_whole_and_streamed(self, said, fields, blocks, reason):
        """What the events add up to is what is said in one piece, with ids and all."""

        async def body(client):
            return await ask(client, **fields), await streamed(client, **fields)

        for message in played(body, said)[1]:
            shown = {"text": lambda b: b.text, "thinking": lambda b: b.thinking, "tool_use": lambda b: b.input}
            assert [(block.type, shown[block.type](block)) for block in message.content] == blocks
            assert message.stop_reason == reason

    def test_thoughts_that_the_template_has_begun(self):
        """As templates of some models do: the policy writes only the end of its thoughts."""
        tokenizer = chat_tokenizer.__wrapped__()
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
        )

        async def body(client):
            return await ask(client), await streamed(client)

        _, messages, _ = played(body, "hm\n</think>\n\nyes", tokenizer=tokenizer)
        for message in messages:
            assert (message.content[0].thinking, message.content[1].text) == ("hm", "yes")

    def test_stop_sequences(self):
        class Stopped(Speaker):
            async def stream(self, token_ids, sampling_params, images=()):
                async for part in super().stream(token_ids, sampling_params, images):
                    if part.finish_reason is not None:
                        part = type(part)(
                            **{name: getattr(part, name) for name in ("token_ids", "logprobs", "versions", "text")},
                            finish_reason=part.finish_reason,
                            stop_reason=sampling_params.stop[0],
                        )
                    yield part

        async def body(client):
            return await ask(client, stop_sequences=["\n\n", "END"])

        engine = Stopped(TOKENIZER, "yes")
        _, said = play(AnthropicProgram(body), engine)
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "\n\n")
        assert engine.asked[0][1].stop == ["\n\n", "END"]

    def test_counts_models_and_sampling(self):
        async def body(client):
            counted = await client.messages.count_tokens(model="any", messages=HI, system="Be kind.")
            models = [model.id async for model in await client.models.list()]
            said = await client.beta.messages.create(
                model="any",
                messages=HI,
                system="Be kind.",
                max_tokens=7,
                extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3},
            )
            return counted.input_tokens, models, said.usage.input_tokens

        _, (counted, models, asked), engine = played(body, "yes")
        assert counted == asked == len(engine.asked[0][0])
        assert models == ["policy"]
        params = engine.asked[0][1]
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 5, 7)


class TestConversations:
    def test_a_conversation_with_tools_and_thoughts_is_one_sequence(self):
        """Message by message as the client got it, thoughts included; no token of the policy is tokenised again."""
        first = f"<think>\nWhich tool?\n</think>\n\n{CALL}"

        async def body(client):
            system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
            messages = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
            said = await ask(client, messages, system=system, tools=[CALCULATOR])
            (call,) = (block for block in said.content if block.type == "tool_use")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]},
                {"type": "tool_result", "tool_use_id": call.id, "content": "five", "is_error": True},
            ]
            messages += [said.to_param(), {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]}]
            return await ask(client, messages, system=system, tools=[CALCULATOR])

        for tokenizer in (chat_tokenizer(), chat_tokenizer("qwen3")):
            episode, said, engine = played(body, first, "<think>\nfive\n</think>\n\n5", tokenizer=tokenizer)
            assert said.content[-1].text == "5"
            turns = read(engine).split("<|im_start|>")
            assert turns[1].startswith("system\nBe kind.\nTools: ")
            assert '"parameters": {"type": "object"' in turns[1]
            assert turns[2] == "user\n2+3?<|im_end|>\n"
            results = "user\n<tool_response>\n5\n</tool_response>\n<tool_response>\nfive\n</tool_response><|im_end|>\n"
            assert turns[4:] == [results, "user\nWell?<|im_end|>\n", "assistant\n"]
            if tokenizer is chat_tokenizer():  # the other leaves thoughts before a question out
                (segment,) = episode.segments
                assert segment.token_ids[segment.action_mask].tolist() == [
                    *engine.spell(first),
                    tokenizer.eos_token_id,
                    *engine.spell("<think>\nfive\n</think>\n\n5"),
                    tokenizer.eos_token_id,
                ]

    def test_images(self):
        file = io.BytesIO()
        image(0).save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

        async def body(client):
            await ask(client, [{"role": "user", "content": [shown, {"type": "text", "text": "which?"}]}])

        tokenizer = vision_tokenizer("qwen2_5_vl")
        episode, _, engine = played(body, "7", tokenizer=tokenizer)
        reader = tokenizer.episode_images
        assert [placed.image.digest for placed in engine.shown[0]] == [reader.prepare_one(image(0)).digest]
        assert len(episode.segments[0].images) == 1

    def test_both_protocols_share_a_session(self):
        """A conversation that is begun by one client and continued by the other is one sequence."""
        door = Door()
        _, said = door.ask("POST", "/session/ID/v1/messages", {"messages": HI})
        messages = [*HI, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": "so"}]
        messages[1]["content"] = said["content"][0]["text"]
        door.ask("POST", "/session/ID/v1/chat/completions", {"messages": messages})
        first, second = door.session.engine.calls
        assert second.prompt_ids[: len(first.token_ids)] == first.token_ids

    @pytest.mark.parametrize("way", ["header", "field", "metadata", "user_id"])
    def test_sessions_are_named_in_several_ways(self, way):
        class Agent(OpenAIServerAgentExecutor):
            async def run_agent(self, prompt, label, session_id):
                named = {
                    "header": {"extra_headers": {"X-Session-Id": session_id}},
                    "field": {"extra_body": {"session_id": session_id}},
                    "metadata": {"metadata": {"session_id": session_id}},
                    "user_id": {"metadata": {"user_id": session_id}},
                }[way]
                url = self.base_url.removesuffix("/v1")
                async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                    await ask(client, **named)
                return {"reward": 1.0}

        assert len(play(Agent(), Speaker(TOKENIZER, "yes"))[0].segments) == 1

    def test_a_program_that_knows_nothing_but_its_environment(self, monkeypatch):
        door = Door()
        monkeypatch.setenv("ANTHROPIC_BASE_URL", f"http://127.0.0.1:{door.server.port}/session/{door.session.id}")
        monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
        with anthropic.Anthropic(max_retries=0) as client:
            assert ask(client).content[0].text == "yes"


BAD = [
    ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role must be user, assistant or system"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "content[0].type must be text, image or tool_result",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "image"}]}, *HI]},
        "content[0].type must be text, thinking or tool_use",
    ),
    ({"messages": [*HI, {"role": "assistant", "content": "The"}]}, "messages[1] is the assistant's: a beginning"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": 3}]}]}, "source must be an object"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "/etc/x"}}]}]},
        "must be an http(s) URL",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be text"),
    ({"system": 3}, "system must be a list"),
    ({"system": [{"type": "image"}]}, "system[0].type must be text"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be an object"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "nothing here runs such a tool"),
    ({"tools": [CALCULATOR], "tool_choice": {"type": "any"}}, "nothing here forces a call"),
    ({"tools": [CALCULATOR], "tool_choice": {"type": "tool", "name": "calculator"}}, "nothing here forces a call"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "as many calls as it likes"),
    ({"max_tokens": 0}, "max_tokens must be >= 1"),
    ({"stop_sequences": [3]}, "stop_sequences must be text"),
    ({"temperature": -1}, "temperature must be >= 0"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "nothing here forces a format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "shortens its history"),
    ({"container": "c"}, "nothing here runs code"),
    ({"thinking": 3}, "thinking must be an object"),
]


class TestErrors:
    def test_bad_requests_are_named_and_the_episode_goes_on(self):
        async def body(client):
            said = []
            for fields, _ in BAD:
                content = json.dumps({"messages": HI, "max_tokens": 5} | fields).encode()
                with pytest.raises(anthropic.BadRequestError) as caught:
                    await client.post("/v1/messages", content=content, cast_to=object)
                said.append(caught.value.body["error"]["message"])
                assert (caught.value.body["type"], caught.value.type) == ("error", "invalid_request_error")
            await ask(client)
            return said

        episode, said, _ = played(body, "yes")
        for (fields, expected), message in zip(BAD, said, strict=True):
            assert expected in message, fields
        assert len(episode.segments) == 1

    def test_what_programs_send_and_changes_nothing_is_taken(self):
        fields = {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "somebody"},
            "service_tier": "auto",
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "cache_control": {"type": "ephemeral"},
        }
        assert Door().ask("POST", "/session/ID/v1/messages", {"messages": HI} | fields)[0] == 200

    def test_thoughts_can_be_turned_off(self):
        """Where the template knows how: Qwen's writes empty ones itself."""
        door = Door(chat_tokenizer("qwen3"))
        for thinking, ends in (("disabled", "</think>\n\n"), ("enabled", "<|im_start|>assistant\n")):
            door.ask("POST", "/session/ID/v1/messages", {"messages": HI, "thinking": {"type": thinking}})
            assert TOKENIZER.decode(door.session.engine.calls[-1].prompt_ids).endswith(ends)

    def test_kinds_of_errors(self):
        async def body(client):
            await ask(client)
            outcomes = []
            for path, fields in [
                ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 400}]}),
                ("/v1/v1/messages", {}),
                ("/v1/nothing", {}),
                ("/v1/messages", {"filler": " " * (1 << 21)}),
            ]:
                with pytest.raises(anthropic.APIStatusError) as caught:
                    await client.post(path, body={"messages": HI} | fields, cast_to=object)
                outcomes.append((caught.value.status_code, caught.value.type, caught.value.api_message))
            with pytest.raises(anthropic.NotFoundError) as caught:
                await ask(
                    client.with_options(base_url=str(client.base_url).rpartition("/session")[0] + "/session/none")
                )
            outcomes.append((404, caught.value.type, caught.value.api_message))
            return outcomes

        episode, outcomes, _ = played(body, "yes", max_length=100)
        assert [outcome[:2] for outcome in outcomes] == [
            (400, "invalid_request_error"),
            (404, "not_found_error"),
            (404, "not_found_error"),
            (413, "request_too_large"),
            (404, "not_found_error"),
        ]
        for (*_, message), expected in zip(
            outcomes,
            ["prompt is too long: ", "its base URL is anthropic_base_url", "Not Found", "Too Large", "no session none"],
            strict=True,
        ):
            assert expected in message
        assert episode.truncated

    def test_an_engine_that_fails_in_the_middle_of_a_stream(self):
        class Broken(Speaker):
            async def stream(self, token_ids, sampling_params, images=()):
                async for part in super().stream(token_ids, sampling_params, images):
                    yield part
                    raise RuntimeError("out of memory")

        async def body(client):
            with pytest.raises(anthropic.APIStatusError) as caught:
                _ = [event async for event in await ask(client, stream=True)]
            return caught.value.type

        program = AnthropicProgram(body)
        with pytest.raises(Exception, match="never asked the model"):
            play(program, Broken(TOKENIZER, "yes"))
        assert program.result == "api_error"

    def test_no_request_is_the_servers_fault(self):
        """Whatever stands wherever in a request: it is answered, or refused with Anthropic's error object."""
        door = Door()
        good = {
            "system": [{"type": "text", "text": "be kind"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "so"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]},
            ],
            "tools": [CALCULATOR],
            "tool_choice": {"type": "auto"},
            "metadata": {"user_id": "me"},
            **dict.fromkeys(("max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "seed", "thinking")),
            **dict.fromkeys(("model", "output_config", "context_management", "container", "mcp_servers")),
        }
        assert door.ask("POST", "/session/ID/v1/messages", good)[0] == 200

        @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(path=st.sampled_from(places(good)), new=ANY_JSON, stream=st.booleans(), count=st.booleans())
        def ask(path, new, stream, count):
            where = f"/session/ID/v1/messages{'/count_tokens' if count else ''}"
            status, reply = door.ask("POST", where, put(good | {"stream": stream}, path, new))
            assert status in (200, 400), reply
            assert "api_error" not in str(reply), reply
            assert (status == 400) == (isinstance(reply, dict) and reply.get("type") == "error"), reply

        ask()
