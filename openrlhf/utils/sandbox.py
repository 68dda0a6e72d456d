"""A sandbox for code that nobody has read: what a policy has written, run to see whether it is right.

    from openrlhf.utils import sandbox

    result = sandbox.run_python("print(input()[::-1])", stdin="abc")
    result.stdout, result.exit_status, result.limit       # "cba\\n", 0, None

    graded = sandbox.grade_outputs(code, [("1 2\\n", "3\\n"), ("-1 1\\n", "0\\n")])      # stdin and expected stdout
    graded = await sandbox.grade_asserts_async(code, ["assert add(1, 2) == 3"])
    graded.share                                          # of the tests that passed

A run has an empty folder, no environment, no network, and limits on time, memory, files, processes and output; whatever
it starts ends with it. What becomes of it is data (`Result`): a program that fails raises nothing here. How much the
machine protects depends on what its kernel lets us do: `level()` says so, `describe()` in a sentence, and
`at_least=` refuses to run below a level. docs/rewards.md has the table of what each level holds.

At most as many runs as there are cores run at once in a process (`set_at_once`); the others wait, and waiting does not
count towards their time. All functions may be called from any thread and from any number of event loops. Imports the
standard library only.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import json
import marshal
import operator
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

GRACE_SECONDS = 60.0
"""How much longer than its own limit a run may take until it is given up: for a machine that is busy."""


class Level(IntEnum):
    """How much is held, from less to more."""

    LIMITS = 1
    """Limits and a process that watches, but the code has the network and the files of the user who runs it."""
    FILTERS = 2
    """Landlock and seccomp besides: no network, no files but its own and the system's, no other process."""
    NAMESPACES = 3
    """Its own network, processes, file system and users besides: there is nothing else to reach."""

    def __str__(self) -> str:
        return self.name.lower()


class Limit(StrEnum):
    """The limit that ended a run, or that made it fail."""

    TIME = "time"
    MEMORY = "memory"
    DISK = "disk"
    """Bytes of all files, or their number."""
    FILE_SIZE = "file_size"
    PROCESSES = "processes"
    OUTPUT = "output"
    WATCHER = "watcher"
    """The code ended the process that watched it (possible at `Level.LIMITS` only)."""


class SandboxError(Exception):
    """A run could not be started as wanted. What the code does is never one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use."""

    seconds: float = 5.0
    """On the clock. CPU seconds of each process have the same limit."""
    memory: int = 512 << 20
    """Bytes: of address space for each process, and of memory for all together."""
    disk: int = 64 << 20
    """Bytes of all files together."""
    file_size: int = 16 << 20
    files: int = 256
    """The number of files and folders."""
    open_files: int = 64
    """For each process."""
    processes: int = 16
    """Processes and threads that it may have besides the first."""
    output: int = 64 << 10
    """Bytes of stdout, and of stderr."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "processes" else 1e-3):
                raise ValueError(f"Limits.{name} must be greater, got {value}")


DEFAULT = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a run."""

    stdout: str
    stderr: str
    exit_status: int | None
    """Negative: the number of the signal that ended it. None: it was ended from outside, by a limit."""
    limit: Limit | None
    seconds: float
    peak_memory: int
    """Bytes: the most that one of its processes, or a look at all of them, has found."""
    level: Level

    @property
    def ok(self) -> bool:
        return self.exit_status == 0 and self.limit is None


class Graded(NamedTuple):
    """Which tests passed, and the runs that showed it."""

    passed: tuple[bool, ...]
    results: tuple[Result, ...]

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


# ------------------------------------------------------------------------------------ what the machine offers


class _Machine(NamedTuple):
    """What this machine offers."""

    level: Level
    refused: dict[Level, str]
    """Why there is none of the levels above."""
    bubblewrap: str | None = None
    """The program that makes the namespaces, where we may not make them ourselves."""


