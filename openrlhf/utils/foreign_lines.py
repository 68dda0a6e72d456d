"""What other libraries may say on a run's terminal: errors, and a warning once. Imports the standard library only."""

from __future__ import annotations

import logging
import re
import sys
import warnings

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
"""First names of their loggers and modules. Other names are ours or the user's, whose lines are all shown."""

_IDLE = {
    "bitsandbytes": (
        # For a layout of 4-bit weights that ours never have.
        "Failed to load CPU gemm_4bit_forward",
    ),
    "transformers": (
        # A setting in many models' files that transformers does not follow, to their advantage.
        "Ignoring clean_up_tokenization_spaces=True",
    ),
    "vllm": (
        # Tables of sines and cosines, which no file holds, and a head that is tied to the embeddings: no push sends
        # them, so at every push.
        r"\w*(RotaryEmbedding|LMHead): Failed to load weights",
        # Weights come in the policy's order.
        r"Allocating .* of device memory to buffers to load",
        # The first of each kind of request.
        "Triton kernel JIT compilation during inference",
        "No FlashInfer autotune cache entries found",
        # What follows from our own arguments.
        "Enforce eager set",
        "Inductor compilation was disabled",
        "Passing raw prompts to InputProcessor is deprecated",
        # An engine on a CPU.
        r"Triton is (not )?installed",
        "Model Runner V2 requires Triton",
        "Reset SSM cache type",
        r"\w+ is not found in LD_PRELOAD",
    ),
}
"""Beginnings of warnings, by library, that mean nothing in our runs and that no user can do anything about."""


class ForeignLines(logging.Filter):
    """Of other libraries, lets pass: every error; of warnings, each text once, and none that is known to be idle."""

    def __init__(self, *, level: int = logging.WARNING) -> None:
        """`level`: what they say below it is left out."""
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
        # The text before its numbers are put in: a count or a time makes no other warning of it.
        said = (record.name, str(record.msg))
        if said in self._said:
            return False
        self._said.add(said)
        return True


def start_logging(*, is_main: bool = True) -> None:
    """Lines go to stderr: ours with what they inform about, those of other libraries as `ForeignLines` has them.

    A process that is not the main one says what is wrong with itself; warnings of libraries, which are the same in all,
    are the main one's.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(ForeignLines(level=logging.WARNING if is_main else logging.ERROR))
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", handlers=[handler])
    _ignore_deprecations()


def filter_unhandled() -> None:
    """For a process that has set no logging up, or not yet: what Python then prints of warnings is filtered alike."""
    if logging.lastResort is not None and not logging.lastResort.filters:
        logging.lastResort.addFilter(ForeignLines())
    _ignore_deprecations()


def _ignore_deprecations() -> None:
    """They are for whoever maintains the library. A user's own files are told, and who asks Python for all of them."""
    if not sys.warnoptions:
        for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"({'|'.join(LIBRARIES)})(\.|$)")
