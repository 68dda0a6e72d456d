"""Grading within limits: real processes, killed and replaced."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from patience import patience
from processes import alive, wait_until

from openrlhf.utils import grade_answer, math_grading

TOWER = "9^{9^{9^{9}}}"
"""More digits than there are atoms; a plain power of Python integers never ends."""


class TestLimits:
    @pytest.fixture(autouse=True)
    def warm(self):
        assert grade_answer("x+1", "1+x")

    @pytest.mark.parametrize(
        "given", [TOWER, "9**9**9**9", "(9!)!!", r"\int_0^{10} \frac{\sin(x^{x^x})}{\log(x+2)^{x}} dx"]
    )
    def test_in_any_thread(self, given):
        """The limit is half a second; ending and starting a process is allowed for generously, since machines are busy."""
        answers = []

        def grade():
            before = time.monotonic()
            answers.append((grade_answer(given, "5", timeout=0.5), time.monotonic() - before))

        thread = threading.Thread(target=grade)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive()
        ((answer, seconds),) = answers
        assert not answer
        assert seconds < patience(5.0)
        assert grade_answer("x+2", "2+x")

    def test_the_reason_is_logged(self, caplog):
        assert not grade_answer("x+" + TOWER, r"\pi", timeout=0.3)
        assert "counts as wrong" in caplog.text

    def test_from_many_threads_at_once(self):
        """Each thread has its own sum; a mixed-up answer would make one of them wrong."""
        wrong = []

        def grade(i):
            for j in range(5):
                if not grade_answer(f"x+{i}+y", f"y+x+{i}") or grade_answer(f"x+{i}", f"x+{i + j + 1}"):
                    wrong.append((i, j))

        threads = [threading.Thread(target=grade, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(math_grading._pool._idle) <= math_grading.MOST_PROCESSES

    def test_a_process_that_somebody_ended_is_replaced(self):
        for process in math_grading._pool._idle:
            os.kill(process._popen.pid, signal.SIGKILL)
        assert grade_answer("x+3", "3+x")

    def test_it_ends_with_whoever_started_it(self):
        """Killed in the middle of a comparison, which cannot be interrupted from inside."""
        code = f"""
import threading, time
from openrlhf.utils import grade_answer, math_grading
grade_answer("x+1", "1+x")
print(math_grading._pool._idle[0]._popen.pid, flush=True)
grade_answer({TOWER!r}, "5", timeout=2.0)
"""
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            pid = int(parent.stdout.readline())
            time.sleep(0.3)
            parent.kill()
        assert wait_until(lambda: not alive(pid), seconds=10)


def test_without_the_library(monkeypatch, tmp_path):
    """An import that fails there is an ImportError here, never a wrong answer."""
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such thing')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(math_grading, "_pool", math_grading._Pool())
    with pytest.raises(ImportError, match=r"needs math-verify \(no such thing\): pip install"):
        grade_answer("x+1", "1+x")
