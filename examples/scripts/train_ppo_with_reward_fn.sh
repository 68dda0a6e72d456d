#!/usr/bin/env bash
# PPO with a critic and a reward that is a Python file: answers that can be checked need no reward model.
# Made for 1 node with 8 GPUs of 80 GB and a 7B model, on the hybrid engine. It is submitted to a Ray that runs:
# `ray start --head`. Your reward, tried first in seconds with `openrlhf check ./reward.py`:
#   MODEL=./my-model DATA=./prompts.jsonl INPUT_KEY=input REWARD=$PWD/reward.py \
#      bash examples/scripts/train_ppo_with_reward_fn.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
REWARD=${REWARD:-examples/python/math_reward_func.py} # in the working folder, or absolute
DATA=${DATA:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
OUT=${OUT:-$PWD/ckpt/ppo_reward_fn} # absolute: a submitted job has a folder of its own
RAY=${RAY:-http://127.0.0.1:8265} WORKING_DIR=${WORKING_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
NODES=${NODES:-1} GPUS=${GPUS:-8}
BATCH=${BATCH:-128} SAMPLES=${SAMPLES:-8} TRAIN_BATCH=${TRAIN_BATCH:-256} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-5120} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-4096}

flags=(
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --critic.num_nodes "$NODES" --critic.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.5
   --vllm.enable_sleep --ds.enable_sleep

   # PPO (arXiv:1707.06347) with one reward at the end of long answers: γ = λ = 1, or it would hardly reach their
   # beginning (VC-PPO, arXiv:2503.01491). The critic begins with the actor's weights and a random head, so the actor
   # waits 5 rounds for it; a weak KL in the reward keeps it near the start.
   --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 1.0
   --critic.freezing_steps 5
   --algo.kl.init_coef 0.001 --algo.kl.estimator k1
   --actor.eps_clip 0.2 --critic.value_clip 0.5
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6

   # A round: 128 problems with 8 answers each, cut into 4 optimizer steps.
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384

   --actor.model_name_or_path "$MODEL"
   --reward.remote_url "$REWARD" --reward.timeout 60
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.label_key "$LABEL_KEY" --data.apply_chat_template
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 20 --ckpt.load_enable
)

ray job submit --address="$RAY" --runtime-env-json="{\"working_dir\": \"$WORKING_DIR\"}" -- \
   python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
