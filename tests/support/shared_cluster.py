"""One Ray and two vLLM engines for many runs: they take a minute to start, and what samples is pushed to them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from preloaded_workers import preloaded_cluster

from openrlhf.cluster.engines import RayEngines, engine_slots
from openrlhf.cluster.launch import Cluster, placed
from openrlhf.cluster.placement import PlacementRequest, plan
from openrlhf.config.commands import RLConfig
from openrlhf.runs.engines import build_vllm
from openrlhf.runs.launchers import RunParts
from openrlhf.runs.ray_launcher import RayLauncher, plan_on


class SharedCluster:
    """Runs of models of one shape, one after the other."""

    def __init__(self, cluster: Cluster, engines: RayEngines) -> None:
        self.cluster = cluster
        self.engines = engines

    @contextlib.contextmanager
    def make_launcher(self, config: RLConfig, tokenizer) -> Iterator[RayLauncher]:
        """As `ray_launcher`, with the engines that are there."""
        with placed(plan_on(self.cluster, config), self.cluster) as found:
            yield _Launcher(config, tokenizer, found, self.engines)

    @contextlib.contextmanager
    def with_own_engines(self, config: RLConfig, tokenizer) -> Iterator[RayLauncher]:
        """As `ray_launcher`, for a model of another shape."""
        with placed(plan_on(self.cluster, config), self.cluster) as found:
            yield RayLauncher(config, tokenizer, found)


class _Launcher(RayLauncher):
    def __init__(self, config, tokenizer, found, shared: RayEngines) -> None:
        super().__init__(config, tokenizer, found)
        self._shared = shared

    @contextlib.contextmanager
    def engines(self) -> Iterator[RayEngines]:
        yield self._shared

    @contextlib.contextmanager
    def build(self, *, total_steps: int, loop) -> Iterator[RunParts]:
        """Engines that were lost are back afterwards: only this run's policy can give them weights."""
        with super().build(total_steps=total_steps, loop=loop) as bound:
            try:
                yield bound
            finally:
                self._shared.wait_for_replacements()


@contextlib.contextmanager
def shared_cluster(config: RLConfig, folder: Path, *, engines: int = 2) -> Iterator[SharedCluster]:
    """`config`: of any of the runs; the model's shape and the lengths are those of all. `folder`: of its own."""
    with preloaded_cluster(folder) as cluster:
        request = PlacementRequest(groups={}, engines=engines, cpus_per_device=0)
        make = functools.partial(build_vllm, config, engines=engines)
        with (
            placed(plan(request), cluster) as found,
            contextlib.closing(RayEngines(engine_slots(found, make), max_model_len=config.data.max_len)) as started,
        ):
            started.ready(deadline=900)
            yield SharedCluster(cluster, started)
