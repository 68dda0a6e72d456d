"""An agent file on a few prompts: episodes as they will be trained on, and what is odd about them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from openrlhf.agents.base import Episode, FailedEpisode
from openrlhf.agents.episodes import AgentEpisodes, EpisodeError
from openrlhf.checking.reward_check import SLOW_SECONDS, about_labels, range_warnings
from openrlhf.checking.workbench import Workbench
from openrlhf.observability.turns import SegmentReader, spans
from openrlhf.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    prompt: Prompt
    sample: int
    episode: Episode
    together: str = ""
    """How the samples of its prompt were played together; "": they were not."""


async def check_agent(bench: Workbench) -> list[PlayedEpisode]:
    """`n` episodes of every prompt. Raises AgentFileError, or EpisodeError at the first that fails.

    The first is played alone, so that most mistakes are found at once; then the others together, as in training. Where
    the samples of a prompt are played together, that is the first prompt's.
    """
    options = bench.options
    episodes = AgentEpisodes(
        bench.episode_settings(),
        engine=bench.engine,
        hosts=options.agent_hosts,
        step_timeout=options.timeout,
        start_timeout=options.start_timeout,
        slow_seconds=SLOW_SECONDS,
    )
    keys = [(prompt, sample) for prompt in bench.prompts for sample in range(options.n)]

    async def play(prompt: Prompt, sample: int) -> PlayedEpisode:
        try:
            episode = await episodes.play(prompt, bench.sampling_params(prompt, sample))
        except EpisodeError as error:
            raise EpisodeError(f"{prompt.where}: {error}", retry=error.retry) from error
        return PlayedEpisode(prompt=prompt, sample=sample, episode=episode)

    async def play_together(prompt: Prompt) -> list[PlayedEpisode]:
        params = [bench.sampling_params(prompt, sample) for sample in range(options.n)]
        try:
            played = await episodes.play_group(prompt, params)
        except EpisodeError as error:
            raise EpisodeError(f"{prompt.where}: {error}", retry=error.retry) from error
        for sample, one in enumerate(played):
            if isinstance(one, FailedEpisode):
                raise EpisodeError(f"{prompt.where}: sample {sample + 1}: {one.error}", retry=False)
        return [PlayedEpisode(prompt=prompt, sample=i, episode=one, together=episodes.group_play)
                for i, one in enumerate(played) if isinstance(one, Episode)]  # fmt: skip

    try:
        await episodes.start()
        if episodes.plays_groups:
            group = await play_together(bench.prompts[0])
            groups = await asyncio.gather(*(play_together(prompt) for prompt in bench.prompts[1:]))
            return [one for played in (group, *groups) for one in played]
        first = await play(*keys[0])
        return [first, *await asyncio.gather(*(play(prompt, sample) for prompt, sample in keys[1:]))]
    finally:
        await episodes.close()


def agent_warnings(played: Sequence[PlayedEpisode], tokenizer: Any, *, max_steps: int) -> list[str]:
    """Warnings about results that training would accept and that are seldom meant."""
    episodes = [one.episode for one in played]
    turns = [num_turns(episode, tokenizer) for episode in episodes]
    return [
        *_about_groups(played),
        *_about_rewards(episodes, about_labels([one.prompt for one in played])),
        *_about_ends(episodes, turns, max_steps=max_steps),
        *_about_tokens(episodes, tokenizer),
    ]


def num_turns(episode: Episode, tokenizer: Any) -> int:
    reader = SegmentReader(tokenizer)
    return sum(span.action for segment in episode.segments for span in spans(segment, reader))


def _about_groups(played: Sequence[PlayedEpisode]) -> Iterator[str]:
    roles = Counter((one.prompt.ordinal, one.episode.agent) for one in played if one.episode.agent)
    if alone := sorted({agent for (_, agent), count in roles.items() if count < 2}):
        yield (
            f"only one sample of a prompt plays {', '.join(alone)}: estimators that compare samples compare those of "
            "one role, and train on no such sample; more --n (--rollout.n_samples_per_prompt in a run) gives it others"
        )
    forks = [one for one in played if one.episode.fork is not None]
    for one in forks:
        of_prompt = [other for other in played if other.prompt.ordinal == one.prompt.ordinal]
        if all(other.episode.fork is not None or other.sample == 0 for other in of_prompt):
            yield (
                "all samples of a prompt begin with the same sampled tokens: nothing tells whether these were good, so "
                "that estimators that compare samples do not train on them"
            )
            break


def _about_rewards(episodes: Sequence[Episode], labels: str) -> Iterator[str]:
    rewards = [e.reward for e in episodes if e.reward is not None]
    if len(rewards) < len(episodes):
        yield (
            f"{len(episodes) - len(rewards)} of {len(episodes)} episodes have no reward of their own: the run needs "
            "--reward.remote_url to judge them"
        )
    if rewards and not any(rewards):
        yield f"no episode earned anything: all {len(rewards)} rewards are 0{labels}"
    elif len(rewards) > 1 and len(set(rewards)) == 1:
        yield f"all {len(rewards)} episodes earned {rewards[0]:g}: nothing can be learned from that{labels}"
    yield from range_warnings(rewards, [e.score for e in episodes if e.score is not None])


def _about_ends(episodes: Sequence[Episode], turns: Sequence[int], *, max_steps: int) -> Iterator[str]:
    cut = [e.truncated and n >= max_steps for e, n in zip(episodes, turns, strict=True)]
    if all(cut):
        yield (
            f"no episode was ever done: all {len(cut)} met this check's limit of {max_steps} turns; --max_steps sets "
            "it, and a run has none without that flag"
        )
    if many := sum(len(e.segments) > 1 for e in episodes):
        yield (
            f"{many} of {len(episodes)} episodes are several token sequences, which share the reward: a request did "
            "not begin with all that had been read and sampled before it"
        )


def _about_tokens(episodes: Sequence[Episode], tokenizer: Any) -> Iterator[str]:
    segments = [segment for e in episodes for segment in e.segments]
    if any(segment.rollout_logprobs is None for segment in segments):
        yield "some actions have no log-probs: off-policy correction (--algo.advantage.is_correction_enable) needs them"
    if unmatched := sum(e.unmatched_ranges for e in episodes):
        yield (
            f"{unmatched} action ranges were not sampled by llm_engine.generate as they stand: the policy is trained "
            "on tokens it did not say (was a text tokenised again?)"
        )
    reader = SegmentReader(tokenizer)
    parts = [spans(segment, reader) for segment in segments]
    feedback = [
        before.text for each in parts for before, after in pairwise(each[1:]) if after.action and not before.action
    ]

    def has_markers(text: str) -> bool:
        return any(marker in text for marker in tokenizer.all_special_tokens)

    bare = next((text for text in feedback if not has_markers(text)), None)
    if bare is not None and any(has_markers(each[0].text) for each in parts if not each[0].action):
        yield (
            f"feedback {bare[-20:]!r} has none of the turn markers that the prompt has: to a chat model it is part of "
            "its own turn"
        )
    if glued := next((text for text in feedback if text[-1:].isalnum() or text[-1:] in tuple(".,;!?")), None):
        yield (
            f"feedback ends in {glued[-20:]!r}, and the policy's next turn follows without so much as a space: end it "
            "with a separator, or with what opens the assistant's turn"
        )
