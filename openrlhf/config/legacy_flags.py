"""Names of older documents, and of other tools, that are not plain aliases. Six kinds:

- a switch that stands for a value (`--bf16`),
- one half of a pair of numbers (`--clip_eps_low`, `--prompt_max_len`),
- a name that is accepted and does nothing (`--perf`),
- a name that is gone (`--pretrain_data`): an error that says what to use,
- another tool's name for a flag that means the same (`--num_generations`),
- another tool's name for what is said in another way here (`--gradient_accumulation_steps`): an error that says how.
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

_MODEL = "actor.model_name_or_path model.model_name_or_path"
FOREIGN = {
    # of TRL and of transformers' trainer
    "num_generations": "rollout.n_samples_per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "per_device_train_batch_size": "train.micro_batch_size",
    "num_train_epochs": "train.num_episodes train.max_epochs",
    "num_iterations": "train.max_epochs",
    "num_ppo_epochs": "train.max_epochs",
    "learning_rate": "actor.adam.lr adam.lr",
    "weight_decay": "actor.adam.weight_decay adam.weight_decay",
    "lr_scheduler_type": "actor.lr_scheduler lr_scheduler",
    "warmup_ratio": "actor.lr_warmup_ratio lr_warmup_ratio",
    "max_grad_norm": "actor.max_norm max_norm",
    "epsilon": "actor.eps_clip",
    "cliprange": "actor.eps_clip",
    "cliprange_value": "critic.value_clip",
    "kl_coef": "algo.kl.init_coef",
    "lam": "algo.advantage.lambd",
    "model_name_or_path": _MODEL,
    "ref_model_name_or_path": "ref.model_name_or_path",
    "dataset_name": "data.prompt_dataset data.dataset",
    "dataset_train_split": "data.prompt_split data.dataset_split",
    "dataset_test_split": "eval.split",
    "max_length": "data.max_len",
    "max_seq_length": "data.max_len",
    "output_dir": "ckpt.output_dir",
    "save_total_limit": "ckpt.max_num",
    "run_name": "logger.wandb.run_name",
    "lora_r": "ds.lora.rank",
    "lora_target_modules": "ds.lora.target_modules",
    # of verl
    "adv_estimator": "algo.advantage.estimator",
    "entropy_coeff": "actor.entropy_coef",
}
"""Another tool's name -> the flags that mean the same. A command has the first of them that it knows; a name that the
command has already keeps its own meaning."""

_BATCHES = (
    "--train.batch_size counts the samples of an optimizer step over all workers, --train.micro_batch_size those of a "
    "forward; what lies between follows"
)
_LENGTHS = "--data.max_len counts prompt and response together, --rollout.max_new_tokens the response"
_LOGGERS = "use --logger.wandb.key or --logger.tensorboard_dir"
HINTS = {
    "gradient_accumulation_steps": _BATCHES,
    "per_device_eval_batch_size": "evaluations have forwards as large as those of training",
    "max_prompt_length": f"{_LENGTHS}; or give --prompt_max_len and --generate_max_len",
    "epsilon_high": "use --actor.eps_clip_low_high LOW HIGH",
    "beta": "the KL coefficient is --algo.kl.init_coef",
    "kl_loss_coef": "use --algo.kl.init_coef with --algo.kl.use_loss",
    "loss_type": "use --actor.policy_loss_type for the loss, --algo.loss_agg for its mean",
    "scale_rewards": "--algo.advantage.estimator dr_grpo does not divide by the deviation, group_norm does",
    "use_vllm": "vLLM is used where it is installed and there is a GPU; --vllm.num_engines 0 does without",
    "vllm_mode": "engines share the actor's GPUs with --train.colocate_all",
    "reward_funcs": "use --reward.remote_url with .py files that have a reward_func",
    "report_to": _LOGGERS,
    "with_tracking": _LOGGERS,
    "logging_dir": "use --logger.run_dir",
    "torch_dtype": "use --ds.param_dtype bf16, fp16 or fp32",
    "dtype": "use --ds.param_dtype bf16, fp16 or fp32",
    "fp16": "use --ds.param_dtype fp16",
    "use_peft": "use --ds.lora.rank",
    "deepspeed": "use --ds.zero_stage and the other flags of ds; DeepSpeed's own file is not read",
    "resume_from_checkpoint": "use --ckpt.load_enable, which goes on from --ckpt.path",
    "eval_strategy": "use --eval.steps",
    "evaluation_strategy": "use --eval.steps",
    "save_strategy": "use --ckpt.save_steps",
    "max_steps": "use --train.total_steps",
    "push_to_hub": "there is no such thing: upload the folder of --ckpt.output_dir",
    "packing": "sequences are always packed",
    "dataset_text_field": "use --data.input_key (and --model.pretrain_mode_enable for raw text)",
    "assistant_only_loss": "the loss is on answers; --data.multiturn has it on every assistant turn",
    "completion_only_loss": "the loss is on answers, unless --model.pretrain_mode_enable has it on all tokens",
    "tensor_parallel_size": "use --vllm.tensor_parallel_size for engines, --ds.tensor_parallel_size for training",
    "desirable_loss_weight": "KTO weighs desirable and undesirable answers alike",
    "undesirable_loss_weight": "KTO weighs desirable and undesirable answers alike",
    "input_key": "of pairs it is --data.prompt_key",
    "output_key": "use --data.chosen_key and --data.rejected_key, or with --model.loss_type kto --data.response_key",
    # of verl, which writes name=value
    "algorithm.adv_estimator": "use --algo.advantage.estimator",
    "algorithm.kl_ctrl.kl_coef": "use --algo.kl.init_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "use --algo.kl.init_coef with --algo.kl.use_loss",
    "actor_rollout_ref.actor.optim.lr": "use --actor.adam.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "use --train.batch_size, which counts samples, not prompts",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "use --train.micro_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "use --train.max_epochs",
    "actor_rollout_ref.actor.clip_ratio": "use --actor.eps_clip",
    "actor_rollout_ref.model.path": "use --actor.model_name_or_path",
    "actor_rollout_ref.rollout.n": "use --rollout.n_samples_per_prompt",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "use --vllm.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "use --vllm.tensor_parallel_size",
    "critic.model.path": "use --critic.model_name_or_path",
    "custom_reward_function.path": "use --reward.remote_url",
    "data.train_files": "use --data.prompt_dataset",
    "data.val_files": "use --eval.dataset",
    "data.train_batch_size": "use --rollout.batch_size",
    "data.max_prompt_length": _LENGTHS,
    "data.max_response_length": "use --rollout.max_new_tokens",
    "data.prompt_key": "use --data.input_key",
    "reward_model.model.path": "use --reward.model_name_or_path",
    "trainer.n_gpus_per_node": "use --actor.num_gpus_per_node",
    "trainer.nnodes": "use --actor.num_nodes",
    "trainer.save_freq": "use --ckpt.save_steps",
    "trainer.test_freq": "use --eval.steps",
    "trainer.total_epochs": "use --train.num_episodes",
}
"""Other tools' names for what is said in another way here, and how. Told where a command has every flag of the hint."""
