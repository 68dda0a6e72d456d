"""Rewards over real HTTP: servers that are slow, busy, broken or gone cost time, never a made-up reward."""

import asyncio
import contextlib
import json
import re
import time

import pytest
from aiohttp import web
from patience import patience
from reward_server import RewardServer, free_port, lengths

from openrlhf.rewards import http
from openrlhf.rewards.base import RewardError, RewardRequest
from openrlhf.rewards.http import HttpReward


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(http, "FIRST_REST", 0.05)


def request(responses=("ab", "abc"), *, label="5", name="prompt 17"):
    n = len(responses)
    return RewardRequest(
        queries=tuple("q:" + r for r in responses), prompts=("q:",) * n, labels=(label,) * n, name=name
    )


def judge(*sources, requests=1, one_by_one=False, start=True, timeout=10.0, **options):
    """What the same requests give, (rewards or the error's text, seconds) each, from servers or their URLs."""

    async def outcome(reward, number):
        before = time.monotonic()
        try:
            result = [r.reward for r in await reward.score(request(name=f"prompt {number}"))]
        except RewardError as error:
            result = str(error)
        return result, time.monotonic() - before

    async def main():
        urls = [source if isinstance(source, str) else source.url for source in sources]
        reward = HttpReward(urls, timeout=timeout, **options)
        async with contextlib.aclosing(_Closing(reward)):
            if start:
                await reward.start()
            if one_by_one:
                return [await outcome(reward, i) for i in range(requests)]
            return await asyncio.gather(*(outcome(reward, i) for i in range(requests)))

    return asyncio.run(main())


class _Closing:
    def __init__(self, reward):
        self.aclose = reward.close


def text(status, body="x", **headers):
    return web.Response(status=status, text=body, headers=headers)


def first(count, answer):
    """`answer` to the first questions, then rewards."""

    def behaviour(question, before):
        return (answer(question) if callable(answer) else answer) if before < count else lengths(question)

    return behaviour


class TestAnswers:
    def test_what_is_sent_and_what_comes_back(self):
        def behaviour(question, before):
            return {"rewards": [1, 0.5], "scores": [True, 0], "extra_logs": {"chars": [2, 3], "one": 1}}

        async def main(url):
            reward = HttpReward([url], timeout=10)
            await reward.start()
            judged = await reward.score(request(label={"answer": [5]}))
            await reward.close()
            return judged

        with RewardServer(behaviour) as server:
            judged = asyncio.run(main(server.url))
        assert server.questions == [
            {"query": ["q:ab", "q:abc"], "prompts": ["q:", "q:"], "labels": [{"answer": [5]}, {"answer": [5]}]}
        ]
        assert [(r.reward, r.score) for r in judged] == [(1.0, 1.0), (0.5, 0.0)]
        assert [r.extra_logs for r in judged] == [{"chars": 2.0, "one": 1.0}, {"chars": 3.0, "one": 1.0}]

    @pytest.mark.parametrize("answer", [{"rewards": [2, 3]}, [2, 3], {"rewards": [[2], [3]], "scores": None}])
    def test_only_rewards_are_needed(self, answer):
        with RewardServer(lambda question, before: answer) as server:
            assert judge(server)[0][0] == [2.0, 3.0]

    def test_one_number_for_all_is_warned_about_once(self, caplog):
        with RewardServer(lambda question, before: {"rewards": 0.5}) as server:
            assert [rewards for rewards, _ in judge(server, requests=3)] == [[0.5, 0.5]] * 3
        assert caplog.text.count("one number for 2 samples") == 1

    def test_a_path_is_added_where_there_is_none(self):
        with RewardServer() as server:
            assert judge(server.url.removesuffix("/get_reward"))[0][0] == [2.0, 3.0]

    def test_connections_are_used_again(self):
        with RewardServer() as server:
            judge(server, requests=20, one_by_one=True)
        assert len(server.questions) == 20
        assert len(server.connections) == 1

    def test_at_most_so_many_requests_at_once(self):
        async def slow(question, before):
            await asyncio.sleep(0.7)
            return lengths(question)

        with RewardServer(slow) as server:
            # Four rounds take at least 2.8 s. Their time counts from when they are sent, so those who wait for their
            # turn are not late.
            outcomes = judge(server, requests=12, max_concurrency=3, timeout=2.5)
        assert [rewards for rewards, _ in outcomes] == [[2.0, 3.0]] * 12
        assert server.most_at_once == 3

    def test_work_is_shared_by_what_is_under_way(self):
        """A answers at once and B takes 20 times as long: whoever is free gets the next group."""

        def after(seconds):
            async def behaviour(question, before):
                await asyncio.sleep(seconds)
                return lengths(question)

            return behaviour

        with RewardServer(after(0.01)) as quick, RewardServer(after(0.2)) as slow:
            outcomes = judge(quick, slow, requests=40, max_concurrency=2)
        assert all(rewards == [2.0, 3.0] for rewards, _ in outcomes)
        assert len(quick.questions) > 2 * len(slow.questions) > 0

    def test_equal_servers_get_equal_shares(self):
        async def slow(question, before):
            await asyncio.sleep(0.05)
            return lengths(question)

        with RewardServer(slow) as a, RewardServer(slow) as b:
            judge(a, b, requests=16)
        assert len(a.questions) == len(b.questions) == 8


