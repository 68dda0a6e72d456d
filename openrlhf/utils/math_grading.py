"""Is this answer the right one? Extraction of final answers, and grading of mathematical ones.

Answers that are text or plain numbers are compared right here. All others are compared by math-verify (on top of
sympy) in a process of its own: an expression may take any time, and only a process can be ended from any thread. The
processes are few, they start when they are first needed and are used again, and one that passes a limit is replaced.

Imports the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds a comparison may take; nearly all take milliseconds."""
START_SECONDS = 60.0
MOST_PROCESSES = 4
MOST_CHARACTERS = 2000
"""The longest text that is read as an answer."""


def extract_boxed_answer(text: str) -> str | None:
    r"""The content of the last complete `\boxed{…}` or `\fbox{…}`, braces included; None if there is none.

    >>> extract_boxed_answer(r"first \boxed{1}, then \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for start in reversed([match.end() for match in re.finditer(r"\\f?box(?:ed)?(?![A-Za-z])\s*", text)]):
        if not text.startswith("{", start):
            bare = re.match(r"[^\s{}$]+", text[start:])  # \boxed 5
            if bare:
                return bare.group()
            continue
        end = _closing_brace(text, start)
        if end is not None:
            return text[start + 1 : end].strip()
    return None


def grade_answer(given: object, truth: object, *, timeout: float = TIMEOUT) -> bool:
    r"""Whether two final answers mean the same: `1/2`, `0.5`, `50\%` and `\frac{1}{2}`; `(1, 2)` and `(1.0,2)`; `x+1`
    and `1+x`; `5` and `5 cm`. Tuples and intervals agree in order and kind, sets and plain lists in their elements.

    Text is equal without regard to case and spaces. A percentage equals its number of hundredths and its value. A
    decimal with six or more places equals what it is the rounding of. Units are ignored where only one side has them.

    May be called from any thread. After `timeout` seconds the result is False: that the answer is right was not shown.
    None is never right. Raises ImportError without math-verify, if it is needed.
    """
    if given is None or truth is None:
        return False
    a, b = (_tidy(str(answer)) for answer in (given, truth))
    if not a or not b or max(len(a), len(b)) > MOST_CHARACTERS:
        return False
    if _as_text(a) == _as_text(b):
        return True
    (value_a, unit_a), (value_b, unit_b) = _split_unit(a), _split_unit(b)
    if unit_a and unit_b and unit_a != unit_b:
        return False
    # One letter that stands alone may be a variable, and only a word is surely a unit.
    a, b = (value_a if unit_b or len(unit_a) > 1 else a), (value_b if unit_a or len(unit_b) > 1 else b)
    x, y = _number(a), _number(b)
    if x is not None and y is not None:
        return _same_number(x, y)
    if _is_text(a) or _is_text(b):
        return False
    return _compare(_as_latex(a), _as_latex(b), timeout)


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace at `start` ends. `\\{` is a character, not a brace."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return start + match.start()
    return None


# ------------------------------------------------------------------------------------ how an answer is written

SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\displaystyle\b|\\left\b|\\right\b|\\limits\b|\u200b")
FUNCTIONS = "arcsin arccos arctan sin cos tan cot sec csc log ln exp"
KNOWN_WORDS = frozenset([*FUNCTIONS.split(), "sqrt", "pi", "inf", "infinity", "frac"])


def _tidy(answer: str) -> str:
    """The answer without markup that only changes how it looks."""
    boxed = extract_boxed_answer(answer)
    text = answer if boxed is None else boxed
    text = SPACING.sub(" ", text.replace("−", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    text = text.replace("\\$", "").replace("$", "").replace("\\(", "").replace("\\)", "").replace("\\[", "")
    text = text.replace("\\]", "").replace("{,}", ",").replace("\\%", "%")
    return " ".join(text.split()).rstrip(".").strip()


def _plain_words(text: str) -> str:
    r"""`\text{Evelyn}` -> `Evelyn`"""
    return re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 ", text)


def _as_text(text: str) -> str:
    plain = " ".join(_plain_words(text).split()).casefold()
    plain = re.sub(r"(?<!\w) | (?!\w)", "", plain)  # 1 1/2 is not 11/2
    choice = re.fullmatch(r"\(([a-z])\)", plain)  # (B), as in multiple choice
    return choice.group(1) if choice else plain


UNIT = re.compile(r"(?P<value>.*[\d}%])\s+(?P<unit>[A-Za-z]+(?:\s*[/*·]?\s*[A-Za-z]+|\s*\^\s*\{?-?\d\}?)*)")


def _split_unit(text: str) -> tuple[str, str]:
    """A plain number and the unit behind it, if it has one."""
    text = _plain_words(re.sub(r"\^\s*\{?\s*\\circ\s*\}?|°", " degrees", text)).strip()
    match = UNIT.fullmatch(text)
    if match is None or _number(match["value"]) is None or match["unit"].split()[0] in KNOWN_WORDS:
        return text, ""
    return match["value"], match["unit"].casefold().rstrip("s")


class _Number(NamedTuple):
    value: Fraction
    places: int | None
    """Decimal places as written; None: exact."""
    percent: bool


DECIMAL = re.compile(r"(?P<digits>\d{1,3}(?:,\d{3})+|\d+)?(?:\.(?P<places>\d*))?(?:[eE](?P<exponent>[+-]?\d{1,3}))?")


def _number(text: str) -> _Number | None:
    """A plain number: digits, thousands separators, decimals, 1e-3, a fraction, a mixed number, a percentage."""
    text = text.strip()
    percent = text.endswith("%")
    text = text.rstrip("% ").lstrip("+")
    negative = text.startswith("-")
    text = text.removeprefix("-").strip()
    value: Fraction | None
    places: int | None = None
    text = re.sub(r"\\frac\s*(\d)\s*(\d)$", r"\\frac{\1}{\2}", text)
    fraction = re.fullmatch(
        r"(?:(?P<whole>\d+)\s*(?=\\)|(?P<apart>\d+)\s+)?(?:\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s*/\s*(\d+))",
        text,
    )
    if fraction:
        whole = int(fraction["whole"] or fraction["apart"] or 0)
        top, bottom = fraction.group(3) or fraction.group(5), fraction.group(4) or fraction.group(6)
        if not int(bottom):
            return None
        value = whole + Fraction(int(top), int(bottom))
    else:
        decimal = DECIMAL.fullmatch(text)
        if decimal is None or not (decimal["digits"] or decimal["places"]):
            return None
        value = Fraction(text.replace(",", "").rstrip(".") or "0")
        places = len(decimal["places"]) if decimal["places"] else None
    return _Number(-value if negative else value, places, percent)


def _same_number(x: _Number, y: _Number) -> bool:
    if x.percent != y.percent:
        hundredths, plain = (x, y) if x.percent else (y, x)
        return plain.value in (hundredths.value, hundredths.value / 100)
    return x.value == y.value or _rounds(x.value, to=y) or _rounds(y.value, to=x)


def _rounds(value: Fraction, *, to: _Number) -> bool:
    return to.places is not None and to.places >= 6 and round(value, to.places) == to.value


def _is_text(text: str) -> bool:
    """Words would be read as products of letters, which makes anagrams equal; `13_{6}` (another base) as 13."""
    words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text))
    return any(word.lower() not in KNOWN_WORDS for word in words) or bool(re.search(r"\d\s*_\s*\{?\s*\d", text))


def _as_latex(text: str) -> str:
    """LaTeX for what people and programs write instead of it."""
    text = text.replace("**", "^").replace("<=", "\\le ").replace(">=", "\\ge ")
    text = re.sub(r"(?<![\\A-Za-z])inf(?:inity)?(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join([*FUNCTIONS.split(), 'pi'])})(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    return re.sub(r"\^\s*(-\s*\d+|\d{2,})", r"^{\1}", text)


# ------------------------------------------------------------------------------------ the processes
#
# `pebble.ProcessPool` has such time limits too, and was measured beside this pool (pebble 5.2, two busy cores). It
# starts its processes with multiprocessing, and there a fork is unsafe (callers run threads) and "spawn" imports the
# caller's main script again: `grade_answer` in a script without `if __name__ == "__main__"` fails there with
# BrokenProcessPool, and works here. It starts all processes at once: 28 s until the first answer, and 5 s here; then
# 30 ms and 5 ms an answer; idle, it looks around ten times a second.

PROGRAM = str(Path(__file__).with_name("math_worker.py"))


class _TooLongError(Exception):
    """No answer within the limit."""


class _EndedError(Exception):
    """The process is gone."""


class _Process:
    """One grading process; used by one thread at a time."""

    def __init__(self) -> None:
        # By its path, and without its folder on sys.path (-P): whose modules can be imported is told by our sys.path.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._buffer = b""
        try:
            problem = self.ask(list(sys.path), within=START_SECONDS)
        except (_TooLongError, _EndedError) as error:
            self.end()
            raise RuntimeError(f"the process that grades answers could not be started: {error}") from error
        if problem is not None:
            self.end()
            raise ImportError(f"grade_answer needs math-verify ({problem}): pip install math-verify")

    def ask(self, question: object, *, within: float) -> object:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        deadline = time.monotonic() + within
        try:
            self._popen.stdin.write(json.dumps(question).encode() + b"\n")
            while b"\n" not in self._buffer:
                ready = select.poll()
                ready.register(self._popen.stdout, select.POLLIN)
                if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise _TooLongError(f"no answer in {within:g} s")
                received = os.read(self._popen.stdout.fileno(), 4096)
                if not received:
                    raise _EndedError(f"it ended with exit code {self._popen.wait()}")
                self._buffer += received
        except OSError as error:
            raise _EndedError(str(error)) from error
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


class _Pool:
    """At most `MOST_PROCESSES`, each lent to one caller at a time. Waiting for a free one is not part of the limit."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(MOST_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def compare(self, given: str, truth: str, timeout: float) -> bool:
        with self._turns:
            # Once more, in a new process, if one is gone: something other than the question may have ended it.
            for fresh in (False, True):
                with self._lent(fresh=fresh) as process:
                    try:
                        return bool(process.ask([given, truth, timeout], within=timeout))
                    except (_TooLongError, _EndedError) as error:
                        process.end()
                        reason = error
                if isinstance(reason, _TooLongError):
                    break
        logger.warning("cannot be graded, so it counts as wrong: %.100r against %.100r: %s", given, truth, reason)
        return False

    @contextlib.contextmanager
    def _lent(self, *, fresh: bool) -> Iterator[_Process]:
        process = (None if fresh else self._idle_one()) or _Process()
        try:
            yield process
        except BaseException:  # Ctrl-C between question and answer: the next question would get this answer
            process.end()
            raise
        if process.alive:
            with self._lock:
                self._idle.append(process)

    def _idle_one(self) -> _Process | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                process.end()
        return None

    def close(self) -> None:
        with self._lock:
            processes, self._idle = self._idle, []
        for process in processes:
            with contextlib.suppress(Exception):
                process.end()


_pool = _Pool()


def _new_pool() -> None:
    """After a fork: the processes, and perhaps locks held at that moment, are the parent's."""
    global _pool
    _pool = _Pool()


def _compare(given: str, truth: str, timeout: float) -> bool:
    return _pool.compare(given, truth, timeout)


atexit.register(lambda: _pool.close())
os.register_at_fork(after_in_child=_new_pool)
