"""What every command does before its own work: parse, check, refuse; errors in one line, without a traceback."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.config.errors import ConfigError, NotBuiltError
from openrlhf.config.not_implemented import refuse_unbuilt
from openrlhf.config.parser import parse
from openrlhf.config.rules import require_runnable
from openrlhf.utils import interrupts

USAGE_ERROR = 2


def enter(
    command: str, argv: Sequence[str] | None, run: Callable[[Any], int | None], *, name: str | None = None
) -> int:
    """Exit status of `command`: 2 for a configuration that cannot run, else that of `run(config)` (None = 0).

    `name`: what the user called it by, `openrlhf rl`, if it was not the module's name.
    A signal that ends it gives 128 + its number, wherever it comes: 130 for Ctrl-C, 143 for SIGTERM.
    """
    with interrupts.handled():
        try:
            config = parse(command, argv, name=name)
            require_runnable(config)
            refuse_unbuilt(config)
            return run(config) or 0
        except (ConfigError, NotBuiltError) as error:
            for line in str(error).splitlines():
                print(f"{name or command}: error: {line}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()
