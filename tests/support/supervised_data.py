"""Small files to train on: prompts of three digits, whose right answer repeats the first digit."""

import json
import random
from pathlib import Path

DIGITS = "0123456789"


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_files(folder: Path) -> Path:
    rng = random.Random(0)
    prompts = ["".join(rng.choices(DIGITS, k=3)) + ">" for _ in range(96)]
    right = [p[0] * 2 for p in prompts]
    wrong = [str((int(p[0]) + 5) % 10) * 2 for p in prompts]
    rows = list(zip(prompts, right, wrong, strict=True))
    write(folder / "sft.jsonl", [{"input": p, "output": r} for p, r, _ in rows[:64]])
    write(folder / "sft_eval.jsonl", [{"input": p, "output": r} for p, r, _ in rows[64:]])
    pairs = [{"prompt": p, "chosen": r, "rejected": w} for p, r, w in rows]
    write(folder / "pairs.jsonl", pairs[:64])
    write(folder / "pairs_eval.jsonl", pairs[64:])
    judged = [{"prompt": p, "response": a, "label": a == r} for p, r, w in rows[:32] for a in (r, w)]
    write(folder / "judged.jsonl", judged)
    return folder
