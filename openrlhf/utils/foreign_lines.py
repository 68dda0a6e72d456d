"""Log lines of other libraries on the terminal: all errors, each warning once. Imports the standard library only."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import TextIO

LIBRARIES = (
    "accelerate",
    "asyncio",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "DeepSpeed",
    "filelock",
    "fsspec",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "peft",
    "ray",
    "torch",
    "transformers",
    "urllib3",
    "vllm",
)
"""The first part of their loggers' and modules' names. All lines of other loggers, ours and the user's, are shown."""

_IDLE = {
    "bitsandbytes": (
        # It concerns a layout of 4-bit weights that is not used here.
        "Failed to load CPU gemm_4bit_forward",
    ),
    "transformers": (
        # A setting in many models' files that transformers does not follow, to their advantage.
        "Ignoring clean_up_tokenization_spaces=True",
    ),
    "vllm": (
        # It comes at every push, for what a push never sends: tables of sines and cosines, a head that is tied to the
        # embeddings, a frozen tower. A layer that should have got something ends the push with an error of ours.
        r"\w+: Failed to load weights",
        # Weights come in the policy's order.
        r"Allocating .* of device memory to buffers to load",
        # It comes with the first request of each kind.
        "Triton kernel JIT compilation during inference",
        "No FlashInfer autotune cache entries found",
        # These follow from our own arguments.
        "Using custom scheduler class",
        "Enforce eager set",
        "Inductor compilation was disabled",
        "Passing raw prompts to InputProcessor is deprecated",
        r"max_num_batched_tokens \(\d+\) exceeds max_num_seqs",
        r"Casting torch\.\w+ to torch\.",
        # It comes with an engine that is ended while it starts.
        r"\[shutdown\] Process manager: force killing",
        # These come with a push between two turns of an episode.
        r"Resetting the (multi-modal|encoder) cache when requests are",
        # These come with an engine on a CPU.
        r"Triton is (not )?installed",
        "Model Runner V2 requires Triton",
        "Reset SSM cache type",
        r"\w+ is not found in LD_PRELOAD",
    ),
}
"""By library, the beginnings of warnings that mean nothing in our runs and that a user cannot do anything about."""

IDLE_WARNINGS = (
    # Adapters of experts are one parameter to PEFT, and have patterns by the names that they have in files.
    "The following alpha_pattern keys did not match",
    "The following rank_pattern keys did not match",
    # multiprocessing takes care of what an engine leaves that was ended while it started.
    "resource_tracker",
    # The functions of transformers that it is about give the same for the same arguments.
    "Dynamo detected a call to a `functools.lru_cache`-wrapped function",
)
"""The same of Python's own warnings, which do not go through loggers."""


class ForeignLines(logging.Filter):
    """Lets all errors of other libraries pass, and each of their warnings once, except for those in `_IDLE`."""

    def __init__(self, *, level: int = logging.WARNING) -> None:
        """`level`: lines of other libraries below this level are left out."""
        super().__init__()
        self._level = level
        self._said: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        library = record.name.partition(".")[0]
        if library not in LIBRARIES or record.levelno >= logging.ERROR:
            return True
        text = record.getMessage()
        if record.levelno < self._level or any(re.match(idle, text) for idle in _IDLE.get(library, ())):
            return False
        # This is the text before its numbers are put in: the same warning with another count is no new warning.
        said = (record.name, str(record.msg))
        if said in self._said:
            return False
        self._said.add(said)
        return True


def start_logging(*, is_main: bool = True, stream: TextIO | None = None) -> None:
    """Write log lines to `stream` (stderr): ours from INFO on, those of other libraries through `ForeignLines`. Where
    logging is set up already, it stays as it is.

    A process that is not the main one logs its own warnings and the errors of libraries. Their warnings are the same in
    all processes, so only the main one shows them.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.addFilter(ForeignLines(level=logging.WARNING if is_main else logging.ERROR))
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", handlers=[handler])
    _ignore_deprecations()


def filter_unhandled() -> None:
    """Filter the lines that Python prints in a process that has not set up logging, in the same way."""
    if logging.lastResort is not None and not logging.lastResort.filters:
        logging.lastResort.addFilter(ForeignLines())
    _ignore_deprecations()


def _ignore_deprecations() -> None:
    """Hide deprecation warnings of libraries and what means nothing. A user sees those of their own files, and all with
    `python -W`."""
    if not sys.warnoptions:
        for beginning in IDLE_WARNINGS:
            warnings.filterwarnings("ignore", message=re.escape(beginning))
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"({'|'.join(LIBRARIES)})(\.|$)")
