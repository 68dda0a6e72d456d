"""Python's garbage collector, and the objects that it need not look at."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """While open, what is there already is taken to stay.

    Libraries and models are a million objects. A full collection walks them all, in the middle of generation, and takes
    as long as everything else that a round of 512 samples costs this process.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
