"""An episode as people read it: turns with roles, from recorded tokens.

What the policy sampled is known for sure, from the action mask. Who said the rest is read off the chat template's own
tokens, as far as those are known here; without them it is the prompt, or the environment. An image, which is hundreds
of tokens, is one mark in the text: `[image 1: 300 tokens]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from openrlhf.types import PlacedImage, Segment

PROMPT, ENVIRONMENT, ASSISTANT, TOOL, HISTORY = "prompt", "environment", "assistant", "tool", "history"

HEADERS = {
    "<|im_start|>": re.compile(r"(\w+)[^\n]*\n"),
    "<|start_header_id|>": re.compile(r"(\w+)<\|end_header_id\|>\s*"),
    "<start_of_turn>": re.compile(r"(\w+)\n"),
    "<|start|>": re.compile(r"(\w+)(?:.*?<\|message\|>|\s*\Z)", re.DOTALL),
}
"""Tokens that open a message -> what follows them, the role first."""

OPENERS = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": ASSISTANT,
    "<|observation|>": TOOL,
    "<|tool|>": TOOL,
    "<｜User｜>": "user",
    "<｜Assistant｜>": ASSISTANT,
    "[SYSTEM_PROMPT]": "system",
    "[AVAILABLE_TOOLS]": "system",
    "[INST]": "user",
    "[TOOL_RESULTS]": TOOL,
}
"""Tokens that open a message of one role."""

ROLES = {"model": ASSISTANT, "human": "user", "developer": "system", "function": TOOL, "ipython": TOOL}
"""Roles that have another name in some templates."""

CLOSERS = re.compile(
    r"\s*(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<\|end\|>|<\|return\|>|<\|call\|>|</s>"
    r"|<｜end▁of▁sentence｜>|\[/INST\]|\[/SYSTEM_PROMPT\]|\[/AVAILABLE_TOOLS\]|\[/TOOL_RESULTS\])\s*$"
)
NOTHING_SAID = re.compile(r"(?:\s|<\|?[\w▁]+\|?>|<｜[\w▁]+｜>)*")
"""White space and special tokens: what stands between two messages."""
IMAGE_RUN = re.compile(r"(<\|?\w*(?:pad|image|IMG_CONTEXT)\w*\|?>|\[IMG\])(?:\1){3,}")
"""An image in a text of which nothing but its tokens is known: hundreds of the same."""


def without_runs(text: str) -> str:
    """
    >>> without_runs("<|image_pad|><|image_pad|><|image_pad|><|image_pad|> What is it?")
    '<|image_pad|>×4 What is it?'
    """
    return IMAGE_RUN.sub(lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextImage:
    """An image in a text for people, where its mark stands for its tokens."""

    number: int
    """From 1 on, in the order in which the images of an episode are first seen. Equal images have the same number."""
    at: int
    """Where the mark begins: an index of the text's characters."""
    placed: PlacedImage

    @property
    def mark(self) -> str:
        return image_mark(self.number, len(self.placed.image))


def image_mark(number: int, tokens: int) -> str:
    """
    >>> image_mark(1, 24)
    '[image 1: 24 tokens]'
    """
    return f"[image {number}: {tokens} token{'' if tokens == 1 else 's'}]"


class SegmentReader:
    """Decodes parts of the segments of one episode, and counts its images."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._numbers: dict[str, int] = {}

    def observed(self, segment: Segment, start: int, end: int) -> tuple[str, tuple[TextImage, ...]]:
        """The text of the tokens [start, end), with a mark for each image that lies among them."""
        text, images = "", []
        for placed in segment.images:
            if start <= placed.start and placed.end <= end:
                text += self._between(segment, start, placed.start)
                number = self._numbers.setdefault(placed.image.digest, len(self._numbers) + 1)
                images.append(TextImage(number=number, at=len(text), placed=placed))
                text, start = text + images[-1].mark, placed.end
        return text + self._between(segment, start, end), tuple(images)

    def sampled(self, segment: Segment, start: int, end: int) -> str:
        """The text of the tokens [start, end), as they are."""
        return self._tokenizer.decode(segment.token_ids[start:end].tolist(), skip_special_tokens=False)

    def _between(self, segment: Segment, start: int, end: int) -> str:
        return without_runs(self.sampled(segment, start, end)) if start < end else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring tokens of one kind: a turn of the policy, or what it reads between turns."""

    start: int
    end: int
    """Tokens [start, end) of the segment."""
    action: bool
    text: str
    reward: float = 0.0
    logprob: float | None = None
    """Mean over the tokens; None where there is none."""
    images: tuple[TextImage, ...] = ()


