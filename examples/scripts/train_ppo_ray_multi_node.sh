#!/usr/bin/env bash
# PPO with a 14B actor on several machines: groups of nodes for training, others for vLLM.
# Made for 4 nodes with 8 GPUs of 80 GB. Start Ray on every machine first (docs/multi_node.md):
#   head:    ray start --head --port=6379 --dashboard-host=0.0.0.0
#   others:  ray start --address=HEAD:6379
# then, from any machine that reaches the head; OUT must be a folder that all nodes share:
#   RAY=http://HEAD:8265 OUT=/shared/ppo bash examples/scripts/train_ppo_ray_multi_node.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-14B-Instruct}
REWARD=${REWARD:-examples/python/math_reward_func.py} # in the working folder, or absolute
DATA=${DATA:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
OUT=${OUT:-$PWD/ckpt/ppo_multi_node}
RAY=${RAY:-http://127.0.0.1:8265} WORKING_DIR=${WORKING_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
ACTOR_NODES=${ACTOR_NODES:-2} CRITIC_NODES=${CRITIC_NODES:-1} GPUS=${GPUS:-8}
ENGINES=${ENGINES:-4} TP=${TP:-2}
BATCH=${BATCH:-512} SAMPLES=${SAMPLES:-4} TRAIN_BATCH=${TRAIN_BATCH:-512} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-5120} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-4096}

flags=(
   # 2 nodes for actor and reference, 1 for the critic, 1 for 4 engines of 2 GPUs. An engine stays on one node.
   --train.launcher ray
   --train.colocate_actor_ref
   --actor.num_nodes "$ACTOR_NODES" --actor.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$ACTOR_NODES" --ref.num_gpus_per_node "$GPUS"
   --critic.num_nodes "$CRITIC_NODES" --critic.num_gpus_per_node "$GPUS"
   --vllm.num_engines "$ENGINES" --vllm.tensor_parallel_size "$TP"
   --vllm.gpu_memory_utilization 0.9

   # PPO with one reward at the end of long answers; see train_ppo_with_reward_fn.sh.
   --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 1.0
   --critic.freezing_steps 5
   --algo.kl.init_coef 0.001 --algo.kl.estimator k1
   --actor.eps_clip 0.2 --critic.value_clip 0.5
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6
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
