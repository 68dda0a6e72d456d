"""A few groups of every step, for people to read: the best, the worst, and some between, turn by turn."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from openrlhf.observability.jsonl import JsonLinesWriter
from openrlhf.observability.thumbnails import FOLDER, ThumbnailFolder
from openrlhf.observability.turns import TextImage, Turn, TurnReader, without_runs

if TYPE_CHECKING:
    from openrlhf.types import Group, Trajectory

logger = logging.getLogger(__name__)

MOST_EPISODES = 4
"""The most trajectories of a group."""
MOST_CHARACTERS = 32_000
"""The most characters of a prompt, of a response, and of all turns of an episode together. The middle of longer texts
is left out."""
MOST_TURNS = 200
"""The most turns of an episode: those in the middle of a longer one are left out."""
MOST_IMAGES = 48
"""The most different images of an episode that have a thumbnail: the first and the last of them."""
THINNED = ((256 << 20, 10), (1 << 30, 100))
"""(bytes that the file and its thumbnails have, steps from one that is kept to the next): a run of weeks does
not fill the disk."""

BEST, WORST, TYPICAL, FAILED = "best", "worst", "typical", "failed"

T = TypeVar("T")


class RolloutLog:
    """rollouts.jsonl: one line per trajectory, of at most `groups` groups a step (0: none), 4 trajectories of each.

    Which ones depends on rewards and ordinals alone, not on who finished first. The thumbnails of their images are in
    a folder beside the file, each image once for the whole run, also where a run is resumed.
    """

    def __init__(self, path: Path, tokenizer: Any, *, groups: int = 4) -> None:
        if groups < 0:
            raise ValueError(f"groups must be >= 0, got {groups}")
        self._path = path
        self._groups = groups
        self._reader = TurnReader(tokenizer)
        self._lines = JsonLinesWriter(path)
        self._thumbnails = ThumbnailFolder(path.parent / FOLDER)
        self._every = 1

    def write(self, step: int, groups: Sequence[Group]) -> None:
        if not self._groups or not self._has_room(step):
            return
        rewards = [t.reward for group in groups for t in group.scored if t.reward is not None]
        whole = {"step_reward": fmean(rewards) if rewards else None, "step_samples": len(rewards)}
        for choice, group in chosen_groups(groups, self._groups):
            of_group = {"choice": choice, "group_reward": mean_reward(group), "group_samples": len(group.trajectories)}
            for trajectory in chosen_episodes(group.trajectories, MOST_EPISODES):
                turns = self._reader.turns(trajectory.segments, text=trajectory.text)
                record = {**_record(step, group, trajectory), **of_group, **whole}
                self._lines.write({**record, "turns": self._fitted(turns)})

    def close(self) -> None:
        self._lines.close()

    def _fitted(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The turns as objects, within the limits. A turn that is left out has no text, and says how many it stands
        for."""
        half = MOST_TURNS // 2
        first, last = (turns, ()) if len(turns) <= MOST_TURNS else (turns[:half], turns[-half:])
        most = longest_whole([len(turn.text) for turn in (*first, *last)], MOST_CHARACTERS)
        files = self._files([image for turn in (*first, *last) for image in turn.images])
        records = [_turn(turn, most, files) for turn in first]
        if last:
            between = turns[half:-half]
            tokens, reward = sum(turn.tokens for turn in between), math.fsum(turn.reward for turn in between)
            gap = {"role": "left out", "action": False, "text": "", "tokens": tokens, "turns": len(between)}
            records += [gap | ({"reward": reward} if reward else {}), *(_turn(turn, most, files) for turn in last)]
        return records

    def _files(self, images: Sequence[TextImage]) -> dict[int, str]:
        """An image's number → the file with its thumbnail, which is there from now on."""
        different = list({image.number: image.placed.image for image in images}.items())
        half = MOST_IMAGES // 2
        if len(different) > MOST_IMAGES:
            different = different[:half] + different[-half:]
        files = {number: self._thumbnails.add(image) for number, image in different}
        return {number: f"{FOLDER}/{file.name}" for number, file in files.items() if file is not None}

    def _has_room(self, step: int) -> bool:
        size = self._path.stat().st_size + self._thumbnails.num_bytes
        every = next((every for least, every in reversed(THINNED) if size >= least), 1)
        if every != self._every:
            self._every = every
            logger.info("%s has %d MiB: of every %d steps one is kept from now on", self._path, size >> 20, every)
        return step % every == 0


