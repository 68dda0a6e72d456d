"""One of the ranks of the proof `ranks`: `python -m openrlhf.proving.rank FOLDER`, started by `proofs_ranks`.

It reads what to compute from FOLDER/job, computes its share of one update with the run's own backend, and the first
rank leaves the gradient that the optimizer got in FOLDER/gradient.pt.
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf.backends.base import Distribution, start_backend
from openrlhf.learners.steps import assign_to_ranks
from openrlhf.models.loading import model_dtype
from openrlhf.observability.loggers import NullLogger
from openrlhf.observability.progress import Progress
from openrlhf.proving.trial import optimizer_gradient, unclipped
from openrlhf.runs.process import prepare_process
from openrlhf.runs.rl_models import RLTraining, load_models, step_settings
from openrlhf.runs.supervised_assembly import Place, loop_parts
from openrlhf.trainers.supervised import Periods, SupervisedTrainer, WholeSet
from openrlhf.types import TrainingBatch


def main(folder: Path) -> None:
    with (folder / "job").open("rb") as file:
        config, groups, count = pickle.load(file)  # written by the process that has started this one
    distribution = start_backend("deepspeed", config.ds)
    device = prepare_process(config.train, distribution.ranks)
    if groups is not None:
        gradient = of_rl(config, groups, distribution, device)
    else:
        gradient = of_supervised(config, count, distribution, device)
    if distribution.ranks.is_main:
        torch.save(gradient, folder / "gradient.pt")
    distribution.ranks.barrier("the end of a proof")
    distribution.ranks.close()


def of_rl(config: Any, groups: Any, distribution: Distribution, device: torch.device) -> dict[str, Tensor]:
    """The policy's gradient in one round of these groups. Collective."""
    ranks = distribution.ranks
    with distribution.loading(model_dtype(config.ds.param_dtype, device)):
        models = load_models(config, device)
    training = RLTraining(config, models, total_steps=1, device=device, distribution=distribution)
    whole, _ = training.learners.place(groups)
    shares = assign_to_ranks(whole.samples, step_settings(config), round_index=1, ranks=ranks.count)
    batch = TrainingBatch(samples=shares[ranks.index])
    training.learners.score(batch)
    training.learners.assign_advantages(batch)
    norm = training.learners.update(batch).values().get("actor_grad_norm", 0.0)
    gradient = optimizer_gradient(training.policy_backend, beta=config.actor.adam.betas[0])
    return unclipped(gradient, norm, max_norm=config.actor.max_norm)


def of_supervised(config: Any, count: int, distribution: Distribution, device: torch.device) -> dict[str, Tensor]:
    """The gradient of one step on the first `count` samples, one at a time. Collective."""
    ranks = distribution.ranks
    parts = loop_parts(config, Place(device, distribution))
    own = [[i] for i in range(ranks.index, count, ranks.count)]
    own += [[]] * (-(-count // ranks.count) - len(own))
    with Progress(1, "prove", stream=io.StringIO(), live=False) as progress:
        trainer = SupervisedTrainer(
            backend=parts.backend,
            objective=parts.objective,
            evaluation=None,
            schedule=parts.schedule,
            periods=Periods(),
            tokens_per_forward=config.tokens_per_forward,
            logger=NullLogger(),
            progress=progress,
            ranks=ranks,
        )
        norm = trainer.step(WholeSet(range(count), own)).values().get("grad_norm", 0.0)
    gradient = optimizer_gradient(parts.backend, beta=config.adam.betas[0])
    return unclipped(gradient, norm, max_norm=config.max_norm)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
