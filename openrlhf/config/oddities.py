"""Names of older documents that are not plain aliases. Four kinds:

- a switch that stands for a value (`--bf16`),
- one half of a pair of numbers (`--clip_eps_low`, `--prompt_max_len`),
- a name that is accepted and does nothing (`--perf`),
- a name that is gone (`--pretrain_data`): an error that says what to use.
"""

from dataclasses import dataclass
from typing import Any

from openrlhf.config.fields import Shape

SWITCH = Shape(kind=bool)
NUMBER = Shape(kind=float)
WHOLE = Shape(kind=int)

OLD_MAX_LEN = 1024
"""Default of --prompt_max_len and --generate_max_len in the documents that have them."""


@dataclass(frozen=True, slots=True)
class ValueSwitch:
    """A switch that stands for a value of another flag. `off` None: switched off it says nothing."""

    path: str
    on: Any
    off: Any = None
    enables: str | None = None
    """A switch that it turns on as well, unless that is given too."""


@dataclass(frozen=True, slots=True)
class Half:
    """A number that makes up another field together with a second number; `help` says how."""

    shape: Shape
    help: str


VALUE_SWITCHES = {
    "bf16": ValueSwitch("ds.param_dtype", on="bf16", off="fp32"),
    "flash_attn": ValueSwitch("ds.attn_implementation", on="flash_attention_2", off="sdpa"),
    "use_icepop": ValueSwitch(
        "algo.advantage.is_correction_type", on="icepop", enables="algo.advantage.is_correction_enable"
    ),
    "use_kl_estimator_k3": ValueSwitch("algo.kl.estimator", on="k3"),
    "muon.no_nesterov": ValueSwitch("muon.nesterov", on=False, off=True),
    "actor.muon.no_nesterov": ValueSwitch("actor.muon.nesterov", on=False, off=True),
    "critic.muon.no_nesterov": ValueSwitch("critic.muon.nesterov", on=False, off=True),
}

CLIP_HALVES = {
    "clip_eps_low": Half(NUMBER, "first value of --actor.eps_clip_low_high"),
    "clip_eps_high": Half(NUMBER, "second value of --actor.eps_clip_low_high"),
}
LENGTH_HALVES = {
    "prompt_max_len": Half(WHOLE, "adds to --generate_max_len: their sum is --data.max_len"),
    "generate_max_len": Half(WHOLE, "longest response; see --prompt_max_len"),
}

INERT = {
    "perf": "throughput is always logged",
    "actor_init_on_gpu": "models are always built where they run",
    "disable_trace_cache": "there is no trace cache to disable",
}
"""Accepted by every command, with a note that they do nothing, and why."""

NO_PTX = "mixing pretraining data into RL does not exist; remove the flag and train on that data with train_sft"
_NO_TOKENS = "special tokens come from the tokenizer; set them in its files"
GONE = {
    "pretrain_data": NO_PTX,
    "pretrain_data_probs": NO_PTX,
    "pretrain_split": NO_PTX,
    "colocate_actor_critic": "use --train.colocate_all, or --train.colocate_actor_ref",
    "colocate_ref_reward": "use --train.colocate_actor_ref and --train.colocate_critic_reward",
    "bos_token": _NO_TOKENS,
    "eos_token": _NO_TOKENS,
    "pad_token": _NO_TOKENS,
    "unk_token": _NO_TOKENS,
    "inference_tp_size": "use --vllm.tensor_parallel_size",
    "sft_model_path": "use --actor.model_name_or_path (train_sft, train_rm, train_dpo: --model.model_name_or_path)",
    "reward_model_path": "use --reward.model_name_or_path",
    "load_model": "name a folder of weights with --actor.model_name_or_path or --model.model_name_or_path",
    "save_hf_model": "the final model is always saved, to --ckpt.output_dir; use --ckpt.save_hf for checkpoints",
}
"""Names of older versions without an equivalent, and what to use."""
