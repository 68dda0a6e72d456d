"""A reward file on a few prompts: one call each, as in training, and what is odd about its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from openrlhf.agents.episodes import OwnEpisodes
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.checking.workbench import Workbench
from openrlhf.rewards.base import Reward, RewardRequest
from openrlhf.rewards.function_file import FunctionFileReward
from openrlhf.types import Prompt

SLOW_SECONDS = 1.0
CLIP_RANGE = (-10.0, 10.0)
"""The range to which training clips rewards unless --reward.clip_range says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response that is judged."""

    text: str
    written: bool
    """Whether we wrote the response, with the label in it, to see the reward of a right answer; otherwise the model
    sampled it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPrompt:
    """One call of `reward_func`."""

    prompt: Prompt
    answers: tuple[Answer, ...]
    rewards: tuple[Reward, ...]
    seconds: float


async def check_reward(bench: Workbench) -> list[JudgedPrompt]:
    """Every prompt judged, one call after another. Raises RewardError at the first that fails."""
    options = bench.options
    source = FunctionFileReward(options.file, timeout=options.timeout, start_timeout=options.start_timeout)
    try:
        await source.start()
        return [await _judge(bench, source, prompt) for prompt in bench.prompts]
    finally:
        await source.close()


async def _judge(bench: Workbench, source: FunctionFileReward, prompt: Prompt) -> JudgedPrompt:
    answers = [*await _sampled(bench, prompt), *written_answers(prompt.label, eos=bench.tokenizer.eos_token or "")]
    request = RewardRequest(
        queries=tuple(prompt.text + answer.text for answer in answers),
        prompts=(prompt.text,) * len(answers),
        labels=(prompt.label,) * len(answers),
        name=prompt.where,
    )
    began = time.monotonic()
    rewards = await source.score(request)
    seconds = time.monotonic() - began
    return JudgedPrompt(prompt=prompt, answers=tuple(answers), rewards=tuple(rewards), seconds=seconds)


async def _sampled(bench: Workbench, prompt: Prompt) -> list[Answer]:
    episodes = OwnEpisodes(
        SingleTurnAgentExecutor(), engine=bench.engine, tokenizer=bench.tokenizer, max_length=bench.options.max_len
    )
    played = await asyncio.gather(
        *(episodes.play(prompt, bench.sampling_params(prompt, sample)) for sample in range(bench.options.n))
    )
    return [Answer(text=episode.text[len(prompt.text) :], written=False) for episode in played]


def written_answers(label: object, *, eos: str) -> list[Answer]:
    """The label in the forms that rewards look for; none if it is not a short text or a number."""
    if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
        return []
    forms = (f"{label}", f"The answer is \\boxed{{{label}}}.")
    return [Answer(text=form + eos, written=True) for form in forms]


def reward_warnings(judged: Sequence[JudgedPrompt]) -> list[str]:
    """Warnings about rewards that training would accept and that are seldom meant."""
    warnings = []
    rewards = [reward.reward for call in judged for reward in call.rewards]
    scores = [reward.score for call in judged for reward in call.rewards if reward.score is not None]
    if len(set(rewards)) == 1 and len(rewards) > 1:
        about, unless = "", ""
        if any(answer.written for call in judged for answer in call.answers):
            about = ", right answers included"
            unless = ", unless it expects another form of answers or labels (--prompt_data takes yours)"
        labels = about_labels([call.prompt for call in judged])
        warnings.append(
            f"all {len(rewards)} rewards are {rewards[0]:g}{about}: nothing can be learned from that{unless}{labels}"
        )
    elif all(len({reward.reward for reward in call.rewards}) == 1 for call in judged):
        warnings.append(
            "the samples of a prompt always get the same reward: estimators that compare them learn nothing"
        )
    warnings += range_warnings(rewards, scores)
    if (slowest := max(call.seconds for call in judged)) > SLOW_SECONDS:
        warnings.append(f"a call took {slowest:.1f} s; it is made once per prompt, 16 at a time")
    return warnings


def about_labels(prompts: Sequence[Prompt]) -> str:
    """A possible cause of rewards that are all the same: prompts without labels have "", which every text contains."""
    return "; every label is empty: is --label_key missing?" if all(prompt.label == "" for prompt in prompts) else ""


def range_warnings(rewards: Sequence[float], scores: Sequence[float]) -> list[str]:
    """Rewards that would be clipped, scores that are no share of success."""
    warnings = []
    low, high = CLIP_RANGE
    if outside := [reward for reward in rewards if not low <= reward <= high]:
        worst = max(outside, key=abs)
        warnings.append(
            f"{len(outside)} of {len(rewards)} rewards are outside [{low:g}, {high:g}], such as {worst:g}: training "
            "clips them (--reward.clip_range)"
        )
    if outside := [score for score in scores if not 0 <= score <= 1]:
        worst = max(outside, key=abs)
        warnings.append(
            f"{len(outside)} of {len(scores)} scores are outside [0, 1], such as {worst:g}: dynamic filtering and "
            "pass@k take them for success rates"
        )
    return warnings


def log_names(judged: Sequence[JudgedPrompt]) -> list[str]:
    """The names in `extra_logs`, in the order in which they came."""
    return list(dict.fromkeys(chain.from_iterable(reward.extra_logs for call in judged for reward in call.rewards)))
