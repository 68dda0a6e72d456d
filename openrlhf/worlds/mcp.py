"""Tools of any server that speaks the Model Context Protocol, over stdio or HTTP.

The server gives the tools. What the policy is asked is the user's: records of a file. So is the reward: a function of a
file, or a tool of the server that the policy does not see.

    --train.agent_func_path openrlhf.worlds.mcp
    --world.options 'server="python shop.py",records=tasks.jsonl,reward=judge.py'

>>> def reward_func(label, calls, answer):
...     return float(answer.strip() == str(label))
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import math
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.worlds.base import (
    LoopThread,
    Start,
    Turn,
    WorldError,
    WorldSettings,
    in_passes,
    shown,
    tool_message,
    unreadable_call,
)

OPTIONS = ("server", "records", "reward", "tools", "steps", "share", "system", "input_key", "label_key", "call_timeout")
CLOSED, TIMED_OUT = -32000, -32001
"""The package's codes for a connection that has ended, and for a call that took too long."""


class World:
    """Each episode has a session of its own, and over stdio a server of its own, so that no episode finds what another
    has left, unless `share` is said."""

    THREADS = True

    def __init__(self, settings: WorldSettings) -> None:
        """
        server    the command that starts it, or its URL (http…/mcp)
        records   a file of lines of JSON, with what the policy is asked and what the reward needs
        input_key, label_key   their names there; the label may be left out
        reward    file.py, whose reward_func(label, calls, answer) is called when the policy answers without a call; or
                  tool:NAME, a tool of the server that is called with label and answer, as far as it takes them
        tools     list of names: the policy sees these alone
        steps     so many messages with calls end the episode
        share     one session for all episodes: for servers that keep nothing
        system    a system message
        call_timeout   seconds a call may take; then the policy is told so
        """
        import mcp

        settings.check_options(OPTIONS)
        self._mcp = mcp
        self.server = _server(settings.option("server", ""))
        self.steps = settings.option("steps", 10)
        self.share = settings.option("share", False)
        self.system = settings.option("system", "")
        self.timeout = settings.option("call_timeout", 30.0)
        self._input_key, self._label_key = settings.option("input_key", "input"), settings.option("label_key", "label")
        self._records = self._read(settings.option("records", ""))
        self._wanted: list[str] = settings.option("tools", [])
        self.thread = LoopThread()
        self.judge, self.judging_tool = _judge(settings.option("reward", ""))
        self._sharing = threading.Lock()
        self._shared: Session | None = None
        try:
            session = self.session()
        except NoSessionError as error:
            raise WorldError(str(error)) from error
        self.tools = self._visible(session.tools)
        if not self.share:
            session.close()

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Each record once, in an order that the seed draws, before any is there again."""
        return in_passes(self._records, count=count, seed=seed)

    def begin(self, label: Any, *, seed: int) -> _Play:
        """An episode of a record; what the policy is asked is in its label too, as `records` has written it."""
        if not isinstance(label, dict) or "input" not in label:
            raise WorldError('the label of a record must be {"input": …, "label": …}, as the records of this world are')
        return _Play(self, label["input"], label.get("label"), self.session(), own=not self.share)

    def session(self) -> Session:
        """One of its own for an episode, or the shared one, which is begun again when its server was lost. Raises
        NoSessionError."""
        if not self.share:
            return Session(self)
        with self._sharing:
            if self._shared is None or self._shared.lost:
                before, self._shared = self._shared, None
                if before is not None:
                    before.leave()
                self._shared = Session(self)
            return self._shared

    def _read(self, path: str) -> list[dict[str, Any]]:
        if not path:
            raise WorldError("--world.options records=FILE.jsonl: which file has what the policy is asked?")
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise WorldError(f"--world.options records={path}: {error.strerror}") from error
        records = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                told = json.loads(line)
                asked = told[self._input_key]
            except (ValueError, TypeError, KeyError) as error:
                expected = f'{{"{self._input_key}": …, "{self._label_key}": …}}'
                raise WorldError(f"{path}:{number}: expected {expected}, got {shown(line)}") from error
            messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
            if self.system:
                messages.insert(0, {"role": "system", "content": self.system})
            label = {"input": messages, "label": told.get(self._label_key)}
            records.append({"input": messages, "label": label, "datasource": told.get("datasource", Path(path).stem)})
        if not records:
            raise WorldError(f"--world.options records={path}: the file has no records")
        return records

    def _visible(self, tools: Mapping[str, Any]) -> dict[str, Any]:
        for name in (*self._wanted, *([self.judging_tool] if self.judging_tool else [])):
            if name not in tools:
                raise WorldError(f"the server has no tool {name!r}; it has {', '.join(tools) or 'none'}")
        return {
            name: tool
            for name, tool in tools.items()
            if name != self.judging_tool and (not self._wanted or name in self._wanted)
        }


class NoSessionError(Exception):
    """The server cannot be reached."""


class Session:
    """A session with the server, which lives in a task of its own: what has entered it must also leave it."""

    def __init__(self, world: World) -> None:
        """Raises NoSessionError."""
        self.lost = False
        """Whether the server is gone."""
        self._world = world
        self._over = asyncio.Event()
        self._opened: Future[dict[str, Any]] = Future()
        self._task = asyncio.run_coroutine_threadsafe(self._live(), world.thread.loop)
        self.tools = self._opened.result()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of a tool, also where it says that it failed. Raises what the package does where there is none."""
        try:
            return await self._client.call_tool(name, dict(arguments), read_timeout_seconds=self._world.timeout)
        except Exception as error:
            told = isinstance(error, self._world._mcp.MCPError) and error.code != CLOSED
            self.lost = self.lost or not told
            raise

    def leave(self) -> None:
        """Have the session end, and over stdio its server."""
        self._world.thread.loop.call_soon_threadsafe(self._over.set)

    def close(self) -> None:
        """The same, and wait for it."""
        self.leave()
        with contextlib.suppress(Exception):
            self._task.result()

    async def _live(self) -> None:
        try:
            async with self._world._mcp.Client(self._world.server) as self._client:
                tools: dict[str, Any] = {}
                cursor = None
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    tools |= {tool.name: tool for tool in page.tools}
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                self._opened.set_result(tools)
                await self._over.wait()
        except BaseException as error:
            if not self._opened.done():
                said = _innermost(error)
                why = f"the server {shown(self._world.server)} gave no session: {type(said).__name__}: {said}"
                self._opened.set_exception(NoSessionError(why))
            raise


