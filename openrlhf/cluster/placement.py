"""Placement: which worker gets which device, as a pure function of the configuration, and whether a cluster has room.

    configuration → `requested` → `PlacementRequest` → `plan` → `PlacementPlan` → `fit` → a node for every block

A plan consists of pools; the roles of a pool share its devices. A pool consists of blocks, and each block stays on one
node. A block consists of bundles of one device each. A bundle has a slot for one worker of every role that shares the
device. Nothing here knows Ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from openrlhf.config.backend import undivided_group
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.models import GroupSection


class Role(StrEnum):
    """A part of the run that needs devices, named like the section of its flags."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "ref"
    TEACHER = "teacher"
    REWARD = "reward"
    ENGINE = "vllm"


class Size(NamedTuple):
    """The number of workers of a group. 0: as many as the group whose devices it shares."""

    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The devices that a run asks for: the groups that it needs, and which of them share."""

    groups: Mapping[Role, Size]
    """The models that are trained or run forward; the actor first."""
    engines: int = 0
    """The number of vLLM engines; 0: none."""
    parts: int = 1
    """The number of devices of one engine."""
    size_in_flags: str = "--vllm.tensor_parallel_size 1"
    """The flags that asked for `parts`, for error messages."""
    colocate_all: bool = False
    colocate_actor_ref: bool = False
    colocate_critic_reward: bool = False
    asynchronous: bool = False
    """Engines generate during training, so they have devices of their own unless `async_share_device` is set."""
    async_share_device: bool = False
    """Engines share the actor's devices although the run is asynchronous."""
    ranks_per_share: int = 1
    """Workers of a model that compute each sample together: every group is divided by it."""
    share_in_flags: str = ""
    """The flags that asked for `ranks_per_share`, for error messages."""
    cpus_per_device: int = 1
    """CPUs that are reserved with a device; 0 where a "device" is a worker on a CPU and workers share cores."""

    @property
    def engines_share(self) -> bool:
        """Engines live on the actor's devices."""
        return self.async_share_device if self.asynchronous else self.colocate_all

    @property
    def sharing(self) -> list[list[Role]]:
        """The sets of roles that share devices. The first role of a set (its host) decides how many there are."""
        if self.colocate_all:
            sets = [[Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.TEACHER, Role.REWARD]]
        else:
            pairs = (
                (Role.ACTOR, Role.REFERENCE, self.colocate_actor_ref),
                (Role.CRITIC, Role.REWARD, self.colocate_critic_reward),
            )
            sets = [roles for one, other, shared in pairs for roles in ([[one, other]] if shared else [[one], [other]])]
            sets.append([Role.TEACHER])
        needed = [[role for role in roles if role in self.groups] for roles in sets]
        needed = [roles for roles in needed if roles]
        if self.engines:
            if self.engines_share:
                needed[0].append(Role.ENGINE)
            else:
                needed.append([Role.ENGINE])
        return needed


class DeviceSlot(NamedTuple):
    """The place of one worker, or of one part of an engine, on a device."""

    role: Role
    rank: int
    """The worker's rank in its group, or the index of the engine."""
    share: float
    """The fraction of the device that Ray accounts for. It does not limit memory."""
    part: int = 0
    """For an engine: the index of the device among the engine's devices."""


Bundle = tuple[DeviceSlot, ...]
"""One device: the slots of the workers that share it."""
Block = tuple[Bundle, ...]
"""Devices that must be on one node."""


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The devices that the same roles share. It becomes one Ray placement group."""

    roles: tuple[Role, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return "+".join(self.roles)

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for block in self.blocks for bundle in block]


class Placement(NamedTuple):
    """A slot and its position in the plan."""

    pool: int
    bundle: int
    """The index of the bundle in its pool, counted over all blocks."""
    slot: DeviceSlot


class ProcessGroupSpec(NamedTuple):
    """Roles that share processes: one process on each of their devices."""

    roles: tuple[Role, ...]
    placements: list[Placement]
    """The placements by rank. The share of each slot is the sum over the roles."""

    @property
    def name(self) -> str:
        return "+".join(self.roles)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    request: PlacementRequest
    pools: tuple[DevicePool, ...]

    @property
    def devices(self) -> int:
        return sum(len(pool.bundles) for pool in self.pools)

    def placements(self, role: Role) -> list[Placement]:
        """The placements of a role's workers, by rank; for engines by engine, then by part."""
        found = [
            Placement(pool_index, bundle_index, slot)
            for pool_index, pool in enumerate(self.pools)
            for bundle_index, bundle in enumerate(pool.bundles)
            for slot in bundle
            if slot.role is role
        ]
        return sorted(found, key=lambda place: (place.slot.rank, place.slot.part))

    def process_groups(self) -> list[ProcessGroupSpec]:
        """The processes of the models. Roles with exactly the same devices share processes too: they need one device
        context, and nothing is sent from one to the other. Engines always have their own processes."""
        found = []
        for pool in self.pools:
            sizes = {role: len(self.placements(role)) for role in pool.roles if role is not Role.ENGINE}
            for size in dict.fromkeys(sizes.values()):
                roles = tuple(role for role, own in sizes.items() if own == size)
                share = round(sum(self.placements(role)[0].slot.share for role in roles), 2)
                places = self.placements(roles[0])
                found.append(ProcessGroupSpec(roles, [p._replace(slot=p.slot._replace(share=share)) for p in places]))
        return found

    def table(self) -> str:
        """The plan as a table to read: one line per role, pool by pool."""
        rows = [("devices", "role", "workers", "share")]
        for pool in self.pools:
            devices = f"{len(pool.blocks)} × {len(pool.blocks[0])}"
            for role in pool.roles:
                slots = [place.slot for place in self.placements(role)]
                workers = str(len(slots))
                if role is Role.ENGINE and self.request.parts > 1:
                    workers = f"{self.request.engines} × {self.request.parts}"
                rows.append((devices, role, workers, f"{slots[0].share:g}"))
                devices = ""
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{self.devices} devices"])


