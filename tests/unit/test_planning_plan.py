"""Plans of runs on machines that are not here: memory by hand, runs that do not fit, and changes that make them fit."""

import json
import shlex
from dataclasses import replace

import pytest

from openrlhf.config import ConfigError
from openrlhf.config.schema import flags_of
from openrlhf.data.packing import by_tokens
from openrlhf.planning.command import read_command
from openrlhf.planning.fit import fitted, planner, steps_for
from openrlhf.planning.hardware import GIB, GPUS, Device, Machines, named_device, parse_cluster, parse_gpus
from openrlhf.planning.models import KNOWN, known_config
from openrlhf.planning.plan import Expected, ModelReader, plan_rl, plan_supervised

READER = ModelReader()
DATA = "--data.prompt_dataset p.jsonl --reward.remote_url r.py --algo.advantage.estimator group_norm"
NO_KL = f"{DATA} --algo.kl.init_coef 0"


def machines(text):
    return parse_cluster(text) if text.count("x") == 2 else parse_gpus(text)


def planned(where, words, expected=Expected(), **options):  # noqa: B008
    command = read_command(shlex.split(words))
    config = command.config()
    if command.name == "train_ppo_ray":
        return plan_rl(config, machines(where), expected, reader=READER)
    return plan_supervised(config, machines(where), expected, ranks=command.ranks, reader=READER)


def parts(plan, phase, pool=0):
    found = next(one for one in plan.pools[pool].phases if one.phase == phase)
    return {part.name: part.bytes for part in found.parts}


# ---------------------------------------------------------------------------------------------------------- machines


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name"),
    [
        ("8xH100", 1, 8, "H100"),
        ("H200", 1, 1, "H200"),
        ("2 x a100-40gb", 1, 2, "A100-40"),
        ("RTX 4090", 1, 1, "RTX4090"),
    ],
)
def test_machines_are_written_as_people_write_them(text, nodes, per_node, name):
    found = parse_gpus(text)
    assert (found.nodes, found.per_node, found.device) == (nodes, per_node, GPUS[name])


@pytest.mark.parametrize("text", ["8xFOO", "0xH100", "8x", "2x8xH100"])
def test_a_machine_that_nobody_knows_is_refused(text):
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


def test_a_cluster_has_machines_and_devices():
    assert parse_cluster("8x4xH200").devices == 32
    with pytest.raises(ConfigError, match="like 8x8xH200"):
        parse_cluster("8xH200")
    assert named_device("NVIDIA H200", flag="").name == "H200"


def test_known_shapes_are_found_by_their_names():
    assert known_config("Qwen/Qwen2.5-7B-Instruct") == KNOWN["Qwen2.5-7B"]
    assert known_config("./models/meta-llama/Meta-Llama-3.1-70B") == KNOWN["Llama-3.1-70B"]
    assert known_config("Qwen/Qwen3-30B-A3B-Instruct-2507") == KNOWN["Qwen3-30B-A3B"]
    assert known_config("my-own-7B") is None


# ------------------------------------------------------------------------------------------------------------ memory


def test_the_state_of_a_model_is_shared_out_by_zero():
    """7,615,616,512 parameters on 8 GPUs: ZeRO-2 has 2 B of each and 16/8 B of the rest, ZeRO-3 18/8 B of all."""
    P = 7_615_616_512
    words = f"rl --actor.model_name_or_path Qwen2.5-7B --train.colocate_all {NO_KL}"
    two = parts(planned("8xH200", f"{words} --ds.zero_stage 2"), "update")
    three = parts(planned("8xH200", f"{words} --ds.zero_stage 3"), "update")
    assert (two["actor weights"], two["optimizer"], two["gradients"]) == (2 * P, 12 * P / 8, 4 * P / 8)
    assert (three["actor weights"], three["optimizer"], three["gradients"]) == (2 * P / 8, 12 * P / 8, 4 * P / 8)


