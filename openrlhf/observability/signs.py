"""Signs of trouble: what the numbers of a run say when it goes wrong, in lines for people and in warnings.jsonl.

The table in docs/troubleshooting.md has the same signs. A sign is told once for as long as it lasts, and again when it
has been gone and comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines

WINDOW = 5
"""Steps whose mean is compared with that of other steps."""
LONG = 10
"""Steps of the windows in which a reward is seen to fall."""
SOLVED = 0.95
"""A mean score from which on a policy may well be sure of itself."""
BETTER = 0.02
"""A mean score has risen if it is higher by this much."""
GAP = 0.1
"""Log-probs of engine and trainer are further apart than rounding brings them from this mean distance on, in nats."""


class Sign(NamedTuple):
    """A sign of trouble in a run's metrics: what was observed."""

    kind: str
    text: str
    """What the sign means, and what to try."""


class History:
    """The metrics of the steps so far. What a step did not measure, or what is not finite, is left out."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._records: list[Mapping[str, float]] = []

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        self._records.append({name: value for name, value in values.items() if name in WATCHED})

    def before(self, step: int) -> list[tuple[int, Mapping[str, float]]]:
        return [pair for pair in zip(self.steps, self._records, strict=True) if pair[0] < step]

    def of(self, name: str) -> list[float]:
        """A metric's values, in the order of the steps that have one."""
        found = (record.get(name) for record in self._records)
        return [value for value in found if value is not None and math.isfinite(value)]

    def latest(self, name: str, count: int) -> list[float]:
        """The values of the last so many steps; empty unless all of them have measured it."""
        found = [record.get(name, math.nan) for record in self._records[-count:]]
        return found if len(found) == count and all(map(math.isfinite, found)) else []

    def stands_still(self) -> bool:
        """Whether the mean score is no better than at the beginning, and the task is not solved."""
        scores = self.of("score")
        if len(scores) < 2 * WINDOW:
            return False
        now = fmean(scores[-WINDOW:])
        return now < SOLVED and now < fmean(scores[:WINDOW]) + BETTER


@dataclass(slots=True)
class Watch:
    """One sign, and whether it has been told."""

    kind: str
    text: str
    is_there: Callable[[History], bool]
    calm_after: int = 2 * WINDOW
    """Steps without the sign after which it is told again."""
    explained_by: str = ""
    """A sign that says the same better."""
    told: bool = False
    calm: int = field(default=0)

    def after(self, history: History, *, others: Iterable[Watch]) -> Sign | None:
        if not self.is_there(history):
            self.calm += 1
            self.told = self.told and self.calm < self.calm_after
            return None
        self.calm = 0
        if self.told or any(other.told for other in others if other.kind == self.explained_by):
            return None
        self.told = True
        return Sign(self.kind, self.text)


def _holds(name: str, test: Callable[[float], bool], *, steps: int = WINDOW) -> Callable[[History], bool]:
    """A test that holds if `test` holds in each of the last `steps` steps."""

    def is_there(history: History) -> bool:
        found = history.latest(name, steps)
        return bool(found) and all(map(test, found))

    return is_there


def _against_the_start(history: History, name: str) -> tuple[float, float] | None:
    """Mean of the first steps and of the latest; None while these are the same steps."""
    found = history.of(name)
    return (fmean(found[:WINDOW]), fmean(found[-WINDOW:])) if len(found) >= 2 * WINDOW else None


def _entropy_gone(history: History) -> bool:
    means = _against_the_start(history, "entropy_loss")
    return means is not None and means[1] < 0.05 * max(means[0], 0.1) and history.stands_still()


def _entropy_runs_away(history: History) -> bool:
    means = _against_the_start(history, "entropy_loss")
    return means is not None and means[1] > 2 * means[0] and means[1] > means[0] + 0.5 and history.stands_still()


def _length_grows(history: History) -> bool:
    means = _against_the_start(history, "response_length")
    return means is not None and means[1] > 2 * means[0] and history.stands_still()


def _length_shrinks(history: History) -> bool:
    means = _against_the_start(history, "response_length")
    return means is not None and means[1] < means[0] / 4 and history.stands_still()


def _kl_grows(history: History) -> bool:
    means = _against_the_start(history, "kl")
    return means is not None and means[1] > 0.5 and means[1] > 5 * max(means[0], 0.0)