def requested(
    config: RLConfig, *, devices_per_node: int, engines_by_default: bool, cpus_per_device: int = 1
) -> PlacementRequest:
    """The request of a configuration to a cluster whose nodes have `devices_per_node` (on CPU: 1 worker).

    `engines_by_default`: where --vllm.num_engines is not given, there are as many engines as fill the actor's devices;
    otherwise there are none. Raises ConfigError.
    """
    needed = {
        Role.ACTOR: True,
        Role.CRITIC: config.uses_critic,
        Role.REFERENCE: config.uses_reference and not config.reference_is_base,
        Role.TEACHER: config.teacher_path is not None,
        Role.REWARD: config.uses_reward_model,
    }
    train = config.train
    sections: tuple[GroupSection, ...] = (config.actor, config.critic, config.ref, config.teacher, config.reward)
    request = PlacementRequest(
        groups={
            role: Size(
                section.num_nodes, devices_per_node if section.num_gpus_per_node is None else section.num_gpus_per_node
            )
            for (role, is_needed), section in zip(needed.items(), sections, strict=True)
            if is_needed
        },
        parts=config.vllm.devices_per_engine,
        size_in_flags=config.vllm.size_in_flags,
        colocate_all=train.colocate_all,
        colocate_actor_ref=train.colocate_actor_ref,
        colocate_critic_reward=train.colocate_critic_reward,
        asynchronous=train.async_enable,
        async_share_device=train.async_share_device,
        ranks_per_share=config.ds.ranks_per_share,
        share_in_flags=config.ds.share_in_flags,
        cpus_per_device=cpus_per_device,
    )
    # A group whose size was not given, on devices that belong to another group, is as large as that group. This must
    # follow the first request, because only its `sharing` says which group is a guest on whose devices.
    unset = {role for role, section in zip(needed, sections, strict=True) if section.num_gpus_per_node is None}
    guests = {role for roles in request.sharing for role in roles[1:]} & unset
    groups = {role: Size(0, 0) if role in guests else size for role, size in request.groups.items()}
    engines = config.vllm.num_engines
    if engines is None:
        engines = _engines_on(groups[Role.ACTOR].total, request) if engines_by_default else 0
    return dataclasses.replace(request, groups=groups, engines=engines)


def plan(request: PlacementRequest) -> PlacementPlan:
    """Give every worker its device. Raises ConfigError where the groups cannot share as they are asked to."""
    return PlacementPlan(request, tuple(_pool(request, roles) for roles in request.sharing))


