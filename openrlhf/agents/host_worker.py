"""The inside of a host process: runs one service object's methods on request. Imports the standard library only.

Messages (`host_messages.py`) come and go on two private descriptors; at the end of the requests the parent is gone or
done, and the host ends. Threads: the main one loads the service, then runs the event loop that users' coroutines share;
one reads requests; plain methods and blocking code of users have their own (`host_calls.py`).

Services import from here what their calls may do: `ask`, `ask_stream`, `run_user`, `say`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from openrlhf.agents.host_calls import AskError, CallRunner, ask, ask_stream, make_service, run_user, say
from openrlhf.agents.host_messages import Hello, Ready, describe

__all__ = ["AskError", "ask", "ask_stream", "run_user", "say", "serve"]

EXIT_SECONDS = 1.0
"""How long exit handlers of users' code may take."""

MOST_THREADS = 256
"""In which `asyncio.to_thread` runs things."""

MOST_FILES = 65536
"""File descriptors a host may have open where the system lets it: each event loop needs three."""


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Run until `requests` ends. Never returns."""
    # Python-level output of users' code appears line by line, not when a buffer is full.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    allow_many_files()
    hello = pickle.load(requests)
    _Host(requests, replies, hello).run(hello)


class _Host:
    def __init__(self, requests: BinaryIO, replies: BinaryIO, hello: Hello) -> None:
        self._requests = requests
        self._replies = replies
        self._reply_lock = threading.Lock()
        self._runner = CallRunner(self._reply, pinned=hello.pinned, own=hello.own)
        self._closing = False

    def run(self, hello: Hello) -> None:
        threading.Thread(target=self._read, name="host-requests", daemon=True).start()
        loop = self._runner.loop
        # asyncio.to_thread of users' code waits for no other call's.
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
        asyncio.set_event_loop(loop)
        try:
            self._runner.service = make_service(hello.target, hello.args)
        except BaseException as error:  # SystemExit too: a file that calls sys.exit() has not loaded
            self._reply(describe(error))
            end()
        self._reply(Ready())
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a user's task: it ends the task, not the host
                loop.run_forever()
        end()

    def _read(self) -> None:
        while True:
            try:
                message = pickle.load(self._requests)
            except (EOFError, OSError, pickle.UnpicklingError):  # the last two: the parent died in mid-sentence
                break
            self._runner.handle(message)
        self._closing = True
        self._runner.loop.call_soon_threadsafe(self._runner.loop.stop)
        # The main thread may be inside a user's file that never ends.
        time.sleep(EXIT_SECONDS)
        kill_group()

    def _reply(self, message: Any) -> None:
        with self._reply_lock, contextlib.suppress(OSError):  # the parent is gone: the reading thread ends the host
            self._replies.write(pickle.dumps(message))
            self._replies.flush()


def allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def end() -> None:
    """Exit handlers, then nothing of this host is left, its children included. Never returns."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    kill_group()


def kill_group() -> None:
    """End this process at once, with whatever users' code has started when it leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