@functools.cache
def _probed() -> _Machine:
    """The highest level that a program was really run at."""
    refused: dict[Level, str] = {}
    if os.name != "posix":
        raise SandboxError("the sandbox needs Linux or macOS")
    for wanted in sorted(Level, reverse=True):
        bubblewrap = shutil.which("bwrap") if wanted == Level.NAMESPACES else None
        for machine in (_Machine(wanted, refused), *([_Machine(wanted, refused, bubblewrap)] if bubblewrap else [])):
            try:
                with _Job([sys.executable, "-I", "-S", "-c", "print(1)"], b"", {}, PROBE, machine, (), {}) as job:
                    result = job.read(*job.run())
            except SandboxError as error:
                why = str(error)
            else:
                if result.stdout == "1\n":
                    return machine
                why = f"a program that prints 1 did not: {result}"
            refused[wanted] = "; ".join(filter(None, (refused.get(wanted), why)))
    raise SandboxError("no program can be run here: " + "; ".join(f"{lev}: {why}" for lev, why in refused.items()))


PROBE = Limits(seconds=30.0)


def level() -> Level:
    """What protects this machine. The first call tries it out (a tenth of a second), later ones know."""
    return _probed()[0]


def describe() -> str:
    """`level()` in one line, with what it does not hold and why there is no more."""
    found, refused, bubblewrap = _probed()
    held = {
        Level.NAMESPACES: "own network, processes, users and file system, system calls filtered",
        Level.FILTERS: "no network, no files but its own and the system's, system calls filtered",
        Level.LIMITS: "limits only: code that is run HAS the network and the files of this user",
    }[found]
    reasons = "".join(f"; no {lev}: {why}" for lev, why in refused.items())
    return f"sandbox: {found} ({held}{', made by bubblewrap' if bubblewrap else ''}{reasons})"


_said = False
_said_lock = threading.Lock()


def _say_once() -> None:
    """Where the log of this process goes, because this is not known here: to stderr."""
    global _said
    with _said_lock:
        if _said:
            return
        _said = True
    print(describe(), file=sys.stderr, flush=True)


def _machine_for(at_least: Level | None) -> _Machine:
    machine = _probed()
    found, refused, _ = machine
    if at_least is not None and found < at_least:
        why = "; ".join(f"no {lev}: {reason}" for lev, reason in refused.items())
        raise SandboxError(
            f"at_least={at_least} is wanted, and this machine offers {found} ({why}). Allow unprivileged user "
            f"namespaces, install bubblewrap, or run in a container that has them; or accept {found} with "
            f"at_least=Level.{found.name}"
        )
    _say_once()
    return machine


# ------------------------------------------------------------------------------------ how many at once


class _Turns:
    """Places that threads and coroutines of any loop wait for, first come, first served."""

    def __init__(self, number: int) -> None:
        self._lock = threading.Lock()
        self._free = number
        self._waiting: deque[Future[None]] = deque()

    def change(self, more: int) -> None:
        with self._lock:
            self._free += more
        self._serve()

    def ask(self) -> Future[None]:
        turn: Future[None] = Future()
        with self._lock:
            self._waiting.append(turn)
        self._serve()
        return turn

    def give_back(self, turn: Future[None]) -> None:
        """Also of a turn that has not come yet."""
        if not turn.cancel():
            self.change(1)

    def _serve(self) -> None:
        with self._lock:
            while self._free > 0 and self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    self._free -= 1
                    turn.set_result(None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_at_once = _cores()
_turns = _Turns(_at_once)


def at_once() -> int:
    """How many runs of this process run at the same time."""
    return _at_once


def set_at_once(number: int) -> None:
    """From now on; for example fewer in each of several agent hosts."""
    global _at_once
    if number < 1:
        raise ValueError(f"the number of runs at once must be >= 1, got {number}")
    _turns.change(number - _at_once)
    _at_once = number


# ------------------------------------------------------------------------------------ one run

WORKER = Path(__file__).with_name("sandbox_worker.py")
# Imported, so that it is not compiled for each run; its folder comes last, where it hides no module of Python.
COMMAND = (
    *(sys.executable, "-I", "-S", "-c"),
    "import sys; sys.path.append(sys.argv[1]); import sandbox_worker; sandbox_worker.main()",
    str(WORKER.parent),
)


LIBRARIES = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
"""All that a run keeps of the environment: where this Python finds its own libraries."""


def _python_folders() -> list[str]:
    """Where this Python and its packages are, for a run that sees nothing else."""
    libraries = [name for value in LIBRARIES.values() for name in value.split(":") if os.path.isabs(name)]
    return [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).parent.parent), *libraries]


