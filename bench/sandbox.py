"""What a sandboxed run costs, and a code reward against its deadline: `python -m bench.sandbox [--write]`.

The cost is CPU time of everything that a run starts, so that it means the same on a busy machine. The reward is
examples/python/code_reward_func.py in its host process, as a run calls it: 64 answers to one prompt with ten inputs
each, once all right, and once with an endless loop in every eighth.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.results import write_section
from openrlhf.rewards.base import RewardRequest
from openrlhf.rewards.function_file import FunctionFileReward
from openrlhf.utils import sandbox

SAMPLES, CASES, TIMEOUT = 64, 10, 180.0
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "python" / "code_reward_func.py"
RIGHT = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\n"
ENDLESS = "Here:\n```python\nwhile True: pass\n```\n"


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cost(repeats: int) -> dict[str, float]:
    """CPU milliseconds of a program that does nothing: without a sandbox, and at each level."""

    def measure(function: object) -> float:
        before = children_seconds()
        for _ in range(repeats):
            function()  # type: ignore[operator]
        return (children_seconds() - before) / repeats * 1e3

    bare = [sys.executable, "-I", "-c", "pass"]
    costs = {"no sandbox": measure(lambda: subprocess.run(bare, check=True))}
    highest = sandbox.level()
    for level in sorted(sandbox.Level):
        if level <= highest:
            sandbox._probed = lambda level=level: sandbox._Machine(level, {})  # type: ignore[assignment, misc]
            costs[f"`{level}`"] = measure(lambda: sandbox.run_python("pass"))
    return costs


async def judged(answers: list[str]) -> tuple[float, float]:
    """Seconds until the rewards of one prompt's samples were there, and their mean."""
    reward = FunctionFileReward(EXAMPLE, timeout=TIMEOUT)
    try:
        await reward.start()
        request = RewardRequest(
            queries=tuple(answers),
            prompts=("",) * len(answers),
            labels=([[f"{n} {n}\n", f"{2 * n}\n"] for n in range(CASES)],) * len(answers),
            name="the prompt",
        )
        before = time.monotonic()
        rewards = await reward.score(request)
        return time.monotonic() - before, sum(one.reward for one in rewards) / len(rewards)
    finally:
        await reward.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    before = children_seconds()
    right_seconds, right = asyncio.run(judged([RIGHT] * SAMPLES))
    milliseconds = (children_seconds() - before) / SAMPLES / CASES * 1e3
    mixed = [ENDLESS if n % 8 == 0 else RIGHT for n in range(SAMPLES)]
    mixed_seconds, mixed_mean = asyncio.run(judged(mixed))
    rows = [
        f"Python {sys.version.split()[0]}, Linux {os.uname().release.split('-')[0]}, {cores} cores with a load of "
        f"{os.getloadavg()[0]:.0f} from elsewhere and here. Repeat: `python -m bench.sandbox`.",
        "",
        "| a Python program that does nothing | CPU ms |",
        "|---|---:|",
        *(f"| {name} | {used:.0f} |" for name, used in cost(options.repeats).items()),
        "",
        f"| one call of the code reward: {SAMPLES} answers × {CASES} inputs, `--reward.timeout {TIMEOUT:.0f}` "
        "| mean reward | seconds |",
        "|---|---:|---:|",
        f"| all right ({milliseconds:.0f} CPU ms for each input) | {right:g} | {right_seconds:.0f} |",
        f"| every eighth is an endless loop (10 s each, `TOGETHER`) | {mixed_mean:g} | {mixed_seconds:.0f} |",
    ]
    body = "\n".join(rows)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="The sandbox", body=body)


if __name__ == "__main__":
    main()
