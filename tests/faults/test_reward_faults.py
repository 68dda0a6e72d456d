"""Reward servers that come and go while a run asks them."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faulty_runs import PROMPTS, ROUNDS, Inputs, assert_every_prompt_once
from reward_server import free_port

from openrlhf.rewards import http
from openrlhf.runs.rl_assembly import train

pytestmark = pytest.mark.slow

SERVER = """
import http.server, json, sys, time

class Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(sys.argv[2], "a") as log:
            log.write("asked\\n")
        time.sleep(0.1)
        rewards = [float(sum(map(ord, query)) % 5) for query in question["query"]]
        body = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""


class Judge:
    """A server in a process of its own, which may be killed and started again."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / name
        self._log.touch()
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/get_reward"

    @property
    def asked(self) -> int:
        return self._log.read_text().count("asked")

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVER, str(self.port), str(self._log)])
        while not _listens(self.port):
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def judges(tmp_path):
    pair = [Judge(tmp_path, name) for name in ("a", "b")]
    yield pair
    for judge in pair:
        judge.kill()


def test_a_server_that_dies_and_comes_back_is_asked_again(judges, tmp_path, monkeypatch):
    """Killed once it has been asked, back when the other has judged two more prompts alone."""
    monkeypatch.setattr(http, "FIRST_REST", 0.05)
    first, second = judges
    asked = {}

    def come_and_go() -> None:
        _wait(lambda: first.asked)
        first.kill()
        asked["before"], alone = first.asked, second.asked
        _wait(lambda: second.asked >= alone + 2)
        first.start()

    coming = threading.Thread(target=come_and_go)
    coming.start()
    inputs = Inputs.made(tmp_path)
    flags = {"train__launcher": "local", "vllm__num_engines": 0, "vllm__sync_verify": None, "vllm__sync_backend": None}
    flags |= {"rollout__batch_size": 1, "train__batch_size": 2, "train__full_determinism_enable": None}
    train(inputs.config(tmp_path / "run", reward__remote_url=f"{first.url},{second.url}", **flags))
    coming.join()
    assert_every_prompt_once(tmp_path / "run", rounds=ROUNDS * PROMPTS)
    assert first.asked > asked["before"]


def _wait(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
