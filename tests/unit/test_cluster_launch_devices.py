"""What a worker's device is, and how a Ray of our own is guarded: pure functions of the environment."""

import socket

import pytest

from openrlhf.cluster.launch import (
    WORKER,
    Cluster,
    ClusterError,
    DeviceKind,
    authentication,
    cannot_join,
    device_kind,
    require_reachable,
)
from openrlhf.cluster.placement import Node
from openrlhf.cluster.workers import local_device


@pytest.mark.parametrize(
    ("given", "environment", "index"),
    [
        ([], {}, 0),  # on CPU
        (["3"], {"CUDA_VISIBLE_DEVICES": "3"}, 0),  # Ray shows a worker its own device alone
        (["3"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, 3),  # all are visible
        (["6"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2),
        (["1"], {"RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "0, 1"}, 1),
        (["5"], {"RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES": "1"}, 5),
        # The variable of other hardware was set to be safe; Ray shows the device by its own.
        (["2"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, 0),
        (["GPU-b"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, 1),
    ],
)
def test_a_worker_finds_its_device_among_those_it_sees(given, environment, index):
    assert local_device(given, environment) == index


def test_a_device_is_a_gpu_a_counted_worker_or_a_cpu():
    """The head node of a GPU cluster often has none."""
    assert device_kind([{"CPU": 4}, {"GPU": 8, "CPU": 64, WORKER: 9}]) == DeviceKind("GPU", cpus=1)
    assert device_kind([{"CPU": 4}, {"CPU": 4, WORKER: 9}]) == DeviceKind(WORKER, cpus=0)
    assert device_kind([{"CPU": 4}]) == DeviceKind("CPU", cpus=0)


def test_device_kind_options_for_ray():
    assert DeviceKind("GPU", cpus=1).bundle == {"GPU": 1, "CPU": 1}
    assert DeviceKind("GPU", cpus=1).options(0.25) == {"num_gpus": 0.25, "num_cpus": 0.25}
    assert DeviceKind(WORKER, cpus=0).bundle == {WORKER: 1}
    assert DeviceKind(WORKER, cpus=0).options(0.5) == {"resources": {WORKER: 0.5}, "num_cpus": 0}
    assert DeviceKind("CPU", cpus=0).options(0.5) == {"num_cpus": 0.5}


def test_a_group_left_to_the_machine_takes_what_every_gpu_node_has():
    nodes = (Node(0, 16), Node(8, 64), Node(4, 64))
    assert Cluster(("a", "b", "c"), DeviceKind("GPU", cpus=1), nodes).devices_per_node == 4
    assert Cluster(("a", "b", "c"), DeviceKind(WORKER, cpus=0), nodes).devices_per_node == 1


def test_a_ray_of_our_own_asks_for_a_token(tmp_path):
    """Made for the run, unless the user has one or has decided otherwise."""
    fresh = authentication({"HOME": str(tmp_path)})
    assert fresh["RAY_AUTH_MODE"] == "token"
    assert len(fresh["RAY_AUTH_TOKEN"]) == 64
    assert fresh != authentication({"HOME": str(tmp_path)})
    assert authentication({"HOME": str(tmp_path), "RAY_AUTH_TOKEN": "mine"}) == {"RAY_AUTH_MODE": "token"}
    assert authentication({"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("mine")
    assert authentication({"HOME": str(tmp_path)}) == {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:8265", "ray job submit --address=http://127.0.0.1:8265"),
        ("ray://head:10001", "ray job submit"),
        ("head", "not host:port"),
    ],
)
def test_an_address_that_is_no_head_node_is_refused(address, message):
    with pytest.raises(ClusterError, match=message):
        require_reachable(address)


def test_a_head_node_that_is_not_there_is_found_missing_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        require_reachable(address)
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS {address}: nobody answers there"):
        require_reachable(address)


def test_a_ray_that_asks_for_a_token_says_so():
    """Ray's own words for it are in the text of a cause."""
    refused = ConnectionError("Failed to connect to Ray cluster at head:6379\nmore")
    assert str(cannot_join("head:6379", refused)) == (
        "Ray at head:6379 cannot be joined: Failed to connect to Ray cluster at head:6379"
    )
    refused.__cause__ = RuntimeError("Failed to connect to GCS. … ray.exceptions.AuthenticationError: RPC error")
    assert "RAY_AUTH_MODE=token" in str(cannot_join("head:6379", refused))
