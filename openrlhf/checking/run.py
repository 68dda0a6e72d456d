"""The check of a file whose kind is known: try it, and tell people what was seen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence

from openrlhf.agents.episodes import AgentFileError, EpisodeError
from openrlhf.checking.agent_check import agent_warnings, check_agent
from openrlhf.checking.display import Display, agent_summary, played_by, reward_summary
from openrlhf.checking.options import CheckOptions, Kind, captured_stderr, replay
from openrlhf.checking.reward_check import check_reward, reward_warnings
from openrlhf.checking.workbench import Workbench, workbench
from openrlhf.config.fields import ConfigError
from openrlhf.data.files import DataError
from openrlhf.models.loading import ModelLoadError
from openrlhf.rewards.base import RewardError

USER_ERRORS = (RewardError, AgentFileError, EpisodeError, DataError, ModelLoadError, ConfigError)
"""Errors whose text is all a user needs: no traceback."""

RUN_FLAGS = ("--reward.remote_url: ", "--train.agent_func_path: ")
"""The beginnings of errors that name the file by its flag, as in a run."""


def check(options: CheckOptions, kinds: Sequence[Kind]) -> int:
    """Exit status: 0 when training can use the file, else 1 and one line on stderr that says why not."""
    display = Display(sys.stdout)
    with contextlib.ExitStack() as held:
        printed = held.enter_context(captured_stderr())
        said = held.enter_context(collected_warnings())
        try:
            with display.working(options.file):
                tried, warnings = asyncio.run(_check(options, kinds, display))
        except USER_ERRORS as error:
            held.close()
            replay(printed)
            print(f"error: {_one_line(error)}", file=sys.stderr)
            return 1
    replay(printed)
    if printed:
        warnings.append(f"it printed {len(printed)} lines, shown above; a run has them on stderr, between its own")
    display.verdict(options.file, tried, [*warnings, *said])
    return 0


async def _check(options: CheckOptions, kinds: Sequence[Kind], display: Display) -> tuple[list[str], list[str]]:
    """Shows what was seen. Returns what was tried, in a sentence for each kind, and the warnings.

    Raises one of `USER_ERRORS`.
    """
    tried: list[str] = []
    warnings: list[str] = []
    with workbench(options) as bench:
        for kind in kinds:
            sentence, found = await (_reward(bench, display) if kind is Kind.REWARD else _agent(bench, display))
            tried.append(sentence)
            warnings += found
    return tried, warnings


async def _reward(bench: Workbench, display: Display) -> tuple[str, list[str]]:
    judged = await check_reward(bench)
    display.rewards(bench.options.file, judged)
    return reward_summary(judged), reward_warnings(judged)


async def _agent(bench: Workbench, display: Display) -> tuple[str, list[str]]:
    played = await check_agent(bench)
    display.episodes(bench.options.file, played, bench.tokenizer)
    warnings = agent_warnings(played, bench.tokenizer, max_steps=bench.options.max_steps)
    return agent_summary(played, bench.tokenizer, by=played_by(bench.options.file)), warnings


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    for flag in RUN_FLAGS:
        text = text.removeprefix(flag)
    return text


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of the parts of training, which would go to the log. Of lines that differ only in numbers,
    the last one is kept."""
    collector = _Collector()
    logger = logging.getLogger("openrlhf")
    logger.addHandler(collector)
    try:
        yield collector.lines
    finally:
        logger.removeHandler(collector)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._index: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        at = self._index.setdefault(str(record.msg), len(self.lines))
        self.lines[at:] = [record.getMessage(), *self.lines[at + 1 :]]
