"""Seconds of the phases of a step, from shapes, flags and devices.

decode    a step of an engine reads its weights, and the keys and values of all sequences, and multiplies; the driver
          and the sampler add what they cost whatever the model is
prefill, score, update    arithmetic, at a measured share of the device's peak
push      bytes over a bandwidth

Every constant that is no data sheet is in `MEASURED`, with the measurement that it comes from, or marked as assumed.

Shapes: N prompts of P tokens, G samples of R tokens each; L layers; g samples that share their prompt in one forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from openrlhf.planning.hardware import Device
from openrlhf.planning.models import PlannedModel


class Constant(NamedTuple):
    value: float
    source: str


_H200 = "one H200"

MEASURED = {
    "update_share": Constant(
        0.40, f"bench.trainer, bench.sft, bench.hybrid: 38 to 43 % of peak for the 1.5B shape on {_H200}"
    ),
    "expert_share": Constant(
        0.21, f"bench.experts: 14.2 s for two updates and 3.4 s for scoring of a 6.56B mixture on {_H200}"
    ),
    "forward_share": Constant(0.40, "assumed: that of an update"),
    "layer_seconds": Constant(
        0.0044, f"bench.prefixes: 106 to 131 ms for 24 layers forward and backward, bound by launches, on {_H200}"
    ),
    "decode_share": Constant(
        0.775, f"bench.adapters: 10.4 and 22.7 ms for a step of 512 sequences, 1.5B and 7B merged, on {_H200}"
    ),
    "decode_step": Constant(0.004, "the same, and bench.async_rl: 6.1 ms for a step of some 150 sequences of 0.5B"),
    "decode_sequence": Constant(5e-6, "the same: what each sequence adds to the cost of a step"),
    "decode_in_a_run": Constant(
        1.15, "bench.hybrid: 6.6 to 8.7 s in a run, 6.3 s of vLLM alone without log-probs, for 64 × 8 × 512 tokens"
    ),
    "adapter_decode": Constant(1.25, f"bench.adapters: 0.74 to 0.81 of the tokens per second, on {_H200}"),
    "push_seconds": Constant(0.1, f"bench.adapters: a push of 37 to 323 MB, on {_H200}"),
    "push_rate": Constant(17e9, f"bench.adapters, bench.experts, bench.hybrid: 3.1 to 15.2 GB, on {_H200}"),
    "sleep_seconds": Constant(0.4, f"bench.hybrid: 0.05 s to fall asleep and 0.3 s to wake up, 1.5B on {_H200}"),
    "link_share": Constant(0.7, "assumed: of what NVLink or the network is sold with"),
    "reduce_latency": Constant(20e-6, "assumed: a sum over the devices of an engine"),
    "step_bytes": Constant(40, "an optimizer step reads and writes weights, masters, moments and gradients"),
    "offload_rate": Constant(1.5e9, "assumed: parameters that the CPUs of a machine step in a second"),
    "park_rate": Constant(25e9, "assumed: bytes per second of each GPU to and from CPU memory"),
    "reading_share": Constant(0.6, "assumed: of the memory's bandwidth"),
    # A CPU, beside the products of matrices and copies that the doctor measures first.
    "cpu_update_share": Constant(0.74, "bench.doctor on 2 busy cores: of the rate of a product of 768 × 768 matrices"),
    "cpu_decode_share": Constant(0.50, "bench.doctor on 2 busy cores: the same, for the products of a step"),
    "cpu_decode_step": Constant(3e6, "bench.doctor on 2 busy cores: operations' worth of a layer's Python in a step"),
    "cpu_layer_update": Constant(1e8, "bench.doctor on 2 busy cores: the same of a layer of an update"),
}


def constant(name: str) -> float:
    return MEASURED[name].value


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples that are computed in a phase, by mean lengths. A supervised sample has no prompt here: `response`."""

    samples: int
    prompt: float
    response: float
    sharing: float = 1.0
    """g: samples that share the forward of their prompt."""
    head_everywhere: bool = False
    """The head is computed for all tokens, not for those of responses alone."""

    @property
    def tokens(self) -> float:
        """That are computed, with prompts shared."""
        return self.samples * (self.response + self.prompt / self.sharing)

    @property
    def given_tokens(self) -> float:
        """That samples have."""
        return self.samples * (self.response + self.prompt)

    @property
    def pairs(self) -> float:
        """Of tokens that attend and are attended to."""
        P, R, g = self.prompt, self.response, self.sharing
        return self.samples * (P * P / (2 * g) + P * R + R * R / 2)


