"""Samples as files: what is gone on with, and what becomes of them as data sets."""

import json

import pytest
import torch

from openrlhf.data.files import DataError
from openrlhf.runs.measuring import _group_json, summarise
from openrlhf.runs.sample_files import SampleFile, best_answers, preference_pairs, write_records
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory


def prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal=ordinal, text=f"q{ordinal}>", label=ordinal, datasource="sums")


def group(ordinal: int, *samples: tuple) -> Group:
    """Samples are (answer, reward, score) or (answer, reward, score, outcome); a reward of None is a failure."""
    members = []
    for number, (answer, reward, score, *outcome) in enumerate(samples):
        mask = torch.arange(len(answer) + 1) > 0
        segment = Segment(
            token_ids=torch.ones(len(mask), dtype=torch.int64),
            action_mask=mask,
            rollout_logprobs=None,
            versions=torch.where(mask, 0, -1).int(),
            turn_rewards=torch.zeros(len(mask)),
        )
        failed = reward is None
        members.append(
            Trajectory(
                key=SampleKey(ordinal, number),
                segments=() if failed else (segment,),
                outcome=Outcome.FAILED if failed else outcome[0] if outcome else Outcome.FINISHED,
                reward=reward,
                score=score,
                text=f"q{ordinal}>{answer}",
                error="no" if failed else "",
            )
        )
    return Group(prompt=prompt(ordinal), trajectories=tuple(members))


GROUPS = [
    group(0, ("a</s>", 0.0, 0.0), ("b</s>", 2.0, 1.0), ("c</s>", 2.0, 1.0), ("", None, None)),
    group(1, ("a</s>", 1.0, 0.5), ("b", 3.0, 1.0, Outcome.TRUNCATED), ("c</s>", 0.0, 0.0)),
    group(2, ("a</s>", 1.0, 1.0), ("b</s>", 1.0, 1.0)),
    group(3, ("", None, None), ("</s>", 9.0, 1.0)),
]


def test_the_best_answer_is_one_that_ended_and_is_right():
    """Of 0 the first of two as good; 1's right one was cut off; 2 has two of the same reward; 3 has a
    failed one and one without a text."""
    found = [(r["input"], r["output"]) for r in best_answers(GROUPS, threshold=1.0, end="</s>")]
    assert found == [("q0>", "b"), ("q2>", "a")]
    found = [(r["output"], r["score"], r["datasource"]) for r in best_answers(GROUPS, threshold=0.5, end="</s>")]
    assert found == [("b", 1.0, "sums"), ("a", 0.5, "sums"), ("a", 1.0, "sums")]


def test_pairs_are_of_answers_with_different_rewards():
    found = [(r["prompt"], r["chosen"], r["rejected"], r["margin"]) for r in preference_pairs(GROUPS, end="</s>")]
    assert found == [("q0>", "b", "a", 2.0), ("q1>", "a", "c", 1.0)]


def test_an_evaluation_goes_on_from_the_lines_that_are_whole(tmp_path):
    """Two groups and half a line of a third: the two come back with all that the results are made of."""
    path, identity = tmp_path / "new" / "samples.jsonl", {"n": 3, "seed": 0}
    file = SampleFile(path, identity, _group_json)
    for one in GROUPS[:2]:
        file.write(one)
    file.close()
    with path.open("a") as broken:
        broken.write('{"index": 2, "sam')
    again = SampleFile(path, identity, _group_json)
    prompts = [one.prompt for one in GROUPS]
    assert summarise(again.groups(prompts), ks=[1, 2]) == summarise(GROUPS[:2], ks=[1, 2])
    assert list(preference_pairs(again.groups(prompts), end="</s>")) == list(preference_pairs(GROUPS[:2], end="</s>"))
    again.write(GROUPS[2])
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("index") for line in lines] == [None, 0, 1, 2]


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "samples.jsonl"
    SampleFile(path, {"n": 3}, _group_json).close()
    before = path.read_text()
    with pytest.raises(
        DataError, match=r"--save .*samples\.jsonl: the file is there and is not of this model, data, reward"
    ):
        SampleFile(path, {"n": 4}, _group_json)
    assert path.read_text() == before
    path.write_text(before + "{}\n")
    with pytest.raises(DataError, match=r"line 2: it is not a prompt's samples"):
        SampleFile(path, {"n": 3}, _group_json)


def test_a_data_set_is_written_whole(tmp_path):
    path = tmp_path / "new" / "best.jsonl"
    assert write_records(path, best_answers(GROUPS, threshold=1.0, end="</s>")) == 2
    assert len(path.read_text().splitlines()) == 2

    def breaks():
        yield {"input": "a"}
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        write_records(path, breaks())
    assert len(path.read_text().splitlines()) == 2
    assert [p.name for p in path.parent.iterdir()] == ["best.jsonl"]
