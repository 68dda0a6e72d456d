"""The report page: whatever the run left, one page that needs nothing else."""

import json
import logging
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_images import prepared

from openrlhf.cli.main import main
from openrlhf.config import parse
from openrlhf.config.schema import to_dict
from openrlhf.observability.charts import Axis, Curve, Point, bounds, short_number, smoothed, visible_range
from openrlhf.observability.comparison import write_comparison
from openrlhf.observability.jsonl import JsonLinesWriter
from openrlhf.observability.loggers import JsonlLogger
from openrlhf.observability.report import LiveReport, write_report
from openrlhf.observability.rollout_log import spread
from openrlhf.observability.run_directory import NoteLog, RunDirectory, read_notes
from openrlhf.observability.thumbnails import FOLDER, ThumbnailFolder

CONFIG = {"actor": {"model_name_or_path": "/models/Qwen/Qwen3-0.6B"}, "algo": {"advantage": {"estimator": "rloo"}}}


class Page(HTMLParser):
    """The page as a browser understands it."""

    VOID = frozenset({"meta", "input", "br", "link", "img", "path", "rect", "line", "circle", "image", "use"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def charts(self) -> dict[str, dict]:
        """Data behind each chart by its title."""
        drawings = [attrs for tag, attrs in self.tags if tag == "svg" and "shot" not in (attrs.get("class") or "")]
        titles = [attrs["aria-label"] for attrs in drawings if "aria-label" in attrs]
        data = [json.loads(attrs["data-chart"]) for tag, attrs in self.tags if "data-chart" in attrs]
        return dict(zip(titles, data, strict=True))

    def check(self) -> None:
        """Well-formed, self-contained, and no undefined number in any drawing."""
        assert self.open == []
        for tag, attrs in self.tags:
            assert not {"src", "srcset"} & set(attrs), f"<{tag}> loads something"
            href = attrs.get("href") or "#"
            picture = tag == "image" and re.fullmatch(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=]+", href)
            assert href.startswith("#") or picture, f"<{tag}> leads elsewhere"
            assert not any(name.startswith("on") for name in attrs)
            for name in ("d", "x", "y", "x1", "cx", "cy", "height"):
                assert "nan" not in (attrs.get(name) or "")
                assert "inf" not in (attrs.get(name) or "")
        assert not re.search(r"url\(|@import|https?:", self.source)
        assert len(self.source.encode()) < (5_000_000 if 'class="album"' in self.source else 3_000_000)

    @property
    def shots(self) -> list[tuple[str, int, int]]:
        """What is said of each image that is seen, and how large it is, in the order of the page."""
        shots = [attrs for tag, attrs in self.tags if tag == "svg" and "shot" in (attrs.get("class") or "")]
        return [(attrs["aria-label"], int(attrs["width"]), int(attrs["height"])) for attrs in shots]


def report(run: RunDirectory, **options: str) -> Page:
    page = Page(write_report(run.path, **options))
    page.check()
    return page


def write_metrics(run: RunDirectory, records: list[tuple[str, int, dict]]) -> None:
    logger = JsonlLogger(run.metrics)
    for kind, step, metrics in records:
        logger.log(step, metrics, kind=kind)
    logger.close()


def rollout(step: int, sample: int = 0, **fields) -> dict:
    record = {"step": step, "prompt_ordinal": step, "sample": sample, "prompt": "2+2=", "response": "4", "label": "4"}
    record |= {"reward": 1.0, "score": 1.0, "response_length": 1, "outcome": "finished", "error": ""}
    return record | fields


def write_rollouts(run: RunDirectory, records: list[dict]) -> None:
    writer = JsonLinesWriter(run.rollouts)
    for record in records:
        writer.write(record)
    writer.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "demo", CONFIG)


def test_a_whole_run(run: RunDirectory):
    """20 steps, reward 0.00, 0.05 … 0.95; evaluations 0.1 → 0.9 win over rewards in the summary."""
    records: list[tuple[str, int, dict]] = [("eval", 0, {"eval_default_pass1": 0.1})]
    for step in range(1, 21):
        times = {"timing/generation": 3.0, "timing/ppo_train": 1.0, "timing/step_total": 5.0}
        metrics = {"reward": (step - 1) / 20, "policy_loss": 0.1, "my_extra_log": 2.0, "perf/tokens_per_second": 1000.0}
        records.append(("train", step, metrics | times))
    records.append(("eval", 20, {"eval_default_pass1": 0.9}))
    write_metrics(run, records)
    write_rollouts(run, [rollout(step, response=f"answer of {step}") for step in range(1, 21)])
    page = report(run)
    assert "0.100 → 0.900" in page.text
    assert "Steps 20" in page.text
    assert "Estimator rloo" in page.text
    assert "Model Qwen/Qwen3-0.6B" in page.text
    assert list(page.charts) == [
        "Reward",
        "Evaluation (pass@1)",
        "Policy loss",
        "Tokens per second",
        "Time per step",
        "my_extra_log",
    ]
    assert page.charts["Reward"]["series"][0]["points"][0][:2] == [1, 0.0]
    assert page.charts["Time per step"]["names"] == ["generation", "training", "other"]
    assert page.charts["Time per step"]["bars"][0]["heights"] == [3.0, 1.0, 1.0]
    assert "generation 60%" in page.text
    shown = [attrs["data-step"] for tag, attrs in page.tags if tag == "template"]
    assert shown == [str(step) for step in range(1, 21)]
    assert "Early step" in page.text
    assert page.source.count("answer of 10<") == 2, "the middle step stands in its column and in its template"
    assert "estimator: rloo" in page.text
    links = [attrs["href"].removeprefix("#") for tag, attrs in page.tags if tag == "a"]
    assert links == ["learning", "update", "speed", "rollouts", "settings"]
    assert links == [attrs["id"] for tag, attrs in page.tags if tag == "section" and "id" in attrs]


def test_report_summary_uses_rewards_without_evaluations(run: RunDirectory):
    """First and last tenth of 20 steps: (0 + 1) / 2 and (18 + 19) / 2."""
    write_metrics(run, [("train", step + 1, {"reward": float(step)}) for step in range(20)])
    assert "0.500 → 18.500 first → last 2 steps" in report(run).text


def test_report_summary_uses_the_loss_without_rewards(run: RunDirectory):
    """Of a loss less is better: the colour says so."""
    write_metrics(run, [("train", step, {"gpt_loss": 4.0 - step}) for step in (1, 2)])
    page = report(run)
    assert "Loss 3.000 → 2.000 first → last 1 step" in page.text
    assert '<em class="up">2.000' in page.source


def test_an_empty_folder(tmp_path: Path):
    page = Page(write_report(tmp_path))
    page.check()
    assert "No step was finished" in page.text
    assert page.charts == {}


@pytest.mark.parametrize("steps", [0, 1, 2, 9, 10, 11])
def test_few_steps(run: RunDirectory, steps: int):
    records = [("eval", 0, {"eval_default_pass1": 0.1})]
    records += [("train", s, {"reward": 0.5, "timing/step_total": 1.0, "timing/a": 0.5}) for s in range(1, steps + 1)]
    write_metrics(run, records)
    write_rollouts(run, [rollout(s) for s in range(1, steps + 1)])
    page = report(run, status="interrupted")
    assert f"Steps {steps}" in page.text
    assert "interrupted" in page.text


def test_half_written_files(run: RunDirectory):
    write_metrics(run, [("train", 1, {"reward": 0.5}), ("train", 2, {"reward": 0.6})])
    write_rollouts(run, [rollout(1), rollout(2)])
    for path in (run.metrics, run.rollouts):
        path.write_bytes(path.read_bytes()[:-20])
    run.config.write_text("actor: {model_name_or_path: [")
    page = report(run)
    assert "Steps 1" in page.text
    assert [attrs["data-step"] for tag, attrs in page.tags if tag == "template"] == ["1"]


def test_numbers_that_are_not_finite_are_shown_as_such(run: RunDirectory):
    values = [0.1, math.nan, 0.3, math.inf, 0.5]
    metrics = [
        ("train", i, {"policy_loss": v, "reward": math.nan, "timing/step_total": math.nan})
        for i, v in enumerate(values)
    ]
    write_metrics(run, metrics)
    page = report(run)
    assert [point[1] for point in page.charts["Policy loss"]["series"][0]["points"]] == [0.1, None, 0.3, None, 0.5]
    assert "2 values were not finite" in page.text
    assert "5 values were not finite" in page.text


def test_metrics_of_odd_types_are_ignored(run: RunDirectory):
    write_metrics(run, [("train", 1, {"reward": "high", "flag": True, "list": [1], "kl": 3})])  # type: ignore[dict-item]
    assert list(report(run).charts) == ["KL to the reference"]


ATTACK = "</script></template><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{config}}"


def test_report_escapes_all_text_of_a_run(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "<b>demo&", {"model": ATTACK, "algo": {"advantage": {"estimator": ATTACK}}})
    write_metrics(run, [("train", s, {ATTACK: 1.0, f"timing/{ATTACK}": 1.0}) for s in (1, 2)])
    write_metrics(run, [("eval", 1, {f"eval_{ATTACK}": 1.0, f"eval_{ATTACK}2": 1.0})])
    fields = ("prompt", "response", "label", "outcome", "error", "prompt_ordinal", "response_length")
    said = {"role": ATTACK, "text": ATTACK, "tokens": ATTACK, "reward": ATTACK, "versions": [ATTACK], "segment": ATTACK}
    group = dict.fromkeys(("choice", "group_reward", "group_samples", "step_reward", "step_samples"), ATTACK)
    write_rollouts(run, [rollout(1, **dict.fromkeys(fields, ATTACK)), rollout(2, label=[ATTACK], reward=ATTACK)])
    write_rollouts(run, [rollout(3, turns=[said, said | {"action": True}, said, said | {"action": True}], **group)])
    notes = NoteLog(run.notes)
    for kind in ("start", "note", "warning", "end"):
        notes.write(kind, f"failed: {ATTACK}")
    notes.close()
    page = report(run, status=ATTACK)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in [tag for tag, _ in page.tags]
    assert ATTACK in "".join(page.words), "it is shown as it is"
    assert ATTACK in page.charts


@settings(deadline=None)
@given(st.text(max_size=200))
def test_report_shows_any_text_unchanged(tmp_path_factory: pytest.TempPathFactory, text: str):
    run = RunDirectory.create(tmp_path_factory.mktemp("run") / "demo", {})
    write_rollouts(run, [rollout(1, response=text)])
    report(run)


def test_an_episode_is_shown_as_its_turns(run: RunDirectory):
    """A prompt of two messages is shown once; actions are marked, and have what they earned."""
    opening = [
        {"role": "system", "action": False, "text": "Be kind.", "tokens": 5},
        {"role": "user", "action": False, "text": "Guess!", "tokens": 4},
    ]
    first = [
        {"role": "assistant", "action": True, "text": "seven<|im_end|>", "tokens": 2, "reward": 0.0, "versions": [3]},
        {"role": "tool", "action": False, "text": "too low", "tokens": 3},
        {"role": "assistant", "action": True, "text": "nine", "tokens": 1, "reward": 0.9, "versions": [3, 4]},
    ]
    second = [*first[:2], {**first[2], "text": "ten", "reward": -0.5}]
    common = {"choice": "best", "group_reward": 0.2, "group_samples": 8, "step_reward": 0.05, "step_samples": 64}
    records = [
        rollout(1, 0, turns=[*opening, *second], reward=-0.5, response_length=3, outcome="truncated", **common),
        rollout(1, 1, turns=[*opening, *first], reward=0.9, response_length=3, **common),
    ]
    write_rollouts(run, [r | {"prompt_ordinal": 7} for r in records])
    page = report(run)
    shown = page.text[page.text.index("mean reward") :]
    assert shown.startswith(
        "mean reward 0.050 of all 64 samples best prompt 7 · 2 of 8 samples · mean 0.2 "
        "system 5 tokens Be kind. user 4 tokens Guess! 4 "
        "0.9 2 turns · 3 tokens · score 1 · weights v3–4 "
        "assistant 2 tokens 0 seven <|im_end|> tool 3 tokens too low assistant 1 token +0.9 nine "
        "-0.5 2 turns · 3 tokens · score 1 · truncated · weights v3–4 "
        "assistant 2 tokens 0 seven <|im_end|> tool 3 tokens too low assistant 1 token -0.5 ten"
    )
    classes = [attrs.get("class") for tag, attrs in page.tags if tag == "div"]
    assert classes.count("turn act") == 2 * 4, "in the column and in the template"
    assert classes.count("turn obs") == 2 * 4
    opened = [("open" in attrs) for tag, attrs in page.tags if (attrs.get("class") or "").startswith("response many")]
    assert opened == [True, False] * 2


def with_images(run: RunDirectory, step: int, text: str, *images: dict, sample: int = 0) -> dict:
    """A rollout whose prompt is this text. An image of a `seed` has a thumbnail; other entries stand as they are."""
    listed = []
    for number, image in enumerate(images, start=1):
        if (seed := image.pop("seed", None)) is not None:
            path = ThumbnailFolder(run.path / FOLDER).add(
                prepared(seed, tokens=5, placeholder=9, **image.pop("of", {}))
            )
            image = {"file": f"{FOLDER}/{path.name}", "size": [240, 160]} | image
        listed.append({"number": number, "tokens": 5} | image)
    turns = [
        {"role": "user", "action": False, "text": text, "tokens": 9, "images": listed},
        {"role": "assistant", "action": True, "text": "yes", "tokens": 1, "reward": 1.0, "versions": [0]},
    ]
    return rollout(step, sample, turns=turns)


def test_images_stand_beside_their_text(run: RunDirectory):
    """The mark at its place is set back, text that looks like it is not; small pictures are enlarged by whole numbers."""
    text = "[image 1: 5 tokens] is text: [image 1: 5 tokens] [image 2: 5 tokens]"
    small, large = {"width": 24, "height": 16}, {"width": 192, "height": 96}
    images = [{"seed": 1, "at": 29, "of": small}, {"seed": 2, "at": 49, "of": large}]
    write_rollouts(run, [with_images(run, 1, text, *images)])
    page = report(run)
    marks = re.findall(r'<span class="mark">(.*?)</span>', page.source)
    assert marks == ["[image 1: 5 tokens]", "[image 2: 5 tokens]"] * 2  # once in the column, once to choose from
    assert "[image 1: 5 tokens] is text: [image 1: 5 tokens] [image 2: 5 tokens]" in page.text
    told = [("image 1, 240 × 160 pixels, 5 tokens", 48, 32), ("image 2, 240 × 160 pixels, 5 tokens", 128, 64)]
    assert page.shots == told * 2
    assert "image 1 · 240 × 160" in page.text


def test_an_image_is_in_the_page_once_however_often_it_is_seen(run: RunDirectory, tmp_path: Path):
    """Of 12 samples in 3 steps; also where the folder was copied elsewhere."""
    text = "[image 1: 5 tokens]"
    write_rollouts(
        run, [with_images(run, step, text, {"seed": 1, "at": 0}, sample=i) for step in (1, 2, 3) for i in range(4)]
    )
    shutil.copytree(run.path, tmp_path / "copy")
    shutil.rmtree(run.path)
    page = report(RunDirectory(tmp_path / "copy"))
    assert [tag for tag, _ in page.tags].count("image") == 1
    assert len(page.shots) == 6
    uses = {attrs["href"] for tag, attrs in page.tags if tag == "use"}
    assert uses == {f"#{attrs['id']}" for tag, attrs in page.tags if tag == "image"}


@pytest.mark.parametrize(
    "image",
    [
        {"file": None, "at": 0},
        {"file": f"{FOLDER}/{5:032x}.png", "at": 0},
        {"file": "../../etc/passwd", "at": 0},
        {"file": '"><script>alert(1)</script>', "at": None, "size": ['"><script>', "'"]},
        {"file": 7, "at": "0", "size": "large"},
        {"file": ["x"], "at": -3},
        {"file": None, "at": 1e9, "tokens": 5.5},
    ],
)
def test_images_without_a_picture_keep_their_mark(run: RunDirectory, image: dict):
    write_rollouts(run, [with_images(run, 1, "[image 1: 5 tokens]", image)])
    page = report(run)
    assert page.shots == []
    assert "[image 1: 5 tokens]" in page.text
    assert "not on this page" in page.text
    assert "<script>alert" not in page.source


@pytest.mark.parametrize("images", ["none", 5, [None, "x", {}, {"number": 1}, {"number": "1", "tokens": 5}]])
def test_images_that_cannot_be_read_are_left_out(run: RunDirectory, images):
    record = with_images(run, 1, "hello")
    record["turns"][0]["images"] = images
    write_rollouts(run, [record])
    page = report(run)
    assert "hello" in page.text
    assert "image" not in page.text


@pytest.mark.parametrize(("room", "sides", "all_there"), [(400_000, {"128"}, True), (41_000, {"64"}, False)])
def test_of_many_images_a_page_has_smaller_pictures(run: RunDirectory, monkeypatch, room, sides, all_there):
    """Noise, which nothing makes small: 20 of 192 × 192. Those of the steps that are seen at once come first."""
    monkeypatch.setattr("openrlhf.observability.rollout_samples.MOST_PICTURE_BYTES", room)
    of = {"width": 192, "height": 192}
    images = [{"seed": seed, "at": None, "of": of} for seed in range(20)]
    write_rollouts(run, [with_images(run, step, "hello", *images[step * 4 : step * 4 + 4]) for step in range(5)])
    page = report(run)
    pictures = [attrs for tag, attrs in page.tags if tag == "image"]
    assert {attrs["width"] for attrs in pictures} == sides
    assert sum(len(attrs["href"]) for attrs in pictures) <= room
    assert ("not on this page" not in page.text) is all_there
    columns = page.source.split("<template")[0]
    assert "not on this page" not in columns


def test_openings_that_differ_are_shown_with_their_episodes(run: RunDirectory):
    """An environment's reset drew another room for each sample."""
    records = [
        rollout(1, i, prompt="enter", prompt_ordinal=7, turns=[
            {"role": "prompt", "action": False, "text": f"room {i}", "tokens": 2},
            {"role": "assistant", "action": True, "text": "go", "tokens": 1, "reward": 0.0, "versions": [0]},
        ])
        for i in (1, 2)
    ]  # fmt: skip
    write_rollouts(run, records)
    page = report(run)
    assert page.source.count("<pre>enter<") == 2, "once in the column, once in the template"
    assert "prompt 2 tokens room 1 assistant 1 token go" in page.text
    assert "prompt 2 tokens room 2 assistant 1 token go" in page.text


def test_segments_and_what_was_left_out_of_an_episode_are_named(run: RunDirectory):
    act = {"role": "assistant", "action": True, "text": "go", "tokens": 1, "reward": 0.0, "versions": [0]}
    turns = [
        {"role": "prompt", "action": False, "text": "ask", "tokens": 1},
        act,
        {"role": "left out", "action": False, "text": "", "tokens": 500, "turns": 300, "reward": 2.5},
        act,
        {"role": "history", "action": False, "text": "", "tokens": 40, "segment": 1},
        act | {"segment": 1},
    ]
    write_rollouts(run, [rollout(1, turns=turns)])
    text = report(run).text
    assert "153 turns" in text
    assert "500 tokens +2.5 … 300 turns left out …" in text
    assert "history rewritten: token sequence 2 history 40 tokens … the same as before …" in text


def test_the_mean_of_a_step_is_of_all_its_samples(run: RunDirectory):
    """Files of before do not have it: the metrics do. One sample of reward 1 is shown, 0.25 is what all earned."""
    write_metrics(run, [("train", 1, {"reward": 0.2, "rollout/reward_mean": 0.25})])
    write_rollouts(run, [rollout(1)])
    assert "mean reward 0.250" in report(run).text


def test_report_names_vllm_only_where_it_runs(tmp_path: Path):
    metrics = [("train", 1, {"vllm_kl": 0.1, "logprobs_diff": 0.2, "ppo_kl": 0.3, "timing/make_experience": 1.0})]
    for engines, title in ((0, "Engine"), (2, "vLLM")):
        run = RunDirectory.create(tmp_path / title, {"vllm": {"num_engines": engines}})
        write_metrics(run, metrics)
        page = report(run)
        assert f"{title} against trainer (nats per token)" in page.charts
        assert "vllm_kl" not in page.source
        assert ("vllm" in page.source.replace("vllm.num_engines", "").replace("vllm:", "").lower()) == (engines > 0)


def test_the_gap_between_engine_and_trainer_is_in_the_summary(tmp_path: Path):
    """The median step of those that measured it, and the largest of all."""
    gaps = [{"logprobs_diff": gap, "logprobs_diff_p99": 5 * gap, "logprobs_diff_max": 10 * gap} for gap in (0.01, 0.05)]
    steps = [gaps[0], {}, gaps[1], gaps[0]]
    for engines, name in ((0, "the engine"), (1, "vLLM")):
        run = RunDirectory.create(tmp_path / str(engines), {"vllm": {"num_engines": engines}})
        write_metrics(run, [("train", step, {"reward": 0.5, **found}) for step, found in enumerate(steps, 1)])
        told = f"Gap to {name} 0.01 nats per token, median step, 99 % below 0.05, largest 0.5"
        assert told in report(run).text
    run = RunDirectory.create(tmp_path / "older", {"vllm": {"num_engines": 0}})
    write_metrics(run, [("train", 1, {"reward": 0.5, "logprobs_diff": 1e-6})])
    assert "Gap to the engine 1e-06 nats per token, median step" in report(run).text
    run = RunDirectory.create(tmp_path / "none", {})
    write_metrics(run, [("train", 1, {"reward": 0.5})])
    assert "Gap to" not in report(run).text


def test_settings_that_were_set_are_listed(tmp_path: Path):
    config = to_dict(parse("train_ppo_ray", ["--pretrain", "m", "--prompt_data", "p", "--actor.adam.lr", "3e-7"]))
    text = report(RunDirectory.create(tmp_path / "demo", config)).text
    chosen = text[text.index("Settings that differ") : text.index("All settings")]
    assert "--actor.adam.lr 3e-07" in chosen
    assert "--actor.model_name_or_path m" in chosen
    assert "--rollout.batch_size" not in chosen


def test_warnings_and_how_a_run_failed_are_seen_at_once(run: RunDirectory):
    notes = NoteLog(run.notes)
    notes.write("start", "demo")
    notes.write("note", "continues from ckpt")
    notes.step = 12
    for _ in range(3):
        notes.write("warning", "all groups of 5 steps earned the same")
    notes.write("end", "failed: the disk is full")
    notes.close()
    page = report(run)
    assert "demo failed" in page.text
    assert "The run failed. the disk is full Warnings 1 step 12 all groups of 5 steps earned the same" in page.text
    assert "Notes 1 start continues from ckpt" in page.text
    NoteLog(run.notes).write("start", "demo")
    assert "The run failed" not in report(run).text, "it goes on again"


def test_signs_of_trouble_stand_among_the_warnings_by_step(run: RunDirectory):
    notes = NoteLog(run.notes)
    notes.step = 9
    notes.write("warning", "a reward was late")
    notes.close()
    warnings = JsonLinesWriter(run.warnings)
    warnings.write({"step": 4, "kind": "equal groups", "text": "all groups earned the same"})
    warnings.close()
    assert "Warnings 2 step 4 all groups earned the same step 9 a reward was late" in report(run).text


def test_warnings_that_parts_log_are_notes(run: RunDirectory):
    notes = NoteLog(run.notes, now=lambda: 5.0)
    with notes.hears_warnings():
        logging.getLogger("openrlhf.somewhere").warning("%d prompts are too long", 3)
        logging.getLogger("openrlhf.somewhere").info("nothing")
    logging.getLogger("openrlhf.somewhere").warning("too late")
    assert read_notes(run.notes) == [{"step": 0, "kind": "warning", "clock": 5.0, "text": "3 prompts are too long"}]


class Clock:
    """A page takes `cost` seconds to make: whoever asks twice in a row sees the time pass."""

    def __init__(self, cost: float) -> None:
        self.seconds, self.cost = 0.0, cost

    def __call__(self) -> float:
        self.seconds += self.cost / 2
        return self.seconds


def test_a_running_run_has_a_page_from_the_beginning(run: RunDirectory):
    """It says how far it is, and is loaded again, until the run ends."""
    live = LiveReport(run, steps=4, now=lambda: 0.0)
    live.start()
    page = Page(run.report)
    page.check()
    assert "demo running" in page.text
    assert "step 0 of 4" in page.text
    assert "The first step is being taken." in page.text
    assert [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "refresh"] == ["10"]
    write_metrics(run, [("train", 1, {"reward": 0.5})])
    write_rollouts(run, [rollout(1)])
    live.log(1, {"reward": 0.5})
    page = Page(run.report)
    page.check()
    assert "step 1 of 4" in page.text
    assert "Reward" in page.charts
    assert "Rollouts 1 step" in page.text
    write_rollouts(run, [rollout(2, response="late")])
    live.finish("finished")
    page = Page(run.report)
    page.check()
    assert "demo finished" in page.text
    assert "late" in page.text
    assert not [attrs for tag, attrs in page.tags if "data-refresh" in attrs or attrs.get("http-equiv") == "refresh"]


@pytest.mark.parametrize(("cost", "pages"), [(0.0, 50), (0.5, 2), (0.05, 17)])
def test_pages_take_a_hundredth_of_the_time(run: RunDirectory, monkeypatch, cost: float, pages: int):
    """100 s of steps of 1 s. A page at 0 s, one at the first step, then one each max(2 s, 100 times its cost): 2, 50,
    and 5 s, which is each sixth step, for the clock has gone on a little in the meantime."""
    clock, written = Clock(0.0), []

    def write(*args, **kwargs):
        clock.seconds += cost
        written.append(clock.seconds)

    monkeypatch.setattr("openrlhf.observability.report.write_report", write)
    live = LiveReport(run, steps=100, now=clock)
    for step in range(1, 101):
        clock.seconds = float(step)
        live.log(step, {})
    assert len(written) == pages


def test_a_page_that_cannot_be_written_is_said_once_and_ends_nothing(run: RunDirectory, caplog):
    run.report.mkdir()
    live = LiveReport(run, steps=2, now=lambda: 0.0)
    live.start()
    live.log(1, {})
    live.finish("finished")
    assert [record.getMessage() for record in caplog.records] == ["report.html could not be written"]
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "report.html"]


