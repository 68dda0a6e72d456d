#!/usr/bin/env bash
# ProRL v2 on mathematics: REINFORCE++-baseline made to last for thousands of steps, with clip-higher, dynamic sampling,
# KL to a reference, answers that must stop by themselves, and a correction where vLLM and the trainer disagree.
# Made for 1 node with 8 GPUs of 80 GB and a 1.5B model. One command: it starts a Ray of its own.
#   MODEL=./my-model DATA=./problems.jsonl INPUT_KEY=input \
#      bash examples/scripts/train_prorlv2_math_hybrid_engine.sh
# ProRL resets the reference every few hundred steps, when the score stands still: start again with another OUT and
# MODEL=$OUT/checkpoints/global_step<N>_hf, a checkpoint of the run before.
# What is below in capitals can be set like that. Flags that are not here may follow the script's name.
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
REWARD=${REWARD:-$(dirname "$0")/../python/math_reward_func.py}
DATA=${DATA:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
EVAL_DATA=${EVAL_DATA:-zhuzilin/aime-2024}
OUT=${OUT:-./ckpt/prorlv2}
NODES=${NODES:-1} GPUS=${GPUS:-8}
BATCH=${BATCH:-256} SAMPLES=${SAMPLES:-16} TRAIN_BATCH=${TRAIN_BATCH:-1024} EPISODES=${EPISODES:-20}
MAX_LEN=${MAX_LEN:-10240} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-8192}

flags=(
   --train.launcher ray
   --train.colocate_all
   --actor.num_nodes "$NODES" --actor.num_gpus_per_node "$GPUS"
   --ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS"
   --vllm.num_engines $((NODES * GPUS)) --vllm.tensor_parallel_size 1
   --vllm.gpu_memory_utilization 0.6
   --vllm.enable_sleep --ds.enable_sleep

   # ProRL (arXiv:2505.24864) and its second version: the group's mean as baseline, then whitening over the round.
   --algo.advantage.estimator reinforce_baseline
   # Clip-higher: unlikely tokens may become more than 1.2 times as likely in a step, so that exploration does not die.
   --actor.eps_clip_low_high 0.2 0.4
   # Dynamic sampling: prompts that all samples solve, or none, are replaced. Half as many more are in play for that.
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.0 1.0
   --rollout.vllm_generate_batch_size $((BATCH * 3 / 2))
   # KL to the reference is what keeps a long run stable.
   --algo.kl.init_coef 0.0001 --algo.kl.use_loss --algo.kl.estimator k2
   # An answer that is cut off earns nothing, however right it looks so far.
   --reward.stop_properly_penalty_coef 0.0
   # vLLM and the trainer compute by different kernels; over thousands of steps that adds up. Weights of tokens within
   # [0.5, 5], the others left out (IcePop).
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
   --algo.advantage.is_correction_threshold 0.5 5.0
   --actor.adam.lr 2e-6 --actor.lr_scheduler constant_with_warmup --actor.entropy_coef 0

   # A round: 256 prompts with 16 answers each, hot, cut into 4 optimizer steps. Their prompts come by many times.
   --rollout.batch_size "$BATCH" --rollout.n_samples_per_prompt "$SAMPLES" --rollout.temperature 1.2
   --train.batch_size "$TRAIN_BATCH" --train.max_epochs 1 --train.num_episodes "$EPISODES"
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 32768

   --actor.model_name_or_path "$MODEL"
   --reward.remote_url "$REWARD" --reward.timeout 60
   --data.prompt_dataset "$DATA" --data.input_key "$INPUT_KEY" --data.label_key "$LABEL_KEY" --data.apply_chat_template
   --data.max_len "$MAX_LEN" --rollout.max_new_tokens "$MAX_NEW_TOKENS"
   --eval.dataset "$EVAL_DATA" --eval.steps 20 --eval.n_samples_per_prompt 16 --eval.temperature 0.6

   # A small model: optimizer states are shared out, weights are on every GPU.
   --ds.zero_stage 2 --actor.gradient_checkpointing_enable

   --logger.run_dir "$OUT/run" --ckpt.output_dir "$OUT/model"
   --ckpt.path "$OUT/checkpoints" --ckpt.save_steps 50 --ckpt.save_hf --ckpt.load_enable
)

python3 -m openrlhf.cli.train_ppo_ray "${flags[@]}" "$@"
