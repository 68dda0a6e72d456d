"""Merge a LoRA adapter into its base model: `python -m openrlhf.cli.lora_combiner --help`."""

from collections.abc import Sequence

from openrlhf.config import LoraCombinerConfig
from openrlhf.config.parser import enter


def main(argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status. `name`: what the user called it by."""
    return enter("lora_combiner", argv, _run, name=name)


def _run(config: LoraCombinerConfig) -> int | None:
    from openrlhf.checkpoint.merge import merge_adapter

    return merge_adapter(config)


if __name__ == "__main__":
    raise SystemExit(main())
