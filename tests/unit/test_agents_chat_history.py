"""From messages to tokens: what the policy wrote stays as it wrote it, the rest is what the template says."""

import copy
import json

import pytest
from chat_model import CALCULATOR, TEMPLATES, Speaker, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_models import image, vision_tokenizer

from openrlhf.agents.chat_history import (
    ChatHistory,
    Conversation,
    TemplateError,
    action_text,
    next_user_turn,
    spell_tools,
)
from openrlhf.agents.images import BadImageError
from openrlhf.agents.recording_engine import EngineCall, segments_from_calls
from openrlhf.agents.tool_calls import GrowingReply, Reply, with_thoughts
from openrlhf.types import FinishReason, Generation

TOKENIZER = chat_tokenizer()
EOS = TOKENIZER.eos_token_id
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'


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


def test_chat_history_with_other_tools_is_another_prompt():
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


class TestRewrittenHistories:
    """What agents and templates do to a conversation of a model that thinks, with a template as Qwen3's. Of every
    sampled token one segment has it as an action, after the very tokens that the engine had read."""

    def played(self):
        """A question, a call, and its result: one sequence, thoughts and all."""
        chat = Chat("qwen3", tools=True)
        chat.say(user("1+2?"), answer=with_thoughts("add", CALL))
        assert chat.say(tool("3"), answer=with_thoughts("easy", "3")).continues
        return chat

    def segments(self, chat):
        segments = segments_from_calls(chat.calls, reward=1.0)
        for call in chat.calls:
            (found,) = (
                segment
                for segment in segments
                if segment.token_ids[: len(call.token_ids)].tolist() == call.token_ids
                and segment.action_mask[len(call.prompt_ids) : len(call.token_ids)].all()
            )
            assert not found.action_mask[len(call.prompt_ids) - 1]
        actions = sum(int(segment.action_mask.sum()) for segment in segments)
        assert actions == sum(len(call.generation.token_ids) for call in chat.calls)
        assert [segment.turn_rewards.sum().item() for segment in segments] == [0.0] * (len(segments) - 1) + [1.0]
        return segments

    def test_the_template_leaves_thoughts_out_at_the_next_question(self):
        """The second segment reads the calls and answers of the first without their thoughts, and goes on with thoughts
        of its own until the next question."""
        chat = self.played()
        first = chat.calls[1].token_ids
        prompt = chat.say(user("4+5?"), answer=with_thoughts("again", CALL))
        assert not prompt.continues
        assert "add" not in prompt.text
        assert "3<|im_end|>" in prompt.text
        assert prompt.token_ids == chat.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        assert chat.say(tool("9"), answer="9").continues
        one, two = self.segments(chat)
        assert one.token_ids.tolist() == first
        assert [chat.text(segment.token_ids).count("<think>") for segment in (one, two)] == [2, 1]

    def test_a_client_that_leaves_thoughts_out(self):
        """Where the template would have kept them: after the result of a tool."""
        chat = Chat("qwen3", tools=True)
        chat.say(user("1+2?"), answer=with_thoughts("add", CALL))
        chat.messages[-1]["content"] = ""
        assert not chat.say(tool("3"), answer="3").continues
        assert len(self.segments(chat)) == 2

    def test_a_conversation_that_is_compacted(self):
        """The policy sums up what was said so far, which belongs to the first sequence; the second begins with that."""
        chat = self.played()
        chat.say(user("Sum up."), answer="One and two are three.")
        summary = chat.messages[-1]["content"]
        chat.messages = [{"role": "system", "content": "So far: " + summary}]
        prompt = chat.say(user("and 4?"), answer=with_thoughts("3+4", "7"))
        assert not prompt.continues
        assert "So far: One and two are three." in prompt.text
        assert chat.say(tool("7"), answer="seven").continues
        assert len(self.segments(chat)) == 3  # the question for a summary has left thoughts out, too

    def test_a_result_of_a_tool_that_is_edited(self):
        """A client cuts a long result after it was read. The second sequence keeps the tokens of the first call, and
        from there on is the template's text. The answer to the long result stays an action of the first sequence."""
        chat = Chat("qwen3", tools=True)
        chat.say(user("1+2?"), answer=CALL)
        chat.say(tool("3" * 40), answer=CALL)
        chat.messages[2]["content"] = "3 and so on"
        prompt = chat.say(tool("3"), answer="3")
        first, second = (call.token_ids for call in chat.calls[:2])
        assert prompt.token_ids[: len(first)] == first
        assert prompt.token_ids[: len(second)] != second
        one, two = self.segments(chat)
        assert "3" * 40 in chat.text(one.token_ids)
        assert "3" * 40 not in chat.text(two.token_ids)

    def test_a_conversation_that_goes_back_and_takes_another_way(self):
        """From the first answer on, twice: the tokens that both ways have in common are actions of one of them."""
        chat = self.played()
        kept = chat.messages[:2]
        chat.messages = kept
        prompt = chat.say(tool("4"), answer="4?")
        assert prompt.continues
        assert prompt.token_ids[: len(chat.calls[0].token_ids)] == chat.calls[0].token_ids
        assert len(self.segments(chat)) == 2


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
def test_chat_history_segments_are_what_the_engine_read_and_wrote(steps, template):
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


