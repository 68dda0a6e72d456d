"""Programming: run the answer's Python code against the tests of the label, and count those that pass.

    openrlhf rl --reward.remote_url examples/python/code_reward_func.py --data.label_key tests …

The label is a list of tests (or one string, a test per line), each a statement that raises when the code is wrong:

    {"input": "Write add(a, b).", "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}

The code is the last ```python block of the answer. It runs in a process of its own: `python -I` in an empty folder that
is removed afterwards, without our environment variables, with limits on time, memory, file size, open files and
processes, and without a network where Linux lets us (`unshare`: most machines do, many containers do not). That
stops accidents and laziness, not an attacker: for code you would not run under your own account, use a container or a
virtual machine and ask it over HTTP (docs/rewards.md).
"""

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

SECONDS = 5
"""For one answer, all its tests together."""
MEMORY = 512 << 20
FILE_BYTES = 1 << 20
OPEN_FILES = 64
PROCESSES = 0
"""That the code may start. (Counted per user by the kernel, and not at all for root.)"""
AT_ONCE = asyncio.Semaphore(os.cpu_count() or 1)

CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# Reads {"code", "tests"} from stdin. Results go to a private descriptor, so that the code cannot print them, and come
# test by test, so that one that never ends does not take the others with it. A test sees what the code defined, and
# nothing that another test did to it by assignment.
RUNNER = """
import json, os, resource, sys
job = json.load(sys.stdin)
results = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for name, value in job["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
defined = {"__name__": "answer"}
exec(compile(job["code"], "answer.py", "exec"), defined)
for test in job["tests"]:
    try:
        exec(compile(test, "test", "exec"), dict(defined))
    except BaseException:
        os.write(results, b"0")
    else:
        os.write(results, b"1")
"""


def extract_code(response):
    """The last fenced block, or None."""
    blocks = CODE.findall(response)
    return blocks[-1] if blocks else None


def tests_of(label):
    """The label as a list of statements."""
    tests = label if isinstance(label, list) else [line for line in str(label).splitlines() if line.strip()]
    if not tests:
        raise ValueError("the label has no tests")  # a made-up reward would be worse than none
    return [str(test) for test in tests]


@functools.cache
def prefix():
    """What cuts a process off from the network, if it is allowed here."""
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        return command
    print("code_reward_func.py: no `unshare` here: the answers' code could use the network", file=sys.stderr)
    return []


async def passed(code, tests):
    """How many tests pass."""
    limits = {
        "RLIMIT_CPU": SECONDS + 1,
        "RLIMIT_AS": MEMORY,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_NPROC": PROCESSES,
        "RLIMIT_CORE": 0,
    }
    job = json.dumps({"code": code, "tests": tests, "limits": limits}).encode()
    async with AT_ONCE:
        with tempfile.TemporaryDirectory(prefix="answer-", ignore_cleanup_errors=True) as folder:
            process = await asyncio.create_subprocess_exec(
                *prefix(),
                *(sys.executable, "-I", "-c", RUNNER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            )
            results = b""
            try:
                async with asyncio.timeout(SECONDS):
                    process.stdin.write(job)
                    process.stdin.close()
                    while len(results) < len(tests) and (chunk := await process.stdout.read(4096)):
                        results += chunk
            except (TimeoutError, ConnectionError):
                pass  # what was passed until then counts
            finally:
                # The whole session: what the code has started goes with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    return results.count(b"1")


async def judge(response, label):
    tests = tests_of(label)
    code = extract_code(response)
    share = 0.0 if code is None else await passed(code, tests) / len(tests)
    return share, code is not None


async def reward_func(queries, prompts, labels):
    judged = await asyncio.gather(
        *(judge(query[len(prompt) :], label) for query, prompt, label in zip(queries, prompts, labels, strict=True))
    )
    shares = [share for share, _ in judged]
    return {
        "rewards": shares,
        "scores": [float(share == 1.0) for share in shares],
        "extra_logs": {"has_code": [there for _, there in judged], "tests_passed": shares},
    }
