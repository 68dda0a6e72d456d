"""The results of users' `reset`, `step` and `execute`, checked once, here, and turned into records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.agents.base import Episode
from openrlhf.agents.images import BadImageError, EpisodeImages, PlacedTokens, images_of
from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.recording_engine import RecordingEngine, segments_from_calls
from openrlhf.agents.values import (
    BadValueError,
    as_flag,
    as_images,
    as_list,
    as_logs,
    as_number,
    as_numbers,
    as_sampling_params,
    as_token_ids,
    listed,
    shown,
)
from openrlhf.types import FinishReason, Fork, Generation, PlacedImage, Segment, StepResult

HIGHEST_LOGPROB = 1e-3
"""A log-prob is at most 0, give or take rounding."""


class Start(NamedTuple):
    """How an environment begins."""

    observation: str
    images: tuple[Any, ...] | None = None
    """None: those of the prompt."""


class Judgement(NamedTuple):
    """The rewards and logs that users' code gives an episode."""

    reward: float | None
    """None: the reward comes from elsewhere."""
    score: float | None
    extra_logs: dict[str, float]


def parse_reset(returned: Any) -> Start:
    """From {"observation": text}. Raises BadValueError."""
    found = _dict(returned, of="reset", expected='{"observation": text}')
    _require(found, "observation", of="reset", expected='{"observation": text}')
    observation = found["observation"]
    if not isinstance(observation, str):
        raise BadValueError(f"reset's 'observation' must be text, got {shown(observation)}")
    if not observation:
        raise BadValueError("reset's 'observation' is empty: the policy must read something before it speaks")
    images = found.get("images")
    return Start(observation, None if images is None else as_images(images, what="reset's 'images'"))


def parse_step(returned: Any) -> StepResult:
    """From the dict that `AgentInstanceBase.step` describes. Raises BadValueError."""
    expected = '{"rewards": number, "done": bool, "environment_feedback": text}'
    found = _dict(returned, of="step", expected=expected)
    for key in ("rewards", "done"):
        _require(found, key, of="step", expected=expected)
    feedback = found.get("environment_feedback")
    if feedback is not None and not isinstance(feedback, str):
        raise BadValueError(f"step's 'environment_feedback' must be text, got {shown(feedback)}")
    scores, params = found.get("scores"), found.get("sampling_params")
    return StepResult(
        reward=as_number(found["rewards"], what="step's 'rewards'"),
        done=as_flag(found["done"], what="step's 'done'"),
        score=None if scores is None else as_number(scores, what="step's 'scores'"),
        feedback=feedback or "",
        sampling_params=None if params is None else as_sampling_params(params, what="step's 'sampling_params'"),
        extra_logs=as_logs(found.get("extra_logs"), what="step's 'extra_logs'"),
        images=as_images(found.get("environment_images"), what="step's 'environment_images'"),
    )


def parse_episode(
    returned: Any,
    *,
    prompt: str,
    engine: RecordingEngine,
    hf_tokenizer: Any,
    max_length: int,
    images: Sequence[Any] | None = None,
) -> Episode:
    """From the dict that `AgentExecutorBase.execute` describes. Raises BadValueError.

    Versions, and log-probs that are not given, are those of the engine's own answers. What stands after the last action
    is left out of the tokens, because nothing is learned from it; what stands beyond `max_length` is cut. The images
    among the tokens are those that the engine was asked with.
    """
    expected = '{"observation_tokens": ids, "action_ranges": [(start, end), …], "reward": number or None, …}'
    found = _dict(returned, of="execute", expected=expected)
    judged = _judgement(found, of="execute", expected=expected)
    reward = judged.reward
    truncated, kept = found.get("truncated"), found.get("images")
    given = [key for key in ("observation_tokens", "action_ranges") if found.get(key) is not None]
    if len(given) == 2:
        tokens = _tokens_given(found, reward=reward, engine=engine, max_length=max_length, tokenizer=hf_tokenizer)
    elif given:
        (missing,) = {"observation_tokens", "action_ranges"} - set(given)
        raise BadValueError(f"execute returned '{given[0]}' without '{missing}': give both, or neither")
    else:
        tokens = _tokens_of_calls(found, reward=reward, engine=engine, tokenizer=hf_tokenizer)
    return Episode(
        segments=tokens.segments,
        text=prompt + hf_tokenizer.decode(tokens.answer_ids, skip_special_tokens=False),
        truncated=tokens.cut
        or (tokens.truncated if truncated is None else as_flag(truncated, what="execute's 'truncated'")),
        reward=reward,
        score=judged.score,
        extra_logs=judged.extra_logs,
        images=tuple(images or ()) if kept is None else as_images(kept, what="execute's 'images'"),
        unmatched_ranges=tokens.unmatched_ranges,
        agent=_agent(found.get("agent")),
    )


