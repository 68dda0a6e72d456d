"""Calls that ask their parent while they run: many at once in one host process, some of them unruly."""

import asyncio
import collections
import contextlib
import os
import time

import pytest
from aiohttp import web
from patience import patience
from processes import alive

from openrlhf.agents.host import HostCrashError, HostProcess, HostTimeoutError, LocalHost, RemoteError

TARGET = "host_services:Episodes"


class Parent:
    """What the other side answers with, and a record of what became of its answers."""

    def __init__(self):
        self.events = []
        self.asked = collections.Counter()
        """By what was asked."""
        self.release = asyncio.Event()
        """Ends waits that have no time of their own."""

    async def answer(self, name, *args):
        self.asked[name, *args] += 1
        match name:
            case "add":
                await asyncio.sleep(0.005)
                return sum(args)
            case "wait":
                self.events.append("waiting")
                try:
                    await (asyncio.sleep(*args) if args else self.release.wait())
                except asyncio.CancelledError:
                    self.events.append("cancelled")
                    raise
            case "raise":
                raise LookupError(*args)

    async def answer_stream(self, name, count):
        try:
            for number in range(count):
                yield number
                await asyncio.sleep(0.03)
        finally:
            self.events.append(f"closed {name} after {number + 1}")


@contextlib.asynccontextmanager
async def hosting(kind=HostProcess, target=TARGET, **options):
    parent = Parent()
    host = kind(target, name="test host", answer=parent.answer, answer_stream=parent.answer_stream, **options)
    try:
        await host.start()
        yield host, parent
    finally:
        await host.close()


def many(**options):
    return hosting(max_concurrency=1024, **options)


async def outcome(call):
    """What it gave or the error, and how long it took."""
    before = time.monotonic()
    try:
        result = await call
    except Exception as error:
        result = error
    return result, time.monotonic() - before


