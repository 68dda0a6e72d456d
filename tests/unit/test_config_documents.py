"""Whole commands as documents write them, in both dialects: all parse, none needs editing."""

import shlex

import pytest

from openrlhf.config import parse, require_runnable

COMMANDS = {
    "ppo-separate-groups": ("train_ppo_ray", """
        --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8
        --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8
        --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_critic_reward --colocate_actor_ref
        --pretrain org/sft --reward_pretrain org/rm --save_path ckpt/out --micro_train_batch_size 8
        --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 1024 --max_epochs 1
        --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7
        --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data org/prompts --input_key context_messages
        --apply_chat_template --normalize_reward --packing_samples --adam_offload --flash_attn
        --gradient_checkpointing --use_wandb token --perf --actor_init_on_gpu"""),
    "grpo-hybrid-flat": ("train_ppo_ray", """
        --actor_num_nodes 1 --actor_num_gpus_per_node 8 --critic_num_nodes 0 --reward_num_nodes 0
        --ref_num_nodes 0 --ref_num_gpus_per_node 0 --vllm_num_engines 8 --vllm_tensor_parallel_size 1
        --colocate_all_models --vllm_gpu_memory_utilization 0.6 --vllm_enable_sleep --deepspeed_enable_sleep
        --vllm_sync_backend nccl --advantage_estimator group_norm --use_kl_loss --kl_estimator k3
        --init_kl_coef 1e-3 --pretrain m --remote_rm_url http://localhost:5000/get_reward --critic_pretrain None
        --rollout_batch_size 128 --train_batch_size 1024 --n_samples_per_prompt 8 --use_dynamic_batch
        --train_max_tokens_per_gpu 16384 --rollout_max_tokens_per_gpu 32768 --prompt_data d --input_key prompt
        --label_key answer --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0 --reward_clip_range 10.0
        --clip_eps_low 0.2 --clip_eps_high 0.28 --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5.0
        --use_icepop --save_steps 20 --ckpt_path c --save_hf_ckpt --max_ckpt_num 3 --load_checkpoint"""),
    "grpo-dotted": ("train_ppo_ray", """
        --actor.model_name_or_path m --reward.remote_url examples/python/reward_func.py
        --data.prompt_dataset p.jsonl --data.label_key answer --data.apply_chat_template --data.max_len 4096
        --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024
        --train.dynamic_batch_enable --algo.advantage.estimator group_norm --algo.kl.init_coef 0
        --train.colocate_all --vllm.num_engines 8 --actor.num_gpus_per_node 8 --vllm.enable_sleep
        --ds.enable_sleep --ds.zero_stage 3 --ds.packing_samples --actor.adam.lr 5e-7"""),
    "async-agent": ("train_ppo_ray", """
        --actor.model_name_or_path m --train.agent_func_path agent.py --data.prompt_dataset p --max_steps 3
        --train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable
        --rollout.vllm_generate_batch_size 2048 --vllm.num_engines 4 --actor.num_gpus_per_node 4
        --train.colocate_all --algo.advantage.estimator reinforce_baseline"""),
    "sft-flat": ("train_sft", """
        --local_rank=0 --max_len 4096 --dataset Open-Orca/OpenOrca --input_key question --output_key response
        --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000 --pretrain m --save_path s
        --save_steps -1 --logging_steps 1 --eval_steps -1 --zero_stage 2 --max_epochs 1 --packing_samples --bf16
        --learning_rate 5e-6 --gradient_checkpointing --lora_rank 64 --use_ds_universal_ckpt false"""),
    "sft-mixed": ("train_sft", """
        --actor.model_name_or_path m --actor.gradient_checkpointing_enable --data.dataset d
        --data.input_template $'User: {}\\nAssistant: ' --adam.lr 5e-6 --ds.param_dtype bf16"""),
    "rm": ("train_rm", """
        --save_path s --save_steps -1 --train_batch_size 256 --micro_train_batch_size 1 --pretrain m --bf16
        --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 9e-6 --dataset d --apply_chat_template
        --chosen_key chosen --rejected_key rejected --flash_attn --packing_samples --value_prefix_head score
        --gradient_checkpointing --attn_implementation flash_attention_2"""),
    "dpo": ("train_dpo", """
        --pretrain m --ref_pretrain r --dataset d --beta 0.1 --ipo --label_smoothing 0.1 --nll_loss_coef 0.1
        --tokenizer_chat_template {{x}} --ref_offload --learning_rate 5e-7 --bf16"""),
    "serve": ("serve_rm", """
        --reward_pretrain m --port 5000 --bf16 --flash_attn --normalize_reward --max_len 8192 --batch_size 16"""),
    "merge": ("lora_combiner", "--model_path m --lora_path l --output_path o --is_rm --bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_documented_command(name):
    command, text = COMMANDS[name]
    config = parse(command, shlex.split(text))
    require_runnable(config)


def test_both_dialects_of_one_command_give_one_configuration():
    flat = "--pretrain m --reward_pretrain r --n_samples_per_prompt 4 --colocate_all_models --async_queue_size 3"
    dotted = (
        "--actor.model_name_or_path m --reward.model_name_or_path r --rollout.n_samples_per_prompt 4 "
        "--train.colocate_all --train.async_queue_size=3"
    )
    assert parse("train_ppo_ray", flat.split()) == parse("train_ppo_ray", dotted.split())
