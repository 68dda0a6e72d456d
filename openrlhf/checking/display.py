"""A check's findings for people: colours on a terminal, plain marks in a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf.agents.base import Episode
from openrlhf.checking.agent_check import PlayedEpisode, num_turns
from openrlhf.checking.image_display import ImageDisplay
from openrlhf.checking.reward_check import JudgedPrompt, log_names
from openrlhf.observability.turns import SegmentReader, Span, spans
from openrlhf.worlds.environments import is_world

PIPE_WIDTH = 120
MOST_CHARACTERS = 600
"""The most characters of one turn or observation: the middle of a longer one is left out."""
MOST_SIDES = 4
"""The most agents of a game that are shown side by side."""


class Display:
    def __init__(self, file: IO[str]) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = PIPE_WIDTH
        self._images = ImageDisplay(self._console)

    def working(self, file: Path) -> contextlib.AbstractContextManager[Any]:
        """Something that moves, on a terminal only."""
        if self._console.is_terminal:
            return self._console.status(Text(f"trying {file.name} …"))
        return contextlib.nullcontext()

    def rewards(self, file: Path, judged: Sequence[JudgedPrompt]) -> None:
        """A table per prompt, then all of them in a line or two."""
        self._head(f"{file.name}: reward_func")
        logs = log_names(judged)
        for call in judged:
            self._print(Text.assemble(
                f"\n{shown(call.prompt.text, 60)}", ("  label ", "dim"), shown(repr(call.prompt.label), 30)
            ))  # fmt: skip
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            table.add_column("")
            table.add_column("response", overflow="ellipsis", no_wrap=True, ratio=1)
            for name in ("reward", "score", *logs):
                table.add_column(Text(name), justify="right")
            for answer, reward in zip(call.answers, call.rewards, strict=True):
                numbers = [reward.reward, reward.score, *(reward.extra_logs.get(name) for name in logs)]
                table.add_row(
                    Text("written" if answer.written else "sampled", style="dim"),
                    Text(shown(answer.text, 60)),
                    *(_number(value) for value in numbers),
                )
            self._print(table)
        rewards = [reward.reward for call in judged for reward in call.rewards]
        differing = sum(len({reward.reward for reward in call.rewards}) > 1 for call in judged)
        slowest = max(call.seconds for call in judged)
        self._print(
            f"\n{len(judged)} calls, {len(rewards)} samples: rewards from {min(rewards):g} to {max(rewards):g}, mean "
            f"{sum(rewards) / len(rewards):.3g}; they differ within {differing} of {len(judged)} prompts; the slowest "
            f"call took {_duration(slowest)}"
        )
        if any(answer.written for call in judged for answer in call.answers):
            self._print("(sampled: by the model; written: by this check, with the label in it)", style="dim")

    def episodes(self, file: Path, played: Sequence[PlayedEpisode], tokenizer: Any) -> None:
        """The one with most turns in full, with the other roles of its game beside it; then all in a line each."""
        self._head(f"{file.name}: {played_by(file)}")
        longest = max(played, key=lambda p: num_turns(p.episode, tokenizer))
        self._episode(longest, tokenizer)
        roles = any(p.episode.agent for p in played)
        if roles:
            self._game([p for p in played if p.prompt.ordinal == longest.prompt.ordinal], longest, tokenizer)
        if played[0].together:
            self._print(f"\nSamples of a prompt are played together: {played[0].together}.")
        forks = any(p.episode.fork for p in played)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("prompt", no_wrap=True)
        seen = any(segment.images for p in played for segment in p.episode.segments)
        table.add_column("sample", justify="right")
        for name in (*(["agent"] if roles else []), *(["shares"] if forks else [])):
            table.add_column(name, no_wrap=True)
        for name in ("turns", *(["images"] if seen else []), "tokens", "trained", "reward", "score"):
            table.add_column(name, justify="right")
        table.add_column("ended")
        names = told_apart([p.prompt.text for p in played])
        for p, name in zip(played, names, strict=True):
            episode = p.episode
            table.add_row(
                Text(shown(name, 17)),
                str(p.sample + 1),
                *([Text(shown(episode.agent, 20))] if roles else []),
                *([_shared(episode)] if forks else []),
                str(num_turns(episode, tokenizer)),
                *([str(sum(len(segment.images) for segment in episode.segments))] if seen else []),
                str(sum(len(segment) for segment in episode.segments)),
                str(sum(segment.num_actions for segment in episode.segments)),
                _number(episode.reward),
                _number(episode.score),
                "by a limit" if episode.truncated else "by itself",
            )
        self._print(f"\nAll {len(played)} episodes:")
        self._print(table)

    def verdict(self, file: Path, tried: Sequence[str], warnings: Sequence[str]) -> None:
        """The warnings, then that the file works, with a sentence about what was tried."""
        if warnings:
            self._print("")
        for warning in warnings:
            self._print(Text.assemble(("warning: ", "yellow"), shown(warning, 2000)), soft_wrap=True)
        count = f", with {len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else ""
        works = Text(f"\nok{count}: ", style="green")
        works.append(f"{shown(file.name, 200)} works. ", style="default")
        works.append(" ".join(tried), style="default")
        self._print(works, soft_wrap=True)

    def _episode(self, one: PlayedEpisode, tokenizer: Any) -> None:
        episode = one.episode
        ended = "truncated: it met a limit" if episode.truncated else "it ended by itself"
        self._print(f"\nOne episode, as it is trained on ({ended}):")
        reader = SegmentReader(tokenizer)
        for segment in episode.segments:
            parts = spans(segment, reader)
            self._print("")
            self._print(self._marked(parts), soft_wrap=True)
            self._print("")
            self._print(self._turn_table(parts))
            self._images.show([image for span in parts for image in span.images])
        logs = "".join(f", {name} {value:g}" for name, value in episode.extra_logs.items())
        self._print(f"\nreward {_number(episode.reward)}, score {_number(episode.score)}{logs}")

    def _game(self, group: Sequence[PlayedEpisode], one: PlayedEpisode, tokenizer: Any) -> None:
        """What each role of a game has read and said, side by side: the sample `one`, and of each other role the sample
        that is nearest to it."""
        nearest = {one.episode.agent: one}
        for p in sorted(group, key=lambda p: abs(p.sample - one.sample)):
            nearest.setdefault(p.episode.agent, p)
        sides = [nearest[agent] for agent in sorted(nearest)][:MOST_SIDES]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
        for p in sides:
            table.add_column(Text(f"{shown(p.episode.agent, 30)} (sample {p.sample + 1})"), ratio=1)
        reader = SegmentReader(tokenizer)
        table.add_row(*(self._marked([s for seg in p.episode.segments for s in spans(seg, reader)]) for p in sides))
        table.add_row(*(Text(f"reward {_number(p.episode.reward)}", style="dim") for p in sides))
        self._print("\nOne game, as each of its agents has seen it:\n")
        self._print(table)

    def _marked(self, parts: Sequence[Span]) -> Text:
        """The text of all tokens, with those that the policy sampled marked."""
        text = Text()
        for span in parts:
            words = shown(span.text, MOST_CHARACTERS, lines=True)
            if not span.action:
                text.append(words, style="dim")
            elif self._console.is_terminal:
                text.append(words, style="bold black on green")
            else:
                text.append(f"⟦{words}⟧")
        return text

    def _turn_table(self, parts: Sequence[Span]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("")
        for name in ("tokens", "from", "to", "trained on", "reward", "mean log-prob"):
            table.add_column(name, justify="right")
        turn = 0
        for span in parts:
            turn += span.action
            what = f"turn {turn}" if span.action else ("feedback" if turn else "prompt")
            earned = _number(span.reward) if span.action else ""
            logprob = ("none" if span.logprob is None else f"{span.logprob:.3f}") if span.action else ""
            trained = "yes" if span.action else "no"
            table.add_row(what, *map(str, (span.end - span.start, span.start, span.end)), trained, earned, logprob)
        return table

    def _head(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def _print(self, what: Any, **how: Any) -> None:
        self._console.print(what, **how)


def reward_summary(judged: Sequence[JudgedPrompt]) -> str:
    """How many calls there were, and what they returned."""
    rewards = [reward for call in judged for reward in call.rewards]
    values = [reward.reward for reward in rewards]
    also = [f"{name} in extra_logs" for name in log_names(judged)]
    if any(reward.score is not None for reward in rewards):
        also = ["a score for each", *also]
    more = f", {', '.join(also)}" if also else ""
    return (
        f"reward_func was called {_times(len(judged))}, once for each prompt, and returned {len(values)} "
        f"reward{'s' if len(values) > 1 else ''} {_range(values)}{more}. A run takes the file with --reward.remote_url."
    )


def played_by(file: Path) -> str:
    """What of the file plays episodes."""
    return "World" if is_world(file) else "AgentExecutor"


def agent_summary(played: Sequence[PlayedEpisode], tokenizer: Any, *, by: str) -> str:
    """How many episodes were played, how far, and with which rewards."""
    turns = [num_turns(one.episode, tokenizer) for one in played]
    rewards = [one.episode.reward for one in played if one.episode.reward is not None]
    trained = sum(segment.num_actions for one in played for segment in one.episode.segments)
    cut = sum(one.episode.truncated for one in played)
    prompts = len({one.prompt.ordinal for one in played})
    earned = _earned(rewards) if rewards else "they have no reward of their own"
    ends = f"{len(played) - cut} ended by {'itself' if len(played) - cut == 1 else 'themselves'}, {cut} by a limit"
    length = f"{_span(turns)} turn{'s' if max(turns) > 1 else ''}"
    return (
        f"{by} played {len(played)} episode{'s' if len(played) > 1 else ''} of {prompts} "
        f"prompt{'s' if prompts > 1 else ''}, with {length}, {trained:,} of whose tokens would be trained "
        f"on; {earned}; {ends}. A run takes the file with --train.agent_func_path."
    )


def _shared(episode: Episode) -> str:
    return "" if episode.fork is None else f"{episode.fork.actions} tokens with {episode.fork.sample + 1}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"of {low:.4g}" if low == high else f"from {low:.4g} to {high:.4g}"


def _earned(rewards: Sequence[float]) -> str:
    return f"each episode earned {rewards[0]:.4g}" if min(rewards) == max(rewards) else f"they earned {_range(rewards)}"


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def shown(text: str, most: int, *, lines: bool = False) -> str:
    """The text without what would upset a terminal, and without the middle of a long one. `lines` keeps line ends."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} … {text[len(text) - half :]}"
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else "⏎" if c == "\n" else ascii(c)[1:-1] for c in text
    )


def told_apart(texts: Sequence[str]) -> list[str]:
    """The prompts without the lines and special tokens that all have in common: mostly those of a chat template."""
    if len(set(texts)) == 1:
        return list(texts)
    start = _in_common(texts, "\n>")
    end = _in_common([text[start:][::-1] for text in texts], "\n<")
    return [text[start : len(text) - end] for text in texts]


def _in_common(texts: Sequence[str], edges: str) -> int:
    """Length of the beginning that all have in common, up to the last of `edges` in it."""
    length = sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))
    return max(texts[0].rfind(edge, 0, length) for edge in edges) + 1


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
