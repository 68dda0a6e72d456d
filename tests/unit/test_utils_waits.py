"""Waits have names, a watchdog looks at them, and whatever hangs ends with an error that names it and a file of stacks."""

import asyncio
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref

import pytest

from openrlhf.observability.watchdog import Watchdog
from openrlhf.utils import stack_probe, waits
from openrlhf.utils.event_loops import LoopThread
from openrlhf.utils.waits import WaitError, waiting

QUICK = {"tick": 0.01, "grace": 0.3}


def watched(**settings):
    """A watchdog that ends nothing, and remembers that it would have."""
    ends = []
    dog = Watchdog(**QUICK | {"end": ends.append} | settings)
    return dog, ends


def wait_in_a_thread(wait, seconds=5.0):
    """As a thread does that can only look every now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wait.check()
        time.sleep(0.01)


def test_a_line_names_what_is_waited_for_and_comes_less_and_less_often(caplog):
    """The first after 0.1 s, then 0.2 s, 0.4 s: in 0.5 s there are three. Of nested waits the innermost speaks."""
    caplog.set_level(logging.INFO)
    dog, _ = watched(first_line=0.1)
    with dog, waits.during("round 12"), waiting("for a round"), waiting(lambda: "for update: actor rank 0"):
        time.sleep(0.5)
    said = [record.message for record in caplog.records]
    assert said == ["round 12: waiting 0 s for update: actor rank 0"] * 3


def test_a_wait_that_is_over_holds_nothing_of_what_it_was_for():
    """Whoever looks at it may do so later, and in another thread. Ray ends a process, with status 1 and without a word, in
    which a thread lets a reference go when the connection is closed: so ended a run that was done."""

    class Reference:
        pass

    def wait_for(reference):
        with waiting(lambda: f"for {reference}") as wait:
            assert "Reference" in wait.what()
        return wait

    reference = Reference()
    alive = weakref.ref(reference)
    seen = wait_for(reference)
    del reference
    assert alive() is None
    assert seen.what() == "for nothing any more"


def test_a_coroutine_whose_wait_failed_can_go_on(tmp_path):
    """Longer than the grace: its task was not cancelled for good, and the process is not ended."""

    async def main():
        with pytest.raises(WaitError, match=r"for an answer: engine 3; stacks are in .*stacks-1\.txt"), in_vain():
            await asyncio.sleep(5)
        for _ in range(25):
            waits.mark_progress()
            await asyncio.sleep(0.02)
        return "went on"

    def in_vain():
        return waiting("for an answer: engine 3")

    dog, ends = watched(stall_seconds=0.1)
    with dog, dog.stalls_count(tmp_path):
        assert asyncio.run(main()) == "went on"
    assert ends == []


def test_a_deadline_is_kept_by_whoever_waits_and_is_in_the_line(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    dog, _ = watched(first_line=0.05)
    with dog, dog.stalls_count(tmp_path):
        thread = LoopThread("vllm")
        with pytest.raises(TimeoutError, match=r"waited 0\.2 s to start"):
            thread.run(asyncio.sleep(5), "to start", deadline=0.2)
        thread.close()
    assert caplog.records[0].message == "waiting 0 s (of 0.2) to start"


def test_waiting_lets_other_cancellations_through():
    async def main():
        task = asyncio.create_task(in_vain())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def in_vain():
        with waiting("for nothing"):
            await asyncio.sleep(5)

    asyncio.run(main())
    assert waits.open_waits() == []


def test_the_stacks_show_threads_coroutines_and_waits(tmp_path):
    async def a_coroutine_that_hangs():
        await asyncio.sleep(5)

    async def main():
        tasks = [asyncio.create_task(a_coroutine_that_hangs())]
        with pytest.raises(WaitError), waiting("for the episodes of prompt 17"):
            await tasks[0]

    def a_thread_that_hangs():
        let_go.wait(5)

    let_go = threading.Event()
    thread = threading.Thread(target=a_thread_that_hangs)
    thread.start()
    dog, _ = watched(stall_seconds=0.05)
    with dog, dog.stalls_count(tmp_path):
        asyncio.run(main())
    let_go.set()
    thread.join()
    text = (tmp_path / "stacks-1.txt").read_text()
    assert "a_thread_that_hangs" in text
    assert "a_coroutine_that_hangs" in text
    assert "waiting 0 s for the episodes of prompt 17" in text


def test_stacks_never_go_through_a_link_and_replace_nothing(tmp_path):
    """Somebody has put links where the first two would be: one to a file of the user's, one to nothing."""
    mine, folder = tmp_path / "mine.txt", tmp_path / "run"
    mine.write_text("precious")
    folder.mkdir()
    (folder / "stacks-1.txt").symlink_to(mine)
    (folder / "stacks-2.txt").symlink_to(tmp_path / "made by a link")
    dog, _ = watched()
    with dog, dog.stalls_count(folder):
        assert dog.dump("a reason") == folder / "stacks-3.txt"
        assert dog.dump("another") == folder / "stacks-4.txt"
    assert mine.read_text() == "precious"
    assert not (tmp_path / "made by a link").exists()