def test_ten_thousand_steps_of_long_answers_stay_small(run: RunDirectory):
    """A spike at step 5,000 is still in the thinned-out curve; the pathological texts are all '<' and '𝄞'."""
    lines = []
    for step in range(1, 10_001):
        metrics = {f"m{i}": step / 10_000 for i in range(8)} | {"reward": 9.0 if step == 5000 else 0.1}
        lines.append(json.dumps({"step": step, "kind": "train", "time": step, **metrics}))
    run.metrics.write_text("\n".join(lines) + "\n")
    write_rollouts(
        run, [rollout(s, i, response="<𝄞" * 4000, prompt="<" * 4000) for s in range(1, 60) for i in range(8)]
    )
    page = report(run)
    points = page.charts["Reward"]["series"][0]["points"]
    assert len(points) <= 402
    assert [5000, 9.0] in [point[:2] for point in points]
    assert "characters left out" in page.text


def test_a_resumed_run_shows_its_second_life(run: RunDirectory):
    """Steps 1 – 3, then again from 2 and no further: 3 is gone."""
    write_rollouts(run, [rollout(s, response="first life") for s in (1, 2, 3)])
    write_rollouts(run, [rollout(2, response="second life")])
    page = report(run)
    assert [attrs["data-step"] for tag, attrs in page.tags if tag == "template"] == ["1", "2"]
    assert "second life" in page.text
    assert page.source.count("first life") == 2
    write_rollouts(run, [rollout(2, i, response="third life") for i in (0, 1)])
    page = report(run)
    assert "second life" not in page.source, "killed in the step after, and the step taken again"
    assert page.source.count("third life") == 4


