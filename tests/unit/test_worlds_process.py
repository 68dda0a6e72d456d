"""World processes, with a world of the standard library: what is asked and answered, and how processes end."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience
from world_files import counting_world, duel_world

from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WorldPython, find_python
from openrlhf.worlds.process import WorldDeath, WorldFailure, WorldProcess, WorldRefusal, WorldTimeout

LABEL = {"say": "a"}
RIGHT = {"role": "assistant", "content": "a"}


def world(target, *, timeout=None, tasks=(), **options):
    settings = WorldSettings(tasks=tasks, options=options, seed=1)
    return WorldProcess(target, settings, python=find_python(target), timeout=timeout or patience(30.0))


@pytest.fixture
def counting(tmp_path):
    process = world(counting_world(tmp_path))
    yield process
    process.close()


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(holds):
    ends = time.monotonic() + patience(20.0)
    while not holds() and time.monotonic() < ends:
        time.sleep(0.02)
    assert holds()


def test_an_episode_is_played_to_its_end(counting):
    async def play():
        episode = await counting.begin(LABEL, seed=1005)
        assert episode.start.messages == [{"role": "user", "content": "Say a."}]
        first, last = await episode.step(RIGHT), await episode.step({**RIGHT, "content": "b"})
        await episode.close()
        return first, last

    first, last = asyncio.run(play())
    assert (first.reward, first.done, first.messages[0]["content"]) == (1.0, False, "Again.")
    assert (last.reward, last.done, last.logs) == (0.0, True, {"turns": 2.0, "seed": 5.0})
    assert counting.playing == 0


def test_a_game_of_several_agents_says_whose_turn_it_is(tmp_path):
    process = world(duel_world(tmp_path), rounds=1)
    assert {name: process.start_now()[name] for name in ("agents", "opponents")} == {
        "agents": 2,
        "opponents": ["low", "echo"],
    }

    async def play():
        game = await process.begin({"first": 1}, seed=7)
        first = game.start.turn
        second = await game.move(first.agent, {"role": "assistant", "content": "3"})
        said = await game.call("scripted", second.agent, "low")
        return game.start.agents, first, second, said, await game.move(second.agent, {"content": said})

    agents, first, second, said, last = asyncio.run(play())
    process.close()
    assert (agents, first.agent, second.agent, said) == (["player 0", "player 1"], "player 1", "player 0", "1")
    assert second.messages == [{"role": "user", "content": "player 1 said 3."}]
    assert (last.agent, last.rewards) == ("", {"player 0": 0.0, "player 1": 1.0})


def test_records_are_a_pure_function_of_the_seed(counting, tmp_path):
    first = list(counting.records(count=40, seed=3))
    assert len(first) == 40
    assert first == list(counting.records(count=40, seed=3))
    assert first != list(counting.records(count=40, seed=4))
    other = world(str(tmp_path / "counting.py"))
    assert first == list(other.records(count=40, seed=3))
    other.close()


def test_what_runs_inside_has_neither_torch_nor_the_rest_of_openrlhf(counting):
    modules = set(asyncio.run(counting.call("modules")))
    assert "openrlhf.worlds.base" in modules
    ours = {name for name in modules if name.startswith("openrlhf.") and name != "openrlhf.worlds.base"}
    assert ours == {"openrlhf.worlds"}
    assert not modules & {"torch", "transformers", "numpy", "openrlhf.config"}


def test_many_episodes_of_one_process_do_not_mix(counting):
    async def one(index):
        label = {"say": "abcd"[index % 4]}
        episode = await counting.begin(label, seed=index)
        turns = [await episode.step({"role": "assistant", "content": "a"}) for _ in range(2)]
        await episode.close()
        return [turn.reward for turn in turns], turns[-1].logs["seed"]

    async def all_of_them():
        return await asyncio.gather(*(one(index) for index in range(64)))

    played = asyncio.run(all_of_them())
    assert played == [([float(index % 4 == 0)] * 2, float(index)) for index in range(64)]


def test_a_world_with_threads_answers_several_at_once(tmp_path):
    """64 calls of 0.2 s each would take 13 s one after another, longer than their deadline."""
    process = world(counting_world(tmp_path, threads=True), timeout=patience(8.0), turns=1)

    async def one():
        episode = await process.begin({**LABEL, "misdeed": "sleep"}, seed=0)
        await episode.step(RIGHT)

    async def all_of_them():
        await asyncio.gather(*(one() for _ in range(64)))

    assert process.start_now()["threads"]
    began = time.monotonic()
    asyncio.run(all_of_them())
    assert time.monotonic() - began < patience(12.0)
    process.close()


def test_a_call_that_waits_for_its_turn_does_not_meet_its_deadline(tmp_path):
    """Ten calls of 0.2 s, one after another, each with a deadline of 1 s: the last one waits 1.8 s."""
    process = world(counting_world(tmp_path), timeout=patience(1.0), turns=1)

    async def all_of_them():
        episodes = [await process.begin({**LABEL, "misdeed": "sleep"}, seed=0) for _ in range(10)]
        await asyncio.gather(*(episode.step(RIGHT) for episode in episodes))

    asyncio.run(all_of_them())
    process.close()


def test_a_hang_ends_with_its_process_and_the_others_may_be_played_again(tmp_path):
    process = world(counting_world(tmp_path), timeout=1.0)
    process.start_now()
    before = asyncio.run(process.call("process"))

    async def play():
        bad = await process.begin({**LABEL, "misdeed": "hang"}, seed=0)
        good = await process.begin(LABEL, seed=0)
        return await asyncio.gather(bad.step(RIGHT), good.step(RIGHT), return_exceptions=True)

    bad, good = asyncio.run(play())
    assert isinstance(bad, WorldTimeout)
    assert not bad.retry
    assert str(bad) == "world counting.py: step took longer than 1 s; its process was killed"
    assert isinstance(good, WorldDeath)
    assert good.retry
    wait_until(lambda: gone(before))
    assert asyncio.run(process.call("process")) != before
    process.close()


def test_a_hang_whose_caller_has_gone_ends_with_its_process_all_the_same(tmp_path):
    """Otherwise all that is asked later would wait for its turn, which has no deadline."""
    process = world(counting_world(tmp_path), timeout=1.0)

    async def play():
        bad = await process.begin({**LABEL, "misdeed": "hang"}, seed=0)
        stepping = asyncio.ensure_future(bad.step(RIGHT))
        await asyncio.sleep(0.1)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        await asyncio.wait_for(bad.close(), patience(20.0))
        return await asyncio.wait_for(process.begin(LABEL, seed=0), patience(20.0))

    assert asyncio.run(play()).start.messages
    process.close()


def test_an_episode_whose_caller_has_gone_is_closed(tmp_path):
    process = world(counting_world(tmp_path))

    async def play():
        await process.call("still_open")
        beginning = asyncio.ensure_future(process.begin(LABEL, seed=0))
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        ends = time.monotonic() + patience(20.0)
        while process.playing and time.monotonic() < ends:
            await asyncio.sleep(0.02)
        return await process.call("still_open"), process.playing

    assert asyncio.run(play()) == (0, 0)
    process.close()


def test_who_waits_for_nothing_does_not_wait_until_a_process_has_started(tmp_path):
    """All episodes of a host share an event loop, also those of its other processes."""
    process = world(counting_world(tmp_path, head="import time; time.sleep(2)\n"))

    async def play():
        good = await process.begin(LABEL, seed=0)
        bad = await process.begin({**LABEL, "misdeed": "crash"}, seed=0)
        with pytest.raises(WorldDeath):
            await bad.step(RIGHT)
        again = asyncio.ensure_future(process.begin(LABEL, seed=0))
        while process._lock.acquire(blocking=False):  # until it is starting
            process._lock.release()
            await asyncio.sleep(0.01)
        await good.close()
        return again.done(), await again

    already, again = asyncio.run(play())
    assert not already
    assert again.start.messages
    process.close()


def test_a_crash_says_how_and_is_retried_in_another_process(counting):
    async def play(**label):
        episode = await counting.begin(LABEL | label, seed=0)
        return await episode.step(RIGHT)

    with pytest.raises(WorldDeath, match=r"world counting\.py ended with status 3; its last words: .*the last words"):
        asyncio.run(play(misdeed="crash"))
    assert asyncio.run(play()).reward == 1.0


def test_a_label_that_is_no_json_is_refused_and_the_world_goes_on(counting):
    """Such labels come from other data sets (dates, say)."""

    async def play(label):
        return await asyncio.wait_for(counting.begin(label, seed=0), patience(30.0))

    with pytest.raises(WorldRefusal, match=r"^world counting\.py: the label \{'say': \{1\}\} is no JSON"):
        asyncio.run(play({"say": {1}}))
    assert asyncio.run(play(LABEL)).start.messages
    assert counting.playing == 1


@pytest.mark.parametrize("threads", [False, True])
def test_a_crash_is_no_one_elses_who_was_not_in_a_call(tmp_path, threads):
    process = world(counting_world(tmp_path, threads=threads))

    async def play():
        bad = await process.begin({**LABEL, "misdeed": "crash"}, seed=0)
        good = await process.begin(LABEL, seed=0)
        return [
            *await asyncio.gather(bad.step(RIGHT), return_exceptions=True),
            *await asyncio.gather(good.step(RIGHT), return_exceptions=True),
        ]

    bad, good = asyncio.run(play())
    assert (bad.others, good.others) == (False, True)
    process.close()


def test_errors_inside_name_file_and_line_and_refusals_are_for_people(counting):
    async def play(misdeed):
        episode = await counting.begin({**LABEL, "misdeed": misdeed}, seed=0)
        return await episode.step(RIGHT)

    with pytest.raises(WorldFailure, match=r"counting\.py:\d+ \(in step\): ValueError: no such move") as error:
        asyncio.run(play("raise"))
    assert error.value.retry
    with pytest.raises(WorldRefusal, match=r"^world counting\.py: the label has no goal$") as refusal:
        asyncio.run(play("refuse"))
    assert not refusal.value.retry


def test_what_is_no_turn_is_said(tmp_path):
    file = tmp_path / "counting.py"
    counting_world(tmp_path)
    file.write_text(file.read_text().replace("        return Turn(", "        return dict(turn="))
    process = world(str(file))

    async def play():
        episode = await process.begin(LABEL, seed=0)
        await episode.step(RIGHT)

    with pytest.raises(WorldRefusal, match=r"^world counting\.py: step has returned \{'turn': .*unexpected keyword"):
        asyncio.run(play())
    process.close()


@pytest.mark.parametrize(
    ("line", "instead", "why"),
    [
        ("        return Counting(", "        return print(", "begin has returned an episode whose start is no Start: None"),
        ("self.start = Start(", "self.start = list(", "begin has returned an episode whose start is no Start: \\["),
        ('"content": f"Say {label[\'say\']}."', '"content": {1}', "begin has returned something that is no JSON: .*set"),
        ('return Turn(answer, reward=float(right)', 'return Turn([{"role": "user", "content": {1}}], reward=float(right)',
         "step has returned something that is no JSON: .*set"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_said_and_what_began_is_closed(tmp_path, line, instead, why):
    file = Path(counting_world(tmp_path))
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, instead))
    process = world(str(file), turns=1)

    async def play():
        episode = await process.begin(LABEL, seed=0)
        try:
            await episode.step(RIGHT)
        finally:
            await episode.close()

    with pytest.raises(WorldRefusal, match=f"^world counting\\.py: {why}"):
        asyncio.run(play())
    still_open = asyncio.run(process.call("still_open"))
    assert still_open == (1 if "print" in instead else 0)  # of an episode that was never made nobody can be told
    process.close()


def test_a_world_without_its_methods_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class World:\n    def __init__(self, settings): ...\n    def records(self, *, count, seed): ...\n")
    with pytest.raises(WorldRefusal, match=r"^world mine\.py: World has no method begin$"):
        world(str(file)).start_now()


def test_records_that_go_on_for_ever_end_where_they_are_enough(tmp_path):
    file = Path(counting_world(tmp_path))
    file.write_text(file.read_text().replace("for index in range(count):", "for index in iter(int, 1):"))
    process = world(str(file))
    assert len(list(process.records(count=5, seed=1))) == 5
    process.close()


def test_a_game_speaks_of_its_own_agents_alone(tmp_path):
    file = Path(duel_world(tmp_path))
    file.write_text(file.read_text().replace("GameTurn(rewards=won,", "GameTurn(rewards={'player 7': 1.0},"))
    process = world(str(file), rounds=1)

    async def play():
        game = await process.begin({"first": 0}, seed=7)
        await game.move("player 0", RIGHT | {"content": "3"})
        await game.move("player 1", RIGHT | {"content": "3"})

    with pytest.raises(WorldRefusal, match=r"step speaks of agent 'player 7'; the game has player 0, player 1$"):
        asyncio.run(play())
    process.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tasks": (("unknown", 1.0),)}, "there is no task unknown; there is count"),
        ({"colour": 1}, "--world.options colour: this world has no such option; it has turns, threads"),
    ],
)
def test_settings_that_the_world_refuses_are_found_when_it_starts(tmp_path, settings, why):
    process = world(counting_world(tmp_path), **settings)
    with pytest.raises(WorldRefusal, match=why):
        process.start_now()


def test_an_interpreter_that_is_gone_is_said(tmp_path):
    python = WorldPython(Path("/nowhere/python"))
    process = WorldProcess(counting_world(tmp_path), WorldSettings(), python=python, timeout=30.0)
    with pytest.raises(WorldRefusal, match=r"^world counting\.py: /nowhere/python cannot be started: .*No such file"):
        process.start_now()


def test_a_package_that_is_missing_inside_is_named_with_its_python(tmp_path):
    process = world(counting_world(tmp_path, head="import no_such_package\n"))
    with pytest.raises(WorldRefusal, match=r"No module named 'no_such_package' in /"):
        process.start_now()


@pytest.mark.parametrize("end", ["close", "crash"])
def test_what_the_world_has_started_ends_with_it(counting, end):
    """Also what has a session of its own, as servers that the package mcp starts."""
    children = [asyncio.run(counting.call("child", own_session)) for own_session in (False, True)]
    own = asyncio.run(counting.call("process"))
    assert not any(map(gone, children))
    if end == "close":
        counting.close()
    else:
        with pytest.raises(WorldDeath):
            asyncio.run(crash(counting))
    wait_until(lambda: all(map(gone, [own, *children])))


async def crash(process):
    episode = await process.begin({**LABEL, "misdeed": "crash"}, seed=0)
    await episode.step(RIGHT)


OWNER = """
import asyncio, sys
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import find_python
from openrlhf.worlds.process import WorldProcess

process = WorldProcess(sys.argv[1], WorldSettings(), python=find_python(sys.argv[1]), timeout=60)
print([asyncio.run(process.call(*call)) for call in (["process"], ["child", False], ["child", True])], flush=True)
sys.stdin.readline()
"""


def test_a_world_process_ends_with_its_owner_that_was_killed(tmp_path):
    target = counting_world(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    ) as owner:
        pids = json.loads(owner.stdout.readline())
        owner.kill()
        wait_until(lambda: all(gone(pid) for pid in pids))
