"""MCP servers as worlds: real ones of the package mcp, over stdio and HTTP, in an environment of their own."""

import asyncio
import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
from installed_worlds import install_world
from patience import patience

from openrlhf.worlds import environments
from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import WorldMissingError, find_python
from openrlhf.worlds.process import WorldFailure, WorldProcess, WorldRefusal

TARGET = "openrlhf.worlds.mcp"
EXAMPLE = Path(__file__).parents[2] / "examples" / "mcp"
LABEL = {"input": [{"role": "user", "content": "What does one fig cost?"}], "label": 7}
SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes = []

@server.tool()
def note(text: str) -> list[str]:
    if text == "die":
        os._exit(3)
    if text == "sleep":
        time.sleep(600)
    notes.append(text)
    return notes

@server.tool()
def picture() -> int:
    return 1

server.run()
"""


def world(server, *, timeout=60.0, **options):
    install_world(TARGET)
    told = {"server": server, "records": str(EXAMPLE / "tasks.jsonl"), "reward": "tool:grade", **options}
    settings = WorldSettings(options={name: value for name, value in told.items() if value is not None}, seed=1)
    return WorldProcess(TARGET, settings, python=find_python(TARGET), timeout=patience(timeout))


def calling(*calls):
    told = [{"id": f"call_{n}", "name": name, "arguments": arguments} for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": told}


def answering(text):
    return {"role": "assistant", "content": text}


def contents(turn):
    return [message["content"] for message in turn.messages]


async def play(process, *messages, label=LABEL):
    episode = await process.begin(label, seed=0)
    turns = [await episode.step(message) for message in messages]
    await episode.close()
    return turns


@pytest.fixture(scope="module")
def shop():
    """Over stdio, with one server for all episodes."""
    process = world(f"python {EXAMPLE / 'shop.py'}", share=True, steps=4)
    yield process
    process.close()


@pytest.fixture(scope="module")
def shop_url():
    install_world(TARGET)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    python = find_python(TARGET)
    served = subprocess.Popen(
        [str(python.path), str(EXAMPLE / "shop.py"), str(port)],
        env=python.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ends = time.monotonic() + patience(60.0)
    while time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    served.kill()
    served.wait()


def test_an_episode_asks_a_tool_and_a_tool_of_the_server_gives_the_reward(shop):
    async def begun():
        episode = await shop.begin(LABEL, seed=0)
        await episode.close()
        return episode.start

    start = asyncio.run(begun())
    assert start.messages == LABEL["input"]
    (tool,) = start.tools  # grade gives the reward, and is not shown
    assert tool["function"]["name"] == "price"
    assert tool["function"]["parameters"]["required"] == ["item"]
    asked, told = asyncio.run(play(shop, calling(("price", {"item": "fig"})), answering("7")))
    assert contents(asked) == ["7"]
    assert (told.done, told.reward, told.score) == (True, 1.0, None)
    assert told.logs == {"calls": 1, "calls_failed": 0, "calls_succeeded": 1.0}
    assert asyncio.run(play(shop, answering("8")))[0].reward == 0.0


def test_calls_that_fail_are_answered_with_why_and_parallel_ones_in_order(shop):
    calls = [
        ("price", {"item": "fig"}),
        ("price", {"item": "house"}),
        ("price", {"thing": "fig"}),
        ("grade", {"label": 7, "answer": "7"}),
    ]
    asked, unread, told = asyncio.run(
        play(shop, calling(*calls), answering("<tool_call>price(fig)</tool_call>"), answering("7"))
    )
    right, absent, misnamed, hidden = contents(asked)
    assert right == "7"
    assert "there is no house; there are apple, pear, plum, fig" in absent
    assert "item" in misnamed
    assert "Field required" in misnamed
    assert hidden == "error: there is no tool 'grade'; there are price"
    assert "could not be read" in contents(unread)[0]
    assert [message["tool_call_id"] for message in asked.messages] == ["call_0", "call_1", "call_2", "call_3"]
    assert told.logs == {"calls": 5, "calls_failed": 4, "calls_succeeded": pytest.approx(0.2)}


def test_too_many_messages_with_calls_end_an_episode(shop):
    turns = asyncio.run(play(shop, *[calling(("price", {"item": "fig"}))] * 4))
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert turns[-1].reward == 0.0


def test_many_episodes_play_at_once_and_a_function_gives_the_reward(shop_url):
    """Over HTTP. The function of the example: half for asking, half for the answer."""
    process = world(shop_url, reward=str(EXAMPLE / "judge.py"), system="Be brief.")
    records = list(process.records(count=20, seed=2))
    assert sorted(record["label"]["label"] for record in records[:10]) == sorted(
        json.loads(line)["label"] for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()
    )
    assert records[0]["input"][0] == {"role": "system", "content": "Be brief."}

    async def all_of_them():
        return await asyncio.gather(
            *(
                play(process, calling(("price", {"item": "fig"})), answering("5"), label=record["label"])
                for record in records
            )
        )

    played = asyncio.run(all_of_them())
    process.close()
    assert [turns[-1].reward for turns in played] == [0.5 + 0.5 * (record["label"]["label"] == 5) for record in records]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """A server that keeps what it is told, and misbehaves when asked."""
    folder = tmp_path_factory.mktemp("notes")
    (folder / "notes.py").write_text(SERVER)
    (folder / "judge.py").write_text("def reward_func(label, calls, answer):\n    return len(calls)\n")
    process = world(f"python {folder / 'notes.py'}", reward=str(folder / "judge.py"), timeout=60.0)
    yield process
    process.close()


def test_each_episode_has_a_server_of_its_own(notes):
    async def both():
        return await asyncio.gather(
            *(play(notes, calling(("note", {"text": name})), answering("")) for name in ("a", "b"))
        )

    first, second = asyncio.run(both())
    assert [contents(turns[0]) for turns in (first, second)] == [["a"], ["b"]]


def test_a_server_that_all_share_is_started_again_when_it_has_died(tmp_path):
    server = tmp_path / "notes.py"
    server.write_text(SERVER)
    process = world(f"python {server}", share=True, reward="tool:picture")
    with pytest.raises(WorldFailure) as failure:
        asyncio.run(play(process, calling(("note", {"text": "die"}))))
    assert failure.value.retry
    (turn,) = asyncio.run(play(process, calling(("note", {"text": "bread"}))))
    assert "bread" in contents(turn)[0]
    process.close()


def test_a_server_that_cannot_be_reached_for_a_moment_is_asked_again(tmp_path):
    """When the world starts that is an error of the user's; later another attempt may succeed."""
    server = tmp_path / "notes.py"
    server.write_text(SERVER)
    process = world(f"python {server}", reward="tool:picture")
    process.start_now()
    server.rename(tmp_path / "away.py")
    with pytest.raises(WorldFailure, match="gave no session") as failure:
        asyncio.run(play(process, answering("")))
    assert failure.value.retry
    (tmp_path / "away.py").rename(server)
    assert [turn.reward for turn in asyncio.run(play(process, answering("")))] == [1.0]
    process.close()