def test_failures_are_shown_with_their_reason(run: RunDirectory):
    failed = rollout(1, response="", reward=None, score=None, outcome="failed", error="reward.py:3 KeyError: 'x'")
    write_rollouts(run, [failed, rollout(1, 1, outcome="truncated")])
    page = report(run)
    assert "reward.py:3 KeyError: 'x'" in page.text
    assert "1 token · truncated" in page.text
    assert sum("odd" in (attrs.get("class") or "") for tag, attrs in page.tags if tag == "div") == 4


def test_writing_again_replaces_the_page_and_leaves_no_draft(run: RunDirectory):
    report(run)
    write_metrics(run, [("train", 1, {"reward": 0.5})])
    assert "Steps 1" in report(run).text
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


# ------------------------------------------------------------------------------------------------- openrlhf report


def two_runs(tmp_path: Path) -> list[RunDirectory]:
    """Twelve steps of reward 0.5 and an evaluation that fell from 0.9 to 0.8; three steps of reward 1."""
    first = RunDirectory.create(tmp_path / "a" / "run", {"algo": {"kl": {"init_coef": 0}}, "logger": {"run_dir": "a"}})
    second = RunDirectory.create(tmp_path / "b" / "run", {"algo": {"kl": {"init_coef": 0.1}}, "train": {"seed": 3}})
    evaluations = [("eval", 6, {"eval_default_pass1": 0.9}), ("eval", 12, {"eval_default_pass1": 0.8})]
    write_metrics(first, [("train", s, {"reward": 0.5}) for s in range(1, 13)] + evaluations)
    write_metrics(second, [("train", s, {"reward": 1.0, "kl": 0.25}) for s in range(1, 4)])
    return [first, second]


