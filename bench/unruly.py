"""32 calls in one host, 8 of which crash or hang: `python -m bench.unruly [--write]`.

Each call asks six times for an answer that takes 0.3 to 0.9 s and works for 0.1 s after it. After its third answer an
unruly one ends the process, sleeps for ever in a thread, or holds the interpreter lock. The service takes 2 s to load,
as one that imports transformers does; a call may take 2 s of its own time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import re
import tempfile
import time
from pathlib import Path

from bench.results import write_section
from openrlhf.agents.host import HostProcess
from openrlhf.agents.host_worker import ask, run_user

CALLS, UNRULY, ASKS = 32, 8, 6
KINDS = {"crash": "end the process", "hang": "hang in a thread", "hold": "hold the interpreter lock"}


class Service:
    def __init__(self) -> None:
        time.sleep(2.0)

    async def play(self, number: int, lives: str, kind: str | None) -> None:
        with open(lives, "a") as file:
            file.write(f"{number} ")
        for turn in range(ASKS):
            await ask("answer", number, turn)
            await run_user(
                _misbehave if kind is not None and turn == 2 else _work, *([kind] if turn == 2 and kind else [])
            )


def _work() -> None:
    time.sleep(0.1)


def _misbehave(kind: str) -> None:
    time.sleep(0.1)
    if kind == "crash":
        os._exit(3)
    if kind == "hold":
        re.match(r"(a+)+$", "a" * 64 + "b")
    time.sleep(600)


async def measure(kinds: list[str]) -> tuple[float, float, float]:
    """Seconds; lives and asks of a healthy call, on average."""
    asked: collections.Counter[int] = collections.Counter()

    async def answer(name: str, number: int, turn: int) -> None:
        asked[number] += 1
        await asyncio.sleep(random.Random(number * ASKS + turn).uniform(0.3, 0.9))

    healthy = [number for number in range(CALLS) if number % (CALLS // UNRULY)]
    with tempfile.TemporaryDirectory() as folder:
        lives = Path(folder, "lives")
        host = HostProcess("bench.unruly:Service", name="bench", max_concurrency=CALLS, answer=answer)
        await host.start()
        began = time.monotonic()
        calls = [
            host.call(
                "play", i, str(lives), None if i in healthy else kinds[i * UNRULY // CALLS % len(kinds)], timeout=2
            )
            for i in range(CALLS)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        seconds = time.monotonic() - began
        await host.close()
        assert [number for number, result in enumerate(results) if result is None] == healthy, results
        begun = collections.Counter(map(int, lives.read_text().split()))
    return seconds, *(sum(counter[i] for i in healthy) / len(healthy) for counter in (begun, asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    write = parser.parse_args().write
    lines = [
        f"{CALLS} calls in one host, {UNRULY} of them unruly after half of their {ASKS} answers, which take 0.6 s; "
        f"time limit and loading of a process 2 s; {os.cpu_count()} cores. Repeat: `python -m bench.unruly`.",
        "",
        f"| the unruly ones | seconds | a healthy one begins | and asks (of {ASKS}) |",
        "|---|---:|---:|---:|",
    ]
    for kinds in (["hang"], ["crash"], ["crash", "hang"], ["hold"]):
        seconds, begun, asked = asyncio.run(measure(kinds))
        lines.append(f"| {', '.join(KINDS[kind] for kind in kinds)} | {seconds:.1f} | {begun:.2f} | {asked:.2f} |")
        print(lines[-1], flush=True)
    if write:
        results = Path(__file__).with_name("RESULTS.md")
        write_section(results, title="Agents that crash or hang", body="\n".join(lines))


if __name__ == "__main__":
    main()
