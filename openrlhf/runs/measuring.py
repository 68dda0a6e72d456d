"""`openrlhf eval`: a model's answers to prompts, judged as in training, and what follows from them.

Prompts, agents, rewards and engines are those of a run, made of the same configuration by the same functions. A sample
that failed has no score: it is counted, and left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from openrlhf.algorithms.reduction import pass_at_k
from openrlhf.config.commands import RLConfig
from openrlhf.config.rules import required
from openrlhf.config.schema import to_dict
from openrlhf.data.prompts import PromptSet
from openrlhf.data.sources import DataError
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.runs.inference import opened_engine, whole_model, with_engine
from openrlhf.runs.preflight import policy_images, policy_tokenizer
from openrlhf.runs.process import prepare_process, process_device, user_errors_end_the_run
from openrlhf.runs.resume import weights_digest
from openrlhf.runs.reward_sources import build_reward, reward_model_here
from openrlhf.runs.rl_assembly import build_episodes, prompts_of, started
from openrlhf.runs.sample_files import SampleFile, best_answers, preference_pairs, write_records
from openrlhf.types import Group, Outcome, Prompt, SamplingParams

SAMPLES_AT_ONCE = 512
"""Samples in play at the same time: enough for a full batch of the engine."""
Z95 = 1.959964
"""The 97.5% quantile of the standard normal distribution."""


class Interval(NamedTuple):
    """An estimate and its 95% confidence interval."""

    value: float
    low: float
    high: float


def rate_interval(values: Sequence[float], *, samples: int) -> Interval:
    """The mean of `values`, one in [0, 1] for each prompt, with Wilson's interval.

    Prompts are the independent draws. Their mean m has the variance s² / P, s² the variance over the P prompts; a
    proportion of N draws would have m (1 − m) / N. So N = P m (1 − m) / s² draws tell as much, at most as many as there
    are `samples`, and

        (m + z²/2N ± z √(m (1 − m) / N + z²/4N²)) / (1 + z²/N),   z = 1.96

    With one sample of each prompt s² = m (1 − m), and this is Wilson's interval for P draws. It is never empty where
    all prompts came out alike, as m ± 1.96 s / √P would be. (Wilson 1927; arXiv:2411.00640 for the clusters.)
    """
    prompts, mean = len(values), fmean(values)
    spread = fmean([(value - mean) ** 2 for value in values])
    draws = prompts * mean * (1 - mean) / spread if spread > 0 else math.inf
    draws = max(prompts, min(draws, samples)) if 0 < mean < 1 else prompts
    centre = mean + Z95**2 / (2 * draws)
    reach = Z95 * math.sqrt(mean * (1 - mean) / draws + (Z95 / (2 * draws)) ** 2)
    scale = 1 + Z95**2 / draws
    return Interval(mean, max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale))


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one value for each prompt, m ± 1.96 s / √P with s² = Σ (x − m)² / (P − 1); one prompt has none."""
    mean, prompts = fmean(values), len(values)
    if prompts == 1:
        return Interval(mean, -math.inf, math.inf)
    reach = Z95 * math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (prompts - 1) / prompts)
    return Interval(mean, mean - reach, mean + reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the judged samples of some prompts say."""

    prompts: int
    samples: int
    """That were judged."""
    failed: int
    truncated: int
    pass_at: Mapping[int, Interval]
    """By k; only where some prompt has so many judged samples."""
    pass_prompts: Mapping[int, int]
    """By k, the prompts with so many judged samples: the others are left out of pass@k."""
    score: Interval | None
    """None: nothing was judged."""
    reward: Interval | None
    tokens: float
    """Of a response in the mean, all turns of an episode together."""


def summarise(groups: Sequence[Group], *, ks: Sequence[int], threshold: float = 1.0) -> Summary:
    """A sample is right where its score is `threshold` or more."""
    judged = [group for group in groups if group.scored]
    members = [trajectory for group in judged for trajectory in group.scored]
    passes: dict[int, list[float]] = {
        k: [
            pass_at_k(len(group.scores), sum(score >= threshold for score in group.scores), k)
            for group in judged
            if len(group.scores) >= k
        ]
        for k in ks
    }
    return Summary(
        prompts=len(groups),
        samples=len(members),
        failed=sum(len(group.trajectories) - len(group.scored) for group in groups),
        truncated=sum(member.outcome is Outcome.TRUNCATED for member in members),
        pass_at={k: rate_interval(values, samples=len(members)) for k, values in passes.items() if values},
        pass_prompts={k: len(values) for k, values in passes.items()},
        score=mean_interval([fmean(group.scores) for group in judged]) if judged else None,
        reward=mean_interval([fmean(group.rewards) for group in judged]) if judged else None,
        tokens=fmean([member.num_actions for member in members]) if members else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The command line of `openrlhf eval` beside the configuration."""

    model: str
    """As the user named it."""
    n: int
    ks: tuple[int, ...]
    threshold: float
    engine: str
    output: str | None
    save: str | None = None
    sft: str | None = None
    pairs: str | None = None


@dataclass(slots=True)
class Measured:
    """The groups that are there so far."""

    options: EvalOptions
    config: RLConfig
    prompts: int = 0
    """Of the whole evaluation."""
    groups: list[Group] = field(default_factory=list)
    end: str = ""
    """The text of end-of-sequence."""

    @property
    def complete(self) -> bool:
        return len(self.groups) == self.prompts

    def by_source(self) -> dict[str, list[Group]]:
        sources: dict[str, list[Group]] = {}
        for group in sorted(self.groups, key=lambda group: group.prompt.ordinal):
            sources.setdefault(group.prompt.datasource, []).append(group)
        return sources

    def summary(self, groups: Sequence[Group]) -> Summary:
        return summarise(groups, ks=self.options.ks, threshold=self.options.threshold)


def evaluate(config: RLConfig, options: EvalOptions) -> int:
    """Play, print, write; the exit status: 0, 1 where something is wrong or nothing was judged, 130 after Ctrl-C."""
    prepare_process(config.train)
    with (
        user_errors_end_the_run() as ending,
        whole_model(options.model, trust_remote_code=config.actor.trust_remote_code) as folder,
    ):
        config = with_engine(
            replace(config, actor=replace(config.actor, model_name_or_path=folder)), options.engine, process_device()
        )
        measured = Measured(options, config)
        try:
            _play(measured)
        except BaseException:
            if measured.groups:
                _finish(measured)
            raise
        ending.status = _finish(measured)
    return ending.status


def _play(measured: Measured) -> None:
    """Fill `measured.groups`, in the order in which they end."""
    config, device = measured.config, process_device()
    tokenizer = policy_tokenizer(config)
    images = policy_images(config, tokenizer)
    try:
        prompts = prompts_of(config, tokenizer, evaluation=config.eval.dataset is not None, images=images)
    except DataError as error:
        text = str(error).replace("--data.prompt_dataset", "--data").replace("--eval.dataset", "--data")
        raise DataError(text.replace("--train.agent_func_path", "--agent")) from error
    measured.prompts, measured.end = len(prompts), tokenizer.eos_token or ""
    with asyncio.Runner() as loop, contextlib.ExitStack() as held:
        saved = None
        if measured.options.save is not None:
            path = Path(measured.options.save).expanduser()
            saved = held.enter_context(
                contextlib.closing(
                    SampleFile(path, _finite(_sampled(measured, prompts)), lambda g: _finite(_group_json(g)))
                )
            )
            measured.groups += saved.groups(prompts)
            if measured.complete:
                return
        source = build_reward(config, reward_model_here(config, tokenizer, device))
        reward = source and held.enter_context(started(source, loop, "the reward"))
        engine = held.enter_context(opened_engine(config, tokenizer, device))
        episodes = held.enter_context(started(build_episodes(config, engine, tokenizer, images), loop, "episodes"))
        runner = EpisodeRunner(episodes=episodes, reward=reward, seed=config.train.seed)
        sampling = SamplingParams(
            temperature=config.eval.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_tokens=config.rollout.max_new_tokens,
            stop=list(config.rollout.stop or ()),
        )
        loop.run(_play_all(measured, prompts, runner, sampling, saved))


def _sampled(measured: Measured, prompts: PromptSet) -> dict[str, Any]:
    """What samples and their judgement depend on: with another of these they are others."""
    options, config = measured.options, measured.config
    return {
        "weights": weights_digest(required(config.actor.model_name_or_path)),
        "prompts": prompts.digest,
        "n": options.n,
        "temperature": config.eval.temperature,
        "seed": config.train.seed,
        "agent": config.train.agent_func_path,
        **{name: to_dict(config)[name] for name in ("reward", "rollout")},
    }


async def _play_all(
    measured: Measured,
    prompts: Sequence[Prompt],
    runner: EpisodeRunner,
    sampling: SamplingParams,
    saved: SampleFile | None,
) -> None:
    """A prompt begins when another has ended, so that a few slow ones do not hold up all others."""
    n, progress = measured.options.n, _Progress(measured)
    waiting = iter(sorted({*range(len(prompts))} - {group.prompt.ordinal for group in measured.groups}))

    async def play_in_turn() -> None:
        for index in waiting:
            # The same purpose, and so the same samples, as the evaluations of a run with this seed.
            group = await runner.play(prompts[index], n=n, sampling_params=sampling, purpose="eval")
            measured.groups.append(group)
            if saved is not None:
                saved.write(group)
            progress.show()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(prompts) - len(measured.groups), max(1, SAMPLES_AT_ONCE // n))):
                tasks.create_task(play_in_turn())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        progress.end()


class _Progress:
    """One line on a terminal that is written again; elsewhere a line for every tenth."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._live = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def show(self) -> None:
        done, total = len(self._measured.groups), self._measured.prompts
        now = time.monotonic()
        tenth = done * 10 // total > (done - 1) * 10 // total
        if not (now - self._shown > 0.5 if self._live else tenth):
            return
        self._shown = now
        scores = [score for group in self._measured.groups for score in group.scores]
        mean = f"  mean score {fmean(scores):.3f}" if scores else ""
        line = f"{done}/{total} prompts{mean}  {now - self._began:.0f} s"
        print(f"\r{line}\x1b[K" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- what is shown


def _finish(measured: Measured) -> int:
    """Print the table and write the file; 1 where nothing was judged."""
    to_stdout = measured.options.output == "-"
    print(table(measured), file=sys.stderr if to_stdout else sys.stdout, flush=True)
    if measured.options.output is not None:
        text = json.dumps(_finite(as_json(measured)), ensure_ascii=False, indent=1)
        if to_stdout:
            print(text, flush=True)
        else:
            path = Path(measured.options.output).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
            print(f"samples and results: {path}", file=sys.stderr)
    if measured.complete:
        _write_data_sets(measured)
    return 0 if any(group.scored for group in measured.groups) else 1


def _write_data_sets(measured: Measured) -> None:
    """Of a whole evaluation; of what an interrupted one has, `--save` keeps it."""
    options = measured.options
    groups = sorted(measured.groups, key=lambda group: group.prompt.ordinal)
    if options.sft is not None:
        records = best_answers(groups, threshold=options.threshold, end=measured.end)
        written = write_records(path := Path(options.sft).expanduser(), map(_finite, records))
        print(f"best answers: {path}, {written} of {len(groups)} prompts have one", file=sys.stderr)
    if options.pairs is not None:
        written = write_records(
            path := Path(options.pairs).expanduser(), map(_finite, preference_pairs(groups, end=measured.end))
        )
        print(f"pairs: {path}, of {written} of {len(groups)} prompts", file=sys.stderr)


def table(measured: Measured) -> str:
    """The numbers for people, those of each data source apart where there are several."""
    options, sources = measured.options, measured.by_source()
    heads = [*sources] if len(sources) > 1 else []
    columns = {"all" if heads else "": measured.summary(measured.groups)} | {
        name: measured.summary(groups) for name, groups in sources.items() if heads
    }
    rows: list[tuple[str, list[str]]] = []
    for k in options.ks:
        rows.append((f"pass@{k}", [_rate(column.pass_at.get(k)) for column in columns.values()]))
    rows.append(("mean score", [_rate(column.score) for column in columns.values()]))
    if any(column.reward != column.score for column in columns.values()):
        rows.append(("mean reward", [_rate(column.reward) for column in columns.values()]))
    rows.append(("prompts", [str(column.prompts) for column in columns.values()]))
    rows.append(("samples", [str(column.samples) for column in columns.values()]))
    rows.append(("failed", [str(column.failed) for column in columns.values()]))
    rows.append(("truncated", [f"{_share(c.truncated, c.samples)}" for c in columns.values()]))
    rows.append(("tokens", [f"{column.tokens:.1f}" for column in columns.values()]))
    widths = [max(len(name), *(len(cells[i]) for _, cells in rows)) for i, name in enumerate(columns)]
    lines = [
        f"{options.model}: {options.n} samples of each prompt at temperature {measured.config.eval.temperature:g}",
        "",
    ]
    if heads:
        lines.append(" " * 13 + "  ".join(f"{name:<{w}}" for name, w in zip(columns, widths, strict=True)).rstrip())
    for name, cells in rows:
        lines.append(f"{name:<13}" + "  ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip())
    return "\n".join([*lines, *_remarks(measured, columns)])


def _remarks(measured: Measured, columns: Mapping[str, Summary]) -> list[str]:
    whole, options = next(iter(columns.values())), measured.options
    remarks = []
    if not measured.complete:
        remarks.append(f"interrupted: {len(measured.groups)} of {measured.prompts} prompts")
    if whole.failed:
        errors: dict[str, int] = {}
        for group in measured.groups:
            for trajectory in group.trajectories:
                if trajectory.failed:
                    errors[trajectory.error] = errors.get(trajectory.error, 0) + 1
        worst = max(errors, key=lambda error: errors[error])
        remarks.append(f"{whole.failed} samples failed and are in no number above, such as: {worst}")
        short = {k: whole.prompts - count for k, count in whole.pass_prompts.items() if count < whole.prompts}
        if short:
            few = ", ".join(f"pass@{k} {count}" for k, count in short.items())
            remarks.append(f"prompts left out, with too few judged samples: {few}")
    scores = [score for group in measured.groups for score in group.scores]
    if scores and not set(scores) <= {0.0, 1.0}:
        remarks.append(
            f"scores are from {min(scores):g} to {max(scores):g}: a sample counts as right from {options.threshold:g} "
            "on (--threshold)"
        )
    return ["", *remarks] if remarks else []


def _rate(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    bounds = f"  [{interval.low:.3f}, {interval.high:.3f}]" if math.isfinite(interval.low) else ""
    return f"{interval.value:.3f}{bounds}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def as_json(measured: Measured) -> dict[str, Any]:
    """Everything, every sample among it."""
    options, config = measured.options, measured.config
    sources = measured.by_source()
    sections = to_dict(config)
    return {
        "model": options.model,
        "engine": "vllm" if config.vllm.num_engines else "embedded",
        "complete": measured.complete,
        "n": options.n,
        "threshold": options.threshold,
        "temperature": config.eval.temperature,
        "seed": config.train.seed,
        "settings": {name: sections[name] for name in ("data", "reward", "rollout")},
        "results": _summary_json(measured.summary(measured.groups)),
        "by_source": {name: _summary_json(measured.summary(groups)) for name, groups in sources.items()},
        "prompts": [_group_json(group) for groups in sources.values() for group in groups],
    }


def _summary_json(summary: Summary) -> dict[str, Any]:
    def interval(found: Interval | None) -> dict[str, float] | None:
        return None if found is None else found._asdict()

    return {
        "prompts": summary.prompts,
        "samples": summary.samples,
        "failed": summary.failed,
        "truncated": summary.truncated,
        "tokens": summary.tokens,
        "pass": {
            str(k): {**found._asdict(), "prompts": summary.pass_prompts[k]} for k, found in summary.pass_at.items()
        },
        "score": interval(summary.score),
        "reward": interval(summary.reward),
    }


def _group_json(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt": prompt.text,
        "label": prompt.label,
        "datasource": prompt.datasource,
        "where": prompt.where,
        "samples": [
            {
                "text": trajectory.text.removeprefix(prompt.text),
                "reward": trajectory.reward,
                "score": trajectory.score,
                "tokens": trajectory.num_actions,
                "outcome": str(trajectory.outcome),
                **({"agent": trajectory.agent} if trajectory.agent else {}),
                **({"error": trajectory.error} if trajectory.failed else {}),
                **({"extra_logs": dict(trajectory.extra_logs)} if trajectory.extra_logs else {}),
            }
            for trajectory in group.trajectories
        ],
    }


def _finite(value: Any) -> Any:
    """The same without what JSON lacks: numbers that are not finite become null, unknown objects their text."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
