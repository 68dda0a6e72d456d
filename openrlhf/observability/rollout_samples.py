"""The report's reading room: rollouts of early, middle and late steps side by side, each episode as its turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from openrlhf.observability.charts import short_number
from openrlhf.observability.jsonl import parse_json_line
from openrlhf.observability.rollout_log import longest_whole, shortened, spread

MOST_STEPS = 24
MOST_PER_STEP = 16
MOST_BYTES = 1_200_000
COLUMNS = ("Early", "Middle", "Late")
CHOICES = ("best", "typical", "worst", "failed")

HEAD = re.compile(rb'\{"step": (\d{1,15})[,}]')
"""The beginning of each line that `RolloutLog` writes."""

SPECIAL_TOKEN = re.compile(
    r"&lt;(?:\|[^|&\s]{1,40}\||/?s|pad|eos|bos|unk|/?think|/?answer|(?:start|end)_of_turn)&gt;|\[/?INST\]"
)
"""Special tokens of usual chat templates, as they look after escaping."""

Record = Mapping[str, Any]


class RolloutFile:
    """The places of each step's records in rollouts.jsonl. Parts of the file that were read once are not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._seen = 0

    def steps(self) -> list[int]:
        """Steps that have rollouts, by now. A resumed run writes steps again: going back drops what came after."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return []
        if size < self._seen:
            self._places, self._seen = {}, 0
        with self._path.open("rb") as file:
            file.seek(self._seen)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                # The step is read off the line's head: the texts behind it may be long.
                if head := HEAD.match(line):
                    self._add(int(head.group(1)), (self._seen, len(line)))
                self._seen += len(line)
        return list(self._places)

    def _add(self, step: int, place: tuple[int, int]) -> None:
        latest = next(reversed(self._places), None)
        if latest is not None and step < latest:
            self._places = {earlier: places for earlier, places in self._places.items() if earlier < step}
        self._places.setdefault(step, []).append(place)

    def read(self, steps: Sequence[int]) -> dict[int, list[Record]]:
        """The records of these steps. Where a step was written twice in a row, those of the second time."""
        found: dict[int, list[Record]] = {}
        with self._path.open("rb") as file:
            for step in steps:
                records: dict[tuple, Record] = {}
                for start, length in self._places[step]:
                    file.seek(start)
                    record = parse_json_line(file.read(length))
                    if record is not None:
                        key = str(record.get("prompt_ordinal")), str(record.get("sample"))
                        if key in records:
                            records = {}
                        records[key] = record
                if records:
                    found[step] = list(records.values())[:MOST_PER_STEP]
        return found


def render_rollouts(rollouts: RolloutFile, means: Mapping[int, float]) -> str:
    """The section of the page, "" when there are no rollouts. Longer texts get shorter until it fits.

    `means`: a step's mean reward, for files that do not say it themselves.
    """
    steps = rollouts.steps()
    if not steps:
        return ""
    count, characters = MOST_STEPS, 4000
    read = rollouts.read(spread(steps, count))
    while True:
        chosen = {step: read[step] for step in spread(list(read), count)}
        html = _section(chosen, means, total=len(steps), characters=characters) if chosen else ""
        if len(html.encode("utf-8", errors="replace")) <= MOST_BYTES or (count <= 3 and characters <= 200):
            return html
        count, characters = max(3, count * 2 // 3), max(200, characters * 2 // 3)


def _section(
    by_step: Mapping[int, Sequence[Record]], means: Mapping[int, float], *, total: int, characters: int
) -> str:
    rewards = [r["reward"] for records in by_step.values() for r in records if _is_number(r.get("reward"))]
    scale = (min([0.0, *rewards]), max([1.0, *rewards]))
    steps = list(by_step)
    blocks = {s: _block(by_step[s], means.get(s), scale=scale, characters=characters) for s in steps}
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
        '<option value="low">low rewards</option><option value="odd">failed or truncated</option></select>'
        '<p class="key"><span class="act">sampled by the policy, trained on</span>'
        '<span class="obs">read by it</span></p></div>'
        f'<div class="columns n{len(shown)}">{columns}</div>{templates}</section>'
    )


def _block(records: Sequence[Record], mean: float | None, *, scale: tuple[float, float], characters: int) -> str:
    """One step: each prompt once, the best group first, its responses below it."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.get("prompt_ordinal")), []).append(record)
    first = records[0]
    if _is_number(first.get("step_reward")):
        mean = first["step_reward"]
    of = f" of all {first['step_samples']:,} samples" if _is_number(first.get("step_samples")) else ""
    told = f"mean reward {mean:.3f}{of}" if mean is not None else "no reward"
    articles = "".join(_group(g, scale=scale, characters=characters) for g in groups.values())
    return f'<p class="mean">{told}</p>{articles}'


