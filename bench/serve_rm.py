"""Queries per second of `serve_rm`, batched and one query per forward: `python -m bench.serve_rm [--write]`.

One server process after the other, the same load: 64 connections, each sending its next request, of one query, when it
has the answer to the last. `--batch_size 1` is the same server without batching; one connection is a caller who asks
one thing at a time. On CUDA the shape of Qwen2.5-0.5B in bf16, on CPU a small one in fp32; random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import torch
import transformers as hf

from bench.results import write_section
from openrlhf.demo.model import write_model

CONNECTIONS = 64
LENGTHS = (8, 48)
"""Tokens of a query, uniform between these."""


def write_reward_model(folder: Path) -> str:
    """A random classifier and the demo's tokenizer, a token per character; what it is, in words."""
    write_model(folder, seed=0)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    cuda = torch.cuda.is_available()
    hidden, intermediate, layers, heads, key_heads = (896, 4864, 24, 14, 2) if cuda else (64, 192, 4, 4, 2)
    config = hf.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = hf.Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    count = sum(p.numel() for p in model.parameters())
    where = f"{torch.cuda.get_device_name()}, bf16" if cuda else f"one thread of {platform.machine()}, fp32"
    return f"a Qwen2 of {count / 1e6:.3g}M parameters (hidden {hidden}, {layers} layers), {where}"


class Server:
    def __init__(self, model: Path, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf.cli.serve_rm", "--reward_pretrain", str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found.group()
            if line == "INFO ready\n":
                return
        raise RuntimeError("the server did not start")

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


class Load(NamedTuple):
    """What a server did under a load."""

    queries_per_second: float
    cpu_seconds_per_query: float
    """Of the server process: less disturbed by others on the machine than the rate."""


async def load(server: Server, *, connections: int, seconds: float) -> Load:
    """After a second of warming up."""
    draw = random.Random(0)
    answered = 0

    async def caller(session: aiohttp.ClientSession, end: float) -> None:
        nonlocal answered
        while time.perf_counter() < end:
            text = "".join(draw.choices("0123456789", k=draw.randint(*LENGTHS)))
            async with session.post(f"{server.url}/get_reward", json={"query": [text]}) as response:
                response.raise_for_status()
                await response.read()
            answered += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for period in (1.0, seconds):
            answered, cpu, start = 0, server.cpu_seconds(), time.perf_counter()
            await asyncio.gather(*(caller(session, start + period) for _ in range(connections)))
            took = time.perf_counter() - start
    return Load(answered / took, (server.cpu_seconds() - cpu) / answered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    loads: dict[str, list[Load]] = {}
    with tempfile.TemporaryDirectory() as folder:
        what = write_reward_model(Path(folder))
        with Server(Path(folder)) as batched, Server(Path(folder), "--batch_size", "1") as single:
            for _ in range(options.repeats):
                for name, server, connections in (
                    ("one caller at a time", batched, 1),
                    (f"{CONNECTIONS} callers, one query per forward", single, CONNECTIONS),
                    (f"{CONNECTIONS} callers, batched", batched, CONNECTIONS),
                ):
                    seen = asyncio.run(load(server, connections=connections, seconds=options.seconds))
                    loads.setdefault(name, []).append(seen)
                    print(f"{name}: {seen.queries_per_second:.0f} queries/s", flush=True)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, client on the same machine"
    rows = [
        f"{what[0].upper()}{what[1:]}; requests of one query of {LENGTHS[0]} … {LENGTHS[1]} tokens; {machine}; "
        f"torch {torch.__version__}; median of {options.repeats} × {options.seconds:g} s, taking turns. "
        "Repeat: `python -m bench.serve_rm --write`.",
        "",
        "| | queries/s | batched / this | server CPU per query |",
        "|---|---:|---:|---:|",
    ]
    rates = {name: statistics.median(seen.queries_per_second for seen in some) for name, some in loads.items()}
    for name, some in loads.items():
        cpu = statistics.median(seen.cpu_seconds_per_query for seen in some)
        rows.append(f"| {name} | {rates[name]:.0f} | {max(rates.values()) / rates[name]:.2f}× | {cpu * 1e3:.1f} ms |")
    body = "\n".join(rows)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Reward server", body=body)


if __name__ == "__main__":
    main()
