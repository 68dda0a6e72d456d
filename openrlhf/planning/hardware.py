"""Machines that a run is planned for: a table of devices, and what is in this machine.

`8xH100` is one machine with eight of them, `8x8xH200` eight such machines, `cpu` this machine's cores.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from openrlhf.config.fields import ConfigError

GIB = 2**30
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, by its data sheet; or the cores of a machine, by measurement."""

    name: str
    memory: int
    """Bytes that a process sees."""
    flops: float
    """Peak of dense matrix products in bf16, per second; on a CPU what a product in fp32 reached."""
    bandwidth: float
    """Bytes of its memory per second."""
    link: float
    """Bytes per second to another device of the machine, in one direction: NVLink, else PCIe."""
    network: float
    """Bytes per second to a device of another machine, in one direction."""
    is_cpu: bool = False


def _gpu(name: str, gib: float, teraflops: float, bandwidth: float, link: float, network: float) -> Device:
    """Bandwidths in GB/s."""
    return Device(
        name=name,
        memory=int(gib * GIB),
        flops=teraflops * TERA,
        bandwidth=bandwidth * GIGA,
        link=link * GIGA,
        network=network * GIGA,
    )


GPUS = {
    device.name: device
    for device in (
        _gpu("A100-40", 39.4, 312, 1555, 300, 25),
        _gpu("A100-80", 79.2, 312, 2039, 300, 25),
        _gpu("H100", 79.2, 989, 3350, 450, 50),
        _gpu("H200", 139.8, 989, 4800, 450, 50),
        _gpu("B200", 178.4, 2250, 8000, 900, 50),
        _gpu("L40S", 44.4, 362, 864, 32, 12.5),
        _gpu("RTX4090", 23.6, 165, 1008, 32, 3),
    )
}
"""Data sheets: peak without sparsity. The network is what such machines are usually sold with: 400 Gb/s for each GPU
beside H100, H200 and B200, 200 beside A100, 100 beside L40S, 25 beside RTX 4090."""

_ALIASES = {"A100": "A100-80", "4090": "RTX4090"}


@dataclass(frozen=True, slots=True)
class Machines:
    """Equal machines with equal devices."""

    nodes: int
    per_node: int
    device: Device
    here: bool = False
    """This machine, of which more is known than its data sheet."""

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        if self.device.is_cpu:
            return self.device.name
        machines = f"{self.nodes} machines of " if self.nodes > 1 else ""
        return f"{machines}{self.per_node} × {self.device.name}"


def named_device(name: str, *, flag: str) -> Device:
    """Of the table, however a user or a driver writes it. Raises ConfigError."""
    plain = re.sub(r"[\s_-]|NVIDIA|GEFORCE|TESLA", "", name.upper())
    plain = _ALIASES.get(plain, plain)
    for known, device in GPUS.items():
        if plain == re.sub(r"-|GB$", "", known.upper()) or plain == re.sub(r"-", "", known.upper()) + "GB":
            return device
    names = ", ".join(GPUS)
    raise ConfigError(f"{flag}: {name!r} is no device of the table; there are {names} and cpu")


def parse_gpus(text: str) -> Machines:
    """`8xH100`, `H100` or `cpu`. Raises ConfigError."""
    return _parse(text, flag=f"--gpus {text}", levels=1, example="8xH100")


def parse_cluster(text: str) -> Machines:
    """`8x8xH200`: machines, devices of each. Raises ConfigError."""
    return _parse(text, flag=f"--cluster {text}", levels=2, example="8x8xH200")


def _parse(text: str, *, flag: str, levels: int, example: str) -> Machines:
    found = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(\S.*)", text.strip())
    counts = [int(count) for count in found.groups()[:2] if count is not None] if found else []
    if found is None or 0 in counts or len(counts) > levels or (levels == 2 and len(counts) < 2):
        raise ConfigError(f"{flag}: write it like {example}")
    if found[3].lower() == "cpu":
        return replace(machines_here(cpu=True), here=False)
    nodes, per_node = [1] * (2 - len(counts)) + counts
    return Machines(nodes, per_node, named_device(found[3], flag=flag))


# ------------------------------------------------------------------------------------------------- what is here


def machines_here(*, cpu: bool = False) -> Machines:
    """The GPUs of this machine, or its cores; `cpu`: its cores in any case. A CPU is measured, which takes a second."""
    import torch

    count = 0 if cpu else torch.cuda.device_count()
    if not count:
        return Machines(1, 1, measured_cpu(), here=True)
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    try:
        device = named_device(_shortened(name, memory), flag="this machine")
    except ConfigError:
        device = unknown_gpu(name, memory)
    return Machines(1, count, replace(device, memory=memory), here=True)


def _shortened(name: str, memory: int) -> str:
    """`NVIDIA A100-SXM4-80GB` → `A100-80`, `NVIDIA H100 80GB HBM3` → `H100`."""
    found = next((known for known in ("A100", "H100", "H200", "B200", "L40S", "4090") if known in name), name)
    return f"A100-{80 if memory > 50 * GIB else 40}" if found == "A100" else found


def unknown_gpu(name: str, memory: int) -> Device:
    """Between an L40S and an A100: seconds are no more than a guess."""
    return Device(
        name=name, memory=memory, flops=200 * TERA, bandwidth=1000 * GIGA, link=32 * GIGA, network=12.5 * GIGA
    )


CPU_PRODUCT = 768
"""Rows and columns of the matrices that are multiplied."""


def measured_cpu(*, seconds: float = 0.6, clock: Callable[[], float] = time.perf_counter) -> Device:
    """What this machine's cores do at this moment, beside whatever else runs: products of matrices in fp32, and copies
    of memory. The median of as many as `seconds` allow; a first one warms up. `clock`: a process's own time leaves out
    what others have of the cores."""
    import psutil
    import torch

    left, right = torch.rand(CPU_PRODUCT, CPU_PRODUCT), torch.rand(CPU_PRODUCT, CPU_PRODUCT)
    product = torch.empty(CPU_PRODUCT, CPU_PRODUCT)
    source = torch.rand(8 << 20)
    target = torch.empty_like(source)
    rate = _median_rate(lambda: torch.mm(left, right, out=product), 2 * CPU_PRODUCT**3, seconds * 0.6, clock)
    bandwidth = _median_rate(lambda: target.copy_(source), 2 * source.nbytes, seconds * 0.4, clock)
    return Device(
        name=f"{torch.get_num_threads()} threads of this CPU",
        memory=psutil.virtual_memory().total,
        flops=rate,
        bandwidth=bandwidth,
        link=bandwidth,
        network=GIGA / 8,
        is_cpu=True,
    )


def _median_rate(work: Callable[[], object], amount: float, seconds: float, clock: Callable[[], float]) -> float:
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = clock()
        work()
        times.append(clock() - start)
    return amount / max(1e-9, sorted(times)[len(times) // 2])
