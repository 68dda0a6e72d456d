"""The report's reading room: rollouts of early, middle and late steps side by side, each episode as its turns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from openrlhf.observability.charts import short_number
from openrlhf.observability.jsonl import parse_json_line
from openrlhf.observability.rollout_log import longest_whole, place_in_shortened, shortened, spread
from openrlhf.observability.thumbnails import PagePicture, page_picture, read_thumbnail
from openrlhf.observability.turns import image_mark

MOST_STEPS = 24
MOST_PER_STEP = 16
MOST_BYTES = 1_200_000
MOST_PICTURE_BYTES = 2_400_000
"""The most that all pictures of a page take."""
PICTURE_SIDES = (192, 128, 96, 64)
"""The longer side of pictures; smaller ones are taken where there are many."""
SHOWN_SIDE, LEAST_SIDE = 128, 64
"""How large a picture is on the page, in its pixels: larger ones are shown smaller, small ones larger."""
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
        self._pictures: dict[tuple[str, int], PagePicture] = {}

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

    def pictures(self, names: Sequence[str]) -> dict[str, PagePicture]:
        """The pictures of these files, as far as they are there and a page has room for them; the first ones first."""
        found: dict[str, PagePicture] = {}
        for side in PICTURE_SIDES:
            found, room = {}, MOST_PICTURE_BYTES
            for name in names:
                if (picture := self._picture(name, side)) is not None:
                    room -= len(picture.uri)
                    if room < 0:
                        break
                    found[name] = picture
            else:
                break
        return found

    def _picture(self, name: str, side: int) -> PagePicture | None:
        if (name, side) not in self._pictures:
            png = read_thumbnail(self._path.parent, name)
            picture = None if png is None else page_picture(png, side=side)
            if picture is None:
                return None
            self._pictures[name, side] = picture
        return self._pictures[name, side]

    def forget_pictures(self, names: Iterable[str]) -> None:
        """Keep those of no other files than these: a run may have more images than memory has room for."""
        kept = set(names)
        self._pictures = {key: picture for key, picture in self._pictures.items() if key[0] in kept}


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
        album = _Album(rollouts.pictures(_image_files(chosen)))
        html = _section(chosen, means, album, total=len(steps), characters=characters) if chosen else ""
        if len(html.encode("utf-8", errors="replace")) <= MOST_BYTES or (count <= 3 and characters <= 200):
            rollouts.forget_pictures(album.pictures)
            return html + album.drawings()
        count, characters = max(3, count * 2 // 3), max(200, characters * 2 // 3)


def _image_files(by_step: Mapping[int, Sequence[Record]]) -> list[str]:
    """The thumbnails' files that the records name, each once; first those of the steps that are seen at once."""
    order = dict.fromkeys([*spread(list(by_step), len(COLUMNS)), *by_step])
    turns = (turn for step in order for record in by_step[step] for part in _parts(record) for turn in part)
    names = (image.get("file") for turn in turns for image in _images(turn))
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


