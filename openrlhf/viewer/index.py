"""An index of all rollouts of a run, made as rollouts.jsonl grows: which lines hold which group, and a quick search.

Numbers of samples are columns in memory. Their texts are written to a temporary file in small letters, where a search
is one pass at the speed of memory: a few hundred MB within a second, without holding them in this process.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import re
import tempfile
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from openrlhf.observability.jsonl import LinesTail, parse_json_line

OUTCOMES = ("finished", "truncated", "failed")
CHOICES = ("best", "typical", "worst", "failed")
MOST_PROMPT = 240
"""Characters of a prompt that a row of the table shows."""
MOST_TERMS = 32
"""Search terms whose hits are remembered."""

Order = Literal["newest", "oldest", "reward", "reward_down", "spread", "length", "failed"]
ORDERS: tuple[Order, ...] = get_args(Order)


class QueryError(ValueError):
    """A query cannot be read; the message is for the person who typed it."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A number of a sample within bounds, both included."""

    field: str
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Query:
    """What a sample must have to be found: all of it."""

    terms: tuple[str, ...] = ()
    """Texts that are in its prompt, response, label or error, in whatever case."""
    conditions: tuple[Condition, ...] = ()
    outcomes: frozenset[str] = frozenset()
    choices: frozenset[str] = frozenset()


NUMBERS = {"step": "a step", "prompt": "a prompt's ordinal", "sample": "a sample's number"}
MEASURES = {"reward": "a reward", "score": "a score", "length": "a length"}
_WORD = re.compile(r'"([^"]*)"?|(\S+)')
_FIELD = re.compile(r"(step|prompt|sample|reward|score|length|is)(:|<=|>=|<|>|=)(.*)", re.IGNORECASE)
_RANGE = re.compile(r"(-?[\d.]+)?(\.\.|-)(-?[\d.]+)?")


def parse_query(text: str) -> Query:
    """
    >>> parse_query('"two words" step:10-20 reward<0.5 is:failed').terms
    ('two words',)
    """
    terms, conditions = [], []
    outcomes: set[str] = set()
    choices: set[str] = set()
    for quoted, word in _WORD.findall(text):
        field = _FIELD.fullmatch(word)
        if field is None:
            terms.append((quoted or word).casefold())
        elif not field[3]:
            continue  # it is being typed
        elif field[1].lower() != "is":
            conditions.append(_condition(field[1].lower(), field[2], field[3]))
        elif (value := field[3].lower()) in OUTCOMES:
            outcomes.add(value)
        elif value in CHOICES:
            choices.add(value)
        else:
            raise QueryError(f"{word}: is: takes one of {', '.join(dict.fromkeys((*OUTCOMES, *CHOICES)))}")
    return Query(tuple(filter(None, terms)), tuple(conditions), frozenset(outcomes), frozenset(choices))


def _condition(field: str, sign: str, value: str) -> Condition:
    if sign in (":", "=") and (between := _RANGE.fullmatch(value)) and (between[1] or between[3]):
        least = -math.inf if between[1] is None else _number(field, between[1])
        return Condition(field, least, math.inf if between[3] is None else _number(field, between[3]))
    number = _number(field, value)
    if sign in ("<", "<="):
        return Condition(field, most=math.nextafter(number, -math.inf) if sign == "<" else number)
    if sign in (">", ">="):
        return Condition(field, least=math.nextafter(number, math.inf) if sign == ">" else number)
    return Condition(field, number, number)


