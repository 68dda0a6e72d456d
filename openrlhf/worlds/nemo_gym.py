"""Resources servers of NeMo Gym, over HTTP.

A resources server keeps the state of a task and judges it; here the policy is the agent, and this file speaks for it as
NeMo Gym's own `simple_agent` does. Of each record of a data set:

    POST /seed_session   the record                                 begins a session, which a cookie names
    POST /{tool}         the arguments of a call                    answers with text, an error of its own included
    POST /verify         the record, and "response": what the policy has said and called, as of the Responses API
                                                                    answers with the record and "reward"

Records are NeMo Gym's own: `{"responses_create_params": {"input": …, "tools": […]}, …}`, and what is beside it is for
the server alone. No package is needed: nemo-gym is where the server runs.

    --train.agent_func_path openrlhf.worlds.nemo_gym
    --world.options 'server=http://127.0.0.1:8000,records=train.jsonl'
"""

from __future__ import annotations

import http.cookiejar
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.worlds.base import Start, Turn, WorldError, WorldSettings, in_passes, shown, tool_message, unreadable_call

OPTIONS = ("server", "records", "steps", "done_flag", "call_timeout")
RECORD = "responses_create_params"
OWN = ("seed_session", "verify", "close_session", "sandbox_access", "aggregate_metrics", "mcp", "reverify_mode")
"""Paths of the server that are no tools."""