def test_stacks_of_a_run_without_a_folder_are_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"openrlhf-{os.getpid()}"
    planted.symlink_to(tmp_path / "elsewhere")
    dog, _ = watched()
    with dog:
        first, second = dog.dump("a reason"), dog.dump("another")
    assert first.parent == second.parent
    assert first.parent.parent == tmp_path
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert not (tmp_path / "elsewhere").exists()


def test_watchdog_fails_the_wait_when_nothing_happens(tmp_path):
    dog, _ = watched(stall_seconds=0.1)
    with (
        pytest.raises(WaitError) as failure,
        dog,
        dog.stalls_count(tmp_path),
        waits.during("round 3"),
        waiting("for update: actor rank 1") as wait,
    ):
        wait_in_a_thread(wait)
    assert str(failure.value).startswith(
        "nothing has happened for 0.1 s (--train.stall_timeout 0.1): round 3: waiting 0 s for update: actor rank 1; "
        f"stacks are in {tmp_path}/stacks-1.txt"
    )


@pytest.mark.parametrize("sign", ["mark", "source", "peer"])
def test_watchdog_sees_any_sign_of_life(tmp_path, sign):
    """Three stall times pass, and something gets done at every tenth of one: here, in an engine that counts, elsewhere."""

    class Engine:
        tokens = 0

        def progress(self):
            return self.tokens

    class Ranks:
        marked = time.monotonic()

        def idle_seconds(self):
            return time.monotonic() - self.marked

        def stacks(self):
            return {}

    engine, ranks = Engine(), Ranks()
    waits.add_progress_source(engine.progress)
    dog, ends = watched(stall_seconds=0.2)
    waits.peers.add(ranks)
    try:
        with dog, dog.stalls_count(tmp_path), waiting("for a long update") as wait:
            for _ in range(30):
                time.sleep(0.02)
                if sign == "mark":
                    waits.mark_progress()
                elif sign == "source":
                    engine.tokens += 1
                else:
                    ranks.marked = time.monotonic()
                wait.check()
            with pytest.raises(WaitError):  # and without it dies
                wait_in_a_thread(wait)
    finally:
        waits.peers.discard(ranks)
    assert ends == []


def test_before_a_run_is_under_way_only_deadlines_count():
    dog, ends = watched(stall_seconds=0.05)
    with dog, waiting("to start: a large model") as wait:
        time.sleep(0.3)
        wait.check()
    assert ends == []


def test_a_call_that_cannot_be_interrupted_ends_the_process(tmp_path, capfd):
    """After the stall and the grace. What is to be done before is done."""
    done = []
    dog, ends = watched(stall_seconds=0.05, grace=0.1, at_the_end=lambda: done.append("hosts killed"))
    with dog, dog.stalls_count(tmp_path), waiting("for a checkpoint of step 3"):
        time.sleep(0.5)
    assert ends[0] == 1
    assert done[0] == "hosts killed"
    assert "it is ended now" in capfd.readouterr().err


def test_a_process_that_is_ended_exits_with_a_status_of_its_own(tmp_path):
    """A real one, whose only thread never looks up."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from openrlhf.observability.watchdog import Watchdog\n"
        "with Watchdog(stall_seconds=0.1, grace=0.1, tick=0.02) as dog, dog.stalls_count(Path(sys.argv[1])):\n"
        "    time.sleep(30)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert "nothing has happened for 0.1 s" in ended.stderr
    assert 'File "<string>", line 5' in (tmp_path / "stacks-1.txt").read_text()


def test_another_process_is_looked_at_from_outside_even_while_it_holds_its_interpreter():
    """A loop inside one call of C code: nobody in that process could answer. And one that is stopped says so."""
    code = (
        "from openrlhf.utils import stack_probe\n"
        "print(*stack_probe.install(), flush=True)\n"
        "def in_a_long_call():\n"
        "    max(range(10**12))\n"
        "in_a_long_call()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        address = stack_probe.Address(*map(int, child.stdout.readline().split()))
        time.sleep(0.1)
        assert "in in_a_long_call" in stack_probe.stacks(address)
        assert stack_probe.idle_seconds(address) < 5
        os.kill(child.pid, signal.SIGSTOP)
        assert "state T" in stack_probe.stacks(address)
    finally:
        child.kill()
        child.wait()
    assert "it is gone" in stack_probe.stacks(address)
    assert stack_probe.idle_seconds(address) == float("inf")


def test_an_activity_says_who_does_what():
    async def episode():
        with waits.activity("prompt 17 sample 2"), waits.doing("in the user's code (agent.py)"):
            assert waits.oldest_activity() == "prompt 17 sample 2 in the user's code (agent.py)"
            for _ in range(3):
                await asyncio.create_task(ask())
            return waits.oldest_activity()

    async def ask():
        with waits.doing("at the engine", turn=True):
            assert waits.oldest_activity().endswith("at the engine")
            await asyncio.sleep(0)

    assert asyncio.run(episode()) == "prompt 17 sample 2 turn 3 in the user's code (agent.py)"
    assert waits.oldest_activity() == ""
