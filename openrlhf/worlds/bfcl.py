"""The multi-turn tool worlds of BFCL, the Berkeley Function Calling Leaderboard: a file system, a car, a broker, …

A simulated user asks for one thing after the other; the policy calls tools until it answers without a call, which ends
its turn. After each turn the package's own checks compare the state of the tools, and what they have answered, with
those of the calls that solve the task (`state_checker`, `response_checker`): what they accept is what
`multi_turn_checker` accepts.

--world.tasks: the categories `multi_turn_base` (where nothing is said), `multi_turn_miss_func`,
`multi_turn_miss_param` and `multi_turn_long_context`, 200 tasks each. Five of the 800 are left out: their own solution
gives an argument another type than the tool's document says, or calls a tool before the policy is told of it.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.worlds.base import Start, Turn, WorldError, WorldSettings, shown, tool_message, unreadable_call

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
OPTIONS = ("classes", "turns", "first", "last", "reward", "calls", "steps", "stop", "system")
Call = Mapping[str, Any]
"""{"name", "arguments": dict}"""


class World:
    """One for all categories; its tools are simulated in this process."""

    def __init__(self, settings: WorldSettings) -> None:
        """
        classes   list of names: only tasks all of whose tools are of these classes, such as ["GorillaFileSystem"]
        turns     only so many of the user's turns are played; 0: all
        first, last   records are of the tasks from and to these numbers, so that others are left for evaluations
        reward    turns: the share of the user's turns that were solved before the first that was not; checker: 1
                  where all were
        calls     added to the reward: so much times the share of calls that succeeded
        steps     so many messages with calls in one turn end the episode
        stop      whether the first turn that was not solved ends the episode
        system    a system message
        """
        from bfcl_eval.constants import executable_backend_config as backend

        settings.check_options(OPTIONS)
        classes: list[str] = settings.option("classes", [])
        self.turns = settings.option("turns", 0)
        self.reward = settings.option("reward", "turns", choices=("turns", "checker"))
        self.calls = settings.option("calls", 0.0)
        self.steps = settings.option("steps", 20)
        self.stop = settings.option("stop", True)
        self.system = settings.option("system", "")
        self._tasks = dict(settings.tasks) or {CATEGORIES[0]: 1.0}
        self._data = Path(backend.__file__).parents[1] / "data"
        for name in self._tasks:
            if name not in CATEGORIES:
                raise WorldError(f"--world.tasks {name}: there are {', '.join(CATEGORIES)}")
        documents = backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING
        self._documents: dict[str, list[dict[str, Any]]] = {}
        for name in classes:
            if name not in documents:
                raise WorldError(f"--world.options classes: there is no class {name}; there are {', '.join(documents)}")
        self._documents_of = {name: self._data / "multi_turn_func_doc" / file for name, file in documents.items()}
        first, last = settings.option("first", 0), settings.option("last", 10**6)
        self._entries: dict[str, dict[str, Any]] = {}
        self._names: dict[str, list[str]] = {}
        for category in self._tasks:
            entries = _lines(self._data / f"BFCL_v4_{category}.json")
            truths = _lines(self._data / "possible_answer" / f"BFCL_v4_{category}.json")
            for entry, truth in zip(entries, truths, strict=True):
                number = int(entry["id"].rpartition("_")[2])
                entry["ground_truth"] = truth["ground_truth"]
                self._entries[entry["id"]] = entry
                fits = not classes or set(entry["involved_classes"]) <= set(classes)
                if first <= number <= last and fits and self._can_be_solved(entry):
                    self._names.setdefault(category, []).append(entry["id"])
            if category not in self._names:
                raise WorldError(f"no task of {category} is left: --world.options classes, first and last leave none")
        self._plays = itertools.count()

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Each task of a category once, in an order that the seed draws, before any is there again."""
        rng = random.Random(seed)
        left: dict[str, list[str]] = {name: [] for name in self._names}
        for _ in range(count):
            category = rng.choices(list(self._tasks), list(self._tasks.values()))[0]
            if not left[category]:
                left[category] = rng.sample(self._names[category], len(self._names[category]))
            name = left[category].pop()
            yield {
                "input": self.first_messages(self._entries[name]),
                "label": name,
                "datasource": category,
                "difficulty": sum(map(len, self._entries[name]["ground_truth"][: self.turns or None])),
            }

    def begin(self, label: str, *, seed: int) -> _Play:
        """An episode is the same for every seed: the tools draw from seeds of their own."""
        if label not in self._entries:
            raise WorldError(f"there is no task {shown(label)} in {', '.join(self._tasks)}")
        return _Play(self, self._entries[label], next(self._plays))

    def solution(self, label: str) -> list[list[dict[str, Any]]]:
        """The calls that solve a task, turn by turn, for supervised training and for tests."""
        documents = {document["name"]: document for document in self.documents(self._entries[label])}
        truth = self._entries[label]["ground_truth"][: self.turns or None]
        return [[_parsed(call, documents) for call in turn] for turn in truth]

    def documents(self, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the package says of the tools of a task, in its own form."""
        found = []
        for name in entry["involved_classes"]:
            if name not in self._documents:
                self._documents[name] = _lines(self._documents_of[name])
            found += self._documents[name]
        return found

    def _can_be_solved(self, entry: Mapping[str, Any]) -> bool:
        documents = {document["name"]: document for document in self.documents(entry)}
        held_back: dict[str, list[str]] = entry.get("missed_function", {})
        late = {name for names in held_back.values() for name in names}
        for turn, calls in enumerate(entry["ground_truth"]):
            late -= set(held_back.get(str(turn), ()))
            known = {name: document for name, document in documents.items() if name not in late}
            if any(_mistake(_parsed(call, documents), known) for call in calls):
                return False
        return True

    def first_messages(self, entry: Mapping[str, Any]) -> list[dict[str, str]]:
        """What the user asks first, after the system message if there is one."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *entry["question"][0]]


class _Play:
    """One task, played once. Its tools, and those on which the solution is played, live among the globals of the
    package's module, where its own functions look for them."""

    def __init__(self, world: World, entry: dict[str, Any], number: int) -> None:
        from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC

        self._world = world
        self._entry = entry
        self._player, self._judge = f"play{number}", f"truth{number}"
        self._truth: list[list[str]] = entry["ground_truth"][: world.turns or None]
        held_back: dict[str, list[str]] = entry.get("missed_function", {})
        documents = {document["name"]: document for document in world.documents(entry)}
        late = {name for names in held_back.values() for name in names}
        self._tools = {name: document for name, document in documents.items() if name not in late}
        self._questions: list[list[dict[str, Any]]] = []
        self._new_tools: list[dict[str, dict[str, Any]]] = []
        for turn, question in enumerate(entry["question"][: len(self._truth)]):
            new = {name: documents[name] for name in held_back.get(str(turn), ())}
            if new:  # the tools of an episode stay as they are, so that these are told of in words
                told = "\n".join(json.dumps(_schema(document)) for document in new.values())
                question = [{"role": "user", "content": f"{told}\n{DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}"}]
            self._questions.append(question)
            self._new_tools.append(new)
        self._turn = self._steps = 0
        self._solved = 0
        self._failed = False
        self._called = self._succeeded = 0
        self._called_now = False
        self._answers: list[str] = []
        self._execute(self._player, [])
        self.start = Start(world.first_messages(entry), [_schema(document) for document in self._tools.values()])

    def step(self, message: Mapping[str, Any]) -> Turn:
        calls = message.get("tool_calls") or []
        if not calls and (unreadable := unreadable_call(message)):
            self._steps += 1
            self._called += 1
            return self._end(cut=True) if self._steps >= self._world.steps else Turn([unreadable])
        if calls:
            self._steps += 1
            answers = [self._answer(call) for call in calls]
            if self._steps >= self._world.steps:
                return self._end(cut=True)
            return Turn([tool_message(call, answer) for call, answer in zip(calls, answers, strict=True)])
        earned = self._judge_turn()
        self._turn, self._steps, self._called_now = self._turn + 1, 0, False
        if self._turn == len(self._truth) or (self._failed and self._world.stop):
            return self._end(earned)
        self._tools |= self._new_tools[self._turn]
        return Turn(self._questions[self._turn], reward=earned)

    def close(self) -> None:
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

        space = vars(multi_turn_utils)
        for name in [name for name in space if name.startswith((f"{self._player}_", f"{self._judge}_"))]:
            del space[name]

    def _answer(self, call: Call) -> str:
        """What the tool says, or why it was not called."""
        self._called += 1
        wrong = _mistake(call, self._tools)
        if wrong:
            return json.dumps({"error": wrong})
        self._called_now = True
        (answer,), _ = self._execute(self._player, [_source(call)])
        self._answers.append(answer)
        self._succeeded += not _failed(answer)
        return answer

    def _judge_turn(self) -> float:
        """What this turn of the user has earned."""
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        truth = self._truth[self._turn]
        expected, right = self._execute(self._judge, truth)
        if self._failed or (truth and not self._called_now):
            self._failed = True
        elif truth:  # where nothing can be done, what was done shows in the state after the next turn
            _, mine = self._execute(self._player, [])
            self._failed = not (
                state_checker(mine, right)["valid"] and response_checker(self._answers, expected, self._turn)["valid"]
            )
        if self._failed:
            return 0.0
        self._solved += 1
        return 1 / len(self._truth) if self._world.reward == "turns" else 0.0

    def _end(self, earned: float = 0.0, *, cut: bool = False) -> Turn:
        won = not cut and not self._failed and self._turn == len(self._truth)
        share = self._succeeded / self._called if self._called else 0.0
        reward = earned + (won if self._world.reward == "checker" else 0.0) + self._world.calls * share
        logs: dict[str, float] = {
            "calls": self._called,
            "calls_failed": self._called - self._succeeded,
            "turns_solved": self._solved,
        }
        if self._called:
            logs["calls_succeeded"] = share
        return Turn(reward=reward, done=True, score=float(won), logs=logs)

    def _execute(self, who: str, calls: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

        return execute_multi_turn_func_call(
            list(calls),
            self._entry["initial_config"],
            self._entry["involved_classes"],
            who,
            self._entry["id"],
            long_context="long_context" in self._entry["id"],
            is_evaL_run=True,
        )


# ------------------------------------------------------------------------------------ calls


def _failed(answer: str) -> bool:
    """Whether the tool says so. Tools answer with {"error": …}; exceptions of theirs are told by the package."""
    if answer.startswith("Error during execution"):
        return True
    try:
        told = json.loads(answer)
    except ValueError:
        return False
    return isinstance(told, dict) and "error" in told


def _mistake(call: Call, tools: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why this call cannot be made. A call that passes holds nothing but JSON under names of the tool's own: the
    package evaluates calls as Python."""
    name, arguments = call["name"], call["arguments"]
    if name not in tools:
        return f"there is no function {shown(name)}; there are {', '.join(tools)}"
    parameters = tools[name]["parameters"]
    for key, value in arguments.items():
        if key not in parameters["properties"]:
            return f"{name} has no argument {shown(key)}; it has {', '.join(parameters['properties']) or 'none'}"
        if wrong := _mistyped(value, parameters["properties"][key]):
            return f"{name}: argument {key} must be {wrong}, got {shown(value)}"
    missing = [key for key in parameters.get("required", ()) if key not in arguments]
    return f"{name}: argument {missing[0]} is missing" if missing else None


_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "float": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "dict": (dict,),
}


def _mistyped(value: Any, of: Mapping[str, Any]) -> str | None:
    """The type that it should have had; None: it has it."""
    kind = of["type"]
    kinds = _PYTHON.get(kind)
    if kinds is None:
        return None
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind != "boolean"):
        return str(kind)
    if isinstance(value, list) and "items" in of:
        inner = next((wrong for item in value if (wrong := _mistyped(item, of["items"]))), None)
        return f"array of {inner}" if inner else None
    return None


def _source(call: Call) -> str:
    """A call as Python. No text in it has a bracket of its own, as the package looks for names before brackets, also
    inside of texts: repr doubles every backslash, so that the new one begins an escape of its own."""
    arguments = (f"{key}={value!r}".replace("(", "\\x28") for key, value in call["arguments"].items())
    return f"{call['name']}({', '.join(arguments)})"


def _parsed(source: str, documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A call of the data's solutions: Python, with arguments by name or by place."""
    node = ast.parse(source.strip(), mode="eval").body
    assert isinstance(node, ast.Call), source
    assert isinstance(node.func, ast.Name), source
    names = list(documents[node.func.id]["parameters"]["properties"])
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args, strict=False)}
    arguments |= {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in node.keywords}
    return {"name": node.func.id, "arguments": arguments}


def _schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's schema, from the package's own form."""
    told = {key: document[key] for key in ("name", "description")}
    return {"type": "function", "function": {**told, "parameters": _json_schema(document["parameters"])}}


def _json_schema(of: Mapping[str, Any]) -> dict[str, Any]:
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

    schema = {**of, "type": GORILLA_TO_OPENAPI[of["type"]]}
    if "properties" in of:
        schema["properties"] = {name: _json_schema(inner) for name, inner in of["properties"].items()}
    if "items" in of:
        schema["items"] = _json_schema(of["items"])
    return schema


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


if TYPE_CHECKING:
    from openrlhf.worlds import base

    _: type[base.World] = World
