"""The flag contract: every name of data/flags.json, in every command it belongs to, in both dialects.

Where ours differs on purpose, the difference is listed here; everything else must match exactly.
"""

import json
from pathlib import Path

import pytest

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.config import ROOTS, parse
from openrlhf.config.document import render
from openrlhf.config.schema import flags_of, value_at

FLAGS = json.loads((Path(__file__).parent / "data" / "flags.json").read_text())
REPOSITORY = Path(__file__).parents[2]

# name -> default here. None where the right value depends on the machine or the algorithm.
CHANGED_DEFAULTS = {
    "actor.num_gpus_per_node": None,  # unset is the devices that are there
    "critic.num_gpus_per_node": None,
    "ref.num_gpus_per_node": None,
    "reward.num_gpus_per_node": None,
    "rollout.n_samples_per_prompt": None,  # 1, or 8 for group estimators
    "ds.param_dtype": "auto",  # bf16 on a GPU, fp32 on a CPU
    "vllm.gpu_memory_utilization": None,  # auto: 0.95, or what training leaves of a device that both share
    "algo.advantage.is_correction_enable": None,  # auto: where engines sample with rounded weights
    "vllm.enable_sleep": None,  # auto: where engine and training do not fit beside each other
    "host": "127.0.0.1",  # a server is open to the network only where somebody asks for it
}
CHANGED_CHOICES = {
    "ds.param_dtype": ["auto", "bf16", "fp16", "fp32"],  # auto is ours
    "ds.grad_accum_dtype": ["bf16", "fp16", "fp32"],  # what the backend takes, so that a slip is found at once
    "actor.policy_loss_type": list(POLICY_LOSSES),
    "algo.advantage.estimator": list(ESTIMATORS),
    "algo.advantage.is_correction_type": list(CORRECTIONS),
}