class _Album:
    """The pictures of a page. It holds each once, as a drawing that is used wherever the image is seen."""

    def __init__(self, pictures: Mapping[str, PagePicture]) -> None:
        self.pictures = pictures
        self._ids = {name: f"picture-{place}" for place, name in enumerate(pictures, start=1)}

    def drawings(self) -> str:
        """The drawings themselves, which are seen only where they are used."""
        images = "".join(
            f'<image id="{self._ids[name]}" width="{picture.width}" height="{picture.height}" href="{picture.uri}"/>'
            for name, picture in self.pictures.items()
        )
        return (
            f'<svg class="album" width="0" height="0" aria-hidden="true"><defs>{images}</defs></svg>' if images else ""
        )

    def strip(self, images: Sequence[Record]) -> str:
        """The images of a turn beside each other."""
        return f'<div class="images">{"".join(map(self._figure, images))}</div>' if images else ""

    def _figure(self, image: Record) -> str:
        name, size = f"image {image.get('number')}", image.get("size")
        pixels = [f"{size[0]} × {size[1]}"] if isinstance(size, list) and len(size) == 2 else []
        told = escape(", ".join([name, *(f"{each} pixels" for each in pixels), _tokens(image["tokens"])]))
        caption = f"<figcaption>{escape(' · '.join([name, *pixels]))}</figcaption>"
        picture = self.pictures.get(str(image.get("file")))
        if picture is None:
            where = f' title="{escape(str(image["file"]))}"' if image.get("file") else ""
            return f'<figure><div class="shot none"{where}>not on this page</div>{caption}</figure>'
        longest = max(picture.width, picture.height)
        scale = SHOWN_SIDE / longest if longest > SHOWN_SIDE else max(1, LEAST_SIDE // longest)
        width, height = (max(1, round(side * scale)) for side in picture[:2])
        return (
            f'<figure><svg class="shot{" fine" if scale > 1 else ""}" role="img" aria-label="{told}" width="{width}" '
            f'height="{height}" viewBox="0 0 {picture.width} {picture.height}" preserveAspectRatio="none">'
            f'<title>{told}</title><use href="#{self._ids[str(image["file"])]}"/></svg>'
            f"{caption}</figure>"
        )


def _images(turn: Record) -> list[Record]:
    """The images of a turn whose numbers can be read; none in logs of texts alone."""
    images = turn.get("images")
    return [
        image
        for image in (images if isinstance(images, list) else [])
        if isinstance(image, dict) and _is_number(image.get("number")) and _is_number(image.get("tokens"))
    ]


def _section(
    by_step: Mapping[int, Sequence[Record]], means: Mapping[int, float], album: _Album, *, total: int, characters: int
) -> str:
    rewards = [r["reward"] for records in by_step.values() for r in records if _is_number(r.get("reward"))]
    scale = (min([0.0, *rewards]), max([1.0, *rewards]))
    steps = list(by_step)
    blocks = {s: _block(by_step[s], means.get(s), album, scale=scale, characters=characters) for s in steps}
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


def _block(
    records: Sequence[Record], mean: float | None, album: _Album, *, scale: tuple[float, float], characters: int
) -> str:
    """One step: each prompt once, the best group first, its responses below it."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.get("prompt_ordinal")), []).append(record)
    first = records[0]
    if _is_number(first.get("step_reward")):
        mean = first["step_reward"]
    of = f" of all {first['step_samples']:,} samples" if _is_number(first.get("step_samples")) else ""
    told = f"mean reward {mean:.3f}{of}" if mean is not None else "no reward"
    articles = "".join(_group(g, album, scale=scale, characters=characters) for g in groups.values())
    return f'<p class="mean">{told}</p>{articles}'


def _group(records: Sequence[Record], album: _Album, *, scale: tuple[float, float], characters: int) -> str:
    first = records[0]
    label = str(first.get("label") if first.get("label") is not None else "")
    expected = f'<div class="label">{_text(label, characters // 4)}</div>' if label else ""
    parts = [_parts(record) for record in records]
    openings = [opening for opening, _ in parts if opening]
    # Samples of a prompt begin alike, unless an environment's reset makes them differ.
    common = openings[0] if openings and all(opening == openings[0] for opening in openings) else None
    prompt = f"<pre>{_text(first.get('prompt'), characters // 2)}</pre>"
    head = _turns(common, album, characters // 2) if common else prompt
    order = sorted(range(len(records)), key=lambda i: -_reward(records[i]))
    bodies = [turns if common or not opening else [*opening, *turns] for opening, turns in parts]
    episodes = "".join(
        _episode(records[i], bodies[i], album, scale=scale, characters=characters, opened=place == 0)
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
    record: Record,
    turns: Sequence[Record],
    album: _Album,
    *,
    scale: tuple[float, float],
    characters: int,
    opened: bool,
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
            f'<div class="said">{_turns(turns, album, characters)}{failure}</div></details>'
        )
    text = turns[0].get("text") if turns else record.get("response")
    body = f'<pre class="act">{_text(text, characters)}</pre>' if text or not error else ""
    return f'<div class="response{odd}" {tone}>{pill}<div class="said">{body}{failure}{facts}</div></div>'


def _facts(record: Record, turns: Sequence[Record]) -> list[str]:
    reward, outcome = record.get("reward"), str(record.get("outcome") or "")
    # What was left out of a long episode was as many turns of either side.
    said = sum(bool(turn.get("action")) for turn in turns)
    said += sum(turn["turns"] // 2 for turn in turns if _is_number(turn.get("turns")))
    facts = [str(record["agent"])] if record.get("agent") else []
    facts += [f"{said} turns"] if said > 1 else []
    facts.append(_tokens(record.get("response_length", 0)))
    if _is_number(record.get("score")) and record.get("score") != reward:
        facts.append(f"score {short_number(record['score'])}")
    if outcome and outcome != "finished":
        facts.append(outcome)
    versions = sorted({v for turn in turns for v in turn.get("versions") or [] if _is_number(v)})
    if versions:
        facts.append(f"weights v{versions[0]}" + (f"–{versions[-1]}" if len(versions) > 1 else ""))
    return [fact.replace(" ", "\u00a0") for fact in facts]  # a line is broken between them


def _turns(turns: Sequence[Record], album: _Album, characters: int) -> str:
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
        parts.append(_turn(turn, text, most, album, rewarded=rewarded))
    return "".join(parts)


def _turn(turn: Record, text: str, most: int, album: _Album, *, rewarded: bool) -> str:
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
    images = _images(turn)
    return (
        f'<div class="turn {kind}"><div class="who"><b>{escape(role)}</b><span>{escape(tokens)}</span>{chip}</div>'
        f"<pre>{_text(text, most, images)}</pre>{album.strip(images)}</div>"
    )


def _tokens(count: Any) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def _reward(record: Record) -> float:
    reward = record.get("reward")
    return reward if _is_number(reward) else float("-inf")


def _text(value: Any, characters: int, images: Sequence[Record] = ()) -> str:
    """Escaped, shortened in the middle, special tokens and the marks of images set back."""
    text = "" if value is None else str(value)
    left = shortened(text, characters)
    html, done = "", 0
    for image in images:
        mark = image_mark(image["number"], image["tokens"])
        at = image.get("at")
        place = place_in_shortened(text, characters, at, len(mark)) if isinstance(at, int) else None
        # Text may look like a mark: the place tells which one is.
        if place is not None and place >= done and left[place : place + len(mark)] == mark:
            html += f'{_escaped(left[done:place])}<span class="mark">{escape(mark)}</span>'
            done = place + len(mark)
    return html + _escaped(left[done:])


def _escaped(text: str) -> str:
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
