"""The reward file in its host process: what users' code does there reaches one prompt group at most."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import patience

from openrlhf.agents.host import HostClosedError, HostProcess
from openrlhf.rewards.base import RewardError, RewardRequest
from openrlhf.rewards.function_file import FunctionFileReward

HEADER = "import ctypes, os, re, sys, threading, time\n"


def request(query="q", *, samples=2, label="5"):
    return RewardRequest(
        queries=(query,) * samples, prompts=("p",) * samples, labels=(label,) * samples, name="prompt 17"
    )


@pytest.fixture
def write(tmp_path):
    def write(source):
        path = tmp_path / "reward.py"
        path.write_text(HEADER + source)
        return path

    return write


@contextlib.asynccontextmanager
async def started(path, *, timeout=30.0, **options):
    reward = FunctionFileReward(path, timeout=timeout, **options)
    try:
        await reward.start()
        yield reward
    finally:
        await reward.close()


async def outcome(reward, query, **options):
    """The rewards, or the error's text; and how long it took."""
    before = time.monotonic()
    try:
        result = [r.reward for r in await reward.score(request(query, **options))]
    except RewardError as error:
        result = str(error)
    return result, time.monotonic() - before


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


class TestAnswers:
    def test_a_group_per_call(self, write):
        path = write("""
def reward_func(queries, prompts, labels):
    assert isinstance(queries, list) and len(queries) == len(prompts) == len(labels) == 3
    return {"rewards": range(3), "scores": [0, 1, 1], "extra_logs": {"label": labels, "one": 1}}
""")

        async def main():
            async with started(path) as reward:
                return await reward.score(request(samples=3, label=7))

        rewards = asyncio.run(main())
        assert [r.reward for r in rewards] == [0.0, 1.0, 2.0]
        assert [r.score for r in rewards] == [0.0, 1.0, 1.0]
        assert [r.extra_logs for r in rewards] == [{"label": 7.0, "one": 1.0}] * 3

    def test_file_is_loaded_once_without_torch_and_with_our_directory(self, write, tmp_path, monkeypatch):
        """The first call answers 1 for each true statement."""
        monkeypatch.chdir(tmp_path)
        path = write(f"""
loads = []
loads.append(1)
def reward_func(queries):
    loads.append(1)
    return ["torch" not in sys.modules and "numpy" not in sys.modules, os.getcwd() == {str(tmp_path)!r}, len(loads)]
""")

        async def main():
            async with started(path) as reward:
                return [await outcome(reward, "q", samples=3) for _ in range(2)]

        (first, _), (second, _) = asyncio.run(main())
        assert first == [1.0, 1.0, 2.0]
        assert second == [1.0, 1.0, 3.0]

    def test_calls_overlap_up_to_the_limit(self, write):
        """6 calls, at most 3 at once; each reports how many are running, the highest of which is 3."""
        path = write("""
running, lock = 0, threading.Lock()
def reward_func(queries):
    global running
    with lock:
        running += 1
        seen = running
    time.sleep(0.3)
    with lock:
        running -= 1
    return seen
""")

        async def main():
            async with started(path, max_concurrency=3) as reward:
                return await asyncio.gather(*(outcome(reward, "q", samples=1) for _ in range(6)))

        assert max(rewards[0] for rewards, _ in asyncio.run(main())) == 3.0

    def test_coroutines_share_a_loop(self, write):
        path = write("""
import asyncio
loops = set()
async def reward_func(queries):
    loops.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0.05)
    return len(loops)
""")

        async def main():
            async with started(path) as reward:
                return await asyncio.gather(*(outcome(reward, "q", samples=1) for _ in range(4)))

        assert [rewards for rewards, _ in asyncio.run(main())] == [[1.0]] * 4

    def test_from_several_event_loops(self, write):
        """A host started on one loop answers on others, in other threads."""
        reward = FunctionFileReward(write("def reward_func(queries): return len(queries)"), timeout=30)
        asyncio.run(reward.start())
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(asyncio.run(outcome(reward, "q"))[0])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(reward.close())
        assert answers == [[2.0, 2.0]] * 4

    def test_large_requests_and_labels_of_any_kind(self, write):
        """More than a pipe holds, in both directions at once."""
        path = write("def reward_func(queries, labels): return [len(q) + len(l['x']) for q, l in zip(queries, labels)]")

        async def main():
            async with started(path) as reward:
                return await asyncio.gather(
                    *(outcome(reward, "q" * 300_000, samples=4, label={"x": "y"}) for _ in range(8))
                )

        assert [rewards for rewards, _ in asyncio.run(main())] == [[300_001.0] * 4] * 8

    def test_one_number_for_several_samples_is_warned_about_once(self, write, caplog):
        path = write("def reward_func(queries): return 0.5")

        async def main():
            async with started(path) as reward:
                return [(await outcome(reward, "q"))[0] for _ in range(3)]

        assert asyncio.run(main()) == [[0.5, 0.5]] * 3
        assert caplog.text.count("returned one number for 2 samples, so each gets it") == 1


