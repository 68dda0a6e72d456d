#!/usr/bin/env bash
# PPO with a 70B actor, and a critic and a reward model of 8B.
# Made for 6 nodes with 8 GPUs of 80 GB. Start Ray on every machine first (docs/multi_node.md); OUT must be a folder
# that all nodes share:
#   RAY=http://HEAD:8265 OUT=/shared/ppo_70b bash examples/scripts/train_ppo_ray_70b_48gpus.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Meta-Llama-3-70B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1} INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-$PWD/ckpt/ppo_70b}
RAY=${RAY:-http://127.0.0.1:8265} WORKING_DIR=${WORKING_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
ACTOR_NODES=${ACTOR_NODES:-4} CRITIC_NODES=${CRITIC_NODES:-1} GPUS=${GPUS:-8}
ENGINES=${ENGINES:-2} TP=${TP:-4}
BATCH=${BATCH:-1024} SAMPLES=${SAMPLES:-1} TRAIN_BATCH=${TRAIN_BATCH:-128} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-2048} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}

flags=(
   # 4 nodes for actor and reference, 1 for critic and reward model, 1 for 2 engines of 4 GPUs with 35 GB of weights each.
   --train.launcher ray
   --train.colocate_actor_ref --train.colocate_critic_reward
   --actor.num_nodes "$ACTOR_NODES" --actor.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$ACTOR_NODES" --ref.num_gpus_per_node "$GPUS"
   --critic.num_nodes "$CRITIC_NODES" --critic.num_gpus_per_node "$GPUS"
   --reward.num_nodes "$CRITIC_NODES" --reward.num_gpus_per_node "$GPUS"
   --vllm.num_engines "$ENGINES" --vllm.tensor_parallel_size "$TP"
   --vllm.gpu_memory_utilization 0.9

   # PPO (arXiv:1707.06347). Like InstructGPT (arXiv:2203.02155), whose policy had 175B parameters and whose value and
   # reward models 6B, with a critic that begins as the small reward model.
   --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 1.0
   --algo.kl.init_coef 0.01 --algo.kl.estimator k1
   --actor.eps_clip 0.2 --critic.value_clip 0.5
   # Larger models want smaller steps.
   --actor.adam.lr 3e-7 --critic.adam.lr 9e-6
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192

   --actor.model_name_or_path "$MODEL"
   --reward.model_name_or_path "$REWARD_MODEL" --reward.normalize_enable
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.apply_chat_template
   --data.max_samples 100000
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   # 70B: 1.1 TB of weights, gradients, masters and moments, 35 GB on each of 32 GPUs.
   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 10 --ckpt.max_num 2 --ckpt.load_enable
)

ray job submit --address="$RAY" --runtime-env-json="{\"working_dir\": \"$WORKING_DIR\"}" -- \
   python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
