"""From messages to tokens: what the policy wrote stays as it wrote it, the rest is what the template says."""

import pytest
from chat_model import CALCULATOR, TEMPLATES, Speaker, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.agents.chat_history import ChatHistory, Conversation, TemplateError
from openrlhf.agents.recording_engine import EngineCall, segments_from_calls
from openrlhf.agents.tool_calls import GrowingReply
from openrlhf.types import FinishReason, Generation

TOKENIZER = chat_tokenizer()
EOS = TOKENIZER.eos_token_id


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


class Chat:
    """A client and a policy that says what it is told, spelled character by character."""

    def __init__(self, template="plain", *, tools=False):
        self.tokenizer = chat_tokenizer(template)
        self.history = ChatHistory(self.tokenizer)
        self.messages = []
        self.tools = [CALCULATOR] if tools else None
        self.calls = []

    def say(self, *messages, answer, ends=True):
        """The prompt behind the answer. `ends`: whether it closes with end-of-sequence."""
        self.messages += messages
        prompt = self.history.prompt(Conversation(self.messages, self.tools))
        written = [*Speaker(self.tokenizer).spell(answer), *([EOS] if ends else [])]
        growing = GrowingReply(tools=bool(self.tools))
        growing.feed(answer)
        _, reply = growing.finish()
        self.history.remember(prompt, written, reply)
        calls = [
            {"id": f"c{i}", "type": "function", "function": call._asdict()} for i, call in enumerate(reply.tool_calls)
        ]
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": reply.content} | ({"tool_calls": calls} if calls else {}),
        ]
        generation = Generation(
            token_ids=written, logprobs=None, versions=[0] * len(written), finish_reason=FinishReason.STOP
        )
        self.calls.append(EngineCall(prompt.token_ids, generation))
        return prompt

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_first_prompt_is_the_templates_text():
    chat = Chat()
    prompt = chat.say(user("hi"), answer="yes")
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids == TOKENIZER(prompt.text, add_special_tokens=False)["input_ids"]
    assert not prompt.continues


@pytest.mark.parametrize("ends", [True, False])
def test_a_conversation_that_goes_on_keeps_the_policys_own_tokens(ends):
    """The close of its turn is there once, whether the policy wrote it or was cut short."""
    chat = Chat()
    first = chat.say(user("hi"), answer="the answer is 12", ends=ends)
    second = chat.say(user("sure?"), answer="yes")
    assert second.continues
    so_far = chat.calls[0].token_ids
    assert second.token_ids[: len(so_far)] == so_far
    assert chat.text(second.token_ids) == second.text
    # Tokenised again, the same text would be other tokens.
    assert second.token_ids != TOKENIZER(second.text, add_special_tokens=False)["input_ids"]
    assert first.text in second.text


def test_calls_that_the_template_spells_otherwise_are_kept_as_the_policy_spelled_them():
    chat = Chat(tools=True)
    chat.say(
        user("2+3?"), answer='I add. <tool_call>{"arguments":{"expression":"2+3"},  "name":"calculator"}</tool_call>'
    )
    prompt = chat.say(tool("5"), tool("five"), answer="5")
    assert prompt.continues
    assert '<tool_call>{"arguments":{"expression":"2+3"},  "name":"calculator"}</tool_call>' in chat.text(
        prompt.token_ids
    )
    tail = "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\nfive"
    assert tail in chat.text(prompt.token_ids)
    assert len(segments_from_calls(chat.calls)) == 1


def rewrite(edit):
    chat = Chat(tools=True)
    chat.say({"role": "system", "content": "Be kind."}, user("hi"), answer="<think>hm</think> yes")
    edit(chat.messages)
    return chat, chat.say(user("sure?"), answer="yes")


