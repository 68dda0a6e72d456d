"""The inside of a host process: runs one service object's methods on request. Imports the standard library only.

Messages are pickles, one after another, on two private descriptors:

    requests  Hello, then Call …                      end of file: the parent is gone or done, so the host ends
    replies   Ready | Failure, then Done | Failed | Pong …

Threads: the main one loads the service, then runs the event loop that users' coroutines share; one reads requests;
one per call runs the method.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import inspect
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, BinaryIO

EXIT_SECONDS = 1.0
"""How long exit handlers of users' code may take."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Which service to make: `target` is `module:callable`, called with `args`."""

    target: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments and result are pickles of their own, so that one that cannot be read fails its call alone."""

    id: int
    method: str
    args: bytes


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by the reading thread at once, unless some call holds the interpreter lock."""

    id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The service is there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as text: its type may not be importable, or not picklable, on the other side."""

    kind: str
    """Name of its type."""
    text: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Done:
    id: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Pong:
    id: int


def describe(error: BaseException) -> Failure:
    try:
        text = str(error)
    except Exception:  # a user's exception whose own __str__ fails
        text = "(its text cannot be shown)"
    return Failure(type(error).__name__, text, "".join(traceback.format_exception(error)))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Run until `requests` ends. Never returns."""
    # Python-level output of users' code appears line by line, not when a buffer is full.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    hello = pickle.load(requests)
    host = _Host(requests, replies)
    host.run(hello)


class _Host:
    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._reply_lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._service: Any = None

    def run(self, hello: Hello) -> None:
        threading.Thread(target=self._read, name="host-requests", daemon=True).start()
        try:
            module, _, attribute = hello.target.partition(":")
            self._service = getattr(importlib.import_module(module), attribute)(*hello.args)
        except BaseException as error:  # SystemExit too: a file that calls sys.exit() has not loaded
            self._reply(describe(error))
            end()
        self._reply(Ready())
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        end()

    def _read(self) -> None:
        while True:
            try:
                message = pickle.load(self._requests)
            except (EOFError, OSError, pickle.UnpicklingError):  # the last two: the parent died in mid-sentence
                break
            if isinstance(message, Ping):
                self._reply(Pong(message.id))
            else:
                threading.Thread(target=self._answer, args=(message,), name=f"call-{message.id}", daemon=True).start()
        self._loop.call_soon_threadsafe(self._loop.stop)
        # The main thread may be inside a user's file that never ends.
        time.sleep(EXIT_SECONDS)
        kill_group()

    def _answer(self, call: Call) -> None:
        reply: Done | Failed
        try:
            value = getattr(self._service, call.method)(*pickle.loads(call.args))
            if inspect.isawaitable(value):
                value = asyncio.run_coroutine_threadsafe(_wait(value), self._loop).result()
            reply = Done(call.id, pickle.dumps(value))
        except BaseException as error:  # sys.exit() in a call fails the call, not the host
            reply = Failed(call.id, describe(error))
        self._reply(reply)

    def _reply(self, message: Any) -> None:
        with self._reply_lock, contextlib.suppress(OSError):  # the parent is gone: the reading thread ends the host
            self._replies.write(pickle.dumps(message))
            self._replies.flush()


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


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