@functools.cache
def _readable(more: tuple[str, ...]) -> list[str]:
    """Absolute paths that a run may read, besides the system's, those above others first."""
    given = [*_python_folders(), *more]
    paths = {path for name in given for path in (os.path.abspath(name), os.path.realpath(name))}
    home = os.path.realpath(os.path.expanduser("~"))
    # A Python that is installed right there shows its programs and libraries only.
    for path in [path for path in paths if path in ("/", home) and path not in more]:
        paths.remove(path)
        paths |= {os.path.join(path, name) for name in ("bin", "lib") if path != "/"}
    system = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
    return sorted(
        path for path in paths if os.path.exists(path) and not any(f"{path}/".startswith(f"{s}/") for s in system)
    )


class _Job:
    """One run: its folder, the process that watches it, and what that reports. A context manager."""

    def __init__(
        self,
        command: Sequence[str],
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: Limits,
        machine: _Machine,
        readable: Sequence[str | os.PathLike[str]],
        environment: Mapping[str, str],
    ) -> None:
        executable = shutil.which(command[0])
        if executable is None:
            raise SandboxError(f"there is no program {command[0]}")
        for name in files:
            if os.path.isabs(name) or ".." in Path(name).parts or not name:
                raise ValueError(f"files are named relative to the run's folder, got {name!r}")
        level = self.level = machine.level
        self.limits = limits
        self.seconds = limits.seconds + GRACE_SECONDS
        self.folder = tempfile.mkdtemp(prefix="openrlhf-sandbox-")
        home = "/tmp/home" if level == Level.NAMESPACES else self.folder
        self.payload = marshal.dumps(
            {
                "command": [os.path.abspath(executable), *command[1:]],
                "stdin": stdin,
                "files": dict(files),
                "limits": asdict(limits),
                "level": str(level),
                "bubblewrap": machine.bubblewrap,
                "root": os.geteuid() == 0,
                "folder": self.folder,
                "readable": _readable(tuple(os.path.abspath(path) for path in readable)),
                "more_readable": [os.path.abspath(path) for path in readable],
                "environment": {
                    "PATH": "/usr/local/bin:/usr/bin:/bin",
                    "HOME": home,
                    "TMPDIR": "/tmp" if level == Level.NAMESPACES else home,
                    "LANG": "C.UTF-8",
                    # Threads are counted, and a run has a core.
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    **LIBRARIES,
                    **environment,
                },
            }
        )

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        # The process that watches has removed it, unless it was killed.
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def process_arguments(self) -> dict[str, Any]:
        return {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "cwd": "/",
            "env": LIBRARIES,
            "start_new_session": True,
        }

    def run(self) -> tuple[bytes, int]:
        """What was reported, and the exit status of the process that watched."""
        with subprocess.Popen(COMMAND, **self.process_arguments) as process:
            try:
                report, _ = process.communicate(self.payload, timeout=self.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SandboxError(f"a run did not end within {self.seconds:g} s") from None
            except BaseException:
                process.terminate()  # whereupon it ends what it has started
                raise
        return report, process.returncode

    async def run_async(self) -> tuple[bytes, int]:
        process = await asyncio.create_subprocess_exec(*COMMAND, **self.process_arguments)
        try:
            report, _ = await asyncio.wait_for(process.communicate(self.payload), self.seconds)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise SandboxError(f"a run did not end within {self.seconds:g} s") from None
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        return report, process.returncode or 0

    def read(self, report: bytes, status: int) -> Result:
        if not report:
            if status >= 0:
                raise SandboxError(f"{WORKER.name} ended with status {status} and no report")
            told: dict[str, Any] = {"limit": Limit.WATCHER, "seconds": 0.0, "peak_memory": 0, "status": None}
            told |= {"stdout": b"", "stderr": b""}
        else:
            told = marshal.loads(report)
        if "setup_error" in told:
            raise SandboxError(told["setup_error"])
        stdout, stderr = (told[name].decode(errors="replace") for name in ("stdout", "stderr"))
        limit = Limit(told["limit"]) if told["limit"] else _limit_behind(told["status"], stderr)
        return Result(
            stdout=stdout,
            stderr=stderr,
            exit_status=told["status"],
            limit=limit,
            seconds=told["seconds"],
            peak_memory=told["peak_memory"],
            level=self.level,
        )


SIGNS = {
    "MemoryError": Limit.MEMORY,
    "std::bad_alloc": Limit.MEMORY,
    "Cannot allocate memory": Limit.MEMORY,
    "[Errno 27]": Limit.FILE_SIZE,
    "File too large": Limit.FILE_SIZE,
    "No space left on device": Limit.DISK,
    "Resource temporarily unavailable": Limit.PROCESSES,
    "can't start new thread": Limit.PROCESSES,
}
"""What the last line of a failed program says about the limit that it met. (The kernel refuses, and tells only it.)"""


def _limit_behind(status: int | None, stderr: str) -> Limit | None:
    if status is None or status == 0:
        return None
    named = {-24: Limit.TIME, -25: Limit.FILE_SIZE}  # SIGXCPU, SIGXFSZ
    lines = stderr.strip().splitlines()
    found = [limit for sign, limit in SIGNS.items() if lines and sign in lines[-1]]
    return named.get(status) or (found[0] if found else None)


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


def _job(
    command: Sequence[str],
    *,
    stdin: str | bytes = "",
    files: Mapping[str, str | bytes] = {},
    limits: Limits = DEFAULT,
    at_least: Level | None = None,
    readable: Sequence[str | os.PathLike[str]] = (),
    environment: Mapping[str, str] = {},
) -> _Job:
    """A job with the options of `run`."""
    named = {name: _encoded(content) for name, content in files.items()}
    return _Job(command, _encoded(stdin), named, limits, _machine_for(at_least), readable, environment)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    turn = _turns.ask()
    try:
        turn.result()
        yield
    finally:
        _turns.give_back(turn)


@contextlib.asynccontextmanager
async def _turn_async() -> AsyncIterator[None]:
    await asyncio.to_thread(level)  # the first time it tries, and no event loop waits for that
    turn = _turns.ask()
    try:
        await asyncio.wrap_future(turn)
        yield
    finally:
        _turns.give_back(turn)


def run(
    command: Sequence[str],
    *,
    stdin: str | bytes = "",
    files: Mapping[str, str | bytes] = {},
    limits: Limits = DEFAULT,
    at_least: Level | None = None,
    readable: Sequence[str | os.PathLike[str]] = (),
    environment: Mapping[str, str] = {},
) -> Result:
    """Run `command` in a folder with `files` (names relative to it), and give its result.

    `readable` are further paths that it may read; where the run is started by root, only if everybody may, because then
    it has a user of its own. `environment` is all that it gets besides PATH, HOME and the like. Raises SandboxError if
    it could not be run, and where the machine offers less than `at_least`.
    """
    with (
        _turn(),
        _job(
            command,
            stdin=stdin,
            files=files,
            limits=limits,
            at_least=at_least,
            readable=readable,
            environment=environment,
        ) as job,
    ):
        return job.read(*job.run())


async def run_async(command: Sequence[str], **options: Any) -> Result:
    """As `run`, with its options. A run whose caller is cancelled ends."""
    async with _turn_async():
        with _job(command, **options) as job:
            return job.read(*await job.run_async())


# ------------------------------------------------------------------------------------ Python, and tests of it

PYTHON = (sys.executable, "-I", "-B", "main.py")


def run_python(code: str, **options: Any) -> Result:
    """Run `code` as a Python program, with this Python and its packages. `options` are those of `run`."""
    return run(PYTHON, **_with_main(code, options))


async def run_python_async(code: str, **options: Any) -> Result:
    """As `run_python`."""
    return await run_async(PYTHON, **_with_main(code, options))


def _with_main(code: str, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "files": {**options.get("files", {}), "main.py": _encoded(code)}}


def same_output(given: str, expected: str) -> bool:
    """Whether two outputs have the same lines; spaces at the ends of lines and empty lines at the end do not count."""
    lines, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (given, expected))
    return lines == wanted


