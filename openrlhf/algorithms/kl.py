"""The KL divergence of the policy from its reference: estimates per action token, and controllers of its coefficient.

With d = log π(t) − log π_ref(t) of a token sampled from π (John Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html):

    name  estimate          as a value of KL(π‖π_ref)              as a loss: the expected gradient is
    k1    d                 unbiased, high variance, any sign      E[∇log π] = 0: it teaches nothing
    k2    d² / 2            biased, low variance, never negative   E[d ∇log π] = ∇KL(π‖π_ref)
    k3    exp(−d) − 1 + d   unbiased, low variance, not negative   E[(1 − exp(−d)) ∇log π] = ∇KL(π_ref‖π)

So k1 belongs in the reward, where its value counts, and k2 or k3 in the loss. Each estimate is held within ±10;
beyond that a token costs no more and pulls no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Callable[["Tensor", "Tensor"], "Tensor"]
"""(logprobs_A, reference_logprobs_A) → one estimate per token."""

BOUND = 10.0


def k1(logprobs_A: Tensor, reference_logprobs_A: Tensor) -> Tensor:
    """d = log π − log π_ref."""
    return (logprobs_A - reference_logprobs_A).clamp(-BOUND, BOUND)


def k2(logprobs_A: Tensor, reference_logprobs_A: Tensor) -> Tensor:
    """d² / 2."""
    return ((logprobs_A - reference_logprobs_A) ** 2 / 2).clamp(-BOUND, BOUND)


def k3(logprobs_A: Tensor, reference_logprobs_A: Tensor) -> Tensor:
    """exp(−d) − 1 + d."""
    # |d| > 20 is beyond the bound anyway; an overflow of exp would make the bound's zero gradient 0 · ∞.
    difference_A = (logprobs_A - reference_logprobs_A).clamp(-20.0, 20.0)
    return ((-difference_A).exp() - 1.0 + difference_A).clamp(-BOUND, BOUND)


class KLEntry(NamedTuple):
    """One KL estimate and what belongs to it."""

    estimator: KLEstimator
    formula: str
    """For the help of --algo.kl.estimator."""
    fits_loss: bool
    """Its gradient is that of a KL divergence, so it belongs in the loss. Otherwise it belongs in the reward."""


KL_ESTIMATORS: dict[str, KLEntry] = {
    "k1": KLEntry(k1, formula="d", fits_loss=False),
    "k2": KLEntry(k2, formula="d²/2", fits_loss=True),
    "k3": KLEntry(k3, formula="exp(−d) − 1 + d", fits_loss=True),
}


def get_kl_estimator(name: str) -> KLEstimator:
    if name not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {name!r}; known: {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[name].estimator


class KLController(Protocol):
    """Owns the KL coefficient."""

    @property
    def coef(self) -> float: ...

    def update(self, kl: float, samples: int) -> None:
        """Called once a round with the mean KL per action token and the number of samples."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """The coefficient given, always. A checkpoint does not change it: the configuration does."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        pass

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


class AdaptiveKL:
    """Raises the coefficient while KL is above its target and lowers it below (arXiv:1909.08593, section 2.2).

        e = clip(kl / target − 1, −0.2, 0.2)
        coef ← coef · (1 + e · samples / horizon)

    One round halves it at most, so that a round of more than 5 horizons cannot turn its sign, and it stays above a
    millionth of its first value: from 0 no factor leads back.
    """

    def __init__(self, coef: float, *, target: float, horizon: float) -> None:
        for name, value in (("coefficient", coef), ("target", target), ("horizon", horizon)):
            if value <= 0:
                raise ValueError(f"the {name} of adaptive KL must be > 0, got {value}")
        self.coef = coef
        self._target = target
        self._horizon = horizon
        self._least = 1e-6 * coef

    def update(self, kl: float, samples: int) -> None:
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        factor = max(1.0 + error * samples / self._horizon, 0.5)
        self.coef = max(self.coef * factor, self._least)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


if TYPE_CHECKING:
    _: list[type[KLController]] = [FixedKL, AdaptiveKL]
