#!/usr/bin/env bash
# PPO with a 7B actor, critic, reference and reward model and vLLM beside them, each pair on GPUs of its own: nobody
# waits for memory, nobody sleeps.
# Made for 1 node with 8 GPUs of 80 GB. One command: it starts a Ray of its own. On the hybrid engine instead:
# train_ppo_ray_hybrid_engine.sh.
#   MODEL=./ckpt/sft REWARD_MODEL=./ckpt/rm DATA=./prompts.jsonl INPUT_KEY=input \
#      bash examples/scripts/train_ppo_ray_7b_8gpus.sh
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1} INPUT_KEY=${INPUT_KEY:-context_messages}
OUT=${OUT:-./ckpt/ppo_7b}
ACTOR_GPUS=${ACTOR_GPUS:-4} CRITIC_GPUS=${CRITIC_GPUS:-2} ENGINES=${ENGINES:-2}
BATCH=${BATCH:-1024} SAMPLES=${SAMPLES:-1} TRAIN_BATCH=${TRAIN_BATCH:-128} EPISODES=${EPISODES:-1}
MAX_LEN=${MAX_LEN:-2048} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-1024}

flags=(
   # 4 GPUs for actor and reference, 2 for critic and reward model, 2 for one engine each.
   --train.launcher ray
   --train.colocate_actor_ref --train.colocate_critic_reward
   --actor.num_nodes 1 --actor.num_gpus_per_node "$ACTOR_GPUS"
   --ref.num_nodes 1 --ref.num_gpus_per_node "$ACTOR_GPUS"
   --critic.num_nodes 1 --critic.num_gpus_per_node "$CRITIC_GPUS"
   --reward.num_nodes 1 --reward.num_gpus_per_node "$CRITIC_GPUS"
   --vllm.num_engines "$ENGINES" --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.9

   # PPO (arXiv:1707.06347) as InstructGPT used it (arXiv:2203.02155); see train_ppo_ray_hybrid_engine.sh.
   --algo.advantage.estimator gae --algo.advantage.gamma 1.0 --algo.advantage.lambd 1.0
   --algo.kl.init_coef 0.01 --algo.kl.estimator k1
   --actor.eps_clip 0.2 --critic.value_clip 0.5
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.0
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192

   --actor.model_name_or_path "$MODEL"
   --reward.model_name_or_path "$REWARD_MODEL" --reward.normalize_enable
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.apply_chat_template
   --data.max_samples 100000
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"

   # An 8B critic has 128 GB of weights, gradients, masters and moments: too much for 2 GPUs with a reward model on
   # them. Masters and moments live in CPU memory.
   --ds.zero_stage 3 --ds.adam_offload --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 20 --ckpt.load_enable
)

python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
