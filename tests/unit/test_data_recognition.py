"""Records whose keys no flag names are read by the names that other tools use, and this is said."""

import logging

import pytest
from jsonl_records import written

from openrlhf.data.examples import ExampleFormat
from openrlhf.data.preferences import JudgedFormat, PairFormat
from openrlhf.data.recognition import PromptFormat, is_chat, recognise

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CHAT = [USER, ANSWER]


@pytest.mark.parametrize(
    ("record", "given", "expected"),
    [
        # Supervised fine-tuning
        ({"messages": CHAT}, ExampleFormat(), {"input_key": "messages", "apply_chat_template": True}),
        ({"prompt": "q", "completion": "a"}, ExampleFormat(), {"input_key": "prompt", "output_key": "completion"}),
        (
            {"prompt": [USER], "completion": [ANSWER]},
            ExampleFormat(),
            {"input_key": "prompt", "output_key": "completion", "apply_chat_template": True},
        ),
        ({"text": "t"}, ExampleFormat(pretrain=True), {"input_key": "text"}),
        ({"input": CHAT}, ExampleFormat(), {"apply_chat_template": True}),
        ({"input": "q", "messages": CHAT}, ExampleFormat(output_key="a"), {}),
        ({"messages": CHAT, "q": "q"}, ExampleFormat(input_key="q"), {}),
        # Pairs
        ({"chosen": CHAT, "rejected": CHAT}, PairFormat(), {"apply_chat_template": True}),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
            PairFormat(),
            {"prompt_key": "prompt", "apply_chat_template": True},
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, PairFormat(), {"prompt_key": "prompt"}),
        ({"prompt": "q", "chosen": "qa", "rejected": "qb"}, PairFormat(), {}),
        ({"prompt": "q", "chosen": CHAT, "rejected": CHAT}, PairFormat(), {"apply_chat_template": True}),
        ({"chosen": "a", "rejected": "b"}, PairFormat(), {}),
        # Judged answers
        ({"prompt": "q", "completion": "a", "label": True}, JudgedFormat(), {"response_key": "completion"}),
        ({"prompt": "q", "response": "a", "label": True}, JudgedFormat(), {}),
        (
            {"prompt": [USER], "completion": [ANSWER], "label": True},
            JudgedFormat(),
            {"response_key": "completion", "apply_chat_template": True},
        ),
        # Prompts
        ({"prompt": "q"}, PromptFormat(), {"input_key": "prompt"}),
        ({"prompt": [USER]}, PromptFormat(), {"input_key": "prompt", "apply_chat_template": True}),
        ({"messages": [USER]}, PromptFormat(), {"input_key": "messages", "apply_chat_template": True}),
        ({"input": "q", "prompt": "p"}, PromptFormat(), {}),
        ({"question": "q"}, PromptFormat(), {}),
        ({"input": "q", "image": "a.png"}, PromptFormat(), {"image_key": "image"}),
        ({"input": "q", "image": "a.png", "images": []}, PromptFormat(), {}),
    ],
)
def test_keys_are_found_by_their_names(tmp_path, caplog, record, given, expected):
    with caplog.at_level(logging.INFO):
        found = recognise(written(tmp_path, [record]), given, flag="--data.dataset")
    changed = {name: value for name, value in vars(found).items() if value != getattr(given, name)}
    assert changed == expected
    assert len(caplog.messages) == (1 if expected else 0)


def test_recognised_keys_are_named_as_flags(tmp_path, caplog):
    record = {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}
    with caplog.at_level(logging.INFO):
        recognise(written(tmp_path, [record]), PairFormat(), flag="--eval.dataset")
    assert caplog.messages == [
        "--eval.dataset: its records have the keys prompt, chosen, rejected; read as with --data.prompt_key prompt "
        "--data.apply_chat_template"
    ]


def test_recognition_of_chats():
    assert is_chat([USER])
    assert not any(map(is_chat, ["text", None, [], [1], ["a"], {"role": "user"}]))