def check_group(returned: Any, *, samples: int) -> list[Any]:
    """What `execute_group` returned, one entry for each sample. Raises BadValueError."""
    expected = "a list with a dict (or an exception) for each sample"
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
        raise BadValueError(f"execute_group must return {expected}, got {shown(returned)}")
    results = list(returned)
    if len(results) != samples:
        raise BadValueError(f"execute_group returned {len(results)} results for {samples} samples; expected {expected}")
    return results


def parse_fork(found: Mapping[Any, Any], episode: Episode, *, sample: int, of: Sequence[Any]) -> Fork | None:
    """From the `forked_from` of sample number `sample`; `of` are the samples before it, some of which may be failures.
    Raises BadValueError."""
    value = found.get("forked_from")
    if value is None:
        return None
    what = "execute_group's 'forked_from'"
    try:
        other, tokens = as_token_ids(value, what=what)
    except ValueError:
        raise BadValueError(f"{what} must be (sample, tokens), got {shown(value)}") from None
    if other >= sample:
        raise BadValueError(
            f"{what} names sample {other}, which is not before sample {sample}: put the earlier one first"
        )
    if len(episode.segments) > 1:
        raise BadValueError(f"{what} is for samples of one token sequence each: give 'observation_tokens'")
    mine, first = episode.segments[0], of[other]
    actions = mine.action_mask[:tokens]
    if not isinstance(first, Episode):
        return Fork(other, int(actions.sum()))
    if len(first.segments) > 1:
        raise BadValueError(f"{what} is for samples of one token sequence each, and sample {other} has several")
    theirs = first.segments[0]
    if mine.token_ids[:tokens].tolist() != theirs.token_ids[:tokens].tolist():
        raise BadValueError(f"{what} says that the first {tokens} tokens are those of sample {other}: they are not")
    if actions.tolist() != theirs.action_mask[:tokens].tolist():
        raise BadValueError(f"{what}: the first {tokens} tokens have other 'action_ranges' in sample {other}")
    return Fork(other, int(actions.sum()))


