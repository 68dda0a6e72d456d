#!/usr/bin/env bash
# GRPO in one process, on a CPU or one GPU: no Ray, no vLLM.
#   MODEL=./my-model DATA=./prompts.jsonl REWARD=./reward.py bash examples/scripts/train_grpo_local.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a prompt data set}"
REWARD=${REWARD:-$(dirname "$0")/../python/reward_func.py}

python -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --data.prompt_dataset "$DATA" \
   --data.input_key input \
   --data.label_key label \
   --reward.remote_url "$REWARD" \
   --algo.advantage.estimator group_norm \
   --algo.kl.init_coef 0 \
   --rollout.batch_size 32 \
   --rollout.n_samples_per_prompt 8 \
   --rollout.max_new_tokens 256 \
   --data.max_len 1024 \
   --train.batch_size 256 \
   --train.dynamic_batch_enable \
   --actor.adam.lr 1e-6 \
   --vllm.num_engines 0 \
   --ckpt.output_dir ./ckpt/grpo \
   "$@"