def chosen_groups(groups: Sequence[Group], most: int) -> list[tuple[str, Group]]:
    """(why, group) of at most `most` of them, the best first: evenly from the best to the worst mean reward.

    Of a single place the median has it. Where samples have failed and there are three places or more, a group with
    most of them has one, instead of a typical one. Groups that earned the same are neither best nor worst.
    """
    ranked = sorted(
        (group for group in groups if mean_reward(group) is not None),
        key=lambda group: (-_rank(mean_reward(group)), group.prompt.ordinal),
    )
    kept = spread(ranked, most)
    labels = [TYPICAL] * len(kept)
    if len(ranked) > 1 and most > 1 and mean_reward(ranked[0]) != mean_reward(ranked[-1]):
        labels[0], labels[-1] = BEST, WORST
    result = list(zip(labels, kept, strict=True))
    broken = sorted(
        (group for group in groups if any(t.failed for t in group.trajectories)),
        key=lambda group: (-sum(t.failed for t in group.trajectories), group.prompt.ordinal),
    )
    if broken and not any(group is broken[0] for group in kept):
        if len(result) >= most > 2:
            del result[most // 2]
        if len(result) < most:
            result.insert(max(0, len(result) - 1), (FAILED, broken[0]))
    return result


def chosen_episodes(trajectories: Sequence[Trajectory], most: int) -> list[Trajectory]:
    """At most `most`, by sample: evenly from the best to the worst, and one that failed if there is any."""
    failed = sorted((t for t in trajectories if t.failed), key=lambda t: t.key)
    others = sorted((t for t in trajectories if not t.failed), key=lambda t: (-_rank(t.reward), t.key))
    kept = spread(others, most - min(1, len(failed)))
    return sorted([*kept, *failed[: most - len(kept)]], key=lambda t: t.key)


def mean_reward(group: Group) -> float | None:
    """The mean reward of the samples that were judged; None when none was."""
    rewards = [t.reward for t in group.scored if t.reward is not None]
    return fmean(rewards) if rewards else None


def _rank(reward: float | None) -> float:
    return reward if reward is not None and math.isfinite(reward) else -math.inf


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of them, evenly, with the first and the last; the middle one where there is a single place.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(items) <= count:
        return list(items)
    if count < 2:
        return [items[len(items) // 2]] if count else []
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def shortened(text: str, most: int) -> str:
    """The text with its middle left out, and how much that is, where it is longer than `most` characters.

    >>> shortened("abcdefghijkl", 6)
    'abcd … 6 characters left out … kl'
    """
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 3
    return f"{text[:head]} … {len(text) - head - tail:,} characters left out … {text[len(text) - tail :]}"


def place_in_shortened(text: str, most: int, at: int, length: int) -> int | None:
    """Where the `length` characters from `at` on are in `shortened(text, most)`; None where they were cut.

    >>> place_in_shortened("abcdefghijkl", 6, 10, 2), shortened("abcdefghijkl", 6).index("kl")
    (31, 31)
    """
    if len(text) <= most or at + length <= most * 2 // 3:
        return at
    return at + len(shortened(text, most)) - len(text) if at >= len(text) - most // 3 else None


def _record(step: int, group: Group, trajectory: Trajectory) -> dict[str, Any]:
    response = trajectory.text.removeprefix(group.prompt.text)
    return {
        "step": step,
        "prompt_ordinal": group.prompt.ordinal,
        "sample": trajectory.key.sample,
        **({"agent": trajectory.agent} if trajectory.agent else {}),
        "prompt": shortened(without_runs(group.prompt.text), MOST_CHARACTERS),
        "response": shortened(without_runs(response), MOST_CHARACTERS),
        "label": _label(group.prompt.label),
        "reward": trajectory.reward,
        "score": trajectory.score,
        "response_length": trajectory.num_actions,
        "outcome": str(trajectory.outcome),
        "error": shortened(trajectory.error, MOST_CHARACTERS),
    }


def _label(label: Any) -> Any:
    """The label as it is; of a long one, its shortened text."""
    text = label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
    return label if len(text) <= MOST_CHARACTERS else shortened(text, MOST_CHARACTERS)


def _turn(turn: Turn, most: int, files: Mapping[int, str]) -> dict[str, Any]:
    record: dict[str, Any] = {"role": turn.role, "action": turn.action, "text": shortened(turn.text, most)}
    record["tokens"] = turn.tokens
    if turn.images:
        record["images"] = [
            {
                "number": image.number,
                "at": place_in_shortened(turn.text, most, image.at, len(image.mark)),
                "start": image.placed.start,
                "tokens": len(image.placed.image),
                "size": image.placed.image.size,
                "file": files.get(image.number),
            }
            for image in turn.images
        ]
    if turn.action:
        record |= {"reward": turn.reward, "versions": list(turn.versions)}
    if turn.segment:
        record["segment"] = turn.segment
    return record


def longest_whole(lengths: Sequence[int], budget: int) -> int:
    """The largest m with Σ min(length, m) ≤ budget: short texts stay whole, long ones share what is left.

    >>> longest_whole([10, 100, 100], 110)
    50
    """
    left = budget
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)
