"""Tool calls and thoughts are read as they were meant, or not at all; a growing reply never takes back what it has shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.tool_calls import GrowingReply, GrowingThoughts, Reply, ToolCall, parse_reply, split_thoughts

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
GET = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
ADD_CALL, GET_CALL = ToolCall("add", {"a": 1, "b": [2]}), ToolCall("get", {})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ADD, "", (ADD_CALL,)),
        ("I add.\n" + ADD, "I add.", (ADD_CALL,)),
        (f"{ADD}\n{GET}", "", (ADD_CALL, GET_CALL)),
        (f" Both: {ADD} and {GET} now ", " Both:\nand\nnow", (ADD_CALL, GET_CALL)),
    ],
)
def test_calls_and_the_text_around_them(text, content, calls):
    assert parse_reply(text) == Reply(content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "",
        "<tool_call>",
        '<tool_call>{"name": "add", "arguments": {}}',  # never closed
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>" * 20_000,  # reading to the end for each would take half a minute
        GET + "<tool_call>{}</tool_call>",  # one of two
        GET + "<tool_call>",
    ],
)
def test_tool_calls_that_are_malformed_stay_text(text):
    assert parse_reply(text) == Reply(text)


def test_content_is_shown_at_once_unless_it_may_belong_to_a_call():
    growing = GrowingReply(tools=True)
    said = [growing.feed(text) for text in ("Let ", "me <", "b>add", "\n<tool", "_call>", '{"name"')]
    assert said == ["Let", " me", " <b>add", "", "", ""]
    rest, reply = growing.finish()
    assert rest == '\n<tool_call>{"name"'
    assert reply == Reply('Let me <b>add\n<tool_call>{"name"')
    assert GrowingReply(tools=False).feed("a <tool_call> ") == "a <tool_call> "


PIECES = st.sampled_from([ADD, GET, "a", " ", "\n", "<", "<tool_call>", "</tool_call>", "<tool", "x<y", '{"name": 1}'])


@given(st.lists(PIECES, max_size=6), st.lists(st.integers(1, 9), max_size=200), st.booleans())
def test_the_parts_of_a_reply_are_its_content(pieces, cuts, tools):
    """However the text is cut: what was shown is never taken back, and all of it is the content."""
    text = "".join(pieces)
    growing, said, at = GrowingReply(tools=tools), "", 0
    for n in [*cuts, len(text)]:
        said += growing.feed(text[at : at + n])
        at += n
    rest, reply = growing.finish()
    assert said + rest == reply.content
    assert reply == (parse_reply(text) if tools else Reply(text))


@pytest.mark.parametrize(
    ("content", "begun", "split"),
    [
        ("<think>\nhm\n</think>\n\nyes\n", False, ("hm", "yes\n")),
        ("\n<think></think>yes", False, ("", "yes")),
        ("hm\n</think>yes", True, ("hm", "yes")),
        ("<think>hm</think>yes", True, ("hm", "yes")),  # which it has begun once more
        ("<think>hm", False, ("hm", "")),  # cut short
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("yes", False, None),
        ("yes <think>hm</think>", False, None),
        ("hm</think>yes", False, None),
        ("", False, None),
        ("", True, ("", "")),
    ],
)
def test_thoughts_and_what_is_said_after_them(content, begun, split):
    assert split_thoughts(content, begun=begun) == split


def test_thoughts_are_shown_as_they_grow():
    growing = GrowingThoughts(begun=False)
    said = [growing.feed(text) for text in ("\n<th", "ink>\nhm", " so", " </", "b></thi", "nk>\n", "\nyes ", "no")]
    assert said == [("", ""), ("hm", ""), (" so", ""), ("", ""), (" </b>", ""), ("", ""), ("", "yes "), ("", "no")]
    assert growing.finish() == ("", "")


THOUGHT_PIECES = st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "</", "</think", "<thinking>", "x<y"])


@given(st.lists(THOUGHT_PIECES, max_size=6), st.lists(st.integers(1, 9), max_size=60), st.booleans())
def test_the_parts_of_thoughts_are_the_thoughts(pieces, cuts, begun):
    """However the text is cut: what was shown is never taken back, and all of it is what the whole text has."""
    text = "".join(pieces)
    growing, thoughts, answer, at = GrowingThoughts(begun=begun), "", "", 0
    parts = []
    for n in [*cuts, len(text)]:
        parts.append(growing.feed(text[at : at + n]))
        at += n
    for part in [*parts, growing.finish()]:
        assert not (part.thoughts and answer)  # never thoughts after the answer has begun
        thoughts += part.thoughts
        answer += part.answer
    split = split_thoughts(text, begun=begun)
    assert (thoughts, answer) == (split or ("", text))
    assert growing.has_thoughts == (split is not None)