def _agent(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadValueError(f"'agent' must be the name of a role, got {shown(value)}")
    return value


def parse_judgement(returned: Any, *, of: str) -> Judgement:
    """From {"reward", "scores", "extra_logs"}, which the function `of` returned. Raises BadValueError."""
    expected = '{"reward": number or None, "scores": number, "extra_logs": {name: number}}'
    return _judgement(_dict(returned, of=of, expected=expected), of=of, expected=expected)


def describe_episode(episode: Episode, *, prompt: str, label: Any) -> dict[str, Any]:
    """The dict that `execute` returns for an episode of one segment; `parse_episode` makes the same episode of it."""
    (segment,) = episode.segments
    places = segment.action_mask.nonzero().flatten()
    ends_A = segment.turn_ends_A
    starts_A = ends_A.roll(1)  # what follows an end begins a turn; and the first action does, for the last is an end
    ranges = zip(places[starts_A].tolist(), (places[ends_A] + 1).tolist(), strict=True)
    return {
        "prompt": prompt,
        "label": label,
        "observation_tokens": segment.token_ids.tolist(),
        "action_ranges": list(ranges),
        "rollout_log_probs": None if segment.rollout_logprobs is None else segment.rollout_logprobs.tolist(),
        "reward": episode.reward,
        "turn_rewards": None if episode.reward is None else segment.turn_rewards.tolist(),
        "scores": episode.score,
        "extra_logs": dict(episode.extra_logs),
        "truncated": episode.truncated,
        "images": list(episode.images),
        **({"agent": episode.agent} if episode.agent else {}),
    }


def _judgement(found: Mapping[Any, Any], *, of: str, expected: str) -> Judgement:
    _require(found, "reward", of=of, expected=expected, remedy="; None if somebody else judges the episode")
    reward = None if found["reward"] is None else as_number(found["reward"], what=f"{of}'s 'reward'")
    scores = found.get("scores")
    return Judgement(
        reward=reward,
        score=reward if scores is None else as_number(scores, what=f"{of}'s 'scores'"),
        extra_logs=as_logs(found.get("extra_logs"), what=f"{of}'s 'extra_logs'"),
    )


class _Tokens(NamedTuple):
    """The token side of what `execute` returned."""

    segments: tuple[Segment, ...]
    answer_ids: list[int]
    """From the first action on, whatever follows the last one included; an image is one token."""
    truncated: bool
    """Whether an answer of the engine met its token limit."""
    cut: bool = False
    """Whether actions stood beyond the episode's limit."""
    unmatched_ranges: int = 0


def _tokens_given(
    found: Mapping[Any, Any], *, reward: float | None, engine: RecordingEngine, max_length: int, tokenizer: Any
) -> _Tokens:
    """From `observation_tokens` and `action_ranges`, compared with the engine's calls."""
    given_ids = as_token_ids(found["observation_tokens"], what="execute's 'observation_tokens'")
    given_ranges = _ranges(found["action_ranges"], num_tokens=len(given_ids))
    logprobs_T = _logprobs(found.get("rollout_log_probs"), num_tokens=len(given_ids), ranges=given_ranges)
    rewards_T = _turn_rewards(found.get("turn_rewards"), num_tokens=len(given_ids), ranges=given_ranges, reward=reward)

    end_of_actions = given_ranges[-1][1]
    token_ids, ranges = given_ids[:end_of_actions], given_ranges
    images: tuple[PlacedImage, ...] = ()
    if (reader := images_of(tokenizer)) is not None:
        token_ids, images, origins = _with_images(token_ids, reader, engine)
        moved = {origin: index for index, origin in enumerate(origins) if origin is not None}
        ranges = [(moved[start], moved[end - 1] + 1) for start, end in given_ranges]
        logprobs_T = None if logprobs_T is None else _moved(logprobs_T, origins)
        rewards_T = _moved(rewards_T, origins)

    vocabulary = len(tokenizer)
    kept = [(start, min(end, max_length)) for start, end in ranges if start < max_length]
    if not kept:
        raise BadValueError(f"execute's first action begins at token {ranges[0][0]}, but max_length is {max_length}")
    final = kept[-1][1]
    # The last action token has what no turn has claimed, and what was earned beyond the limit.
    rewards_T[final - 1] += (reward or 0.0) - sum(rewards_T[:final])

    _check_known(token_ids, 0, kept[0][0], vocabulary=vocabulary)
    recorder = TokenRecorder(token_ids[: kept[0][0]], [placed for placed in images if placed.start < kept[0][0]])
    unmatched_ranges, truncated = 0, False
    for start, end in kept:
        had = len(recorder)
        _check_known(token_ids, had, start, vocabulary=vocabulary)
        new = [PlacedImage(at - had, image) for at, image in images if had <= at < start]
        recorder.append_observation(token_ids[had:start], new)
        sampled = engine.match_to_calls(token_ids, start, end, images)
        if sampled is None:
            _check_known(token_ids, start, end, vocabulary=vocabulary)
            unmatched_ranges += 1
            sampled = Generation(
                token_ids=token_ids[start:end],
                logprobs=None,
                versions=[engine.version] * (end - start),
                finish_reason=FinishReason.STOP,
            )
        truncated = truncated or sampled.finish_reason is FinishReason.LENGTH
        if logprobs_T is not None:
            sampled = dataclasses.replace(sampled, logprobs=logprobs_T[start:end])
        recorder.append_action(sampled, rewards=rewards_T[start:end])
    return _Tokens(
        segments=(recorder.segment(),),
        answer_ids=_one_token_each(token_ids, images, tokenizer, start=ranges[0][0]) + given_ids[end_of_actions:],
        truncated=truncated,
        cut=final < ranges[-1][1],
        unmatched_ranges=unmatched_ranges,
    )


def _check_known(token_ids: Sequence[int], start: int, end: int, *, vocabulary: int) -> None:
    """Check tokens that the engine has not sampled: a model has no embedding for an id that it does not know."""
    for index in range(start, end):
        if token_ids[index] >= vocabulary:
            raise BadValueError(
                f"execute's 'observation_tokens'[{index}] is {token_ids[index]}, but the tokenizer has {vocabulary} "
                "tokens"
            )


def _with_images(token_ids: list[int], reader: EpisodeImages, engine: RecordingEngine) -> PlacedTokens:
    """The tokens with all those of their images, which are the images of a call: best of one whose prompt these tokens
    begin with, the longest. Raises BadValueError."""
    asked = sorted(engine.calls, key=lambda call: len(call.prompt_ids), reverse=True)
    fitting: PlacedTokens | None = None
    for images in [tuple(placed.image for placed in call.images) for call in asked] + [()]:
        try:
            placed = reader.place(token_ids, images)
        except BadImageError:
            continue
        seen = [(at, image.digest) for at, image in placed.images]
        for call in asked:
            if call.prompt_ids == placed.token_ids[: len(call.prompt_ids)] and seen == [
                (at, image.digest) for at, image in call.images
            ]:
                return placed
        fitting = fitting or placed
    if fitting is None:
        raise BadValueError(
            "execute's 'observation_tokens' have image tokens, and the images of no call of llm_engine.generate fit "
            "them: give the tokens of the last call's prompt, with one image token for each image or all of them"
        )
    return fitting


def _moved(column: list[float], origins: Sequence[int | None]) -> list[float]:
    """The column of tokens among which there are those of images now, which have 0."""
    return [0.0 if origin is None else column[origin] for origin in origins]


def _one_token_each(
    token_ids: Sequence[int], images: Sequence[PlacedImage], tokenizer: Any, *, start: int
) -> list[int]:
    """The tokens from `start` on, for a text: each image is one token, as in the text of a prompt."""
    later = [PlacedImage(at - start, image) for at, image in images if at >= start]
    reader = images_of(tokenizer)
    return list(token_ids[start:]) if reader is None else reader.collapse(token_ids[start:], later)


def _tokens_of_calls(
    found: Mapping[Any, Any], *, reward: float | None, engine: RecordingEngine, tokenizer: Any
) -> _Tokens:
    """From the engine's calls alone."""
    for key in ("rollout_log_probs", "turn_rewards"):
        if found.get(key) is not None:
            raise BadValueError(f"execute returned '{key}' without 'observation_tokens' and 'action_ranges'")
    segments = segments_from_calls(engine.calls, reward=reward)
    if not segments:
        raise BadValueError("execute returned no 'observation_tokens' and never called llm_engine.generate")
    return _Tokens(
        segments=segments,
        answer_ids=after_prompt(segments[-1], tokenizer),
        truncated=engine.calls[-1].generation.finish_reason is FinishReason.LENGTH,
    )


def after_prompt(segment: Segment, tokenizer: Any) -> list[int]:
    """Its tokens from the first action on, for a text: an image is one token."""
    start = int(segment.action_mask.int().argmax())
    return _one_token_each(segment.token_ids.tolist(), segment.images, tokenizer, start=start)


def _ranges(value: Any, *, num_tokens: int) -> list[tuple[int, int]]:
    """Half-open ranges in order, apart, after token 0 and within the tokens."""
    what = "execute's 'action_ranges'"
    ranges: list[tuple[int, int]] = []
    for index, item in enumerate(as_list(value, what=what, of="(start, end) pairs")):
        try:
            start, end = as_token_ids(item, what=f"{what}[{index}]")
        except ValueError:
            raise BadValueError(
                f"{what}[{index}] must be a (start, end) pair of token indices, got {shown(item)}"
            ) from None
        pair = f"{what}[{index}] = ({start}, {end})"
        if start >= end:
            raise BadValueError(f"{pair} is empty: end must be greater than start")
        if start == 0:
            raise BadValueError(f"{pair} begins at token 0, which has nothing before it, so it cannot be an action")
        if end > num_tokens:
            raise BadValueError(f"{pair} goes beyond the {num_tokens} 'observation_tokens'")
        if ranges and start < ranges[-1][0]:
            raise BadValueError(f"{pair} begins before {what}[{index - 1}] = {ranges[-1]}: give them in order")
        if ranges and start < ranges[-1][1]:
            raise BadValueError(f"{pair} overlaps {what}[{index - 1}] = {ranges[-1]}")
        ranges.append((start, end))
    if not ranges:
        raise BadValueError(f"{what} is empty: an episode without an action teaches nothing")
    return ranges


def _logprobs(value: Any, *, num_tokens: int, ranges: list[tuple[int, int]]) -> list[float] | None:
    """float32 [T], 0 outside actions."""
    if value is None:
        return None
    what = "execute's 'rollout_log_probs'"
    given = as_list(value, what=what, of="numbers")
    actions = [index for start, end in ranges for index in range(start, end)]
    if len(given) == num_tokens:
        given = [given[index] for index in actions]
    elif len(given) != len(actions):
        raise BadValueError(
            f"{what} has {len(given)} values for {num_tokens} tokens, {len(actions)} of them actions: give one per "
            "token or one per action token"
        )
    logprobs = [0.0] * num_tokens
    for index, item in zip(actions, given, strict=True):
        logprobs[index] = as_number(item, what=f"{what} of token {index}")
        if logprobs[index] > HIGHEST_LOGPROB:
            raise BadValueError(f"{what} of token {index} is {logprobs[index]:g}, but a log-prob is at most 0")
    return logprobs


def _turn_rewards(value: Any, *, num_tokens: int, ranges: list[tuple[int, int]], reward: float | None) -> list[float]:
    """float32 [T]: what was earned before the end."""
    placed = [0.0] * num_tokens
    if value is None:
        return placed
    what = "execute's 'turn_rewards'"
    if reward is None:
        raise BadValueError(f"{what} are given, but 'reward' is None: give their sum")
    given = as_numbers(value, what=what)
    if len(given) == num_tokens:
        return given
    if len(given) != len(ranges):
        raise BadValueError(f"{what} has {len(given)} values for {len(ranges)} 'action_ranges'")
    for (_, end), earned in zip(ranges, given, strict=True):
        placed[end - 1] = earned
    return placed


def _dict(returned: Any, *, of: str, expected: str) -> Mapping[Any, Any]:
    if returned is None:
        raise BadValueError(f"{of} returned None: is a `return` missing? Expected {expected}")
    if not isinstance(returned, Mapping):
        raise BadValueError(f"{of} must return a dict, got {shown(returned)}. Expected {expected}")
    return returned


def _require(found: Mapping[Any, Any], key: str, *, of: str, expected: str, remedy: str = "") -> None:
    if key not in found:
        raise BadValueError(
            f"{of} returned a dict without '{key}', with {listed(list(found))}. Expected {expected}{remedy}"
        )
