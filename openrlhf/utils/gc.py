"""Python's garbage collector, and the objects that it need not scan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """While open, the garbage collector does not scan the objects that exist already.

    Libraries and models are a million objects. A full collection scans them all, in the middle of generation, and takes
    as long as everything else that this process does for a round of 512 samples.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
