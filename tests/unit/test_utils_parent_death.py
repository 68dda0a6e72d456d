"""Processes that end with the one they belong to."""

import os
import signal
import subprocess
import sys

from processes import alive, wait_until

PARENT = """
import subprocess, sys, time
code = "import os, sys, time; from openrlhf.utils.parent_death import exit_with_parent; exit_with_parent(int(sys.argv[1]), leaving_nothing_in=lambda: os.environ['LEFT']); print(os.getpid(), flush=True); time.sleep(60)"
MIDDLE = "import subprocess, sys, os; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
import os
subprocess.run([sys.executable, "-c", MIDDLE, str(os.getpid()), code])
"""


def test_exit_with_parent_ends_the_process_and_those_between(tmp_path):
    """The owner starts a process that starts the one which watches; neither hears from the owner that it was killed. A
    folder that they had together goes too."""
    left = tmp_path / "sockets"
    left.mkdir()
    (left / "one").touch()
    environment = os.environ | {"LEFT": str(left)}
    owner = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    middle, last = (int(owner.stdout.readline()) for _ in range(2))
    assert alive(middle)
    assert alive(last)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert wait_until(lambda: not alive(middle) and not alive(last), 10)
    assert not left.exists()
