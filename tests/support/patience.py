"""Limits of seconds that only what hangs exceeds."""

import os

LEAST = 20.0


def patience(seconds: float) -> float:
    """So long, and never less than `LEAST`; more in proportion where more processes want to run than there are cores.

    It tells what waits for ever, or for a deadline of a minute, from what does not. What is to be told from something
    that takes a few seconds has to show it otherwise: by what was done, or in which order.
    """
    return max(LEAST, seconds) * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