class TestErrors:
    def test_exception_with_the_users_line(self, write):
        path = write("def reward_func(queries):\n    return 1 / 0")

        async def main():
            async with started(path) as reward:
                return await outcome(reward, "q")

        message, _ = asyncio.run(main())
        assert message == f"prompt 17: {path}:3 (in reward_func): ZeroDivisionError: division by zero"

    def test_an_exception_is_retried(self, write):
        path = write("""
calls = []
def reward_func(queries):
    calls.append(1)
    if len(calls) < 3:
        raise ConnectionError("busy")
    return len(calls)
""")

        async def main(**options):
            async with started(path, **options) as reward:
                return (await outcome(reward, "q"))[0]

        assert asyncio.run(main(max_retries=2)) == [3.0, 3.0]
        assert asyncio.run(main(max_retries=1)).endswith("ConnectionError: busy")

    def test_wrong_values_are_not(self, write):
        path = write("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0, float('nan')]}")

        async def main():
            async with started(path) as reward:
                return (await outcome(reward, "q"))[0]

        assert asyncio.run(main()) == (
            f"prompt 17: {path}:2: what reward_func returned cannot be used: "
            f"its rewards[1] must be finite, got nan (float). "
            'Expected {"rewards": 2 numbers, one per sample}, with "scores" and "extra_logs" if wanted'
        )

    def test_sys_exit_fails_the_call_alone(self, write):
        path = write("def reward_func(queries):\n    if queries[0] == 'exit': sys.exit(4)\n    return os.getpid()")

        async def main():
            async with started(path) as reward:
                before = await outcome(reward, "q")
                return before[0], (await outcome(reward, "exit"))[0], (await outcome(reward, "q"))[0]

        before, message, after = asyncio.run(main())
        assert "SystemExit: 4" in message
        assert before == after

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("def reward_func(:", "reward.py:2: SyntaxError: "),
            ("import no_such_module", "reward.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
            ("def rewards(q): ...", "defines no function reward_func(queries, prompts, labels); it has rewards"),
            ("def reward_func(a, b): ...", "reward.py:2: reward_func takes (a, b), but is called with"),
            ("os._exit(3)", "could not be loaded: the process ended with exit code 3 while it loaded"),
            ("time.sleep(60)", "could not be loaded: it was not ready after 1 s"),
        ],
    )
    def test_files_that_cannot_work_are_refused_at_the_start(self, write, source, message):
        reward = FunctionFileReward(write(source), timeout=5, start_timeout=1 if "sleep" in source else 60)
        before = time.monotonic()
        with pytest.raises(RewardError) as caught:
            asyncio.run(reward.start())
        assert time.monotonic() - before < patience(10)
        assert str(caught.value).startswith("--reward.remote_url: ")
        assert message in str(caught.value)
        asyncio.run(reward.close())

    def test_missing_file(self, tmp_path):
        with pytest.raises(RewardError) as caught:
            asyncio.run(FunctionFileReward(tmp_path / "nope.py", timeout=5).start())
        assert str(caught.value) == f"--reward.remote_url: there is no file {tmp_path / 'nope.py'}"


UNRULY = """
def reward_func(queries):
    query = queries[0]
    if query == "hang":
        time.sleep(600)
    if query == "hog":
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for ages
    if query == "die":
        os._exit(3)
    if query == "segfault":
        ctypes.string_at(0)
    if query == "slow":
        time.sleep(0.8)
    return os.getpid()
"""


