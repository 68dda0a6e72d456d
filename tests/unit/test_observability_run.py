"""What a run leaves on disk can be read, whatever moment it ended at."""

import contextlib
import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from prepared_images import prepared

from openrlhf.config import parse
from openrlhf.data.files import DataError
from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines
from openrlhf.observability.loggers import CompositeLogger, JsonlLogger, NullLogger, read_metrics, without_times
from openrlhf.observability.rollout_log import RolloutLog
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.observability.turns import TurnReader
from openrlhf.observability.watchdog import Watchdog
from openrlhf.runs.process import Observers, observed
from openrlhf.types import Group, ImageInput, Outcome, PlacedImage, Prompt, SampleKey, Segment, Trajectory


def test_a_run_directory_is_never_shared(tmp_path: Path):
    wanted = tmp_path / "runs" / "demo"
    runs = [RunDirectory.create(wanted, {"seed": seed}) for seed in range(3)]
    assert [run.path.name for run in runs] == ["demo", "demo-2", "demo-3"]
    assert [yaml.safe_load(run.config.read_text())["seed"] for run in runs] == [0, 1, 2]
    assert runs[0].metrics == wanted / "metrics.jsonl"
    assert not runs[0].model.exists()


def test_runs_that_start_together_get_a_directory_each(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda seed: RunDirectory.create(tmp_path / "demo", {"seed": seed}), range(16)))
    assert len({run.path for run in runs}) == 16
    assert [yaml.safe_load(run.config.read_text())["seed"] for run in runs] == list(range(16))


def test_a_directory_without_a_run_is_taken_and_a_resumed_one_continued(tmp_path: Path):
    """Inputs that were put there beforehand do not make it a run."""
    (tmp_path / "demo" / "inputs").mkdir(parents=True)
    first = RunDirectory.create(tmp_path / "demo", {})
    again = RunDirectory.create(tmp_path / "demo", {"seed": 1}, reuse=True)
    assert first.path == again.path == tmp_path / "demo"


def test_a_file_in_the_way_names_the_flag(tmp_path: Path):
    (tmp_path / "demo").write_text("")
    with pytest.raises(NotADirectoryError, match=r"--logger\.run_dir"):
        RunDirectory.create(tmp_path / "demo", {})


def test_config_is_plain_yaml(tmp_path: Path):
    """Paths, tuples, enums and sets become what every YAML reader knows; nested sections stay nested."""
    config = {"actor": {"model": Path("/m"), "betas": (0.9, 0.95)}, "outcome": Outcome.FAILED, "names": {"b", "a"}}
    run = RunDirectory.create(tmp_path / "demo", config)
    assert yaml.safe_load(run.config.read_text()) == {
        "actor": {"model": "/m", "betas": [0.9, 0.95]},
        "outcome": "failed",
        "names": ["a", "b"],
    }


def test_metrics_lines(tmp_path: Path):
    seconds = iter([10.0, 12.5, 13.0])
    logger = JsonlLogger(tmp_path / "metrics.jsonl", now=lambda: next(seconds))
    logger.log(1, {"reward": 0.5, "policy_loss": math.nan, "timing/generation": 2.0})
    logger.log(1, {"eval_default_pass1": 0.25}, kind="eval")
    # Read before close: every line is on disk when log() returns.
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "kind": "train", "time": 2.5, "reward": 0.5, "policy_loss": None, "timing/generation": 2.0},
        {"step": 1, "kind": "eval", "time": 3.0, "eval_default_pass1": 0.25},
    ]
    logger.close()


def test_times_can_be_told_from_results():
    record = {"step": 1, "time": 2.0, "reward": 0.5, "timing/generation": 1.0, "perf/tokens_per_second": 9.0}
    assert without_times(record) == {"step": 1, "reward": 0.5}


