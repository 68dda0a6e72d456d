#!/usr/bin/env bash
# GRPO as in its paper, on the hybrid engine: the group's z-score as advantage, KL to a reference as a loss.
# Made for 1 node with 8 GPUs of 80 GB and a 7B model. One command: it starts a Ray of its own.
#   MODEL=./my-model DATA=./problems.jsonl INPUT_KEY=input \
#      bash examples/scripts/train_grpo_ray_hybrid_engine.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
REWARD=${REWARD:-$(dirname "$0")/../python/math_reward_func.py}
DATA=${DATA:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
OUT=${OUT:-./ckpt/grpo}
NODES=${NODES:-1} GPUS=${GPUS:-8}
BATCH=${BATCH:-16} SAMPLES=${SAMPLES:-64} TRAIN_BATCH=${TRAIN_BATCH:-1024} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-3072} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-2048}

flags=(
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.6
   --vllm.enable_sleep --ds.enable_sleep

   # arXiv:2402.03300, with its numbers: β = 0.04 with the k3 estimate, every answer counting the same however long, and
   # one optimizer step for each round of 16 prompts with 64 answers. Later work has fewer answers and more prompts.
   --algo.advantage.estimator group_norm --algo.loss_agg sequence
   --algo.kl.init_coef 0.04 --algo.kl.use_loss --algo.kl.estimator k3
   --actor.eps_clip 0.2
   --actor.adam.lr 1e-6 --actor.lr_scheduler constant
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384

   --actor.model_name_or_path "$MODEL"
   --reward.remote_url "$REWARD" --reward.timeout 60
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.label_key "$LABEL_KEY" --data.apply_chat_template
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 50 --ckpt.load_enable
)

python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
