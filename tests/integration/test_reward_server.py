"""The reward server over real sockets, with a model that tests can hold up: protocol, limits, failures, metrics."""

import asyncio
import contextlib
import json
import socket
import threading

import aiohttp
import torch
from patience import patience

from openrlhf.rewards.base import RewardError, RewardRequest
from openrlhf.rewards.http import HttpReward
from openrlhf.rewards.model import UnreadableError
from openrlhf.rewards.server import RewardServer, ServerLimits


class LetterModel:
    """Reads a letter as a token; the score of a text is the sum of its letters. May be held up, and fails at "!"."""

    def __init__(self):
        self.batches = []
        self.free = threading.Event()
        self.free.set()

    def read(self, texts):
        for index, text in enumerate(texts):
            if not text:
                raise UnreadableError(index, "the text is empty")
        return [torch.tensor([ord(letter) for letter in text]) for text in texts]

    def score(self, batch):
        texts = ["".join(map(chr, item.token_ids.tolist())) for item in batch]
        self.batches.append(texts)
        assert self.free.wait(patience(10))
        if any("!" in text for text in texts):
            raise RuntimeError("out of memory")
        return [float("nan") if "?" in text else score_of(text) for text in texts]

    def checked(self, scores):
        if any(score != score for score in scores):
            raise RewardError(f"gave {scores}")
        return scores


def score_of(text):
    return float(sum(map(ord, text)))


class Served:
    """A running server, a client, and the model behind it."""

    def __init__(self, server, model, session, url):
        self.server, self.model, self.session, self.url = server, model, session, url

    async def ask(self, *queries, **headers):
        return await self.send({"query": list(queries)}, **headers)

    async def send(self, body, **headers):
        """Status, headers and JSON of the answer. `body`: bytes are sent as they are."""
        data = body if isinstance(body, bytes) or hasattr(body, "__aiter__") else json.dumps(body).encode()
        async with self.session.post(f"{self.url}/get_reward", data=data, headers=headers) as response:
            return response.status, response.headers, await response.json()

    async def get(self, path):
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def held_up(self, *queries):
        """A request that the model is at, and stays at until `model.free` is set."""
        self.model.free.clear()
        before = len(self.model.batches)
        task = asyncio.create_task(self.ask(*queries))
        await until(lambda: len(self.model.batches) > before)
        return task


async def until(condition):
    async with asyncio.timeout(patience(10)):
        while not condition():
            await asyncio.sleep(0.002)