def grade_outputs(
    code: str, cases: Sequence[tuple[str, str]], *, together: float = float("inf"), **options: Any
) -> Graded:
    """Run a Python program once for each (stdin, expected stdout), many at once. The expected output never is where
    the program is, so a program passes only by writing it.

    Each case has the limits of `run` for itself. When the cases of the program have taken `together` seconds, those
    that have not begun are not run any more, and have not passed: so an endless loop costs a few cases and not all.
    """
    _no_cases(cases)
    spent: list[float] = []

    def one(case: tuple[str, str]) -> Result | None:
        with _turn():
            if sum(spent) >= together:
                return None
            with _job(PYTHON, stdin=case[0], **_with_main(code, options)) as job:
                result = job.read(*job.run())
            spent.append(result.seconds)
            return result

    with ThreadPoolExecutor(min(len(cases), at_once())) as threads:
        return _graded(list(threads.map(one, cases)), cases)


async def grade_outputs_async(
    code: str, cases: Sequence[tuple[str, str]], *, together: float = float("inf"), **options: Any
) -> Graded:
    """As `grade_outputs`."""
    _no_cases(cases)
    spent: list[float] = []

    async def one(stdin: str) -> Result | None:
        async with _turn_async():
            if sum(spent) >= together:
                return None
            with _job(PYTHON, stdin=stdin, **_with_main(code, options)) as job:
                result = job.read(*await job.run_async())
            spent.append(result.seconds)
            return result

    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(one(stdin)) for stdin, _ in cases]
    return _graded([run.result() for run in runs], cases)


