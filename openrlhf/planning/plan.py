"""The plan of a run: which device holds what in which phase, how long each phase takes, and what does not fit.

    configuration, machines → `plan_rl` or `plan_supervised` → `Plan`

Memory follows from the formulas of `runs.device_memory`, part by part and without a margin; placement from
`cluster.placement`; whether engines sleep from the division that the run itself makes; seconds from `planning.times`.
Nothing is loaded: models are shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from openrlhf.cluster.placement import Node, PlacementPlan, Role, fit, plan, requested
from openrlhf.config.commands import ROOTS, DPOConfig, RLConfig, RMConfig, SupervisedConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.models.attention_kernels import worth_keeping
from openrlhf.models.loading import LoadSettings
from openrlhf.planning.hardware import GIB, Device, Machines
from openrlhf.planning.models import PlannedModel, read_model
from openrlhf.planning.times import (
    Batch,
    EngineGroup,
    Ranks,
    Seconds,
    constant,
    generation_seconds,
    push_seconds,
    scoring_seconds,
    training_seconds,
)
from openrlhf.rollout.embedded.kv_store import MIN_CAPACITY
from openrlhf.runs.device_memory import (
    BUCKETS,
    MOST,
    TILES,
    DeviceMemory,
    DoesNotFitError,
    EngineNeed,
    Layout,
    TrainedModel,
    TrainingNeed,
    activation_bytes,
    capped,
    divide,
    gradient_bytes,
    leaves_too_little,
    optimizer_bytes,
    training_need,
    weight_bytes,
)
from openrlhf.runs.engine_memory import engine_of
from openrlhf.runs.launchers import needs_ray

CONTEXT = 1 * GIB
"""Of each process on a GPU: CUDA's context and kernels' own memory, beside what torch allocates."""
OWN = 180 * 2**20
"""Of a process on a CPU, beside its tensors: libraries that are imported late, tokenizers, records."""
FRAGMENTS = 0.05
"""Of what is allocated: memory between tensors that nothing fits into."""
TIGHT = 0.92
"""The share of a device above which a plan is called tight."""
CACHE = "keys and values"
EMBEDDED_PLACES = 256
"""Sequences that the embedded engine decodes at once."""
TILES_ON_A_CPU = 2 * (8 << 20)
"""Logits in fp32: two tiles of `models/logprobs.py`."""
PUSH_BLOCK = 1 * GIB
"""Weights on their way to an engine, in blocks."""


class Part(NamedTuple):
    """What takes memory on a device."""

    name: str
    bytes: float
    why: str


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """One device in one phase."""

    phase: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Devices that hold the same."""

    name: str
    """The roles that share them."""
    devices: int
    phases: tuple[PhaseMemory, ...]
    limit: int
    """Bytes that a device has for the run."""
    note: str = ""

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.limit

    @property
    def tight(self) -> bool:
        """Keys and values do not count: they take what the others leave."""
        firm = (sum(part.bytes for part in phase.parts if part.name != CACHE) for phase in self.phases)
        return self.fits and max(firm) > TIGHT * self.limit


class PhaseTime(NamedTuple):
    name: str
    seconds: Seconds
    overlaps: bool = False
    """It goes on beside the other phases (async)."""


class Problem(NamedTuple):
    """Why a run cannot be as it is asked for."""

    kind: str
    """memory, devices, or settings."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    command: str
    machines: Machines
    launcher: str
    models: Mapping[str, PlannedModel]
    pools: tuple[PoolPlan, ...] = ()
    times: tuple[PhaseTime, ...] = ()
    placement: str = ""
    """As a table; empty: one process, or as many as a launcher started."""
    tokens_per_step: float = 0.0
    """Prompts and responses of all samples."""
    samples_per_step: int = 0
    steps: int | None = None
    """Of the run; None: the data is not known."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def step_seconds(self) -> float:
        """A phase that overlaps costs what it takes longer than the others together."""
        beside = sum(time.seconds.total for time in self.times if time.overlaps)
        others = sum(time.seconds.total for time in self.times if not time.overlaps)
        return max(beside, others)

    @property
    def hours(self) -> float | None:
        return None if self.steps is None else self.steps * self.step_seconds / 3600

    @property
    def bottleneck(self) -> str:
        return max(self.times, key=lambda time: time.seconds.total).name if self.times else ""

    @property
    def peak_bytes(self) -> float:
        return max((pool.peak.total for pool in self.pools), default=0.0)


class Expected(NamedTuple):
    """What is known of the data, or assumed."""

    prompt_tokens: float | None = None
    """On average."""
    response_tokens: float | None = None
    records: int | None = None
    """Prompts, or samples of a supervised run."""
    longest: int | None = None
    """Tokens of the longest sample of a supervised run, after it was cut."""


NOTHING_KNOWN = Expected()
ReadModel = Callable[..., PlannedModel]


class ModelReader:
    """Reads each model once, however many plans ask for it."""

    def __init__(self, read: ReadModel = read_model) -> None:
        self._read = read
        self._found: dict[Any, PlannedModel] = {}

    def __call__(
        self, config: RLConfig | SupervisedConfig, path: str, flag: str, device: Device, *, trains: bool
    ) -> PlannedModel:
        section = config.actor if isinstance(config, RLConfig) else config.model
        settings = LoadSettings(
            device=torch.device("cpu" if device.is_cpu else "cuda"),
            ds=config.ds,
            model=section,
            trains=trains,
            flag=flag,
            images=config.data.max_images_per_prompt > 0,
        )
        lora, four = config.ds.lora if trains else None, config.ds.load_in_4bit
        key = (path, device.is_cpu, settings.dtype, lora, four, trains, settings.images)
        if key not in self._found:
            tower = settings.images and not getattr(section, "freeze_visual_encoder", False)
            self._found[key] = self._read(path, settings, four_bit=four, with_tower=tower)
        return self._found[key]


