"""Every example of docs/data.md is read as the document says, by the code that trains on it."""

import json
import re
import shlex
from pathlib import Path

import pytest
from small_tokenizers import tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2Config, Qwen2VLImageProcessorPil
from vision_models import image

from openrlhf.checking.data_check import configure, guess, lines_of, read, run, show

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "data.md"
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
EXAMPLES = re.findall(
    r"```json\n(.*?)\n```\n```bash\n(.*?)\n```\n```text\n(.*?)```\n", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer and no weights: data needs none."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer(chat_template=CHATML).save_pretrained(folder)
    Qwen2Config(vocab_size=400).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    """A tokenizer and an image processor, and no weights."""
    folder = tmp_path_factory.mktemp("vision_model")
    content = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for item in m.content %}{% if item.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}"
    )
    made = tokenizer(chat_template=CHATML.replace("{{ m.content }}", content))
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    made.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>", *names]})
    made.save_pretrained(folder)
    Qwen2_5_VLConfig(image_token_id=made.convert_tokens_to_ids("<|image_pad|>")).save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Runs in a folder of its own, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def written(*records):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return "data.jsonl"

    return written


def shown_as(record, command, model, write):
    words = shlex.split(re.sub(r"\$'([^']*)'", lambda m: shlex.quote(m[1].replace("\\n", "\n")), command))
    purpose, flags = words[1], words[2:]
    if "kto" in flags:
        purpose = "kto"
    config = configure(purpose, write(record), model, flags)
    return lines_of(show(read(config), 0), purpose)


@pytest.mark.parametrize(
    ("record", "command", "expected"),
    EXAMPLES,
    ids=[f"{number} {command.split()[1]}" for number, (_, command, _) in enumerate(EXAMPLES, start=1)],
)
def test_an_example_is_read_as_the_document_says(record, command, expected, model, vision_model, write, tmp_path):
    if "--data.max_images_per_prompt" in command:
        model = vision_model
        image(1).save(tmp_path / "cat.png")
    assert shown_as(json.loads(record), command, model, write) == expected.splitlines()


def test_the_document_has_an_example_of_every_command():
    assert {command.split()[1] for _, command, _ in EXAMPLES} == {"sft", "rm", "dpo", "rl"}