def spans(segment: Segment, reader: SegmentReader) -> list[Span]:
    """The segment cut where its action mask changes, and where a turn ends that another follows at once; in order."""
    mask = segment.action_mask.tolist()
    ends = segment.action_mask.nonzero().flatten()[segment.turn_ends_A] + 1
    edges = sorted({0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), *ends.tolist(), len(mask)})
    found = []
    for start, end in pairwise(edges):
        sampled = mask[start]
        text, images = (reader.sampled(segment, start, end), ()) if sampled else reader.observed(segment, start, end)
        logprobs = segment.rollout_logprobs if sampled else None
        found.append(
            Span(
                start=start,
                end=end,
                action=sampled,
                text=text,
                reward=float(segment.turn_rewards[start:end].sum()),
                logprob=None if logprobs is None else float(logprobs[start:end].mean()),
                images=images,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of an episode, or a part of a history."""

    role: str
    """`assistant`, and for what was read `system`, `user`, `tool` or another role of the template; without a template
    that is known `prompt` before the first action and `environment` after it. `history`: the beginning of a later
    segment, which is that of an earlier one."""
    action: bool
    """Whether the policy sampled the turn, so that it is trained on."""
    text: str
    """For an action all tokens; for other messages the text without the template's tokens around it."""
    tokens: int
    reward: float = 0.0
    """The reward that this action earned."""
    versions: tuple[int, ...] = ()
    """The versions of the weights that sampled it; several when new weights came in the middle."""
    segment: int = 0
    images: tuple[TextImage, ...] = ()
    """The images in it, by the places of their marks in `text`."""


class TurnReader:
    """Reads the turns off recorded tokens, with the tokenizer that made them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_encoder", {})
        self._marks = {added[mark]: mark for mark in (*HEADERS, *OPENERS) if mark in added}

    def turns(self, segments: Sequence[Segment], *, text: str = "") -> list[Turn]:
        """The turns of a whole episode. What a later segment repeats of the one before it is one turn without a text.

        `text` is that of the episode. What stands in it after the last action is the environment's last answer, which
        nobody read: it becomes turns without tokens.
        """
        turns: list[Turn] = []
        before: list[Turn] = []
        reader = SegmentReader(self._tokenizer)
        for place, segment in enumerate(segments):
            own = self._segment(segment, place, reader)
            turns += _without_repetition(own, before) if place else own
            before = own
        return [*turns, *self._unread(turns, text)]

    def _unread(self, turns: Sequence[Turn], text: str) -> list[Turn]:
        if not text or not turns or not turns[-1].action or not turns[-1].text:
            return []
        _, found, tail = text.rpartition(turns[-1].text)
        if not found or not tail:
            return []
        marks = "|".join(map(re.escape, self._marks.values()))
        pieces = re.split(f"(?={marks})", tail) if marks else [tail]
        messages = [(piece, self._message(self._mark_of(piece), piece, otherwise=ENVIRONMENT)) for piece in pieces]
        return [
            Turn(role=message.role, action=False, text=message.said, tokens=0, segment=turns[-1].segment)
            for piece, message in messages
            if message.said and not NOTHING_SAID.fullmatch(piece)
        ]

    def _mark_of(self, text: str) -> str | None:
        return next((mark for mark in self._marks.values() if text.startswith(mark)), None)

    def _segment(self, segment: Segment, place: int, reader: SegmentReader) -> list[Turn]:
        turns: list[Turn] = []
        for span in spans(segment, reader):
            if span.action:
                versions = segment.versions[span.start : span.end].unique().tolist()
                turns.append(
                    Turn(
                        role=ASSISTANT,
                        action=True,
                        text=span.text,
                        tokens=span.end - span.start,
                        # float32 sums have digits that nobody gave
                        reward=float(f"{span.reward:.6g}"),
                        versions=tuple(versions),
                        segment=place,
                    )
                )
            else:
                turns += self._observed(segment, span, first=not turns, place=place, reader=reader)
        return turns

    def _observed(self, segment: Segment, span: Span, *, first: bool, place: int, reader: SegmentReader) -> list[Turn]:
        """The messages in what the policy read. Each token counts for one of them."""
        ids = segment.token_ids[span.start : span.end].tolist()
        starts = [span.start + i for i, token in enumerate(ids) if token in self._marks]
        edges = sorted({span.start, *starts, span.end})
        turns: list[Turn] = []
        waiting = 0
        for start, end in pairwise(edges):
            tokens = end - start + waiting
            text, images = reader.observed(segment, start, end)
            mark = self._marks.get(ids[start - span.start])
            message = self._message(mark, text, otherwise=PROMPT if first else ENVIRONMENT)
            between = start not in starts and NOTHING_SAID.fullmatch(text) is not None
            if between and end < span.end:
                waiting = tokens  # what closes the message before, and opens the next
                continue
            waiting = 0
            if turns and end == span.end and message.role == ASSISTANT and not message.said:
                # The opening of the action that follows.
                turns[-1] = replace(turns[-1], tokens=turns[-1].tokens + tokens)
                continue
            moved = tuple(replace(image, at=image.at - message.start) for image in images)
            turns.append(
                Turn(role=message.role, action=False, text=message.said, tokens=tokens, segment=place, images=moved)
            )
        return turns

    def _message(self, mark: str | None, text: str, *, otherwise: str) -> _Message:
        """What is said in a text that begins with `mark`, if with any."""
        if mark is None:
            return _Message(otherwise, text, 0)
        # What stands after the message goes first: then lengths tell how much is cut off before it.
        text = text.rstrip()
        said = text.lstrip().removeprefix(mark)
        role = OPENERS.get(mark, "")
        if not role:
            header = HEADERS[mark].match(said + "\n")
            if header is None:
                return _Message(otherwise, said, len(text) - len(said))
            role, said = header[1].lower(), said[header.end() :]
        said = said.lstrip()
        start = len(text) - len(said)
        while closer := CLOSERS.search(said):
            said = said[: closer.start()]
        said = said.strip()
        if said.startswith("<tool_response>"):
            role = TOOL
        return _Message(ROLES.get(role, role), said, start)


class _Message(NamedTuple):
    role: str
    said: str
    start: int
    """Where it begins in the text that it was read from."""


def _without_repetition(turns: list[Turn], before: list[Turn]) -> list[Turn]:
    """The same with its common beginning with `before` as one turn."""
    same = 0
    for turn, earlier in zip(turns, before, strict=False):
        if turn.action or _said(turn) != _said(earlier):
            break
        same += 1
    if same == 0:
        return turns
    tokens = sum(turn.tokens for turn in turns[:same])
    history = Turn(role=HISTORY, action=False, text="", tokens=tokens, segment=turns[0].segment)
    return [history, *turns[same:]]


def _said(turn: Turn) -> tuple[str, str, tuple[str, ...]]:
    """Role, text and images, to compare turns: an answer that is read again in a later segment has no end-of-sequence
    token."""
    text = turn.text
    while closer := CLOSERS.search(text):
        text = text[: closer.start()]
    return turn.role, text.strip(), tuple(image.placed.image.digest for image in turn.images)
