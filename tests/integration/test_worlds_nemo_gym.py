"""Resources servers of NeMo Gym as worlds, with a server of ours that follows the documented protocol: the package is
not on the index that tests install from."""

import asyncio
import http.cookies
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from patience import patience

from openrlhf.worlds.base import WorldSettings
from openrlhf.worlds.environments import find_python
from openrlhf.worlds.process import WorldFailure, WorldProcess, WorldRefusal

TARGET = "openrlhf.worlds.nemo_gym"
INCREMENT = {
    "type": "function",
    "name": "increment_counter",
    "description": "Add to the counter.",
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    "strict": True,
}
VALUE = {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}}


def record(initial, expected, **more):
    asked = [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "input_text", "text": f"Bring {initial} to {expected}."}]},
    ]
    params = {"input": asked, "tools": [INCREMENT, VALUE], "parallel_tool_calls": False}
    return {"responses_create_params": params, "initial_count": initial, "expected_count": expected, **more}


class CounterServer(ThreadingHTTPServer):
    """A counter for each session, as `example_session_state_mgmt` of NeMo Gym has it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.counters, self.verified, self.names = {}, [], itertools.count()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cookie = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get("session")
        session = cookie.value if cookie else f"s{next(self.server.names)}"
        status, told = self.answer(self.path, body, session)
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Set-Cookie", f"session={session}; Path=/; HttpOnly; SameSite=lax")
        self.end_headers()
        self.wfile.write(data)

    def answer(self, path, body, session):
        counters = self.server.counters
        if path == "/seed_session":
            if "initial_count" not in body:
                return 422, {"detail": "initial_count: Field required"}
            counters[session] = body["initial_count"]
            return 200, {}
        if path == "/increment_counter":
            if not isinstance(body.get("count"), int):
                return 422, {"detail": [{"loc": ["body", "count"], "msg": "Input should be a valid integer"}]}
            counters[session] += body["count"]
            return 200, {"success": True, "done": counters[session] >= 100}
        if path == "/get_counter_value":
            return 200, {"count": counters[session]}
        if path == "/verify":
            self.server.verified.append(body)
            if body.get("broken"):
                return 200, {**body, "reward": 0.0, "mask_sample": True, "failure_reason": "the judge is away"}
            right = float(counters[session] == body["expected_count"])
            return 200, {**body, "reward": right, "reward_components": {"right": right}}
        return 404, {"detail": "Not Found"}

    def do_GET(self):
        self.send_error(404)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    made = CounterServer()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "train.jsonl"
    rows = [record(n, n + 3, agent_ref={"type": "responses_api_agents", "name": "counter"}) for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def world(url, **options):
    told = {"server": url, **options}
    settings = WorldSettings(options={name: value for name, value in told.items() if value is not None}, seed=1)
    return WorldProcess(TARGET, settings, python=find_python(TARGET), timeout=patience(30.0))


@pytest.fixture(scope="module")
def counter(server, records):
    process = world(server.url, records=str(records), steps=3, done_flag=True)
    yield process
    process.close()


def calling(*calls, content=""):
    told = [{"id": f"c{n}", "name": name, "arguments": arguments} for n, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": told, "truncated": False}


def saying(text, *, truncated=False):
    return {"role": "assistant", "content": text, "truncated": truncated}


async def play(process, label, *messages):
    episode = await process.begin(label, seed=0)
    turns = [await episode.step(message) for message in messages]
    await episode.close()
    return turns


def test_the_server_keeps_the_state_and_judges_the_response(counter, server):
    calls = calling(("increment_counter", {"count": 2}), ("increment_counter", {"count": 1}), content="Three.")
    called, told = asyncio.run(play(counter, record(3, 6), calls, saying("Done.")))
    assert [json.loads(message["content"])["success"] for message in called.messages] == [True, True]
    assert [message["tool_call_id"] for message in called.messages] == ["c0", "c1"]
    assert (told.done, told.reward) == (True, 1.0)
    assert told.logs == {"calls": 2, "calls_failed": 0, "calls_succeeded": 1.0, "right": 1.0}
    asked = server.verified[-1]
    assert asked["expected_count"] == 6
    assert asked["responses_create_params"] == record(3, 6)["responses_create_params"]
    output = asked["response"]["output"]
    assert [item["type"] for item in output] == [
        "message",
        *["function_call", "function_call_output"] * 2,
        "message",
    ]
    assert output[1]["call_id"] == output[2]["call_id"] != output[3]["call_id"]
    assert json.loads(output[1]["arguments"]) == {"count": 2}
    assert output[-1]["content"] == [{"type": "output_text", "text": "Done.", "annotations": []}]
    assert asked["response"]["object"] == "response"
    assert asked["response"]["parallel_tool_calls"] is False


def test_what_the_policy_reads_first_is_the_input_with_its_tools(counter):
    async def begun():
        episode = await counter.begin(record(3, 6), seed=0)
        return episode.start

    start = asyncio.run(begun())
    assert start.messages == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "Bring 3 to 6."},
    ]
    assert [tool["function"]["name"] for tool in start.tools] == ["increment_counter", "get_counter_value"]
    assert start.tools[0]["function"]["parameters"] == INCREMENT["parameters"]


def test_calls_that_fail_are_answered_with_the_servers_words(counter):
    """A mistyped argument, a path that is no tool, and a name that climbs out of the path."""
    calls = calling(("increment_counter", {"count": "a"}), ("verify", {}), ("../verify", {}))
    called, unread, told = asyncio.run(
        play(counter, record(3, 3), calls, saying("<tool_call>increment</tool_call>"), saying(""))
    )
    mistyped, *absent = [message["content"] for message in called.messages]
    assert "Input should be a valid integer" in mistyped
    assert all("there is no tool" in text for text in absent)
    assert "could not be read" in unread.messages[0]["content"]
    assert told.logs == {"calls": 4, "calls_failed": 4, "calls_succeeded": 0.0, "right": 1.0}


def test_sessions_do_not_mix(counter):
    async def all_of_them():
        return await asyncio.gather(
            *(
                play(counter, record(n, 2 * n), calling(("increment_counter", {"count": n})), saying("Done."))
                for n in range(24)
            )
        )

    assert [turns[-1].reward for turns in asyncio.run(all_of_them())] == [1.0] * 24


def test_limits_and_the_done_flag_end_an_episode_which_is_judged(counter):
    one = calling(("increment_counter", {"count": 1}))
    turns = asyncio.run(play(counter, record(3, 6), one, one, one))
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[-1].reward == 1.0
    (turn,) = asyncio.run(play(counter, record(90, 100), calling(("increment_counter", {"count": 10}))))
    assert (turn.done, turn.reward) == (True, 1.0)
    (turn,) = asyncio.run(play(counter, record(3, 3), saying("I", truncated=True)))
    assert (turn.done, turn.reward) == (True, 1.0)


@pytest.mark.parametrize(
    ("label", "why"),
    [
        (record(1, 1, broken=True), "could not judge: the judge is away"),
        ({"responses_create_params": {"input": "Hello."}}, "answers /seed_session with 422: .*Field required"),
    ],
)
def test_what_the_server_could_not_do_fails_the_episode(counter, label, why):
    with pytest.raises(WorldFailure, match=why):
        asyncio.run(play(counter, label, saying("Done.")))


def test_records_are_those_of_the_data_set(counter):
    told = list(counter.records(count=16, seed=4))
    first = [row["label"]["initial_count"] for row in told[:8]]
    assert sorted(first) == list(range(8))
    assert told[0]["datasource"] == "counter"
    assert told[0]["input"][1]["role"] == "user"


@pytest.mark.parametrize(
    ("options", "line", "why"),
    [
        ({"server": None}, "", "which resources server"),
        ({"records": None}, "", "which data set of NeMo Gym"),
        ({"records": "/absent.jsonl"}, "", "No such file"),
        ({}, '{"input": 1}', r"bad.jsonl:1: expected \{\"responses_create_params\""),
        ({}, '{"responses_create_params": {"input": [{"type": "reasoning"}]}}', "of type reasoning"),
        ({"server": "http://127.0.0.1:9"}, "", "no resources server answers at"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(server, records, tmp_path, options, line, why):
    path = str(records)
    if line:
        path = str(tmp_path / "bad.jsonl")
        (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(WorldRefusal, match=why):
        world(server.url, **{"records": path, **options}).start_now()


def test_two_steps_of_training(cli, server, records):
    ran = cli(
        "--train.agent_func_path", TARGET,
        data__prompt_dataset="none", reward__remote_url="none", data__label_key="none", data__max_len=512,
        world__samples=8, world__options=f"server={server.url},records={records}",
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    steps = [record for record in ran.metrics if record["kind"] == "train"]
    assert len(steps) == 2
    assert all(step["rollout/failed"] == 0 for step in steps)
