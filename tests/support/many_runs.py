"""Trains one command line after another in the processes that a launcher started: starting them takes longest.

    torchrun --nproc-per-node 2 many_runs.py runs.json

`runs.json` is a list of [command, word, …]. All have to end well.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch.distributed as dist


def main() -> int:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # once: a second group would meet at the addresses of the first
    for command, *words in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        if status := import_module(f"openrlhf.cli.{command}").main(words):
            print(f"{command} {' '.join(words)} ended with {status}", file=sys.stderr)
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
