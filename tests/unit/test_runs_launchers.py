"""Which launcher a run gets."""

import pytest

from openrlhf.config import parse
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
