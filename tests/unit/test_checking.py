"""What `openrlhf check` makes of files, tokens and numbers."""

import asyncio
import dataclasses
import io

import pytest
import torch
from agent_files import HEAD, env
from PIL import Image
from prepared_images import png, prepared
from scripted_engine import CharTokenizer
from small_sections import loading

from openrlhf.agents.base import Episode
from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.user_calls import UserFileError
from openrlhf.checking.agent_check import PlayedEpisode, agent_warnings
from openrlhf.checking.display import Display, reward_summary, shown, told_apart
from openrlhf.checking.image_display import half_blocks
from openrlhf.checking.options import Kind, kinds_of
from openrlhf.checking.reward_check import Answer, JudgedPrompt, reward_warnings, written_answers
from openrlhf.checking.workbench import END, builtin_prompts, make_model, make_tokenizer, write_tiny_model
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_policy, load_tokenizer
from openrlhf.observability.turns import SegmentReader, Span, spans
from openrlhf.rewards.base import Reward
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import FinishReason, Generation, ImageInput, PlacedImage, Prompt, SamplingParams

PROMPT = Prompt(ordinal=0, text="ask", label="5")

# ---------------------------------------------------------------------------------------------- which kind of file


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("def reward_func(queries): ...", [Kind.REWARD]),
        ("async def reward_func(queries): ...", [Kind.REWARD]),
        ("from functools import partial as reward_func", [Kind.REWARD]),
        ("try:\n    reward_func = print\nexcept OSError: pass", [Kind.REWARD]),
        (HEAD + env(), [Kind.AGENT]),
        (HEAD + env() + "\nreward_func = len\n", [Kind.REWARD, Kind.AGENT]),
        ("from neighbour import *", [Kind.REWARD]),
        ("globals()['reward_func'] = len", [Kind.REWARD]),
    ],
)
def test_a_file_is_what_it_defines(tmp_path, source, kinds):
    (tmp_path / "neighbour.py").write_text("def reward_func(queries): ...")
    (tmp_path / "file.py").write_text(source)
    assert asyncio.run(kinds_of(tmp_path / "file.py", start_timeout=30)) == kinds


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", "file.py defines neither reward_func nor AgentExecutor; it has nothing"),
        ("def reward(queries): ...\nLIMIT = 3", "it has LIMIT, reward. Expected: a reward file defines reward_func("),
        ("def f():\n    reward_func = 1", "defines neither"),
        ("reward_func", "file.py:1: NameError: name 'reward_func' is not defined (while the file was loaded)"),
        ("x = (", "file.py:1: SyntaxError: '(' was never closed"),
        ("import os; os._exit(3)", "could not be loaded: the process ended with exit code 3 while it loaded"),
    ],
)
def test_a_file_that_is_neither_is_refused_in_one_line(tmp_path, source, text):
    (tmp_path / "file.py").write_text(source)
    with pytest.raises(UserFileError) as refused:
        asyncio.run(kinds_of(tmp_path / "file.py", start_timeout=30))
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_can_be_loaded_for_it_so_that_imports_that_fail_are_found(tmp_path):
    (tmp_path / "file.py").write_text("import nosuchmodule\ndef reward_func(queries): ...")
    assert asyncio.run(kinds_of(tmp_path / "file.py", start_timeout=30)) == [Kind.REWARD]
    with pytest.raises(UserFileError, match=r"file\.py:1: ModuleNotFoundError: No module named 'nosuchmodule'"):
        asyncio.run(kinds_of(tmp_path / "file.py", start_timeout=30, load=True))


# ---------------------------------------------------------------------------------------------- the tiny model


