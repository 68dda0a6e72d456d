"""The smallest change of flags that makes a run fit.

Flags are axes with steps, each of which has a price: what the change costs a user. Steps that change nothing but where
memory lies are cheap, and steps that compute something twice cost more. Steps that change what is trained (an adapter)
are looked at where nothing else helps. Single steps and pairs are tried in the order of their price. Where none fits,
the step that removes most of what is too much for its price is taken, until the run fits, and then everything is taken
back that was not needed. So whatever is returned fits by the plan, and none of its changes can be left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from openrlhf.config.commands import DPOConfig, RLConfig, SupervisedConfig, TrainerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.planning.command import Command, grouped
from openrlhf.planning.hardware import Machines
from openrlhf.planning.plan import Expected, ModelReader, Plan, plan_rl, plan_supervised, settled

RANKS = "processes"
"""The axis that is no flag: how many processes a launcher starts."""
ADAPTER = "adapter"
"""The axis that changes what is trained: it is looked at where nothing else helps."""
LEAST_TOKENS = 2048
"""Micro-batches are not cut further than this, or than one sequence."""
MOST_STEPS = 12
TIGHT_PRICE = 0.8


class Step(NamedTuple):
    axis: str
    price: float
    changes: Mapping[str, Any]
    why: str


@dataclass(frozen=True, slots=True)
class Fitted:
    """A command that fits, and the steps that lead to it; none: it fitted as it was."""

    command: Command
    plan: Plan
    steps: tuple[Step, ...]


PlanOf = Callable[[Command], Plan]


def planner(machines: Machines, expected: Expected, reader: ModelReader) -> PlanOf:
    def plan_of(command: Command) -> Plan:
        """Raises ConfigError and ModelLoadError."""
        config = command.config()
        if isinstance(config, RLConfig):
            return plan_rl(config, machines, expected, reader=reader)
        return plan_supervised(config, machines, expected, ranks=command.ranks, reader=reader)

    return plan_of


def fitted(command: Command, machines: Machines, plan_of: PlanOf) -> Fitted | None:
    """None where nothing that is known here makes it fit. Raises ConfigError for a command that cannot be parsed."""
    first = plan_of(command)
    if first.fits:
        return Fitted(command, first, ())
    steps = list(steps_for(command, machines))
    search = _Search(command, machines, plan_of)
    same_training = [step for step in steps if step.axis != ADAPTER]
    return search.best(same_training) or search.best(steps)


class _Search:
    def __init__(self, command: Command, machines: Machines, plan_of: PlanOf) -> None:
        self._command, self._machines, self._plan_of = command, machines, plan_of
        self._seen: dict[frozenset[tuple[str, str]], tuple[Command, Plan] | None] = {}

    def tried(self, steps: Sequence[Step]) -> tuple[Command, Plan] | None:
        """None where the flags contradict each other."""
        changes: dict[str, Any] = {}
        for step in steps:
            changes |= step.changes
        key = frozenset((path, str(value)) for path, value in changes.items())
        if key not in self._seen:
            try:
                command = self._command
                if (ranks := changes.pop(RANKS, None)) is not None:
                    command = command.on_ranks(ranks, per_node=self._machines.per_node)
                command = command.changed(changes)
                self._seen[key] = (command, self._plan_of(command))
            except ConfigError:
                self._seen[key] = None
        return self._seen[key]

    def best(self, steps: Sequence[Step]) -> Fitted | None:
        pairs = [pair for pair in itertools.combinations(steps, 2) if pair[0].axis != pair[1].axis]
        return self.cheapest([*((step,) for step in steps), *pairs]) or self.greedy(steps)

    def cheapest(self, candidates: Sequence[tuple[Step, ...]]) -> Fitted | None:
        """Of the lowest price, with `TIGHT_PRICE` added where hardly any memory is left; of those the fastest."""
        best: tuple[float, float] | None = None
        found: Fitted | None = None
        for steps in sorted(candidates, key=_price):
            if best is not None and _price(steps) > best[0]:
                break
            tried = self.tried(steps)
            if tried is None or not tried[1].fits:
                continue
            tight = any(pool.tight for pool in tried[1].pools)
            score = round(_price(steps) + TIGHT_PRICE * tight, 6), tried[1].step_seconds
            if best is None or score < best:
                best, found = score, Fitted(*tried, steps)
        return found

    def greedy(self, steps: Sequence[Step]) -> Fitted | None:
        taken: tuple[Step, ...] = ()
        excess = overflow(self._plan_of(self._command))
        for _ in range(MOST_STEPS):
            best: tuple[float, tuple[Step, ...], float] | None = None
            for step in steps:
                candidate = (*(one for one in taken if one.axis != step.axis), step)
                tried = self.tried(candidate)
                if tried is None or candidate == taken:
                    continue
                left = overflow(tried[1])
                gain = (excess - left) / step.price
                if left < excess and (best is None or gain > best[0]):
                    best = gain, candidate, left
            if best is None:
                return None
            _, taken, excess = best
            if not excess:
                return self._without_needless(taken)
        return None

    def _without_needless(self, taken: tuple[Step, ...]) -> Fitted | None:
        for step in sorted(taken, key=lambda one: -one.price):
            fewer = tuple(one for one in taken if one is not step)
            tried = self.tried(fewer)
            if tried is not None and tried[1].fits:
                taken = fewer
        tried = self.tried(taken)
        return None if tried is None else Fitted(*tried, taken)


def _price(steps: Sequence[Step]) -> float:
    return sum(step.price for step in steps)


def overflow(plan: Plan) -> float:
    """Bytes that are too much, over all pools; other problems count as a terabyte each."""
    found = sum(max(0.0, pool.peak.total - pool.limit) for pool in plan.pools)
    others = sum(problem.kind != "memory" for problem in plan.problems)
    unseen = len(plan.problems) - others - sum(not pool.fits for pool in plan.pools)
    return found + others * 1e12 + max(0, unseen) * 1e9


# ---------------------------------------------------------------------------------------------------------- the axes


def steps_for(command: Command, machines: Machines) -> Iterator[Step]:
    """All single changes that could help, whether or not they do. Raises ConfigError."""
    config = command.config()
    if isinstance(config, RLConfig):
        yield from _rl_steps(config, command, machines)
    else:
        yield from _supervised_steps(config, command, machines)


def _given(command: Command, path: str) -> bool:
    words = {group[0].partition("=")[0].removeprefix("--") for group in grouped(command.flags)}
    return path in words


def _sizes(most: int) -> list[int]:
    return [size for size in (2, 4, 8, 16) if size <= most]


def _rl_steps(given: RLConfig, command: Command, machines: Machines) -> Iterator[Step]:
    config = settled(given, machines)
    on_gpus, ray = not machines.device.is_cpu, config.train.launcher == "ray"
    many = machines.devices > 1 and on_gpus
    yield from _stream_steps(config)
    if not config.actor.gradient_checkpointing_enable:
        yield _checkpointing("actor")
    if on_gpus and config.engines_share_devices and not config.train.async_enable:
        if config.vllm.enable_sleep is False:
            yield Step("sleep", 0.5, {"vllm.enable_sleep": True}, "engines give their memory away while models train")
        if not config.ds.enable_sleep and not config.ds.lora.rank:
            why = "masters and moments wait in CPU memory while engines sample"
            yield Step("parking", 0.7, {"ds.enable_sleep": True}, why)
    if _given(command, "vllm.gpu_memory_utilization"):
        yield Step("share", 0.6, {"vllm.gpu_memory_utilization": None}, "the run divides the memory itself")
    if many and ray and config.ds.zero_stage < 3:
        yield Step("zero", 1.0, {"ds.zero_stage": 3}, "weights are shared out over all ranks")
    if config.uses_reference and not config.reference_is_base and not config.ref.offload:
        yield Step("reference", 1.5, {"ref.offload": True}, "the reference waits in CPU memory")
    if config.teacher_path is not None and not config.teacher.offload:
        yield Step("teacher", 1.5, {"teacher.offload": True}, "the teacher waits in CPU memory")
    if config.uses_reward_model and not config.reward.offload:
        yield Step("reward", 1.5, {"reward.offload": True}, "the reward model waits in CPU memory")
    if many:
        yield from _device_steps(config, command, machines)
        ranks = _actor_devices(config, machines)
        if config.vllm.num_engines != 0:
            for size in _sizes(machines.per_node):
                if size > config.vllm.tensor_parallel_size:
                    yield Step(
                        "engine", 0.8 + 0.3 * math.log2(size), _engine_size(config, command, size, ranks),
                        f"{size} devices share an engine",
                    )  # fmt: skip
        if ray:
            yield from _sharing_steps(config.ds.ring_attn_size, config.ds.tensor_parallel_size, most=machines.per_node)
    if on_gpus and not (config.ds.adam_offload and ray):
        changes: dict[str, Any] = {"ds.adam_offload": True}
        changes |= {} if ray else {"train.launcher": "ray", "train.colocate_all": True}
        yield Step("offload", 3.0, changes, "masters and moments are in CPU memory, and step there")
    yield from _adapter_steps(config)


def _engine_size(config: RLConfig, command: Command, size: int, ranks: int) -> dict[str, Any]:
    """Where engines were counted, as many as have the same devices."""
    changes: dict[str, Any] = {"vllm.tensor_parallel_size": size}
    engines = config.vllm.num_engines
    if _given(command, "vllm.num_engines") and engines:
        total = ranks if config.engines_share_devices else engines * config.vllm.devices_per_engine
        changes["vllm.num_engines"] = max(1, total // size)
    if config.train.launcher == "local":
        changes |= {"train.launcher": "ray"}
    return changes


def _actor_devices(config: RLConfig, machines: Machines) -> int:
    return config.actor.num_nodes * (config.actor.num_gpus_per_node or machines.per_node)


def _device_steps(config: RLConfig, command: Command, machines: Machines) -> Iterator[Step]:
    """More of the devices that are there, shared by all models and engines."""
    has = _actor_devices(config, machines) if config.train.launcher == "ray" else 1
    sizes = [(1, count) for count in (2, 4, 8) if count <= machines.per_node]
    sizes += [(nodes, machines.per_node) for nodes in (2, 4, 8, 16, 32, 64) if nodes <= machines.nodes]
    for place, (nodes, per_node) in enumerate(sizes):
        if nodes * per_node <= has and config.train.colocate_all:
            continue
        changes: dict[str, Any] = {
            "train.launcher": "ray",
            "train.colocate_all": True,
            "actor.num_nodes": nodes,
            "actor.num_gpus_per_node": per_node,
        }
        for role in ("ref", "teacher", "critic", "reward"):
            for field in ("num_nodes", "num_gpus_per_node"):
                if _given(command, f"{role}.{field}"):
                    changes[f"{role}.{field}"] = None
        if _given(command, "vllm.num_engines") and config.vllm.num_engines:
            changes["vllm.num_engines"] = max(1, nodes * per_node // config.vllm.devices_per_engine)
        yield Step("devices", 1.0 + 0.1 * place, changes, f"all models and engines share {nodes * per_node} GPUs")


def _stream_steps(config: RLConfig) -> Iterator[Step]:
    train, longest = config.train, config.data.max_len
    if train.dynamic_batch_enable:
        tokens, price = train.max_tokens_per_gpu, 0.5
        least = max(LEAST_TOKENS, -(-longest // config.ds.ranks_per_share))
        while tokens // 2 >= least:
            tokens, price = tokens // 2, price + 0.2
            yield Step("stream", price, {"train.max_tokens_per_gpu": tokens}, "smaller micro-batches of the update")
        if train.max_tokens_per_gpu > least and tokens > least and longest >= LEAST_TOKENS:
            yield Step("stream", price + 0.2, {"train.max_tokens_per_gpu": least}, "micro-batches of one sequence")
    else:
        yield from _smaller_samples(train.micro_batch_size)


def _smaller_samples(size: int) -> Iterator[Step]:
    price = 0.5
    while size > 1:
        size, price = size // 2, price + 0.2
        yield Step("stream", price, {"train.micro_batch_size": size}, "smaller micro-batches of the update")


def _checkpointing(section: str) -> Step:
    why = "activations are computed again in the backward pass"
    return Step("checkpointing", 1.2, {f"{section}.gradient_checkpointing_enable": True}, why)


def _sharing_steps(context: int, tensor: int, *, most: int) -> Iterator[Step]:
    for size in _sizes(most):
        if size > context:
            why = f"{size} ranks share a sequence"
            yield Step("context", 1.5 + 0.5 * math.log2(size), {"ds.ring_attn_size": size}, why)
        if size > tensor:
            why = f"{size} ranks share a layer"
            yield Step("tensor", 2.0 + 0.5 * math.log2(size), {"ds.tensor_parallel_size": size}, why)


def _adapter_steps(config: TrainerConfig) -> Iterator[Step]:
    if not config.ds.lora.rank:
        changes: dict[str, Any] = {"ds.lora.rank": 16, "ds.lora.alpha": 32}
        yield Step(ADAPTER, 6.0, changes, "an adapter is trained instead of all weights")
        if config.ds.tensor_parallel_size == 1:
            yield Step(
                ADAPTER, 8.0, {**changes, "ds.load_in_4bit": True}, "an adapter is trained beside weights of 4 bits"
            )
    elif not config.ds.load_in_4bit and config.ds.tensor_parallel_size == 1:
        yield Step("four bits", 2.0, {"ds.load_in_4bit": True}, "frozen weights have 4 bits")


def _supervised_steps(config: SupervisedConfig, command: Command, machines: Machines) -> Iterator[Step]:
    on_gpus = not machines.device.is_cpu
    yield from _smaller_samples(config.train.micro_batch_size)
    if not config.model.gradient_checkpointing_enable:
        yield _checkpointing("model")
    if isinstance(config, DPOConfig) and not config.reference_is_base and not config.ref.offload:
        yield Step("reference", 1.5, {"ref.offload": True}, "the reference waits in CPU memory")
    if on_gpus and machines.devices > 1:
        sizes = [count for count in (2, 4, 8) if count <= machines.per_node]
        sizes += [machines.per_node * nodes for nodes in (2, 4, 8, 16, 32, 64) if nodes <= machines.nodes]
        for place, count in enumerate(sizes):
            if count > command.ranks:
                yield Step("devices", 1.0 + 0.1 * place, {RANKS: count}, f"{count} processes, one on each GPU")
        if config.ds.zero_stage < 3:
            yield Step("zero", 1.0, {"ds.zero_stage": 3}, "weights are shared out over all ranks")
        yield from _sharing_steps(config.ds.ring_attn_size, config.ds.tensor_parallel_size, most=machines.per_node)
    if on_gpus and not config.ds.adam_offload:
        yield Step("offload", 3.0, {"ds.adam_offload": True}, "masters and moments are in CPU memory, and step there")
    yield from _adapter_steps(config)
