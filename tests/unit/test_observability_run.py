"""What a run leaves on disk can be read, whatever moment it ended at."""

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines
from openrlhf.observability.loggers import CompositeLogger, JsonlLogger, NullLogger, read_metrics, without_times
from openrlhf.observability.rollout_log import RolloutLog
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory


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


def written(path: Path) -> list[tuple[int, int]]:
    return [(record["prompt_ordinal"], record["sample"]) for record in read_json_lines(path)]


def test_rollout_records(tmp_path: Path):
    log = RolloutLog(tmp_path / "rollouts.jsonl")
    log.write(7, [group(5, 1, failed=1)])
    log.close()
    shared = {"step": 7, "prompt_ordinal": 5, "prompt": "2+2=", "label": "4"}
    assert list(read_json_lines(tmp_path / "rollouts.jsonl")) == [
        shared
        | {"sample": 0, "response": "4", "reward": 1.0, "score": 1.0, "response_length": 2}
        | {"outcome": "finished", "error": ""},
        shared
        | {"sample": 1, "response": "", "reward": None, "score": None, "response_length": 0}
        | {"outcome": "failed", "error": "reward.py:3 KeyError"},
    ]


def test_whole_groups_are_chosen_whoever_finished_first(tmp_path: Path):
    """8 places: groups 2 (3 samples) and 4 (3) fit, 6 (3) does not, and 9 (1) is not pulled forward."""
    groups = [group(9, 1), group(4, 3), group(6, 3), group(2, 3)]
    for name, order in (("a", groups), ("b", groups[::-1])):
        log = RolloutLog(tmp_path / name)
        log.write(1, order)
        log.close()
        assert written(tmp_path / name) == [(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2)]


@pytest.mark.parametrize(("per_step", "count"), [(8, 8), (3, 3), (0, 0)])
def test_a_group_too_large_gives_its_first_samples(tmp_path: Path, per_step: int, count: int):
    log = RolloutLog(tmp_path / "rollouts.jsonl", per_step=per_step)
    log.write(1, [group(0, 16), group(1, 16)])
    log.close()
    assert written(tmp_path / "rollouts.jsonl") == [(0, sample) for sample in range(count)]
