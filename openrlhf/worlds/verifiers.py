"""Environments of verifiers (0.4): their loop asks the policy, their rewards judge what came of it.

A task is a taskset: the name of an installed package, or a file of yours that exports one in `__all__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from openrlhf.worlds.base import DrivenStart, Outcome, WorldError, WorldSettings

OPTIONS = ("taskset", "env")
CHAT = "openrlhf_chat"
"""The id of the harness below."""
KEY = "OPENRLHF_WORLD_KEY"
LIMIT = "turn_limit_exceeded"
"""What the policy's endpoint says when an episode has had its turns."""
START_SECONDS = 120.0


class World:
    """Tasksets of verifiers with the environments and harnesses that they bring; those that bring none are asked in a
    plain conversation with tools."""

    THREADS = True

    def __init__(self, settings: WorldSettings) -> None:
        """Options, as JSON:

        taskset   settings of the tasksets: taskset={"num_tasks":100}
        env       settings of the environments, `id` to choose one, and by role: env={"agent":{"max_turns":4}}
        """
        import verifiers.v1 as vf

        settings.check_options(OPTIONS)
        if not settings.tasks:
            raise WorldError("--world.tasks names no taskset: give an installed package, or a file with one")
        self._vf = vf
        self._tasks = settings.tasks
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True).start()
        sys.modules.setdefault(CHAT, _chat_module(vf))
        self._environments = {
            name: self._make(name, settings.option("taskset", {}), settings.option("env", {}))
            for name, _ in settings.tasks
        }
        self._loaded: dict[str, list[Any]] = {name: [] for name in self._environments}
        self._loading = {name: iter(env.taskset) for name, env in self._environments.items()}
        self._lock = threading.Lock()

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Of a taskset that ends each task once, in an order of the seed's; of others, those from a place on that the
        seed chooses."""
        rng = random.Random(seed)
        orders = {name: self._order(name, rng) for name, _ in self._tasks}
        weights = dict(self._tasks)
        while count and orders:
            name = rng.choices(list(orders), [weights[one] for one in orders])[0]
            index = next(orders[name], None)
            task = None if index is None else self._task(name, index)
            if task is None:
                del orders[name]
                continue
            count -= 1
            label = {"task": name, "index": index}
            yield {"input": _messages(task), "label": label, "datasource": os.path.basename(name).removesuffix(".py")}

    def begin(self, label: Mapping[str, Any], *, seed: int) -> Rollout:
        name = label["task"]
        if name not in self._environments:
            raise WorldError(f"the prompt is of taskset {name}, which is not among --world.tasks")
        task = self._task(name, label["index"])
        if task is None:
            raise WorldError(f"taskset {name} has no task {label['index']}: prompts were made with other settings")
        return Rollout(self._vf, self._environments[name], task, self._loop)

    def _order(self, name: str, rng: random.Random) -> Iterator[int]:
        if not self._environments[name].taskset.bounded:
            return itertools.count(rng.randrange(1 << 16))
        size = next(index for index in itertools.count() if self._task(name, index) is None)
        return iter(rng.sample(range(size), size))

    def _task(self, name: str, index: int) -> Any:
        """None: there is no such task."""
        with self._lock:
            loaded = self._loaded[name]
            loaded += itertools.islice(self._loading[name], max(0, index + 1 - len(loaded)))
            return loaded[index] if index < len(loaded) else None

    def _make(self, name: str, taskset: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
        """The environment of a taskset, which serves from now on."""
        vf = self._vf
        try:
            ident = _module_of_file(name) if name.endswith(".py") else name
            raw: dict[str, Any] = {"taskset": {"id": ident, **taskset}, **env}
            config = vf.resolve_env_config(raw)
            for role, seat in config:
                if not isinstance(seat, vf.AgentConfig):
                    continue
                ours: dict[str, Any] = {}
                if seat.harness is None and vf.default_harness_id(ident) == "bash":
                    ours["harness"] = {"id": CHAT}  # the default has a shell on this machine
                if isinstance(seat.runtime, vf.PrimeConfig):
                    ours["runtime"] = {"type": "subprocess"}  # the default is somebody's cloud
                raw[role] = {**ours, **raw.get(role, {})}
            made = vf.load_environment(vf.resolve_env_config(raw))
            return self._now(_serving(made))
        except ModuleNotFoundError as error:
            raise WorldError(f"taskset {name}: {error}") from error
        except Exception as error:
            raise WorldError(f"taskset {name}: {type(error).__name__}: {' '.join(str(error).split())}") from error

    def _now(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_SECONDS)


async def _serving(env: Any) -> Any:
    """For as long as the process lives."""
    await contextlib.AsyncExitStack().enter_async_context(env.serving())
    return env


def _module_of_file(path: str) -> str:
    """The name under which a file is found from now on."""
    file = os.path.abspath(os.path.expanduser(path))
    name = os.path.splitext(os.path.basename(file))[0].replace("-", "_").lower()
    if not os.path.isfile(file):
        raise WorldError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(file))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


def _messages(task: Any) -> list[dict[str, str]]:
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    if data.prompt is None:
        return [*system, {"role": "user", "content": data.description or data.name or f"Task {data.idx}."}]
    from verifiers.v1.types import content_text

    return [*system, *({"role": message.role, "content": content_text(message.content)} for message in data.prompt)]


class Rollout:
    """One episode of an environment."""

    start = DrivenStart()

    def __init__(self, vf: Any, env: Any, task: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._vf = vf
        self._env = env
        self._task = task
        self._loop = loop

    def run(self, base_url: str, api_key: str, model: str) -> Outcome:
        vf = self._vf
        os.environ[KEY] = api_key
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        asking = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig())
        playing = asyncio.run_coroutine_threadsafe(self._env.run_episode(self._task, asking), self._loop)
        try:
            episode = playing.result()
        except BaseException:
            playing.cancel()
            raise
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            last = errors[-1] if errors else None
            raise RuntimeError(
                f"{self._env.config.env_id}: {last.type}: {last.message}" if last else "the rollout failed"
            )
        traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
        logs: dict[str, float] = {}
        for trace in traces:
            logs |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
            logs |= {name: value for name, value in trace.metrics.items() if value is not None}
        reward = sum(trace.reward for trace in traces) / len(traces)
        return Outcome(reward, score=min(max(reward, 0.0), 1.0), logs=logs)

    def close(self) -> None:
        pass


def _chat_module(vf: Any) -> types.ModuleType:
    """A harness in this process: the conversation of verifiers' own harness `null`, which starts a program with an
    environment of its own for each episode."""
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    program: dict[str, Any] = {"__name__": f"{CHAT}_program"}
    exec(compile(CHAT_PROGRAM_SOURCE, f"<{CHAT}>", "exec"), program)  # as the harness `null` runs it

    class ChatHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def setup(self, runtime: Any) -> None:
            pass

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            try:
                await self._talk(ctx.model, endpoint, secret, mcp_urls, *self.resolve_prompt(data))
            except APIStatusError as error:
                if LIMIT not in str(error):
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
            except (Exception, SystemExit):
                return vf.ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

        async def _talk(
            self, model: str, endpoint: str, secret: str, mcp_urls: Any, system: str | None, prompt: Any
        ) -> None:
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            elif prompt is not None:
                messages += [message_to_wire(message) for message in prompt]
            spec = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            args = types.SimpleNamespace(bash=False, edit=False, search=False, tool_interception_url="", api_key=secret)
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None))
                tools, dispatch, servers = await program["connect_mcp"]({"mcpServers": spec}, stack, set())
                compactor = program["Compactor"](client, model, tools, False, None)
                await program["run_chat_loop"](args, compactor, messages, dispatch, servers, None)

    module = types.ModuleType(CHAT)
    ChatHarness.__module__ = CHAT
    module.__dict__.update({"ChatHarness": ChatHarness, "__all__": ["ChatHarness"]})
    return module


if TYPE_CHECKING:
    from openrlhf.worlds.base import Driven

    _: type[Driven] = Rollout