def _reward_falls(history: History) -> bool:
    """The mean of the last ten steps is far below the best mean of ten, which is long ago; far: beyond the noise."""
    rewards = history.of("reward")[-50 * LONG :]
    windows = [rewards[i : i + LONG] for i in range(len(rewards) - LONG + 1)]
    means = [fmean(window) for window in windows]
    if len(rewards) < 3 * LONG:
        return False
    best = max(range(len(means)), key=means.__getitem__)
    if len(means) - 1 - best < 2 * LONG:
        return False
    noise = max(pstdev(windows[best]), pstdev(windows[-1])) * math.sqrt(2 / LONG)
    return means[-1] < means[best] - max(4 * noise, 1e-6) and means[-1] < means[-1 - LONG]


def _engine_differs(history: History) -> bool:
    """Engines are asked for few log-probs, and small rounds may have none: what counts is what was measured last."""
    gaps = history.of("logprobs_diff")[-3:]
    return len(gaps) == 3 and min(gaps) > GAP


def _failures(history: History) -> bool:
    failed, judged = (history.latest(name, 3) for name in ("rollout/failed", "rollout/num_samples"))
    shares = [f / (f + j) for f, j in zip(failed, judged, strict=False) if f + j]
    return len(shares) == 3 and min(shares) > 0.2


def watches() -> list[Watch]:
    """All signs, in the order in which they are reported."""
    return [
        Watch(
            "equal groups",
            f"for {WINDOW} steps all samples of every prompt have earned the same: nothing is learnt by comparing "
            "them. Try easier or harder prompts, more samples per prompt, or --algo.dynamic_filtering_enable",
            _holds("group_reward_std", lambda spread: spread < 1e-6),
        ),
        Watch(
            "zero gradient",
            f"the gradient has been 0 for {WINDOW} steps: the model does not learn. All samples of every prompt may "
            "earn the same (look at group_reward_std), or the loss is clipped away (ppo_clip_ratio)",
            lambda history: any(
                _holds(name, lambda norm: norm < 1e-10)(history) for name in ("actor_grad_norm", "grad_norm")
            ),
            explained_by="equal groups",
        ),
        Watch(
            "entropy collapse",
            "the policy's entropy has fallen to about 0 and its score stands still: it has stopped trying. Try "
            "--actor.eps_clip_low_high 0.2 0.28, --actor.entropy_coef 1e-3, a lower learning rate or more samples "
            "per prompt",
            _entropy_gone,
        ),
        Watch(
            "entropy grows",
            "the policy's entropy has doubled and its score stands still: its answers become noise. Try a lower "
            "--actor.adam.lr, a lower --actor.entropy_coef, or a price of KL (--algo.kl.init_coef)",
            _entropy_runs_away,
        ),
        Watch(
            "length grows",
            "responses are more than twice as long as at the beginning and score no better: length may be what is "
            "rewarded. Look at rollouts.jsonl; try --reward.overlong_buffer_len or another --algo.loss_agg",
            _length_grows,
        ),
        Watch(
            "length collapse",
            "responses are less than a quarter as long as at the beginning and score no better: the policy has "
            "stopped answering. Look at rollouts.jsonl, and at what an empty answer earns; try a lower "
            "--actor.adam.lr or a price of KL (--algo.kl.init_coef)",
            _length_shrinks,
        ),
        Watch(
            "responses cut",
            "nine responses of ten have been cut at the limit for 3 steps: what is judged are beginnings. Raise "
            "--rollout.max_new_tokens or --data.max_len, or punish length (--reward.overlong_buffer_len)",
            _holds("truncated", lambda share: share >= 0.9, steps=3),
        ),
        Watch(
            "reward falls",
            f"the mean reward of {LONG} steps has fallen since its best, more than {2 * LONG} steps ago, by far "
            "more than it varies from step to step: the policy gets worse. Go back to the best checkpoint, with a "
            "lower --actor.adam.lr or a higher --algo.kl.init_coef",
            _reward_falls,
            calm_after=2 * LONG,
        ),
        Watch(
            "kl grows",
            "the KL to the reference has grown to more than 5 times what it was: the policy leaves the reference. "
            "Raise --algo.kl.init_coef or set --algo.kl.target, and look in rollouts.jsonl whether nonsense is "
            "rewarded",
            _kl_grows,
        ),
        Watch(
            "large updates",
            "for 3 steps the policy has moved far in one round (ppo_kl above 0.1 or ppo_clip_ratio above 0.3). Try "
            "fewer optimizer steps (--train.max_epochs, a larger --train.batch_size) or a lower --actor.adam.lr",
            lambda history: (
                _holds("ppo_kl", lambda kl: abs(kl) > 0.1, steps=3)(history)
                or _holds("ppo_clip_ratio", lambda share: share > 0.3, steps=3)(history)
            ),
        ),
        Watch(
            "engine differs",
            f"in 3 steps the engine's log-probs have been off by more than {GAP:g} from those of the weights that are "
            "trained (logprobs_diff), and rounding in bf16 makes a few hundredths. Look for wrong weights with "
            "--vllm.sync_verify; with async try a smaller --train.async_queue_size; against rounding "
            "--vllm.logits_dtype fp32 and --ds.param_dtype fp16 (docs/precision.md). "
            "--algo.advantage.is_correction_enable corrects for what is left",
            _engine_differs,
        ),
        Watch(
            "failures",
            "for 3 steps more than a fifth of the samples has failed and is not trained on: the log names the "
            "first of each kind, and openrlhf check tries your file on a few prompts",
            _failures,
        ),
    ]