class World:
    """Each episode has a session of its own with the server."""

    THREADS = True

    def __init__(self, settings: WorldSettings) -> None:
        """
        server      its URL
        records     a data set of NeMo Gym: a file of lines of JSON
        steps       so many messages with calls end the episode, and are judged
        done_flag   whether a tool that answers {"done": true} ends it
        call_timeout   seconds that the server may take for each answer
        """
        settings.check_options(OPTIONS)
        self.url = settings.option("server", "").rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise WorldError("--world.options server=http://HOST:PORT: which resources server?")
        self.steps = settings.option("steps", 10)
        self.done_flag = settings.option("done_flag", False)
        self.timeout = settings.option("call_timeout", 60.0)
        self._records = _read(settings.option("records", ""))
        Session(self).reach()

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Each record once, in an order that the seed draws, before any is there again."""
        for record in in_passes(self._records, count=count, seed=seed):
            name = (record.get("agent_ref") or {}).get("name", "nemo_gym")
            yield {"input": _messages(record[RECORD]), "label": record, "datasource": name}

    def begin(self, label: Mapping[str, Any], *, seed: int) -> _Play:
        return _Play(self, label)


class Session:
    """A client of the server with cookies of its own."""

    def __init__(self, world: World) -> None:
        self._url, self._timeout = world.url, world.timeout
        # The cookie of a session is sent back over plain HTTP too, as on loopback, where servers mark it for HTTPS.
        policy = http.cookiejar.DefaultCookiePolicy(secure_protocols=("https", "wss", "http"))
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar(policy)), urllib.request.ProxyHandler({})
        )

    def reach(self) -> None:
        """Raises WorldError where nothing answers."""
        try:
            with self._opener.open(self._url, timeout=self._timeout):
                pass
        except urllib.error.HTTPError:
            pass  # any answer will do: what stands at "/" is the server's business
        except OSError as error:
            raise WorldError(f"no resources server answers at {self._url}: {error}") from error

    def ask(self, path: str, body: Any) -> tuple[int, str]:
        """The status of an answer and its text. Raises OSError where there is none."""
        request = urllib.request.Request(
            f"{self._url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def need(self, path: str, body: Any) -> Any:
        """The JSON of an answer. Raises ValueError where the server refuses."""
        status, text = self.ask(path, body)
        if status != 200:
            raise ValueError(f"the resources server answers /{path} with {status}: {shown(text)}")
        return json.loads(text)


class _Play:
    """One record, played once."""

    def __init__(self, world: World, record: Mapping[str, Any]) -> None:
        self._world, self._record = world, record
        self._params: Mapping[str, Any] = record[RECORD]
        tools = self._params.get("tools") or []
        self._tools = {tool["name"]: tool for tool in tools if tool.get("type", "function") == "function"}
        self._output: list[dict[str, Any]] = []
        self._steps = self._called = self._failed = 0
        self.start = Start(_messages(self._params), [_schema(tool) for tool in self._tools.values()] or None)
        self._session = Session(world)
        self._session.need("seed_session", record)

    def step(self, message: Mapping[str, Any]) -> Turn:
        calls = message.get("tool_calls") or []
        text = str(message["content"])
        if text or not calls:
            self._output.append(self._said(text, cut=bool(message.get("truncated"))))
        if message.get("truncated"):
            return self._end()
        unreadable = unreadable_call(message)
        if not calls and not unreadable:
            return self._end()
        self._steps += 1
        done = False
        messages: list[dict[str, Any]] = []
        if unreadable:
            self._called, self._failed = self._called + 1, self._failed + 1
            messages.append(unreadable)
        for call in calls:  # one after the other: a session's calls may depend on each other
            call_id = f"call_{self._called}"
            answer = self._answer(call)
            done = done or (self._world.done_flag and _says_done(answer))
            arguments = json.dumps(call["arguments"])
            self._output += [
                {
                    "type": "function_call",
                    "id": f"fc_{call_id}",
                    "call_id": call_id,
                    "name": call["name"],
                    "arguments": arguments,
                    "status": "completed",
                },
                {"type": "function_call_output", "call_id": call_id, "output": answer},
            ]
            messages.append(tool_message(call, answer))
        return self._end() if done or self._steps >= self._world.steps else Turn(messages)

    def close(self) -> None:
        """The protocol of agents has no word for it: sessions end when the server forgets them."""

    def _answer(self, call: Mapping[str, Any]) -> str:
        self._called += 1
        name = call["name"]
        if name not in self._tools or name in OWN:
            self._failed += 1
            return json.dumps({"error": f"there is no tool {shown(name)}; there are {', '.join(self._tools)}"})
        status, text = self._session.ask(urllib.parse.quote(name, safe=""), call["arguments"])
        self._failed += status != 200
        return text

    def _said(self, text: str, *, cut: bool) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{len(self._output)}",
            "role": "assistant",
            "status": "incomplete" if cut else "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }

    def _end(self) -> Turn:
        """What the server says of it all."""
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": 0.0,
            "model": "policy",
            "output": self._output,
            "tools": list(self._params.get("tools") or []),
            "tool_choice": self._params.get("tool_choice", "auto"),
            "parallel_tool_calls": self._params.get("parallel_tool_calls", True),
        }
        told = self._session.need("verify", {**self._record, "response": response})
        if told.get("mask_sample"):
            raise ValueError(f"the resources server could not judge: {told.get('failure_reason') or 'mask_sample'}")
        reward = told.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise ValueError(f"the resources server answers /verify without a reward: {shown(reward)}")
        logs: dict[str, float] = {"calls": self._called, "calls_failed": self._failed}
        if self._called:
            logs["calls_succeeded"] = 1 - self._failed / self._called
        components = told.get("reward_components") or {}
        logs |= {name: float(value) for name, value in components.items() if isinstance(value, (int, float))}
        return Turn(reward=float(reward), done=True, logs=logs)


# ------------------------------------------------------------------------------------ records


def _read(path: str) -> list[dict[str, Any]]:
    if not path:
        raise WorldError("--world.options records=FILE.jsonl: which data set of NeMo Gym?")
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorldError(f"--world.options records={path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            _messages(record[RECORD])
        except (ValueError, TypeError, KeyError) as error:
            expected = '{"responses_create_params": {"input": …}, …}'
            raise WorldError(f"{path}:{number}: expected {expected}, got {shown(line)} ({error})") from error
        records.append(record)
    if not records:
        raise WorldError(f"--world.options records={path}: the file has no records")
    return records


def _messages(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The input of the Responses API as messages: a text, or items that are messages."""
    asked = params["input"]
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if instructions := params.get("instructions"):
        items = [{"role": "system", "content": instructions}, *items]
    messages = []
    for item in items:
        if item.get("type", "message") != "message":
            raise ValueError(f"an input item of type {item['type']} cannot be what the policy reads first")
        content = item["content"]
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": content})
    if not messages:
        raise ValueError("the input is empty")
    return messages


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the Responses API in the form of chat templates."""
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _says_done(answer: str) -> bool:
    try:
        told = json.loads(answer)
    except ValueError:
        return False
    return isinstance(told, dict) and bool(told.get("done"))


if TYPE_CHECKING:
    from openrlhf.worlds import base

    _: type[base.World] = World