def forward_flops(model: PlannedModel, batch: Batch, *, head: bool = True) -> float:
    """2 for each matrix entry and token, 4 · width · layers for each pair. `head`: log-probs are computed, not a value
    for each token."""
    heads = model.head * (batch.tokens if batch.head_everywhere else batch.samples * batch.response) if head else 0
    return 2 * (model.matrices * batch.tokens + heads) + attention_flops(model, batch)


def attention_flops(model: PlannedModel, batch: Batch) -> float:
    return 4 * model.attention_width * model.shape.layers * batch.pairs


def update_flops(model: PlannedModel, batch: Batch, *, checkpointing: bool, head: bool = True) -> float:
    """Three forwards' worth; a third of the matrices' is left out where they are frozen below an adapter. Checkpointing
    computes layers once more, without attention, whose outputs are kept."""
    forward, attention = forward_flops(model, batch, head=head), attention_flops(model, batch)
    linear = forward - attention
    found = 3 * attention + linear * (2 if model.is_adapter else 3)
    return found + 2 * model.matrices * batch.tokens if checkpointing else found


def compute_share(model: PlannedModel, device: Device, *, update: bool) -> float:
    if device.is_cpu:
        return constant("cpu_update_share")
    if model.is_mixture:
        return constant("expert_share")
    return constant("update_share" if update else "forward_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The devices that compute a batch together."""

    count: int = 1
    tensor: int = 1
    context: int = 1
    zero: int = 0
    link: float = math.inf
    """Bytes per second between two of them, the slowest way."""
    tensor_link: float = math.inf
    """The same between those that share a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one phase, and what they consist of."""

    compute: float = 0.0
    traffic: float = 0.0
    fixed: float = 0.0
    why: str = ""

    @property
    def total(self) -> float:
        return self.compute + self.traffic + self.fixed


def training_seconds(
    model: PlannedModel,
    batch: Batch,
    device: Device,
    ranks: Ranks,
    *,
    micro_batches: int,
    steps: int,
    checkpointing: bool,
    offloaded: bool = False,
    head: bool = True,
) -> Seconds:
    """An update of all samples by all ranks. `micro_batches`: of one rank. `steps`: of the optimizer."""
    flops = update_flops(model, batch, checkpointing=checkpointing, head=head)
    passes = 4 if checkpointing else 3
    return _over_ranks(
        model, batch, device, ranks,
        flops=flops, passes=passes, micro_batches=micro_batches, steps=steps, offloaded=offloaded,
    )  # fmt: skip


def scoring_seconds(
    model: PlannedModel, batch: Batch, device: Device, ranks: Ranks, *, micro_batches: int, head: bool = True
) -> Seconds:
    """A forward of all samples without gradients."""
    flops = forward_flops(model, batch, head=head)
    return _over_ranks(model, batch, device, ranks, flops=flops, passes=1, micro_batches=micro_batches, steps=0)


def _over_ranks(
    model: PlannedModel,
    batch: Batch,
    device: Device,
    ranks: Ranks,
    *,
    flops: float,
    passes: int,
    micro_batches: int,
    steps: int,
    offloaded: bool = False,
) -> Seconds:
    shape = model.shape
    share = compute_share(model, device, update=passes > 1)
    compute = flops / (ranks.count * device.flops * share)
    bound_by_launches = False
    if device.is_cpu:
        launches = micro_batches * shape.layers * constant("cpu_layer_update") / device.flops * passes / 3
    else:
        launches = micro_batches * shape.layers * constant("layer_seconds") * passes / 3
        bound_by_launches = launches > compute
        compute, launches = max(compute, launches), 0.0
    reached = constant("link_share")
    traffic = 0.0
    if ranks.zero == 3 and ranks.count > 1:  # every pass gathers all layers; the next one's arrive while one computes
        gathered = shape.element_bytes * shape.stored * shape.parameters * (ranks.count - 1) / ranks.count
        gathers = micro_batches * (passes - (passes > 2)) * gathered / (ranks.link * reached)
        traffic += max(0.0, gathers - compute)
    if ranks.tensor > 1:  # two sums over the ranks of a layer in every pass
        sums = 2 * passes * shape.layers * batch.tokens * shape.hidden * shape.element_bytes
        sums *= 2 * (ranks.tensor - 1) / ranks.tensor / (ranks.count // ranks.tensor)
        traffic += sums / (ranks.tensor_link * reached)
    own = shape.trained / (ranks.count if ranks.zero else max(1, ranks.tensor))
    if steps and ranks.count > ranks.tensor:  # gradients are summed, and weights given back
        traffic += steps * 2 * 4 * shape.trained / ranks.tensor / (ranks.link * reached)
    stepping = steps * own * constant("step_bytes") / (device.bandwidth * constant("reading_share"))
    if offloaded:
        stepping = steps * own / constant("offload_rate") * min(ranks.count, 8)
    why = f"{_amount(flops)}FLOP at {share:.0%} of {_amount(device.flops)}FLOP/s"
    why += f" on each of {ranks.count}" if ranks.count > 1 else ""
    if traffic > 0.05 * compute:
        why += f", and {traffic:.1f} s of traffic"
    if bound_by_launches or launches > compute:
        why = f"{micro_batches:,} micro-batches × {shape.layers} layers, bound by launches"
    return Seconds(compute=compute, traffic=traffic, fixed=launches + stepping, why=why)


# ------------------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    engines: int
    tensor: int = 1
    stages: int = 1
    places: int = 512
    """Sequences that one of them samples at once."""
    embedded: bool = False
    """It computes with the policy's own weights, in the trainer's process."""
    weight_bytes: float = 2.0
    """Of a parameter."""
    adapter: bool = False
    """The adapter is a product of its own in every layer."""
    link: float = math.inf


def generation_seconds(
    model: PlannedModel, batch: Batch, device: Device, group: EngineGroup, *, prompts: int
) -> Seconds:
    """All samples on all engines, each as long as the mean. Prompts are read once."""
    each = math.ceil(batch.samples / group.engines)
    at_once = max(1, min(each, group.places))
    waves = each / at_once
    steps = batch.response * max(1.0, waves)
    step = decode_step(model, at_once, batch.prompt + batch.response / 2, device, group)
    reading = Batch(samples=max(1, prompts // group.engines), prompt=0, response=batch.prompt)
    share = compute_share(model, device, update=False)
    prefill = forward_flops(model, reading, head=False) / (device.flops * share * group.tensor)
    total = (prefill + steps * step) * (1.0 if device.is_cpu else constant("decode_in_a_run"))
    why = f"{steps:,.0f} steps of {_milliseconds(step)} with {at_once:,} sequences at once"
    if waves > 1:
        why += f" of {each:,}"
    return Seconds(compute=total, why=why)


def decode_step(model: PlannedModel, sequences: int, length: float, device: Device, group: EngineGroup) -> float:
    """Seconds of one token for so many sequences, of so many tokens on average."""
    shape = model.shape
    parts = group.tensor * group.stages
    weights = group.weight_bytes * _parameters_read(model, sequences) / parts
    heads_here = -(-shape.kv_heads // group.tensor) / shape.kv_heads
    cache = shape.element_bytes * shape.cache_numbers * sequences * length * heads_here / group.stages
    flops = sequences * 2 * (model.matrices + model.head) / parts
    flops += sequences * 4 * model.attention_width * shape.layers * length / parts
    if device.is_cpu:
        moved = (weights + 2 * cache) / device.bandwidth
        own = shape.layers * constant("cpu_decode_step") / device.flops
        return flops / (device.flops * constant("cpu_decode_share")) + moved + own
    busy = ((weights + cache) / device.bandwidth + flops / device.flops) / constant("decode_share")
    busy *= group.stages  # a token passes all stages one after the other
    if group.adapter:
        busy *= constant("adapter_decode")
    sums = 0.0
    if group.tensor > 1:
        moved = 2 * (group.tensor - 1) / group.tensor * sequences * shape.hidden * shape.element_bytes / group.link
        sums = 2 * shape.layers * (constant("reduce_latency") + moved)
    return busy + sums + constant("decode_step") + constant("decode_sequence") * sequences


def _parameters_read(model: PlannedModel, sequences: int) -> float:
    """Of a mixture, the experts that some sequence is sent to, if tokens choose at random."""
    own = model.expert_parameters * model.expert_share
    met = model.expert_parameters * (1 - (1 - model.expert_share) ** sequences)
    return model.matrices + model.head - own + met


# ----------------------------------------------------------------------------------------------------------- the push


def push_seconds(moved: float, *, rate: float, gathered: float = 0.0, gather_rate: float = math.inf) -> Seconds:
    """`moved`: bytes that an engine takes over. `gathered`: bytes that ranks collect of each other before."""
    traffic = moved / rate + gathered / gather_rate
    why = f"{moved / 1e9:.3g} GB at {rate / 1e9:.3g} GB/s"
    return Seconds(traffic=traffic, fixed=constant("push_seconds"), why=why)


def _amount(value: float) -> str:
    for size, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.3g} "


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