def serving(test=None, *, loaded=True, api_key=None, **limits):
    """Runs an async test with a `Served`."""
    settings = {"max_request_bytes": 10_000, "max_query_chars": 100, "max_queue": 8, "max_batch_tokens": 1000}

    @contextlib.asynccontextmanager
    async def started():
        model = LetterModel()
        server = RewardServer(limits=ServerLimits(**settings | limits), api_key=api_key)
        if loaded:
            server.serve_model(model)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.listen(listener)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                yield Served(server, model, session, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            model.free.set()
            await server.stop(1.0)
            assert await server.close(5.0)

    async def main():
        async with asyncio.timeout(patience(30)):
            async with started() as served:
                await test(served)
                served.model.free.set()
                await until(lambda: served.server.under_way == 0)

    asyncio.run(main())


class TestAnswers:
    def test_are_what_documents_show(self):
        async def test(served):
            status, _, answer = await served.send({"query": ["ab", "c"], "prompts": ["a", "c"], "labels": [1, None]})
            assert status == 200
            assert answer == {
                "rewards": [195.0, 99.0],
                "scores": [195.0, 99.0],
                "extra_logs": {"dummy_scores": [195.0, 99.0]},
            }

        serving(test)

    def test_nothing_is_answered_with_nothing(self):
        """Clients that share a list among servers may have nothing left for one of them."""

        async def test(served):
            status, _, answer = await served.ask()
            assert (status, answer["rewards"], served.model.batches) == (200, [], [])

        serving(test)

    def test_go_to_whom_they_belong_and_callers_that_wait_together_share_a_forward(self):
        async def test(served):
            held = await served.held_up("x")
            texts = [[f"{caller}{n}" for n in range(caller % 3 + 1)] for caller in range(20)]
            asked = [asyncio.create_task(served.ask(*t)) for t in texts]
            await until(lambda: served.server.under_way == 1 + sum(map(len, texts)))
            await asyncio.sleep(0.05)
            served.model.free.set()
            for some, (status, _, answer) in zip(texts, await asyncio.gather(*asked), strict=True):
                assert status == 200
                assert answer["rewards"] == [score_of(text) for text in some]
            await held
            assert sorted(served.model.batches[1]) == sorted(text for some in texts for text in some)
            assert len(served.model.batches) == 2

        serving(test, max_queue=100)

    def test_a_forward_keeps_its_budgets(self):
        async def test(served):
            await served.ask("a", "bb", "ccc", "dddd", "e")
            assert served.model.batches == [["a", "bb"], ["ccc"], ["dddd", "e"]]

        serving(test, max_batch_tokens=6, max_batch_queries=2)

    def test_our_own_client_gets_them(self):
        async def test(served):
            client = HttpReward([served.url], timeout=10, api_key="SECRET\n")
            await client.start()
            request = RewardRequest(queries=("ab", "c"), prompts=("a", "c"), labels=("", ""), name="record 1")
            assert [(r.reward, r.score) for r in await client.score(request)] == [(195.0, 195.0), (99.0, 99.0)]
            await client.close()

        serving(test, api_key="SECRET")


BAD = {
    "not JSON": (b"{", 400, "not JSON"),
    "not UTF-8": (b'{"query": ["\xff"]}', 400, "not JSON"),
    "nothing": (b"", 400, "not JSON"),
    "deep": (b"[" * 9000, 400, "not JSON"),
    "a list": (["a"], 422, "got a JSON array"),
    "another name": ({"queries": ["a"]}, 422, "keys ['queries']"),
    "a text": ({"query": "a"}, 422, '"query" as string'),
    "null": ({"query": None}, 422, '"query" as null'),
    "a number in it": ({"query": ["a", 1]}, 422, "query[1] must be a text, got number"),
    "a list in it": ({"query": [["a"]]}, 422, "query[0] must be a text, got array"),
    "half a character": (b'{"query": ["a", "\\ud83d"]}', 422, "query[1] is not Unicode"),
    "no tokens": ({"query": ["a", ""]}, 422, "query[1]: the text is empty"),
    "too long": ({"query": ["a", "b" * 101]}, 413, "query[1] has 101 characters; it may have 100 (--max_query_chars)"),
    "too many": ({"query": ["a"] * 9}, 413, "9 queries; a request may have 8 (--max_queue)"),
    "too large": ({"query": ["a"], "labels": "b" * 10_000}, 413, "more than 10000 bytes (--max_request_bytes)"),
    "much too large": (b"x" * 5_000_000, 413, "more than 10000 bytes"),
}


class TestRefusals:
    def test_say_why_and_the_next_request_is_served(self):
        async def test(served):
            for case, (body, status, words) in BAD.items():
                answered, _, answer = await served.send(body)
                assert (case, answered) == (case, status)
                assert words in answer["detail"], case
                assert served.model.batches == [], case
            assert (await served.ask("a"))[0] == 200

        serving(test)

    def test_a_body_that_does_not_say_its_size(self):
        async def parts():
            for _ in range(100):
                yield b" " * 1000

        async def test(served):
            status, _, answer = await served.send(parts())
            assert (status, answer["detail"]) == (413, "the request has more than 10000 bytes (--max_request_bytes)")

        serving(test)

    def test_the_key(self, caplog):
        wrong = [None, "", "SECRET", "Basic SECRET", "Bearer", "Bearer SECRE", "Bearer SECRETS", "Bearer ümlaut"]
        right = ["Bearer SECRET", "bearer  SECRET"]

        async def test(served):
            for header in wrong + right:
                status, headers, answer = await served.ask(
                    "a", **{"Authorization": header} if header is not None else {}
                )
                assert (header, status) == (header, 401 if header in wrong else 200)
                assert ("WWW-Authenticate" in headers) == (header in wrong)
                assert "SECRET" not in str(answer)
            assert len(served.model.batches) == len(right)
            assert (await served.get("/health"))[0] == (await served.get("/metrics"))[0] == 200

        serving(test, api_key="SECRET")
        assert "SECRET" not in caplog.text

    def test_a_full_queue(self):
        """8 may be under way. 1 is computed and 5 wait: 3 more are too many, 2 are not."""

        async def test(served):
            first = await served.held_up("a")
            second = asyncio.create_task(served.ask(*"bcdef"))
            await until(lambda: served.server.under_way == 6)
            status, headers, answer = await served.ask(*"ghi")
            assert (status, headers["Retry-After"]) == (503, "1")
            assert answer["detail"] == "6 queries are under way, and at most 8 may be (--max_queue)"
            third = asyncio.create_task(served.ask(*"jk"))
            await until(lambda: served.server.under_way == 8)
            served.model.free.set()
            assert [(await one)[0] for one in (first, second, third)] == [200, 200, 200]
            assert (await served.ask(*"ghilmnop"))[0] == 200
            assert "g" not in "".join(text for batch in served.model.batches[:-1] for text in batch)

        serving(test)

    def test_while_the_model_is_loaded(self):
        async def test(served):
            assert await served.get("/health") == (503, '{"status":"loading"}')
            status, headers, answer = await served.ask("a")
            assert (status, headers["Retry-After"]) == (503, "5")
            assert "loaded" in answer["detail"]
            served.server.serve_model(served.model)
            assert await served.get("/health") == (200, '{"status":"ready"}')
            assert (await served.ask("a"))[0] == 200

        serving(test, loaded=False)

    def test_other_places(self):
        async def test(served):
            assert (await served.get("/"))[0] == 404
            assert (await served.get("/get_reward"))[0] == 405
            assert (await served.get("/docs"))[0] == 404

        serving(test)


class TestFailures:
    def test_a_failed_forward_is_an_answer_and_not_the_end(self, caplog):
        async def test(served):
            status, _, answer = await served.ask("a!")
            assert (status, answer) == (500, {"detail": "the reward model failed: out of memory"})
            assert (await served.ask("a"))[2]["rewards"] == [97.0]

        serving(test)
        assert "out of memory" in caplog.text

    def test_a_score_that_is_no_number_fails_its_request_alone(self):
        async def test(served):
            held = await served.held_up("x")
            asked = [asyncio.create_task(served.ask(text)) for text in ("a", "?", "b")]
            await until(lambda: served.server.under_way == 4)
            served.model.free.set()
            assert [(await one)[0] for one in asked] == [200, 500, 200]
            await held

        serving(test)

    def test_a_caller_who_has_gone_costs_no_forward(self):
        async def test(served):
            held = await served.held_up("a")
            gone = asyncio.create_task(served.ask("b", "c"))
            await until(lambda: served.server.under_way == 3)
            gone.cancel()
            await until(lambda: served.server.under_way == 1)
            served.model.free.set()
            assert (await held)[0] == 200
            assert (await served.ask("d"))[0] == 200
            assert served.model.batches == [["a"], ["d"]]

        serving(test)

    def test_a_caller_who_goes_in_the_middle_of_the_request(self, caplog):
        async def test(served):
            host, port = served.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            async with asyncio.timeout(patience(10)):
                while 'requests_total{status="499"} 1' not in (await served.get("/metrics"))[1]:
                    await asyncio.sleep(0.01)

        serving(test)
        assert "Traceback" not in caplog.text

    def test_out_of_time_everybody_is_told(self):
        async def test(served):
            held = await served.held_up("a")
            waiting = asyncio.create_task(served.ask("b"))
            await until(lambda: served.server.under_way == 2)
            served.server.give_up()
            for asked in (held, waiting):
                status, headers, answer = await asked
                assert (status, headers["Retry-After"]) == (503, "5")
                assert "stopped" in answer["detail"]
            assert served.server.given_up == 2

        serving(test)

    def test_a_request_whose_body_is_still_coming_when_the_server_stops_is_answered(self):
        """An idle connection is closed at once."""

        async def test(served):
            host, port = served.url.removeprefix("http://").split(":")
            idle, idle_writer = await asyncio.open_connection(host, int(port))
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 17\r\n\r\n{")
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(served.server.stop(10.0))
            assert await idle.read() == b""
            writer.write(b'"query": ["ab"]}')
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"rewards":[195.0]' in answer
            await stopping
            for one in (writer, idle_writer):
                one.close()

        serving(test)

    def test_a_server_that_stops_answers_what_takes_too_long_with_503(self):
        async def test(served):
            held = await served.held_up("a")
            await served.server.stop(0.2)
            status, headers, answer = await held
            assert (status, headers["Retry-After"], headers["Connection"]) == (503, "5", "close")
            assert "stopped" in answer["detail"]
            assert served.server.given_up == 1

        serving(test)

    def test_closing_tells_whether_the_model_still_computes(self):
        async def run():
            server = RewardServer(
                limits=ServerLimits(max_request_bytes=1, max_query_chars=1, max_queue=1, max_batch_tokens=1)
            )
            server.model_thread.submit(free.wait, 10)
            return await server.close(0.05)

        free = threading.Event()
        assert asyncio.run(run()) is False
        free.set()
        assert asyncio.run(run()) is True


class TestSlowCallers:
    """Raw sockets. The limit is half a second; whoever keeps to it is answered however long the model takes."""

    def talking(self, talk, **limits):
        """Runs `talk(reader, writer, served)` on a connection."""

        async def test(served):
            host, port = served.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(writer):
                await talk(reader, writer, served)

        serving(test, **{"read_seconds": 0.5} | limits)

    async def trickle(self, reader, writer, text):
        """Byte for byte, until the other side has had enough. What it said."""
        said = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            for byte in text:
                writer.write(bytes([byte]))
                await writer.drain()
                if (await asyncio.wait([said], timeout=0.05))[0]:
                    break
            else:
                raise AssertionError("all of it was read")
        with contextlib.suppress(ConnectionError):
            return await said
        return b""

    def test_headers_that_never_end(self):
        async def talk(reader, writer, served):
            assert await self.trickle(reader, writer, b"POST /get_reward HTTP/1.1\r\nX: " + b"x" * 1000) == b""

        self.talking(talk)

    def test_a_connection_without_a_word(self):
        async def talk(reader, writer, served):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""

        self.talking(talk)

    def test_the_second_request_of_a_connection(self):
        """The limit between two requests does not begin again with each byte of the second."""

        async def talk(reader, writer, served):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"ready" in await reader.readuntil(b"}")
            assert await self.trickle(reader, writer, b"GET /health HTTP/1.1\r\nX: " + b"x" * 1000) == b""

        self.talking(talk)

    def test_a_body_that_never_ends(self):
        async def talk(reader, writer, served):
            writer.write(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n")
            said = await self.trickle(reader, writer, b"x" * 9000)
            assert said.startswith(b"HTTP/1.1 408 ")
            assert b"the body was not there after 0.5 s (--read_timeout)" in said

        self.talking(talk)

    def test_who_is_refused_does_not_stay_by_sending_on(self):
        async def talk(reader, writer, served):
            writer.write(b"POST /get_reward HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n")
            assert (await self.trickle(reader, writer, b"x" * 9000)).startswith(b"HTTP/1.1 401 ")

        self.talking(talk, api_key="SECRET")

    def test_too_many_headers(self):
        async def talk(reader, writer, served):
            writer.write(b"GET /health HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(6000)) + b"\r\n")
            with contextlib.suppress(ConnectionError):
                assert (await reader.read()).split()[1] == b"400"

        self.talking(talk)

    def test_headers_of_more_than_32_kib(self):
        """Ten headers of 3 KiB are read, eleven are refused and end the connection."""

        async def talk(reader, writer, served):
            for count, status in ((10, b"200"), (11, b"400")):
                headers = b"".join(b"x%d: %s\r\n" % (i, b"y" * 3072) for i in range(count))
                writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")
                assert (await reader.readuntil(b"}")).split()[1] == status
            assert await reader.read() == b""

        self.talking(talk)

    def test_a_slow_model_is_nobodys_fault(self):
        async def talk(reader, writer, served):
            held = await served.held_up("a")
            await asyncio.sleep(3.0)  # more than the limit and the time for an answer that says so
            served.model.free.set()
            assert (await held)[0] == 200

        self.talking(talk)


class TestMetrics:
    def test_count_what_was_done(self):
        """Forwards: [a, bb] (3 tokens) and [ccc] (3 tokens). Answers: 200 twice, 422 once, 413 once."""

        async def test(served):
            await served.ask("a", "bb")
            await served.ask("ccc")
            await served.ask("")
            await served.ask("a" * 101)
            held = await served.held_up("dd")
            status, text = await served.get("/metrics")
            served.model.free.set()
            await held
            samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            lines = {name: float(value) for name, value in samples}
            name = "openrlhf_reward_"
            assert status == 200
            assert lines[f"{name}ready"] == 1
            assert lines[f"{name}queries_under_way"] == 1
            assert lines[f'{name}requests_total{{status="200"}}'] == 2
            assert lines[f'{name}requests_total{{status="413"}}'] == 1
            assert lines[f'{name}requests_total{{status="422"}}'] == 1
            assert lines[f"{name}queries_total"] == 3
            assert lines[f"{name}tokens_total"] == 8, "those of the forward under way among them"
            assert lines[f'{name}batch_queries_bucket{{le="1.0"}}'] == 2
            assert lines[f'{name}batch_queries_bucket{{le="2.0"}}'] == 3
            assert lines[f'{name}batch_queries_bucket{{le="+Inf"}}'] == lines[f"{name}batch_queries_count"] == 3
            assert lines[f"{name}batch_queries_sum"] == 4
            assert lines[f"{name}request_seconds_count"] == 4
            families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
            assert len(families) == len(set(families)) == 7

        serving(test)