TRAINERS = ("train_sft", "train_rm", "train_dpo", "train_ppo_ray")
# (name, type, default) -> commands
ADDED = {
    ("train.launcher", "str auto/local/ray", "auto"): ("train_ppo_ray",),
    ("train.backend", "str auto/torch/deepspeed", "auto"): ("train_sft", "train_rm", "train_dpo"),
    ("train.async_share_device", "switch", False): ("train_ppo_ray",),
    ("train.max_restarts", "int", 3): ("train_ppo_ray",),
    ("max_steps", "int", None): ("train_ppo_ray",),
    ("rollout.top_k", "int", -1): ("train_ppo_ray",),
    ("rollout.abort_stragglers", "switch", False): ("train_ppo_ray",),
    ("rollout.agent_hosts", "int", None): ("train_ppo_ray",),
    ("rollout.step_timeout", "float", 600.0): ("train_ppo_ray",),
    ("data.tokenizer_chat_template", "str", None): ("train_ppo_ray",),
    ("data.chat_template_kwargs", "str", None): TRAINERS,
    ("rollout.stop", "str x*", None): ("train_ppo_ray",),
    ("rollout.exact", "switch", False): ("train_ppo_ray",),
    ("data.long_prompts", "str cut/skip/error", "cut"): ("train_ppo_ray",),
    ("data.curriculum", "str off/success/difficulty/solved_last", "off"): ("train_ppo_ray",),
    ("data.curriculum_explore", "float", 0.1): ("train_ppo_ray",),
    ("data.curriculum_half_life", "float", None): ("train_ppo_ray",),
    ("data.curriculum_threshold", "float", 0.8): ("train_ppo_ray",),
    ("data.curriculum_score_range", "float x2", (0.0, 1.0)): ("train_ppo_ray",),
    ("data.difficulty_key", "str", "difficulty"): ("train_ppo_ray",),
    ("data.allow_image_urls", "switch", False): TRAINERS,
    ("data.image_key", "str", "images"): ("train_sft", "train_rm", "train_dpo"),
    ("data.max_images_per_prompt", "int", 0): ("train_sft", "train_rm", "train_dpo"),
    ("train.total_steps", "int", None): TRAINERS,
    ("train.stall_timeout", "float", 1800.0): TRAINERS,
    ("train.max_skipped_steps", "int", 5): TRAINERS,
    ("vllm.sync_verify", "switch", False): ("train_ppo_ray",),
    ("vllm.lora_sync", "str adapter/merged", None): ("train_ppo_ray",),
    ("vllm.processes_per_engine", "int", 1): ("train_ppo_ray",),
    ("vllm.quantization", "str fp8", None): ("train_ppo_ray",),
    ("vllm.speculation", "str ngram/suffix/history", None): ("train_ppo_ray",),
    ("vllm.speculation_tokens", "int", 4): ("train_ppo_ray",),
    ("world.tasks", "str", None): ("train_ppo_ray",),
    ("world.options", "str", None): ("train_ppo_ray",),
    ("world.samples", "int", 10_000): ("train_ppo_ray",),
    ("world.eval_samples", "int", 100): ("train_ppo_ray",),
    ("world.python", "str", None): ("train_ppo_ray",),
    ("world.processes", "int", 1): ("train_ppo_ray",),
    ("world.timeout", "float", 120.0): ("train_ppo_ray",),
    ("world.opponent", "str", "self"): ("train_ppo_ray",),
    ("world.eval_opponent", "str", None): ("train_ppo_ray",),
    ("vllm.logits_dtype", "str auto/fp32/model", "auto"): ("train_ppo_ray",),
    ("vllm.pipeline_parallel_size", "int", 1): ("train_ppo_ray",),
    ("vllm.health_timeout", "float", 120.0): ("train_ppo_ray",),
    ("reward.timeout", "float", 180.0): ("train_ppo_ray",),
    ("reward.weights", "float x*", None): ("train_ppo_ray",),
    ("reward.api_key", "str", None): ("train_ppo_ray",),
    ("algo.advantage.pass_k", "int", 4): ("train_ppo_ray",),
    ("algo.advantage.turns", "str outcome/to_go/step", None): ("train_ppo_ray",),
    ("algo.loss_agg", "str token/sequence/constant/prompt_mean/token_sum", None): ("train_ppo_ray",),
    ("algo.router_replay", "switch", None): ("train_ppo_ray",),
    ("algo.sampling_mask", "int", None): ("train_ppo_ray",),
    ("teacher.model_name_or_path", "str", None): ("train_ppo_ray",),
    ("teacher.loss", "str reverse/forward/js", None): ("train_ppo_ray",),
    ("teacher.policy", "str initial/current", None): ("train_ppo_ray",),
    ("teacher.prompt_key", "str", None): ("train_ppo_ray",),
    ("teacher.remote_url", "str", None): ("train_ppo_ray",),
    ("teacher.api_key", "str", None): ("train_ppo_ray",),
    ("teacher.timeout", "float", 180.0): ("train_ppo_ray",),
    ("data.steps_key", "str", "steps"): ("train_rm",),
    ("data.labels_key", "str", "labels"): ("train_rm",),
    ("data.step_separator", "str", r"\n\n"): ("train_rm",),
    ("reward.steps", "str separator/token", None): ("train_ppo_ray",),
    ("reward.step_separator", "str", r"\n\n"): ("train_ppo_ray",),
    ("reward.step_total", "str min/last/mean/sum", "min"): ("train_ppo_ray",),
    ("reward.step_logits", "switch", False): ("train_ppo_ray",),
    ("teacher.top_k", "int", 64): ("train_ppo_ray",),
    ("teacher.coef", "float", 1.0): ("train_ppo_ray",),
    ("teacher.gamma", "float", 0.0): ("train_ppo_ray",),
    ("teacher.offload", "switch", False): ("train_ppo_ray",),
    ("teacher.num_nodes", "int", 1): ("train_ppo_ray",),
    ("teacher.num_gpus_per_node", "int", None): ("train_ppo_ray",),
    ("eval.at_start", "switch", False): ("train_ppo_ray",),
    ("logger.rollouts_per_step", "int", 4): ("train_ppo_ray",),
    ("data.trust_remote_code", "switch", False): TRAINERS,
    ("actor.trust_remote_code", "switch", False): ("train_ppo_ray",),
    ("model.trust_remote_code", "switch", False): ("train_sft", "train_rm", "train_dpo", "serve_rm", "lora_combiner"),
    ("logger.run_dir", "str", None): TRAINERS,
    ("ckpt.auto_resume", "switch", False): TRAINERS,
    ("ckpt.signal_deadline", "float", 90.0): TRAINERS,
    ("model.loss_type", "str dpo/kto", "dpo"): ("train_dpo",),
    ("data.response_key", "str", "response"): ("train_dpo",),
    ("data.label_key", "str", "label"): ("train_dpo",),
    ("api_key", "str", None): ("serve_rm",),
    ("max_tokens_per_gpu", "int", 16192): ("serve_rm",),
    ("max_queue", "int", 4096): ("serve_rm",),
    ("max_request_bytes", "int", 16777216): ("serve_rm",),
    ("max_query_chars", "int", 1000000): ("serve_rm",),
    ("read_timeout", "float", 60.0): ("serve_rm",),
}

