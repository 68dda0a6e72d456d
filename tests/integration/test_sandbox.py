"""The sandbox for code: escapes, each tried at each level that this machine has, and what becomes of runs."""

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import sandbox_escapes
from patience import patience
from processes import wait_until

from openrlhf.utils import sandbox
from openrlhf.utils.sandbox import Level, Limit, Limits, SandboxError

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
"""How every user of another namespace looks, too: what mistakes one for the other works for this user alone."""
ORDINARY = 31415
SYSTEM_PYTHON = "/usr/bin/python3"


def as_user(user):
    """A command in front of another, which becomes that user first."""
    program = f"""
import os, sys
os.setgroups([])
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
os.execve(sys.argv[1], sys.argv[1:], {{"PATH": os.defpath, "HOME": "/nonexistent"}})
"""
    return sys.executable, "-I", "-c", program


def system_python_is_new_enough():
    asked = [SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return os.path.exists(SYSTEM_PYTHON) and subprocess.run(asked, check=False).returncode == 0


@contextlib.contextmanager
def copied():
    """The sandbox and the escapes in a folder that every user may read."""
    with tempfile.TemporaryDirectory(prefix="sandbox-test-") as folder:
        os.chmod(folder, 0o755)
        for path in (*(REPOSITORY / "openrlhf" / "utils").glob("sandbox*.py"), Path(sandbox_escapes.__file__)):
            shutil.copy(path, folder)
            os.chmod(Path(folder) / path.name, 0o644)
        yield folder


def escapes_of(*command):
    """What became of all attempts."""
    with copied() as folder:
        done = subprocess.run(
            [*command, "-I", f"{folder}/sandbox_escapes.py", folder],
            capture_output=True,
            text=True,
            timeout=patience(300),
            cwd="/",
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@functools.cache
def escapes(who):
    if who == "this user":
        return escapes_of(sys.executable)
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    if not system_python_is_new_enough():
        pytest.skip("no Python 3.11 that everybody may read")
    if who == "root":  # with a Python that everybody may read, a run at any level has a user of its own
        return escapes_of(SYSTEM_PYTHON)
    return escapes_of(*as_user(ORDINARY), SYSTEM_PYTHON)


def table():
    """{attempt: {level: cell}} of docs/rewards.md"""
    text = (REPOSITORY / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    head = next(row for row in rows if row[0] == "attempt")
    found = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows if row[0] in sandbox_escapes.ATTEMPTS}
    assert head[1:] == [f"`{level}`" for level in sorted(Level, reverse=True)]
    return found


TABLE = table()
HELD = {"held", "watched"} | ({"Linux"} if sys.platform == "linux" else set())


@pytest.mark.parametrize("name", sandbox_escapes.ATTEMPTS)
def test_every_attempt_is_in_the_table(name):
    assert set(TABLE[name].values()) <= {"held", "watched", "Linux", "no"}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["this user", "an ordinary user", "root"])
@pytest.mark.parametrize("level", [*(str(level) for level in Level), "bubblewrap"])
def test_what_the_table_says_is_held(who, level):
    outcome = escapes(who)[level]
    if "" in outcome:
        pytest.skip(f"no {level} here: {outcome['']}")
    column = Level.NAMESPACES if level == "bubblewrap" else level
    promised = {name: "held" for name, cells in TABLE.items() if cells[f"`{column}`"] in HELD}
    assert len(promised) >= 13
    assert {name: outcome[name] for name in promised} == promised


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_no_user_has_less_than_another():
    """`nobody` looks the same within a user namespace and without; every other user does not."""
    if not system_python_is_new_enough():
        pytest.skip("no Python 3.11 that everybody may read")
    with copied() as folder:
        program = f"import sys; sys.path.append({folder!r}); import sandbox; print(sandbox.describe())"
        told = [
            subprocess.run(
                [*as_user(user), SYSTEM_PYTHON, "-I", "-B", "-c", program],
                capture_output=True,
                text=True,
                cwd="/",
                timeout=patience(60),
                check=True,
            ).stdout
            for user in (NOBODY, ORDINARY)
        ]
    assert told[0].startswith("sandbox: ")
    assert told[0] == told[1]


@pytest.fixture(params=list(Level), ids=str)
def level(request, monkeypatch):
    """Each level that this machine has."""
    if request.param > sandbox.level():
        pytest.skip(sandbox.describe())
    monkeypatch.setattr(sandbox, "_probed", lambda: sandbox._Machine(request.param, {}))
    return request.param


class TestResults:
    def test_streams_and_status(self, level):
        result = sandbox.run_python(
            "import sys; print(input()[::-1]); sys.stderr.write('é'); sys.exit(3)", stdin="abc\n"
        )
        assert (result.stdout, result.stderr, result.exit_status, result.limit) == ("cba\n", "é", 3, None)
        assert result.level == level
        assert not result.ok
        assert 0 < result.seconds < patience(20)
        assert result.peak_memory > 1 << 20

    def test_a_signal_is_a_negative_status(self, level):
        result = sandbox.run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        assert (result.exit_status, result.limit) == (-signal.SIGSEGV, None)

    def test_files_input_and_any_command(self, level, tmp_path):
        (tmp_path / "data").write_text("readable ")
        result = sandbox.run(
            ["sh", "-c", f"cat a/b.txt {tmp_path}/data; echo $MORE; wc -c"],
            files={"a/b.txt": "file ", "c": b"\xff"},
            stdin=b"x" * 200_000,
            readable=[tmp_path / "data"],
            environment={"MORE": " more"},
        )
        assert result.stdout.split() == ["file", "readable", "more", "200000"], result

    def test_it_begins_in_an_empty_folder_without_environment(self, level, monkeypatch):
        monkeypatch.setenv("MY_TOKEN", "secret")
        code = "import os; print(os.listdir(), sorted(os.environ), open('new', 'w').write('x'))"
        result = sandbox.run_python(code)
        # LC_CTYPE is Python's own doing where the locale is C.
        names = set(eval(result.stdout.split("] ", 1)[1].rsplit(" ", 1)[0])) - {"LC_CTYPE", "LD_LIBRARY_PATH"}
        assert result.stdout.startswith("['main.py'] ")
        assert names == {"HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"}

    def test_nothing_is_left_on_disk(self, level, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        code = """
import os
os.mkdir('unlisted', 0o300); os.mkdir('unlisted/b'); os.mkdir('unlisted/closed', 0); open('unlisted/b/c', 'w')
os.makedirs('a/b'); open('a/b/c', 'w')
try:
    os.fchmod(os.open('a', os.O_RDONLY), 0)
except PermissionError:  # as it is at `filters`
    pass
"""
        assert sandbox.run_python(code).ok
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_left_of_folders_within_folders(self, level, monkeypatch, tmp_path):
        """More than a path can have, or a recursion."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        code = "import os\nfor _ in range(3000): os.mkdir('folder'); os.chdir('folder')"
        sandbox.run_python(code, limits=Limits(files=4000, seconds=30))
        assert list(tmp_path.iterdir()) == []

    def test_packages_of_this_python_are_there(self, level):
        result = sandbox.run_python("import numpy; print(numpy.arange(4).sum())", limits=Limits(seconds=60))
        assert result.stdout == "6\n", result

    @pytest.mark.parametrize(
        ("limit", "limits", "code"),
        [
            (Limit.TIME, {"seconds": 0.5}, "while True: pass"),
            (Limit.TIME, {"seconds": 0.5}, "import time; time.sleep(60)"),
            (Limit.MEMORY, {"memory": 128 << 20}, "x = bytearray(1 << 30)"),
            (Limit.FILE_SIZE, {"file_size": 1 << 20}, "open('x', 'wb').write(bytes(1 << 22))"),
            (Limit.OUTPUT, {"output": 1000}, "while True: print('x' * 100)"),
            (Limit.PROCESSES, {"processes": 2}, sandbox_escapes.BOMB),
            (Limit.DISK, {"disk": 4 << 20}, sandbox_escapes.FILL),
        ],
        ids=lambda value: str(value) if isinstance(value, Limit) else "",
    )
    def test_the_limit_that_was_hit(self, level, limit, limits, code):
        result = sandbox.run_python(code, limits=Limits(**{"seconds": 30.0, **limits}))
        assert result.limit == limit, result
        assert not result.ok

    def test_output_up_to_the_limit_is_kept(self, level):
        limits = Limits(output=1000)
        assert sandbox.run_python("print('x' * 999)", limits=limits).ok
        over = sandbox.run_python("print('x' * 1000)", limits=limits)
        assert (over.limit, over.stdout) == (Limit.OUTPUT, "x" * 1000)

    def test_an_answer_that_does_not_read_its_input(self, level):
        assert sandbox.run_python("print(1)", stdin="x" * 1_000_000).ok


class TestRefusals:
    def test_a_wanted_level_that_is_not_there(self, monkeypatch):
        monkeypatch.setattr(sandbox, "_probed", lambda: sandbox._Machine(Level.LIMITS, {Level.FILTERS: "no Landlock"}))
        with pytest.raises(SandboxError, match=r"at_least=filters is wanted.*offers limits \(no filters: no Landlock"):
            sandbox.run_python("print(1)", at_least=Level.FILTERS)
        assert "HAS the network" in sandbox.describe()
        assert sandbox.run_python("print(1)", at_least=Level.LIMITS).ok

    def test_the_machine_is_described_once_on_stderr(self, monkeypatch, capsys):
        monkeypatch.setattr(sandbox, "_said", False)
        for _ in range(2):
            sandbox.run_python("pass")
        assert capsys.readouterr().err == sandbox.describe() + "\n"
        assert sandbox.describe().startswith(f"sandbox: {sandbox.level()} (")

    def test_what_cannot_be_run_is_the_callers_error(self):
        with pytest.raises(SandboxError, match="there is no program nothing-of-this-name"):
            sandbox.run(["nothing-of-this-name"])
        with pytest.raises(ValueError, match=r"relative to the run's folder, got '\.\./x'"):
            sandbox.run_python("", files={"../x": ""})
        with pytest.raises(ValueError, match=r"Limits\.seconds"):
            Limits(seconds=0)

    def test_a_setup_that_fails_is_no_result(self, level, monkeypatch):
        """Never is code run with less than was promised."""
        with sandbox._Job(["true"], b"", {}, Limits(), sandbox._Machine(level, {}), (), {}) as job:
            os.rmdir(job.folder)
            with pytest.raises(SandboxError):
                job.read(*job.run())


WITHOUT_RIGHTS = """
import ctypes, os, sys
for number in range(64):
    ctypes.CDLL(None).prctl(24, *(ctypes.c_ulong(n) for n in (number, 0, 0, 0)))  # drops it for what is executed
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root has rights to lose")
def test_root_that_may_not_become_another_user():
    """As in a container that has dropped all capabilities: a run is root then, with no more rights than that."""
    program = "from openrlhf.utils import sandbox; print(sandbox.run_python('print(1)'))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_RIGHTS, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "stdout='1" in done.stdout, done.stderr


ALONE = """
import ctypes, os, sys
user, group = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit("refused")
try:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
except OSError:
    sys.exit("refused")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="user namespaces are Linux's")
def test_root_that_is_the_only_user():
    """As in a container that was made without root: no other user can own the files of a run."""
    program = """
import sys
sys.path.append(sys.argv[1])
import sandbox
for level in [level for level in sandbox.Level if level <= sandbox.level()]:
    sandbox._probed = lambda: sandbox._Machine(level, {})
    print(level, sandbox.run_python("print(1)"))
"""
    # Where everybody may read the Python, a run gets a user of its own.
    python = SYSTEM_PYTHON if system_python_is_new_enough() else sys.executable
    with copied() as folder:
        done = subprocess.run(
            [python, "-I", "-c", ALONE, "-I", "-B", "-c", program, folder],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    if done.stderr.strip() == "refused":
        pytest.skip("this machine has no user namespaces for this user")
    assert "stdout='1" in done.stdout, done.stderr
    assert done.stdout.count("stdout='1") == len(done.stdout.splitlines())


class TestGrading:
    def test_outputs(self):
        code = "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()"
        graded = sandbox.grade_outputs(code, [("1 2\n", "3"), ("1 1", "2\n"), ("1 1", "3"), ("x", "")])
        assert graded.passed == (True, True, False, False)
        assert graded.share == 0.5
        assert [result.ok for result in graded.results] == [True, True, True, False]

    @pytest.mark.parametrize("grade", ["sync", "async"])
    def test_the_cases_of_a_program_have_a_time_together(self, grade, monkeypatch):
        """One at a time, a second each, 1.5 s together: two are run, and the other four are not."""
        monkeypatch.setattr(sandbox, "_turns", sandbox._Turns(1))
        options = {"together": 1.5, "limits": Limits(seconds=1)}
        cases = [("", "")] * 6
        if grade == "sync":
            graded = sandbox.grade_outputs("while True: pass", cases, **options)
        else:
            graded = asyncio.run(sandbox.grade_outputs_async("while True: pass", cases, **options))
        assert graded.passed == (False,) * 6
        assert [result.limit for result in graded.results] == [Limit.TIME] * 2

    def test_statements(self):
        """A test that never ends takes no others with it, and one cannot be passed by printing."""
        code = "import sys\ndef add(a, b):\n    return a + b\nprint('0', '1', '2')"
        tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "add = None; assert add is None", "add(1, 1)"]
        assert sandbox.grade_asserts(code, tests).passed == (True, False, True, True)
        slow = ["assert add(1, 2) == 3", "while True: pass"]
        graded = sandbox.grade_asserts(code, slow, limits=Limits(seconds=2))
        assert graded.passed == (True, False)
        assert graded.results[0].limit == Limit.TIME

    @pytest.mark.parametrize(
        "code",
        [
            "class Same:\n    __eq__ = lambda *_: True\ndef f(x): return Same()",
            "class Same(int):\n    __eq__ = lambda *_: True\nf = Same",
            "class Same(list):\n    __eq__ = lambda *_: True\ndef f(x): return Same()",
            "import sys\ndef f(x): sys.exit(0)",
            "import os\nos._exit(0)",
            "import builtins\nbuiltins.compile = lambda *_: 'None'\ndef f(x): return 0",
            "import builtins\nbuiltins.eval = builtins.exec = lambda *_: None\ndef f(x): return 0",
            "import operator\noperator.eq = lambda *_: True\ndef f(x): return 0",
            # What the run knows of its tests: all frames, everything the collector knows, and its own descriptors.
            """
import gc, os, re, sys
frame, found = sys._getframe(), []
while frame:
    found.append(repr(frame.f_locals))
    secret = frame.f_locals.get("secret", "")
    frame = frame.f_back
found += map(repr, gc.get_objects())
answers = re.findall("the-right-[a-z]{6}", " ".join(found)) + [0]
for number in range(3, 20):
    for values in ("[]", "[true]", "[1]", "null", "{}", '[{"dict": 1}]', '[{"x": []}]', "[[[[", '[{"fraction": [1, 0]}]'):
        try:
            os.write(number, f"{secret} 0 {values}\\n{secret} 1 {values}\\n".encode())
        except OSError:
            break
def f(x): return answers[0]
""",
        ],
        ids=["equal", "an equal int", "an equal list", "exit", "_exit", "compile", "eval", "operator", "frames"],
    )
    @pytest.mark.parametrize("test", ["assert f(1) == 'the-right-answer'", "assert 'the-right-answer' == f(1), 'no'"])
    def test_a_value_is_compared_where_the_code_is_not(self, code, test):
        graded = sandbox.grade_asserts(code, [test, "x = f(1)\nassert x == ['the-right-answer', 5]"])
        assert graded.passed == (False, False), graded.results

    def test_values_are_equal_as_in_python(self):
        code = """
import collections, decimal, enum, fractions
Pair = collections.namedtuple("Pair", "a b")
class Colour(enum.IntEnum):
    RED = 1
values = {
    "tuple": Pair(1, 2), "dict": collections.Counter("aab"), "int": Colour.RED, "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 4), "bytes": bytearray(b"a"), "set": frozenset({1, (2, "é")}), "text": "\\udc80\\n",
    "nested": [{"a": (None, True, 1.5)}, {}], "complex": 1 + 2j, "large": 10 ** 400, "many": list(range(20000)),
}
truth = True
def numpy_numbers():
    import numpy
    return [numpy.int64(3), numpy.float32(0.5), numpy.bool_(True)]
"""
        right = {
            "tuple": "(1, 2)", "dict": "{'b': 1, 'a': 2}", "int": "1.0", "decimal": "1.5", "fraction": "0.25",
            "bytes": "b'a'", "set": "{(2, 'é'), 1}", "text": "'\\udc80\\n'", "nested": "[{'a': (None, 1, 1.5)}, {}]",
            "complex": "1 + 2j", "large": str(10**400), "many": str(list(range(20000))),
        }  # fmt: skip
        wrong = {
            "tuple": "[1, 2]", "dict": "{'a': 2}", "int": "2", "decimal": "1.4", "fraction": "0.2", "bytes": "'a'",
            "set": "[1, (2, 'é')]", "text": "'x'", "nested": "[]", "complex": "1", "large": "1", "many": "[]",
        }  # fmt: skip
        tests = [f"assert values[{name!r}] == {value}" for name, value in [*right.items(), *wrong.items()]]
        more = ["assert numpy_numbers() == [3, 0.5, True]", "assert values.get('x') is None", "assert 1 == 1"]
        more += ["y = 2\nassert values['int'] + y == 3, y\nassert y > 1", "assert values['tuple'] == Pair(1, 2)"]
        more += ["assert truth is True", "assert truth == 1", "assert numpy_numbers()[2] == True"]
        no = ["assert 1 == 2", "x =", "assert y", "assert values['int'] is True", "assert numpy_numbers()[2] is True"]
        limits = Limits(seconds=60)
        passed = sandbox.grade_asserts(code, [*tests, *more, *no], limits=limits).passed
        assert passed == (True,) * len(right) + (False,) * len(wrong) + (True,) * len(more) + (False,) * len(no)

    def test_statements_see_a_module(self):
        """Data classes with annotations that are text, and pickle, look their class up in the module that it names."""
        code = """
from __future__ import annotations
import pickle
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def copied(x):
    return pickle.loads(pickle.dumps(Point(x)))
"""
        graded = sandbox.grade_asserts(code, ["assert copied(3) == Point(3)"])
        assert graded.passed == (True,), graded.results

    def test_no_tests_are_an_error(self):
        with pytest.raises(ValueError, match="no tests"):
            sandbox.grade_outputs("", [])

    def test_many_at_once_on_an_event_loop(self):
        async def main():
            return await asyncio.gather(
                *(sandbox.grade_outputs_async("print(int(input()) * 2)", [(str(n), str(2 * n))]) for n in range(8)),
                sandbox.grade_asserts_async("x = 1", ["assert x == 1", "assert x == 2"]),
            )

        shares = [graded.share for graded in asyncio.run(main())]
        assert shares == [1.0] * 8 + [0.5]


class TestTurns:
    def test_at_most_so_many_at_once(self):
        """Three places: while three are taken a fourth waits, and one that has given up is passed over."""
        turns = sandbox._Turns(3)
        first = [turns.ask() for _ in range(5)]
        assert [turn.done() for turn in first] == [True, True, True, False, False]
        turns.give_back(first[3])
        turns.give_back(first[0])
        assert first[4].done()
        turns.change(-1)
        last = turns.ask()
        turns.give_back(first[1])
        assert not last.done()
        turns.give_back(first[2])
        assert last.done()

    def test_waiting_does_not_count(self, monkeypatch):
        monkeypatch.setattr(sandbox, "_turns", sandbox._Turns(1))
        results = []
        code = "import time; time.sleep(1)"
        threads = [
            threading.Thread(target=lambda: results.append(sandbox.run_python(code, limits=Limits(seconds=10))))
            for _ in range(3)
        ]
        before = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - before >= 3
        assert all(result.ok for result in results)


def processes_with(marker):
    """Whose last argument it is."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(f"\0{marker}\0".encode()):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
class TestEnds:
    """Whoever goes, nothing stays."""

    def command(self, marker):
        return [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", marker]

    def test_a_cancelled_run_ends(self, level):
        marker = f"sandbox-cancelled-{os.getpid()}-{level}"

        async def main():
            task = asyncio.create_task(sandbox.run_async(self.command(marker), limits=Limits(seconds=600)))
            while not processes_with(marker):
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(asyncio.wait_for(main(), patience(60)))
        assert processes_with(marker) == []

    @pytest.mark.parametrize("victim", ["caller", "watcher"])
    def test_a_killed_process_takes_the_run_with_it(self, level, victim, tmp_path):
        if victim == "watcher" and level != Level.NAMESPACES:
            pytest.skip("there the first process ends, and what it has started is found by nobody")
        marker = f"sandbox-{victim}-{os.getpid()}-{level}"
        program = (
            "import sys, json; from openrlhf.utils import sandbox; "
            f"sandbox._probed = lambda: sandbox._Machine(sandbox.Level({int(level)}), {{}}); "
            "sandbox.run(json.loads(sys.argv[1]), limits=sandbox.Limits(seconds=600))"
        )
        caller = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(self.command(marker))],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert wait_until(lambda: processes_with(marker) != [], patience(60))
            (inner,) = processes_with(marker)
            watcher = caller.pid if victim == "caller" else grandparent(inner)
            os.kill(watcher, signal.SIGKILL)
            assert wait_until(lambda: inner not in processes_with(marker), patience(30))
            if victim == "caller":
                assert wait_until(lambda: list(tmp_path.iterdir()) == [], patience(30))
        finally:
            caller.kill()
            caller.wait()


# A kernel that does not list the children of a process, and a /proc that hides the first process inside (`hidepid`).
HIDING = """
import builtins, os
worker = sandbox_worker
worker.lists_children = lambda process: False
worker.children_of = None
def opened(path, *args, **named):
    if str(path).endswith("/stat") and not str(path).startswith(f"/proc/{os.getpid()}/"):
        with builtins.open(path[: -len("stat")] + "cmdline", "rb") as file:
            if b"sandbox_worker" in file.read():
                raise PermissionError(path)
    return builtins.open(path, *args, **named)
worker.open = opened
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
class TestHiddenProcesses:
    @pytest.fixture
    def worker(self, monkeypatch):
        def change(code):
            *before, program, folder = sandbox.COMMAND
            program = program.replace("sandbox_worker.main()", f"exec({code!r}); sandbox_worker.main()")
            monkeypatch.setattr(sandbox, "COMMAND", (*before, program, folder))

        return change

    def test_nothing_stays(self, level, worker):
        worker(HIDING)
        marker = f"sandbox-hidden-{os.getpid()}-{level}"
        command = [sys.executable, "-I", "-S", "-c", "import os, time; os.fork() and os.fork(); time.sleep(60)", marker]
        result = sandbox.run(command, limits=Limits(seconds=0.5))
        assert (result.limit, result.exit_status) == (Limit.TIME, None)
        assert processes_with(marker) == []

    def test_memory_of_all_together_is_counted(self, level, worker):
        worker(HIDING)
        code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(b"x") * (60 << 20)
        time.sleep(30)
        os._exit(0)
time.sleep(30)
"""
        assert sandbox.run_python(code, limits=Limits(seconds=60, memory=160 << 20)).limit == Limit.MEMORY

    def test_no_proc_is_refused(self, level, worker):
        """Rather than that what a run has started stays."""
        worker("import os; os.readlink = lambda path: '1'")
        with pytest.raises(SandboxError, match="/proc is not there"):
            sandbox.run_python("print(1)")


def grandparent(process):
    for _ in range(2):
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return process


def test_the_documentation_names_every_limit():
    text = (REPOSITORY / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name in Limits.__dataclass_fields__:
        assert re.search(rf"`{name}`", text), name
