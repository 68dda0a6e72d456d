"""The picture of docs/worlds_tools.md, from the metrics of the run: means over five steps each.

python examples/bfcl/draw.py runs/bfcl/rl docs/images/bfcl.svg
"""

import sys
from pathlib import Path
from statistics import fmean

from openrlhf.observability.charts import picture
from openrlhf.observability.loggers import read_metrics

PANELS = {"Calls that succeed": "calls_succeeded", "Tasks solved": "score"}
TOGETHER = 5


def main(run, image):
    steps = [record for record in read_metrics(Path(run) / "metrics.jsonl") if record["kind"] == "train"]
    groups = [steps[at : at + TOGETHER] for at in range(0, len(steps), TOGETHER)]
    panels = []
    for title, metric in PANELS.items():
        points = [[group[-1]["step"], round(fmean(step[metric] for step in group), 3)] for group in groups]
        curve = {"name": "rloo, 8 prompts of 8 samples a step", "points": points}
        panels.append({"title": title, "x": "step", "percent": True, "zero": True, "mark": None, "curves": [curve]})
        print(metric, points[0][1], "→", points[-1][1])
    Path(image).write_text(picture({"title": "A BFCL world", "panels": panels}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
