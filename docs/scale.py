"""Plans of large runs by `openrlhf doctor`: the tables of docs/scale.md (`make docs`)."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from openrlhf.config.commands import RLConfig
from openrlhf.planning.command import read_command
from openrlhf.planning.hardware import GIB, parse_cluster
from openrlhf.planning.plan import Expected, ModelReader, Plan, plan_rl

WORK = (
    "--data.prompt_dataset p.jsonl --reward.remote_url r.py --algo.advantage.estimator group_norm "
    "--algo.kl.init_coef 0 --rollout.batch_size 1024 --rollout.n_samples_per_prompt 8 --train.batch_size 8192 "
    "--data.max_len 4096 --train.dynamic_batch_enable --actor.gradient_checkpointing_enable"
)
EXPECTED = Expected(prompt_tokens=512, response_tokens=2048, records=100_000)
"""1,024 prompts of 512 tokens × 8 samples of 2,048 a round, and 100,000 prompts."""
TOGETHER = "--train.launcher ray --train.colocate_all --ds.zero_stage 3 --ds.enable_sleep"


class Setup(NamedTuple):
    model: str
    cluster: str
    flags: str


def together(model: str, nodes: int, *, engine: int, tokens: int, more: str = "") -> Setup:
    flags = f"{TOGETHER} --actor.num_nodes {nodes} --actor.num_gpus_per_node 8 --vllm.tensor_parallel_size {engine}"
    return Setup(model, f"{nodes}x8xH200", f"{flags} --train.max_tokens_per_gpu {tokens} {more}".strip())


def apart(model: str, training: int, sampling: int, *, engine: int, tokens: int) -> Setup:
    flags = (
        f"--train.launcher ray --train.async_enable --ds.zero_stage 3 --actor.num_nodes {training} "
        f"--actor.num_gpus_per_node 8 --vllm.tensor_parallel_size {engine} --vllm.num_engines {sampling * 8 // engine}"
    )
    return Setup(model, f"{training + sampling}x8xH200", f"{flags} --train.max_tokens_per_gpu {tokens}")


DENSE, SMALL, LARGE = "Llama-3.1-70B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"
SETUPS = {
    DENSE: [
        together(DENSE, 1, engine=8, tokens=8192, more="--ds.adam_offload --vllm.enable_sleep"),
        together(DENSE, 8, engine=4, tokens=16384),
        apart(DENSE, 4, 4, engine=4, tokens=16384),
        together(DENSE, 64, engine=4, tokens=40960),
    ],
    SMALL: [
        together(SMALL, 1, engine=2, tokens=16384),
        together(SMALL, 8, engine=2, tokens=32768),
        together(SMALL, 64, engine=2, tokens=40960),
    ],
    LARGE: [
        together(LARGE, 1, engine=8, tokens=4096, more="--ds.adam_offload"),
        together(LARGE, 8, engine=8, tokens=12288),
        apart(LARGE, 4, 4, engine=8, tokens=4096),
        together(LARGE, 64, engine=8, tokens=40960),
    ],
}
READER = ModelReader()


def planned(setup: Setup) -> Plan:
    command = read_command(shlex.split(f"rl --actor.model_name_or_path {setup.model} {WORK} {setup.flags}"))
    config = command.config()
    assert isinstance(config, RLConfig)
    return plan_rl(config, parse_cluster(setup.cluster), EXPECTED, reader=READER)


def scaling(model: str) -> str:
    """One row for each number of GPUs."""
    lines = [
        "| GPUs | layout | GiB of 140 | generate | update | push | a step | tokens/s per GPU | bottleneck |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for setup in SETUPS[model]:
        plan = planned(setup)
        times = {time.name: time.seconds.total for time in plan.times}
        gpus = plan.machines.devices
        update = next(time for time in plan.times if time.name == "update").seconds
        bottleneck = plan.bottleneck
        if bottleneck == "update" and update.traffic > update.compute:
            bottleneck = "weights that ranks gather of each other"
        if not plan.fits:
            peak = max(plan.pools, key=lambda pool: pool.peak.total).peak
            lines.append(
                f"| {gpus} | {layout(setup)} | {plan.peak_bytes / GIB:,.0f}: {peak.phase} does not fit "
                "| | | | | | memory |"
            )
            continue
        seconds = " | ".join(_seconds(times.get(name, 0.0)) for name in ("generate", "update", "push"))
        rate = plan.tokens_per_step / plan.step_seconds / gpus
        lines.append(
            f"| {gpus} | {layout(setup)} | {plan.peak_bytes / GIB:,.0f} | {seconds} | {_seconds(plan.step_seconds)} | "
            f"{rate:,.0f} | {bottleneck} |"
        )
    return "\n".join(lines)


def layout(setup: Setup) -> str:
    words = setup.flags.split()
    engine = words[words.index("--vllm.tensor_parallel_size") + 1]
    tokens = int(words[words.index("--train.max_tokens_per_gpu") + 1])
    where = "all together" if "--train.colocate_all" in words else "half trains, half samples, async"
    offload = ", offload" if "--ds.adam_offload" in words else ""
    return f"{where}{offload}, engines of {engine}, {tokens:,} tokens"


def held(model: str) -> str:
    """What a device of 64 holds, phase by phase."""
    plan = planned(next(setup for setup in SETUPS[model] if setup.cluster.startswith("8x8")))
    lines = ["| on | phase | what | GiB |", "|---|---|---|---:|"]
    for pool in plan.pools:
        for phase in pool.phases:
            parts = ", ".join(
                f"{part.name} {part.bytes / GIB:.1f} ({part.why})" for part in phase.parts if part.bytes > GIB
            )
            lines.append(f"| {pool.devices} × {pool.name} | {phase.phase} | {parts} | {phase.total / GIB:.0f} |")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"


TABLES = {
    "dense": lambda: scaling(DENSE),
    "dense 64": lambda: held(DENSE),
    "mixture": lambda: scaling(SMALL),
    "large mixture": lambda: scaling(LARGE),
}


def filled(text: str) -> str:
    """A document with each of these tables between its comments, `<!-- dense -->` and `<!-- /dense -->`."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for table in TABLES.values():
        print(f"{table()}\n")