def _number(field: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        what = (NUMBERS | MEASURES)[field]
        raise QueryError(f"{field}: {what} is a number, as in {field}:3, {field}:3-8 or {field}>3") from None


class GroupKey(NamedTuple):
    step: int
    prompt: int
    """The prompt's ordinal."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the groups that a query has found."""

    groups: int
    samples: int
    """The samples that match, and the groups that they are in."""
    first: int
    rows: list[dict[str, Any]]


class Found(NamedTuple):
    """A record of rollouts.jsonl, or one made of the token log, and its bytes in the file."""

    record: dict[str, Any]
    start: int = 0
    size: int = 0


class Source(Protocol):
    """Where records come from."""

    @property
    def restarts(self) -> int:
        """Grows when everything is read from the beginning again."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """What was read, and what there is."""
        ...

    def read(self) -> Iterator[Found | None]:
        """What is new; None where there was something that is no record. A caller may stop, and go on later."""
        ...


class RolloutLines:
    """The lines of rollouts.jsonl."""

    def __init__(self, path: Path) -> None:
        self._tail = LinesTail(path)

    @property
    def restarts(self) -> int:
        return self._tail.restarts

    @property
    def progress(self) -> tuple[int, int]:
        return self._tail.place, max(self._tail.size, self._tail.place)

    def read(self) -> Iterator[Found | None]:
        for line in self._tail.read():
            record = parse_json_line(line.content)
            yield None if record is None else Found(record, line.start, len(line.content))


class _Columns:
    """A row per sample, in the order of the file; steps never fall."""

    def __init__(self) -> None:
        self.step, self.prompt, self.sample = array("q"), array("q"), array("q")
        self.reward, self.score, self.length = array("d"), array("d"), array("d")
        self.outcome, self.choice = array("b"), array("b")
        self.start, self.bytes = array("q"), array("q")
        self.text_end = array("q")
        self.group = array("q")

    def cut(self, rows: int) -> None:
        for column in vars(self).values():
            del column[rows:]


class RolloutIndex:
    """The rollouts of one run. Its methods may be called from several threads."""

    def __init__(self, path: Path, source: Source | None = None) -> None:
        """`path` is rollouts.jsonl, which `read` reads. `source`: other records than its lines."""
        self._path = path
        self._source = source or RolloutLines(path)
        self._lock = threading.RLock()
        self._restarts = 0
        self._columns = _Columns()
        self._groups: list[tuple[int, str, float, int]] = []
        """Of each group its first row, the beginning of its prompt, its mean reward and the number of its samples."""
        self._in_step: set[tuple[int, int]] = set()
        """Prompt and sample of the rows of the last step."""
        self._hits: OrderedDict[str, np.ndarray] = OrderedDict()
        self._found: tuple[Any, Any] | None = None
        self.changes = 0
        """Grows with every row and every replacement."""

    @functools.cached_property
    def _texts(self) -> IO[bytes]:
        """Made for the first sample: most runs of a folder are never searched."""
        return tempfile.TemporaryFile(prefix="openrlhf-view-")

    @property
    def samples(self) -> int:
        return len(self._columns.step)

    @property
    def last_step(self) -> int | None:
        with self._lock:
            return self._columns.step[-1] if self._columns.step else None

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The lowest and the highest reward that there is."""
        with self._lock:
            rewards = np.array(self._columns.reward)
        rewards = rewards[np.isfinite(rewards)]
        return (float(rewards.min()), float(rewards.max())) if len(rewards) else None

    @property
    def progress(self) -> tuple[int, int]:
        """How much is indexed, and how much there is: bytes of rollouts.jsonl, or files of the token log."""
        return self._source.progress

    def update(self, *, seconds: float = math.inf) -> bool:
        """Index what was appended, for at most so many seconds; whether nothing is left."""
        until = time.monotonic() + seconds
        with self._lock:
            for found in self._source.read():
                self._notice_restart()
                if found is not None:
                    self._add(*found)
                if time.monotonic() > until:
                    return False
            self._notice_restart()
        return True

    def _notice_restart(self) -> None:
        if self._source.restarts != self._restarts:
            self._restarts = self._source.restarts
            self._cut(0)

    def _add(self, record: Mapping[str, Any], start: int, size: int) -> None:
        step, prompt, sample = (record.get(name) for name in ("step", "prompt_ordinal", "sample"))
        if not (isinstance(step, int) and isinstance(prompt, int) and isinstance(sample, int)):
            return
        columns = self._columns
        last = columns.step[-1] if columns.step else None
        if last is not None and step < last:
            # A resumed run writes steps again: what came after its checkpoint is not part of its history.
            self._cut(int(np.searchsorted(np.array(columns.step), step)))
            self._in_step = set()
        elif step != last:
            self._in_step = set()
        elif (prompt, sample) in self._in_step:
            self._cut(int(np.searchsorted(np.array(columns.step), step)))
            self._in_step = set()
        self._in_step.add((prompt, sample))
        rows = len(columns.step)
        if not rows or columns.step[-1] != step or columns.prompt[-1] != prompt:
            count = record.get("group_samples")
            text = " ".join(str(record.get("prompt", ""))[:MOST_PROMPT].split())
            size_of_group = count if isinstance(count, int) else 0
            self._groups.append((rows, text, _float(record.get("group_reward")), size_of_group))
        columns.group.append(len(self._groups) - 1)
        columns.step.append(step)
        columns.prompt.append(prompt)
        columns.sample.append(sample)
        columns.reward.append(_float(record.get("reward")))
        columns.score.append(_float(record.get("score")))
        columns.length.append(_float(record.get("response_length")))
        columns.outcome.append(_code(OUTCOMES, record.get("outcome")))
        columns.choice.append(_code(CHOICES, record.get("choice")))
        columns.start.append(start)
        columns.bytes.append(size)
        label = record.get("label")
        label = label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
        parts = (str(record.get(name) or "") for name in ("prompt", "response", "error"))
        text = "\n".join((*parts, label))
        content = text.casefold().encode("utf-8", errors="replace")
        self._texts.write(content)
        columns.text_end.append((columns.text_end[-1] if columns.text_end else 0) + len(content))
        self.changes += 1

    def _cut(self, rows: int) -> None:
        """Forget all rows from this one on. It is the first of its step, so that no group is cut in two."""
        columns = self._columns
        while self._groups and self._groups[-1][0] >= rows:
            self._groups.pop()
        columns.cut(rows)
        end = columns.text_end[-1] if rows else 0
        self._texts.seek(end)
        self._texts.truncate()
        self._hits = OrderedDict((term, hits[:rows]) for term, hits in self._hits.items())
        self._in_step = set()
        self.changes += 1

    def find(self, query: Query, *, order: Order = "newest", first: int = 0, count: int = 100) -> Page:
        """The groups with a sample that the query matches."""
        with self._lock:
            groups, rows = self._matching(query, order)
            first = max(0, min(first, len(groups)))
            return Page(len(groups), len(rows), first, self._rows(groups[first : first + count].tolist(), rows))

    def position(self, query: Query, key: GroupKey, *, order: Order = "newest") -> int | None:
        """The place of a group among those that the query finds."""
        with self._lock:
            group = self._group(key)
            if group is None:
                return None
            places = np.flatnonzero(self._matching(query, order)[0] == group)
            return int(places[0]) if len(places) else None

    def read(self, key: GroupKey) -> list[dict[str, Any]]:
        """The records of a group as they are in the file; none where it has none."""
        with self._lock:
            group = self._group(key)
            if group is None:
                return []
            begin, end = self._groups[group][0], self._end_of(group)
            places = list(zip(self._columns.start[begin:end], self._columns.bytes[begin:end], strict=True))
        records = []
        with self._path.open("rb") as file:
            for start, size in places:
                file.seek(start)
                record = parse_json_line(file.read(size))
                if record is not None and (record.get("step"), record.get("prompt_ordinal")) == key:
                    records.append(record)
        return records

    def _group(self, key: GroupKey) -> int | None:
        steps = np.array(self._columns.step)
        begin, end = np.searchsorted(steps, key.step), np.searchsorted(steps, key.step, side="right")
        rows = np.flatnonzero(np.array(self._columns.prompt[begin:end]) == key.prompt)
        return self._columns.group[int(begin + rows[0])] if len(rows) else None

    def _end_of(self, group: int) -> int:
        return self._groups[group + 1][0] if group + 1 < len(self._groups) else len(self._columns.step)

    def _matching(self, query: Query, order: Order) -> tuple[np.ndarray, np.ndarray]:
        """Groups in order, and rows, ascending."""
        state = (query, order, self.changes)
        if self._found is not None and self._found[0] == state:
            return self._found[1]
        mask = np.ones(self.samples, dtype=bool)
        for condition in query.conditions:
            values = np.array(getattr(self._columns, condition.field), dtype=np.float64)
            with np.errstate(invalid="ignore"):
                mask &= (values >= condition.least) & (values <= condition.most)
        for names, column, wanted in (
            (OUTCOMES, self._columns.outcome, query.outcomes),
            (CHOICES, self._columns.choice, query.choices),
        ):
            if wanted:
                mask &= np.isin(np.array(column), [names.index(name) for name in wanted])
        for term in query.terms:
            mask &= self._rows_with(term)
        rows = np.flatnonzero(mask)
        groups = np.unique(np.array(self._columns.group, dtype=np.int64)[rows])
        found = (self._ordered(groups, order), rows)
        self._found = (state, found)
        return found

    def _ordered(self, groups: np.ndarray, order: Order) -> np.ndarray:
        if order == "oldest" or not len(groups):
            return groups
        steps = np.array(self._columns.step)[np.array([self._groups[group][0] for group in groups])]
        if order == "newest":
            return groups[np.lexsort((groups, -steps))]
        keys = np.array([self._measure(int(group), order) for group in groups])
        return groups[np.lexsort((groups, -steps, np.nan_to_num(keys, nan=math.inf)))]

    def _measure(self, group: int, order: Order) -> float:
        """What a group is ranked by, the smallest first; NaN is the last."""
        begin, end = self._groups[group][0], self._end_of(group)
        if order == "failed":
            return -float(sum(code == OUTCOMES.index("failed") for code in self._columns.outcome[begin:end]))
        if order == "length":
            return -max(self._columns.length[begin:end])
        if order == "spread":
            rewards = [reward for reward in self._columns.reward[begin:end] if math.isfinite(reward)]
            return min(rewards) - max(rewards) if rewards else math.nan
        mean = self._groups[group][2]
        return -mean if order == "reward_down" else mean

    def _rows_with(self, term: str) -> np.ndarray:
        """Which rows have this text. Rows that were searched before are not searched again."""
        known = self._hits.pop(term, np.zeros(0, dtype=bool))
        total = self.samples
        if len(known) < total and self._columns.text_end[-1]:
            ends = self._columns.text_end
            hits = np.zeros(total, dtype=bool)
            hits[: len(known)] = known
            self._texts.flush()
            with mmap.mmap(self._texts.fileno(), ends[-1], access=mmap.ACCESS_READ) as texts:
                place = ends[len(known) - 1] if len(known) else 0
                needle = term.encode("utf-8", errors="replace")
                while (place := texts.find(needle, place)) >= 0:
                    row = bisect_right(ends, place)
                    if place + len(needle) <= ends[row]:
                        hits[row] = True
                        place = ends[row]
                    else:
                        place += 1
            known = hits
        self._hits[term] = known
        while len(self._hits) > MOST_TERMS:
            self._hits.popitem(last=False)
        return known

    def _rows(self, groups: Sequence[int], matching: np.ndarray) -> list[dict[str, Any]]:
        found = []
        columns = self._columns
        for group in groups:
            begin, text, reward, samples = self._groups[group]
            end = self._end_of(group)
            inside = matching[np.searchsorted(matching, begin) : np.searchsorted(matching, end)]
            found.append(
                {
                    "step": columns.step[begin],
                    "prompt": columns.prompt[begin],
                    "text": text,
                    "choice": _name(CHOICES, columns.choice[begin]),
                    "reward": _finite(reward),
                    "size": samples,
                    "samples": list(columns.sample[begin:end]),
                    "rewards": [_finite(value) for value in columns.reward[begin:end]],
                    "scores": [_finite(value) for value in columns.score[begin:end]],
                    "lengths": [_finite(value) for value in columns.length[begin:end]],
                    "outcomes": [_name(OUTCOMES, code) for code in columns.outcome[begin:end]],
                    "matching": [columns.sample[int(row)] for row in inside],
                }
            )
        return found


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _code(names: Sequence[str], name: Any) -> int:
    return names.index(name) if name in names else -1


def _name(names: Sequence[str], code: int) -> str:
    return names[code] if code >= 0 else ""


if TYPE_CHECKING:
    _: type[Source] = RolloutLines
