"""Proofs: each is one small function with a title, what it shows, and when it applies. Imports no torch.

    @proof("masks", title="…", shows="…", remedy="…", kinds=("rl",), unless=lambda trial: None)
    def masks(trial): ...

The function returns what it has seen, in a line. It raises `Disproved` with what is wrong. `unless` gives the reason
why a proof does not apply to a run, or None.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

KINDS = ("rl", "sft", "reward model", "dpo", "ipo", "kto")
"""What a run trains; all but the first are supervised."""
SUPERVISED = KINDS[1:]


class Disproved(Exception):
    """Something is not as it has to be. The text says what, with numbers."""


class Status(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "does not apply"
    UNTRIED = "not tried"
    """The time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One claim about a run, and the function that tries it."""

    name: str
    title: str
    shows: str
    """What is known when it passes."""
    remedy: str
    """What to do when it fails."""
    kinds: tuple[str, ...]
    unless: Callable[[Any], str | None]
    run: Callable[[Any], str]
    first: bool
    """It makes what the others look at."""
    cost: float
    """About how many gradients of the trial's samples it takes, with all that belongs to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one proof."""

    proof: Proof
    status: Status
    detail: str
    seconds: float = 0.0


REGISTRY: dict[str, Proof] = {}


def proof(
    name: str,
    *,
    title: str,
    shows: str,
    remedy: str,
    kinds: Sequence[str] = ("rl",),
    unless: Callable[[Any], str | None] = lambda trial: None,
    first: bool = False,
    cost: float = 1.0,
) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Register the function as the proof of this claim."""

    def register(run: Callable[[Any], str]) -> Callable[[Any], str]:
        if name in REGISTRY:
            raise ValueError(f"two proofs are called {name!r}")
        REGISTRY[name] = Proof(
            name=name,
            title=title,
            shows=shows,
            remedy=remedy,
            kinds=tuple(kinds),
            unless=unless,
            run=run,
            first=first,
            cost=cost,
        )
        return run

    return register


def tried(
    trial: Any,
    proofs: Iterable[Proof],
    *,
    deadline: float | None = None,
    on_start: Callable[[Proof], None] = lambda proof: None,
    now: Callable[[], float] = time.monotonic,
) -> list[Verdict]:
    """Try the proofs one after the other. After `deadline`, by `now`, what is left is not tried.

    An error inside a proof is a failure of it, with the place: what cannot be tried is not proved.
    """
    verdicts = []
    for one in proofs:
        if trial.kind not in one.kinds:
            continue
        began = now()
        status, detail = Status.PASS, ""
        if deadline is not None and began >= deadline:
            verdicts.append(Verdict(proof=one, status=Status.UNTRIED, detail="the time was over: give more --minutes"))
            continue
        if trial.blocked is not None and not one.first:
            verdicts.append(Verdict(proof=one, status=Status.UNTRIED, detail=trial.blocked))
            continue
        on_start(one)
        try:
            why = one.unless(trial)
            if why is not None:
                status, detail = Status.NOT_APPLICABLE, why
            else:
                detail = one.run(trial)
        except Disproved as error:
            status, detail = Status.FAIL, str(error)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            status = Status.FAIL
            detail = f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})"
        verdicts.append(Verdict(proof=one, status=status, detail=detail, seconds=now() - began))
    return verdicts
