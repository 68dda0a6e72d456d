"""The plot of docs/worlds_textarena.md: self-play at Nim, measured against a player that moves at random.

python docs/worlds_plot.py RUN    # the numbers of a run's folder and the picture → docs/images
python docs/worlds_plot.py        # the picture again, from the numbers kept
"""

import json
import sys
from pathlib import Path
from typing import Any

from openrlhf.observability.charts import picture
from openrlhf.observability.loggers import read_metrics

IMAGES = Path(__file__).resolve().parent / "images"
NUMBERS = IMAGES / "data" / "selfplay.json"
BEST = 5 / 6
"""Of games against the random player that a perfect one wins at piles of 1 and 2: all of those that it begins, and two
of three others (after one of the random player's three first moves it cannot win)."""


def collect(run: Path) -> dict[str, Any]:
    """Few numbers of a run."""
    records = list(read_metrics(run / "metrics.jsonl"))
    wins = [[r["step"], r["eval_Nim-v0_pass1"]] for r in records if "eval_Nim-v0_pass1" in r]
    fouls = [[r["step"], r["invalid_move"]] for r in records if r["kind"] == "train" and "invalid_move" in r]
    look = {"x": "step", "percent": True, "zero": True}
    return {
        "title": "Nim by self-play",
        "panels": [
            {
                "title": "Games won against random moves",
                **look,
                "mark": {"name": "perfect play", "value": BEST},
                "curves": [{"name": "policy", "points": wins}],
            },
            {
                "title": "Samples lost by a foul, in self-play",
                **look,
                "mark": None,
                "curves": [{"name": "policy", "points": fouls}],
            },
        ],
    }


def main() -> None:
    if sys.argv[1:]:
        NUMBERS.write_text(json.dumps(collect(Path(sys.argv[1])), separators=(",", ":")) + "\n", encoding="utf-8")
    drawn = picture(json.loads(NUMBERS.read_text(encoding="utf-8")))
    (IMAGES / "selfplay.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