class _Play:
    """One record, played once."""

    def __init__(
        self, world: World, messages: list[dict[str, Any]], label: Any, session: Session, *, own: bool
    ) -> None:
        self._world, self._label, self._session, self._own = world, label, session, own
        self._calls: list[dict[str, Any]] = []
        self._steps = 0
        schemas = [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for name, tool in world.tools.items()
        ]
        self.start = Start(messages, schemas)

    def step(self, message: Mapping[str, Any]) -> Turn:
        calls = message.get("tool_calls") or []
        unreadable = unreadable_call(message)
        if not calls and not unreadable:
            return self._end(self._judged(str(message["content"])))
        self._steps += 1
        if unreadable:
            self._calls.append({"name": "", "arguments": {}, "answer": unreadable["content"], "failed": True})
            messages = [unreadable]
        else:
            made = self._world.thread.run(self._make(calls))
            self._calls += made
            messages = [tool_message(call, done["answer"]) for call, done in zip(calls, made, strict=True)]
        return self._end(0.0) if self._steps >= self._world.steps else Turn(messages)

    def close(self) -> None:
        if self._own:
            self._session.close()

    async def _make(self, calls: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All at once, as the policy has asked."""
        return list(await asyncio.gather(*map(self._answer, calls)))

    async def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        made = {"name": call["name"], "arguments": call["arguments"]}
        if call["name"] not in self._world.tools:
            there = ", ".join(self._world.tools)
            return {
                **made,
                "answer": f"error: there is no tool {shown(call['name'])}; there are {there}",
                "failed": True,
            }
        try:
            result = await self._session.call(call["name"], call["arguments"])
        except self._world._mcp.MCPError as error:
            if error.code == CLOSED:
                raise  # the server is gone: nothing that the policy has done wrong
            late = f"the tool took longer than {self._world.timeout:g} s" if error.code == TIMED_OUT else None
            return {**made, "answer": f"error: {late or error.message}", "failed": True}
        return {**made, "answer": _text(result), "failed": bool(result.is_error)}

    def _judged(self, answer: str) -> float:
        if self._world.judge is not None:
            reward = self._world.judge(self._label, list(self._calls), answer)
        else:
            reward = self._world.thread.run(self._asked(answer))
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise ValueError(f"the reward must be a number, got {shown(reward)}")
        return float(reward)

    async def _asked(self, answer: str) -> Any:
        tool = self._session.tools[self._world.judging_tool]
        told = {"label": self._label, "answer": answer}
        taken = tool.input_schema.get("properties", {})
        result = await self._session.call(tool.name, {name: value for name, value in told.items() if name in taken})
        if result.is_error:
            raise ValueError(f"tool {tool.name}, which gives the reward, failed: {_text(result)}")
        structured = result.structured_content or {}
        return structured["result"] if "result" in structured else json.loads(_text(result))

    def _end(self, reward: float) -> Turn:
        failed = sum(call["failed"] for call in self._calls)
        logs: dict[str, float] = {"calls": len(self._calls), "calls_failed": failed}
        if self._calls:
            logs["calls_succeeded"] = 1 - failed / len(self._calls)
        return Turn(reward=reward, done=True, logs=logs)


# ------------------------------------------------------------------------------------ what the user has said


def _server(said: str) -> Any:
    """What the package's client connects to."""
    from mcp import StdioServerParameters

    if not said:
        raise WorldError('--world.options server="COMMAND" or server=URL: which server has the tools?')
    if said.startswith(("http://", "https://")):
        return said
    command, *arguments = shlex.split(said)
    # In the environment of this process, where `python` is the one that has the package.
    return StdioServerParameters(command=command, args=arguments, env=dict(os.environ))


def _judge(said: str) -> tuple[Callable[..., Any] | None, str]:
    """The user's function, or the name of the server's tool."""
    if said.startswith("tool:"):
        return None, said.removeprefix("tool:")
    file = Path(said).expanduser()
    if not said.endswith(".py") or not file.is_file():
        raise WorldError(f"--world.options reward={said}: expected a .py file with reward_func, or tool:NAME")
    spec = importlib.util.spec_from_file_location("user_reward", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise WorldError(f"{said} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, "reward_func", None)
    if not callable(function):
        raise WorldError(f"{said} has no function reward_func(label, calls, answer)")
    try:
        inspect.signature(function).bind(None, [], "")
    except TypeError as error:
        raise WorldError(f"{said}: reward_func must take (label, calls, answer): {error}") from error
    return function, ""


def _text(result: Any) -> str:
    """What the policy reads of a result: its texts; other content by its kind."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


def _innermost(error: BaseException) -> BaseException:
    """The error of a task among the groups that hold it."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


if TYPE_CHECKING:
    from openrlhf.worlds import base

    _: type[base.World] = World