# ---------------------------------------------------------------------------------------------- training, part by part


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The largest micro-batch of a rank's group."""

    tokens: float
    """That are computed, with prompts shared."""
    longest: int
    repeated: float = 0.0
    """Keys and values that attention copies for each of `tokens`, because samples share the prompt before them."""


def weights_part(name: str, model: PlannedModel, layout: Layout) -> Part:
    shape = model.shape
    size = shape.element_bytes * shape.stored
    divided = layout.ranks if layout.zero == 3 else layout.tensor
    why = f"{size:g} B × {_count(shape.parameters)}" + (f" / {divided}" if divided > 1 else "")
    return Part(f"{name} weights", weight_bytes(shape, layout), why)


def state_part(model: PlannedModel, layout: Layout, *, averaged: bool = False) -> Part:
    shape, each = model.shape, 12 if model.shape.element_bytes < 4 else 8
    divided = layout.ranks if layout.zero >= 1 else layout.tensor
    found = optimizer_bytes(shape, layout)
    extra = " + 4 B of an average" if averaged else ""
    why = f"{each} B × {_count(shape.trained)}" + (f" / {divided}" if divided > 1 else "") + extra
    return Part("optimizer", found + (4 * shape.trained / divided if averaged else 0), why)


def gradient_part(model: PlannedModel, layout: Layout, *, sum_bytes: int = 4) -> Part:
    divided = layout.ranks if layout.zero >= 2 else layout.tensor
    found = gradient_bytes(model.shape, layout) * sum_bytes / 4
    why = f"{sum_bytes} B × {_count(model.shape.trained)}" + (f" / {divided}" if divided > 1 else "")
    return Part("gradients", found, why)


def activation_part(model: PlannedModel, layout: Layout, stream: Stream, device: Device, *, compiled: bool) -> Part:
    """Of the update: the larger of a full stream and the longest sequence by itself; with what attention keeps under
    gradient checkpointing."""
    tokens = max(stream.tokens, 1.0)
    if device.is_cpu:
        found = max(tokens, stream.longest) * eager_token_bytes(model, layout, repeated=stream.repeated)
    else:
        of_stream = activation_bytes(model.shape, layout, tokens=math.ceil(tokens), sequence=0)
        alone = activation_bytes(model.shape, layout, tokens=stream.longest, sequence=stream.longest)
        found = max(of_stream, alone)
    kept = kept_outputs(model, layout, max(tokens, stream.longest), device)
    if compiled and not layout.checkpointing:
        found *= 2 / 3
    per_token = found / max(tokens, stream.longest) * layout.context
    how = " with checkpointing" if layout.checkpointing else ""
    why = f"{_count(max(tokens, stream.longest) / layout.context)} tokens × {per_token / 1024:,.0f} KiB{how}"
    return Part("activations", found + kept, why + (f" + {kept / GIB:.1f} GiB of attention" if kept else ""))


def eager_token_bytes(model: PlannedModel, layout: Layout, *, repeated: float) -> float:
    """Activations of one token on a CPU, where nothing is fused: 7.3 vectors of the hidden size (inputs and results of
    norms, inputs of matrices), queries and attention's result, keys and values with their copies, 4 of the intermediate
    size; and the gradients of the layer at work. Counted by hooks on saved tensors (docs/doctor.md)."""
    shape, wide = model.shape, model.attention_width
    narrow = shape.cache_numbers / shape.layers
    layer = 7.3 * shape.hidden + 2 * wide + narrow * (1 + repeated) + 4 * shape.intermediate
    gradients = 5 * shape.hidden + 2 * shape.intermediate
    layers = shape.hidden * shape.layers + layer if layout.checkpointing else layer * shape.layers
    return shape.element_bytes * (layers + gradients) / layout.context


def kept_outputs(model: PlannedModel, layout: Layout, tokens: float, device: Device) -> float:
    """Attention's outputs of all layers, which checkpointing does not compute twice while they are few."""
    shape, here = model.shape, math.ceil(tokens / layout.context)
    if not layout.checkpointing or not worth_keeping(
        tokens=here,
        heads=model.heads // layout.tensor or 1,
        head_dim=model.attention_width // model.heads,
        layers=shape.layers,
        element_bytes=shape.element_bytes,
        memory=device.memory,
    ):
        return 0.0
    each = model.attention_width * shape.element_bytes + 4 * model.heads
    return shape.layers * here * each / layout.tensor


def forward_part(model: PlannedModel, layout: Layout, stream: Stream) -> Part:
    """Of scoring: one layer at work, twice its inputs and outputs."""
    tokens = max(stream.tokens, stream.longest) / layout.context
    shape = model.shape
    found = tokens * shape.element_bytes * (6 * shape.hidden + 3 * shape.intermediate / layout.tensor)
    return Part("activations", found, f"{_count(tokens)} tokens of one layer")


def logits_part(device: Device, model: PlannedModel | None = None) -> Part:
    """Tiles; and of a model whose head is trained, the gradients of head and embeddings before they are added up."""
    size = float(TILES_ON_A_CPU if device.is_cpu else TILES)
    why = f"two tiles of {size / 2 / 2**20:.0f} MiB"
    if model is not None and model.shape.trained and not model.is_adapter:
        each = model.shape.element_bytes
        size += 2 * each * model.head
        why += f", and 2 × {each} B × {_count(model.head)} of gradients of head and embeddings"
    return Part("logits", size, why)


