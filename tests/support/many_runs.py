"""Trains one command line after another in the processes that a launcher started: starting them takes longest.

    torchrun --nproc-per-node 2 many_runs.py runs.json

`runs.json` is a list of [command, word, …]. The first that does not end well ends this; how many did is in
`runs.json.done`.
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
    listed = Path(sys.argv[1])
    for done, (command, *words) in enumerate(json.loads(listed.read_text(encoding="utf-8")), start=1):
        if status := import_module(f"openrlhf.cli.{command}").main(words):
            print(f"{command} {' '.join(words)} ended with {status}", file=sys.stderr)
            return status
        if dist.is_initialized():
            dist.barrier()  # done is what every rank has done
        if os.environ.get("RANK", "0") == "0":
            listed.with_name(f"{listed.name}.done").write_text(str(done), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
