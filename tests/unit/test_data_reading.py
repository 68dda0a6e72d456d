"""Where the assistant's messages stand in a rendered chat, for templates that append and templates that rewrite."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import tokenizer

from openrlhf.data.files import DataError
from openrlhf.data.reading import mark_turns

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Appends, and ends every turn with a special token and a newline."""

THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}
{%- if loop.index0 > ns.last %}{% set content = '<think>\n' + thought + '\n</think>\n\n' + content %}{% endif %}
{%- endif %}
{{- '<|start|>' + m.role + '\n' + content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""
"""Thinking stays in the answer to the last question only, where it stands even if it is empty."""

ALWAYS_THINKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""The generation prompt opens a thought that the history never has."""

ENDS_TWICE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
"""A whole conversation ends with more than a turn does."""

LAST_ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '</s>' if loop.last and not add_generation_prompt else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Turns in the middle end with a newline, the last with end-of-sequence."""

SYSTEM_LAST = (
    "{% set n = messages | selectattr('role', 'equalto', 'user') | list | length %}{% set ns = namespace(seen=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.seen = ns.seen + 1 %}"
    "[{{ 'TOOLS ' if ns.seen == n }}{{ m.content }}]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""What the last question carries moves along with it: no beginning of the conversation is one of the text."""

BLOCKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content.split('</think>')[-1] }}<|end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def chat(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def learnt(template, messages, **options):
    marked = mark_turns(messages, tokenizer(chat_template=template), **options)
    assert marked.learnt is not None
    return [marked.text[start:end] for start, end in marked.learnt]


FOUR = chat("q1", "<think>why</think>a1", "q2", "<think>how</think>a2")


class TestEveryTurn:
    def test_a_template_that_appends(self):
        """The end of a turn is learnt, the newline after it is not: nobody samples it."""
        assert learnt(CHATML, chat("q1", "a1", "q2", "a2")) == ["a1<|end|>", "a2<|end|>"]

    def test_a_template_that_forgets_earlier_thoughts(self):
        assert learnt(THINKING, FOUR) == ["a1<|end|>", "<think>\nhow\n</think>\n\na2<|end|>"]

    def test_a_generation_prompt_that_is_no_part_of_the_history(self):
        assert learnt(ALWAYS_THINKS, FOUR) == ["a1</s>", "a2</s>"]

    def test_a_conversation_that_ends_with_more_than_a_turn(self):
        assert learnt(ENDS_TWICE, chat("q1", "a1", "q2", "a2")) == ["a1<|end|>", "a2<|end|>\n</s>"]

    def test_turns_without_an_end_of_their_own(self):
        assert learnt(LAST_ENDS, chat("q1", "a1", "q2", "a2")) == ["a1", "a2</s>"]

    def test_what_stands_between_generation_prompt_and_words_is_the_answers(self):
        """Asked with `assistant:`, the policy has to write the space itself."""
        template = LAST_ENDS.replace("assistant: {%", "assistant:{%")
        assert learnt(template, chat("q1", "a1", "q2", "a2")) == [" a1", " a2</s>"]

    def test_a_template_that_moves_things_to_the_last_question(self):
        assert learnt(SYSTEM_LAST, chat("q1", "a1", "q2", "a2")) == ["a1</s>", " a2</s>"]

    def test_generation_blocks_are_the_templates_own_word(self):
        assert learnt(BLOCKS, FOUR) == ["a1<|end|>", "a2<|end|>"]

    def test_the_same_words_twice(self):
        """By their place, not by their words."""
        marked = mark_turns(chat("a", "a", "a", "a"), tokenizer(chat_template=THINKING))
        first, second = marked.learnt
        assert marked.text[: first[0]] == "<|start|>user\na<|end|>\n<|start|>assistant\n"
        assert first[1] < second[0]

    def test_the_assistant_begins(self):
        messages = chat("a1", "q1", "a2", roles=("assistant", "user"))
        assert learnt(CHATML, messages) == ["a1<|end|>", "a2<|end|>"]

    def test_the_user_has_the_last_word(self):
        marked = mark_turns(chat("q1", "a1", "q2"), tokenizer(chat_template=CHATML))
        assert [marked.text[slice(*span)] for span in marked.learnt] == ["a1<|end|>"]
        assert not marked.closed

    def test_a_turn_without_words_is_not_learnt(self):
        assert learnt(CHATML, chat("q1", " ", "q2", "a2")) == ["a2<|end|>"]

    def test_tool_calls_are_learnt_and_their_results_are_not(self):
        template = (
            "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
            "{% if m.tool_calls is defined %}<call>{{ m.tool_calls[0].name }}</call>{% endif %}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
        )
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "search"}]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "a"},
        ]
        assert learnt(template, messages) == ["<call>search</call><|end|>", "a<|end|>"]

    @pytest.mark.parametrize("template", [CHATML, THINKING, ENDS_TWICE, LAST_ENDS, SYSTEM_LAST, ALWAYS_THINKS])
    @given(words=st.lists(st.text("ab <|\n", min_size=1, max_size=6).filter(str.strip), min_size=2, max_size=6))
    def test_each_turn_has_its_words_and_nobody_elses(self, template, words):
        """Every message is numbered, so that its words stand nowhere else: turn k holds answer k and no question."""
        words = [f"{word}{number}." for number, word in enumerate(words)]
        said = learnt(template, chat(*words))
        assert len(said) == len(words) // 2
        for turn, (question, answer) in zip(said, zip(words[::2], words[1::2], strict=False), strict=True):
            assert answer.strip() in turn
            assert question not in turn
            assert re.findall(r"\d\.", turn) == re.findall(r"\d\.", answer)


class TestOneTurn:
    def test_the_last_message(self):
        assert learnt(CHATML, chat("q1", "a1", "q2", "a2"), first=3) == ["a2<|end|>"]
        assert learnt(THINKING, FOUR, first=3) == ["<think>\nhow\n</think>\n\na2<|end|>"]
        assert learnt(BLOCKS, FOUR, first=3) == ["a2<|end|>"]

    def test_what_the_template_adds_before_the_answer_is_learnt(self):
        """The policy is asked with the generation prompt alone: the empty thought is its own to write."""
        assert learnt(THINKING, chat("q", "a"), first=1) == ["<think>\n\n</think>\n\na<|end|>"]


class TestWords:
    def test_words_that_a_template_leaves_out_are_noticed(self):
        assert mark_turns(FOUR, tokenizer(chat_template=ALWAYS_THINKS)).altered
        assert not mark_turns(chat("q", " a \n"), tokenizer(chat_template=CHATML)).altered

    def test_a_template_that_trims(self):
        template = CHATML.replace("m.content", "m.content | trim")
        assert learnt(template, chat("q", " a \n")) == ["a<|end|>"]


class TestWhatCannotBeTold:
    AMBIGUOUS = "{% for m in messages %}{{ m.role }}: {{ m.content }} ~end{% if loop.last %}~{% else %}~~{% endif %}ing\n{% endfor %}"
    """In the middle a turn ends with `~end~~ing`, at the end with `~end~ing`: how much of it is the turn's?"""

    UPSIDE_DOWN = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"

    @pytest.mark.parametrize("template", [AMBIGUOUS, UPSIDE_DOWN, "{{ messages | length }}"])
    def test_it_is_refused_with_the_remedy(self, template):
        with pytest.raises(DataError) as caught:
            learnt(template, chat("q1", "a1", "q2", "a2"))
        assert "stands in the result cannot be told for sure" in str(caught.value)
        assert "{% generation %}" in str(caught.value)
        assert "--data.tokenizer_chat_template" in str(caught.value)