def buffer_part(layout: Layout) -> Part:
    return Part("buffers", BUCKETS[layout.zero], f"of DeepSpeed, ZeRO-{layout.zero}")


def with_overhead(parts: Sequence[Part], device: Device, *, processes: int = 1) -> tuple[Part, ...]:
    """Parts of nothing are left out; a GPU loses some between tensors, and has a context for each process."""
    kept = [part for part in parts if part.bytes >= 1]
    if device.is_cpu:
        lost = FRAGMENTS * sum(part.bytes for part in kept if part.name in ("activations", "gradients"))
        return (*kept, Part("context", OWN + lost, "the process itself, and 5 % in gaps"))
    lost = FRAGMENTS * sum(part.bytes for part in kept if part.name in ("activations", "gradients"))
    context = CONTEXT * processes + lost
    return (*kept, Part("context", context, f"{processes} process{'es' if processes > 1 else ''}, and 5 % in gaps"))


# ----------------------------------------------------------------------------------------------------------- RL


def settled(config: RLConfig, machines: Machines) -> RLConfig:
    """With the launcher and the engines that the run would have on these machines."""
    ray = needs_ray(config, {}, devices=0 if machines.device.is_cpu else machines.per_node)
    if config.train.launcher == "auto" and machines.nodes > 1:
        ray = True
    launcher: Literal["local", "ray"] = "ray" if ray else "local"
    engines = config.vllm.num_engines
    if engines is None and not ray:
        engines = int(not machines.device.is_cpu)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, launcher=launcher),
        vllm=dataclasses.replace(config.vllm, num_engines=engines),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The workers of one model."""

    role: Role
    model: PlannedModel
    layout: Layout
    trained: bool
    offloaded: bool = False
    """Its weights are in CPU memory between forwards."""


class _RLPlanner:
    """The parts of a plan that one configuration and machines have in common."""

    def __init__(self, config: RLConfig, machines: Machines, expected: Expected, reader: ModelReader) -> None:
        self.config = config = settled(config, machines)
        self.machines, self.device, self.reader = machines, machines.device, reader
        self.expected = expected
        self.local = config.train.launcher == "local"
        self.policy = self._model(required(config.actor.model_name_or_path), "--actor.model_name_or_path", trains=True)
        self.placement = None if self.local else self._placed()
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.limit = device_limit(machines)
        self.embedded = config.vllm.num_engines == 0
        self.response = expected.response_tokens or self._assumed_response()
        room = max(1.0, config.data.max_len - self.response)
        self.prompt = min(expected.prompt_tokens or room, room)

    def _model(self, path: str, flag: str, *, trains: bool) -> PlannedModel:
        return self.reader(self.config, path, flag, self.device, trains=trains)

    def _assumed_response(self) -> float:
        """All that a response may have: what a run takes at most."""
        limit = self.config.response_limit
        known = self.expected.prompt_tokens or (0 if limit < self.config.data.max_len else 1)
        return max(1.0, min(limit, self.config.data.max_len - known))

    def _placed(self) -> PlacementPlan:
        per_node = 1 if self.device.is_cpu else self.machines.per_node
        request = requested(
            self.config, devices_per_node=per_node, engines_by_default=not self.device.is_cpu, cpus_per_device=1
        )
        return plan(request)

    # ------------------------------------------------------------------------------------------------ who is where

    def layout(self, ranks: int, *, checkpointing: bool = False) -> Layout:
        ds = self.config.ds
        plain = self.local or (ranks == 1 and not ds.adam_offload)
        return Layout(
            ranks=ranks,
            zero=0 if plain else max(1, ds.zero_stage),
            context=ds.ring_attn_size,
            tensor=ds.tensor_parallel_size,
            checkpointing=checkpointing,
        )

    def count(self, role: Role) -> int:
        return 1 if self.placement is None else len(self.placement.placements(role))

    def groups(self) -> Iterator[_Group]:
        config = self.config
        checkpointing = config.actor.gradient_checkpointing_enable
        yield _Group(
            role=Role.ACTOR,
            model=self.policy,
            layout=self.layout(self.count(Role.ACTOR), checkpointing=checkpointing),
            trained=True,
        )
        if config.critic_path is not None:
            model = self._model(config.critic_path, "--critic.model_name_or_path", trains=True)
            layout = self.layout(self.count(Role.CRITIC), checkpointing=checkpointing)
            yield _Group(role=Role.CRITIC, model=model, layout=layout, trained=True)
        if config.uses_reference and not config.reference_is_base:
            model = self._model(required(config.actor.model_name_or_path), "--actor.model_name_or_path", trains=False)
            layout = self.layout(self.count(Role.REFERENCE))
            yield _Group(role=Role.REFERENCE, model=model, layout=layout, trained=False, offloaded=config.ref.offload)
        if config.teacher_path is not None:
            model = self._model(config.teacher_path, config.teacher_flag, trains=False)
            layout, off = self.layout(self.count(Role.TEACHER)), config.teacher.offload
            yield _Group(role=Role.TEACHER, model=model, layout=layout, trained=False, offloaded=off)
        if config.uses_reward_model:
            for path in config.reward.model_paths:
                model = self._model(path, "--reward.model_name_or_path", trains=False)
                layout = self.layout(self.count(Role.REWARD))
                off = config.reward.offload
                yield _Group(role=Role.REWARD, model=model, layout=layout, trained=False, offloaded=off)

    @property
    def engines(self) -> int:
        if self.placement is None:
            return 1
        return max(1, self.placement.request.engines)

    # -------------------------------------------------------------------------------------------------- how much

    def sharing(self, per_forward: float) -> float:
        """Samples of a prompt that a micro-batch has side by side."""
        return max(1.0, min(self.config.samples_per_prompt, per_forward))

    def stream(self, *, scoring: bool = False) -> Stream:
        config, share = self.config, self.config.ds.ranks_per_share
        length = self.prompt + self.response
        if config.train.dynamic_batch_enable:
            budget = config.scoring_tokens_per_gpu if scoring else config.train.max_tokens_per_gpu
            given = max(min(budget * share, config.samples_per_round * length), length)
            fitting = max(1.0, given // length)
            # Where all are known to have this length; samples of different lengths fill what these would leave.
            if self.expected.response_tokens is not None and length >= config.data.max_len:
                fitting = self._whole_prompts(fitting)
                given = fitting * length
        else:
            fitting = config.rollout.micro_batch_size if scoring else config.train.micro_batch_size
            given = fitting * length
        sharing = self.sharing(fitting)
        shared = given * (self.response + self.prompt / sharing) / length
        longest = math.ceil(length) if self.expected.response_tokens else config.data.max_len
        repeated = given / shared if sharing > 1 else 0.0
        return Stream(tokens=shared, longest=min(longest, config.data.max_len), repeated=repeated)

    def _whole_prompts(self, fitting: float) -> float:
        """Samples in a micro-batch that has room for `fitting`: those of a prompt stay together (`data.packing`), and
        micro-batches are filled evenly."""
        each = self.config.samples_per_prompt
        if fitting < each:
            return fitting
        prompts = self.config.samples_per_round // each
        micro_batches = math.ceil(prompts / (fitting // each))
        return float(each * math.ceil(prompts / micro_batches))

    def micro_batches(self, samples: float, ranks: int, *, scoring: bool = False) -> int:
        config, length = self.config, self.prompt + self.response
        groups = max(1, ranks // config.ds.ranks_per_share)
        each = samples / groups
        if config.train.dynamic_batch_enable:
            budget = config.scoring_tokens_per_gpu if scoring else config.train.max_tokens_per_gpu
            fitting = max(1.0, budget * config.ds.ranks_per_share // length)
        else:
            fitting = config.rollout.micro_batch_size if scoring else config.train.micro_batch_size
        return max(1, math.ceil(each / fitting))

    # -------------------------------------------------------------------------------------------------------- memory

    def pools(self) -> tuple[PoolPlan, ...]:
        groups = list(self.groups())
        if self.placement is None:
            engine = "" if self.embedded else " + vllm"
            roles = list(dict.fromkeys(group.role.value for group in groups))
            return (self._shared_pool(" + ".join(roles) + engine, 1, groups),)
        found = []
        for pool in self.placement.pools:
            here = [group for group in groups if group.role in pool.roles]
            count = len(pool.bundles)
            name = " + ".join(pool.roles)
            if Role.ENGINE in pool.roles and not here:
                found.append(self._engine_pool(name, count))
            elif Role.ENGINE in pool.roles:
                found.append(self._shared_pool(name, count, here))
            else:
                found.append(self._training_pool(name, count, here))
        return tuple(found)

    def _resident(self, groups: Sequence[_Group], *, parked: bool = False) -> list[Part]:
        """Weights of all models on a device, masters and moments."""
        parts = [weights_part(g.role.value, g.model, g.layout) for g in groups if not g.offloaded]
        if not parked and not (self.config.ds.adam_offload and not self.local):
            parts += [
                state_part(g.model, g.layout, averaged=self.config.train.enable_ema and g.role is Role.ACTOR)
                for g in groups
                if g.trained
            ]
        return parts

    def _update(self, groups: Sequence[_Group]) -> list[Part]:
        """The largest of the models that are trained one after the other."""
        config = self.config
        sums = 2 if config.ds.grad_accum_dtype in ("bf16", "fp16") else 4
        best: list[Part] = []
        for group in (g for g in groups if g.trained):
            parts = [
                gradient_part(group.model, group.layout, sum_bytes=sums),
                activation_part(group.model, group.layout, self.stream(), self.device, compiled=config.ds.deepcompile),
                *([logits_part(self.device, group.model)] if group.role is Role.ACTOR else []),
                buffer_part(group.layout),
            ]
            if sum(p.bytes for p in parts) > sum(p.bytes for p in best):
                best = parts
        return best

    def _score(self, groups: Sequence[_Group]) -> list[Part]:
        stream = self.stream(scoring=True)
        forwards = [forward_part(g.model, g.layout, stream) for g in groups]
        largest = max(forwards, key=lambda part: part.bytes)
        offloaded = [weights_part(g.role.value, g.model, g.layout) for g in groups if g.offloaded]
        return [largest, logits_part(self.device), *offloaded[:1]]

    def _training_pool(self, name: str, devices: int, groups: Sequence[_Group]) -> PoolPlan:
        phases = [PhaseMemory("score", with_overhead([*self._resident(groups), *self._score(groups)], self.device))]
        if any(group.trained for group in groups):
            parts = [*self._resident(groups), *self._update(groups)]
            phases.append(PhaseMemory("update", with_overhead(parts, self.device)))
            if any(group.role is Role.ACTOR for group in groups):
                block = Part("push", PUSH_BLOCK, "a block of weights on its way")
                phases.append(PhaseMemory("push", with_overhead([*self._resident(groups), block], self.device)))
        return self._pool(name, devices, phases)

    def engine_need(self) -> EngineNeed:
        return engine_of(self.config, self._served().shape, engines=self.engines)

    def _served(self) -> PlannedModel:
        """What an engine holds: no adapter's optimizer, 16 bits where the trainer has 4."""
        return dataclasses.replace(self.policy, shape=dataclasses.replace(self.policy.shape, stored=1.0))

    def _engine_parts(self, need: EngineNeed, cache: float) -> list[Part]:
        config = self.config
        parts = config.vllm.devices_per_engine
        weights = need.weights / (2 if config.vllm.quantization == "fp8" else 1)
        size = self.policy.shape.element_bytes / (2 if config.vllm.quantization == "fp8" else 1)
        divided = f" / {parts}" if parts > 1 else ""
        sequences = cache / max(1, need.sequence_bytes)
        return [
            Part("engine weights", weights, f"{size:g} B × {_count(self.policy.shape.parameters)}{divided}"),
            Part("engine work", need.working, "context, graphs, a step of 8,192 tokens, the sampler's logits"),
            Part(CACHE, cache, f"{sequences:,.0f} sequences of {need.sequence_tokens:,} tokens"),
        ]

    def _engine_pool(self, name: str, devices: int) -> PoolPlan:
        need = self.engine_need()
        asked = self.config.vllm.gpu_memory_utilization or MOST
        room = asked * self.device.memory - need.fixed
        cache = max(0.0, min(room, need.wish))
        phases = [PhaseMemory("generate", tuple(self._engine_parts(need, max(cache, need.sequence_bytes))))]
        self._warn_of_cache(need, cache)
        return self._pool(name, devices, phases)

    def _shared_pool(self, name: str, devices: int, groups: Sequence[_Group]) -> PoolPlan:
        """All of them in one place, at the same time or in turns."""
        if self.embedded:
            resident = [*self._resident(groups), self._embedded_cache()]  # the pools stay until the next round
            phases = [
                PhaseMemory("generate", with_overhead([*resident, self._decode_part()], self.device)),
                PhaseMemory("score", with_overhead([*resident, *self._score(groups)], self.device)),
                PhaseMemory("update", with_overhead([*resident, *self._update(groups)], self.device)),
            ]
            return self._pool(name, devices, phases)
        need = self.engine_need()
        cache, sleeps, note = self._division(need, groups)
        engine = self._engine_parts(need, cache)
        awake = [] if sleeps else engine
        asleep = [Part("engine asleep", 2 * GIB, "its context and graphs")] if sleeps else []
        parked = self.config.optimizer_sleeps
        resident = self._resident(groups)
        block = Part("push", PUSH_BLOCK, "a block of weights on its way")

        def phase(phase_name: str, *parts: Part) -> PhaseMemory:
            return PhaseMemory(phase_name, with_overhead(parts, self.device))

        return self._pool(
            name,
            devices,
            [
                phase("generate", *self._resident(groups, parked=parked), *engine),
                phase("score", *resident, *self._score(groups), *awake, *asleep),
                phase("update", *resident, *self._update(groups), *awake, *asleep),
                phase("push", *self._resident(groups, parked=parked), block, *(awake or engine[:2])),
            ],
            note=note,
        )

    def _division(self, need: EngineNeed, groups: Sequence[_Group]) -> tuple[float, bool, str]:
        """Bytes of keys and values, whether engines sleep, and a line about it: as the run decides it."""
        config, memory = self.config, DeviceMemory(total=self.device.memory, others=self.device.memory - self.limit)
        training = self._training_need(groups)
        asked = config.vllm.gpu_memory_utilization
        if asked is not None:
            share = capped(asked, memory, training)
            sleeps = config.engines_sleep
            sleeps = leaves_too_little(share, memory, training) if sleeps is None else sleeps
            cache = max(0.0, share * memory.total - need.fixed)
            return cache, sleeps, f"engines have {share:.0%} of a device and {'sleep' if sleeps else 'never sleep'}"
        try:
            division = divide(memory, training, need, sleeps=config.engines_sleep)
        except DoesNotFitError as error:
            self.problems.append(Problem("memory", str(error)))
            return float(need.sequence_bytes), True, "not even in turns"
        self._warn_of_cache(need, division.cache)
        turns = "engines and training take turns" if division.memory.sleeps else "nobody sleeps"
        return float(division.cache), division.memory.sleeps, turns

    def _training_need(self, groups: Sequence[_Group]) -> TrainingNeed:
        """What the run sets aside for training, with its margin (`engine_memory.training_of`)."""
        config = self.config
        tokens = config.train.micro_batch_size * config.data.max_len if config.train.micro_batch_size > 1 else 0
        if config.train.dynamic_batch_enable:
            tokens = config.train.max_tokens_per_gpu * config.ds.ranks_per_share
        return training_need(
            [TrainedModel(g.model.shape, g.layout) for g in groups if g.trained],
            frozen=[TrainedModel(g.model.shape, g.layout) for g in groups if not g.trained and not g.offloaded],
            tokens=tokens,
            longest=config.data.max_len,
            states_stay=not config.optimizer_sleeps,
            offloaded=config.ds.adam_offload and not self.local,
            averaged=config.train.enable_ema,
        )

    def _warn_of_cache(self, need: EngineNeed, cache: float) -> None:
        if cache < need.sequence_bytes:
            self.problems.append(
                Problem(
                    "memory",
                    f"an engine has {cache / GIB:.1f} GiB for keys and values, and one sequence of "
                    f"{need.sequence_tokens:,} tokens needs {need.sequence_bytes / GIB:.1f}",
                )
            )
        elif cache < need.needed * need.sequence_bytes:
            count = int(cache // need.sequence_bytes)
            self.notes.append(
                f"an engine has room for {count} of {need.needed} sequences at their longest: some wait for others"
            )

    def _embedded_cache(self) -> Part:
        """Pools of doubling capacity: a sequence leaves each one that it outgrows, whose memory stays."""
        config, shape = self.config, self.policy.shape
        rows = min(EMBEDDED_PLACES, config.generate_batch_size * config.samples_per_prompt)
        longest = min(config.data.max_len, math.ceil(self.prompt + self.response))
        slots, capacity = 0, MIN_CAPACITY
        while True:
            here = min(capacity, max(config.data.max_len, MIN_CAPACITY))
            if here > self.prompt:
                slots += here
            if capacity >= longest or here == config.data.max_len:
                break
            capacity *= 2
        each = shape.element_bytes * shape.cache_numbers
        return Part(CACHE, rows * slots * each, f"{rows} rows × {slots:,} slots × {each / 1024:,.0f} KiB")

    def _decode_part(self) -> Part:
        """A step of the embedded engine: logits of all rows, and their copies in the sampler."""
        rows = min(EMBEDDED_PLACES, self.config.generate_batch_size * self.config.samples_per_prompt)
        logits = 4 * rows * self.policy.shape.vocabulary
        reading = min(8192.0, rows * self.prompt) * self.policy.shape.element_bytes
        reading *= 6 * self.policy.shape.hidden + 3 * self.policy.shape.intermediate
        return Part("step", max(3 * logits, reading), "logits of all rows three times, or prompts of 8,192 tokens")

    def _pool(self, name: str, devices: int, phases: Sequence[PhaseMemory], *, note: str = "") -> PoolPlan:
        found = PoolPlan(name=name, devices=devices, phases=tuple(phases), limit=self.limit, note=note)
        if not found.fits:
            self.problems.append(too_much(found))
        return found

    # ---------------------------------------------------------------------------------------------------------- time

    def ranks_of(self, group: _Group) -> Ranks:
        ds, layout = self.config.ds, group.layout
        across = layout.ranks > self.machines.per_node
        return Ranks(
            count=layout.ranks,
            tensor=layout.tensor,
            context=layout.context,
            zero=layout.zero,
            link=self.device.network if across and ds.zpg <= 1 else self.device.link,
            tensor_link=self.device.link,
        )

    def times(self) -> list[PhaseTime]:
        config = self.config
        groups = list(self.groups())
        samples = config.samples_per_round
        found = [PhaseTime("generate", self._generation(samples), overlaps=config.train.async_enable)]
        if (scoring := self._scoring(groups, samples)).total:
            found.append(PhaseTime("score", scoring))
        found.append(PhaseTime("update", self._updates(groups, samples)))
        found.append(PhaseTime("push", self._push(groups[0])))
        return found

    def batch(self, samples: int, sharing: float) -> Batch:
        return Batch(samples=samples, prompt=self.prompt, response=self.response, sharing=sharing)

    def _generation(self, samples: int) -> Seconds:
        config = self.config
        served = self._served()
        if self.embedded:
            group = EngineGroup(
                engines=1, places=EMBEDDED_PLACES, embedded=True, weight_bytes=served.shape.element_bytes
            )
        else:
            need = self.engine_need()
            cache = next(
                (p.bytes for pool in self._planned_pools for m in pool.phases for p in m.parts if p.name == CACHE),
                need.wish,
            )
            length = self.prompt + self.response
            room = int(cache / max(1.0, need.sequence_bytes * length / need.sequence_tokens))
            group = EngineGroup(
                engines=self.engines,
                tensor=config.vllm.tensor_parallel_size,
                stages=config.vllm.pipeline_parallel_size,
                places=max(1, min(need.sequences, room)),
                weight_bytes=served.shape.element_bytes / (2 if config.vllm.quantization == "fp8" else 1),
                adapter=self._pushes_adapter,
                link=self.device.link,
            )
        prompts = config.rollout.batch_size
        return generation_seconds(served, self.batch(samples, 1), self.device, group, prompts=prompts)

    @property
    def _pushes_adapter(self) -> bool:
        config = self.config
        if not config.ds.lora.rank:
            return False
        sleeps = config.engines_share_devices and config.vllm.enable_sleep
        return config.vllm.lora_sync == "adapter" or (config.vllm.lora_sync is None and not sleeps)

    def _scoring(self, groups: Sequence[_Group], samples: int) -> Seconds:
        """The forwards that are needed, one after the other; groups on devices of their own at the same time."""
        config = self.config
        forwards: list[tuple[str, _Group, bool]] = []
        actor = groups[0]
        steps = config.train.max_epochs * math.ceil(samples / config.train.batch_size)
        priced = config.uses_reference and not config.algo.kl.use_loss
        old = steps > 1 or priced or config.teacher_rewards
        if old:
            forwards.append(("old log-probs", actor, True))
        if config.reference_is_base:
            forwards.append(("reference", actor, True))
        if config.teacher.policy is not None and config.teacher_path is None:
            forwards.append(("teacher", actor, True))
        for group in groups[1:]:
            name = {"critic": "values", "ref": "reference", "reward": "rewards"}.get(group.role.value, group.role.value)
            forwards.append((name, group, group.role in (Role.REFERENCE, Role.TEACHER)))
        per_place: dict[str, float] = {}
        for _, group, head in forwards:
            micro = self.micro_batches(samples, group.layout.ranks, scoring=True)
            per = samples / max(1, group.layout.ranks // config.ds.ranks_per_share) / micro
            batch = self.batch(samples, self.sharing(per))
            one = scoring_seconds(group.model, batch, self.device, self.ranks_of(group), micro_batches=micro, head=head)
            place = "one" if self.placement is None else str(self._pool_of(group.role))
            per_place[place] = per_place.get(place, 0.0) + one.total
        names = ", ".join(name for name, *_ in forwards)
        return Seconds(compute=max(per_place.values(), default=0.0), why=f"forwards of {names}" if names else "")

    def _pool_of(self, role: Role) -> int:
        assert self.placement is not None
        return next(i for i, pool in enumerate(self.placement.pools) if role in pool.roles)

    def _updates(self, groups: Sequence[_Group], samples: int) -> Seconds:
        config = self.config
        per_place: dict[int, list[Seconds]] = {}
        for group in (g for g in groups if g.trained):
            ranks = self.ranks_of(group)
            micro = self.micro_batches(samples, ranks.count)
            per = samples / max(1, ranks.count // config.ds.ranks_per_share) / micro
            epochs, steps = config.train.max_epochs, math.ceil(samples / config.train.batch_size)
            one = training_seconds(
                group.model,
                self.batch(samples, self.sharing(per)),
                self.device,
                ranks,
                micro_batches=micro,
                steps=steps,
                checkpointing=group.layout.checkpointing,
                offloaded=config.ds.adam_offload and not self.local,
                head=group.role is Role.ACTOR,
            )
            one = dataclasses.replace(
                one, compute=one.compute * epochs, traffic=one.traffic * epochs, fixed=one.fixed * epochs
            )
            place = 0 if self.placement is None else self._pool_of(group.role)
            per_place.setdefault(place, []).append(one)
        return max((_together(found) for found in per_place.values()), key=lambda one: one.total)

    def _push(self, actor: _Group) -> Seconds:
        config, shape = self.config, self.policy.shape
        if self.embedded:
            return Seconds(why="the engine has the policy's own weights")
        whole = shape.element_bytes * shape.parameters
        moved = shape.element_bytes * shape.trained if self._pushes_adapter else whole
        shared = config.engines_share_devices
        across = self.machines.devices > self.machines.per_node and not shared
        rate = constant("push_rate")
        if not shared:
            rate = min(rate, (self.device.network if across else self.device.link) * constant("link_share"))
        gathered, gather_rate = 0.0, math.inf
        if actor.layout.zero == 3 or actor.layout.tensor > 1:
            gathered = moved
            wide = actor.layout.ranks > self.machines.per_node and actor.layout.zero == 3
            gather_rate = (self.device.network if wide else self.device.link) * constant("link_share")
        # An engine of several devices takes its own part of every tensor: each reads all of them.
        found = push_seconds(moved, rate=rate, gathered=gathered, gather_rate=gather_rate)
        slept = any("take turns" in pool.note or "and sleep" in pool.note for pool in self._planned_pools)
        fixed = found.fixed + (constant("sleep_seconds") if slept else 0.0)
        if config.optimizer_sleeps:
            states = optimizer_bytes(actor.model.shape, actor.layout)
            fixed += 2 * states / constant("park_rate")
        return dataclasses.replace(found, fixed=fixed)

    # ---------------------------------------------------------------------------------------------------------- all

    _planned_pools: tuple[PoolPlan, ...] = ()

    def plan(self) -> Plan:
        config = self.config
        if self.placement is not None and not self.device.is_cpu:
            nodes = [Node(self.machines.per_node, 10**6)] * self.machines.nodes
            found = fit(self.placement, nodes)
            if found.problem:
                self.problems.append(Problem("devices", found.problem))
        self._planned_pools = self.pools()
        models = {group.role.value: group.model for group in self.groups()}
        rounds = config.train.total_steps
        if self.expected.records is not None:
            available = self.expected.records * config.train.num_episodes // config.rollout.batch_size
            rounds = min(rounds or available, available)
        samples = config.samples_per_round
        devices = 1 if self.placement is None else self.placement.devices
        if devices < self.machines.devices and not self.device.is_cpu:
            self.notes.append(f"the run uses {devices} of {self.machines.devices} GPUs")
        return Plan(
            command="train_ppo_ray",
            machines=self.machines,
            launcher=config.train.launcher,
            models=models,
            pools=self._planned_pools,
            times=tuple(self.times()),
            placement="" if self.placement is None else self.placement.table(),
            tokens_per_step=samples * (self.prompt + self.response),
            samples_per_step=samples,
            steps=rounds,
            problems=tuple(self.problems),
            notes=(*_assumptions(models), *self.notes),
        )


def plan_rl(
    config: RLConfig, machines: Machines, expected: Expected = NOTHING_KNOWN, *, reader: ModelReader | None = None
) -> Plan:
    """Raises ConfigError where groups cannot share as they are asked to, ModelLoadError where a model is not found."""
    try:
        return _RLPlanner(config, machines, expected, reader or ModelReader()).plan()
    except ConfigError as error:
        return Plan(
            command="train_ppo_ray", machines=machines, launcher=config.train.launcher, models={},
            problems=(Problem("settings", str(error)),),
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------- supervised runs


def plan_supervised(
    config: SupervisedConfig,
    machines: Machines,
    expected: Expected = NOTHING_KNOWN,
    *,
    ranks: int = 1,
    reader: ModelReader | None = None,
) -> Plan:
    """`ranks`: processes that a launcher starts, one on each device. Raises ModelLoadError."""
    read, device, ds = reader or ModelReader(), machines.device, config.ds
    path = required(config.model.model_name_or_path)
    model = read(config, path, "--model.model_name_or_path", device, trains=True)
    alone = ranks == 1 and not ds.adam_offload and config.train.backend in ("auto", "torch")
    layout = Layout(
        ranks=ranks,
        zero=0 if alone else ds.zero_stage,
        context=ds.ring_attn_size,
        tensor=ds.tensor_parallel_size,
        checkpointing=config.model.gradient_checkpointing_enable,
    )
    problems: list[Problem] = []
    if ranks > machines.devices and not device.is_cpu:
        problems.append(
            Problem("devices", f"the launcher starts {ranks} processes, and there are {machines.devices} GPUs")
        )
    if ranks % ds.ranks_per_share:
        problems.append(Problem("settings", f"{ds.share_in_flags} does not divide {ranks} processes"))
    length = min(expected.prompt_tokens or config.data.max_len, config.data.max_len)
    longest = min(expected.longest or config.data.max_len, config.data.max_len)
    answers = config.tokens_per_forward // (config.train.micro_batch_size * config.data.max_len)
    step_samples = config.train.batch_size * answers
    budget = min(config.tokens_per_forward, step_samples * length)
    stream = Stream(tokens=max(budget, longest * answers), longest=longest)
    reference: PlannedModel | None = None
    if isinstance(config, DPOConfig) and not config.reference_is_base:
        reference = read(config, required(config.reference_path), "--ref.model_name_or_path", device, trains=False)
    offloaded_reference = isinstance(config, DPOConfig) and config.ref.offload
    resident = [weights_part("model", model, layout)]
    if reference is not None and not offloaded_reference:
        resident.append(weights_part("ref", reference, layout))
    if not ds.adam_offload or layout.zero == 0:
        resident.append(state_part(model, layout))
    sums = 2 if ds.grad_accum_dtype in ("bf16", "fp16") else 4
    update = [
        *resident,
        gradient_part(model, layout, sum_bytes=sums),
        activation_part(model, layout, stream, device, compiled=ds.deepcompile),
        *([] if isinstance(config, RMConfig) else [logits_part(device, model)]),
        buffer_part(layout),
    ]
    phases = [PhaseMemory("update", with_overhead(update, device))]
    if reference is not None:
        late = [weights_part("ref", reference, layout)] if offloaded_reference else []
        score = [*resident, *late, forward_part(reference, layout, stream), logits_part(device)]
        phases.insert(0, PhaseMemory("score", with_overhead(score, device)))
    pool = PoolPlan(name="model", devices=ranks, phases=tuple(phases), limit=device_limit(machines))
    if not pool.fits:
        problems.append(too_much(pool))
    across = ranks > machines.per_node
    group = Ranks(
        count=ranks, tensor=layout.tensor, context=layout.context, zero=layout.zero,
        link=device.network if across else device.link, tensor_link=device.link,
    )  # fmt: skip
    batch = Batch(samples=step_samples, prompt=0, response=length)
    fitting = max(1.0, config.tokens_per_forward // length)
    micro = max(1, math.ceil(step_samples / max(1, ranks // ds.ranks_per_share) / fitting))
    head = not isinstance(config, RMConfig)
    times = []
    if isinstance(config, DPOConfig):
        frozen = scoring_seconds(reference or model, batch, device, group, micro_batches=micro)
        times.append(PhaseTime("score", dataclasses.replace(frozen, why="log-probs of the reference")))
    update_time = training_seconds(
        model, batch, device, group,
        micro_batches=micro, steps=1, checkpointing=layout.checkpointing, offloaded=ds.adam_offload, head=head,
    )  # fmt: skip
    times.append(PhaseTime("update", update_time))
    steps = config.train.total_steps
    if expected.records is not None:
        available = math.ceil(expected.records / config.train.batch_size) * config.train.max_epochs
        steps = min(steps or available, available)
    models = {"model": model} | ({"ref": reference} if reference else {})
    notes = list(_assumptions(models))
    if ranks < machines.devices and not device.is_cpu:
        notes.append(
            f"the run uses {ranks} of {machines.devices} GPUs; `torchrun --nproc_per_node {machines.per_node} -m "
            "openrlhf.cli.train_…` starts a process on each"
        )
    return Plan(
        command=next(name for name, kind in ROOTS.items() if type(config) is kind),
        machines=machines,
        launcher="processes" if ranks > 1 else "one process",
        models=models,
        pools=(pool,),
        times=tuple(times),
        tokens_per_step=step_samples * length,
        samples_per_step=config.train.batch_size,
        steps=steps,
        problems=tuple(problems),
        notes=tuple(notes),
    )


# ------------------------------------------------------------------------------------------------------------ helpers


def device_limit(machines: Machines) -> int:
    """Bytes that a run may fill: of a CPU's memory what is free, if it is this one's."""
    if not machines.device.is_cpu:
        return machines.device.memory
    import psutil

    return int(psutil.virtual_memory().available if machines.here else machines.device.memory)


def too_much(pool: PoolPlan) -> Problem:
    peak = pool.peak
    largest = sorted(peak.parts, key=lambda part: -part.bytes)[:3]
    parts = ", ".join(f"{part.name} {_gib(part.bytes)}" for part in largest)
    return Problem(
        "memory",
        f"{pool.name}: {peak.phase} needs {_gib(peak.total)} on each device, which has {_gib(pool.limit)} ({parts})",
    )


def _together(found: Sequence[Seconds]) -> Seconds:
    return Seconds(
        compute=sum(one.compute for one in found),
        traffic=sum(one.traffic for one in found),
        fixed=sum(one.fixed for one in found),
        why="; ".join(one.why for one in found),
    )


def _assumptions(models: Mapping[str, PlannedModel]) -> Iterator[str]:
    assumed = [name for name, model in models.items() if model.assumed]
    if assumed:
        yield f"the model of {', '.join(assumed)} is not here: its shape is that of the table in planning/models.py"


def _gib(value: float) -> str:
    return f"{value / GIB:,.1f} GiB" if abs(value) < 100 * GIB else f"{value / GIB:,.0f} GiB"


def _count(value: float) -> str:
    for size, name in ((1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:,.0f}"
