"""BFCL's multi-turn tool worlds, played in an environment of their own: the package's tools, tasks and checks."""

import asyncio
import json
import os
import subprocess

import pytest
from installed_worlds import install_world
from patience import patience

import openrlhf
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WorldMissingError, find_python
from openrlhf.worlds.process import WorldProcess, WorldRefusal

TARGET = "openrlhf.worlds.bfcl"
CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
DONE = {"role": "assistant", "content": "Done."}


def world(*tasks, **options):
    install_world(TARGET)
    settings = WorldSettings(tasks=tuple((name, 1.0) for name in tasks), options=options, seed=1)
    return WorldProcess(TARGET, settings, python=find_python(TARGET), timeout=patience(60.0))


@pytest.fixture(scope="module")
def bfcl():
    process = world(*CATEGORIES, calls=0.5, stop=False)
    yield process
    process.close()


def calling(*calls):
    """A message of the policy with `(name, arguments)` each."""
    told = [{"id": f"call_{n}", "name": name, "arguments": arguments} for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": told}


def pair(call):
    return call["name"], call["arguments"]


async def play(process, label, turns):
    """The last turn, after messages with the calls of each of the user's turns."""
    episode = await process.begin(label, seed=0)
    answers = []
    for calls in turns:
        if calls:
            turn = await episode.step(calling(*map(pair, calls)))
            answers += [message["content"] for message in turn.messages]
        turn = await episode.step(DONE)
        if turn.done:
            break
    await episode.close()
    return turn, answers


def test_solutions_of_the_package_solve_tasks_of_each_category(bfcl):
    async def all_of_them():
        for category in CATEGORIES:
            for number in range(0, 200, 9):
                label = f"{category}_{number}"
                solution = await bfcl.call("solution", label)
                turn, _ = await play(bfcl, label, solution)
                assert turn.score == 1.0, (label, turn.logs)
                assert turn.logs["turns_solved"] == len(solution), label
                assert turn.logs["calls"] == sum(map(len, solution)), label

    asyncio.run(all_of_them())


def test_the_reward_is_the_share_of_turns_solved_and_of_calls_that_succeeded(bfcl):
    """Four turns with eight calls. The second is done with a call that fails: one turn of four, and half the share of
    calls that succeeded, 3 of 4 until then."""
    label = "multi_turn_base_0"

    async def mistaken(**options):
        process = world(CATEGORIES[0], **options)
        solution = await process.call("solution", label)
        turns = [solution[0], [{"name": "cat", "arguments": {"file_name": "absent"}}], *solution[2:]]
        episode = await process.begin(label, seed=0)
        said = [message for calls in turns for message in (calling(*map(pair, calls)), DONE)]
        played = []
        while not played or not played[-1].done:
            played.append(await episode.step(said[len(played)]))
        process.close()
        return [turn.reward for turn in played], played[-1]

    rewards, last = asyncio.run(mistaken(calls=0.5))
    assert rewards == [0.0, 0.25, 0.0, 0.5 * 3 / 4]
    assert last.score == 0.0
    assert last.logs == {"calls": 4, "calls_failed": 1, "turns_solved": 1, "calls_succeeded": 0.75}
    assert asyncio.run(mistaken(reward="checker"))[0] == [0.0, 0.0, 0.0, 0.0]
    assert asyncio.run(mistaken(turns=1))[0] == [0.0, 1.0]


CHECK = """
import random, sys
sys.path = sys.path[1:]
import importlib.util
spec = importlib.util.spec_from_file_location("server", sys.argv[0] + "/worlds/server.py")
server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server)
World = server.load_world("openrlhf.worlds.bfcl", sys.argv[0])
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.bfcl import CATEGORIES, _source

world = World(WorldSettings(tasks=tuple((name, 1.0) for name in CATEGORIES), options={"stop": False}))
before, agreed = set(vars(multi_turn_utils)), {True: 0, False: 0}
for index in range(160):
    rng = random.Random(index)
    label = f"{CATEGORIES[index % 4]}_{rng.randrange(170)}"
    turns = world.solution(label)
    for calls in turns:
        if rng.random() < 0.3 and calls:
            match rng.randrange(3):
                case 0: calls.pop(rng.randrange(len(calls)))
                case 1: calls.insert(rng.randrange(len(calls)), rng.choice(calls))
                case 2: rng.shuffle(calls)
    play = world.begin(label, seed=0)
    for calls in turns:
        if calls:
            play.step({"tool_calls": [{"id": "", **call} for call in calls], "content": ""})
        turn = play.step({"content": ""})
    play.close()
    entry = world._entries[label]
    told = [[[_source(call) for call in calls]] if calls else [] for calls in turns]
    verdict = multi_turn_checker(told, entry["ground_truth"], entry, entry["id"].rpartition("_")[0], f"m{index}")
    assert turn.score == verdict["valid"], (label, turns, verdict)
    agreed[verdict["valid"]] += 1
assert not {name for name in set(vars(multi_turn_utils)) - before if name.startswith(("play", "truth"))}
print(agreed[True], agreed[False])
"""


def test_the_score_is_the_verdict_of_the_packages_checker():
    """Of 160 solutions, most with a call dropped, repeated or out of order; the tools of a played episode are gone."""
    install_world(TARGET)
    python = find_python(TARGET)
    done = subprocess.run(
        [str(python.path), "-c", CHECK.replace("sys.argv[0]", repr(os.path.dirname(openrlhf.__file__)))],
        env=python.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    valid, invalid = map(int, done.stdout.split())
    assert valid > 20
    assert invalid > 20


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("fly", {}, "there is no function 'fly'; there are authenticate_twitter, "),
        ("cd", {}, "cd: argument folder is missing"),
        ("cd", {"folder": 3}, "cd: argument folder must be string, got 3"),
        ("tail", {"file_name": "a", "lines": True}, "tail: argument lines must be integer, got True"),
        ("post_tweet", {"content": "a", "tags": ["b", 1]}, "argument tags must be array of string"),
        ("cd", {"path": "a"}, "cd has no argument 'path'; it has folder"),
        # Calls are evaluated as Python: names of arguments are those of the tool, and values are values.
        ("cd", {"folder=__import__('os').abort(), x": "a"}, "cd has no argument "),
        ("cd", {"folder": "'+__import__('os').abort()+'"}, "No such file or directory"),
        ("cd", {"folder": "absent"}, "cd: 'absent': No such file or directory"),
    ],
)
def test_a_call_that_fails_is_answered_with_why(bfcl, name, arguments, answer):
    async def once():
        episode = await bfcl.begin("multi_turn_base_0", seed=0)
        turn = await episode.step(calling((name, arguments)))
        await episode.close()
        return turn.messages

    (message,) = asyncio.run(once())
    assert answer in json.loads(message["content"])["error"]
    assert (message["role"], message["name"], message["tool_call_id"]) == ("tool", name, "call_0")