NO_SYSTEM = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def toolless(template):
    """A tokenizer whose template is like that of models that know no tools."""
    tokenizer = copy.deepcopy(chat_tokenizer("words"))
    tokenizer.chat_template = template + tokenizer.chat_template
    return tokenizer


class TestToolsThatTheTemplateLeavesOut:
    """They were left out in silence: the policy never heard of them, and of its calls saw nothing."""

    def test_a_system_message_describes_them(self):
        chat = Chat("words", tools=True)
        prompt = chat.say({"role": "system", "content": "Be kind."}, user("2+3?"), answer="5")
        assert prompt.text.startswith("\nsystem: Be kind.\n\n# Tools\n\nYou may call one or more functions")
        assert f"<tools>\n{json.dumps(CALCULATOR)}\n</tools>" in prompt.text
        assert prompt.text.endswith("</tool_call>\nuser: 2+3?\nassistant: ")
        assert chat.history.spells_tools

    def test_without_a_system_message_there_is_one_and_where_none_may_be_the_user_says_it(self):
        said = Conversation([user("2+3?")], [CALCULATOR])
        assert ChatHistory(toolless("")).prompt(said).text.startswith("\nsystem: # Tools")
        text = ChatHistory(toolless(NO_SYSTEM)).prompt(said).text
        assert text.startswith("\nuser: # Tools")
        assert text.endswith("</tool_call>\n\n2+3?\nassistant: ")

    def test_calls_and_answers_are_read_and_the_conversation_goes_on(self):
        """The tokens of the call are the policy's own, and what is shown of it is what our parser reads."""
        chat = Chat("words", tools=True)
        call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'
        chat.say(user("2+3?"), answer=f"I add.\n{call}")
        assert chat.messages[-1]["tool_calls"][0]["function"]["name"] == "calculator"
        prompt = chat.say(tool("5"), tool("five"), answer="5")
        assert prompt.continues
        answers = "<tool_response>\n5\n</tool_response>\n<tool_response>\nfive\n</tool_response>"
        assert prompt.text.endswith(f"\nassistant: I add.\n{call}\nuser: {answers}\nassistant: ")
        assert len(segments_from_calls(chat.calls)) == 1

    def test_a_template_that_knows_them_is_left_alone(self):
        chat = Chat(tools=True)
        assert "# Tools" not in chat.say(user("2+3?"), answer="5").text
        assert not chat.history.spells_tools


class TestHelpers:
    def test_the_next_turn_of_the_user_in_the_models_own_template(self):
        turn = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
        assert next_user_turn(TOKENIZER, "again", after="5<|im_end|>") == turn
        assert next_user_turn(TOKENIZER, "again", after="5") == f"<|im_end|>{turn}"
        assert next_user_turn(chat_tokenizer("words"), "again", after="5") == "\nuser: again\nassistant: "

    def test_variables_of_the_template_reach_it(self):
        tokenizer = toolless("")
        tokenizer.chat_template += "{% if calm %}[calm] {% endif %}"
        assert next_user_turn(tokenizer, "again", after="5", calm=True).endswith("\nassistant: [calm] ")

    def test_it_is_the_whole_conversation_as_the_template_renders_it(self):
        """Whatever it is after, and whether or not that is closed."""
        for template in TEMPLATES:
            tokenizer = chat_tokenizer(template)
            before = [user("hi"), {"role": "assistant", "content": "yes"}]
            whole = tokenizer.apply_chat_template([*before, user("a")], tokenize=False, add_generation_prompt=True)
            first = tokenizer.apply_chat_template(before[:1], tokenize=False, add_generation_prompt=True)
            assert first + "yes" + next_user_turn(tokenizer, "a", after="yes") == whole

    def test_without_a_template_there_are_no_turns(self):
        tokenizer = toolless("")
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match="has no chat template, so it has no turns"):
            next_user_turn(tokenizer, "again", after="5")

    def test_an_action_without_special_tokens(self):
        said = "<|im_start|>5 < 6<|im_end|><|endoftext|>"
        assert action_text(TOKENIZER, said) == "5 < 6"
        assert action_text(TOKENIZER, TOKENIZER(said)["input_ids"]) == "5 < 6"


