"""Processes that end with the one they belong to, also when it is killed and cannot tell them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

RUN_FOLDER = "OPENRLHF_RUN_FOLDER"
"""The environment variable of a run's processes that names a folder which only this user may enter; it is removed when
the run ends."""


def exit_with_parent(owner: int, *, leaving_nothing_in: Callable[[], str | None] = lambda: None) -> None:
    """When the process `owner` is gone, this process ends, and so does a process between the two.

    It ends without cleaning up: nothing can be reported any more, and the memory of its GPU must become free.
    `leaving_nothing_in` tells which folder is removed then.
    """
    between = os.getppid()
    try:
        watched = os.pidfd_open(owner)  # not its number, which the system may give to another process
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        if between != owner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(between, signal.SIGKILL)
        if folder := leaving_nothing_in():
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="owner", daemon=True).start()


GRACE_SECONDS = 2.0
"""How long process groups may take to end by themselves after their owner is gone."""

# Reads "123" (take care of this group) and "-123" (it has ended). The pipe's end means that the owner is done or gone,
# and the pidfd says so too where a forked child of the owner holds the pipe open.
_GUARD = """
import os, select, signal, sys, time
owner, grace = int(sys.argv[1]), float(sys.argv[2])
poll = select.poll()
poll.register(0, select.POLLIN)
try:
    poll.register(os.pidfd_open(owner), select.POLLIN)
except (AttributeError, OSError):
    pass
groups, rest = set(), b""
while 0 in dict(poll.poll()):
    received = os.read(0, 4096)
    if not received:
        break
    *lines, rest = (rest + received).split(b"\\n")
    for number in map(int, lines):
        groups.add(number) if number > 0 else groups.discard(-number)
if groups:
    time.sleep(grace)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Ends process groups whose owner was killed, with everything in them and whatever they are doing.

    A process that watches its owner itself (`exit_with_parent`, or a thread that reads a pipe) needs its interpreter
    for that, and users' code may hold the interpreter lock for ever. The kernel's parent-death signal would end that
    process, but not the programs it has started, and would leave it no time for its exit handlers. So a small process
    of its own watches the owner; there is one as long as there are groups to take care of. May be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        """From now on `group`, of which this process is the owner, ends when this process does."""
        with self._lock:
            self._groups.add(group)
            if self._process is None or self._process.poll() is not None:
                self._start()
            else:
                self._write(group)

    def forget(self, group: int) -> None:
        """The group has ended."""
        with self._lock:
            if group not in self._groups:
                return
            self._groups.remove(group)
            self._write(-group)
            if not self._groups and self._process is not None:
                with self._process as process:  # closes the pipe, and waits
                    process.kill()
                self._process = None

    def _start(self) -> None:
        # -I -S: it imports nothing of the user's. Its own session: what ends our process group does not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(GRACE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        for group in self._groups:
            self._write(group)

    def _write(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):  # the guard was ended from outside; the next `watch` starts another
                self._process.stdin.write(b"%d\n" % number)  # type: ignore[union-attr]


guard = Guard()


def _new_guard() -> None:
    """After a fork: the groups, and perhaps a lock held at that moment, are the parent's."""
    global guard
    guard = Guard()


os.register_at_fork(after_in_child=_new_guard)
