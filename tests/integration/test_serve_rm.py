"""`python -m openrlhf.cli.serve_rm` as a process: scores under load, limits, shutdown."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import pytest
import torch
from patience import patience
from small_sections import loading
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.checkpoint.export import export_value_model
from openrlhf.cli.serve_rm import main
from openrlhf.models.loading import load_tokenizer, load_value_model
from openrlhf.models.value import Normalisation
from openrlhf.rewards.base import RewardRequest
from openrlhf.rewards.http import HttpReward

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
CONNECTIONS = 64
MAX_LEN = 12
MEAN, STD = 0.25, 0.5


class Server:
    """A process that serves, on a port the system chose. stderr is read as it comes."""

    def __init__(self, model, *flags):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf.cli.serve_rm", "--reward_pretrain", str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
            start_new_session=True,
        )
        self.said = []
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.ready.wait(timeout=60), self.said
        found = re.search(r"http://127\.0\.0\.1:\d+", "".join(self.said))
        assert found, self.said
        self.url = found.group()

    def _read(self):
        for line in self.process.stderr:
            self.said.append(line)
            if line == "INFO ready\n":
                self.ready.set()

    def wait(self):
        """Its exit status, once it has ended by itself."""
        status = self.process.wait(timeout=30)
        self._reader.join(timeout=patience(5))
        return status

    def kill(self):
        self.process.kill()
        self.process.wait()


def _python_path():
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def ours(inputs, tmp_path_factory):
    """As train_rm writes it: a random head on the demo's body, with mean and std."""
    model = load_value_model(inputs.model, loading(seed=1))
    folder = tmp_path_factory.mktemp("ours") / "model"
    return export_value_model(model, load_tokenizer(inputs.model), folder, statistics=Normalisation(MEAN, STD))


@pytest.fixture(scope="module")
def theirs(inputs, tmp_path_factory):
    """As anybody writes it with transformers alone."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("theirs") / "model"
    AutoModelForSequenceClassification.from_pretrained(inputs.model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(inputs.model).save_pretrained(folder)
    return folder


def scores_of(folder, texts):
    """By transformers' own classes, one text at a time: the head at the last of at most MAX_LEN last tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = {}
    with torch.no_grad():
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][-MAX_LEN:]
            hidden = classifier.model(torch.tensor([ids])).last_hidden_state[0, -1]
            scores[text] = classifier.score(hidden).item()
    return scores


def some_texts(count, *, seed=0):
    """Different ones of 2 to 20 digits and a mark, so that some are longer than MAX_LEN."""
    draw = random.Random(seed)
    texts = set()
    while len(texts) < count:
        texts.add("".join(draw.choices("0123456789", k=draw.randint(2, 20))) + ">")
    return sorted(texts)


@pytest.fixture(scope="module")
def server(ours):
    server = Server(
        ours,
        *["--max_len", str(MAX_LEN), "--normalize_reward", "--api_key", "SECRET"],
        *[
            "--max_tokens_per_gpu",
            "400",
            "--max_queue",
            "2000",
            "--max_request_bytes",
            "100000",
            "--max_query_chars",
            "1000",
        ],
    )
    yield server
    server.kill()


def client(**headers):
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=60)
    )


async def metrics_of(session, url):
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_many_callers_each_get_the_scores_of_their_own_queries(server, ours):
    """64 connections, 4 requests each with 1 … 8 queries: as transformers scores them alone, normalised."""
    texts = some_texts(300)
    expected = {text: (score - MEAN) / STD for text, score in scores_of(ours, texts).items()}
    assert len({round(score, 4) for score in expected.values()}) > 150, "a swapped answer would show"

    async def caller(session, number):
        draw = random.Random(number)
        checked = 0
        for _ in range(4):
            queries = draw.choices(texts, k=draw.randint(1, 8))
            async with session.post(f"{server.url}/get_reward", json={"query": queries}) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
            assert answer["rewards"] == pytest.approx([expected[q] for q in queries], rel=1e-4, abs=1e-5)
            assert answer["scores"] == answer["extra_logs"]["dummy_scores"] == answer["rewards"]
            checked += len(queries)
        return checked

    async def run():
        async with client(Authorization="Bearer SECRET") as session:
            before = await metrics_of(session, server.url)
            counts = await asyncio.gather(*(caller(session, number) for number in range(CONNECTIONS)))
            return sum(counts), before, await metrics_of(session, server.url)

    queries, before, after = asyncio.run(run())
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['openrlhf_reward_requests_total{status="200"}'] == CONNECTIONS * 4
    assert grown["openrlhf_reward_queries_total"] == grown["openrlhf_reward_batch_queries_sum"] == queries
    assert after["openrlhf_reward_queries_under_way"] == 0
    assert queries / grown["openrlhf_reward_batch_queries_count"] > 8, "more than any one caller asked for at once"
    assert grown["openrlhf_reward_tokens_total"] <= 400 * grown["openrlhf_reward_batch_queries_count"]


