"""Workers of Ray that begin with everything imported: seconds of work that one process does once, before it forks.

Ray starts each worker with the interpreter of the driver. In place of that, a program hands the worker to a server and
stays until it has ended; anything else it leaves to Python. Ray itself reads the environment of a worker when it is
imported. So it is not among what is imported before, and vLLM, which would import it, does without.

    preloaded_workers.py SOCKET

is the server. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from openrlhf.cluster.launch import Cluster, ray_cluster

IMPORTED = (
    "openrlhf.runs.ranks",
    "openrlhf.rollout.vllm.engine",
    "deepspeed",
    "peft",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.optimization",
)
RELAY = """\
#!{python} -IS
import marshal, os, socket, sys

if not sys.argv[1].endswith("default_worker.py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ))))
    server.shutdown(socket.SHUT_WR)
    server.recv(1)
"""
"""A program, so that a worker's parent has the child it waits for."""


class Interpreter(NamedTuple):
    """What Ray is to take for Python."""

    path: str
    server: int
    """The process whose children are the workers."""


@contextlib.contextmanager
def preloaded_cluster(folder: Path) -> Iterator[Cluster]:
    """As `ray_cluster`, with such workers. `folder`: for what they need."""
    with contextlib.ExitStack() as held:
        python, sys.executable = sys.executable, held.enter_context(interpreter(folder)).path
        try:
            cluster = held.enter_context(ray_cluster())
        finally:
            sys.executable = python
        yield cluster


@contextlib.contextmanager
def interpreter(folder: Path) -> Iterator[Interpreter]:
    """There while open."""
    address, relay = str(folder / "workers"), folder / "python"
    command = [sys.executable, __file__, address]
    relay.write_text(RELAY.format(python=sys.executable, address=address))
    relay.chmod(0o755)
    # Without it DeepSpeed says on stdout that it has found no GPU, before "ready".
    quiet = os.environ | {"DS_ACCELERATOR": "cpu"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield Interpreter(str(relay), server.pid)


def serve(address: str) -> socket.socket:
    """Returns in a fork alone, with who asked for it."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            asking, _ = listening.accept()
            if os.fork() == 0:
                return asking
            asking.close()
    raise SystemExit


def work(asking: socket.socket) -> None:
    """Be the worker that was asked for."""
    _, standard, _, _ = socket.recv_fds(asking, 1, 3)
    with asking.makefile("rb") as request:
        sys.argv, folder, environment = marshal.load(request)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.setsid()  # Ray may end a worker with its group
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.modules["ray"] = None
    for name in IMPORTED:
        import_module(name)
    del sys.modules["ray"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    asking = serve(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    work(asking)