class TestContainment:
    def run(self, path, queries, **options):
        """Outcomes of calls made at once."""

        async def main():
            async with started(path, **options) as reward:
                return await asyncio.gather(*(outcome(reward, query) for query in queries))

        return asyncio.run(main())

    def test_a_call_that_hangs_ends_at_its_deadline_and_others_get_their_answers(self, write):
        """The hanging call is sent 0.5 s before the slow ones, so that they are in flight when it is given up."""
        path = write(UNRULY)

        async def main():
            async with started(path, timeout=1.0) as reward:
                (before, _) = await outcome(reward, "q")
                hanging = asyncio.create_task(outcome(reward, "hang"))
                await asyncio.sleep(0.5)
                slow = await asyncio.gather(*(outcome(reward, "slow") for _ in range(3)))
                return before, await hanging, slow, await outcome(reward, "q")

        before, (message, seconds), slow, (after, _) = asyncio.run(main())
        assert message == f"prompt 17: reward_func of {path} did not answer in 1 s (--reward.timeout)"
        assert 1.0 <= seconds < patience(3.0)
        # They went on in the old process; a new one answers now.
        assert [rewards for rewards, _ in slow] == [before] * 3
        assert after != before

    def test_all_calls_that_hang_end_together(self, write):
        outcomes = self.run(write(UNRULY), ["hang"] * 4 + ["q"], timeout=1.0)
        assert all("did not answer in 1 s" in message and seconds < patience(3.0) for message, seconds in outcomes[:4])
        assert isinstance(outcomes[4][0], list)

    def test_a_call_that_holds_the_interpreter_is_told_from_its_victims(self, write):
        """The victims are late too, and were sent first; only the culprit fails."""
        *victims, culprit = self.run(write(UNRULY), ["slow", "slow", "hog"], timeout=2.0)
        assert "did not answer in 2 s" in culprit[0]
        assert all(isinstance(rewards, list) for rewards, _ in victims)

    @pytest.mark.parametrize(
        ("query", "how"), [("die", "ended with exit code 3"), ("segfault", "was killed by SIGSEGV")]
    )
    def test_a_call_under_which_the_process_dies(self, write, query, how):
        path = write(UNRULY)
        *others, culprit = self.run(path, ["slow", "q", "slow", query])
        assert culprit[0] == (f"prompt 17: the process {how} while reward_func of {path} judged this prompt's samples")
        assert all(isinstance(rewards, list) for rewards, _ in others)

    def test_a_process_that_died_once_is_forgiven(self, write, tmp_path):
        """Killed from outside, as by the kernel when memory runs out: the call is made again."""
        path = write(f"""
def reward_func(queries):
    marker = {str(tmp_path / "marker")!r}
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), 9)
    return 1.0
""")
        assert self.run(path, ["q"])[0][0] == [1.0, 1.0]

    def test_cancelled_calls_trouble_nobody(self, write):
        path = write(UNRULY)

        async def main():
            async with started(path, max_concurrency=1) as reward:
                first = asyncio.create_task(outcome(reward, "slow"))
                second = asyncio.create_task(outcome(reward, "slow"))
                await asyncio.sleep(0.2)
                second.cancel()
                return (await first)[0], (await outcome(reward, "q"))[0]

        first, after = asyncio.run(main())
        assert first == after


class TestEnd:
    def test_close_is_quick_even_when_a_call_hangs(self, write):
        path = write(UNRULY)

        async def main():
            reward = FunctionFileReward(path, timeout=60)
            await reward.start()
            pid = reward._host.pid
            hanging = asyncio.create_task(outcome(reward, "hang"))
            hog = asyncio.create_task(outcome(reward, "hog"))
            await asyncio.sleep(0.3)
            before = time.monotonic()
            await reward.close()
            return pid, time.monotonic() - before, await hanging, await hog

        pid, seconds, hanging, hog = asyncio.run(main())
        assert seconds < patience(2.5)
        assert "was closed" in hanging[0]
        assert "was closed" in hog[0]
        assert wait_until(lambda: not alive(pid))

    def test_calls_after_the_end(self, write):
        path = write(UNRULY)

        async def main():
            async with started(path) as reward:
                pass
            await reward.close()
            return await outcome(reward, "q")

        assert "is closed" in asyncio.run(main())[0]

    def test_never_started(self):
        asyncio.run(HostProcess("openrlhf.rewards.function_worker:RewardFunction", name="x").close())

    def test_programs_that_the_file_started_end_with_it(self, write):
        path = write("""
import subprocess
child = subprocess.Popen(["sleep", "600"])
def reward_func(queries): return child.pid
""")

        async def main():
            async with started(path) as reward:
                return int((await outcome(reward, "q"))[0][0])

        child = asyncio.run(main())
        assert wait_until(lambda: not alive(child))

    def test_exit_handlers_run(self, write, tmp_path):
        path = write(f"""
import atexit
atexit.register(lambda: open({str(tmp_path / "done")!r}, "w").close())
def reward_func(queries): return 1
""")

        async def main():
            async with started(path):
                pass

        asyncio.run(main())
        assert (tmp_path / "done").exists()