def _no_cases(cases: Sequence[Any]) -> None:
    if not cases:
        raise ValueError("there are no tests")  # a made-up share would be worse than none


def _graded(results: Sequence[Result | None], cases: Sequence[tuple[str, str]]) -> Graded:
    passed = (
        run is not None and run.ok and same_output(run.stdout, case[1])
        for run, case in zip(results, cases, strict=True)
    )
    return Graded(tuple(passed), tuple(run for run in results if run is not None))


# Results go to a private descriptor with a secret in front, test by test: so that the code cannot print them by chance,
# and so that a test that never ends does not take the others' with it. A test sees what the code defined, and nothing
# that another test did to it by assignment. Values leave as plain data, and are compared where the code is not.
_ASSERTS = """
import json, os, sys, types
job = json.load(sys.stdin)
results = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def plain(value):
    if value is None or isinstance(value, bool):
        return value
    for kind, exact in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, kind):
            return exact(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [plain(item) for item in value]}
    if getattr(value, "ndim", None) == 0:  # a number of NumPy or torch
        value = value.item()
        return {"fraction": [int(value), 1]} if isinstance(value, bool) else plain(value)  # equals True, is not True
    return {"fraction": list(value.as_integer_ratio())}
def run(job, results, plain, dumps):
    code, tests, secret = job.pop("code"), job.pop("tests"), job.pop("secret")
    answer = sys.modules["answer"] = types.ModuleType("answer")  # dataclasses and pickle look their classes up there
    defined = vars(answer)
    exec(compile(code, "answer.py", "exec"), defined)
    for number, (parts, most) in enumerate(tests):
        try:
            own, values = dict(defined), []
            for statements, expression in parts:
                exec(compile(statements, "test", "exec"), own)
                if expression is not None:
                    values.append(plain(eval(compile(expression, "test", "eval"), own)))
            line = f"{secret} {number} {dumps(values)}\\n".encode()
        except BaseException:
            pass
        else:
            if len(line) <= most:
                os.write(results, line)
run(job, results, plain, json.dumps)
"""
ASSERTS = (sys.executable, "-I", "-c", _ASSERTS)