@pytest.mark.parametrize(
    "tail", ['{"step": 3, "kind": "tr', '{"step": 3, "kind": "train", "reward": 0.\n', "\x00\n", "[1]\n"]
)
def test_half_a_line_is_passed_over_and_the_file_goes_on(tmp_path: Path, tail: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train", "time": 7.0}\n{"step": 2, "kind": "train", "time": 8.0}\n' + tail)
    assert [record["step"] for record in read_json_lines(path)] == [1, 2]
    logger = JsonlLogger(path, now=lambda: 0.0)
    logger.log(3, {})
    logger.close()
    records = list(read_json_lines(path))
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[-1]["time"] == 8.0, "time goes on from where the run stopped"


def test_a_whole_line_without_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}')
    writer = JsonLinesWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    with pytest.raises(ValueError, match="closed"):
        writer.write({})


def test_a_long_half_line_is_cut_off_whole(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"step": 1}\n{"text": "' + "x" * 200_000)
    JsonLinesWriter(path).close()
    assert path.read_text() == '{"step": 1}\n'


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path):
    """The process ends without any clean-up; each line it wrote is there."""
    path = tmp_path / "x.jsonl"
    code = (
        "import os, sys, pathlib\n"
        "from openrlhf.observability.jsonl import JsonLinesWriter\n"
        "writer = JsonLinesWriter(pathlib.Path(sys.argv[1]))\n"
        "for step in range(100): writer.write({'step': step, 'text': 'é' * 5000})\n"
        "assert 'torch' not in sys.modules\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 9
    assert [record["step"] for record in read_json_lines(path)] == list(range(100))


def test_a_missing_file_is_empty(tmp_path: Path):
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_history_after_a_resume(tmp_path: Path):
    """Steps 1 – 4, killed, resumed from the checkpoint of step 2, killed in step 4: the old 3 and 4 are gone."""
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    written = [("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]
    for kind, step in written:
        writer.write({"step": step, "kind": kind, "life": 1})
    writer.write({"step": 3, "kind": "train", "life": 2})
    writer.write({"step": "?", "kind": "train"})
    writer.close()
    history = [(r["kind"], r["step"], r["life"]) for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert history == [("eval", 0, 1), ("train", 1, 1), ("train", 2, 1), ("eval", 2, 1), ("train", 3, 2)]


class RecordingLogger:
    def __init__(self, *, error: str = "") -> None:
        self.events: list = []
        self.error = error

    def log(self, step, metrics, *, kind="train"):
        self.events.append((kind, step, dict(metrics)))

    def close(self):
        self.events.append("close")
        if self.error:
            raise OSError(self.error)


def test_several_loggers_hear_the_same_and_all_are_closed():
    first, second = RecordingLogger(error="disk full"), RecordingLogger()
    logger = CompositeLogger([first, NullLogger(), second])
    logger.log(3, {"reward": 1.0}, kind="eval")
    with pytest.raises(ExceptionGroup, match="did not close"):
        logger.close()
    assert first.events == second.events == [("eval", 3, {"reward": 1.0}), "close"]


def group(ordinal: int, samples: int, *, failed: int = 0) -> Group:
    """`samples` finished samples "4", "5", … of "2+2=" and then `failed` failed ones."""
    segment = Segment(
        token_ids=torch.tensor([1, 2, 3]),
        action_mask=torch.tensor([False, True, True]),
        rollout_logprobs=None,
        versions=torch.tensor([-1, 0, 0], dtype=torch.int32),
        turn_rewards=torch.zeros(3),
    )
    finished = [
        Trajectory(
            key=SampleKey(ordinal, i),
            segments=(segment,),
            outcome=Outcome.FINISHED,
            text=f"2+2={4 + i}",
            reward=float(i == 0),
            score=float(i == 0),
        )
        for i in range(samples)
    ]
    broken = [
        Trajectory(
            key=SampleKey(ordinal, samples + i), segments=(), outcome=Outcome.FAILED, error="reward.py:3 KeyError"
        )
        for i in range(failed)
    ]
    return Group(prompt=Prompt(ordinal=ordinal, text="2+2=", label="4"), trajectories=(*finished, *broken))


class CharacterTokenizer:
    """Token i is the character with that number; `markers` are single tokens, from 1000 on."""

    def __init__(self, *markers: str) -> None:
        self.added_tokens_encoder = {marker: 1000 + i for i, marker in enumerate(markers)}
        self._texts = {number: marker for marker, number in self.added_tokens_encoder.items()}

    def encode(self, text: str) -> list[int]:
        pieces = re.split("(" + "|".join(map(re.escape, self._texts.values() or ["\0"])) + ")", text)
        marked = self.added_tokens_encoder
        return [number for piece in pieces for number in ([marked[piece]] if piece in marked else map(ord, piece))]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(self._texts.get(number) or chr(number) for number in ids)


def history(tokenizer: CharacterTokenizer, *parts: str | ImageInput | tuple[str, float], version: int = 0) -> Segment:
    """A plain text or an image was read, a pair was said and earned that much; action k is of version `version` + k."""
    ids, mask, rewards, versions, images = [], [], [], [], []
    for part in parts:
        text, reward = part if isinstance(part, tuple) else (part, None)
        if isinstance(text, ImageInput):
            images.append(PlacedImage(len(ids), text))
        own = list(text.token_ids) if isinstance(text, ImageInput) else tokenizer.encode(text)
        ids += own
        mask += [reward is not None] * len(own)
        rewards += [0.0] * (len(own) - 1) + [reward or 0.0]
        versions += [-1 if reward is None else version] * len(own)
        version += reward is not None
    return Segment(
        token_ids=torch.tensor(ids),
        action_mask=torch.tensor(mask),
        rollout_logprobs=None,
        versions=torch.tensor(versions, dtype=torch.int32),
        turn_rewards=torch.tensor(rewards),
        images=tuple(images),
    )


def episode(ordinal: int, sample: int, *segments: Segment, reward: float | None = 0.0, **fields) -> Trajectory:
    fields = {"outcome": Outcome.FINISHED, "text": "ask", "score": reward} | fields
    return Trajectory(key=SampleKey(ordinal, sample), segments=segments, reward=reward, **fields)


def rewarded(ordinal: int, *rewards: float | None) -> Group:
    """A sample for each reward; None has failed."""
    segment = history(CharacterTokenizer(), "ask", ("yes", 0.0))
    members = [
        episode(ordinal, i, reward=None, outcome=Outcome.FAILED, error="it broke")
        if reward is None
        else episode(ordinal, i, segment, reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(prompt=Prompt(ordinal=ordinal, text="ask", label="yes"), trajectories=tuple(members))


def logged(path: Path, *steps: list[Group], tokenizer: CharacterTokenizer | None = None, **options) -> list[dict]:
    log = RolloutLog(path, tokenizer or CharacterTokenizer(), **options)
    for step, groups in enumerate(steps, start=1):
        log.write(step, groups)
    log.close()
    return list(read_json_lines(path))


def test_rollout_records(tmp_path: Path):
    """What readers of the file have always had, then the step, the group and the turns."""
    records = logged(tmp_path / "rollouts.jsonl", [group(5, 1, failed=1)])
    shared = {"step": 1, "prompt_ordinal": 5, "prompt": "2+2=", "label": "4"}
    chosen = {"choice": "typical", "group_reward": 1.0, "group_samples": 2, "step_reward": 1.0, "step_samples": 1}
    assert records == [
        shared
        | {"sample": 0, "response": "4", "reward": 1.0, "score": 1.0, "response_length": 2}
        | {"outcome": "finished", "error": "", **chosen}
        | {
            "turns": [
                {"role": "prompt", "action": False, "text": "\x01", "tokens": 1},
                {
                    "role": "assistant",
                    "action": True,
                    "text": "\x02\x03",
                    "tokens": 2,
                    "reward": 0.0,
                    "versions": [0],
                },
            ]
        },
        shared
        | {"sample": 1, "response": "", "reward": None, "score": None, "response_length": 0}
        | {"outcome": "failed", "error": "reward.py:3 KeyError", "turns": [], **chosen},
    ]


def test_the_best_the_worst_and_typical_groups_are_kept_whoever_finished_first(tmp_path: Path):
    """Seven groups of mean 0 … 6: of four places the ranks 0, 2, 4 and 6 have them. The means are of all seven."""
    groups = [rewarded(ordinal, ordinal - 0.5, ordinal + 0.5) for ordinal in range(7)]
    for name, order in (("a", groups), ("b", groups[3:] + groups[:3])):
        records = logged(tmp_path / name, order)
        assert [(r["choice"], r["prompt_ordinal"]) for r in records[::2]] == [
            ("best", 6), ("typical", 4), ("typical", 2), ("worst", 0),
        ]  # fmt: skip
        assert [r["sample"] for r in records] == [0, 1] * 4
        assert {r["step_reward"] for r in records} == {3.0}
        assert {r["step_samples"] for r in records} == {14}
        assert records[0]["group_reward"] == 6.0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("places", "kept"), [(0, []), (1, [2]), (2, [4, 0]), (3, [4, 2, 0]), (5, [4, 3, 2, 1, 0]), (9, [4, 3, 2, 1, 0])]
)
def test_rollout_log_keeps_so_many_groups_of_a_step(tmp_path: Path, places: int, kept: list[int]):
    records = logged(tmp_path / "rollouts.jsonl", [rewarded(i, float(i)) for i in range(5)], groups=places)
    assert [r["prompt_ordinal"] for r in records] == kept


def test_groups_that_earned_the_same_are_neither_best_nor_worst(tmp_path: Path):
    records = logged(tmp_path / "rollouts.jsonl", [rewarded(i, 1.0) for i in range(9)])
    assert {r["choice"] for r in records} == {"typical"}
    assert [r["prompt_ordinal"] for r in records] == [0, 2, 5, 8]


def test_of_many_samples_the_best_and_the_worst_are_kept_and_one_that_failed(tmp_path: Path):
    """Rewards 0 … 9 at ranks 9 … 0: of three places ranks 0, 4 and 9; the fourth is for the first that failed."""
    records = logged(tmp_path / "rollouts.jsonl", [rewarded(0, *map(float, range(10)), None, None)])
    assert [(r["sample"], r["reward"]) for r in records] == [(0, 0.0), (5, 5.0), (9, 9.0), (10, None)]
    assert {r["group_samples"] for r in records} == {12}


def test_a_group_with_failures_has_the_place_of_a_typical_one(tmp_path: Path):
    """Group 1 is not among ranks 0, 2, 4 and 6; the most failures are in it. Nothing but failures is kept too."""
    groups = [rewarded(i, 6.0 - i, *[None] * (2 if i == 1 else 0)) for i in range(7)]
    records = logged(tmp_path / "a", [groups[i] for i in (3, 1, 0, 2, 6, 5, 4)])
    assert list(dict.fromkeys((r["choice"], r["prompt_ordinal"]) for r in records)) == [
        ("best", 0), ("typical", 2), ("failed", 1), ("worst", 6),
    ]  # fmt: skip
    assert [r["choice"] for r in logged(tmp_path / "b", [rewarded(3, None, None)])] == ["failed"] * 2


def test_rewards_that_are_no_numbers_rank_last(tmp_path: Path):
    records = logged(tmp_path / "rollouts.jsonl", [rewarded(0, math.nan), rewarded(1, -5.0), rewarded(2, 1.0)])
    assert [r["prompt_ordinal"] for r in records] == [2, 1, 0]


CHAT = ("<|im_start|>", "<|im_end|>")
OPENING = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nGuess!<|im_end|>\n<|im_start|>assistant\n"


def test_turns_have_roles_tokens_rewards_and_versions(tmp_path: Path):
    """ChatML: a mark is one token. The opening of an action counts for the message before it."""
    tokenizer = CharacterTokenizer(*CHAT)
    feedback = "\n<|im_start|>user\n<tool_response>low</tool_response><|im_end|>\n<|im_start|>assistant\n"
    segment = history(tokenizer, OPENING, ("7<|im_end|>", 0.1), feedback, ("9<|im_end|>", 0.9), version=3)
    one = Group(prompt=Prompt(ordinal=0, text=OPENING), trajectories=(episode(0, 0, segment, reward=1.0),))
    (record,) = logged(tmp_path / "rollouts.jsonl", [one], tokenizer=tokenizer)
    system, user, tool = len("1system\nBe kind.2\n"), len("1user\nGuess!2\n1assistant\n"), None
    tool = len("\n1user\n<tool_response>low</tool_response>2\n1assistant\n")
    assert record["turns"] == [
        {"role": "system", "action": False, "text": "Be kind.", "tokens": system},
        {"role": "user", "action": False, "text": "Guess!", "tokens": user},
        {"role": "assistant", "action": True, "text": "7<|im_end|>", "tokens": 2, "reward": 0.1, "versions": [3]},
        {"role": "tool", "action": False, "text": "<tool_response>low</tool_response>", "tokens": tool},
        {"role": "assistant", "action": True, "text": "9<|im_end|>", "tokens": 2, "reward": 0.9, "versions": [4]},
    ]
    assert sum(turn["tokens"] for turn in record["turns"]) == len(segment)


@pytest.mark.parametrize(
    ("marks", "text", "turns"),
    [
        (
            ("<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<bos><|start_header_id|>ipython<|end_header_id|>\n\n42<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            [("tool", "42")],
        ),
        (
            ("<bos>", "<start_of_turn>", "<end_of_turn>"),
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n<start_of_turn>model\n",
            [("user", "Hi"), ("assistant", "Ho")],
        ),
        (("<s>", "[INST]", "[/INST]"), "<s>[INST] Hi [/INST]", [("user", "Hi")]),
        (("<|user|>", "<|end|>", "<|assistant|>"), "<|user|>\nHi<|end|>\n<|assistant|>\n", [("user", "Hi")]),
        (
            ("<|start|>", "<|message|>", "<|end|>"),
            "<|start|>developer<|message|>Be kind<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant",
            [("system", "Be kind"), ("user", "Hi")],
        ),
        (CHAT, "<|im_start|>assistant\n<think>\n", [("assistant", "<think>")]),
        (CHAT, "no mark at all", [("prompt", "no mark at all")]),
        ((), "User: Hi\nAssistant: ", [("prompt", "User: Hi\nAssistant: ")]),
        (("<|image_pad|>",), "<|image_pad|>" * 300 + "What is it?", [("prompt", "<|image_pad|>×300What is it?")]),
    ],
)
def test_messages_of_known_templates(marks: tuple[str, ...], text: str, turns: list[tuple[str, str]]):
    """Every token counts for one turn."""
    tokenizer = CharacterTokenizer(*marks)
    segment = history(tokenizer, text, ("yes", 1.0))
    *observed, action = TurnReader(tokenizer).turns([segment])
    assert [(turn.role, turn.text) for turn in observed] == turns
    assert (action.role, action.text, action.tokens) == ("assistant", "yes", 3)
    assert sum(turn.tokens for turn in observed) == len(segment) - 3


SEEING = CharacterTokenizer(*CHAT, "<|image_pad|>")
"""Its images are runs of the last token."""


def seen(seed: int, tokens: int = 5, **size: int) -> ImageInput:
    return prepared(seed, tokens=tokens, placeholder=SEEING.added_tokens_encoder["<|image_pad|>"], **size)


def test_an_image_is_one_mark_at_its_place():
    """Adjacent images, one at the end, the same one twice; every place is where the mark stands in the turn's text."""
    head, tail = "<|im_start|>user\n Look: ", "<|im_end|>\n<|im_start|>assistant\n"
    segment = history(
        *(SEEING, head, seen(1), seen(2, 300), " and ", seen(1), tail, ("yes", 1.0)),
        *("\n<|im_start|>user\n", seen(3, 1), tail, ("no", 0.0)),
    )
    turns = TurnReader(SEEING).turns([segment])
    assert [turn.text for turn in turns] == [
        "Look: [image 1: 5 tokens][image 2: 300 tokens] and [image 1: 5 tokens]",
        "yes",
        "[image 3: 1 token]",
        "no",
    ]
    assert [[image.placed.image.digest[-1] for image in turn.images] for turn in turns] == [
        ["1", "2", "1"],
        [],
        ["3"],
        [],
    ]
    for turn in turns:
        for image in turn.images:
            assert turn.text[image.at :].startswith(image.mark)
            assert segment.token_ids[image.placed.start : image.placed.end].tolist() == [*image.placed.image.token_ids]
    assert sum(turn.tokens for turn in turns) == len(segment)


def test_marks_keep_their_places_without_a_template_and_beside_text_that_looks_like_one():
    segment = history(SEEING, "not [image 1: 5 tokens] but ", seen(1), ("yes", 1.0))
    prompt, _ = TurnReader(SEEING).turns([segment])
    assert prompt.text == "not [image 1: 5 tokens] but [image 1: 5 tokens]"
    assert [image.at for image in prompt.images] == [28]


def test_a_history_with_another_image_is_not_the_same():
    """Both texts are equal, and so are the numbers of tokens. The second keeps its number in a third segment."""
    parts = [(SEEING, "<|im_start|>user\n", seen(seed), "What?<|im_end|>\n") for seed in (1, 2, 2)]
    turns = TurnReader(SEEING).turns([history(*part, ("yes", 0.0)) for part in parts])
    assert [(turn.role, turn.text[:9], turn.segment) for turn in turns if not turn.action] == [
        ("user", "[image 1:", 0),
        ("user", "[image 2:", 1),
        ("history", "", 2),
    ]


def test_turns_without_marks_are_actions_then_environment():
    tokenizer = CharacterTokenizer()
    turns = TurnReader(tokenizer).turns([history(tokenizer, "ask", ("5", 0.0), " no: ", ("6", 1.0), " yes")])
    assert [turn.role for turn in turns] == ["prompt", "assistant", "environment", "assistant", "environment"]


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        ("", []),
        ("\n<|im_start|>user\nYes!<|im_end|>\n<|im_start|>assistant\n", [("user", "Yes!")]),
        (" Yes!", [("environment", " Yes!")]),
    ],
)
def test_the_last_feedback_is_a_turn_that_nobody_read(tail: str, told: list[tuple[str, str]]):
    """No token of it was recorded: it is in the episode's text alone."""
    tokenizer = CharacterTokenizer(*CHAT)
    segment = history(tokenizer, OPENING, ("7<|im_end|>", 1.0))
    turns = TurnReader(tokenizer).turns([segment], text=f"{OPENING}7<|im_end|>{tail}")
    assert [(turn.role, turn.text) for turn in turns[3:]] == told
    assert sum(turn.tokens for turn in turns) == len(segment)
    assert TurnReader(tokenizer).turns([segment], text="another text") == turns[:3]


def test_a_later_segment_does_not_repeat_what_it_has_in_common():
    """The client dropped nothing, but its first answer is read again, as part of the history."""
    tokenizer = CharacterTokenizer(*CHAT)
    later = OPENING + "7<|im_end|>\n<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"
    first, second = history(tokenizer, OPENING, ("7<|im_end|>", 0.0)), history(tokenizer, later, ("9<|im_end|>", 1.0))
    turns = TurnReader(tokenizer).turns([first, second])
    assert [(turn.segment, turn.role, turn.text) for turn in turns] == [
        (0, "system", "Be kind."),
        (0, "user", "Guess!"),
        (0, "assistant", "7<|im_end|>"),
        (1, "history", ""),
        (1, "user", "low"),
        (1, "assistant", "9<|im_end|>"),
    ]
    assert sum(turn.tokens for turn in turns) == len(first) + len(second)


def test_long_texts_lose_their_middle_and_say_how_much(tmp_path: Path):
    """32,000 characters: 10 and 3 stay whole, so the action has 31,987, two thirds of them from its beginning."""
    tokenizer = CharacterTokenizer()
    segment = history(tokenizer, "a" * 10, ("b" * 100_000, 1.0), "c" * 3)
    prompt = Prompt(ordinal=0, text="p" * 50_000, label={"answer": "l" * 50_000})
    text = prompt.text + "r" * 50_000
    one = Group(prompt=prompt, trajectories=(episode(0, 0, segment, text=text),))
    (record,) = logged(tmp_path / "rollouts.jsonl", [one], tokenizer=tokenizer)
    assert [turn["text"] for turn in record["turns"]] == [
        "a" * 10,
        "b" * 21_324 + " … 68,014 characters left out … " + "b" * 10_662,
        "ccc",
    ]
    assert record["turns"][1]["tokens"] == 100_000
    for field in ("prompt", "response", "label"):
        assert "characters left out" in record[field]
        assert len(record[field]) < 32_100


def test_of_very_many_turns_the_middle_is_left_out(tmp_path: Path):
    """250 answers and as many replies: 100 turns at each end; 151 answers and 150 replies or the other way round."""
    tokenizer = CharacterTokenizer()
    segment = history(tokenizer, "ask", *[("x", 1.0), "no"] * 250)
    one = Group(prompt=Prompt(ordinal=0, text="ask"), trajectories=(episode(0, 0, segment, reward=250.0),))
    (record,) = logged(tmp_path / "rollouts.jsonl", [one], tokenizer=tokenizer)
    turns = record["turns"]
    assert len(turns) == 201
    gap = turns[100]
    assert (gap["role"], gap["turns"]) == ("left out", 301)
    assert sum(turn["tokens"] for turn in turns) == len(segment)
    assert sum(turn.get("reward", 0) for turn in turns) == 250


def test_a_large_file_keeps_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the first line on every third step, from the fourth line on every tenth."""
    line = len(json.dumps(logged(tmp_path / "one", [rewarded(0, 1.0)])[0])) + 1
    monkeypatch.setattr("openrlhf.observability.rollout_log.THINNED", ((1, 3), (3 * line + 3, 10)))
    records = logged(tmp_path / "many", *[[rewarded(0, 1.0)]] * 40)
    assert [r["step"] for r in records] == [1, 3, 6, 9, 10, 20, 30, 40]


# ------------------------------------------------------------------------------------------------- while a run goes on


@contextlib.contextmanager
def running(tmp_path: Path) -> Iterator[tuple[RunDirectory, Observers]]:
    config = parse("train_ppo_ray", ["--pretrain", "m", "--prompt_data", "p"])
    run = RunDirectory.create(tmp_path / "demo", {})
    with Watchdog(stall_seconds=0) as watching, observed(config, run, watching, steps=2, title="demo") as seen:
        yield run, seen


def test_a_run_has_its_page_from_the_beginning_and_says_where(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with running(tmp_path) as (run, seen):
        assert "step 0 of 2" in run.report.read_text()
        assert str(run.report) in caplog.messages[-1]
        seen.logger.log(1, {"reward": 0.5})
        page = run.report.read_text()
        assert "step 1 of 2" in page
        assert ">running</span>" in page
        assert len(caplog.messages) == 2
    assert caplog.messages[-1] == f"report: {run.report}"
    page = run.report.read_text()
    assert ">finished</span>" in page
    assert "data-refresh=" not in page.split("<script>")[0]


def test_a_run_that_fails_says_why_on_its_page(tmp_path: Path):
    def fail() -> None:
        with running(tmp_path) as (_, seen):
            seen.progress.note("continues from step 3")
            raise DataError("record 3 is <broken>")

    with pytest.raises(DataError):
        fail()
    page = (tmp_path / "demo" / "report.html").read_text()
    assert ">failed</span>" in page
    assert "<b>The run failed.</b> record 3 is &lt;broken&gt;" in page
    assert "continues from step 3" in page


def test_a_run_that_is_interrupted_says_so(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), running(tmp_path) as (run, _):
        raise KeyboardInterrupt
    assert ">interrupted</span>" in run.report.read_text()


def test_rollouts_name_the_thumbnails_of_their_images(tmp_path: Path):
    """Eight samples over two steps see one image: one file. The last turn's image is another."""
    segment = history(SEEING, "See ", seen(1), "!", ("yes", 1.0), seen(2), ("no", 0.0))
    members = [episode(0, sample, segment) for sample in range(4)]
    one = Group(prompt=Prompt(ordinal=0, text="See <|image_pad|>!"), trajectories=tuple(members))
    records = logged(tmp_path / "rollouts.jsonl", [one], [one], tokenizer=SEEING)
    assert len(records) == 8
    files = {f"rollout_images/{1:032x}.png": seen(1), f"rollout_images/{2:032x}.png": seen(2)}
    assert {str(path.relative_to(tmp_path)) for path in (tmp_path / "rollout_images").iterdir()} == set(files)
    assert all((tmp_path / name).read_bytes() == image.thumbnail for name, image in files.items())
    shown = {"tokens": 5, "size": [240, 160]}
    first, second = (
        [image | shown for image in ({"number": n, "at": a, "start": at, "file": file},)]
        for n, a, at, file in zip((1, 2), (4, 0), (4, 13), files, strict=True)
    )
    for record in records:
        assert [turn.get("images") for turn in record["turns"]] == [first, None, second, None]
        assert record["turns"][0]["text"] == "See [image 1: 5 tokens]!"


def test_a_resumed_run_adds_to_the_thumbnails(tmp_path: Path):
    """The second life repeats step 1 and sees a new image. What the first left half-written is no picture."""
    path = tmp_path / "rollouts.jsonl"
    for seeds in ((1,), (1, 2)):
        segment = history(SEEING, "See ", *map(seen, seeds), ("yes", 1.0))
        logged(
            path,
            [Group(prompt=Prompt(ordinal=0, text="See"), trajectories=(episode(0, 0, segment),))],
            tokenizer=SEEING,
        )
        (tmp_path / "rollout_images" / f"{7:032x}.99.partial").write_bytes(b"half")
    pictures = (tmp_path / "rollout_images").glob("*.png")
    assert sorted(file.stem for file in pictures) == [f"{1:032x}", f"{2:032x}"]


def test_of_very_many_images_the_first_and_the_last_have_thumbnails(tmp_path: Path):
    """60 of them: 24 at each end are kept. The others keep their marks."""
    segment = history(SEEING, *(seen(seed, width=2, height=2) for seed in range(1, 61)), ("yes", 1.0))
    one = Group(prompt=Prompt(ordinal=0, text="See"), trajectories=(episode(0, 0, segment),))
    (record,) = logged(tmp_path / "rollouts.jsonl", [one], tokenizer=SEEING)
    images = record["turns"][0]["images"]
    assert [image["number"] for image in images if image["file"] is None] == [*range(25, 37)]
    assert len(list((tmp_path / "rollout_images").iterdir())) == 48
    assert all(record["turns"][0]["text"].startswith(f"[image {i['number']}: ", i["at"]) for i in images)


def test_marks_are_found_in_a_text_whose_middle_was_left_out(tmp_path: Path):
    """The place of an image in the middle is not known any more; its thumbnail is."""
    segment = history(SEEING, seen(1), "x" * 40_000, seen(2), "y" * 40_000, seen(3), ("yes", 1.0))
    one = Group(prompt=Prompt(ordinal=0, text="See"), trajectories=(episode(0, 0, segment),))
    (record,) = logged(tmp_path / "rollouts.jsonl", [one], tokenizer=SEEING)
    turn = record["turns"][0]
    first, middle, last = turn["images"]
    assert (first["at"], middle["at"]) == (0, None)
    assert turn["text"][last["at"] :] == "[image 3: 5 tokens]"
    assert all(image["file"] for image in turn["images"])


def test_thumbnails_count_for_what_a_log_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From 2,000 bytes on one step of ten is kept; the lines alone have less."""
    monkeypatch.setattr("openrlhf.observability.rollout_log.THINNED", ((2_000, 10),))
    segment = history(SEEING, seen(1, width=40, height=40), ("yes", 1.0))
    one = Group(prompt=Prompt(ordinal=0, text="See"), trajectories=(episode(0, 0, segment),))
    records = logged(tmp_path / "rollouts.jsonl", *[[one]] * 10, tokenizer=SEEING)
    assert [record["step"] for record in records] == [1, 10]
    assert (tmp_path / "rollouts.jsonl").stat().st_size < 2_000
