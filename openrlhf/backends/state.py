"""Whether a saved training state belongs to what is trained now: what backends share when they load one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

PARAMETERS = "parameters"
AVERAGE = "average"


def require_names(saved: Iterable[str], kinds: Mapping[str, Sequence[str]]) -> None:
    """ValueError if `saved` is of other parameters or of other optimizers.

    `kinds`: per trained parameter, what its optimizer keeps. It has all of that or, never updated, nothing.
    """
    found: dict[str, set[str]] = {}
    for name in saved:
        kind, _, parameter = name.partition("/")
        found.setdefault(parameter, set()).add(kind)
    if missing := [name for name in kinds if PARAMETERS not in found.get(name, ())]:
        raise ValueError(f"the saved state has no {_some(missing)}, which is trained now")
    if others := [name for name in found if name not in kinds]:
        raise ValueError(f"the saved state has {_some(others)}, which is not trained now")
    for name, wanted in kinds.items():
        kept = found[name] - {PARAMETERS, AVERAGE}
        if kept and kept != set(wanted):
            raise ValueError(
                f"the saved state was trained with another optimizer: for {name} it has {', '.join(sorted(kept))}, "
                f"and this run's optimizer keeps {', '.join(sorted(wanted))}"
            )


def whole(saved: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """A tensor by its name; ValueError if it has another shape."""
    tensor = saved[name]
    if tensor.shape != shape:
        raise ValueError(f"in the saved state {name} has shape {tuple(tensor.shape)}, in this run {tuple(shape)}")
    return tensor


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