class TestFailures:
    """Of one server, with nobody else to ask."""

    @pytest.mark.parametrize(
        "answer",
        [
            text(500, "oops"),
            text(503),
            text(429),
            text(429, **{"Retry-After": "0.1"}),
            text(503, **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
            text(200, "<html>not JSON</html>"),
            text(200, "[" * 100_000),
            {"scores": [1, 1]},
            {"rewards": [1]},
            {"rewards": [1, 2, 3]},
            text(200, '{"rewards": [1, NaN]}'),
            {"rewards": ["a", "b"]},
        ],
        ids=lambda answer: (getattr(answer, "text", None) and f"{answer.status} {answer.text[:10]}") or str(answer),
    )
    def test_what_may_pass_is_asked_again(self, answer):
        def again():
            if not isinstance(answer, web.Response):
                return answer
            return web.Response(status=answer.status, text=answer.text, headers=answer.headers)

        with RewardServer(first(2, lambda question: again())) as server:
            rewards, seconds = judge(server)[0]
        assert rewards == [2.0, 3.0]
        assert len(server.questions) == 3
        assert seconds < patience(5.0)

    @pytest.mark.parametrize(
        ("status", "body", "expected"),
        [
            (500, "x" * 300, "answered 500 Internal Server Error: " + "x" * 200 + " (given up after 5 attempts in "),
            (200, "<html>", "answered something that is not JSON: <html> (given up after 5 attempts in "),
            (200, "", "answered something that is not JSON: (nothing)"),
            (200, '{"rewards": [1]}', "what it answered cannot be used: its rewards has 1 values for 2 samples: [1]"),
            (200, '{"rewards": [1, NaN]}', "its rewards[1] must be finite, got nan"),
            (200, '{"error": "no"}', "a dict without 'rewards' (with 'error')"),
        ],
    )  # fmt: skip
    def test_what_does_not_pass_is_given_up(self, status, body, expected):
        with RewardServer(lambda question, before: text(status, body)) as server:
            message, _ = judge(server)[0]
        assert message.startswith(f"prompt 0: {server.url}")
        assert expected in message
        assert len(server.questions) == 5

    @pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
    def test_what_was_asked_wrongly_is_not_asked_again(self, status):
        with RewardServer(lambda question, before: text(status, '{"detail": "no"}')) as server:
            message, _ = judge(server)[0]
        assert f"{server.url} answered {status} " in message
        assert '{"detail": "no"} (given up after 1 attempt in ' in message
        assert len(server.questions) == 1

    def test_redirects_are_not_followed(self):
        with RewardServer() as other, RewardServer(lambda q, n: text(307, Location=other.url)) as server:
            message, _ = judge(server, api_key="SECRET")[0]
            assert f"answered 307: it leads to {other.url}; name that" in message
        assert other.questions == []

    def test_a_server_that_hangs_costs_the_time_that_was_allowed(self):
        async def hang(question, before):
            await asyncio.sleep(60)

        with RewardServer(hang) as server:
            outcomes = judge(server, requests=4, timeout=0.5)
        for message, seconds in outcomes:
            assert "did not answer in 0.5 s" in message
            assert 0.4 < seconds < patience(3.0)

    def test_a_server_that_is_gone_for_a_while_is_waited_for(self):
        with RewardServer() as server:
            pass

        async def main():
            reward = HttpReward([server.url], timeout=20)
            judging = asyncio.create_task(reward.score(request()))
            await asyncio.sleep(0.3)
            assert not judging.done()
            with server:
                judged = await judging
                await reward.close()
            return [r.reward for r in judged]

        assert asyncio.run(main()) == [2.0, 3.0]

    def test_a_server_that_stays_away_is_an_error_that_says_so(self):
        url = f"http://127.0.0.1:{free_port()}/get_reward"
        (message, seconds), *_ = judge(url, requests=4, start=False, timeout=0.6)
        assert seconds < patience(3.0)
        assert url in message
        assert "Cannot connect" in message
        assert "--reward.timeout 0.6" in message

    def test_connections_that_break(self):
        """Before the answer, in the middle of it, and with something that is not HTTP; then as it should be."""
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n"
        answers = [b"", head + b'{"rewards"', b"HELLO\r\n\r\n", head + b'{"rewards": [2, 3]}']

        async def main():
            async def handle(reader, writer):
                await reader.readuntil(b"}")
                writer.write(answers.pop(0))
                await writer.drain()
                writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            reward = HttpReward([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], timeout=5)
            judged = await reward.score(request())
            await reward.close()
            server.close()
            return [r.reward for r in judged]

        assert asyncio.run(main()) == [2.0, 3.0]

    def test_labels_that_json_does_not_know(self):
        async def main(label):
            reward = HttpReward(["http://127.0.0.1:1"], timeout=1)
            await reward.score(request(label=label))

        for label in (object(), float("nan"), {1, 2}):
            with pytest.raises(RewardError, match="prompt 17: its label cannot be sent to a reward server as JSON"):
                asyncio.run(main(label))


class TestSeveral:
    def test_another_server_is_asked_at_once(self):
        """No pause: one of 15 s or more would be beyond the time that is allowed, and an error."""
        with (
            RewardServer() as good,
            RewardServer(lambda question, before: text(500)) as bad,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(http, "FIRST_PAUSE", 30.0)
            patch.setattr(http, "LONGEST_PAUSE", 30.0)
            outcomes = judge(bad, good, requests=8, one_by_one=True)
        assert all(rewards == [2.0, 3.0] for rewards, _ in outcomes)
        assert bad.questions

    def test_a_server_that_fails_is_left_alone(self, monkeypatch, caplog):
        """It answers its errors quickly, so it always seems the least busy; three of them are enough."""
        monkeypatch.setattr(http, "FIRST_REST", 60.0)
        with RewardServer() as good, RewardServer(lambda question, before: text(500, "oops")) as bad:
            outcomes = judge(bad, good, requests=30, one_by_one=True)
        assert all(rewards == [2.0, 3.0] for rewards, _ in outcomes)
        assert len(bad.questions) == 3
        assert caplog.text.count("is down") == 1
        assert "oops" in caplog.text

    def test_one_that_hangs_leaves_time_for_another(self):
        async def hang(question, before):
            await asyncio.sleep(60)

        with RewardServer() as good, RewardServer(hang) as bad:
            rewards, seconds = judge(bad, good, timeout=1.0)[0]
        assert rewards == [2.0, 3.0]
        assert 0.4 < seconds < patience(2.0)

    def test_a_refusal_is_tried_on_one_other_server(self):
        with (
            RewardServer(lambda question, before: text(422)) as a,
            RewardServer(lambda question, before: text(400)) as b,
            RewardServer() as c,
        ):
            message, _ = judge(a, b, c)[0]
            assert judge(a, c)[0][0] == [2.0, 3.0]
        assert f"{b.url} answered 400 Bad Request: x (given up after 2 attempts" in message
        assert (len(a.questions), len(b.questions)) == (2, 1)

    def test_a_busy_server_is_left_alone_as_long_as_it_asks(self):
        with RewardServer() as good, RewardServer(lambda q, n: text(429, **{"Retry-After": "20"})) as busy:
            outcomes = judge(busy, good, requests=6, one_by_one=True)
        assert all(rewards == [2.0, 3.0] and seconds < patience(2.0) for rewards, seconds in outcomes)
        assert len(busy.questions) == 1

    def test_busier_than_anybody_waits(self):
        with RewardServer(lambda question, before: text(429, "later", **{"Retry-After": "20"})) as busy:
            message, seconds = judge(busy, timeout=1.0)[0]
        assert seconds < patience(3.0)
        assert message == (
            f"prompt 0: the reward server is down or busy: {busy.url} answered 429 Too Many Requests: later "
            "(--reward.timeout 1)"
        )

    def test_all_down(self):
        with RewardServer(lambda q, n: text(503, "one")) as a, RewardServer(lambda q, n: text(503, "two")) as b:
            outcomes = judge(a, b, requests=6, timeout=1.0)
        for message, seconds in outcomes:
            assert seconds < patience(3.0)
            assert re.search("all 2 reward servers are down or busy: .*one.*; .*two|answered 503 .* given up", message)

    def test_one_dies_while_many_are_judged(self):
        """Nobody notices: its groups are judged by the other, with the same rewards."""

        async def slow(question, before):
            await asyncio.sleep(0.02)
            return lengths(question)

        async def main(a, b):
            reward = HttpReward([a.url, b.url], timeout=10, max_concurrency=4)
            await reward.start()
            judging = [asyncio.create_task(reward.score(request(name=f"prompt {i}"))) for i in range(40)]
            while len(a.questions) < 5:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(a.stop)
            judged = await asyncio.gather(*judging)
            await reward.close()
            return judged

        with RewardServer(slow) as a, RewardServer(slow) as b:
            judged = asyncio.run(main(a, b))
        assert [[r.reward for r in group] for group in judged] == [[2.0, 3.0]] * 40
        assert len(b.questions) > 20


class TestStart:
    def test_servers_that_cannot_be_reached_are_warned_about(self, caplog):
        gone = f"http://127.0.0.1:{free_port()}/get_reward"
        with RewardServer() as server:
            outcomes = judge(gone, server, requests=4, one_by_one=True)
        assert all(rewards == [2.0, 3.0] for rewards, _ in outcomes)
        assert f"reward server {gone} is down" in caplog.text

    def test_none_can_be_reached(self):
        urls = [f"http://127.0.0.1:{free_port()}", "http://no-such-host.invalid/get_reward"]
        before = time.monotonic()
        with pytest.raises(RewardError) as caught:
            judge(*urls)
        assert time.monotonic() - before < patience(10)
        assert str(caught.value).startswith("--reward.remote_url: no reward server can be reached: ")
        assert all(url in str(caught.value) for url in urls)

    def test_health_is_not_required(self):
        with RewardServer(health=False) as server:
            assert judge(server)[0][0] == [2.0, 3.0]

    def test_a_server_that_accepts_and_is_silent_is_given_a_chance(self, monkeypatch):
        monkeypatch.setattr(http, "REACH_SECONDS", 0.2)

        async def main():
            async def silent(reader, writer):
                await asyncio.sleep(30)

            server = await asyncio.start_server(silent, "127.0.0.1", 0)
            reward = HttpReward([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], timeout=1)
            await reward.start()
            await reward.close()
            server.close()

        asyncio.run(main())


class TestKey:
    def test_it_is_sent_and_never_shown(self, caplog, capfd):
        """Even if the server repeats it."""
        caplog.set_level("DEBUG")

        def tell(question, before):
            return text(500, f"you sent {server.headers[-1]['Authorization']}")

        with RewardServer(tell) as server:
            message, _ = judge(server, api_key="SECRET\n")[0]
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer SECRET"}
        assert "you sent Bearer <redacted>" in message
        said = capfd.readouterr()
        assert "SECRET" not in message + caplog.text + said.out + said.err

    def test_none_is_sent_unless_given(self):
        with RewardServer() as server:
            judge(server)
        assert "Authorization" not in server.headers[0]


class TestRuns:
    """The real loop, with servers in threads of their own."""

    def test_a_server_that_dies_in_the_middle_is_replaced_by_the_other(self, cli):
        dying = RewardServer()

        def answer(question, before):
            if before == 1:
                dying._loop.call_soon(lambda: [site._server.close() for site in dying._runner.sites])
            return lengths(question) if before < 1 else text(503, "going down")

        dying.behaviour = answer
        with dying, RewardServer() as good:
            ran = cli(reward__remote_url=f"{dying.url},{good.url}", reward__api_key="SECRET")
        assert ran.rc == 0
        steps = [record for record in ran.metrics if record["kind"] == "train"]
        assert [step["rollout/failed"] for step in steps] == [0, 0]
        assert [step["rollout/num_samples"] for step in steps] == [8, 8]
        assert all(step["reward"] > 0 for step in steps)
        assert len(dying.questions) + len(good.questions) >= 8
        kept = "".join(
            path.read_text() for path in ran.run_dir.rglob("*.*") if path.suffix in (".yaml", ".jsonl", ".html")
        )
        assert "SECRET" not in kept + ran.err + ran.out

    def test_the_only_server_dies(self, cli):
        """After the first round of 4 groups: the second round fails as a whole, which ends the run with its reason."""

        def answer(question, before):
            return lengths(question) if before < 4 else text(503, "out of memory")

        with RewardServer(answer) as server:
            ran = cli(reward__remote_url=server.url, reward__timeout=1)
        assert ran.rc == 1
        assert ran.seconds < patience(30)
        assert len(ran.errors) == 1
        assert "out of memory" in ran.errors[0]
        assert server.url in ran.errors[0]
        assert [record["rollout/failed"] for record in ran.metrics if record["kind"] == "train"] == [0]

    def test_some_groups_cannot_be_judged(self, cli, inputs):
        """Counted, left out, and never scored: all other rewards are 7."""

        def answer(question, before):
            if question["prompts"][0] == inputs.first_prompt:
                return text(422, "this one I do not like")
            return {"rewards": [7.0] * len(question["query"])}

        with RewardServer(answer) as server:
            ran = cli(reward__remote_url=server.url)
        assert ran.rc == 0
        steps = [record for record in ran.metrics if record["kind"] == "train"]
        assert sum(step["rollout/failed"] for step in steps) == 2
        assert all(step["reward"] == 7.0 for step in steps)
        assert "this one I do not like" in ran.err

    def test_no_server_at_the_start(self, cli):
        ran = cli(reward__remote_url=f"http://127.0.0.1:{free_port()}/get_reward")
        assert ran.rc == 1
        assert len(ran.errors) == 1
        assert "--reward.remote_url: no reward server can be reached" in ran.errors[0]

    def test_file_and_server_together(self, cli, tmp_path):
        """Weights 2 and -1: each sample gets 2·3 − 1·1 = 5."""
        path = tmp_path / "three.py"
        path.write_text(
            "def reward_func(queries): return {'rewards': [3.0] * len(queries), 'extra_logs': {'three': 3}}"
        )
        with RewardServer(lambda question, before: {"rewards": [1.0] * len(question["query"])}) as server:
            ran = cli("--reward.weights", "2", "-1", reward__remote_url=f"{path},{server.url}")
        assert ran.rc == 0
        steps = [record for record in ran.metrics if record["kind"] == "train"]
        for step in steps:
            assert step["reward"] == 5.0
            assert step["three"] == step["reward_three"] == 3.0
            assert step[f"reward_127.0.0.1_{server.port}"] == 1.0
        rollouts = (ran.run_dir / "rollouts.jsonl").read_text().splitlines()
        assert all(json.loads(line)["reward"] == 5.0 for line in rollouts)