# A value that differs from the default, where the usual one (below) is not allowed.
SAMPLES = {
    "ckpt.max_num": ["5"],
    "lr_scheduler": ["linear"],
    "actor.lr_scheduler": ["linear"],
    "critic.lr_scheduler": ["linear"],
    "actor.dual_clip": ["1.5"],
    "data.dataset_probs": ["1.0"],
    "data.prompt_probs": ["1.0"],
    "data.input_template": ["Q: {}"],
    "ds.grad_accum_dtype": ["bf16"],
    "reward.remote_url": ["http://h/get_reward"],
}
# What else must be said for the flag to make sense.
COMPANIONS = {
    "train.partial_rollout_enable": ["--train.async_enable"],
    "data.multiturn": ["--data.apply_chat_template"],
    "algo.dynamic_filtering_enable": ["--rollout.n_samples_per_prompt", "4"],
    "reward.overlong_buffer_len": ["--rollout.max_new_tokens", "64"],
}


def _cases():
    for row in FLAGS:
        for command, facts in row["commands"].items():
            yield pytest.param(row, command, facts, id=f"{command}-{row['name']}")


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def _sample(row, facts):
    """Words that give the flag another value than its default, and that value."""
    name = row["name"]
    if facts["type"] == "flag":
        return ([], True) if not facts["default"] else (["false"], False)
    words = SAMPLES.get(name)
    if words is None and facts["choices"]:
        words = [facts["choices"][-1]]
    if words is None:
        one, two = {"int": ("3", "4"), "float": ("0.25", "0.75"), "str": ("word", "other")}[facts["type"]]
        words = [one] if facts["count"] == 1 else [one, two]
    kind = {"int": int, "float": float, "str": str}[facts["type"]]
    values = [kind(word) for word in words]
    return words, (values[0] if facts["count"] == 1 else values)


@pytest.mark.parametrize(("row", "command", "facts"), _cases())
def test_flag_has_the_known_type_default_and_choices(row, command, facts):
    if row["name"].endswith("muon.no_nesterov"):
        path = row["name"].replace("no_nesterov", "nesterov")
        assert value_at(parse(command, [f"--{row['name']}"]), path) is False
        return
    spec = flags_of(command)[row["name"]]
    assert spec.flag.help
    assert spec.shape.kind is {"flag": bool, "int": int, "float": float, "str": str}[facts["type"]]
    assert spec.shape.count == facts["count"]
    choices = CHANGED_CHOICES.get(row["name"], facts["choices"])
    assert (list(spec.shape.choices) if spec.shape.choices else None) == choices
    expected = CHANGED_DEFAULTS.get(row["name"], facts["default"])
    if expected == "inf":
        expected = float("inf")
    if facts["count"] == "*":
        expected = [expected]
    if isinstance(expected, str) and expected.endswith("<time>"):
        assert spec.default.startswith(expected.removesuffix("<time>"))
    else:
        assert _plain(spec.default) == expected
    assert row["name"] not in CHANGED_DEFAULTS or facts["default"] != expected, "no longer a difference"


@pytest.mark.parametrize(("row", "command", "facts"), _cases())
def test_flag_parses_in_both_dialects(row, command, facts):
    name = row["name"]
    if name.endswith("muon.no_nesterov"):
        return
    words, expected = _sample(row, facts)
    assert expected != facts["default"]
    extra = COMPANIONS.get(name, [])
    for spelling in (name, *row["flat"]):
        config = parse(command, [*extra, f"--{spelling}", *words])
        assert _plain(value_at(config, name)) == expected, spelling
        if len(words) == 1:
            assert value_at(parse(command, [*extra, f"--{spelling}={words[0]}"]), name) == expected
        if facts["type"] == "flag":
            for off in (["--no-" + spelling], [f"--{spelling}", "false"], [f"--{spelling}=False"]):
                assert value_at(parse(command, [*extra, *off]), name) is False
            assert value_at(parse(command, [*extra, f"--{spelling}", "true"]), name) is True


@pytest.mark.parametrize("command", ROOTS)
def test_a_command_has_these_flags_and_no_others(command):
    known = {row["name"] for row in FLAGS if command in row["commands"] and not row["name"].endswith("no_nesterov")}
    added = {name for (name, _, _), commands in ADDED.items() if command in commands}
    assert set(flags_of(command)) == known | added
    assert not known & added


@pytest.mark.parametrize(("fact", "commands"), ADDED.items(), ids=[name for name, _, _ in ADDED])
def test_added_flags(fact, commands):
    name, kind, default = fact
    for command in commands:
        spec = flags_of(command)[name]
        assert str(spec.shape) == kind
        assert spec.default == default
        assert spec.flag.help


def test_the_table_in_docs_is_up_to_date():
    """If this fails: python -m openrlhf.config.document > docs/flags.md"""
    assert (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8") == render()
