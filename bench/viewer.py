"""The viewer with 100,000 samples: seconds until rows are seen, until a filter has answered, until a sample is open.

    python -m bench.viewer                     # makes the run in a temporary folder, about 450 MB
    python -m bench.viewer --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.viewer --samples 20000     # a smaller one
    python -m bench.viewer --run F             # a folder of your own, or one that this bench made with --keep F

Times are the browser's, from the navigation or the key that was typed to the frame in which the answer is there; the
150 ms are in them for which the page waits whether another key follows. The server begins with nothing indexed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.results import write_section
from openrlhf.observability.jsonl import JsonLinesWriter
from openrlhf.viewer.server import ViewServer, serve

WORDS = ("the", "of", "a", "step", "number", "then", "sum", "left", "right", "so", "we", "take", "again", "because")
WORDS += ("answer", "check", "carry", "two", "three", "line")
QUERIES = {
    "`is:failed`": "is:failed",
    "`step:100-110 reward>0.9`": "step:100-110 reward>0.9",
    "a word of one sample": "needle-in-77.",
    "a word of every sample": "because",
    "two phrases": '"so we" "check carry"',
}
ROWS = """async () => {
  while (!document.querySelector('.row:not(.waiting)')) await new Promise(requestAnimationFrame);
  return performance.now() / 1000;
}"""
INDEXED = """async () => {
  while (/reading/.test(document.querySelector('#found').textContent)) await new Promise(requestAnimationFrame);
  return performance.now() / 1000;
}"""
FILTER = """async (query) => {
  const input = document.querySelector('.list input[type=search]'), began = performance.now();
  input.value = query;
  input.dispatchEvent(new Event('input'));
  while (document.querySelector('main').dataset.shown !== query) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return [(performance.now() - began) / 1000, document.querySelector('#found').textContent];
}"""
JUMP = """async () => {
  const table = document.querySelector('.table'), began = performance.now();
  table.scrollTop = table.scrollHeight / 2;
  await new Promise(requestAnimationFrame);
  while (document.querySelector('.row.waiting')) await new Promise(requestAnimationFrame);
  return (performance.now() - began) / 1000;
}"""
OPEN = """async () => {
  const began = performance.now(), row = [...document.querySelectorAll('.row')].at(-9);
  const before = document.querySelector('.group-head h1')?.textContent;
  row.click();
  while (document.querySelector('.group-head h1')?.textContent === before || !document.querySelector('.sample')) {
    await new Promise(requestAnimationFrame);
  }
  return (performance.now() - began) / 1000;
}"""


def make_run(folder: Path, samples: int) -> None:
    """Steps of 100 groups of 4 samples, with answers of about 250 words."""
    random.seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("actor:\n  model_name_or_path: bench/viewer\n")
    metrics = JsonLinesWriter(folder / "metrics.jsonl")
    with (folder / "rollouts.jsonl").open("w") as file:
        for number in range(samples):
            step, group, sample = number // 400 + 1, number // 4, number % 4
            if number % 400 == 0:
                metrics.write({"step": step, "kind": "train", "time": 9.0 * step, "reward": 0.5, "kl": 0.01})
            failed = number % 997 == 0
            prompt = f"Question {group}: what is {group * 37} + {group * 11}?"
            answer = " ".join([*random.choices(WORDS, k=random.randint(100, 400)), f"needle-in-{number}."])
            record = {
                "step": step,
                "prompt_ordinal": group,
                "sample": sample,
                "prompt": prompt,
                "response": answer,
                "label": str(group * 48),
                "reward": None if failed else round(random.random(), 3),
                "score": None,
                "response_length": len(answer) // 5,
                "outcome": "failed" if failed else "finished",
                "error": "Traceback (most recent call last):\nTimeoutError: 60 s" if failed else "",
                "choice": ("best", "typical", "typical", "worst")[group % 4],
                "group_reward": round(random.random(), 3),
                "group_samples": 8,
                "turns": [
                    {"role": "user", "action": False, "text": prompt, "tokens": 20},
                    {
                        "role": "assistant",
                        "action": True,
                        "text": answer,
                        "tokens": 300,
                        "reward": 0.5,
                        "versions": [1],
                    },
                ],
            }
            file.write(json.dumps(record) + "\n")
    metrics.close()


def measure(folder: Path) -> list[tuple[str, ...]]:
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        raise SystemExit("bench.viewer needs a browser: apt-get install chromium")
    listener = socket.create_server(("127.0.0.1", 0))
    server = ViewServer([folder], token="bench")
    threading.Thread(target=serve, args=(server, listener), daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/bench/"
    found: list[tuple[str, ...]] = []
    used = time.process_time()

    def tell(what: str, seconds: float, more: str = "") -> None:
        nonlocal used
        now = time.process_time()
        found.append((what, f"{seconds:.2f}", f"{now - used:.2f}", more))
        print(*found[-1], sep=" | ", flush=True)
        used = now

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        browser.new_page().goto(f"{address}static/icon.svg")  # the browser's own start is not the page's
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(f"{address}#view=rollouts", wait_until="commit")
        tell("rows are seen, nothing indexed yet", page.evaluate(ROWS))
        tell("all samples are indexed", page.evaluate(INDEXED))
        for name, query in QUERIES.items():
            seconds, said = page.evaluate(FILTER, query)
            tell(f"filter: {name}", seconds, said)
        page.evaluate(FILTER, "")
        tell("jump to the middle of the table", page.evaluate(JUMP))
        tell("open a group", page.evaluate(OPEN))
        again = browser.new_page(viewport={"width": 1400, "height": 900})
        again.goto(f"{address}#view=rollouts", wait_until="commit")
        tell("rows are seen, all indexed", again.evaluate(ROWS))
        browser.close()
    return found


def section(found: list[tuple[str, ...]], samples: int, size: int, browser: str) -> str:
    rows = "\n".join(f"| {' | '.join(row)} |" for row in found)
    load = os.getloadavg()[0]
    return f"""\
{samples:,} samples in groups of 4, {size / 1e6:,.0f} MB of rollouts.jsonl; {browser}, {os.cpu_count()} cores, load \
{load:.1f}. Seconds of the browser, with the 150 ms for which the search waits for a further key, and CPU \
seconds of the server's process, in which the bench runs too. One run. Repeat: \
`python -m bench.viewer`.

| | s | CPU s | found |
|---|---:|---:|---|
{rows}
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--run", type=Path, help="measure this folder")
    parser.add_argument("--keep", type=Path, help="make the run in this folder, and leave it there")
    parser.add_argument("--write", action="store_true", help="rewrite the section of bench/RESULTS.md")
    given: Any = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-viewer-") as temporary:
        folder = given.run or given.keep or Path(temporary) / "run"
        if given.run is None:
            began = time.monotonic()
            make_run(folder, given.samples)
            print(f"{given.samples:,} samples written in {time.monotonic() - began:.0f} s", file=sys.stderr)
        found = measure(folder)
        if given.write:
            size = (folder / "rollouts.jsonl").stat().st_size
            said = subprocess.run(["chromium", "--version"], capture_output=True, text=True, check=False).stdout
            browser = " ".join(said.split()[:2]) or "Chromium"
            text = section(found, given.samples, size, browser)
            write_section(Path(__file__).with_name("RESULTS.md"), title="The viewer", body=text)


if __name__ == "__main__":
    main()