def test_our_client_judges_with_it(server, ours):
    texts = ("12345>", "12345>1", "12345>12345")

    async def run():
        reward = HttpReward([server.url], timeout=30, api_key="SECRET")
        await reward.start()
        request = RewardRequest(queries=texts, prompts=("12345>",) * 3, labels=("",) * 3, name="record 1")
        judged = await reward.score(request)
        await reward.close()
        return [one.reward for one in judged]

    expected = [(score - MEAN) / STD for score in scores_of(ours, texts).values()]
    assert asyncio.run(run()) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_what_cannot_be_answered_is_refused(server):
    cases = [
        (b"{", {}, 400),
        (json.dumps({"queries": ["1"]}).encode(), {}, 422),
        (json.dumps({"query": ["1", None]}).encode(), {}, 422),
        (json.dumps({"query": [""]}).encode(), {}, 422),
        (json.dumps({"query": ["1" * 1001]}).encode(), {}, 413),
        (json.dumps({"query": ["1"] * 2001}).encode(), {}, 413),
        (b" " * 10_000_000, {}, 413),
        (json.dumps({"query": ["1"]}).encode(), {"Authorization": "Bearer SECRETS"}, 401),
    ]

    async def run():
        async with client(Authorization="Bearer SECRET") as session:
            for body, headers, status in cases:
                async with session.post(f"{server.url}/get_reward", data=body, headers=headers) as response:
                    assert response.status == status, body[:50]
                    assert (await response.json())["detail"]
            async with session.post(f"{server.url}/get_reward", json={"query": ["1"]}) as response:
                assert response.status == 200
            async with session.get(f"{server.url}/health") as response:
                assert (response.status, await response.json()) == (200, {"status": "ready"})

    asyncio.run(run())
    assert "SECRET" not in "".join(server.said)
    assert "Traceback" not in "".join(server.said)


def test_sigterm_lets_all_that_was_asked_be_answered(theirs):
    """One query per forward, so that the signal comes while many wait; what the queue has no room for gets its 503."""
    texts = some_texts(CONNECTIONS * 6)
    expected = scores_of(theirs, texts)
    server = Server(theirs, "--max_len", str(MAX_LEN), "--batch_size", "1", "--max_queue", str(len(texts)))

    async def caller(session, queries):
        async with session.post(f"{server.url}/get_reward", json={"query": queries}) as response:
            return response.status, await response.json(), response.headers.get("Retry-After")

    async def accepted(session):
        seen = await metrics_of(session, server.url)
        return seen["openrlhf_reward_queries_under_way"] + seen["openrlhf_reward_queries_total"]

    async def run():
        async with client() as session:
            callers = [asyncio.create_task(caller(session, texts[i::CONNECTIONS])) for i in range(CONNECTIONS)]
            async with asyncio.timeout(patience(20)):
                while await accepted(session) < len(texts):
                    await asyncio.sleep(0.005)
            refused = await asyncio.gather(*(caller(session, texts) for _ in range(2)))
            os.kill(server.process.pid, signal.SIGTERM)
            answered = await asyncio.gather(*callers)
        async with client() as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await caller(session, ["1>"])
        return answered, refused

    try:
        answered, refused = asyncio.run(run())
        assert server.wait() == 0, server.said
    finally:
        server.kill()
    for i, (status, answer, _) in enumerate(answered):
        assert status == 200, answer
        assert answer["rewards"] == pytest.approx(
            [expected[text] for text in texts[i::CONNECTIONS]], rel=1e-4, abs=1e-5
        )
    assert [(status, wish) for status, _, wish in refused] == [(503, "1")] * 2
    under_way = re.search(r"INFO stopping; queries under way: (\d+)", "".join(server.said))
    assert int(under_way.group(1)) > 0, "the signal came too late to test anything"
    assert "Traceback" not in "".join(server.said)


def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(inputs, capfd):
    assert main(["--reward_pretrain", str(inputs.model), "--port", "0"]) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "--reward.model_name_or_path" in errors[0]
    assert "no score.weight" in errors[0]


def test_a_port_that_is_taken(ours, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--reward_pretrain", str(ours), "--port", str(port)]) == 2
    err = capfd.readouterr().err
    assert f"serve_rm: error: --host 127.0.0.1 --port {port}: cannot listen there: Address already in use" in err


def test_ctrl_c_ends_it_as_well(server):
    """The last test: the server is gone after it."""
    os.kill(server.process.pid, signal.SIGINT)
    assert server.wait() == 0, server.said