def test_the_command_shows_what_is_learnt(model, write, capsys):
    """The output that the document quotes, for this file and model."""
    quoted = re.search(r"```console\n\$ [^\n]*\n(.*?)```\n", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    data = write({"chosen": "Q: 2+3= A: 5 of course", "rejected": "Q: 2+3= A: 6"})
    assert run([data, "--model", model]) == 0
    assert capsys.readouterr().out == quoted[1].replace("pairs.jsonl", "data.jsonl")


def test_what_is_left_out_or_cut_is_counted_and_recognised_keys_are_said(model, write, capsys):
    answer = {"role": "assistant", "content": "the cat is an animal"}
    chats = [[{"role": "user", "content": "q"}, {**answer, "content": text}] for text in ("a", "", "the cat " * 40)]
    assert run([write(*({"messages": chat} for chat in chats)), "--model", model, "--data.max_len", "80"]) == 0
    out = capsys.readouterr().out
    assert "read as with --data.input_key messages --data.apply_chat_template" in out
    assert "Cut at --data.max_len 80: 1. Left out: 1 (1 have an empty answer)." in out


def test_errors_are_one_line_that_says_what_to_give(model, write, capsys):
    data = write({"prompt": "q"})
    assert run([data]) == 2
    assert capsys.readouterr().err.startswith("error: --model is missing: the folder or Hub name of the model")
    assert run([data, "--model", model, "--as", "sft"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("note: --data.dataset: its records have the keys prompt; read as with")
    assert said[1].startswith("error: --data.dataset, record 1 of data.jsonl: its 'prompt' is one text")
    assert run([data, "--model", model, "--data.max_len", "0"]) == 2
    assert "--data.max_len 0" in capsys.readouterr().err
    assert run(["nothing.jsonl", "--model", model]) == 1
    assert "there is no file nothing.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("purpose", ["sft", "rl"])
def test_a_limit_holds_for_training_and_evaluation_data(model, write, purpose):
    from openrlhf.runs.rl_assembly import prompts_of
    from openrlhf.runs.supervised_assembly import samples_of

    data = write(*({"input": f"q{i}", "output": "a"} for i in range(9)))
    flags = ["--data.max_samples", "3", "--eval.dataset", data]
    if purpose == "rl":
        config = configure(purpose, data, model, [*flags, "--remote_rm_url", "r.py"])
    else:
        config = configure(purpose, data, model, [*flags, "--data.output_key", "output"])
    of = prompts_of if purpose == "rl" else samples_of
    made = read(config).tokenizer
    assert [len(of(config, made, evaluation=evaluation)) for evaluation in (False, True)] == [3, 3]


@pytest.mark.parametrize(
    ("record", "flags", "purpose"),
    [
        ({"chosen": "a", "rejected": "b"}, [], "dpo"),
        ({"good": "a", "bad": "b"}, ["--data.chosen_key", "good"], "dpo"),
        ({"prompt": "q", "completion": "a", "label": 1}, [], "kto"),
        ({"prompt": "q", "completion": "a"}, [], "sft"),
        ({"q": "q", "a": "a"}, ["--output_key=a"], "sft"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [], "sft"),
        ({"messages": [{"role": "user", "content": "q"}]}, [], "rl"),
        ({"input": "q", "label": "a"}, [], "rl"),
    ],
)
def test_what_a_record_is_for(record, flags, purpose):
    assert guess(record, flags) == purpose


IMAGES = ("--data.max_images_per_prompt", "2")


def test_images_are_listed_with_their_tokens_and_thumbnails(vision_model, write, tmp_path, capsys, monkeypatch):
    """Two records show the first image: one file. `to` is the index after its last token."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number in (1, 2):
        image(number, width=80, height=64).save(tmp_path / f"{number}.png")
    data = write(
        {"input": "Is <image> a cat, or <image>?", "images": ["1.png", "2.png"]},
        {"input": "And <image>?", "images": "1.png"},
    )
    assert run([data, "--model", vision_model, *IMAGES]) == 0
    out = capsys.readouterr().out
    assert "Is <|vision_start|>[image 1: 80 tokens]<|vision_end|> a cat, or <|vision_start|>[image 2: 80 tokens]" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("image ")]
    assert [row[:6] for row in rows] == [["image", number, "80", "×", "64", "80"] for number in ("1", "2", "1")]
    assert [int(row[7]) - int(row[6]) for row in rows] == [80, 80, 80]
    assert rows[0][8] == rows[2][8] != rows[1][8]
    (folder,) = tmp_path.glob("openrlhf-check-*")
    assert {path.name for path in folder.iterdir()} == {row[8] for row in rows}
    assert out.endswith("3 images read, none of them broken.\n")


@pytest.mark.parametrize(
    ("words", "record"),
    [
        (("--as", "rl"), {"input": "Is <image>?"}),
        (("--as", "dpo"), {"prompt": "Is <image>?", "chosen": " yes", "rejected": " no"}),
    ],
)
def test_every_broken_image_is_named(vision_model, write, tmp_path, capsys, words, record):
    """A truncated one too, which a run would meet in the middle of training, whatever the key is called."""
    image(1, width=80, height=64).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:3000])
    (tmp_path / "text.png").write_text("no image")
    names = ["whole.png", *["whole.png"] * 40, "cut.png", "gone.png", "text.png"]
    data = write(*({**record, "image": name} for name in names))
    assert run([data, "--model", vision_model, *words, *IMAGES]) == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": image 1: ")[0] for line in said] == [f"error: record {n} of data.jsonl" for n in (42, 43, 44)]
    assert "truncated" in said[0]
    assert "there is no image file gone.png" in said[1]
    assert "is no image" in said[2]
