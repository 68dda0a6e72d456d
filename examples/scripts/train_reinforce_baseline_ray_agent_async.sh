#!/usr/bin/env bash
# REINFORCE++-baseline for a multi-turn agent, async with partial rollout: episodes are played all the time, and weights
# change in the middle of them. Nothing waits for slow environments or long conversations.
# Made for 1 node with 8 GPUs of 80 GB and a 7B model: 4 train, 4 sample. One command: it starts a Ray of its own.
#   DATA=./problems.jsonl AGENT=./agent.py bash examples/scripts/train_reinforce_baseline_ray_agent_async.sh
# A record has a prompt (messages) and a label; what they mean is the agent's business.
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail
: "${DATA:?name a prompt data set}"

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
AGENT=${AGENT:-$(dirname "$0")/../python/agent_func.py}
INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
OUT=${OUT:-./ckpt/agent_async}
ACTOR_NODES=${ACTOR_NODES:-1} ACTOR_GPUS=${ACTOR_GPUS:-4} ENGINES=${ENGINES:-4} TP=${TP:-1}
BATCH=${BATCH:-128} IN_PLAY=${IN_PLAY:-192} SAMPLES=${SAMPLES:-8} TRAIN_BATCH=${TRAIN_BATCH:-1024} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-8192} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}

flags=(
   --train.launcher ray
   --actor.num_nodes "$ACTOR_NODES" --actor.num_gpus_per_node "$ACTOR_GPUS"
   --vllm.num_engines "$ENGINES" --vllm.tensor_parallel_size "$TP"
   # Engines do nothing else with their GPUs. Each turn goes on from what the ones before it have left in memory.
   --vllm.gpu_memory_utilization 0.9 --vllm.enable_prefix_caching

   # 192 prompts are in play: 64 more than a round trains on, so that engines are busy while the slowest of a round
   # finish. A sample is at most 2 versions old when it is trained on (docs/async.md).
   --train.async_enable --train.async_queue_size 1 --rollout.vllm_generate_batch_size "$IN_PLAY"
   --train.partial_rollout_enable

   --train.agent_func_path "$AGENT" --max_steps 8 --rollout.step_timeout 120

   # arXiv:2501.03262 without KL: no reference model. What was sampled by older weights is weighted by how much likelier
   # the trained policy finds it, and left out where that is less than half or more than 5 times (IcePop).
   --algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
   --algo.advantage.is_correction_threshold 0.5 5.0
   --actor.eps_clip 0.2
   --actor.adam.lr 1e-6
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384

   --actor.model_name_or_path "$MODEL"
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.label_key "$LABEL_KEY" --data.apply_chat_template
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 20 --ckpt.load_enable
)

python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
