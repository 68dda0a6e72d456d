"""Who holds an event loop, and whether it blocks it."""

import asyncio
import time

import pytest

from openrlhf.agents import host_clock
from openrlhf.agents.host_clock import LoopWatch, WatchedLoop, current_function


def blocked_by(step) -> list[str]:
    """The functions that block when `step` runs on a watched loop as a users' function."""
    blamed = []

    async def users_code():
        step()

    async def main():
        current_function.set(users_code)
        await asyncio.create_task(users_code())

    loop = WatchedLoop(LoopWatch(on_block=lambda function: blamed.append(function.__name__)))
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    return blamed


def test_sleeping_blocks():
    assert blocked_by(lambda: time.sleep(0.15)) == ["users_code"]


@pytest.mark.skipif(not hasattr(host_clock.resource, "RUSAGE_THREAD"), reason="waits are not counted here")
def test_a_core_that_others_use_does_not(monkeypatch):
    """Ten seconds pass in which the thread neither computes nor waits: the machine ran something else."""
    ahead = 0.0
    clock = time.monotonic
    monkeypatch.setattr(host_clock.time, "monotonic", lambda: clock() + ahead)

    def step():
        nonlocal ahead
        ahead += 10.0

    assert blocked_by(step) == []
