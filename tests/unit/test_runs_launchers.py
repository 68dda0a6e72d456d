"""Which launcher a run gets, and which engine a request."""

import pytest

from openrlhf.config import parse
from openrlhf.rollout.router import SLACK, Balancer
from openrlhf.runs.launchers import needs_ray

NEEDED = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", "--reward.remote_url", "r.py"]


@pytest.mark.parametrize(
    ("words", "environment", "devices", "ray"),
    [
        ("", {}, 0, False),
        ("--actor.num_gpus_per_node 8", {}, 0, False),  # a command for eight GPUs, on a laptop
        ("", {"RAY_ADDRESS": "10.0.0.1:6379"}, 0, True),
        ("--vllm.num_engines 2", {}, 0, True),
        ("--train.colocate_all", {}, 1, False),
        ("--train.colocate_all --actor.num_gpus_per_node 8", {}, 8, True),
        ("--algo.kl.init_coef 0 --vllm.num_engines 1", {}, 1, False),  # actor and engine share the only one
        ("--actor.num_gpus_per_node 1 --vllm.num_engines 1", {}, 2, True),
        ("--train.launcher local", {"RAY_ADDRESS": "auto"}, 8, False),
        ("--train.launcher ray", {}, 0, True),
    ],
)
def test_auto_is_ray_where_one_process_with_one_device_is_too_small(words, environment, devices, ray):
    config = parse("train_ppo_ray", [*NEEDED, *words.split()])
    assert needs_ray(config, environment, devices=devices) is ray


def test_requests_go_to_whoever_has_least_to_do():
    balancer = Balancer(3)
    with balancer.chosen([1]) as first, balancer.chosen([2]) as second, balancer.chosen([3]) as third:
        assert {first, second, third} == {0, 1, 2}
        assert balancer.running == [1, 1, 1]
    assert balancer.running == [0, 0, 0]


def test_router_keeps_equal_prompts_together_until_the_engine_is_much_busier():
    balancer = Balancer(2)
    prompt = list(range(100))
    opened = [balancer.chosen([*prompt, i]) for i in range(SLACK + 2)]
    engines = [request.__enter__() for request in opened]
    assert engines == [0] * (SLACK + 1) + [1]
    for request in opened:
        request.__exit__(None, None, None)
    with balancer.chosen(prompt) as engine:
        assert engine == 1  # where it was last