def test_micro_batches_share_prompts():
    """Budget 16,384 of samples of 256 + 512: 21 in a micro-batch, eight of which share a prompt, so that of 768 tokens
    512 + 256/8 = 544 are computed. A token of Qwen2.5-1.5B keeps 28 · 2 · (6.6 · 1536 + 4 · 8960) bytes."""
    words = f"rl --actor.model_name_or_path Qwen2.5-1.5B {NO_KL} --train.dynamic_batch_enable --data.max_len 768"
    words += " --train.max_tokens_per_gpu 16384 --rollout.max_new_tokens 512 --rollout.batch_size 64"
    found = parts(planned("1xH200", words), "update")["activations"]
    assert found == pytest.approx(16_384 * 544 / 768 * 28 * 2 * (6.6 * 1536 + 4 * 8960), rel=0.001)


@pytest.mark.parametrize(
    ("budget", "samples"),
    [
        # 21 have room, of two prompts 16, in 32 micro-batches.
        (16_384, 16),
        # 42 have room, of five prompts 40, in 13 micro-batches, which hold five or fewer.
        (32_768, 40),
        # 133 have room, of 16 prompts 128, in four micro-batches.
        (102_400, 128),
        # 170 have room, of 21 prompts 168: the 64 prompts of a round need four micro-batches, of 16.
        (130_560, 128),
        # Five have room, of a prompt that does not fit as a whole.
        (4_096, 5),
    ],
)
def test_samples_of_one_length_fill_micro_batches_by_whole_prompts(budget, samples):
    words = f"rl --actor.model_name_or_path Qwen2.5-1.5B {NO_KL} --train.dynamic_batch_enable --data.max_len 768"
    words += f" --train.max_tokens_per_gpu {budget} --rollout.max_new_tokens 512 --rollout.batch_size 64"
    found = parts(planned("1xH200", words, Expected(prompt_tokens=256, response_tokens=512)), "update")["activations"]
    computed = samples * (512 + 256 / min(8, samples))
    assert found == pytest.approx(computed * 28 * 2 * (6.6 * 1536 + 4 * 8960), rel=0.001)
    real = by_tokens(range(512), [768] * 512, budget=budget, families=[i // 8 for i in range(512)])
    assert max(map(len, real)) == samples


def test_what_was_measured_on_an_h200_is_near():
    """bench.trainer, `round`: 48 GiB of torch's allocator. bench.memory: 7.2 GiB of the 135M shape, bench.doctor 8.0."""
    words = f"{NO_KL} --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --data.max_len 768"
    words += " --rollout.max_new_tokens 512 --rollout.batch_size 64"
    for name, measured in (("Qwen2.5-1.5B", 48), ("SmolLM2-135M", 7.2)):
        command = f"rl --actor.model_name_or_path {name} {words}"
        ratios = []
        for known in (Expected(), Expected(prompt_tokens=256, response_tokens=512)):
            found = parts(planned("1xH200", command, known), "update")
            training = sum(found[part] for part in ("actor weights", "optimizer", "gradients", "activations", "logits"))
            ratios.append(training / GIB / measured)
        assert 0.95 < ratios[1] < 1.05
        assert max(1, ratios[1]) < ratios[0] < 1.35


def test_an_engine_of_its_own_has_its_devices_memory():
    plan = planned("16xH100", f"rl --actor.model_name_or_path Qwen2.5-7B --train.launcher ray {NO_KL} "
                   "--actor.num_gpus_per_node 8 --vllm.num_engines 8 --ds.zero_stage 3")  # fmt: skip
    assert [pool.name for pool in plan.pools] == ["actor", "vllm"]
    found = parts(plan, "generate", pool=1)
    assert found["engine weights"] == 2 * 7_615_616_512
    assert sum(found.values()) <= 0.95 * GPUS["H100"].memory


def test_sleeping_states_are_away_while_engines_sample():
    words = f"rl --actor.model_name_or_path Qwen2.5-7B --train.colocate_all {NO_KL} --ds.zero_stage 3"
    assert "optimizer" in parts(planned("8xH100", words), "generate")
    assert "optimizer" not in parts(planned("8xH100", f"{words} --ds.enable_sleep"), "generate")


def test_an_adapter_has_little_state():
    full = planned("1xH200", f"rl --actor.model_name_or_path Qwen2.5-7B {NO_KL} --actor.gradient_checkpointing_enable")
    lora = planned("1xH200", f"rl --actor.model_name_or_path Qwen2.5-7B {NO_KL} --actor.gradient_checkpointing_enable "
                   "--ds.lora.rank 16")  # fmt: skip
    assert parts(lora, "update")["optimizer"] < parts(full, "update")["optimizer"] / 100
    assert lora.fits


def test_steps_and_hours_follow_from_the_data():
    """10,000 prompts in rounds of 64: 156 whole rounds."""
    words = f"rl --actor.model_name_or_path Qwen2.5-0.5B {NO_KL} --rollout.batch_size 64 --data.max_len 1024"
    plan = planned("1xH200", words, Expected(prompt_tokens=100, response_tokens=300, records=10_000))
    assert plan.steps == 156
    assert plan.hours == pytest.approx(156 * plan.step_seconds / 3600)
    assert plan.tokens_per_step == 64 * 8 * 400
    sft = planned("1xH200", "sft --model.model_name_or_path Qwen2.5-0.5B --data.dataset d.jsonl",
                  Expected(prompt_tokens=500, records=1000))  # fmt: skip
    assert sft.steps == 8 * 2  # batches of 128, twice


def test_async_hides_the_shorter_of_sampling_and_training():
    words = f"rl --actor.model_name_or_path Qwen2.5-1.5B --train.launcher ray {NO_KL} --actor.num_gpus_per_node 4 "
    words += "--vllm.num_engines 4 --rollout.batch_size 64 --data.max_len 1024"
    sync, beside = planned("8xH100", words), planned("8xH100", f"{words} --train.async_enable")
    times = {time.name: time.seconds.total for time in beside.times}
    assert sync.step_seconds == pytest.approx(sum(times.values()), rel=0.01)
    assert beside.step_seconds == pytest.approx(max(times.pop("generate"), sum(times.values())))


def test_more_devices_than_there_are_is_a_problem():
    words = f"rl --actor.model_name_or_path Qwen2.5-0.5B --train.launcher ray {NO_KL} --actor.num_gpus_per_node 8"
    plan = planned("8xH100", f"{words} --vllm.num_engines 8")
    assert [problem.kind for problem in plan.problems] == ["devices"]
    assert "8 short" in plan.problems[0].text


# -------------------------------------------------------------------------------------------------- what does not fit

DO_NOT_FIT = {
    "7B on one": ("1xH100", f"rl --actor.model_name_or_path Qwen2.5-7B {NO_KL}"),
    "14B, 8k": ("8xH100", f"rl --actor.model_name_or_path Qwen2.5-14B --train.colocate_all {DATA} --data.max_len 8192"),
    "32B, ZeRO-2": ("8xH100", f"rl --actor.model_name_or_path Qwen2.5-32B --train.colocate_all {NO_KL}"),
    "70B, ZeRO-3": (
        "8xH200",
        f"rl --actor.model_name_or_path Llama-3.1-70B --train.colocate_all --ds.zero_stage 3 {NO_KL}",
    ),
    "70B, apart": (
        "8x8xH100",
        f"rl --actor.model_name_or_path Llama-3.1-70B --actor.num_nodes 4 --vllm.num_engines 32 --ds.zero_stage 3 "
        f"{NO_KL}",
    ),
    "8B SFT on a 4090": ("1xRTX4090", "sft --model.model_name_or_path Llama-3.1-8B --data.dataset d.jsonl"),
    "72B SFT": (
        "8xA100-80",
        "torchrun --nproc_per_node 8 -m openrlhf.cli.train_sft --model.model_name_or_path Qwen2.5-72B --data.dataset "
        "d.jsonl --data.max_len 4096",
    ),
    "14B DPO": (
        "8xA100-40",
        "torchrun --nproc_per_node 8 -m openrlhf.cli.train_dpo --model.model_name_or_path Qwen2.5-14B --data.dataset "
        "d.jsonl --data.max_len 2048",
    ),
    "8B, a large share": (
        "4xL40S",
        f"rl --actor.model_name_or_path Qwen3-8B --train.colocate_all {DATA} --vllm.gpu_memory_utilization 0.9",
    ),
    "a mixture, 32k": (
        "8xH200",
        f"rl --actor.model_name_or_path Qwen3-30B-A3B --train.colocate_all {NO_KL} --data.max_len 32768 "
        "--train.dynamic_batch_enable --train.max_tokens_per_gpu 32768",
    ),
    "7B, 128k": (
        "8xH100",
        f"rl --actor.model_name_or_path Qwen2.5-7B --train.colocate_all {DATA} --data.max_len 131072 "
        "--rollout.max_new_tokens 120000",
    ),
}


@pytest.mark.parametrize("name", DO_NOT_FIT)
def test_a_run_that_does_not_fit_is_found_and_mended(name):
    """Before anything is loaded. The changed command parses, fits by its plan, and keeps all other flags; none of the
    changes can be left out."""
    where, words = DO_NOT_FIT[name]
    plan = planned(where, words)
    assert not plan.fits
    assert any(problem.kind == "memory" for problem in plan.problems)
    command, here = read_command(shlex.split(words)), machines(where)
    plan_of = planner(here, Expected(), READER)
    found = fitted(command, here, plan_of)
    assert found is not None
    assert plan_of(read_command(shlex.split(str(found.command)))).fits
    before, after = command.config(), found.command.config()
    assert after.data == before.data
    changed = {path for step in found.steps for path in step.changes}
    if "ds.lora.rank" not in changed:
        assert after.ds.lora == before.ds.lora
    for path in changed - {"processes"}:
        group = {
            other: value for step in found.steps for other, value in step.changes.items() if path not in step.changes
        }
        ranks = group.pop("processes", None)
        fewer = command.on_ranks(ranks, per_node=here.per_node) if ranks else command
        assert not plan_of(fewer.changed(group)).fits


def test_a_run_that_fits_is_left_alone():
    command = read_command(shlex.split(f"rl --actor.model_name_or_path Qwen2.5-0.5B {NO_KL}"))
    found = fitted(command, machines("1xH100"), planner(machines("1xH100"), Expected(), READER))
    assert found is not None
    assert (found.steps, found.command) == ((), command)


def test_nothing_fits_a_model_into_a_device_that_is_smaller_than_its_weights():
    """70B in 4 bits is 56 GB."""
    words = f"rl --actor.model_name_or_path Llama-3.1-70B {NO_KL}"
    here = machines("1xRTX4090")
    assert fitted(read_command(shlex.split(words)), here, planner(here, Expected(), READER)) is None


def test_every_step_names_flags_that_exist():
    words = f"rl --actor.model_name_or_path x {DATA} --train.colocate_all --vllm.gpu_memory_utilization 0.5"
    command = read_command(shlex.split(words))
    steps = list(steps_for(command, machines("2x8xH100")))
    assert len({step.axis for step in steps}) > 8
    assert {path for step in steps for path in step.changes} <= flags_of("train_ppo_ray").keys()


def test_a_small_device_on_a_cpu_is_mended_by_smaller_micro_batches(tmp_path):
    """The same search on a CPU: 1 GiB has no room for 64 samples in a micro-batch."""
    config = {**KNOWN["Qwen2.5-0.5B"], "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    cpu = Device(name="cpu", memory=GIB, flops=1e10, bandwidth=1e10, link=1e10, network=1e9, is_cpu=True)
    words = f"rl --actor.model_name_or_path {tmp_path} {NO_KL} --data.max_len 256 --train.micro_batch_size 64"
    command, here = read_command(shlex.split(words)), Machines(1, 1, cpu)
    found = fitted(command, here, planner(here, Expected(), READER))
    assert found is not None
    assert {path for step in found.steps for path in step.changes} == {"train.micro_batch_size"}
    roomy = Machines(1, 1, replace(cpu, memory=16 * GIB))
    assert planner(roomy, Expected(), READER)(command).fits