def test_parallel_calls_are_made_in_order_and_text_stays_as_it_is(bfcl):
    """`sort(` in a text is no call; quotes and backslashes come back as they went."""
    text = "sort('a') \\\\( \"b\" \n mkdir(x)"

    async def once():
        episode = await bfcl.begin("multi_turn_base_0", seed=0)
        calls = [
            ("cd", {"folder": "document"}),
            ("touch", {"file_name": "n"}),
            ("echo", {"content": text, "file_name": "n"}),
            ("cat", {"file_name": "n"}),
        ]
        turn = await episode.step(calling(*calls))
        await episode.close()
        return [message["content"] for message in turn.messages]

    answers = asyncio.run(once())
    assert json.loads(answers[0]) == {"current_working_directory": "document"}
    assert json.loads(answers[3]) == {"file_content": text}


def test_a_call_that_cannot_be_read_is_a_failed_one_and_may_be_tried_again(bfcl):
    async def once():
        episode = await bfcl.begin("multi_turn_base_0", seed=0)
        told = await episode.step({"role": "assistant", "content": "<tool_call>cd(document)</tool_call>"})
        for _ in range(4):
            turn = await episode.step(DONE)
        await episode.close()
        return told, turn

    told, turn = asyncio.run(once())
    assert "could not be read" in told.messages[0]["content"]
    assert turn.logs == {"calls": 1, "calls_failed": 1, "turns_solved": 0, "calls_succeeded": 0.0}


def test_too_many_messages_with_calls_end_an_episode():
    process = world(steps=2)

    async def once():
        episode = await process.begin("multi_turn_base_0", seed=0)
        return [await episode.step(calling(("pwd", {}))) for _ in range(2)]

    first, last = asyncio.run(once())
    process.close()
    assert not first.done
    assert (last.done, last.score, last.reward) == (True, 0.0, 0.0)


def test_functions_that_are_held_back_are_refused_until_they_are_told_of(bfcl):
    """Of task 0, `sort` is told of in the fourth turn, in words."""

    async def once():
        episode = await bfcl.begin("multi_turn_miss_func_0", seed=0)
        names = {tool["function"]["name"] for tool in episode.start.tools}
        early = (await episode.step(calling(("sort", {"file_name": "a"})))).messages[0]["content"]
        for _ in range(3):
            told = (await episode.step(DONE)).messages[0]["content"]
        late = (await episode.step(calling(("sort", {"file_name": "a"})))).messages[0]["content"]
        await episode.close()
        return names, early, told, late

    names, early, told, late = asyncio.run(once())
    assert "sort" not in names
    assert "there is no function 'sort'" in early
    assert json.loads(told.splitlines()[0])["function"]["name"] == "sort"
    assert "there is no function" not in late


def test_records_go_through_all_tasks_that_were_asked_for():
    process = world(classes=["GorillaFileSystem"], last=99, turns=1)
    records = list(process.records(count=26, seed=3))
    process.close()
    labels = [record["label"] for record in records]
    assert sorted(labels[:13]) == sorted(labels[13:])
    assert len(set(labels)) == 13
    assert {record["datasource"] for record in records} == {"multi_turn_base"}
    assert records[0]["input"][0]["role"] == "user"


@pytest.mark.parametrize(
    ("tasks", "options", "why"),
    [
        (("simple",), {}, "--world.tasks simple: there are multi_turn_base, "),
        ((), {"classes": ["FileSystem"]}, "there is no class FileSystem; there are GorillaFileSystem, "),
        ((), {"first": 200}, "no task of multi_turn_base is left"),
    ],
)
def test_settings_that_give_no_task_are_refused(tasks, options, why):
    with pytest.raises(WorldRefusal, match=why):
        world(*tasks, **options).start_now()


def test_two_steps_of_training(cli):
    install_world(TARGET)
    ran = cli(
        "--train.agent_func_path", TARGET,
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=512,
        world__samples=8, world__options="turns=1,calls=0.5",
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 for step in steps)


def test_a_missing_package_ends_in_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path))
    with pytest.raises(
        WorldMissingError, match=r"bfcl-eval==2026\.3\.23, mpmath==1\.3\.0.*Run: openrlhf worlds install bfcl$"
    ):
        find_python(TARGET)