@pytest.mark.parametrize(
    "edit",
    [
        lambda messages: messages[2].update(content="yes"),  # thoughts left out
        lambda messages: messages[2].update(content=messages[2]["content"] + "!"),
        lambda messages: messages[0].update(content="Be rude."),
        lambda messages: messages.pop(0),
        lambda messages: messages.pop(2),
        lambda messages: messages[1].update(content="hi  "),
        lambda messages: messages[2].update(role="user"),
        lambda messages: messages[2].update(
            tool_calls=[{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": {}}}]
        ),
    ],
)
def test_a_rewritten_history_is_read_afresh(edit):
    chat, prompt = rewrite(edit)
    assert not prompt.continues
    assert prompt.token_ids == TOKENIZER(prompt.text, add_special_tokens=False)["input_ids"]
    assert len(segments_from_calls(chat.calls)) == 2


def test_white_space_around_a_reply_is_no_rewriting():
    _, prompt = rewrite(lambda messages: messages[2].update(content="  <think>hm</think> yes\n"))
    assert prompt.continues


def test_ids_of_calls_and_names_that_the_template_does_not_show_are_no_rewriting():
    _, prompt = rewrite(lambda messages: messages[1].update(name="Ada"))
    assert prompt.continues


def test_other_tools_are_another_prompt():
    chat = Chat(tools=True)
    chat.say(user("hi"), answer="yes")
    chat.tools = None
    assert not chat.say(user("sure?"), answer="yes").continues


def test_a_template_that_trims_keeps_a_conversation_whole():
    chat = Chat("trims")
    chat.say(user("hi"), answer="  the answer \n")
    assert chat.say(user("sure?"), answer="yes").continues


def test_a_template_that_forgets_thoughts_rewrites_at_the_next_question_only():
    """As the template would show it in use: a tool's answer is read with the thoughts before it, a question without."""
    chat = Chat("forgets", tools=True)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    chat.say(user("1?"), answer="<think>hm</think>" + call)
    assert chat.say(tool("1"), answer="<think>so</think>1").continues
    assert not chat.say(user("sure?"), answer="yes").continues
    assert chat.say(user("really?"), answer="yes").continues
    assert len(segments_from_calls(chat.calls)) == 2


def test_a_question_asked_again_goes_on_from_the_answer_that_is_shown():
    chat = Chat()
    chat.say(user("hi"), answer="yes")
    chat.messages.pop()
    chat.say(answer="no")
    assert chat.say(user("sure?"), answer="no").token_ids[: len(chat.calls[1].token_ids)] == chat.calls[1].token_ids


def test_a_template_that_refuses_says_so():
    tokenizer = chat_tokenizer.__wrapped__()
    tokenizer.chat_template = "{{ raise_exception('system only') }}"
    with pytest.raises(TemplateError, match="the chat template refused these messages: system only"):
        ChatHistory(tokenizer).prompt(Conversation([user("hi")]))


ASCII = [
    i for i in range(len(TOKENIZER)) if (t := TOKENIZER.decode([i])).isascii() and t.isprintable() and "<" not in t
]
ANSWERS = st.tuples(st.lists(st.sampled_from(ASCII), min_size=1, max_size=6), st.booleans())
TEXTS = st.text("a1 \n:<", min_size=0, max_size=4)
CLIENTS = st.lists(
    st.tuples(st.sampled_from(["go on"] * 4 + ["edit", "drop", "begin anew"]), TEXTS, ANSWERS), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=60)
@given(CLIENTS, st.sampled_from(sorted(TEMPLATES)))
def test_whatever_a_client_does_its_segments_are_what_was_read_and_written(steps, template):
    """A prompt that goes on begins with an earlier call's tokens; any other is the template's text. A client that only
    goes on gives one segment. Prompts say what the template says; up to the policy's spaces, where it trims those, and
    to the close that it wrote by itself, where the template has none."""
    tokenizer = chat_tokenizer(template)
    history, messages, calls = ChatHistory(tokenizer), [], []
    for action, text, (answer, ends) in steps:
        if action == "begin anew":
            messages = []
        elif action == "drop":
            messages = messages[:-2]
        elif action == "edit" and messages:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + "!"}]
        messages = [*messages, user(text)]
        prompt = history.prompt(Conversation(messages))
        written = [*answer, EOS] if ends else answer
        growing = GrowingReply(tools=False)
        growing.feed(tokenizer.decode(answer))
        reply = growing.finish()[1]
        before = [call.token_ids for call in calls]
        if prompt.continues:
            assert any(prompt.token_ids[: len(ids)] == ids for ids in before)
        else:
            assert prompt.token_ids == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        said = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        if template == "words":
            said = said.replace("<|im_end|>", "")
        assert "".join(said.split()) == "".join(prompt.text.split())
        history.remember(prompt, written, reply)
        messages = [*messages, {"role": "assistant", "content": reply.content}]
        calls.append(
            EngineCall(
                prompt.token_ids,
                Generation(
                    token_ids=written,
                    logprobs=None,
                    versions=[len(calls)] * len(written),
                    finish_reason=FinishReason.STOP,
                ),
            )
        )
    segments = segments_from_calls(calls, reward=1.0)
    if all(action == "go on" for action, _, _ in steps):
        assert len(segments) == 1
    for turn, call in enumerate(calls):
        (segment,) = (s for s in segments if turn in s.versions.tolist())
        at = segment.versions.tolist().index(turn)
        assert segment.token_ids[: at + len(call.generation.token_ids)].tolist() == call.token_ids
        assert segment.action_mask[at : at + len(call.generation.token_ids)].all()
    assert sum(int(s.action_mask.sum()) for s in segments) == sum(len(c.generation.token_ids) for c in calls)
