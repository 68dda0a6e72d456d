"""Which of the devices that a process sees is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def local_device(given: Sequence[str], environment: Mapping[str, str]) -> int:
    """Index, among the visible devices, of the first that Ray gave this worker (`given`: its accelerator ids).

    Usually Ray shows a worker nothing else, and the index is 0. With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (or
    the HIP or ROCR one) it leaves visibility alone: then a worker sees what its node was started with, and its own
    device is somewhere among those. So the index is looked up in what is visible, whoever decided that.
    """
    if not given:
        return 0
    for name in VISIBLE:
        visible = [device.strip() for device in environment.get(name, "").split(",")]
        if given[0] in visible:
            return visible.index(given[0])
    return int(given[0])