async def eventually(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert condition()


@pytest.mark.parametrize("kind", [HostProcess, LocalHost])
class TestBothKinds:
    """The same calls give the same results in a process of their own and in this one."""

    def test_answers_and_errors(self, kind):
        """4 asks of (10 + turn): 4·10 + 0+1+2+3 = 46."""

        async def main():
            async with hosting(kind) as (host, _):
                assert await host.call("sum_of_answers", 10, 4) == 46
                assert await host.call("refused") == ("LookupError", "no room", "LookupError: no room")
                assert await host.call("asks_of_threads_and_tasks") == [2, 11]
                assert await host.call("plain", 1) == 2
                with pytest.raises(RemoteError, match="SystemExit: 4"):
                    await host.call("play", "exits")
                with pytest.raises(RemoteError, match="TimeoutError: too slow") as caught:
                    await host.call("play", "times_out")
                assert "in times_out" in caught.value.failure.traceback
                with pytest.raises(RemoteError, match="AttributeError"):
                    await host.call("no_such_method")

        asyncio.run(main())

    def test_parts_arrive_before_the_last_is_there(self, kind):
        """10 parts, 0.03 s apart: they come over 0.27 s, not all at the end."""

        async def main():
            async with hosting(kind) as (host, parent):
                parts = await host.call("stream", 10)
                return parts, parent.events

        parts, events = asyncio.run(main())
        assert [part for part, _ in parts] == list(range(10))
        assert parts[-1][1] - parts[0][1] > 0.2
        assert events == ["closed count after 10"]

    def test_leaving_a_stream_ends_it_in_the_parent(self, kind):
        async def main():
            async with hosting(kind) as (host, parent):
                assert await host.call("first_of_stream") == 0
                await eventually(lambda: parent.events)
                assert int(parent.events[0].removeprefix("closed count after ")) < 10

        asyncio.run(main())

    def test_cancelling_a_call_cancels_it_there_and_its_asks_here(self, kind, tmp_path):
        async def main():
            async with hosting(kind) as (host, parent):
                call = asyncio.create_task(host.call("wait_for_answer", str(tmp_path / "ended")))
                await eventually(lambda: parent.events == ["waiting"])
                call.cancel()
                await eventually(lambda: parent.events == ["waiting", "cancelled"])
                await eventually((tmp_path / "ended").exists)
                assert await host.call("plain", 1) == 2

        asyncio.run(main())

    def test_a_call_may_be_cancelled_at_any_moment(self, kind):
        """After 0, 1, 2, … 19 ms, some before it has begun. Were one lost, the host would be full at the end."""

        async def main():
            async with hosting(kind, **{"max_concurrency": 1} if kind is HostProcess else {}) as (host, parent):
                for milliseconds in range(20):
                    call = asyncio.create_task(host.call("wait_for_answer", "/dev/null"))
                    await asyncio.sleep(milliseconds / 1000)
                    call.cancel()
                async with asyncio.timeout(patience(5)):
                    assert await host.call("plain", 1) == 2
                await eventually(lambda: parent.events.count("waiting") == parent.events.count("cancelled"))

        asyncio.run(main())

    def test_only_users_time_counts(self, kind):
        """Two stretches of 0.1 s between waits of 1.5 s, which alone are longer than the limit of 2.5 s: had they
        counted, there would be no answer."""

        async def main():
            async with hosting(kind) as (host, _):
                return await host.call_timed("stretches", 2, 1.5, timeout=2.5)

        reply = asyncio.run(main())
        assert reply.value == "done"
        assert reply.users_seconds >= 0.2
        assert reply.slowest.function == "_pause"
        assert reply.slowest.seconds >= 0.1

    def test_a_call_has_a_thread_and_in_this_process_its_coroutines_the_loop(self, kind):
        here = kind is LocalHost

        async def main():
            async with hosting(kind) as (host, _):
                assert await host.call("play", "in_a_thread") == (2, False)
                assert await host.call("play", "on_the_loop") == (2, here)
                assert [await host.call("construct", thread) for thread in (True, False)] == [False, here]
                assert await host.call("database") == 2

        asyncio.run(main())

    def test_a_line_is_said_once(self, kind, caplog):
        async def main():
            async with hosting(kind) as (host, _):
                for _ in range(3):
                    await host.call("speak", "mind the step")

        asyncio.run(main())
        assert [record.getMessage() for record in caplog.records] == ["test host: mind the step"]


class TestManyCalls:
    def test_three_hundred_at_once(self):
        """Call i asks thrice for (i + turn): 3i + 3."""

        async def main():
            async with many() as (host, _):
                before = time.monotonic()
                sums = await asyncio.gather(*(host.call("sum_of_answers", i, 3, timeout=5.0) for i in range(300)))
                return sums, time.monotonic() - before

        sums, seconds = asyncio.run(main())
        assert sums == [3 * i + 3 for i in range(300)]
        assert seconds < patience(3.0)

    def test_coroutines_may_block(self, caplog):
        """16 calls, each of which sleeps until all are asleep at the same time."""

        async def main():
            async with many() as (host, _):
                return await asyncio.gather(*(host.call("play", "blocks_with", 16, timeout=60.0) for _ in range(16)))

        assert asyncio.run(main()) == [(2, True)] * 16
        assert not caplog.records

    def test_asks_that_outlive_their_call_are_given_up(self):
        async def main():
            async with many() as (host, parent):
                await host.call("leave_a_task")
                await eventually(lambda: parent.events == ["waiting", "cancelled"])
                await host.call("leave_a_thread")
                await eventually(lambda: parent.events == ["waiting", "cancelled"] * 2)
                assert "its call has ended" in await host.call("what_became_of_it")

        asyncio.run(main())


class TestSharedLoop:
    """The service says `shared_loop`, as an agent's file does with SHARED_LOOP, or it is found to need it."""

    def test_coroutines_share_the_loop_and_plain_functions_have_threads(self):
        async def main():
            async with many(target="host_services:SharedEpisodes") as (host, _):
                assert await host.call("play", "on_the_loop") == (2, True)
                assert await host.call("play", "in_a_thread") == (2, False)
                assert [await host.call("construct", thread) for thread in (True, False)] == [False, True]
                return await asyncio.gather(*(host.call("play_twice", "blocks_and_shares") for _ in range(6)))

        assert asyncio.run(main()) == [[True, True]] * 6

    def test_calls_that_share_what_belongs_to_one_loop_begin_again_on_a_shared_one(self, caplog):
        async def main():
            async with many() as (host, _):
                return await asyncio.gather(*(host.call("play_twice", "blocks_and_shares") for _ in range(6)))

        assert asyncio.run(main()) == [[True, True]] * 6
        (line,) = caplog.messages
        assert line.startswith("test host: its episodes share something that works on one event loop only")

    def test_sharing_is_noticed_where_users_code_swallows_what_says_so(self):
        async def main():
            async with many() as (host, _):
                await asyncio.gather(*(host.call("play_twice", "shares_and_catches") for _ in range(6)))
                return await host.call("play_twice", "shares_and_catches")

        assert asyncio.run(main()) == [True, True]

    def test_a_client_that_a_file_keeps_between_episodes_works(self):
        """The first use on another loop is seen before it fails, so that no call ends with the swallowed error."""

        async def greet(_):
            await asyncio.sleep(0.01)
            return web.Response(text="hello")

        async def main():
            app = web.Application()
            app.router.add_get("/", greet)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            try:
                async with many() as (host, _):
                    return await asyncio.gather(*(host.call("play", "fetches", url, timeout=60.0) for _ in range(8)))
            finally:
                await runner.cleanup()

        assert asyncio.run(main()) == [(2, "hello")] * 8

    def test_a_call_that_blocks_the_shared_loop_is_found(self):
        """The others are late too; each is tried alone, where only one hangs."""

        async def main():
            async with many(target="host_services:SharedEpisodes") as (host, _):
                hanging = asyncio.create_task(outcome(host.call("play", "blocks_for_ever", timeout=2.0)))
                results = await asyncio.gather(*(host.call("play", "slow", timeout=2.0) for _ in range(3)))
                return results, (await hanging)[0]

        results, error = asyncio.run(main())
        assert results == [(2, "slow")] * 3
        assert isinstance(error, HostTimeoutError)


class TestTimeAndBlame:
    @pytest.mark.parametrize(
        ("culprit", "count"), [("blocks_for_ever", 12), ("awaits_for_ever", 12), ("holds_the_interpreter", 3)]
    )
    def test_only_the_call_that_hangs_is_blamed(self, culprit, count):
        """The others hang too as long as it blocks their loop, and have no more time than it."""

        async def main():
            async with many() as (host, parent):
                hanging = asyncio.create_task(outcome(host.call("play", culprit, timeout=1.0)))
                waiting = asyncio.create_task(host.call("wait_for_answer", "/dev/null"))
                others = [host.call("play", "slow", timeout=1.0) for _ in range(count)]
                results = await asyncio.gather(*others)
                error, seconds = await hanging
                return error, seconds, results, list(parent.events), waiting.cancel()

        error, seconds, results, events, _ = asyncio.run(main())
        assert results == [(2, "slow")] * count
        assert isinstance(error, HostTimeoutError)
        if culprit != "holds_the_interpreter":
            assert str(error) == f"{culprit}() took longer than 1 s"
            assert error.function == culprit
            assert 1.0 < seconds < patience(2.5)
            # Who waits for an answer goes on waiting for it, also if it had to begin again as the loop was blocked.
            assert events == ["waiting"]

    def test_a_call_that_blocks_makes_no_other_late(self):
        """One call may block for 1 s, the others for 0.4 s only; nothing is ended."""

        async def main():
            async with many() as (host, _):
                pid = host.pid
                blocking = asyncio.create_task(host.call("play", "blocks", 1.0, timeout=5.0))
                await asyncio.sleep(0.1)
                results = await asyncio.gather(*(host.call("play", "slow", timeout=0.4) for _ in range(5)))
                await blocking
                return results, pid == host.pid

        assert asyncio.run(main()) == ([(2, "slow")] * 5, True)

    def test_calls_that_wait_for_an_answer_when_the_process_dies_run_again_at_once(self, tmp_path):
        """Nine calls. They do not run alone, one by one; the answers under way are theirs, and are not asked for again.
        The stream of a tenth has given some parts before, and gives all of them once."""

        async def main():
            async with many() as (host, parent):
                waiting = [asyncio.create_task(host.call("wait_for_answer", "/dev/null")) for _ in range(9)]
                await eventually(lambda: parent.events.count("waiting") == 9)
                streaming = asyncio.create_task(host.call("stream", 100))
                await asyncio.sleep(0.3)
                assert await host.call("crash_once", str(tmp_path / "marker"), timeout=5.0) == "survived"
                assert not any(call.done() for call in waiting)
                assert [number for number, _ in await streaming] == list(range(100))
                parent.release.set()
                await asyncio.gather(*waiting)
                assert parent.events == [*["waiting"] * 9, "closed count after 100"]

        asyncio.run(main())

    def test_a_call_that_always_kills_the_process(self):
        async def main():
            async with many() as (host, _):
                others = [host.call("play", "slow") for _ in range(3)]
                return await asyncio.gather(outcome(host.call("play", "dies")), *others)

        (error, _), *others = asyncio.run(main())
        assert isinstance(error, HostCrashError)
        assert str(error) == "the process ended with exit code 3"
        assert others == [(2, "slow")] * 3

    @pytest.mark.parametrize(("culprit", "ends"), [("awaits_for_ever", True), ("sleeps_for_ever", False)])
    def test_neighbours_of_calls_that_hang_go_on_where_they_are(self, tmp_path, culprit, ends):
        """Each call begins once. What can be cancelled leaves the process as it was; for the rest there is another, and
        the old one is ended with the last call in it."""
        lives = tmp_path / "lives"

        async def main():
            async with many() as (host, parent):
                pid = host.pid
                calls = [host.call("turns", number, str(lives), timeout=20.0) for number in range(6)]
                others = [asyncio.create_task(call) for call in calls]
                await eventually(lambda: parent.events.count("waiting") == 6)
                hanging = (host.call("turns", 6 + i, str(lives), culprit, timeout=0.5) for i in range(3))
                errors = await asyncio.gather(*hanging, return_exceptions=True)
                assert [str(error) for error in errors] == [f"{culprit}() took longer than 0.5 s"] * 3
                if ends:
                    await eventually(lambda: [process.given_up for process in host._processes] == [set()])
                assert await host.call("plain", 1) == 2
                assert (host.pid == pid) == ends
                assert alive(pid)
                parent.release.set()
                assert await asyncio.gather(*others) == [3 * number + 3 for number in range(6)]
                if not ends:
                    await eventually(lambda: not alive(pid))

        asyncio.run(main())
        assert sorted(map(int, lives.read_text().split())) == list(range(9))

    def test_calls_are_tried_alone_at_the_same_time_and_new_ones_do_not_wait_for_them(self, tmp_path):
        """Three calls are in their code when the process dies. They return once they are in two more processes at the
        same time; until then, somebody else's call is answered. None of them is blamed."""

        async def main():
            async with many() as (host, _):
                pid = host.pid
                calls = [host.call("meet", str(tmp_path), name, 3) for name in "abc"]
                calls = [asyncio.create_task(call) for call in calls]
                await eventually(lambda: len(os.listdir(tmp_path)) == 3)
                killer = asyncio.create_task(outcome(host.call("play", "dies")))
                await eventually(lambda: not alive(pid))
                assert await host.call("plain", 1) == 2
                pids = await asyncio.gather(*calls)
                return pids, (await killer)[0]

        pids, error = asyncio.run(main())
        assert len(set(pids)) >= 2
        assert isinstance(error, HostCrashError)

    def test_what_a_call_was_answered_before_it_ran_again_is_not_asked_again(self, tmp_path):
        """Five calls have had three answers each when the process dies under them."""

        async def main():
            async with many() as (host, parent):
                calls = [host.call("turns", number, str(tmp_path / "lives")) for number in range(1, 6)]
                calls = [asyncio.create_task(call) for call in calls]
                await eventually(lambda: parent.events.count("waiting") == 5)
                assert await host.call("crash_once", str(tmp_path / "marker")) == "survived"
                parent.release.set()
                assert await asyncio.gather(*calls) == [3 * number + 3 for number in range(1, 6)]
                assert parent.events == ["waiting"] * 5
                return parent.asked

        asked = asyncio.run(main())
        assert sorted((tmp_path / "lives").read_text().split()) == [str(number) for number in range(1, 6) for _ in "ab"]
        # The call that crashed asked for 1 and 1, as the first of the five did.
        numbers = {("add", number, turn): 1 for number in range(1, 6) for turn in range(3)}
        assert {key: count for key, count in asked.items() if key[0] == "add"} == numbers | {("add", 1, 1): 2}

    def test_closing_cancels_answers_under_way(self):
        async def main():
            async with many() as (host, parent):
                call = asyncio.create_task(outcome(host.call("wait_for_answer", "/dev/null")))
                await eventually(lambda: parent.events == ["waiting"])
            await eventually(lambda: parent.events == ["waiting", "cancelled"])
            return str((await call)[0])

        assert asyncio.run(main()) == "test host was closed"
