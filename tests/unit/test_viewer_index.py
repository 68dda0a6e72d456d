"""The index of rollouts: what is appended is read once, steps that are taken again replace the first, search finds."""

import json

import pytest
from viewed_runs import append, rollout

from openrlhf.viewer.index import GroupKey, Query, QueryError, RolloutIndex, parse_query


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append(path, *(rollout(step, prompt, sample) for step in (1, 2, 3) for prompt in (7, 9) for sample in (0, 1)))
    return path


def found(index, text, **options):
    return [(row["step"], row["prompt"]) for row in index.find(parse_query(text), **options).rows]


def test_groups_are_listed_newest_first_with_the_numbers_of_their_samples(path):
    index = RolloutIndex(path)
    assert index.update()
    page = index.find(Query())
    assert (page.groups, page.samples) == (6, 12)
    assert [(row["step"], row["prompt"]) for row in page.rows] == [(3, 7), (3, 9), (2, 7), (2, 9), (1, 7), (1, 9)]
    assert page.rows[0]["rewards"] == [0.0, 1.0]
    assert page.rows[0]["lengths"] == [10.0, 11.0]
    assert [r["prompt_ordinal"] for r in index.read(GroupKey(2, 9))] == [9, 9]
    assert index.read(GroupKey(2, 8)) == []


def test_a_half_written_line_is_read_when_it_is_whole_and_nothing_is_read_twice(path):
    index = RolloutIndex(path)
    index.update()
    line = json.dumps(rollout(4, 7, 0)).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line[:40])
        file.flush()
        index.update()
        assert index.samples == 12
        file.write(line[40:])
    index.update()
    assert index.samples == 13
    before = index.changes
    index.update()
    assert index.changes == before


def test_a_resumed_run_replaces_the_steps_that_it_takes_again(path):
    index = RolloutIndex(path)
    index.update()
    assert found(index, '"of step 3"') == [(3, 7), (3, 9)]
    append(path, rollout(2, 11, 0, response="another answer"))
    index.update()
    assert found(index, "") == [(2, 11), (1, 7), (1, 9)]
    assert found(index, '"of step 3"') == []
    assert found(index, "another") == [(2, 11)]
    append(path, rollout(2, 11, 0, response="a third one"))  # the same step once more, in a row
    index.update()
    assert found(index, "another") == []
    assert found(index, "third") == [(2, 11)]


def test_a_file_that_was_replaced_is_read_from_its_beginning(path):
    index = RolloutIndex(path)
    index.update()
    path.write_text(json.dumps(rollout(1, 5, 0)) + "\n")
    index.update()
    assert found(index, "") == [(1, 5)]
    path.unlink()
    index.update()
    assert found(index, "") == []


@pytest.mark.parametrize(
    ("query", "groups"),
    [
        ("QUESTION", 6),
        ("question 9", 3),
        ('"question 9" step:2-3', 2),
        ("step:2", 2),
        ("step>2", 2),
        ("reward>=1 sample:0", 0),  # both of the same sample
        ("prompt:7 step<3", 2),
        ("length:11..", 6),
        ("is:failed", 0),
        ("is:typical step=1", 2),
        ("1answer", 0),  # a text does not go on in the next sample
    ],
)
def test_a_query_finds_groups_with_a_sample_that_meets_all_of_it(path, query, groups):
    index = RolloutIndex(path)
    index.update()
    assert index.find(parse_query(query)).groups == groups


def test_errors_and_labels_are_searched_and_a_link_is_text(path):
    append(path, rollout(4, 1, 0, outcome="failed", error="ValueError: Über", reward=None, label={"answer": "42nd"}))
    index = RolloutIndex(path)
    index.update()
    assert found(index, "is:failed über") == [(4, 1)]
    assert found(index, "42ND") == [(4, 1)]
    assert parse_query("https://a.b").terms == ("https://a.b",)
    assert parse_query("step: is: reward<") == Query()  # not typed to the end


@pytest.mark.parametrize(
    ("query", "said"), [("step:x", "step:3-8"), ("is:odd", "truncated"), ("reward<low", "reward>3")]
)
def test_a_query_that_cannot_be_read_says_what_can(query, said):
    with pytest.raises(QueryError, match=said):
        parse_query(query)


def test_orders_and_places(path):
    append(path, rollout(4, 1, 0, group_reward=0.9, response_length=500), rollout(4, 1, 1, reward=-3.0))
    append(path, rollout(4, 2, 0, group_reward=None, outcome="failed", reward=None))
    index = RolloutIndex(path)
    index.update()
    assert found(index, "", order="reward_down")[0] == (4, 1)
    assert found(index, "", order="reward")[-1] == (4, 2)  # without a reward: the last
    assert found(index, "", order="length")[0] == (4, 1)
    assert found(index, "", order="spread")[0] == (4, 1)
    assert found(index, "", order="failed")[0] == (4, 2)
    assert index.position(Query(), GroupKey(1, 9), order="oldest") == 1
    assert index.position(Query(), GroupKey(1, 10)) is None
    assert index.find(Query(), first=6, count=5).rows[0]["step"] == 1


def test_indexing_goes_on_where_its_time_ran_out(path):
    index = RolloutIndex(path)
    calls = 0
    while not index.update(seconds=0.0):
        calls += 1
    assert calls == 12
    assert index.samples == 12
    assert index.progress == (path.stat().st_size, path.stat().st_size)
