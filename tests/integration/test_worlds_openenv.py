"""OpenEnv's environments as worlds: real servers and the real client of the package, in an environment of their own."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from installed_worlds import install_world
from patience import patience
from processes import living_children, wait_until

from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WorldMissingError, find_python
from openrlhf.worlds.process import WorldDeath, WorldFailure, WorldProcess, WorldRefusal

TARGET = "openrlhf.worlds.openenv"
EXAMPLE = Path(__file__).parents[2] / "examples" / "openenv" / "guess.py"
SERVER = """
import sys
import guess
import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Move(Action):
    by: int
    axis: str = "x"

class Place(Observation):
    x: int
    y: int

class Walk(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.at = {}

    def reset(self, seed=None, episode_id=None, start=0, **kwargs):
        self.at = {"x": start, "y": 0}
        return Place(**self.at)

    def step(self, action, timeout_s=None, **kwargs):
        if action.by == 13:
            raise ValueError("no such street")
        self.at[action.axis] += action.by
        return Place(**self.at, done=self.at == {"x": 2, "y": 1}, reward=0.5)

    @property
    def state(self):
        return State()

class Notes(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("notes")
        self.notes = []

        @server.tool
        def note(text: str) -> str:
            self.notes.append(text)
            return f"{len(self.notes)} notes"

        @server.tool
        def read(number: int) -> str:
            if number >= len(self.notes):
                raise ValueError("there is no such note")
            return self.notes[number]

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.notes.clear()
        return Observation(metadata={"asked": "Take notes."})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools")

    @property
    def state(self):
        return State()

app = FastAPI()
app.mount("/guess", guess.app)
app.mount("/walk", create_fastapi_app(Walk, Move, Place, max_concurrent_envs=3))
app.mount("/notes", create_fastapi_app(Notes, CallToolAction, CallToolObservation, max_concurrent_envs=8))
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


def world(server, **options):
    install_world(TARGET)
    settings = WorldSettings(options={"server": server, **options}, seed=1)
    return WorldProcess(
        TARGET, settings, python=find_python(TARGET), timeout=patience(60.0), start_timeout=patience(120)
    )


@pytest.fixture(scope="module")
def guess():
    """The example, whose server the world starts."""
    process = world(f"python {EXAMPLE} {{port}}", system="Be brief.", steps=3)
    yield process
    process.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The URL of a server of several environments that runs already."""
    install_world(TARGET)
    file = tmp_path_factory.mktemp("servers") / "servers.py"
    file.write_text(SERVER)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    python = find_python(TARGET)
    variables = python.environment() | {"PYTHONPATH": str(EXAMPLE.parent)}
    process = subprocess.Popen([str(python.path), str(file), str(port)], env=variables)
    ends = time.monotonic() + patience(120.0)
    while time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def walk(served, tmp_path_factory):
    resets = tmp_path_factory.mktemp("resets") / "resets.jsonl"
    resets.write_text('{"start": 1}\n{"start": 2}\n')
    process = world(f"{served}/walk", prompt="Walk to (2, 1).", resets=str(resets))
    yield process
    process.close()


@pytest.fixture(scope="module")
def notes(served):
    process = world(f"{served}/notes", prompt="Take notes.")
    yield process
    process.close()


def saying(text):
    return {"role": "assistant", "content": text}


def calling(*calls):
    told = [{"id": f"call_{n}", "name": name, "arguments": arguments} for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": told}


def contents(turn):
    return [message["content"] for message in turn.messages]


async def play(process, label, *messages):
    episode = await process.begin(label, seed=0)
    turns = [await episode.step(message) for message in messages]
    await episode.close()
    return episode.start, turns


def test_text_is_an_action_where_an_action_is_a_text(guess):
    """The number of seed 3 is drawn as the example does it. Right at the second guess: a third of the reward is lost."""
    number = random.Random(3).randint(1, 7)
    assert number not in (1, 7)
    start, (wrong, right) = asyncio.run(play(guess, {"seed": 3}, saying("7"), saying(f" {number}\n")))
    assert start.messages[0] == {"role": "system", "content": "Be brief."}
    assert start.messages[1]["content"].startswith("Guess my number")
    assert start.tools is None
    assert contents(wrong) == ["Wrong: too high."]
    assert (right.done, right.reward) == (True, pytest.approx(2 / 3))


def test_all_samples_of_a_prompt_begin_alike_and_many_play_at_once(guess):
    label = next(iter(guess.records(count=1, seed=5)))["label"]
    number = random.Random(label["seed"]).randint(1, 7)

    async def all_of_them():
        return await asyncio.gather(*(play(guess, label, saying(str(number))) for _ in range(16)))

    assert [turns[0].reward for _, turns in asyncio.run(all_of_them())] == [1.0] * 16


def test_the_limit_of_steps_holds(guess):
    _, turns = asyncio.run(play(guess, {"seed": 3}, *[saying("no")] * 3))
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[-1].logs == {"steps": 3}


def test_actions_of_several_fields_are_calls_of_one_tool(walk):
    """Two moves in one message; then the place is reached, and a third is not made."""
    calls = calling(("act", {"by": 2}), ("act", {"by": 1, "axis": "y"}), ("act", {"by": 1}))
    start, (turn,) = asyncio.run(play(walk, {"start": 0}, calls))
    assert start.messages[0]["content"] == 'Walk to (2, 1).\n\n{"x": 0, "y": 0}'
    (tool,) = start.tools
    assert tool["function"]["name"] == "act"
    assert set(tool["function"]["parameters"]["properties"]) == {"by", "axis"}
    assert (turn.done, turn.reward) == (True, 1.0)
    assert turn.logs == {"steps": 1, "calls": 2, "calls_failed": 0, "calls_succeeded": 1.0}


def test_actions_that_do_not_fit_are_answered_with_why(walk):
    calls = calling(("act", {"by": "far"}), ("act", {}), ("walk", {"by": 1}), ("act", {"by": 1}))
    _, (turn, unread, end) = asyncio.run(
        play(walk, {"start": 5}, calls, saying("<tool_call>act</tool_call>"), saying("Enough."))
    )
    mistyped, missing, absent, right = contents(turn)
    assert mistyped == "error: by: 'far' is not of type 'integer'"
    assert missing == "error: 'by' is a required property"
    assert absent == "error: there is no tool 'walk'; there are act"
    assert right == '{"x": 6, "y": 0}'
    assert turn.reward == 0.5
    assert "could not be read" in contents(unread)[0]
    assert end.logs == {"steps": 2, "calls": 5, "calls_failed": 4, "calls_succeeded": pytest.approx(0.2)}


def test_an_environment_that_fails_and_one_too_many_fail_the_episode(walk):
    with pytest.raises(WorldFailure, match="no such street"):
        asyncio.run(play(walk, {}, calling(("act", {"by": 13}))))

    async def four():
        episodes = [await walk.begin({}, seed=0) for _ in range(3)]
        try:
            await walk.begin({}, seed=0)
        finally:
            for episode in episodes:
                await episode.close()

    with pytest.raises(WorldRefusal, match="give create_app more max_concurrent_envs"):
        asyncio.run(four())


def test_tools_of_an_environment_are_called_by_name(notes):
    calls = calling(("note", {"text": "milk"}), ("read", {"number": 0}), ("read", {"number": 7}), ("read", {}))
    start, (turn, end) = asyncio.run(play(notes, {}, calls, saying("Done.")))
    assert [tool["function"]["name"] for tool in start.tools] == ["note", "read"]
    told, read, absent, missing = contents(turn)
    assert told == "1 notes"
    assert read == "milk"
    assert "there is no such note" in absent
    assert missing == "error: 'number' is a required property"
    assert end.logs["calls_failed"] == 2


def test_resets_of_a_file_are_the_records(walk):
    labels = [record["label"]["start"] for record in walk.records(count=4, seed=0)]
    assert sorted(labels[:2]) == sorted(labels[2:]) == [1, 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"server": ""}, "which environment"),
        ({"server": "no-such-program {port}"}, "No such file"),
        ({"server": "python -c pass"}, "ended with status 0"),
        ({"server": "http://127.0.0.1:9"}, "no server of OpenEnv answers at"),
        ({"resets": "/absent.jsonl"}, "No such file"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(options, why):
    with pytest.raises(WorldRefusal, match=why):
        world(**{"server": "http://127.0.0.1:9", **options}).start_now()


def test_two_steps_of_training(cli, served):
    ran = cli(
        "--train.agent_func_path", TARGET,
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=512,
        world__samples=8, world__options=f"server={served}/notes,prompt=Note 1.",
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 for step in steps)


def test_a_missing_package_ends_in_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path))
    with pytest.raises(WorldMissingError, match=r"openenv==0\.10\.0.*Run: openrlhf worlds install openenv$"):
        find_python(TARGET)


def test_a_server_that_a_command_started_is_started_again_when_it_has_died():
    process = world(f"python {EXAMPLE} {{port}}")
    (record,) = process.records(count=1, seed=0)

    async def begin():
        episode = await process.begin(record["label"], seed=0)
        return episode, episode.start.messages

    async def survive():
        before, read = await begin()
        (server,) = living_children(process._life._popen.pid)
        os.kill(server, signal.SIGKILL)
        assert wait_until(lambda: process._life.ended)
        with pytest.raises(WorldDeath, match=r"the server .* ended with status -9"):
            await before.step({"role": "assistant", "content": "0"})
        return read, (await begin())[1]

    read, again = asyncio.run(survive())
    assert again == read
    process.close()
