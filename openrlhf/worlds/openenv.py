"""Environments of OpenEnv, through their server: one that runs somewhere, or one that a command starts here.

    --train.agent_func_path openrlhf.worlds.openenv
    --world.options 'server="python examples/openenv/guess.py {port}"'

What the policy writes becomes an action, as the server's schema says: the text of the one field that is needed, where
that is a text; a call of a tool, where the environment has tools (MCP); else a call of the tool `act`, whose arguments
are the fields of an action.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.worlds.base import (
    LoopThread,
    Start,
    Turn,
    WorldError,
    WorldSettings,
    shown,
    tool_message,
    unreadable_call,
)

OPTIONS = ("server", "folder", "resets", "field", "show", "prompt", "system", "steps", "step_timeout")
ACT = "act"
"""The tool of environments whose actions have several fields."""
LIST_TOOLS, CALL_TOOL = "list_tools", "call_tool"
STARTS_SECONDS = 90.0
MOST_WAIT_SECONDS = 5.0
"""How long an episode waits for room at the server: one that has just ended is still there for a moment."""


class World:
    """Each episode has a session of its own with the server, and with it an environment of its own."""

    THREADS = True

    def __init__(self, settings: WorldSettings) -> None:
        """
        server    its URL, or a command with {port}, which is started once for each world process
        folder    where the command runs
        resets    a file of lines of JSON, the arguments of `reset` each; without it they are {"seed": …}
        field     the field of an action that is the policy's text
        show      list of fields of an observation that the policy reads; without it its only text, or all of it
        prompt    before the first observation
        system    a system message
        steps     so many actions end the episode
        step_timeout   seconds a step may take
        """
        settings.check_options(OPTIONS)
        self.show: list[str] = settings.option("show", [])
        self.prompt, self.system = settings.option("prompt", ""), settings.option("system", "")
        self.steps = settings.option("steps", 20)
        self._timeout = settings.option("step_timeout", 60.0)
        self._resets = _read(settings.option("resets", ""))
        self._url = _served(settings.option("server", ""), settings.option("folder", "."))
        from openenv.core.generic_client import GenericEnvClient  # takes seconds, as the server's own start does

        self._client = GenericEnvClient
        self.thread = LoopThread()
        self.action = self._schema()
        self.field = settings.option("field", "") or _text_field(self.action)
        if self.field and self.field not in self.action["properties"]:
            there = ", ".join(self.action["properties"])
            raise WorldError(f"--world.options field={self.field}: an action has no such field; it has {there}")
        self.tools: dict[str, dict[str, Any]] = {}
        if not self.field:
            mcp = "tool_name" in self.action["properties"]
            self.tools = self._listed() if mcp else {ACT: {"description": "Act.", "parameters": self.action}}

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """What the policy is asked is only known when the environment is reset: `input` is a stand-in."""
        rng = random.Random(seed)
        left: list[dict[str, Any]] = []
        for _ in range(count):
            if not left:
                left = rng.sample(self._resets, len(self._resets))
            reset = left.pop() if self._resets else {"seed": rng.randrange(2**31)}
            yield {"input": self.prompt or "…", "label": reset, "datasource": "openenv"}

    def begin(self, label: Mapping[str, Any], *, seed: int) -> _Play:
        """An episode of a reset with these arguments, so that all samples of a prompt begin alike."""
        return _Play(self, label)

    def connect(self) -> Any:
        """A new session."""
        return self._client(base_url=self._url, message_timeout_s=self._timeout)

    def _schema(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/schema", timeout=self._timeout) as answer:
            schema: dict[str, Any] = json.load(answer)["action"]
        schema["properties"] = {name: of for name, of in schema.get("properties", {}).items() if name != "metadata"}
        return {key: value for key, value in schema.items() if key not in ("title", "description")}

    def _listed(self) -> dict[str, dict[str, Any]]:
        async def listed() -> Any:
            async with self.connect() as client:
                return await client.step({"type": LIST_TOOLS})

        found = self.thread.run(listed()).observation["tools"]
        return {
            tool["name"]: {"description": tool.get("description") or "", "parameters": tool["input_schema"]}
            for tool in found
        }


class _Play:
    """One environment, from its reset on."""

    def __init__(self, world: World, reset: Mapping[str, Any]) -> None:
        self._world = world
        self._client = world.connect()
        self._steps = 0
        self._called = self._failed = 0
        try:
            result = world.thread.run(self._reset(reset))
        except BaseException:
            self.close()
            raise
        first = "\n\n".join(filter(None, (world.prompt, _shown_observation(result.observation, world.show))))
        self.start = Start(
            [
                *([{"role": "system", "content": world.system}] if world.system else []),
                {"role": "user", "content": first},
            ],
            [{"type": "function", "function": {"name": name, **tool}} for name, tool in world.tools.items()] or None,
        )

    def step(self, message: Mapping[str, Any]) -> Turn:
        calls = message.get("tool_calls") or []
        if self._world.field:
            turn = self._acted(
                {self._world.field: str(message["content"])}, lambda text: {"role": "user", "content": text}
            )
        elif unreadable := unreadable_call(message):
            self._called, self._failed = self._called + 1, self._failed + 1
            turn = Turn([unreadable])
        elif not calls:
            return self._end(0.0)
        else:
            turn = self._called_all(calls)
        self._steps += 1
        over = turn.done or self._steps >= self._world.steps
        return self._end(turn.reward) if over else turn

    def close(self) -> None:
        self._world.thread.run(self._leave())

    async def _leave(self) -> None:
        with contextlib.suppress(Exception):  # a server that is gone has let go of the session too
            await self._client.close()

    async def _reset(self, arguments: Mapping[str, Any]) -> Any:
        ends = time.monotonic() + MOST_WAIT_SECONDS
        while True:
            try:
                result = await self._client.reset(**arguments)
                self._socket = self._client._ws
                return result
            except RuntimeError as error:
                if "CAPACITY_REACHED" not in str(error):
                    raise
                if time.monotonic() > ends:
                    raise WorldError(
                        f"{error} The server plays no more episodes at once: give create_app more max_concurrent_envs"
                    ) from error
                await asyncio.sleep(0.2)
                await self._client.close()
                self._client = self._world.connect()

    async def _step(self, action: Mapping[str, Any]) -> Any:
        # The package's client would connect again, to an environment that was never reset.
        if self._client._ws is not self._socket or self._socket.state.name != "OPEN":
            raise ConnectionError("the connection to the environment was lost")
        return await self._client.step(dict(action))

    def _called_all(self, calls: Any) -> Turn:
        """One after the other, as actions of one environment are; those after its end are not made."""
        messages: list[Mapping[str, Any]] = []
        reward = 0.0
        for call in calls:
            self._called += 1
            tool = self._world.tools.get(call["name"])
            if tool is None:
                there = ", ".join(self._world.tools)
                wrong: str | None = f"there is no tool {shown(call['name'])}; there are {there}"
            else:
                wrong = _mistake(call["arguments"], tool["parameters"])
            if wrong is not None:
                self._failed += 1
                messages.append(tool_message(call, f"error: {wrong}"))
                continue
            action = call["arguments"]
            if ACT not in self._world.tools:
                action = {"type": CALL_TOOL, "tool_name": call["name"], "arguments": call["arguments"]}
            turn = self._acted(action, lambda text, call=call: tool_message(call, text))
            messages += turn.messages
            reward += turn.reward
            if turn.done:
                return Turn(reward=reward, done=True)
        return Turn(messages, reward=reward)

    def _acted(self, action: Mapping[str, Any], say: Any) -> Turn:
        result = self._world.thread.run(self._step(action))
        observation = result.observation
        self._failed += bool(observation.get("error"))
        return Turn(
            [] if result.done else [say(_shown_observation(observation, self._world.show))],
            reward=float(result.reward or 0.0),
            done=bool(result.done),
        )

    def _end(self, reward: float) -> Turn:
        logs: dict[str, float] = {"steps": self._steps}
        if self._called:
            logs |= {
                "calls": self._called,
                "calls_failed": self._failed,
                "calls_succeeded": 1 - self._failed / self._called,
            }
        return Turn(reward=reward, done=True, logs=logs)


# ------------------------------------------------------------------------------------ servers


def _served(said: str, folder: str) -> str:
    """The URL of the server, which is started where a command was said. It ends with this process."""
    if not said:
        raise WorldError('--world.options server=URL, or server="COMMAND {port}": which environment?')
    if said.startswith(("http://", "https://")):
        url, process = said.rstrip("/"), None
    else:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        try:
            process = subprocess.Popen(
                shlex.split(said.replace("{port}", str(port))),
                cwd=os.path.expanduser(folder),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        except OSError as error:
            raise WorldError(f"--world.options server={said}: {error}") from error
    ends = time.monotonic() + STARTS_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5.0):
                if process is not None:
                    threading.Thread(target=_end_with, args=(process, said), name="server", daemon=True).start()
                return url
        except urllib.error.HTTPError as error:
            raise WorldError(f"{url}/health answers {error.code}: it is no server of OpenEnv") from error
        except OSError as error:
            if process is not None and process.poll() is not None:
                raise WorldError(f"--world.options server={said}: it ended with status {process.returncode}") from error
            if process is None or time.monotonic() > ends:
                raise WorldError(f"no server of OpenEnv answers at {url}: {error}") from error
            time.sleep(0.1)


def _end_with(process: subprocess.Popen[bytes], said: str) -> None:
    """Without its server this process is of no use: the next one starts both again."""
    status = process.wait()
    print(f"the server {shown(said)} ended with status {status}", file=sys.stderr, flush=True)
    os._exit(1)


def _read(path: str) -> list[dict[str, Any]]:
    if not path:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorldError(f"--world.options resets={path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                told = json.loads(line)
            except ValueError:
                told = None
            if not isinstance(told, dict):
                raise WorldError(
                    f"{path}:{number}: expected the arguments of reset as a JSON object, got {shown(line)}"
                )
            found.append(told)
    if not found:
        raise WorldError(f"--world.options resets={path}: the file has no lines")
    return found


# ------------------------------------------------------------------------------------ actions and observations


def _text_field(action: Mapping[str, Any]) -> str:
    """The one field that must be there, where it is a text."""
    needed = action.get("required", [])
    text = len(needed) == 1 and action["properties"][needed[0]].get("type") == "string"
    return str(needed[0]) if text and needed[0] != "tool_name" else ""


def _mistake(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """Why they do not fit. The server says no more than that they do not."""
    import jsonschema

    try:
        jsonschema.validate(arguments, schema)
    except jsonschema.ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {error.message}" if where else str(error.message)
    return None


def _shown_observation(observation: Mapping[str, Any], show: list[str]) -> str:
    """What the policy reads of it."""
    if observation.get("error"):
        return f"error: {_as_text(observation['error'].get('message') or observation['error'])}"
    if "tool_name" in observation and "result" in observation:
        result = observation["result"]
        inner = result.get("data", result.get("structured_content")) if isinstance(result, dict) else result
        return _as_text(result if inner is None else inner)
    left = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
    if show:
        left = {name: observation.get(name) for name in show}
    texts = [value for value in left.values() if isinstance(value, str)]
    return _as_text(texts[0] if len(left) == len(texts) == 1 else left)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if TYPE_CHECKING:
    from openrlhf.worlds import base

    _: type[base.World] = World
