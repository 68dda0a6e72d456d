#!/usr/bin/env bash
# PPO with a critic, a reference and a reward model on the hybrid engine: all of them and vLLM share GPUs, in turns.
# Made for 1 node with 8 GPUs of 80 GB and an 8B model. It is submitted to a Ray that runs: `ray start --head`.
#   MODEL=./ckpt/sft REWARD_MODEL=./ckpt/rm DATA=./prompts.jsonl INPUT_KEY=input \
#      bash examples/scripts/train_ppo_ray_hybrid_engine.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1} INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-$PWD/ckpt/ppo_hybrid} # absolute: a submitted job has a folder of its own
RAY=${RAY:-http://127.0.0.1:8265} WORKING_DIR=${WORKING_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
NODES=${NODES:-1} GPUS=${GPUS:-8}
BATCH=${BATCH:-1024} SAMPLES=${SAMPLES:-1} TRAIN_BATCH=${TRAIN_BATCH:-128} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-2048} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}

flags=(
   # Everybody sits on the actor's GPUs. Engines sleep while models train, and optimizers while engines sample.
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --critic.num_nodes "$NODES" --critic.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS"
   --reward.num_nodes "$NODES" --reward.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.5
   --vllm.enable_sleep --ds.enable_sleep

   # PPO (arXiv:1707.06347) as InstructGPT used it (arXiv:2203.02155): KL to the start as part of the reward, and no
   # discount. λ = 1 makes advantages unbiased; 0.95 trades some of that for less noise.
   --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 1.0
   --algo.kl.init_coef 0.01 --algo.kl.estimator k1
   --actor.eps_clip 0.2 --critic.value_clip 0.5
   # The critic begins as the reward model and must follow the policy: a rate about twenty times as high.
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --actor.max_norm 1.0

   # A round: 1,024 answers, cut into 8 optimizer steps.
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384

   --actor.model_name_or_path "$MODEL"
   --reward.model_name_or_path "$REWARD_MODEL" --reward.normalize_enable
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.apply_chat_template
   --data.max_samples 100000
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   # Weights, gradients, masters and moments of actor and critic, 16 bytes a parameter, shared out over all GPUs.
   --ds.zero_stage 3 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 20 --ckpt.load_enable
)

ray job submit --address="$RAY" --runtime-env-json="{\"working_dir\": \"$WORKING_DIR\"}" -- \
   python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
