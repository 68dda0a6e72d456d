#!/usr/bin/env bash
# Iterative DPO, on a CPU or one GPU: N answers of each prompt from the policy, judged by the reward; DPO on the best and
# the worst of each, with the policy that sampled them as reference; the next round samples from the new model.
# Each step is skipped where its result is there, and sampling goes on where it was stopped: start it again.
# CHAT=1 puts the chat template around prompts that are texts; lists of messages have it anyway.
# Flags after the script's name go to DPO.
#   MODEL=./my-model DATA=./prompts.jsonl REWARD=./reward.py bash examples/scripts/train_iterative_dpo_local.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a prompt data set}"
REWARD=${REWARD:-$(dirname "$0")/../python/reward_func.py}
OUT=${OUT:-./ckpt/iterative_dpo}
ROUNDS=${ROUNDS:-3} SAMPLES=${SAMPLES:-8}
MAX_LEN=${MAX_LEN:-1024} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-256} BATCH=${BATCH:-64}
mkdir -p "$OUT"

for ((round = 1; round <= ROUNDS; round++)); do
   if [ ! -e "$OUT/pairs$round.jsonl" ]; then
      python -m openrlhf.cli.eval "$MODEL" \
         --data "$DATA" \
         --data.label_key label \
         --reward "$REWARD" \
         --n "$SAMPLES" \
         --temperature 1 \
         --train.seed "$round" \
         --max_len "$MAX_LEN" \
         --max_new_tokens "$MAX_NEW_TOKENS" \
         ${CHAT:+--apply_chat_template} \
         --save "$OUT/samples$round.jsonl" \
         --pairs "$OUT/pairs$round.jsonl"
   fi
   if [ ! -e "$OUT/model$round/config.json" ]; then
      # The prompts are as the policy has read them: no template is put around them again.
      python -m openrlhf.cli.train_dpo \
         --model.model_name_or_path "$MODEL" \
         --data.dataset "$OUT/pairs$round.jsonl" \
         --data.prompt_key prompt \
         --data.chosen_key chosen \
         --data.rejected_key rejected \
         --data.max_len "$MAX_LEN" \
         --model.beta 0.1 \
         --train.batch_size "$BATCH" \
         --train.max_epochs 1 \
         --adam.lr 5e-7 \
         --ckpt.output_dir "$OUT/model$round" \
         "$@"
   fi
   MODEL=$OUT/model$round
done
