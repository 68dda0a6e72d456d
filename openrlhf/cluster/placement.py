"""Who sits on which device: a pure function from what a run asks for to a plan, and whether a cluster can hold it.

    configuration → `requested` → `PlacementRequest` → `plan` → `PlacementPlan` → `fit` → a node for every block

A plan is made of pools, whose members share devices. A pool is made of blocks that each stay on one node, a block of
bundles of one device each, and in a bundle sits one worker of every role that shares it. Nothing here knows Ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from openrlhf.config.commands import RLConfig
from openrlhf.config.errors import ConfigError


class Role(StrEnum):
    """Who needs devices, by the section of its flags."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "ref"
    REWARD = "reward"
    ENGINE = "vllm"


class Size(NamedTuple):
    """Workers of a group. None at all: as many as those it shares devices with."""

    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a run asks for: only the groups it needs, and who shares."""

    groups: Mapping[Role, Size]
    """Models that are trained or asked; the actor first."""
    engines: int = 0
    """vLLM engines; 0: none."""
    parts: int = 1
    """Devices of an engine."""
    size_in_flags: str = "--vllm.tensor_parallel_size 1"
    """How these are asked for."""
    colocate_all: bool = False
    colocate_actor_ref: bool = False
    colocate_critic_reward: bool = False
    asynchronous: bool = False
    """Generation goes on while training: then engines have devices of their own."""
    async_share_device: bool = False
    """… unless they are to share nevertheless."""
    cpus_per_device: int = 1
    """CPUs that come with a device; 0 where workers are counted and cores are shared."""

    @property
    def engines_share(self) -> bool:
        """Engines live on the actor's devices."""
        return self.async_share_device if self.asynchronous else self.colocate_all

    @property
    def sharing(self) -> list[list[Role]]:
        """Roles that share devices, set by set; whose devices they are comes first."""
        if self.colocate_all:
            sets = [[Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.REWARD]]
        else:
            pairs = (
                (Role.ACTOR, Role.REFERENCE, self.colocate_actor_ref),
                (Role.CRITIC, Role.REWARD, self.colocate_critic_reward),
            )
            sets = [roles for one, other, shared in pairs for roles in ([[one, other]] if shared else [[one], [other]])]
        needed = [[role for role in roles if role in self.groups] for roles in sets]
        needed = [roles for roles in needed if roles]
        if self.engines:
            if self.engines_share:
                needed[0].append(Role.ENGINE)
            else:
                needed.append([Role.ENGINE])
        return needed


class Seat(NamedTuple):
    """One worker, or one part of an engine, on a device."""

    role: Role
    rank: int
    """In its group; of an engine, which one."""
    share: float
    """Of the device, as Ray counts it. Memory is not divided by it."""
    part: int = 0
    """Of an engine: which of its devices."""


Bundle = tuple[Seat, ...]
"""One device, and who sits there."""
Block = tuple[Bundle, ...]
"""Devices of one node."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that the same roles share: one Ray placement group."""

    roles: tuple[Role, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return "+".join(self.roles)

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for block in self.blocks for bundle in block]


class Place(NamedTuple):
    """Where somebody sits in a plan."""

    pool: int
    bundle: int
    """In its pool, counted over its blocks."""
    seat: Seat


class ProcessGroupSpec(NamedTuple):
    """Roles that live in the same processes, one on each of their devices."""

    roles: tuple[Role, ...]
    places: list[Place]
    """By rank; a seat's share is that of all its roles."""

    @property
    def name(self) -> str:
        return "+".join(self.roles)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    request: PlacementRequest
    pools: tuple[Pool, ...]

    @property
    def devices(self) -> int:
        return sum(len(pool.bundles) for pool in self.pools)

    def places(self, role: Role) -> list[Place]:
        """Of a role's workers, by rank; of engines, by engine and part."""
        found = [
            Place(pool_index, bundle_index, seat)
            for pool_index, pool in enumerate(self.pools)
            for bundle_index, bundle in enumerate(pool.bundles)
            for seat in bundle
            if seat.role is role
        ]
        return sorted(found, key=lambda place: (place.seat.rank, place.seat.part))

    def crews(self) -> list[ProcessGroupSpec]:
        """The models' processes. Roles that share their devices, all of them, share processes too: one device context,
        and nothing to be sent from one to the other. Engines have their own."""
        found = []
        for pool in self.pools:
            sizes = {role: len(self.places(role)) for role in pool.roles if role is not Role.ENGINE}
            for size in dict.fromkeys(sizes.values()):
                roles = tuple(role for role, own in sizes.items() if own == size)
                share = round(sum(self.places(role)[0].seat.share for role in roles), 2)
                places = self.places(roles[0])
                found.append(ProcessGroupSpec(roles, [p._replace(seat=p.seat._replace(share=share)) for p in places]))
        return found

    def table(self) -> str:
        """For people: one line per role, pool by pool."""
        rows = [("devices", "role", "workers", "share")]
        for pool in self.pools:
            devices = f"{len(pool.blocks)} × {len(pool.blocks[0])}"
            for role in pool.roles:
                seats = [place.seat for place in self.places(role)]
                workers = str(len(seats))
                if role is Role.ENGINE and self.request.parts > 1:
                    workers = f"{self.request.engines} × {self.request.parts}"
                rows.append((devices, role, workers, f"{seats[0].share:g}"))
                devices = ""
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{self.devices} devices"])