def test_a_report_is_made_again(run: RunDirectory, capsys):
    """Also after a kill: nobody has said how the run ended, so nothing is said."""
    write_metrics(run, [("train", 1, {"reward": 0.5})])
    NoteLog(run.notes).write("start", "demo")
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.report}\n"
    page = Page(run.report)
    page.check()
    assert "running" not in page.text
    assert main(["report", str(run.path), "--output", str(run.path / "copy.html")]) == 0
    assert (run.path / "copy.html").read_text() == page.source


def test_runs_are_compared_on_one_page(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first, second = two_runs(tmp_path)
    notes = NoteLog(first.notes)
    notes.write("end", "finished")
    notes.close()
    assert main(["report", str(first.path), str(second.path), str(first.path)]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    page = Page(tmp_path / "comparison.html")
    page.check()
    assert "2 runs a/run · b/run" in page.text
    assert "a/run finished 12 0:00 0.800 0.900 0.500" in page.text
    assert "b/run – 3 0:00 – – 1.000" in page.text
    assert "--algo.kl.init_coef 0 0.1 --train.seed unset 3" in page.text
    assert "--logger.run_dir" not in page.text
    rewards = page.charts["Reward"]["series"]
    assert [(series["name"], len(series["points"])) for series in rewards] == [("a/run", 12), ("b/run", 3)]
    assert page.charts["Reward"]["colours"] == [1, 2]
    assert page.charts["KL to the reference"]["colours"] == [2], "a run keeps its colour where the other has no curve"
    assert "Evaluation: pass@1" in page.charts


def test_runs_that_were_set_alike_and_have_no_steps_are_compared(tmp_path: Path):
    runs = [RunDirectory.create(tmp_path / name, {"seed": 1}).path for name in ("<b>", "c")]
    page = Page(write_comparison(runs, tmp_path / "page.html"))
    page.check()
    assert "All settings of these runs are the same." in page.text
    assert "No step was finished" in page.text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["."], "holds no run: it has neither config.yaml nor metrics.jsonl; there are runs in it: demo"),
        (["demo"] + [f"r{i}" for i in range(8)], "9 runs: at most 8 can be told apart on one page"),
        (["demo", "-o", "no/such/folder.html"], "No such file or directory"),
    ],
)
def test_report_of_an_unreadable_folder_is_one_line(run: RunDirectory, words, error, capsys, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    for i in range(8):
        RunDirectory.create(f"r{i}", {})
    if words == ["."]:
        for i in range(8):
            shutil.rmtree(f"r{i}")
    assert main(["report", *words]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert error in said.err
    assert said.err.count("\n") == 1


def test_the_trend_of_a_constant_is_the_constant_and_it_bridges_gaps():
    assert smoothed([2.0] * 30) == pytest.approx([2.0] * 30)
    assert smoothed([2.0, math.nan] * 15) == pytest.approx([2.0] * 30)
    assert smoothed([1.0, 2.0]) == [1.0, 2.0]


@settings(deadline=None)
@given(st.lists(st.floats(-1e9, 1e9), min_size=10, max_size=60))
def test_the_trend_does_not_lag_and_stays_inside(values: list[float]):
    """Read backwards it is the same, and it never leaves the range of the values."""
    trend = smoothed(values)
    assert trend == pytest.approx(smoothed(values[::-1])[::-1], rel=1e-6, abs=1e-3)
    room = 1e-6 * max(map(abs, values)) + 1e-9
    assert min(values) - room <= min(trend)
    assert max(trend) <= max(values) + room


def test_chart_is_not_flattened_by_one_spike():
    """99 values in [0, 1] and one 1,000: the axis covers the middle, widened by half of it."""
    values = [i % 10 / 9 for i in range(99)] + [1000.0]
    low, high = visible_range(values)
    assert (low, high) == (0.0, 1.5)
    assert visible_range([0.0, 1.0, 1000.0]) == (0.0, 1000.0)


@settings(deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(0, 1e12))
def test_axes_cover_what_they_are_for(low: float, size: float):
    axis = Axis.over(low, low + size)
    room = 1e-6 * max(abs(low), abs(low + size), 1e-300)
    assert axis.low <= low + room
    assert axis.high >= low + size - room
    assert 2 <= len(axis.ticks) <= 12


def test_axes_by_hand():
    assert Axis.over(0, 12.1).ticks == (0, 2.5, 5, 7.5, 10, 12.5)
    assert Axis.over(3, 3, whole=True).low <= 3
    assert Axis.over(math.nan, math.nan).low == 0
    assert bounds([Curve("x", (Point(1, 5.0, 5.0),))], zero=True) == (0.0, 5.0)


def test_short_numbers():
    examples = (0, 0.5, 0.01234, 12.0, 1234.5, 12345, 2_500_000, 1e-6, -0.25, math.nan)
    assert [short_number(x) for x in examples] == [
        "0",
        "0.5",
        "0.0123",
        "12",
        "1,234",
        "12.35k",
        "2.5M",
        "1e-06",
        "-0.25",
        "–",
    ]


def test_spread_keeps_the_ends():
    assert spread([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert spread([1, 2], 3) == [1, 2]
    assert spread(list(range(100)), 5) == [0, 24, 49, 74, 99]
