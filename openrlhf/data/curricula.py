"""Curricula: which prompt comes next, by what is known of how often each is solved.

A curriculum is told the scores of a round's groups at one point, when the round is handed to training, in the order of
their ordinals; what it draws until the next round is handed over is a function of (seed, ordinal), of that knowledge,
and of which prompts are in play. Nothing depends on which group ended first, and all that is known is in a checkpoint.

A sample's success is its score, brought from `score_range` to [0, 1]; scores outside the range count as its end. A
round adds Σ success and Σ (1 − success) of each prompt's judged samples to two sums, `solved` and `missed`, and
multiplies those of all earlier rounds by 2^(−1/h), h being the half-life in rounds: what an older policy could do
says less about this one.

A new curriculum is a class here and an entry of `CURRICULA`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from openrlhf.observability.metrics import Metrics
from openrlhf.utils.randomness import derive_seed, shuffled

logger = logging.getLogger(__name__)

ATTEMPTS = 32
"""Draws that may hit a prompt in play before those that are not are looked at one by one."""
PRIOR = 0.5
"""Jeffreys' prior of a success rate, Beta(½, ½): samples of both kinds that each prompt is thought to have had."""
ENOUGH = 32
"""The judged samples of a level without which nobody says that it is mastered."""
TOLERANCE = 1e-6
"""A score may be so far outside its range: it is a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings:
    """What all curricula may be told; each reads what it needs."""

    seed: int
    half_life: float
    """In rounds."""
    explore: float = 0.1
    """The share of draws that every prompt has part in alike."""
    threshold: float = 0.8
    """The success rate from which a level counts as mastered, a prompt as solved."""
    score_range: tuple[float, float] = (0.0, 1.0)


class Evidence:
    """What rounds have shown of each prompt."""

    def __init__(self, size: int, settings: CurriculumSettings) -> None:
        self.solved_N = np.zeros(size)
        self.missed_N = np.zeros(size)
        self.judged_N = np.zeros(size, dtype=np.int64)
        """Judged samples, which no half-life makes fewer."""
        self._kept = 2.0 ** (-1.0 / settings.half_life)
        self._range = settings.score_range
        self._told = False

    @property
    def rate_N(self) -> np.ndarray:
        """Success rates; NaN where no sample has been judged."""
        with np.errstate(invalid="ignore"):
            return np.where(self.judged_N > 0, self.solved_N / (self.solved_N + self.missed_N), np.nan)

    def learn(self, results: Sequence[tuple[int, Sequence[float]]]) -> None:
        """One round: (prompt, scores of its judged samples) for each of its groups."""
        self.solved_N *= self._kept
        self.missed_N *= self._kept
        for index, scores in results:
            successes = [self._success(score) for score in scores]
            self.solved_N[index] += math.fsum(successes)
            self.missed_N[index] += math.fsum(1.0 - success for success in successes)
            self.judged_N[index] += len(scores)

    def _success(self, score: float) -> float:
        low, high = self._range
        success = (score - low) / (high - low)
        if not self._told and not -TOLERANCE <= success <= 1 + TOLERANCE:
            self._told = True
            logger.warning(
                "--data.curriculum: a score of %g is outside --data.curriculum_score_range %g %g and counts as its "
                "end: give the range that scores have, or return scores of success beside the rewards",
                score, low, high,
            )  # fmt: skip
        return min(max(success, 0.0), 1.0)

    def state_dict(self) -> dict[str, Any]:
        columns = {"solved": self.solved_N, "missed": self.missed_N, "judged": self.judged_N}
        return {name: torch.from_numpy(column.copy()) for name, column in columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.solved_N, self.missed_N, self.judged_N = (
            state[name].numpy().copy() for name in ("solved", "missed", "judged")
        )


class Curriculum(Protocol):
    """Chooses the prompt behind each ordinal, in the order of ordinals."""

    def draw(self, ordinal: int, in_play: Mapping[int, int]) -> int:
        """The prompt of this ordinal. `in_play`: how often each prompt was drawn whose result is not known yet; those
        are not drawn again as long as there are others."""
        ...

    def learn(self, results: Sequence[tuple[int, Sequence[float]]]) -> None:
        """A round is handed to training: (prompt, scores of its judged samples), in the order of ordinals."""
        ...

    def metrics(self) -> Metrics: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class WeightedDraws:
    """Independent draws in which each prompt has a probability, the same until something new is learnt."""

    def __init__(self, size: int, settings: CurriculumSettings) -> None:
        self.evidence = Evidence(size, settings)
        self.settings = settings
        self._cumulative_N: np.ndarray | None = None

    def probabilities(self) -> np.ndarray:
        """float64 [N], adding up to 1."""
        raise NotImplementedError

    def draw(self, ordinal: int, in_play: Mapping[int, int]) -> int:
        if self._cumulative_N is None:
            self._cumulative_N = np.cumsum(self.probabilities())
        for attempt in range(ATTEMPTS):
            index = _place(self._cumulative_N, self._uniform(ordinal, attempt))
            if index not in in_play:
                return index
        return self._draw_from_the_rest(ordinal, in_play)

    def _draw_from_the_rest(self, ordinal: int, in_play: Mapping[int, int]) -> int:
        """Of those that may be drawn, the ones that are in play least often, with the same ratios."""
        weights_N = self.probabilities()
        copies_N = np.zeros(len(weights_N), dtype=np.int64)
        copies_N[list(in_play)] = list(in_play.values())
        possible_N = weights_N > 0
        weights_N[~possible_N | (copies_N > copies_N[possible_N].min())] = 0
        return _place(np.cumsum(weights_N), self._uniform(ordinal, ATTEMPTS))

    def learn(self, results: Sequence[tuple[int, Sequence[float]]]) -> None:
        self.evidence.learn(results)
        self._cumulative_N = None

    def metrics(self) -> Metrics:
        metrics, probabilities_N = _metrics(self.evidence), self.probabilities()
        metrics.last("curriculum/spread", 1.0 / (_sum(np.square(probabilities_N)) * len(probabilities_N)))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"evidence": self.evidence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evidence.load_state_dict(state["evidence"])
        self._cumulative_N = None

    def _explored(self, weights_N: np.ndarray) -> np.ndarray:
        """(1 − ε)·w/Σw + ε/N"""
        share = self.settings.explore
        return (1 - share) * weights_N / _sum(weights_N) + share / len(weights_N)

    def _uniform(self, ordinal: int, attempt: int) -> float:
        """In [0, 1), with 53 random bits."""
        return (derive_seed(self.settings.seed, "curriculum", ordinal, attempt) >> 10) / 2**53


class BySuccess(WeightedDraws):
    """Prompts that are solved now and then: P(i) = (1 − ε)·v_i/Σ v + ε/N, v_i = E[p(1 − p)] of its success rate p.

    With a = ½ + solved and b = ½ + missed the rate is thought to be Beta(a, b), so v = ab / ((a + b)(a + b + 1)). It is
    the variance of a sample's score, which is how much the samples of a group differ, and so what a baseline leaves of
    their rewards. A prompt that was never judged has v = 1/8, between one that is half solved (1/4) and one that is
    always or never solved (0): it is tried before those.

    N prompts of a pass are N draws: some prompts several times, others not at all.
    """

    def probabilities(self) -> np.ndarray:
        a_N, b_N = PRIOR + self.evidence.solved_N, PRIOR + self.evidence.missed_N
        n_N = a_N + b_N
        return self._explored(a_N * b_N / (n_N * (n_N + 1)))


class ByDifficulty(WeightedDraws):
    """Easy to hard: the prompts of one level, then those of the next once the policy has mastered it.

    A level is all prompts of one `difficulty`. (1 − ε) of the draws are from the present level, ε from all prompts.
    When the success rate of the level's samples, Σ solved / Σ (solved + missed), is at least the threshold, and 32 of
    them were judged, the next level is the present one; there it may be so too. After the last one all draws are from
    all prompts. A level that was left is not come back to, except by ε.
    """

    def __init__(self, size: int, settings: CurriculumSettings, difficulty_N: np.ndarray) -> None:
        super().__init__(size, settings)
        self._levels, self._level_N = np.unique(difficulty_N, return_inverse=True)
        self._level = 0
        """The index of the present level; that after the last one: all are mastered."""

    def probabilities(self) -> np.ndarray:
        mastered_all = self._level == len(self._levels)
        return self._explored(np.ones(len(self._level_N)) if mastered_all else (self._level_N == self._level) * 1.0)

    def learn(self, results: Sequence[tuple[int, Sequence[float]]]) -> None:
        super().learn(results)
        while self._level < len(self._levels) and self._is_mastered():
            self._level += 1

    def _is_mastered(self) -> bool:
        own_N = self._level_N == self._level
        solved, missed = (_sum(sums[own_N]) for sums in (self.evidence.solved_N, self.evidence.missed_N))
        enough = self.evidence.judged_N[own_N].sum() >= ENOUGH
        return bool(enough and solved >= self.settings.threshold * (solved + missed))

    def metrics(self) -> Metrics:
        metrics = super().metrics()
        metrics.last("curriculum/level", float(self._levels[min(self._level, len(self._levels) - 1)]))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"level": self._level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._level = min(state.get("level", 0), len(self._levels))


class SolvedLast:
    """Passes in which every prompt comes once, those that are solved at the end.

    When a pass begins, prompts whose success rate is at least the threshold are put behind the others; both parts are
    in the random order that the pass would have had.
    """

    def __init__(self, size: int, settings: CurriculumSettings) -> None:
        self.evidence = Evidence(size, settings)
        self._settings = settings
        self._pass = -1
        self._solved_N = np.zeros(size, dtype=bool)
        """What was solved when the pass began."""
        self._order_N: np.ndarray | None = None

    def draw(self, ordinal: int, in_play: Mapping[int, int]) -> int:
        number, position = divmod(ordinal, len(self._solved_N))
        if number != self._pass:
            self._pass, self._order_N = number, None
            with np.errstate(invalid="ignore"):  # never judged: not solved
                self._solved_N = self.evidence.rate_N >= self._settings.threshold
        if self._order_N is None:
            order_N = shuffled(len(self._solved_N), seed=self._settings.seed, epoch=number)
            self._order_N = order_N[np.argsort(self._solved_N[order_N], kind="stable")]
        return int(self._order_N[position])

    def learn(self, results: Sequence[tuple[int, Sequence[float]]]) -> None:
        self.evidence.learn(results)

    def metrics(self) -> Metrics:
        return _metrics(self.evidence)

    def state_dict(self) -> dict[str, Any]:
        return {
            "evidence": self.evidence.state_dict(),
            "pass": self._pass,
            "solved": torch.from_numpy(self._solved_N.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evidence.load_state_dict(state["evidence"])
        self._order_N = None
        if "pass" in state:
            self._pass, self._solved_N = state["pass"], state["solved"].numpy().copy()


def _place(cumulative_N: np.ndarray, uniform: float) -> int:
    """The index whose part of [0, Σ) holds uniform·Σ; never one without a part."""
    total = cumulative_N[-1]
    index = int(np.searchsorted(cumulative_N, uniform * total, side="right"))
    return min(index, int(np.searchsorted(cumulative_N, total, side="left")))


def _sum(numbers: np.ndarray) -> float:
    """One after the other: the same bits on every machine, which numpy's `sum` does not promise."""
    return float(np.cumsum(numbers)[-1])


def _metrics(evidence: Evidence) -> Metrics:
    metrics, seen_N = Metrics(), evidence.judged_N > 0
    count = int(seen_N.sum())
    metrics.last("curriculum/seen", count / len(seen_N))
    metrics.mean("curriculum/success", _sum(evidence.rate_N[seen_N]) if count else 0.0, count)
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A curriculum of `--data.curriculum`."""

    make: Callable[..., Curriculum]
    """From the number of prompts, the settings, and the prompts' difficulty where it takes it."""
    half_life: float
    """In rounds, where the user gives none: long where a prompt's own results count, which are rounds apart; short
    where those of many prompts are looked at together."""
    takes_difficulty: bool = False


CURRICULA: dict[str, Choice] = {
    "success": Choice(make=BySuccess, half_life=50),
    "difficulty": Choice(make=ByDifficulty, half_life=5, takes_difficulty=True),
    "solved_last": Choice(make=SolvedLast, half_life=50),
}
"""Beside `off`: each pass in a random order that nothing changes."""
