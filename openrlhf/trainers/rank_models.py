"""What a rank of a cluster loads and offers: its part of the models, behind one service."""

from __future__ import annotations

from openrlhf.cluster.learners import RankService
from openrlhf.config.roots import RLConfig
from openrlhf.trainers.distribution import Distribution
from openrlhf.trainers.local_models import LocalTraining, load_models
from openrlhf.trainers.running import prepare_process
from openrlhf.trainers.settings import model_dtype


def rank_service(config: RLConfig, *, rounds: int) -> RankService:
    """Meet the other ranks and load the models: policy, reference and critic together. Collective."""
    distribution = Distribution.of("auto", config.ds)
    device = prepare_process(config.train, distribution.ranks)
    with distribution.loading(model_dtype(config.ds.param_dtype, device)):
        models = load_models(config, device)
    training = LocalTraining(config, models, rounds=rounds, device=device, distribution=distribution)
    return RankService(training.learners)
