"""The report's reading room: rollouts of early, middle and late steps, side by side."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from openrlhf.observability.jsonl import parse_json_line

MOST_STEPS = 24
MOST_PER_STEP = 16
MOST_BYTES = 1_200_000
COLUMNS = ("Early", "Middle", "Late")

HEAD = re.compile(rb'\{"step": (\d{1,15})[,}]')
"""How `RolloutLog` begins a line."""

SPECIAL_TOKEN = re.compile(r"&lt;(?:\|[^|&\s]{1,40}\||/?s|pad|eos|bos|unk|/?think|/?answer)&gt;|\[/?INST\]")
"""As they look after escaping."""


def render_rollouts(path: Path) -> str:
    """The section of the page, "" when there are no rollouts. Longer texts get shorter until it fits."""
    steps = _steps(path)
    if not steps:
        return ""
    count, characters = MOST_STEPS, 4000
    while True:
        chosen = _read(path, spread(steps, count))
        html = _section(chosen, total=len(steps), characters=characters) if chosen else ""
        if len(html.encode("utf-8", errors="replace")) <= MOST_BYTES or (count <= 3 and characters <= 200):
            return html
        count, characters = max(3, count * 2 // 3), max(200, characters * 2 // 3)


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of them, evenly, with the first and the last.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(steps) <= count:
        return list(steps)
    return [steps[i * (len(steps) - 1) // (count - 1)] for i in range(count)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(step, line) of each record. The step is read off the line's head: the texts behind it may be long."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (head := HEAD.match(line)) and line.endswith(b"\n"):
                yield int(head.group(1)), line


def _steps(path: Path) -> list[int]:
    """Steps that have rollouts. A resumed run writes steps again: going back drops what came after."""
    steps: list[int] = []
    for step, _ in _lines(path):
        if steps and step == steps[-1]:
            continue
        while steps and steps[-1] >= step:
            steps.pop()
        steps.append(step)
    return steps


def _read(path: Path, steps: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """The records of these steps; of a sample that was written twice, the later one."""
    found: dict[int, dict[tuple, dict[str, Any]]] = {step: {} for step in steps}
    for step, line in _lines(path):
        if step in found and (record := parse_json_line(line)) is not None:
            found[step][str(record.get("prompt_ordinal")), str(record.get("sample"))] = record
    return {step: list(records.values())[:MOST_PER_STEP] for step, records in found.items() if records}


def _section(by_step: Mapping[int, Sequence[Mapping[str, Any]]], *, total: int, characters: int) -> str:
    rewards = [r["reward"] for records in by_step.values() for r in records if _is_number(r.get("reward"))]
    scale = (min([0.0, *rewards]), max([1.0, *rewards]))
    steps = list(by_step)
    blocks = {step: _block(by_step[step], scale=scale, characters=characters) for step in steps}
    shown = spread(steps, len(COLUMNS))
    names = {1: ("Step",), 2: ("Early", "Late")}.get(len(shown), COLUMNS)
    columns = "".join(
        f'<div class="column"><header><b>{name}</b><label>step <select aria-label="{name} step">'
        + "".join(f"<option{' selected' if step == here else ''}>{step}</option>" for step in steps)
        + f'</select></label></header><div class="rollouts">{blocks[here]}</div></div>'
        for name, here in zip(names, shown, strict=True)
    )
    templates = "".join(f'<template data-step="{step}">{block}</template>' for step, block in blocks.items())
    scope = f"{len(steps)} of {total:,} steps" if total > len(steps) else f"{total} step{'s' if total > 1 else ''}"
    return (
        f'<section id="rollouts"><h2>Rollouts <span class="count">{scope}</span></h2>'
        '<div class="filters"><input type="search" placeholder="Search in prompts and responses" aria-label="Search">'
        '<select aria-label="Show"><option value="all">all rewards</option><option value="high">high rewards</option>'
        '<option value="low">low rewards</option><option value="odd">failed or truncated</option></select></div>'
        f'<div class="columns n{len(shown)}">{columns}</div>{templates}</section>'
    )


def _block(records: Sequence[Mapping[str, Any]], *, scale: tuple[float, float], characters: int) -> str:
    """One step: each prompt once, its responses below it."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record.get("prompt_ordinal"), []).append(record)
    rewards = [r["reward"] for r in records if _is_number(r.get("reward"))]
    mean = f"mean reward {statistics.fmean(rewards):.3f}" if rewards else "no reward"
    articles = "".join(_group(g, scale=scale, characters=characters) for g in groups.values())
    return f'<p class="mean">{mean}</p>{articles}'


def _group(records: Sequence[Mapping[str, Any]], *, scale: tuple[float, float], characters: int) -> str:
    first = records[0]
    label = str(first.get("label") if first.get("label") is not None else "")
    expected = f'<div class="label">{_text(label, characters // 4)}</div>' if label else ""
    responses = "".join(_response(r, scale=scale, characters=characters) for r in records)
    return (
        f'<article><div class="prompt"><span class="ordinal">prompt {escape(str(first.get("prompt_ordinal")))}</span>'
        f"<pre>{_text(first.get('prompt'), characters // 2)}</pre>{expected}</div>{responses}</article>"
    )


def _response(record: Mapping[str, Any], *, scale: tuple[float, float], characters: int) -> str:
    reward, outcome = record.get("reward"), str(record.get("outcome") or "")
    low, high = scale
    if _is_number(reward):
        place = (reward - low) / (high - low)
        pill = f'<span class="pill">{reward:.3g}</span>'
    else:
        place, pill = 0.0, '<span class="pill">–</span>'
    facts = [f"{record.get('response_length', 0)} tokens"]
    if _is_number(record.get("score")) and record.get("score") != reward:
        facts.append(f"score {record['score']:.3g}")
    if outcome and outcome != "finished":
        facts.append(outcome)
    error = record.get("error")
    body = f"<pre>{_text(record.get('response'), characters)}</pre>"
    if error:
        body += f'<pre class="error">{_text(error, characters // 2)}</pre>'
    odd = "" if outcome in ("", "finished") else " odd"
    return (
        f'<div class="response{odd}" style="--t:{place:.3f}">{pill}<div class="said">{body}'
        f"<small>{escape(' · '.join(facts))}</small></div></div>"
    )


def _text(value: Any, characters: int) -> str:
    """Escaped, shortened in the middle, special tokens set back."""
    text = "" if value is None else str(value)
    if len(text) > characters:
        head, tail = characters * 2 // 3, characters // 3
        text = f"{text[:head]} … {len(text) - head - tail:,} characters left out … {text[-tail:]}"
    return SPECIAL_TOKEN.sub(lambda match: f"<i>{match.group()}</i>", escape(text))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
