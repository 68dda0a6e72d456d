"""Looking at processes from outside."""

import time
from pathlib import Path


def living_children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until(condition, seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
