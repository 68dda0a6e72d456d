"""From a record to the text the policy reads."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from openrlhf.data.files import DataError
from openrlhf.data.reading import mark_turns
from openrlhf.data.templates import render_prompt, set_chat_template

CHAT = (
    "{% for m in messages %}<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(chat_template=CHAT):
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")))
    made.chat_template = chat_template
    return made


def refused(record, **options):
    with pytest.raises(DataError) as caught:
        render_prompt(record, **options)
    return str(caught.value)


def test_plain_text_is_kept_to_the_character():
    assert render_prompt({"input": "  2 + 3 = \n"}).text == "  2 + 3 = \n"


def test_input_template():
    assert render_prompt({"q": "2+3"}, input_key="q", input_template="User: {}\n{{}}").text == "User: 2+3\n{}"


def test_braces_of_the_prompt_are_not_touched():
    assert render_prompt({"input": r"\frac{1}{2}"}, input_template="Q: {}").text == r"Q: \frac{1}{2}"


def test_string_becomes_one_user_message():
    text = render_prompt({"input": "2+3"}, apply_chat_template=True, tokenizer=tokenizer()).text
    assert text == "<user>2+3<assistant>"


def test_messages_pass_through_and_none_filled_keys_go():
    """Columnar files give every message every key; the template's `is defined` must see the difference."""
    messages = [
        {"role": "system", "content": "short", "name": None},
        {"role": "user", "content": "2+3", "name": "ann"},
    ]
    text = render_prompt({"input": messages}, apply_chat_template=True, tokenizer=tokenizer()).text
    assert text == "<system>short<user ann>2+3<assistant>"


def test_chat_template_wins_over_input_template():
    options = {"apply_chat_template": True, "tokenizer": tokenizer(), "input_template": "Q: {}"}
    assert render_prompt({"input": "2+3"}, **options).text == "<user>2+3<assistant>"


@pytest.mark.parametrize("value", ["", " \n", [], [{"role": "user", "content": ""}]])
def test_nothing_to_ask(value):
    assert render_prompt({"input": value}, apply_chat_template=True, tokenizer=tokenizer()).text == ""


def test_wrong_key_names_those_there_are():
    message = refused({"question": "x", "answer": 3, "empty": None})
    assert message == "it has no 'input': set --data.input_key to one of question, answer"


def test_tokenizer_without_a_chat_template():
    message = refused({"input": "x"}, apply_chat_template=True, tokenizer=tokenizer(None))
    assert "has no chat template: leave --data.apply_chat_template out" in message


def test_messages_without_a_chat_template():
    message = refused({"input": [{"role": "user", "content": "x"}]})
    assert message == "its 'input' is a list of messages, which needs --data.apply_chat_template"


@pytest.mark.parametrize("item", ["text", {"content": "x"}, {"role": "user"}])
def test_malformed_message(item):
    message = refused({"input": [{"role": "user", "content": "x"}, item]}, apply_chat_template=True)
    assert message.startswith("message 2 of its 'input' must be an object with 'role' and 'content', got ")


def test_value_of_another_type():
    assert refused({"input": 3}) == "its 'input' must be a string or a list of messages, got int"


@pytest.mark.parametrize("template", ["{} and {}", "{prompt}", r"\boxed{ {}", "{0.x}"])
def test_template_that_cannot_be_filled(template):
    message = refused({"input": "x"}, input_template=template)
    assert "--data.input_template" in message
    assert "must have exactly one {} for the prompt; write other braces twice, {{ and }}" in message


def test_template_that_refuses_a_record():
    picky = tokenizer("{{ raise_exception('roles must alternate') }}")
    message = refused({"input": "x"}, apply_chat_template=True, tokenizer=picky)
    assert message == "the chat template refused its messages: roles must alternate"


THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not think %}<no thought>{% endif %}"


def test_another_template_and_variables_for_it(tmp_path):
    """As Jinja text, and as a file with it."""
    (tmp_path / "template.jinja").write_text(THINKING)
    for template in (THINKING, str(tmp_path / "template.jinja")):
        for arguments, expected in (({}, "q<no thought>"), ({"think": False}, "q<no thought>"), ({"think": True}, "q")):
            made = set_chat_template(tokenizer(), template, arguments)
            assert render_prompt({"input": "q"}, apply_chat_template=True, tokenizer=made).text == expected


def test_without_another_template_it_stays():
    assert set_chat_template(tokenizer(), None, {}).chat_template == CHAT


def test_a_template_file_that_is_not_there():
    with pytest.raises(DataError, match=r"--data\.tokenizer_chat_template no\.jinja: this is neither Jinja text"):
        set_chat_template(tokenizer(), "no.jinja", {})


def test_variables_change_the_place_of_an_answer():
    """The generation prompt of a model that does not think holds an empty thought, which is not learnt."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not think %}()"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% if not think %}(){% endif %}"
        "{% endif %}"
    )
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for think, text in ((True, "<user>q<assistant>a"), (False, "<user>q<assistant>()a")):
        marked = mark_turns(messages, set_chat_template(tokenizer(), template, {"think": think}), first=1)
        assert marked.text == text
        assert marked.learnt == ((len(text) - 1, len(text)),)
