"""The program of a grading process: it compares answers with math-verify, one at a time.

It reads and writes lines of JSON on two private descriptors. The first request is `sys.path`; the answer is `null` or,
if the library cannot be imported, the reason. Each later request [given, truth, seconds] is answered with true or
false. The process ends when its requests end.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import IO, Any

MEMORY_BYTES = 4 << 30
"""Limit of the address space: an expression may need more memory than the machine has, long before its time is up."""


def serve(requests: IO[str], replies: IO[str]) -> None:
    """Answer until `requests` ends."""
    logging.disable(logging.CRITICAL)  # the library logs each expression it cannot read
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    # The default action, not a Python handler: a handler would wait until one long multiplication has ended. The kernel
    # ends the process, also if the process that asked is gone.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        import math_verify
    except ImportError as error:
        _reply(replies, str(error))
        return
    _reply(replies, None)
    for line in requests:
        given, truth, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.0)
        try:
            answer = _equal(math_verify, given, truth)
        except Exception:  # answers that cannot be read or compared are not equal; MemoryError counts as well
            answer = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, answer)


def _equal(library: Any, given: str, truth: str) -> bool:
    # Without these settings the library would pick some number out of a text that it cannot read as a whole.
    config = library.LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
    wanted, got = (
        library.parse(
            f"\\boxed{{{text}}}", extraction_config=[config], fallback_mode="no_fallback", parsing_timeout=None
        )
        for text in (truth, given)
    )
    # The limits are the caller's: the library's own use signals, which only work in a main thread.
    return bool(wanted and got) and library.verify(wanted, got, timeout_seconds=None)


def _reply(replies: IO[str], value: Any) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends with its requests
    requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path[:] = json.loads(requests.readline())
    serve(requests, replies)


if __name__ == "__main__":
    main()