def _pool(request: PlacementRequest, roles: Sequence[Role]) -> DevicePool:
    host = roles[0]
    share = 100 // len(roles) / 100  # rounded down to a hundredth, so that the shares never add up to more than 1
    parts = request.parts
    if host is Role.ENGINE:  # each engine is a block of its own: its parts stay on one node, engines may be apart
        size = Size(request.engines, parts)
    else:
        size = request.groups[host]
    slots: list[list[DeviceSlot]] = [[] for _ in range(size.total)]
    for role in roles:
        if role is Role.ENGINE:
            if host is not Role.ENGINE:
                _check_engines_fit_the_actor(request, size)
            for device, bundle in enumerate(slots):
                bundle.append(DeviceSlot(role, device // parts, share, device % parts))
        else:
            for rank in range(_workers(request, role, host)):
                slots[rank].append(DeviceSlot(role, rank, share))
    bundles = [tuple(bundle) for bundle in slots]
    starts = range(0, size.total, size.per_node)
    return DevicePool(tuple(roles), tuple(tuple(bundles[start : start + size.per_node]) for start in starts))


def _workers(request: PlacementRequest, role: Role, host: Role) -> int:
    """The number of workers of a group on its host's devices. If it is smaller than the host, it has the first ones."""
    available, wanted = request.groups[host].total, request.groups[role].total
    if wanted > available or (0 < wanted < available and not request.colocate_all):
        flag = "--train.colocate_all" if request.colocate_all else f"--train.colocate_{host}_{role}"
        few = " or less" if request.colocate_all else ""
        raise ConfigError(
            f"{flag} puts the {role} model on the {host}'s {available} devices, but --{role}.num_nodes × "
            f"--{role}.num_gpus_per_node is {wanted}: make it {available}{few}"
        )
    workers = wanted or available
    if error := undivided_group(request.share_in_flags, request.ranks_per_share, role=role, workers=workers):
        raise ConfigError(error)
    return workers


def _check_engines_fit_the_actor(request: PlacementRequest, actor: Size) -> None:
    engines, parts = request.engines, request.parts
    if engines * parts != actor.total:
        raise ConfigError(
            f"--vllm.num_engines {engines} × {request.size_in_flags} must equal the actor's {actor.total} "
            "devices (--actor.num_nodes × --actor.num_gpus_per_node), which the engines share"
        )
    if actor.per_node % parts:
        raise ConfigError(
            f"{request.size_in_flags} does not divide --actor.num_gpus_per_node {actor.per_node}: an "
            "engine that shares the actor's devices stays on one node"
        )


def _engines_on(devices: int, request: PlacementRequest) -> int:
    if devices % request.parts:
        raise ConfigError(
            f"{request.size_in_flags} does not divide the actor's {devices} devices: give --vllm.num_engines, or "
            "another size"
        )
    return devices // request.parts


# ------------------------------------------------------------------------------------------- does it fit


class Node(NamedTuple):
    """The resources of one machine of the cluster."""

    devices: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of `fit`: a node for every block of a plan, or the reason why it does not fit."""

    nodes: tuple[tuple[int, ...], ...] = ()
    """[pool][block] → index of the node; empty if the plan does not fit."""
    problem: str = ""
    """Why the plan does not fit, and which flags would make it fit, in one line; empty if it fits."""


def fit(plan: PlacementPlan, nodes: Sequence[Node]) -> Fit:
    """Find a node for every block of a plan, or say what is missing and which flags would make the plan fit."""
    found = _assign(plan, nodes)
    if found is not None:
        return Fit(nodes=found)
    flags = list(_remedies(plan.request, nodes))
    advice = f"it fits with {', or with '.join(flags)}" if flags else "no flags make it fit: give it a larger cluster"
    return Fit(problem=f"{_shortage(plan, nodes)}; {advice}")


def _assign(plan: PlacementPlan, nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...] | None:
    """Best fit, largest block first. None: no node has room for some block.

    A block goes to the node with the least room that still holds it, so that whole nodes stay free for large blocks.
    Bin packing is hard in general, but this greedy order is exact where each block size divides the next larger one
    (1, 2, 4, 8 devices), as the sizes of machines and groups do.
    """
    free = [node.devices for node in nodes]
    per_device = plan.request.cpus_per_device
    if per_device:
        free = [min(node.devices, node.cpus // per_device) for node in nodes]
    places = [[-1] * len(pool.blocks) for pool in plan.pools]
    blocks = [(p, b) for p, pool in enumerate(plan.pools) for b in range(len(pool.blocks))]
    for p, b in sorted(blocks, key=lambda at: -len(plan.pools[at[0]].blocks[at[1]])):
        size = len(plan.pools[p].blocks[b])
        chosen = min((n for n, room in enumerate(free) if room >= size), key=free.__getitem__, default=None)
        if chosen is None:
            return None
        free[chosen] -= size
        places[p][b] = chosen
    return tuple(tuple(pool) for pool in places)


def _shortage(plan: PlacementPlan, nodes: Sequence[Node]) -> str:
    wanted = ", ".join(f"{pool.name} {len(pool.bundles)}" for pool in plan.pools)
    devices = sum(node.devices for node in nodes)
    has = f"the cluster has {_listed([node.devices for node in nodes])}"
    if plan.devices > devices:
        return f"the run needs {plan.devices} devices ({wanted}) and {has}: {plan.devices - devices} short"
    needed, cpus = plan.devices * plan.request.cpus_per_device, sum(node.cpus for node in nodes)
    if needed > cpus:
        return (
            f"the run needs {needed} CPUs, {plan.request.cpus_per_device} for each device ({wanted}), and the cluster "
            f"has {cpus}: {needed - cpus} short"
        )
    largest = max((pool for pool in plan.pools), key=lambda pool: len(pool.blocks[0]))
    return (
        f"the run needs {plan.devices} devices, {len(largest.blocks[0])} of them ({largest.name}) on one node, and "
        f"{has}, which cannot be divided like that"
    )


def _listed(devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return str(devices[0])
    return f"{sum(devices)} ({' + '.join(map(str, devices))})"


def _remedies(request: PlacementRequest, nodes: Sequence[Node], *, at_most: int = 2) -> Iterator[str]:
    """Flags that make a request fit: at most one set of each kind, the mildest kind first.

    The kinds are: share devices, use fewer engines, use more nodes with fewer devices each, use fewer devices. The
    last three are also tried together with sharing. A candidate is a whole request that goes through `plan` and
    `_assign` like the user's own, so that the advice is never wrong: the flags it names do fit this cluster.
    """
    sharing = list(_ways_to_share(request))
    bases = [("", request), *sharing]
    kinds = (
        sharing,
        (way for base in bases for way in _fewer_engines(*base)),
        (way for base in bases for way in _spread_out(*base, nodes)),
        _smaller(bases),
    )
    given: list[str] = []
    for kind in kinds:
        # Flags that begin with a set that was already given are that set and something unnecessary.
        others = (flags for flags, other in kind if not flags.startswith(tuple(given)) and _fits(other, nodes))
        if len(given) < at_most and (flags := next(others, None)) is not None:
            given.append(flags)
            yield flags


def _fits(request: PlacementRequest, nodes: Sequence[Node]) -> bool:
    try:
        return _assign(plan(request), nodes) is not None
    except ConfigError:
        return False


Way = tuple[str, PlacementRequest]
"""Flags to add, and the request that the run would make with them."""


def _ways_to_share(request: PlacementRequest) -> Iterator[Way]:
    pairs = ("colocate_actor_ref",), ("colocate_critic_reward",), ("colocate_actor_ref", "colocate_critic_reward")
    if not request.colocate_all:
        for names in pairs:
            if not any(getattr(request, name) for name in names):
                change: dict[str, Any] = dict.fromkeys(names, True)
                yield " ".join(f"--train.{name}" for name in names), dataclasses.replace(request, **change)
        yield _filled("--train.colocate_all", dataclasses.replace(request, colocate_all=True))
    if request.asynchronous and not request.async_share_device and request.groups[Role.ACTOR].total == 1:
        yield _filled("--train.async_share_device", dataclasses.replace(request, async_share_device=True))


def _filled(flags: str, request: PlacementRequest) -> Way:
    """The same request with as many engines as fill the actor's devices, where engines share them."""
    if not request.engines or not request.engines_share:
        return flags, request
    engines = max(1, request.groups[Role.ACTOR].total // request.parts)
    words = flags.split() + ([f"--vllm.num_engines {engines}"] if engines != request.engines else [])
    return " ".join(words), dataclasses.replace(request, engines=engines)


def _fewer_engines(flags: str, request: PlacementRequest) -> Iterator[Way]:
    if not request.engines_share:
        for engines in range(request.engines - 1, 0, -1):
            yield f"{flags} --vllm.num_engines {engines}".strip(), dataclasses.replace(request, engines=engines)


def _spread_out(flags: str, request: PlacementRequest, nodes: Sequence[Node]) -> Iterator[Way]:
    """The same workers on more nodes."""
    for per_node in sorted({node.devices for node in nodes}, reverse=True):
        groups, words = dict(request.groups), flags.split()
        for role, size in request.groups.items():
            if size.per_node > per_node > 0 and size.total % per_node == 0:
                groups[role] = Size(size.total // per_node, per_node)
                words += [f"--{role}.num_nodes {groups[role].nodes}", f"--{role}.num_gpus_per_node {per_node}"]
        if groups != request.groups:
            yield " ".join(words), dataclasses.replace(request, groups=groups)


def _smaller(bases: Sequence[Way]) -> Iterator[Way]:
    """Halve the largest number of workers per node until it is 1, in every group that has more, with fewer engines."""
    per_node = max(size.per_node for _, request in bases for size in request.groups.values()) // 2
    while per_node:
        for flags, request in bases:
            groups, words = dict(request.groups), flags.split()
            for role, size in request.groups.items():
                if size.per_node > per_node:
                    groups[role] = Size(size.nodes, per_node)
                    words.append(f"--{role}.num_gpus_per_node {per_node}")
            way = _filled(" ".join(words), dataclasses.replace(request, groups=groups))
            yield way
            yield from _fewer_engines(*way)
        per_node //= 2
