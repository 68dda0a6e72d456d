"""Ranks as Ray actors on CPU train what one process trains, and say which of them failed."""

import contextlib
import functools
import os
import signal
import sys
import time

import pytest
import ray
import torch
import torch.distributed as dist
from patience import patience
from preloaded_workers import preloaded_cluster
from small_rl import CONFIG, FLAGS, make_groups, play
from small_tokenizers import tokenizer as small_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.backends.ranks import join
from openrlhf.cluster.launch import placed
from openrlhf.cluster.learners import RayWorkers
from openrlhf.cluster.placement import PlacementRequest, Role, Size, plan, requested
from openrlhf.cluster.workers import WorkerError, worker_groups
from openrlhf.config import parse
from openrlhf.learners.advantages import SampleMaker
from openrlhf.observability.watchdog import Watchdog
from openrlhf.runs.ranks import rank_service
from openrlhf.runs.rl_models import RLTraining, advantage_settings, load_models, step_settings
from openrlhf.utils import waits

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with preloaded_cluster(tmp_path_factory.mktemp("cluster")) as joined:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find test modules
        yield joined


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    # Two key/value heads, so that ranks can share them.
    Qwen2ForCausalLM(Qwen2Config.from_dict(CONFIG.to_dict() | {"num_key_value_heads": 2})).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def group_of(count: int, build, cluster, *, ranks_per_share: int = 1):
    """A worker group of an actor with so many ranks."""
    request = PlacementRequest(groups={Role.ACTOR: Size(1, count)}, cpus_per_device=0)
    with (
        placed(plan(request), cluster) as whole,
        worker_groups(whole, lambda roles: build(), ranks_per_share=ranks_per_share, deadline=120) as groups,
    ):
        yield groups[Role.ACTOR]


class Service:
    """What ranks can do to each other."""

    def __init__(self) -> None:
        self._ranks = join()

    def who(self) -> list[int]:
        return self._ranks.gather(dist.get_rank())

    def pid(self) -> int:
        return os.getpid()

    def double(self, number: int) -> int:
        return 2 * number

    def fail_on(self, rank: int) -> list[int]:
        """The others wait for it."""
        if self._ranks.index == rank:
            raise ValueError("no such thing")
        return self._ranks.gather(rank)

    def sleep_on(self, rank: int) -> None:
        time.sleep(30 if self._ranks.index == rank else 0)

    def die_on(self, rank: int) -> None:
        if self._ranks.index == rank:
            os._exit(3)


def test_ranks_meet_and_each_gets_its_share(cluster):
    with group_of(2, Service, cluster) as group:
        assert group.call("who", deadline=30) == [[0, 1], [0, 1]]
        assert group.call("double", shares=[[3], [4]], deadline=30) == [6, 8]
        assert ray.get(group.call_remote_ref("who", deadline=30)) == [[0, 1], [0, 1]]


def test_ranks_that_share_samples_get_the_same_and_one_speaks_for_all(cluster):
    with group_of(4, Service, cluster, ranks_per_share=2) as group:
        assert (len(group), group.share_count) == (4, 2)
        doubled = group.call("double", shares=[[3], [4]], deadline=60)
        assert doubled == [6, 6, 8, 8]
        assert group.by_share(doubled) == [6, 8]
        assert len(ray.get(group.call_remote_ref("pid", deadline=30))) == 2


@pytest.mark.parametrize(
    ("method", "deadline", "message"),
    [
        ("fail_on", 30, r"actor rank 1 on [\d.]+: ValueError: no such thing"),
        ("sleep_on", 1, r"waited 1 s for sleep_on: actor rank 1 on [\d.]+$"),
        ("die_on", 30, r"actor rank 1 on [\d.]+ is gone: "),
    ],
)
def test_a_rank_that_fails_is_named_though_the_others_wait(cluster, method, deadline, message):
    with group_of(2, Service, cluster) as group:
        assert group.call("who", deadline=60)
        began = time.monotonic()
        with pytest.raises(WorkerError, match=message):
            group.call(method, 1, deadline=deadline)
    assert time.monotonic() - began < patience(15)


