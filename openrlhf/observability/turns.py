"""An episode as people read it: turns with roles, from recorded tokens.

What the policy sampled is known for sure, from the action mask. Who said the rest is read off the chat template's own
tokens, as far as those are known here; without them it is the prompt, or the environment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.types import Segment

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
PADS = re.compile(r"(<\|?\w*pad\|?>)(?:\1){3,}")
"""A picture in a prompt: hundreds of the same token."""


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


def spans(segment: Segment, tokenizer: Any) -> list[Span]:
    """The segment cut where its action mask changes, and where a turn ends that another follows at once; in order."""
    mask = segment.action_mask.tolist()
    ends = segment.action_mask.nonzero().flatten()[segment.turn_ends_A] + 1
    edges = sorted({0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), *ends.tolist(), len(mask)})
    return [
        Span(
            start=start,
            end=end,
            action=mask[start],
            text=tokenizer.decode(segment.token_ids[start:end].tolist(), skip_special_tokens=False),
            reward=float(segment.turn_rewards[start:end].sum()),
            logprob=float(segment.rollout_logprobs[start:end].mean())
            if mask[start] and segment.rollout_logprobs is not None
            else None,
        )
        for start, end in pairwise(edges)
    ]


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
        for place, segment in enumerate(segments):
            own = self._segment(segment, place)
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
        messages = [(piece, *self._message(self._mark_of(piece), piece, otherwise=ENVIRONMENT)) for piece in pieces]
        return [
            Turn(role=role, action=False, text=said, tokens=0, segment=turns[-1].segment)
            for piece, role, said in messages
            if said and not NOTHING_SAID.fullmatch(piece)
        ]

    def _mark_of(self, text: str) -> str | None:
        return next((mark for mark in self._marks.values() if text.startswith(mark)), None)

    def _segment(self, segment: Segment, place: int) -> list[Turn]:
        turns: list[Turn] = []
        for span in spans(segment, self._tokenizer):
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
                ids = segment.token_ids[span.start : span.end].tolist()
                turns += self._observed(ids, first=not turns, place=place)
        return turns

    def _observed(self, ids: list[int], *, first: bool, place: int) -> list[Turn]:
        """The messages in what the policy read. Each token counts for one of them."""
        starts = [i for i, token in enumerate(ids) if token in self._marks]
        edges = sorted({0, *starts, len(ids)})
        turns: list[Turn] = []
        waiting = 0
        for start, end in pairwise(edges):
            tokens = end - start + waiting
            text = self._tokenizer.decode(ids[start:end], skip_special_tokens=False)
            mark = self._marks.get(ids[start])
            role, said = self._message(mark, text, otherwise=PROMPT if first else ENVIRONMENT)
            between = start not in starts and NOTHING_SAID.fullmatch(text) is not None
            if between and end < len(ids):
                waiting = tokens  # what closes the message before, and opens the next
                continue
            waiting = 0
            if turns and end == len(ids) and role == ASSISTANT and not said:
                # The opening of the action that follows.
                turns[-1] = replace(turns[-1], tokens=turns[-1].tokens + tokens)
                continue
            turns.append(Turn(role=role, action=False, text=said, tokens=tokens, segment=place))
        return turns

    def _message(self, mark: str | None, text: str, *, otherwise: str) -> tuple[str, str]:
        """(role, what was said) of a text that begins with `mark`, if with any."""
        text = PADS.sub(lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)
        if mark is None:
            return otherwise, text
        text = text.strip().removeprefix(mark)
        role = OPENERS.get(mark, "")
        if not role:
            header = HEADERS[mark].match(text + "\n")
            if header is None:
                return otherwise, text
            role, text = header[1].lower(), text[header.end() :]
        while closer := CLOSERS.search(text):
            text = text[: closer.start()]
        text = text.strip()
        if text.startswith("<tool_response>"):
            role = TOOL
        return ROLES.get(role, role), text


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


def _said(turn: Turn) -> tuple[str, str]:
    """Role and text, to compare turns: an answer that is read again in a later segment has no end-of-sequence token."""
    text = turn.text
    while closer := CLOSERS.search(text):
        text = text[: closer.start()]
    return turn.role, text.strip()
