#!/usr/bin/env bash
# A multi-turn agent in one process plus its hosts, on a CPU or one GPU: no Ray, no vLLM.
#   MODEL=./my-model DATA=./prompts.jsonl AGENT=./agent.py bash examples/scripts/train_agent_local.sh
# A record has an input and a label; what they mean is the agent's business.
# Flags that are not here may follow; a flag counts once, so change those that are here in a copy.
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a prompt data set}"
AGENT=${AGENT:-$(dirname "$0")/../python/agent_func.py}

python -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path "$MODEL" \
   --data.prompt_dataset "$DATA" \
   --data.input_key input \
   --data.label_key label \
   --train.agent_func_path "$AGENT" \
   --max_steps 8 \
   --rollout.step_timeout 60 \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.init_coef 0 \
   --rollout.batch_size 32 \
   --rollout.n_samples_per_prompt 8 \
   --rollout.max_new_tokens 64 \
   --data.max_len 1024 \
   --train.batch_size 256 \
   --train.dynamic_batch_enable \
   --actor.adam.lr 1e-6 \
   --vllm.num_engines 0 \
   --ckpt.output_dir ./ckpt/agent \
   "$@"