def test_the_tiny_tokenizer_reads_and_writes_every_text():
    tokenizer = make_tokenizer()
    for text in ("2 + 3 = 5\n", "déjà vu, 日本 🙂", f"<|im_start|>user\nhi{END}"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_built_in_prompts_come_in_a_chat_template_too():
    plain, chat = builtin_prompts(), builtin_prompts(make_tokenizer())
    assert chat[0].text == f"<|im_start|>user\n{plain[0].text}<|im_end|>\n<|im_start|>assistant\n"
    assert all(int(prompt.label) > 0 for prompt in plain)


@pytest.mark.parametrize("images", [False, True])
def test_the_tiny_model_speaks_printable_characters_and_comes_to_an_end(images):
    """Its bias makes them likely whatever it reads: P(printable) > 0.99, and P(end) is about 1 in 24 tokens."""
    tokenizer = make_tokenizer(images=images)
    model = make_model(tokenizer, images=images).eval()
    ids = tokenizer("What is 2 + 3? 日本", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        probs_TV = model(ids).logits[0].softmax(-1)
    printable = [
        i for i in range(len(tokenizer)) if tokenizer.decode([i]).isprintable() and i != tokenizer.eos_token_id
    ]
    end_T = probs_TV[:, tokenizer.eos_token_id]
    assert (probs_TV[:, printable].sum(-1) + end_T > 0.99).all()
    assert ((end_T > 0.005) & (end_T < 0.3)).all()
    assert probs_TV.std(0).max() > 1e-3  # what it says depends on what it has read


def test_the_tiny_model_reads_images(tmp_path):
    """28 × 28 pixels to a token, 4 at least and 64 at most; what it says depends on the image."""
    write_tiny_model(tmp_path, images=True)
    tokenizer = load_tokenizer(tmp_path)
    processor = ImageProcessor.load(tmp_path, tokenizer)
    sizes = [(28, 28), (84, 56), (3000, 2000)]
    assert [len(processor.prepare(Image.new("RGB", size))) for size in sizes][:2] == [4, 6]
    assert len(processor.prepare(Image.new("RGB", sizes[2]))) in range(40, 65)
    engine = EmbeddedEngine(load_policy(tmp_path, loading()).model, tokenizer, max_model_len=256)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    logprobs = []
    for colour in ("red", "blue"):
        ids, placed = processor.expand(text, [processor.prepare(Image.new("RGB", (84, 56), colour))])
        logprobs.append(asyncio.run(engine.generate(ids, SamplingParams(max_tokens=1, seed=1), images=placed)).logprobs)
    assert logprobs[0] != logprobs[1]


# ---------------------------------------------------------------------------------------------- rewards


def test_the_verdict_says_what_was_tried():
    """Two calls, five rewards from 0 to 1."""
    assert reward_summary([judged(0, 1), judged(0.5, 0, 0)]) == (
        "reward_func was called 2 times, once for each prompt, and returned 5 rewards from 0 to 1. "
        "A run takes the file with --reward.remote_url."
    )
    assert "returned 1 reward of 0.25, a score for each." in reward_summary([judged(0.25, score=1)])


def judged(*rewards: float, score: float | None = None, seconds: float = 0.01, written: bool = False) -> JudgedPrompt:
    return JudgedPrompt(
        prompt=PROMPT,
        answers=tuple(Answer(text="5", written=written) for _ in rewards),
        rewards=tuple(Reward(reward=reward, score=score) for reward in rewards),
        seconds=seconds,
    )


@pytest.mark.parametrize(
    ("calls", "warnings"),
    [
        ([judged(0, 1), judged(0, 0)], []),
        ([judged(0, 0), judged(0, 0)], ["all 4 rewards are 0: nothing can be learned"]),
        ([judged(2, 2, written=True)], ["all 2 rewards are 2, right answers included"]),
        ([judged(0, 0), judged(1, 1)], ["the samples of a prompt always get the same reward"]),
        ([judged(0, 11, -30)], ["2 of 3 rewards are outside [-10, 10], such as -30"]),
        ([judged(0, 1, score=50)], ["2 of 2 scores are outside [0, 1], such as 50"]),
        ([judged(0, 1, seconds=1.5)], ["a call took 1.5 s"]),
    ],
)
def test_odd_rewards(calls, warnings):
    found = reward_warnings(calls)
    assert len(found) == len(warnings)
    for part, text in zip(warnings, found, strict=True):
        assert part in text


def test_equal_rewards_may_come_of_missing_labels():
    """A prompt without a label has the label "", which `label in response` finds everywhere."""
    unlabelled = Prompt(ordinal=0, text="ask", label="")
    every = "every label is empty: is --label_key missing?"
    assert every in reward_warnings([dataclasses.replace(judged(1, 1), prompt=unlabelled)])[0]
    assert every not in reward_warnings([judged(1, 1)])[0]
    for reward in (0.0, 1.0):
        played = [dataclasses.replace(episode("1", reward=reward), prompt=unlabelled)] * 2
        assert every in agent_warnings(played, CharTokenizer(), max_steps=2)[0]


def test_right_answers_are_written_for_plain_labels_only():
    assert [a.text for a in written_answers(5, eos="<e>")] == ["5<e>", r"The answer is \boxed{5}.<e>"]
    assert all(a.written for a in written_answers("Paris", eos=""))
    for label in ("", " ", None, True, {"answer": 5}, [5]):
        assert written_answers(label, eos="") == []


# ---------------------------------------------------------------------------------------------- episodes


def episode(
    *turns: str,
    prompt="ask",
    rewards=(),
    feedback="\nNo. ",
    logprobs=True,
    truncated=False,
    reward: float | None = 1.0,
    unmatched_ranges=0,
) -> PlayedEpisode:
    """The prompt, then turns with feedback between them, one token per character; every log-prob is −0.5."""
    recorder = TokenRecorder([ord(c) for c in prompt])
    for index, text in enumerate(turns):
        if index:
            recorder.append_observation([ord(c) for c in feedback])
        ids = [ord(c) for c in text]
        recorder.append_action(
            Generation(
                token_ids=ids,
                logprobs=[-0.5] * len(ids) if logprobs else None,
                versions=[0] * len(ids),
                finish_reason=FinishReason.STOP,
            )
        )
        recorder.reward_turn(rewards[index] if rewards else 0.0)
    made = Episode(
        segments=(recorder.segment(),), text="", truncated=truncated, reward=reward, unmatched_ranges=unmatched_ranges
    )
    return PlayedEpisode(prompt=PROMPT, sample=0, episode=made)


def test_spans_are_the_runs_of_the_action_mask():
    """a s k | 1 2 | - | 3: three prompt tokens, two turns with their rewards, one token of feedback."""
    (segment,) = episode("12", "3", rewards=(0.25, 1.0), feedback="-").episode.segments
    assert spans(segment, SegmentReader(CharTokenizer())) == [
        Span(start=0, end=3, action=False, text="ask"),
        Span(start=3, end=5, action=True, text="12", reward=0.25, logprob=-0.5),
        Span(start=5, end=6, action=False, text="-"),
        Span(start=6, end=7, action=True, text="3", reward=1.0, logprob=-0.5),
    ]


def test_turns_of_a_silent_environment_are_told_apart():
    (segment,) = episode("12", "3", rewards=(0.0, 1.0), feedback="").episode.segments
    assert [(span.text, span.reward) for span in spans(segment, SegmentReader(CharTokenizer())) if span.action] == [
        ("12", 0),
        ("3", 1),
    ]


@pytest.mark.parametrize(
    ("episodes", "warnings"),
    [
        ([episode("1", "2"), episode("1", reward=0.0)], []),
        ([episode("1", reward=0.0), episode("2", reward=0.0)], ["no episode earned anything: all 2 rewards are 0"]),
        ([episode("1"), episode("2")], ["all 2 episodes earned 1: nothing can be learned"]),
        ([episode("1", reward=None), episode("2")], ["1 of 2 episodes have no reward of their own"]),
        ([episode("1", reward=-11.0), episode("2")], ["1 of 2 rewards are outside [-10, 10], such as -11"]),
        ([episode("1", "2", truncated=True)], ["no episode was ever done: all 1 met this check's limit of 2 turns"]),
        ([episode("1", "2", truncated=True), episode("2", reward=0.0)], []),
        ([episode("1", truncated=True)], []),  # it met another limit
        ([episode("1", "2", feedback="Try again.")], ["feedback ends in 'Try again.'"]),
        ([episode("1", "2", feedback=">")], []),
        ([episode("one.", "2", feedback="")], []),
        ([episode("1", "2", prompt="§ask§", feedback="No: ")], ["feedback 'No: ' has none of the turn markers"]),
        ([episode("1", "2", prompt="§ask§", feedback="§No§")], []),
        ([episode("1", logprobs=False)], ["some actions have no log-probs"]),
        ([episode("1", unmatched_ranges=2)], ["2 action ranges were not sampled by llm_engine.generate"]),
    ],
)
def test_odd_episodes(episodes, warnings):
    found = agent_warnings(episodes, CharTokenizer(), max_steps=2)
    assert len(found) == len(warnings), found
    for part, text in zip(warnings, found, strict=True):
        assert part in text


# ---------------------------------------------------------------------------------------------- display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "action"),
    [(io.StringIO(), "ask⟦12⟧-⟦3⟧"), (Terminal(), "\x1b[1;30;42m12\x1b[0m")],
    ids=["pipe", "terminal"],
)
def test_sampled_tokens_are_marked_in_a_pipe_and_coloured_on_a_terminal(tmp_path, monkeypatch, file, action):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    Display(file).episodes(tmp_path / "agent.py", [episode("12", "3", feedback="-")], CharTokenizer())
    assert action in file.getvalue()
    assert ("⟦" in file.getvalue()) is not file.isatty()


def seeing(*images: ImageInput) -> PlayedEpisode:
    """The images before the prompt "ask", each followed by a dash, then an answer."""
    prompt, placed = "", []
    for image in images:
        placed.append(PlacedImage(len(prompt), image))
        prompt += "#" * len(image) + "-"
    one = episode("12", prompt=prompt + "ask")
    (segment,) = one.episode.segments
    segment = dataclasses.replace(segment, images=tuple(placed))
    return dataclasses.replace(one, episode=dataclasses.replace(one.episode, segments=(segment,)))


def seen(seed: int, tokens: int) -> ImageInput:
    return prepared(seed, tokens=tokens, placeholder=ord("#"), width=3, height=4)


def test_images_are_marked_and_listed_with_their_places_and_files(tmp_path, monkeypatch):
    """In a pipe. The same image twice is one file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, two = seen(1, 5), seen(2, 7)
    file = io.StringIO()
    Display(file).episodes(tmp_path / "agent.py", [seeing(one, two, one), episode("3")], CharTokenizer())
    text = file.getvalue()
    assert "[image 1: 5 tokens]-[image 2: 7 tokens]-[image 1: 5 tokens]-ask⟦12⟧" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("image ")]
    (folder,) = tmp_path.glob("openrlhf-check-*")
    assert rows == [
        ["image", "1", "30", "×", "40", "5", "0", "5", f"{1:032x}.png"],
        ["image", "2", "30", "×", "40", "7", "6", "13", f"{2:032x}.png"],
        ["image", "1", "30", "×", "40", "5", "14", "19", f"{1:032x}.png"],
    ]
    assert f"(the thumbnails are in {folder})" in text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        f"{image.digest}.png": image.thumbnail for image in (one, two)
    }
    assert [line.split()[3] for line in text.splitlines() if line.startswith("ask ")] == ["3", "0"]


@pytest.mark.parametrize(
    ("variables", "draws"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, True),
        ({"TERM": "xterm-256color", "COLORTERM": ""}, True),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb", "COLORTERM": ""}, False),
    ],
)
def test_a_terminal_with_colours_draws_images(tmp_path, monkeypatch, variables, draws):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    Display(file).episodes(tmp_path / "agent.py", [seeing(seen(1, 5))], CharTokenizer())
    assert ("▀" in file.getvalue()) is draws
    assert bool(list(tmp_path.glob("openrlhf-check-*"))) is not draws


def test_half_blocks_are_the_pixels_two_by_two():
    """3 × 4 pixels, enlarged 6 times to 24 lines: each pixel is 6 columns and 3 rows."""
    picture = Image.new("RGB", (3, 4), "#000000")
    picture.putpixel((1, 0), (255, 0, 0))
    picture.putpixel((1, 3), (0, 0, 255))
    text = half_blocks(png(picture), 36)
    assert [len(line) for line in text.plain.split("\n")] == [18] * 12
    styles = {span.start: str(span.style) for span in text.spans}
    assert styles[0] == "#000000 on #000000"
    assert [styles[column] for column in (5, 6, 11, 12)] == [
        "#000000 on #000000", "#ff0000 on #ff0000", "#ff0000 on #ff0000", "#000000 on #000000",
    ]  # fmt: skip
    assert styles[11 * 19 + 6] == "#0000ff on #0000ff"


def test_half_blocks_of_large_and_flat_pictures_fit():
    assert half_blocks(png(Image.new("RGB", (192, 1))), 36).plain == "▀" * 36
    assert len(half_blocks(png(Image.new("RGB", (192, 108))), 36).plain.split("\n")) == 10  # 20.25 lines of pixels
    assert half_blocks(png(Image.new("RGB", (1, 192))), 36).plain == "\n".join("▀" * 12)


def test_check_display_escapes_terminal_codes():
    assert shown("a\nb\x1b[2J\x00é", 99) == "a⏎b\\x1b[2J\\x00é"
    assert shown("a\nb", 99, lines=True) == "a\nb"
    assert shown("0123456789", 4) == "01 … 89"


def test_prompts_of_a_table_are_told_apart():
    chat = [f"<|user|>\nWhat is {sum}?<|end|>\n<|assistant|>" for sum in ("2 + 3", "4 + 3", "2 + 3")]
    assert told_apart(chat) == ["What is 2 + 3?", "What is 4 + 3?", "What is 2 + 3?"]
    assert told_apart(["a\nb", "a\nbb\nb"]) == ["b", "bb\nb"]
    assert told_apart(chat[:1] * 2) == chat[:1] * 2