class TestAsAProgram:
    """A driver process of its own, whose streams and signals are looked at from outside."""

    DRIVER = """
import asyncio, sys
from openrlhf.rewards.base import RewardRequest
from openrlhf.rewards.function_file import FunctionFileReward

async def main(path, query):
    reward = FunctionFileReward(path, timeout=60)
    await reward.start()
    print("pid", reward._host.pid, flush=True)
    rewards = await reward.score(RewardRequest(queries=(query,), prompts=("p",), labels=("",), name="prompt 0"))
    await reward.close()
    print("reward", rewards[0].reward, flush=True)

if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
"""

    @pytest.fixture
    def drive(self, tmp_path):
        driver = tmp_path / "driver.py"
        driver.write_text(self.DRIVER)
        processes = []

        def start(path, query):
            process = subprocess.Popen(
                [sys.executable, str(driver), str(path), query],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )
            processes.append(process)
            return process

        yield start
        for process in processes:
            process.kill()
            process.wait()

    def test_what_users_print_goes_to_stderr(self, write, drive):
        path = write("""
print("loaded")
def reward_func(queries):
    print("judging")
    os.system("echo from a program")
    assert sys.stdin.read() == ""
    return 2
""")
        process = drive(path, "q")
        out, err = process.communicate(timeout=60)
        assert [line.split()[0] for line in out.splitlines()] == ["pid", "reward"]
        assert {"loaded", "judging", "from a program"} <= set(err.splitlines())

    def test_interrupt_brings_no_traceback_of_the_host(self, write, drive):
        process = drive(write(UNRULY), "hang")
        pid = int(process.stdout.readline().split()[1])
        time.sleep(0.3)
        os.kill(pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert err == ""
        assert wait_until(lambda: not alive(pid))

    def test_host_ends_when_its_parent_is_killed(self, write, drive):
        process = drive(write(UNRULY), "hang")
        pid = int(process.stdout.readline().split()[1])
        assert alive(pid)
        process.kill()
        assert wait_until(lambda: not alive(pid))

    def test_one_that_holds_the_interpreter_ends_too_with_the_programs_it_started(self, write, drive, tmp_path):
        """No Python code runs in the host any more, so nothing in it can find out that its parent is gone. The child is
        there before the regular expression is, and the expression takes longer than anybody lives."""
        started = tmp_path / "child"
        path = write(f"""
import pathlib, subprocess
def reward_func(queries):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path({str(started)!r}).write_text(f"{{child.pid}}\\n")
    re.match(r"(a+)+$", "a" * 64 + "b")
""")
        process = drive(path, "hog")
        host = int(process.stdout.readline().split()[1])
        assert wait_until(lambda: started.exists() and started.read_text().endswith("\n"), patience(10))
        child = int(started.read_text())
        assert alive(host)
        assert alive(child)
        process.kill()
        assert wait_until(lambda: not alive(host) and not alive(child), patience(10))


class Echo:
    """A service for the host's own tests."""

    def same(self, value):
        return value

    async def later(self, value):
        await asyncio.sleep(0.01)
        return value

    def local_class(self):
        class Local:
            pass

        return Local()


class TestHostProcess:
    def test_methods_of_any_service(self):
        async def main():
            host = HostProcess(f"{__name__}:Echo", name="echo")
            try:
                answers = [await host.call("same", {"a": (1, None)}), await host.call("later", [2])]
                errors = []
                for method in ("local_class", "no_such_method"):
                    try:
                        await host.call(method)
                    except Exception as error:
                        errors.append(str(error))
                return answers, errors
            finally:
                await host.close()
                with pytest.raises(HostClosedError):
                    await host.call("same", 1)

        answers, (unpicklable, unknown) = asyncio.run(main())
        assert answers == [{"a": (1, None)}, [2]]
        assert "Local" in unpicklable
        assert "AttributeError" in unknown