def _group(records: Sequence[Record], *, scale: tuple[float, float], characters: int) -> str:
    first = records[0]
    label = str(first.get("label") if first.get("label") is not None else "")
    expected = f'<div class="label">{_text(label, characters // 4)}</div>' if label else ""
    parts = [_parts(record) for record in records]
    openings = [opening for opening, _ in parts if opening]
    # Samples of a prompt begin alike, unless an environment's reset makes them differ.
    common = openings[0] if openings and all(opening == openings[0] for opening in openings) else None
    head = _turns(common, characters // 2) if common else f"<pre>{_text(first.get('prompt'), characters // 2)}</pre>"
    order = sorted(range(len(records)), key=lambda i: -_reward(records[i]))
    bodies = [turns if common or not opening else [*opening, *turns] for opening, turns in parts]
    episodes = "".join(
        _episode(records[i], bodies[i], scale=scale, characters=characters, opened=place == 0)
        for place, i in enumerate(order)
    )
    return f'<article>{_group_head(records)}<div class="prompt">{head}{expected}</div>{episodes}</article>'


def _group_head(records: Sequence[Record]) -> str:
    """Why the group is here, what it earned, and how much of it is shown."""
    first = records[0]
    facts = [f"prompt {escape(str(first.get('prompt_ordinal')))}"]
    size, mean = first.get("group_samples"), first.get("group_reward")
    if _is_number(size) and size > len(records):
        facts.append(f"{len(records)} of {size} samples")
    if _is_number(mean):
        facts.append(f"mean {short_number(mean)}")
    choice = str(first.get("choice") or "")
    chip = f'<span class="choice {choice}">{choice}</span>' if choice in CHOICES else ""
    return f'<div class="group">{chip}<span>{" · ".join(facts)}</span></div>'


def _parts(record: Record) -> tuple[list[Record], list[Record]]:
    """The turns before the first action, and the rest. Both are empty where the record has no turns."""
    turns: list[Record] = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
    actions = [i for i, turn in enumerate(turns) if turn.get("action")]
    first = actions[0] if actions else len(turns)
    return turns[:first], turns[first:]


def _episode(
    record: Record, turns: Sequence[Record], *, scale: tuple[float, float], characters: int, opened: bool
) -> str:
    """One turn stands there as it is; several are folded up behind a line that sums them up, but for the first."""
    reward, outcome = record.get("reward"), str(record.get("outcome") or "")
    low, high = scale
    place = (reward - low) / (high - low) if _is_number(reward) else 0.0
    pill = f'<span class="pill">{short_number(reward) if _is_number(reward) else "–"}</span>'
    facts = f"<small>{escape(' · '.join(_facts(record, turns)))}</small>"
    error = record.get("error")
    failure = f'<pre class="error">{_text(error, characters // 2)}</pre>' if error else ""
    odd = "" if outcome in ("", "finished") else " odd"
    tone = f'style="--t:{place:.3f}"'
    if len(turns) > 1:
        return (
            f'<details class="response many{odd}" {tone}{" open" if opened else ""}><summary>{pill}{facts}</summary>'
            f'<div class="said">{_turns(turns, characters)}{failure}</div></details>'
        )
    text = turns[0].get("text") if turns else record.get("response")
    body = f'<pre class="act">{_text(text, characters)}</pre>' if text or not error else ""
    return f'<div class="response{odd}" {tone}>{pill}<div class="said">{body}{failure}{facts}</div></div>'


def _facts(record: Record, turns: Sequence[Record]) -> list[str]:
    reward, outcome = record.get("reward"), str(record.get("outcome") or "")
    # What was left out of a long episode was as many turns of either side.
    said = sum(bool(turn.get("action")) for turn in turns)
    said += sum(turn["turns"] // 2 for turn in turns if _is_number(turn.get("turns")))
    facts = [f"{said} turns"] if said > 1 else []
    facts.append(_tokens(record.get("response_length", 0)))
    if _is_number(record.get("score")) and record.get("score") != reward:
        facts.append(f"score {short_number(record['score'])}")
    if outcome and outcome != "finished":
        facts.append(outcome)
    versions = sorted({v for turn in turns for v in turn.get("versions") or [] if _is_number(v)})
    if versions:
        facts.append(f"weights v{versions[0]}" + (f"–{versions[-1]}" if len(versions) > 1 else ""))
    return [fact.replace(" ", "\u00a0") for fact in facts]  # a line is broken between them


def _turns(turns: Sequence[Record], characters: int) -> str:
    """Messages below each other, each with its role, its length and its reward."""
    texts = ["" if turn.get("text") is None else str(turn["text"]) for turn in turns]
    most = max(longest_whole([len(text) for text in texts], characters), 60)
    rewarded = sum(bool(turn.get("action")) for turn in turns) > 1
    segment = 0
    parts = []
    for turn, text in zip(turns, texts, strict=True):
        if _is_number(turn.get("segment")) and turn["segment"] != segment:
            segment = turn["segment"]
            parts.append(f'<p class="cut">history rewritten: token sequence {segment + 1}</p>')
        parts.append(_turn(turn, text, most, rewarded=rewarded))
    return "".join(parts)


def _turn(turn: Record, text: str, most: int, *, rewarded: bool) -> str:
    role, tokens = str(turn.get("role") or ""), _tokens(turn.get("tokens", 0))
    if turn.get("tokens") == 0:
        tokens = "after the end, not read"
    if role == "left out":
        role, text = "", f"… {turn.get('turns')} turns left out …"
    elif role == "history":
        text = "… the same as before …"
    reward = turn.get("reward")
    chip = ""
    if _is_number(reward) and (reward or (rewarded and turn.get("action"))):
        tone = "up" if reward > 0 else "down" if reward < 0 else "zero"
        chip = f'<span class="chip {tone}">{"+" if reward > 0 else ""}{short_number(reward)}</span>'
    kind = "act" if turn.get("action") else "obs"
    return (
        f'<div class="turn {kind}"><div class="who"><b>{escape(role)}</b><span>{escape(tokens)}</span>{chip}</div>'
        f"<pre>{_text(text, most)}</pre></div>"
    )


def _tokens(count: Any) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _reward(record: Record) -> float:
    reward = record.get("reward")
    return reward if _is_number(reward) else float("-inf")


def _text(value: Any, characters: int) -> str:
    """Escaped, shortened in the middle, special tokens set back."""
    text = shortened("" if value is None else str(value), characters)
    return SPECIAL_TOKEN.sub(lambda match: f"<i>{match.group()}</i>", escape(text))


def mean_rewards(train: Sequence[Record]) -> dict[int, float]:
    """A step's mean reward as its metrics have it, over all of its samples."""
    found = {}
    for record in train:
        value = next((record[n] for n in ("rollout/reward_mean", "reward") if _is_number(record.get(n))), None)
        if value is not None:
            found[record["step"]] = value
    return found


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
