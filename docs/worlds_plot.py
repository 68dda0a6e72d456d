"""The plots of the pages on worlds: one run of each.

python docs/worlds_plot.py NAME RUN    # the numbers of a run's folder and the picture → docs/images
python docs/worlds_plot.py             # all pictures again, from the numbers kept
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from openrlhf.observability.charts import picture
from openrlhf.observability.loggers import read_metrics

IMAGES = Path(__file__).resolve().parent / "images"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture of a plot: the curve of a metric, or of several."""

    title: str
    metric: str | Mapping[str, str]
    """Several: by the names of their curves."""
    kind: Literal["train", "eval"] = "train"
    every: int = 1
    """A point is the mean of so many steps."""
    percent: bool = True
    zero: bool = True
    """Heights begin at 0, not at the lowest number."""
    mark: tuple[str, float] | None = None
    """A horizontal line: its name and height."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    title: str
    run: str
    """What the curves are called."""
    panels: Sequence[Panel]


PLOTS = {
    "sums": Plot(
        title="Sums of reasoning-gym",
        run="group_norm, 8 prompts of 16 samples a step",
        panels=[
            Panel(
                title="Right on questions that it never draws",
                metric="eval_chain_sum_pass1",
                kind="eval",
            ),
            Panel(
                title="Reward in training",
                metric="reward",
                every=5,
            ),
        ],
    ),
    "gym": Plot(
        title="Four tasks of reasoning-gym",
        run="group_norm, 64 prompts of 8 samples a step",
        panels=[
            Panel(
                title="Right on questions that it never draws",
                metric={
                    name.replace("_", " "): f"eval_{name}_pass1"
                    for name in ("chain_sum", "gcd", "letter_counting", "simple_equations")
                },
                kind="eval",
            ),
            Panel(title="Reward in training", metric="reward", every=5),
        ],
    ),
    "lake": Plot(
        title="A frozen lake",
        run="group_norm, 32 records of 8 samples a step",
        panels=[
            Panel(
                title="Reward",
                metric="reward",
                every=4,
                percent=False,
                zero=False,
            ),
            Panel(
                title="Answers without an action, per episode",
                metric="unread_actions",
                every=4,
                percent=False,
            ),
        ],
    ),
    "selfplay": Plot(
        title="Nim by self-play",
        run="policy",
        panels=[
            Panel(
                title="Games won against random moves",
                metric="eval_Nim-v0_pass1",
                kind="eval",
                # Of games at piles of 1 and 2 a perfect player wins all that it begins, and two of three others: after
                # one of the random player's three first moves it cannot win.
                mark=("perfect play", 5 / 6),
            ),
            Panel(title="Samples lost by a foul, in self-play", metric="invalid_move"),
        ],
    ),
    "bfcl": Plot(
        title="A BFCL world",
        run="rloo, 8 prompts of 8 samples a step",
        panels=[
            Panel(title="Calls that succeed", metric="calls_succeeded", every=5),
            Panel(title="Tasks solved", metric="score", every=5),
        ],
    ),
    "mcp": Plot(
        title="A shop over MCP",
        run="rloo, 8 prompts of 16 samples a step",
        panels=[
            Panel(title="Reward", metric="reward", every=6),
            Panel(title="Calls that succeed", metric="calls_succeeded", every=6),
        ],
    ),
    "openenv": Plot(
        title="Numbers guessed in an OpenEnv server",
        run="group_norm, 16 prompts of 16 samples a step",
        panels=[
            Panel(
                title="Reward",
                metric="reward",
                every=10,
                percent=False,
                # Four of seven numbers in the third step of a search that halves, two in the second, one in the first.
                mark=("the best there is", (1 + 2 * 2 / 3 + 4 / 3) / 7),
            ),
        ],
    ),
    "verifiers": Plot(
        title="Sums in a taskset of verifiers",
        run="group_norm, 8 prompts of 8 samples a step",
        panels=[Panel(title="Right sums", metric="right", every=2)],
    ),
}


def collect(plot: Plot, run: Path) -> dict[str, Any]:
    """Few numbers of a run."""
    records = list(read_metrics(run / "metrics.jsonl"))
    panels = []
    for panel in plot.panels:
        curves = []
        metrics = {plot.run: panel.metric} if isinstance(panel.metric, str) else panel.metric
        for name, metric in metrics.items():
            found = [(r["step"], r[metric]) for r in records if r["kind"] == panel.kind and metric in r]
            parts = [found[at : at + panel.every] for at in range(0, len(found), panel.every)]
            points = [[part[-1][0], round(fmean(value for _, value in part), 3)] for part in parts]
            print(f"{metric}: {points[0][1]} → {points[-1][1]}")
            curves.append({"name": name, "points": points})
        mark = None if panel.mark is None else dict(zip(("name", "value"), panel.mark, strict=True))
        look = {"x": "step", "percent": panel.percent, "zero": panel.zero, "mark": mark}
        panels.append({"title": panel.title, **look, "curves": curves})
    return {"title": plot.title, "panels": panels}


def main(name: str = "", run: str = "") -> None:
    if run:
        numbers = json.dumps(collect(PLOTS[name], Path(run)), separators=(",", ":"))
        (IMAGES / "data" / f"{name}.json").write_text(numbers + "\n", encoding="utf-8")
    for each in [name] if name else PLOTS:
        drawn = picture(json.loads((IMAGES / "data" / f"{each}.json").read_text(encoding="utf-8")))
        (IMAGES / f"{each}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
