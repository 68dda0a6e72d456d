"""reasoning-gym: procedural tasks with verifiers, one answer each.

    --world.tasks chain_sum,gcd:2             data sets by name, with weights; a category (arithmetic), or all
    --world.options chain_sum.max_terms=3     a parameter of a data set
                    levels=[0,1,2]            levels of the data sets' own curricula, which records have as `difficulty`
                    answer=auto               where the answer is: tags, line, whole, auto (in this order), or number
                    partial=true              scores between 0 and 1 count as rewards; false: only a whole one does
                    ending="…" system="…"     text after the question, and a system message

A record names the data set, its parameters' level, its seed and the item's number: an episode makes the item again, so
that its own verifier (`score_answer`) sees it as it was made.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.worlds.base import Start, Turn, WorldError, WorldSettings, shown

DEFAULT_TASKS = (
    ("chain_sum", 1.0),
    ("basic_arithmetic", 1.0),
    ("gcd", 1.0),
    ("letter_counting", 1.0),
    ("simple_equations", 1.0),
)
ENDING = "\nThink step by step. Then give your answer between <answer> and </answer>."
UNUSABLE = ("composite",)
"""Data sets that are mixtures of others: `--world.tasks` mixes."""

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:\.\d+)?")
_LINE = re.compile(r"^.*?\banswer\s*(?:is)?\s*:\s*(.*\S)", re.IGNORECASE | re.MULTILINE)


class World:
    """Every data set of reasoning-gym. An episode is one question and one answer."""

    def __init__(self, settings: WorldSettings) -> None:
        from reasoning_gym import factory

        self._factory: Any = factory
        self._held_out = settings.held_out
        self._tasks = self._expanded(settings.tasks or DEFAULT_TASKS)
        names = [name for name, _ in self._tasks]
        plain = ("levels", "answer", "partial", "ending", "system")
        self._parameters: dict[str, dict[str, Any]] = {name: {} for name in names}
        for option, value in settings.options.items():
            task, dot, parameter = option.partition(".")
            if not dot:
                one = WorldSettings(options={option: value})
                one.check_options((*plain, *(f"{name}.PARAMETER" for name in names[:3])))
            elif task not in self._parameters:
                raise WorldError(f"--world.options {option}: there is no task {task}; there are {', '.join(names)}")
            else:
                self._parameters[task][parameter] = tuple(value) if isinstance(value, list) else value
        self._how = settings.option("answer", "auto", choices=("auto", "tags", "line", "whole", "number"))
        self._partial = settings.option("partial", True)
        self._ending = settings.option("ending", ENDING)
        self._system = settings.option("system", "")
        wanted = settings.options.get("levels")
        self._levels = {name: self._levels_of(name, wanted) for name in names}
        self._made: dict[tuple[str, int | None, int, int], Any] = {}
        for name in names:
            for level in self._levels[name]:
                self._dataset(name, level, seed=settings.seed % 2**31, size=1)

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Tasks are drawn by their weights; the items of a task are its data set's, in order, without the questions of
        the run's evaluations. Small tasks have few questions, and every seed gives most of them."""
        asked: set[tuple[str, str]] = set()
        if self._held_out is not None and seed != self._held_out[1]:
            evaluated, its_seed = self._held_out
            held = self._drawn(count=evaluated, seed=its_seed, size=evaluated, asked=asked)
            asked = {(label["task"], entry["question"]) for label, entry in held}
        for label, entry in self._drawn(count=count, seed=seed, size=2 * count if asked else count, asked=asked):
            level = label["level"]
            record = {"input": self.messages(entry), "label": label, "datasource": label["task"]}
            yield record if level is None else {**record, "difficulty": level}

    def _drawn(
        self, *, count: int, seed: int, size: int, asked: set[tuple[str, str]]
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        """Labels and their items, of which some take long to make. `size`: items of a data set. `asked`: tasks and
        questions that are left out."""
        rng = random.Random(f"reasoning-gym {seed}")
        names, weights = zip(*self._tasks, strict=True)
        drawn = dict.fromkeys(names, 0)
        for _ in range(count):
            name = rng.choices(names, weights)[0]
            levels = self._levels[name]
            while True:
                item, drawn[name] = drawn[name], drawn[name] + 1
                if item >= size:
                    raise WorldError(
                        f"reasoning-gym's {name} has too few questions beside those of the evaluations: give fewer of "
                        "them (--world.eval_samples), fewer of training (--world.samples), or wider parameters"
                    )
                level = levels[item % len(levels)]
                label = {"task": name, "level": level, "seed": seed, "size": size, "item": item}
                entry = self._entry(label)
                if (name, entry["question"]) not in asked:
                    break
            yield label, entry

    def begin(self, label: Any, *, seed: int) -> _Question:
        try:
            dataset, entry = self._dataset_of(label), self._entry(label)
        except (KeyError, TypeError) as error:
            raise WorldError(f"a label of reasoning_gym is what its records have, got {shown(label)}") from error
        return _Question(self, dataset, entry)

    def score(self, dataset: Any, entry: Mapping[str, Any], said: str) -> Turn:
        """What the data set's verifier says of an answer."""
        answer, marked = extract(said, self._how)
        logs = {"answer_marked": float(marked)}
        try:
            score = min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))
        except Exception:  # verifiers parse what a model wrote, and not all of them expect everything
            score, logs["verifier_failed"] = 0.0, 1.0
        score = score if self._partial else float(score >= 1)
        return Turn(reward=score, done=True, score=score, logs=logs)

    def messages(self, entry: Mapping[str, Any]) -> list[dict[str, str]]:
        """What the policy reads."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": f"{entry['question']}{self._ending}"}]

    def _entry(self, label: Mapping[str, Any]) -> Any:
        return self._dataset_of(label)[label["item"]]

    def _dataset_of(self, label: Mapping[str, Any]) -> Any:
        return self._dataset(label["task"], label["level"], seed=label["seed"], size=label["size"])

    def _dataset(self, name: str, level: int | None, *, seed: int, size: int) -> Any:
        key = (name, level, seed, size)
        if key not in self._made:
            try:
                self._made[key] = self._make(name, level, {"seed": seed, "size": size})
            except (AssertionError, TypeError, ValueError) as error:
                where = f"{name} at level {level}" if level is not None else name
                given = json.dumps(self._parameters.get(name, {}))
                raise WorldError(f"reasoning-gym refuses {where} with {given}: {error}") from error
        return self._made[key]

    def _make(self, name: str, level: int | None, shape: dict[str, int]) -> Any:
        if level is None:
            return self._factory.create_dataset(name, **self._parameters.get(name, {}), **shape)
        curriculum = self._factory.create_curriculum(name)
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration(shape)
        for parameter, value in self._parameters.get(name, {}).items():
            if not hasattr(config, parameter):
                raise TypeError(f"it has no parameter {parameter}")
            setattr(config, parameter, value)
        return self._factory.DATASETS[name][0](config=config)

    def _expanded(self, tasks: tuple[tuple[str, float], ...]) -> list[tuple[str, float]]:
        """Data sets and weights: a category shares its weight among its data sets."""
        known = {
            name: cls.__module__.split(".")[1]
            for name, (cls, _) in self._factory.DATASETS.items()
            if name not in UNUSABLE
        }
        found: dict[str, float] = {}
        for name, weight in tasks:
            members = [name] if name in known else [task for task, group in known.items() if name in (group, "all")]
            if not members:
                near = difflib.get_close_matches(name, known, n=3)
                there = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"
                raise WorldError(f"reasoning-gym has no data set {name}: {there}")
            for task in members:
                found[task] = found.get(task, 0.0) + weight / len(members)
        return list(found.items())

    def _levels_of(self, name: str, wanted: Any) -> list[int | None]:
        """The levels at which a data set's items are made; None: with its own defaults."""
        if wanted is None or not self._factory.has_curriculum(name):
            return [None]
        levels = [wanted] if isinstance(wanted, int) and not isinstance(wanted, bool) else wanted
        if not isinstance(levels, list) or not levels or not all(isinstance(one, int) and one >= 0 for one in levels):
            raise WorldError(f"--world.options levels={shown(wanted)}: expected levels such as [0,1,2]")
        attributes = self._factory.create_curriculum(name).attributes.values()
        most = max((len(attribute.levels) - 1 for attribute in attributes), default=0)
        return sorted({min(level, most) for level in levels})


class _Question:
    """One question."""

    def __init__(self, world: World, dataset: Any, entry: Mapping[str, Any]) -> None:
        self._world = world
        self._dataset = dataset
        self._entry = entry
        self.start = Start(world.messages(entry))

    def step(self, message: Mapping[str, Any]) -> Turn:
        return self._world.score(self._dataset, self._entry, message["content"])

    def close(self) -> None:
        pass


def extract(said: str, how: str = "auto") -> tuple[str, bool]:
    """The answer in what was said, and whether it was marked as one.

    tags: between the last <answer> and </answer>; line: after the last "Answer:" to the end of its line; whole: all of
    it; auto: the first of these that finds something; number: the last number, such as -3 or 0.5. Nothing found is "",
    of auto the whole.

    >>> extract("2 + 3 is 5. <answer> 5 </answer>")
    ('5', True)
    """
    if how in ("auto", "tags") and (found := _TAGS.findall(said)):
        return found[-1].strip(), True
    if how in ("auto", "line") and (found := _LINE.findall(said)):
        return found[-1].strip().strip("*").strip(), True
    if how == "number" and (found := _NUMBER.findall(said)):
        return found[-1], True
    return (said.strip() if how in ("auto", "whole") else ""), how == "whole"