class _Test(NamedTuple):
    """A test as it is run: statements and what follows them, an expression whose value is told, or nothing."""

    parts: tuple[tuple[str, str | None], ...]
    expected: tuple[tuple[Callable[[Any, Any], bool], Any], ...]
    """How and with what the values are compared, where the code is not."""
    most: int
    """Bytes of a line that tells them; the longest form of equal values has fewer."""


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _test(source: str) -> _Test:
    """Each `assert expression == literal` that is a statement of its own is taken apart."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        statements = []  # it fails where it is run
    parts: list[tuple[str, str | None]] = []
    expected: list[tuple[Callable[[Any, Any], bool], Any]] = []
    before: list[ast.stmt] = []
    for statement in statements:
        match statement:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                same, sides = operator.eq, [(left, _literal(right)), (right, _literal(left))]
            case ast.Assert(
                test=ast.Compare(
                    left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None | True | False) as right]
                )
            ):
                same, sides = operator.is_, [(left, _literal(right))]
            case _:
                same, sides = operator.eq, []
        known = [(side, value) for side, value in sides if value is not None and _literal(side) is None]
        if not known:
            before.append(statement)
            continue
        (side, value), *_ = known
        parts.append((_source(before), ast.unparse(side)))
        expected.append((same, *value))
        before = []
    if not parts:
        return _Test(((source, None),), (), 100)
    if before:
        parts.append((_source(before), None))
    return _Test(tuple(parts), tuple(expected), 200 + 20 * len(source.encode(errors="surrogatepass")))


def _source(statements: Sequence[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, statements))


def _value(told: Any) -> Any:
    """What `plain` in the run has made of a value. Raises whatever it likes for what `plain` never makes."""
    if not isinstance(told, dict):
        return told
    ((kind, content),) = told.items()
    if kind == "dict":
        return {_value(key): _value(value) for key, value in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "fraction":
        return Fraction(*content)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_value, content))


def _same_values(told: str, expected: Sequence[tuple[Callable[[Any, Any], bool], Any]]) -> bool:
    try:
        values = [_value(value) for value in json.loads(told)]
        return len(values) == len(expected) and all(
            same(value, wanted) for value, (same, wanted) in zip(values, expected, strict=True)
        )
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError):
        return False  # the code has written it itself


def grade_asserts(code: str, tests: Sequence[str], **options: Any) -> Graded:
    """Run Python code once, and then each of `tests`, statements that raise when the code is wrong.

    All share the limits of one run; what passed before a limit was met has passed. In `assert expression == literal`
    (also `literal == expression`, and `is None`, `is True`, `is False`) only the expression enters the sandbox, and its
    value, plain data, is compared outside: it passes by being right, whatever the code does. Other statements run where
    the code runs, so code that goes looking for them finds them, and can make them pass.
    """
    _no_cases(tests)
    asked = _Asserts(code, tests, options)
    return asked.graded(run(ASSERTS, **asked.options))


async def grade_asserts_async(code: str, tests: Sequence[str], **options: Any) -> Graded:
    """As `grade_asserts`."""
    _no_cases(tests)
    asked = _Asserts(code, tests, options)
    return asked.graded(await run_async(ASSERTS, **asked.options))


class _Asserts:
    """What `grade_asserts` asks of a run, and what it makes of the result."""

    def __init__(self, code: str, tests: Sequence[str], options: Mapping[str, Any]) -> None:
        self.secret = secrets.token_hex(8)
        self.tests = [_test(test) for test in tests]
        job = {"code": code, "secret": self.secret, "tests": [(test.parts, test.most) for test in self.tests]}
        limits = options.get("limits", DEFAULT)
        limits = replace(limits, output=limits.output + sum(test.most for test in self.tests))
        self.options = {**options, "limits": limits, "stdin": json.dumps(job)}

    def graded(self, result: Result) -> Graded:
        lines = [line.split(" ", 2) for line in result.stdout.split("\n")]
        told = {words[1]: words[2] for words in lines if len(words) == 3 and words[0] == self.secret}
        passed = (_same_values(told.get(str(number), ""), test.expected) for number, test in enumerate(self.tests))
        return Graded(tuple(passed), (result,))
