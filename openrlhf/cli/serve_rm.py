"""A reward model behind HTTP: `python -m openrlhf.cli.serve_rm --help`."""

from collections.abc import Sequence

from openrlhf.config import ServeRMConfig
from openrlhf.config.parser import enter


def main(argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status. `name`: what the user called it by."""
    return enter("serve_rm", argv, _run, name=name)


def _run(config: ServeRMConfig) -> int | None:
    from openrlhf.runs.reward_serving import serve

    return serve(config)


if __name__ == "__main__":
    raise SystemExit(main())