def requested(
    config: RLConfig, *, devices_per_node: int, engines_by_default: bool, cpus_per_device: int = 1
) -> PlacementRequest:
    """What a configuration asks of a cluster whose nodes have `devices_per_node` (on CPU: 1, a worker).

    `engines_by_default`: with the number of engines unset there are as many as fill the actor's devices, else none.
    Raises ConfigError.
    """
    needed = {
        Role.ACTOR: True,
        Role.CRITIC: config.uses_critic,
        Role.REFERENCE: config.uses_reference and not config.reference_is_base,
        Role.REWARD: config.uses_reward_model,
    }
    train, sections = config.train, (config.actor, config.critic, config.ref, config.reward)
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
        cpus_per_device=cpus_per_device,
    )
    # Left to the machine, a guest is as large as its host.
    unset = {role for role, section in zip(needed, sections, strict=True) if section.num_gpus_per_node is None}
    guests = {role for roles in request.sharing for role in roles[1:]} & unset
    groups = {role: Size(0, 0) if role in guests else size for role, size in request.groups.items()}
    engines = config.vllm.num_engines
    if engines is None:
        engines = _engines_on(groups[Role.ACTOR].total, request) if engines_by_default else 0
    return dataclasses.replace(request, groups=groups, engines=engines)


def plan(request: PlacementRequest) -> PlacementPlan:
    """Give every worker its device. Raises ConfigError where sharing cannot work."""
    return PlacementPlan(request, tuple(_pool(request, roles) for roles in request.sharing))


def _pool(request: PlacementRequest, roles: Sequence[Role]) -> Pool:
    host = roles[0]
    share = 100 // len(roles) / 100
    parts = request.parts
    if host is Role.ENGINE:  # an engine stays on one node; two may go anywhere
        size = Size(request.engines, parts)
    else:
        size = request.groups[host]
    seats: list[list[Seat]] = [[] for _ in range(size.total)]
    for role in roles:
        if role is Role.ENGINE:
            if host is not Role.ENGINE:
                _check_engines_fit_the_actor(request, size)
            for device, bundle in enumerate(seats):
                bundle.append(Seat(role, device // parts, share, device % parts))
        else:
            for rank in range(_workers(request, role, host)):
                seats[rank].append(Seat(role, rank, share))
    bundles = [tuple(bundle) for bundle in seats]
    starts = range(0, size.total, size.per_node)
    return Pool(tuple(roles), tuple(tuple(bundles[start : start + size.per_node]) for start in starts))


def _workers(request: PlacementRequest, role: Role, host: Role) -> int:
    """Of a group on its host's devices: its own number if it has one, on the first devices."""
    available, wanted = request.groups[host].total, request.groups[role].total
    if wanted > available or (0 < wanted < available and not request.colocate_all):
        flag = "--train.colocate_all" if request.colocate_all else f"--train.colocate_{host}_{role}"
        few = " or less" if request.colocate_all else ""
        raise ConfigError(
            f"{flag} puts the {role} model on the {host}'s {available} devices, but --{role}.num_nodes × "
            f"--{role}.num_gpus_per_node is {wanted}: make it {available}{few}"
        )
    return wanted or available


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
    """What a machine of the cluster has to give."""

    devices: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A node for every block of a plan, or what is short."""

    nodes: tuple[tuple[int, ...], ...] = ()
    """[pool][block] → index of the node; empty if the plan does not fit."""
    problem: str = ""
    """One line; empty if the plan fits."""


def fit(plan: PlacementPlan, nodes: Sequence[Node]) -> Fit:
    """Where the blocks of a plan go, or what is short and which flags would make it fit."""
    found = _assign(plan, nodes)
    if found is not None:
        return Fit(nodes=found)
    flags = list(_remedies(plan.request, nodes))
    advice = f"it fits with {', or with '.join(flags)}" if flags else "no flags make it fit: give it a larger cluster"
    return Fit(problem=f"{_shortage(plan, nodes)}; {advice}")


def _assign(plan: PlacementPlan, nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...] | None:
    """Best fit, largest block first: exact where each size divides the next larger one, as those of machines do.

    A block goes to the node with the least room that holds it, so that neighbours stay together and whole nodes free.
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
    """Flags that make a request fit, one set of each kind, the mildest first."""
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
        # More flags than some that suffice are no second way.
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
"""Flags to add, and what the run would ask for with them."""


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
    """With as many engines as the devices they share hold."""
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
    """Half of the workers per node in every group that has more, again and again, and engines to match."""
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
