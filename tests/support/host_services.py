"""Services for the tests of hosts: what a service of ours does around users' code, and users' code that misbehaves."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import re
import sqlite3
import sys
import threading
import time

from openrlhf.agents.host_worker import AskError, ask, ask_stream, run_user, say

slots = asyncio.Semaphore(2)
"""As a users' file may have it, to bound what all its episodes do at once. Belongs to the loop that first waits."""


threads = concurrent.futures.ThreadPoolExecutor()

meeting = []

client = None


class Episodes:
    """Each method is one kind of episode."""

    async def sum_of_answers(self, number, asks):
        total = 0
        for turn in range(asks):
            total += await ask("add", number, turn)
        return total

    async def refused(self):
        try:
            await ask("raise", "no room")
        except AskError as error:
            return error.failure.kind, error.failure.text, str(error)

    async def asks_of_threads_and_tasks(self):
        """A task and a thread with a loop of its own ask on behalf of the call that made them."""
        in_a_thread = asyncio.to_thread(lambda: asyncio.run(_asked("add", 10, 1)))
        return await asyncio.gather(asyncio.create_task(_asked("add", 1, 1)), in_a_thread)

    async def stream(self, count):
        """The parts, and when each came."""
        return [(part, time.monotonic()) async for part in ask_stream("count", count)]

    async def first_of_stream(self):
        async for part in ask_stream("count", 1000):
            return part
        return None

    async def wait_for_answer(self, path):
        """Leaves a file when it is cancelled."""
        try:
            await ask("wait")
        finally:
            open(path, "w").close()

    async def stretches(self, count, wait=0.6):
        for _ in range(count):
            await run_user(_pause, 0.1)
            await ask("wait", wait)
        return "done"

    async def play(self, function, *args):
        """One turn: an answer, then a users' function by name."""
        answer = await ask("add", 1, 1)
        return answer, await run_user(globals()[function], *args)

    async def play_twice(self, function):
        return [await run_user(globals()[function]) for _ in range(2)]

    async def construct(self, thread):
        """Whether something with coroutine methods is made where those run."""
        return await run_user(in_a_thread, thread=thread)

    async def database(self):
        """A sqlite connection works in the thread that made it only."""
        connection = await run_user(sqlite3.connect, ":memory:")
        return await run_user(lambda: connection.execute("select 2").fetchone()[0])

    async def speak(self, text):
        say(text)

    async def crash_once(self, marker):
        await ask("add", 1, 1)
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(3)
        return "survived"

    async def turns(self, number, lives, function=None):
        """Three answers, a users' function, and an answer that takes its time. Leaves a line for each life."""
        with open(lives, "a") as file:
            file.write(f"{number} ")
        total = sum([await ask("add", number, turn) for turn in range(3)])
        if function is not None:
            await run_user(globals()[function])
        await ask("wait")
        return total

    async def meet(self, folder, name, processes):
        """Returns when it is in its function in so many processes at the same time, counting those that are gone."""

        def wait():
            open(os.path.join(folder, f"{name}.{os.getpid()}"), "w").close()
            while len({file.rpartition(".")[2] for file in os.listdir(folder)}) < processes:
                time.sleep(0.01)
            return os.getpid()

        return await run_user(wait)

    async def leave_a_task(self):
        self.task = asyncio.create_task(_asked("wait"))
        await asyncio.sleep(0.05)

    async def leave_a_thread(self):
        """With a loop of its own, on which it goes on asking."""
        context = contextvars.copy_context()
        self.asking = threads.submit(context.run, lambda: asyncio.run(_asked("wait")))
        await asyncio.sleep(0.2)

    async def what_became_of_it(self):
        return repr(self.asking.exception(timeout=60))

    def plain(self, number):
        return number + 1


class SharedEpisodes(Episodes):
    shared_loop = True


async def _asked(*args):
    return await ask(*args)


async def _pause(seconds):
    await asyncio.sleep(seconds)


def in_a_thread():
    time.sleep(0.02)
    return threading.current_thread() is threading.main_thread()


async def on_the_loop():
    await asyncio.sleep(0.02)
    return threading.current_thread() is threading.main_thread()


async def blocks(seconds=0.3):
    time.sleep(seconds)


async def blocks_with(count):
    """Blocks its loop until so many have come here."""
    meeting.append(1)
    while len(meeting) < count:
        time.sleep(0.01)
    return threading.current_thread() is not threading.main_thread()


async def blocks_for_ever():
    while True:
        time.sleep(0.01)


def sleeps_for_ever():
    time.sleep(600)


async def awaits_for_ever():
    await asyncio.Event().wait()


async def holds_the_interpreter():
    re.match(r"(a+)+$", "a" * 64 + "b")


async def slow():
    await asyncio.sleep(0.2)
    return "slow"


async def blocks_and_shares():
    time.sleep(0.12)
    async with slots:
        await asyncio.sleep(0.01)
    return threading.current_thread() is threading.main_thread()


async def shares_and_catches():
    with contextlib.suppress(Exception):
        async with slots:
            await asyncio.sleep(0.05)
    return threading.current_thread() is threading.main_thread()


async def fetches(url):
    """One client for all episodes, made by the first; every error is swallowed."""
    global client
    import aiohttp

    if client is None:
        client = aiohttp.ClientSession()
    try:
        async with client.get(url) as response:
            return await response.text()
    except Exception as error:
        return repr(error)


async def dies():
    os._exit(3)


def times_out():
    raise TimeoutError("too slow")


async def exits():
    sys.exit(4)
