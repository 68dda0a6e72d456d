"""Optimizer and learning-rate schedule: one set of fields for actor, critic and the supervised trainers."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from openrlhf.config.fields import Flag

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""Every schedule of transformers that depends on the step alone."""
MEASURING_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""The others, which follow a loss as it is measured."""


@dataclass(frozen=True, kw_only=True)
class AdamSection:
    lr: Annotated[float, Flag("AdamW learning rate (also of what muon leaves out)", flat="{owner}learning_rate")] = 1e-6
    betas: Annotated[tuple[float, float], Flag("AdamW betas", flat="adam_betas")] = (0.9, 0.95)
    eps: Annotated[float, Flag("AdamW epsilon")] = 1e-8
    weight_decay: Annotated[float, Flag("weight decay, muon's too; biases and norms are exempt", flat="l2")] = 0.0


@dataclass(frozen=True, kw_only=True)
class MuonSection:
    lr: Annotated[float, Flag("learning rate of the matrices that muon updates")] = 0.02
    momentum: Annotated[float, Flag("muon momentum")] = 0.95
    ns_steps: Annotated[int, Flag("Newton-Schulz steps")] = 5
    nesterov: Annotated[bool, Flag("Nesterov momentum (no_nesterov switches it off)")] = True


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """Everything an optimizer and its schedule are built from."""

    optim: Annotated[
        Literal["adam", "muon"],
        Flag("optimizer; muon leaves vectors, embeddings, the head and stacked experts to AdamW"),
    ] = "adam"
    muon: MuonSection = field(default=MuonSection(), metadata={"only_with": ".optim=muon"})
    adam: AdamSection = field(default=AdamSection())
    lr_scheduler: Annotated[
        str, Flag(f"schedule, by its Hugging Face name: {', '.join(SCHEDULES)}", flat="lr_scheduler")
    ] = "cosine_with_min_lr"
    lr_warmup_ratio: Annotated[
        float,
        Flag("share of the schedule spent warming up", flat="lr_warmup_ratio", only_with=".lr_scheduler!=constant"),
    ] = 0.03
    min_lr_ratio: Annotated[
        float,
        Flag(
            "final over peak learning rate, for the *_with_min_lr schedules",
            flat="min_lr_ratio",
            only_with=f".lr_scheduler={','.join(name for name in SCHEDULES if name.endswith('with_min_lr'))}",
        ),
    ] = 0.1
    max_norm: Annotated[
        float,
        Flag(
            "gradients are scaled down to this norm; 0 = never (muon's steps hardly change)",
            flat="max_norm",
            unlimited=True,
        ),
    ] = 1.0