def test_a_server_that_dies_fails_its_episode_alone(notes):
    with pytest.raises(WorldFailure, match="MCPError") as failure:
        asyncio.run(play(notes, calling(("note", {"text": "die"}))))
    assert failure.value.retry
    assert asyncio.run(play(notes, calling(("note", {"text": "a"})), answering("")))[-1].reward == 1.0


def test_a_call_that_takes_too_long_is_told_so(tmp_path):
    (tmp_path / "notes.py").write_text(SERVER)
    (tmp_path / "judge.py").write_text("def reward_func(label, calls, answer):\n    return 0\n")
    process = world(f"python {tmp_path / 'notes.py'}", reward=str(tmp_path / "judge.py"), call_timeout=1.0, share=True)
    (turn,) = asyncio.run(play(process, calling(("note", {"text": "sleep"}))))
    process.close()
    assert contents(turn) == ["error: the tool took longer than 1 s"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"server": None}, "which server has the tools"),
        ({"server": "no-such-program"}, "the server .*no-such-program.* gave no session"),
        ({"server": "python -c pass"}, "gave no session"),
        ({"server": "http://127.0.0.1:9/mcp"}, "gave no session"),
        ({"records": "/absent.jsonl"}, "records=/absent.jsonl: No such file"),
        ({"input_key": "question"}, r"tasks.jsonl:1: expected \{\"question\": "),
        ({"reward": "tool:judge"}, "the server has no tool 'judge'; it has price, grade"),
        ({"tools": ["buy"]}, "the server has no tool 'buy'"),
        ({"reward": "judge"}, "expected a .py file with reward_func, or tool:NAME"),
        ({"colour": 1}, "this world has no such option"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(shop_url, options, why):
    process = world(**{"server": shop_url, **options})
    with pytest.raises(WorldRefusal, match=why):
        process.start_now()
    process.close()


def test_two_steps_of_training(cli, shop_url, tmp_path):
    """The questions are in characters that the tiny model's tokenizer has."""
    records = tmp_path / "sums.jsonl"
    records.write_text("".join(json.dumps({"input": f"{n},3", "label": n}) + "\n" for n in range(8)))
    options = f"server={shop_url},records={records},reward={EXAMPLE / 'judge.py'}"
    ran = cli(
        "--train.agent_func_path", TARGET,
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=512,
        world__samples=8, world__options=options,
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 for step in steps)


def test_a_missing_package_ends_in_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENRLHF_WORLDS", str(tmp_path))
    monkeypatch.setattr(environments, "_has", lambda python, module: False)  # vLLM brings the package along
    with pytest.raises(WorldMissingError, match=r"mcp==2\.3\.0.*Run: openrlhf worlds install mcp$"):
        find_python(TARGET)