class TestImages:
    """A conversation that shows images as it goes on."""

    def shows(self, text):
        return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}

    def after(self, tokenizer, *, second_time=0, template_role="user"):
        """The first prompt, and that of a conversation which goes on from it, with an image more. `second_time`: which
        image the client shows as the first then."""
        history = ChatHistory(tokenizer)
        messages = [self.shows("which?")]
        first = history.prompt(Conversation(messages, images=[image(0)]))
        written = tokenizer("7")["input_ids"]
        history.remember(first, written, Reply("7"))
        messages = [*messages, {"role": "assistant", "content": "7"}, {**self.shows("sure?"), "role": template_role}]
        later = history.prompt(Conversation(messages, images=[image(second_time), image(1, width=40)]))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return first, later, text

    @pytest.mark.parametrize("role", ["user", "tool"])
    @pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
    def test_a_history_that_grows_keeps_its_images_and_is_one_rendering(self, kind, role):
        tokenizer = vision_tokenizer(kind)
        first, later, text = self.after(tokenizer, template_role=role)
        inputs = [tokenizer.episode_images.prepare_one(picture) for picture in (image(0), image(1, width=40))]
        whole = tokenizer.episode_images.expand(text, inputs)
        assert (later.token_ids, later.continues) == (whole.token_ids, True)
        assert later.images == whole.images
        assert later.images[0] is first.images[0]

    def test_another_image_of_the_same_size_is_another_past(self):
        tokenizer = vision_tokenizer("qwen2_5_vl")
        first, later, _ = self.after(tokenizer, second_time=5)
        assert later.token_ids[: len(first.token_ids)] == first.token_ids
        assert not later.continues

    def test_a_message_that_spells_the_image_token(self):
        """Beside an image it would be taken for one; alone it is text."""
        tokenizer = vision_tokenizer("qwen2_5_vl")
        history = ChatHistory(tokenizer)
        with pytest.raises(TemplateError, match="the messages have 1 images, and the chat template shows 2"):
            history.prompt(Conversation([self.shows("a<|image_pad|>")], images=[image(0)]))
        alone = history.prompt(Conversation([user("a<|image_pad|>")]))
        assert tokenizer.episode_images.processor.placeholder not in alone.token_ids

    def test_a_template_that_leaves_images_out_is_an_error(self):
        tokenizer = copy.copy(vision_tokenizer("qwen2_5_vl"))
        tokenizer.tokenizer = copy.deepcopy(tokenizer.tokenizer)
        tokenizer.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}!{% endfor %}"
        with pytest.raises(TemplateError, match="the chat template shows 0"):
            ChatHistory(tokenizer).prompt(Conversation([self.shows("a")], images=[image(0)]))

    def test_images_for_a_model_of_text_are_an_error(self):
        with pytest.raises(BadImageError, match="the policy of this run reads no images"):
            ChatHistory(TOKENIZER).prompt(Conversation([self.shows("a")], images=[image(0)]))

    def test_answers_of_tools_with_images_are_spelled_out_where_the_template_knows_no_tools(self):
        answer = {"role": "tool", "content": [{"type": "image"}]}
        asked = Conversation([user("hi"), answer, {"role": "tool", "content": "5"}], [CALCULATOR], {}, [image(0)])
        spelled = spell_tools(asked)
        assert spelled.images == [image(0)]
        (content,) = [message["content"] for message in spelled.messages if message.get("answers")]
        assert [item.get("text", item["type"]) for item in content] == [
            "<tool_response>\n", "image", "\n</tool_response>", "\n", "<tool_response>\n5\n</tool_response>",
        ]  # fmt: skip
