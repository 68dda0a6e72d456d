#!/usr/bin/env bash
# PPO on several machines of a SLURM cluster, on the hybrid engine. One task per node starts Ray there; the run is on
# the first, and Ray ends with it. A job that is started again, by hand or by --requeue, continues from its last
# checkpoint.
# Made for 2 nodes with 8 GPUs of 80 GB and an 8B model.
#   MODEL=./ckpt/sft REWARD_MODEL=./ckpt/rm DATA=./prompts.jsonl INPUT_KEY=input \
#      sbatch examples/scripts/train_ppo_ray_slurm.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
# What each line does: docs/multi_node.md.
#SBATCH --job-name=ppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail
: "${SLURM_JOB_NODELIST:?start this script with sbatch}"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1} INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-$PWD/ckpt/ppo_slurm} # on a file system that all nodes share
NODES=${NODES:-${SLURM_JOB_NUM_NODES:-2}} GPUS=${GPUS:-8}
BATCH=${BATCH:-1024} SAMPLES=${SAMPLES:-1} TRAIN_BATCH=${TRAIN_BATCH:-128} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-2048} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) PORT=${PORT:-6379}

# Nobody else on this cluster may use our Ray: it asks for a token, which all nodes find in the home folder.
export RAY_AUTH_MODE=token
(umask 077 && ray get-auth-token --generate >/dev/null)
# Seconds until all nodes must be there.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

flags=(
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --critic.num_nodes "$NODES" --critic.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS"
   --reward.num_nodes "$NODES" --reward.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.5
   --vllm.enable_sleep --ds.enable_sleep

   # PPO (arXiv:1707.06347) as InstructGPT used it (arXiv:2203.02155); see train_ppo_ray_hybrid_engine.sh.
   --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 1.0
   --algo.kl.init_coef 0.01 --algo.kl.estimator k1
   --actor.eps_clip 0.2 --critic.value_clip 0.5
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384

   --actor.model_name_or_path "$MODEL"
   --reward.model_name_or_path "$REWARD_MODEL" --reward.normalize_enable
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.apply_chat_template
   --data.max_samples 100000
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 20 --ckpt.load_enable
)

srun --kill-on-bad-exit=1 ray symmetric-run --address "$HEAD:$PORT" --min-nodes "$NODES" -- \
   env RAY_ADDRESS="$HEAD:$PORT" python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
