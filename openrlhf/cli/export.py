"""`openrlhf export RUN --to FOLDER`: a trained model as a folder that is ready for the Hub, with a model card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import USAGE_ERROR
from openrlhf.utils import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """0: written and loaded once, as a test; 1: there is no such model, or it cannot be loaded; 2: usage."""
    given = _parser().parse_args(argv)
    with interrupts.handled():
        try:
            return _run(given)
        except ConfigError as error:
            print(f"openrlhf export: error: {error}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()


def _run(given: argparse.Namespace) -> int:
    from openrlhf.checkpoint.folder import CheckpointError
    from openrlhf.checkpoint.publication import export
    from openrlhf.models.loading import ModelLoadError
    from openrlhf.utils.foreign_lines import start_logging

    start_logging()
    try:
        folder = export(
            given.source,
            given.to,
            adapter=given.adapter,
            base_model=given.base_model,
            trust_remote_code=given.trust_remote_code,
        )
    except (CheckpointError, ModelLoadError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>14,}  {path.name}", file=sys.stderr)
    print(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf export",
        usage="openrlhf export RUN|CHECKPOINT --to FOLDER [OPTIONS]",
        description="Write the model of a run as a folder that can be uploaded as it is: weights (safetensors), "
        "configuration, tokenizer, chat template and a README.md with the data, the settings, the command that "
        "repeats the run, curves, versions and the seed. Nothing private goes into it: of a local path its last part. "
        "The folder is loaded once with from_pretrained; it appears whole or not at all. Prints its path.",
        epilog="To upload it: hf upload ORG/NAME FOLDER.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="RUN|CHECKPOINT",
        help="folder of a run, a checkpoint (global_step…), or --ckpt.path",
    )
    add(
        "--to",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder to write; its name is the model's in the card",
    )
    add(
        "--adapter",
        choices=("merge", "keep"),
        default="merge",
        help="of a run with LoRA: merge the adapter into its base, or write the adapter alone (merge)",
    )
    add("--base_model", metavar="ORG/NAME", help="what the Hub calls the model that was trained, where it was a folder")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
