#!/usr/bin/env bash
# DAPO on the hybrid engine: clip-higher, dynamic sampling, a mean over tokens, a soft penalty of overlong answers, no
# KL and so no reference model.
# Made for 1 node with 8 GPUs of 80 GB and a 7B model. One command: it starts a Ray of its own.
#   MODEL=./my-model DATA=./problems.jsonl INPUT_KEY=input \
#      bash examples/scripts/train_dapo_ray_hybrid_engine.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B}
REWARD=${REWARD:-$(dirname "$0")/../python/math_reward_func.py}
DATA=${DATA:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
EVAL_DATA=${EVAL_DATA:-zhuzilin/aime-2024}
OUT=${OUT:-./ckpt/dapo}
NODES=${NODES:-1} GPUS=${GPUS:-8}
BATCH=${BATCH:-512} SAMPLES=${SAMPLES:-16} TRAIN_BATCH=${TRAIN_BATCH:-512} EPISODES=${EPISODES:-10}
MAX_LEN=${MAX_LEN:-22528} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-20480}

flags=(
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.7
   --vllm.enable_sleep --ds.enable_sleep

   # arXiv:2503.14476, with its numbers. GRPO's advantage,
   --algo.advantage.estimator group_norm
   # a clip that leaves unlikely tokens room to grow,
   --actor.eps_clip_low_high 0.2 0.28
   # prompts that all samples solve, or none, replaced, with half as many more in play for that,
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.0 1.0
   --rollout.vllm_generate_batch_size $((BATCH * 3 / 2))
   # every token of a step counting the same, those of long answers too,
   --algo.loss_agg token
   # up to −1 for the last fifth of the length (the paper: 4,096 of 20,480 tokens),
   --reward.overlong_buffer_len $((MAX_NEW_TOKENS / 5)) --reward.overlong_penalty_factor 1.0
   # and no KL: reasoning may go far from where it began.
   --algo.kl.init_coef 0
   --actor.adam.lr 1e-6 --actor.adam.weight_decay 0.1 --actor.lr_scheduler constant_with_warmup

   # A round: 512 prompts with 16 answers each, cut into 16 optimizer steps.
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 24576

   --actor.model_name_or_path "$MODEL"
   --reward.remote_url "$REWARD" --reward.timeout 60
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.label_key "$LABEL_KEY" --data.apply_chat_template
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"
   # The paper's avg@32.
   --eval.dataset "$EVAL_DATA" --eval.steps 10 --eval.n_samples_per_prompt 32 --eval.temperature 1.0

   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 10 --ckpt.load_enable
)

python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
