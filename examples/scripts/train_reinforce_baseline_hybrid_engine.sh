#!/usr/bin/env bash
# REINFORCE++-baseline on the hybrid engine: no critic, the mean of a prompt's samples as baseline, advantages whitened
# over the round.
# Made for 1 node with 8 GPUs of 80 GB and a 7B model. It is submitted to a Ray that runs: `ray start --head`.
#   MODEL=./my-model DATA=./prompts.jsonl INPUT_KEY=input REWARD=$PWD/reward.py \
#      bash examples/scripts/train_reinforce_baseline_hybrid_engine.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
REWARD=${REWARD:-examples/python/math_reward_func.py} # in the working folder, or absolute
DATA=${DATA:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
OUT=${OUT:-$PWD/ckpt/reinforce_baseline} # absolute: a submitted job has a folder of its own
RAY=${RAY:-http://127.0.0.1:8265} WORKING_DIR=${WORKING_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
NODES=${NODES:-1} GPUS=${GPUS:-8}
BATCH=${BATCH:-128} SAMPLES=${SAMPLES:-8} TRAIN_BATCH=${TRAIN_BATCH:-1024} EPISODES=${EPISODES:-2}
MAX_LEN=${MAX_LEN:-5120} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-4096}

flags=(
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.6
   --vllm.enable_sleep --ds.enable_sleep

   # arXiv:2501.03262: reward minus the group's mean, then whitened over all tokens of the round. KL is a loss with the
   # k2 estimate, whose gradient is that of the KL itself.
   --algo.advantage.estimator reinforce_baseline
   --algo.kl.init_coef 0.001 --algo.kl.use_loss --algo.kl.estimator k2
   --actor.eps_clip 0.2
   --actor.adam.lr 1e-6
   # vLLM and the trainer compute in bf16 by different kernels. A token that the trainer finds less than half or more
   # than 5 times as likely as vLLM did is left out (IcePop).
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
   --algo.advantage.is_correction_threshold 0.5 5.0

   # A round: 128 prompts with 8 answers each, one optimizer step. On policy: no forward for old log-probs is needed.
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