WATCHED = frozenset(
    {
        "actor_grad_norm",
        "entropy_loss",
        "grad_norm",
        "group_reward_std",
        "kl",
        "logprobs_diff",
        "ppo_clip_ratio",
        "ppo_kl",
        "response_length",
        "reward",
        "rollout/failed",
        "rollout/num_samples",
        "score",
        "truncated",
    }
)


class Signs:
    """Looks at the metrics of every step. A step that comes again (a run went on from a checkpoint) replaces what it
    was and everything after it."""

    def __init__(self) -> None:
        self._begin([])

    def _begin(self, earlier: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._history = History()
        self._watches = watches()
        for step, values in earlier:
            self.after(step, values)

    def after(self, step: int, values: Mapping[str, float]) -> list[Sign]:
        if self._history.steps and step <= self._history.steps[-1]:
            self._begin(self._history.before(step))
        self._history.add(step, values)
        seen = [watch.after(self._history, others=self._watches) for watch in self._watches]
        return [sign for sign in seen if sign is not None]


class Warnings(Protocol):
    """Takes what people should know of a step."""

    def after(self, step: int, values: Mapping[str, float], notes: Iterable[str] = ()) -> None:
        """`values`: the step's metrics. `notes`: what was said while it was computed (`Metrics.notes`)."""
        ...


class NoWarnings:
    """Reports nothing: for ranks that do not report."""

    def after(self, step: int, values: Mapping[str, float], notes: Iterable[str] = ()) -> None:
        pass


class RunWarnings:
    """Says each warning on the terminal and keeps it in warnings.jsonl."""

    def __init__(self, path: Path, say: Callable[[str], None], *, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """`earlier`: training records of metrics.jsonl, where a run goes on."""
        self._say = say
        self._signs = Signs()
        for record in earlier:
            if record.get("kind") == "train":
                self._signs.after(record["step"], record)
        self._lines = JsonLinesWriter(path)

    def after(self, step: int, values: Mapping[str, float], notes: Iterable[str] = ()) -> None:
        for sign in [*(Sign("numbers", text) for text in notes), *self._signs.after(step, values)]:
            self._say(f"warning: step {step}: {sign.text}")
            self._lines.write({"step": step, "kind": sign.kind, "text": sign.text})

    def close(self) -> None:
        self._lines.close()


def read_warnings(path: Path) -> list[dict[str, Any]]:
    """The records of warnings.jsonl, `{"step": 12, "kind": "equal groups", "text": …}`, as one history: steps that a
    resumed run took again replace those after its checkpoint."""
    history: list[dict[str, Any]] = []
    for record in read_json_lines(path):
        if isinstance(record.get("step"), int) and isinstance(record.get("text"), str):
            again = any(earlier["step"] > record["step"] for earlier in history)
            if again:
                history = [earlier for earlier in history if earlier["step"] < record["step"]]
            history.append(record)
    return history


if TYPE_CHECKING:
    _: list[type[Warnings]] = [NoWarnings, RunWarnings]