def test_a_rank_that_stops_in_a_collective_is_named_and_the_stacks_of_all_are_kept(cluster, tmp_path):
    """The other rank waits for it, as its stacks show; the one that is stopped cannot even be asked, and that is said.

    As long as a rank gives signs of life nobody takes the run for dead.
    """
    with Watchdog() as dog, dog.stalls_count(tmp_path), group_of(2, Service, cluster) as group:
        pids = group.call("pid", deadline=60)
        assert group._stack_probes.idle_seconds() < 60
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(
                WorkerError, match=r"waited 3 s for who: .*actor rank 1 on [\d.]+; stacks are in "
            ) as caught:
                group.call("who", deadline=3)
        finally:
            os.kill(pids[1], signal.SIGCONT)
    assert group._stack_probes not in waits.peers  # nor are ranks of groups before this one in the file
    path = tmp_path / "stacks-1.txt"
    assert str(caught.value).endswith(str(path))
    ranks = path.read_text().split("\n== actor rank ")[1:]
    assert "in gather" in ranks[0]
    assert "state T (stopped)" in ranks[1]


def test_a_model_that_is_not_there_is_said_in_one_line(cluster, tmp_path):
    config = parse("train_ppo_ray", ["--actor.model_name_or_path", str(tmp_path / "nothing"), "--init_kl_coef", "0"])
    build = functools.partial(rank_service, config, (Role.ACTOR,), total_steps=1)
    with (
        pytest.raises(WorkerError, match=r"actor rank \d on [\d.]+: ModelLoadError: .*nothing") as caught,
        group_of(1, build, cluster),
    ):
        pass
    assert "\n" not in str(caught.value)


PPO = {"advantage_estimator": "gae", "init_kl_coef": 0.1, "train_batch_size": 4}
SIZES = {f"{name}_num_gpus_per_node": size for name, size in (("actor", 2), ("critic", 2), ("ref", 2))}
RUNS = {
    "one rank": ({"advantage_estimator": "reinforce_baseline"}, ["actor"]),
    "zero 2": ({"advantage_estimator": "reinforce_baseline", "zero_stage": 2, **SIZES}, ["actor"]),
    "zero 3, all shared": (PPO | SIZES | {"zero_stage": 3, "colocate_all_models": True}, ["actor+critic+ref"]),
    "all apart": (PPO | SIZES | {"ref_num_gpus_per_node": 1, "critic_num_gpus_per_node": 1}, ["actor", "ref", "critic"]),
    "layers shared": (
        PPO | {f"{name}_num_gpus_per_node": size for name, size in (("actor", 4), ("ref", 4), ("critic", 2))}
        | {"colocate_actor_ref": True, "ds_tensor_parallel_size": 2},
        ["actor+ref", "critic"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "names"), RUNS.values(), ids=RUNS)
def test_a_round_on_the_cluster_is_the_round_of_one_process(cluster, model, flags, names):
    """Losses, gradient norms, KL and returns of two rounds agree to 1e-4, whoever shares devices; so does the state."""
    values = {**FLAGS, **flags, "pretrain": model}
    words = [w for name, value in values.items() for w in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]  # fmt: skip
    config = parse("train_ppo_ray", ["--train.launcher", "ray", *words])
    total = config.optimizer_steps(2 * config.rollout.batch_size)
    local = RLTraining(config, load_models(config, CPU), total_steps=total, device=CPU).learners
    expected = [play(local, make_groups()) for _ in range(2)]

    request = requested(config, devices_per_node=1, engines_by_default=False, cpus_per_device=0)
    build = functools.partial(rank_service, config, total_steps=total)
    ranks = {"ranks_per_share": config.ds.ranks_per_share, "deadline": 120}
    with placed(plan(request), cluster) as whole, worker_groups(whole, build, **ranks) as groups:
        assert [spec.name for spec in whole.plan.process_groups()] == names
        workers = RayWorkers.of(groups, SampleMaker(advantage_settings(config)), step_settings(config))
        for values in expected:
            found = play(workers, make_groups())
            assert found.keys() == values.keys()
            for name, value in values.items():
                if name != "critic_clip_ratio":  # a count of values on either side of an edge
                    assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        state = workers.state_dict()
        assert len(state.pop("random")) == (config.actor.world_size or 1) // config.ds.ranks_per_share
        assert state == local.state_dict()
