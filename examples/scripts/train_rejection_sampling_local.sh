#!/usr/bin/env bash
# Rejection sampling in rounds, on a CPU or one GPU: N answers of each prompt, judged by the reward; the best one, if its
# score is at least THRESHOLD, is learnt by supervised fine-tuning; the next round samples from the new model.
# Each step is skipped where its result is there, and sampling goes on where it was stopped: start it again.
# CHAT=1 puts the chat template around prompts that are texts; lists of messages have it anyway.
# Flags after the script's name go to the fine-tuning.
#   MODEL=./my-model DATA=./prompts.jsonl REWARD=./reward.py bash examples/scripts/train_rejection_sampling_local.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a prompt data set}"
REWARD=${REWARD:-$(dirname "$0")/../python/reward_func.py}
OUT=${OUT:-./ckpt/rejection_sampling}
ROUNDS=${ROUNDS:-3} SAMPLES=${SAMPLES:-8} THRESHOLD=${THRESHOLD:-1}
MAX_LEN=${MAX_LEN:-1024} MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-256} BATCH=${BATCH:-64}
mkdir -p "$OUT"

for ((round = 1; round <= ROUNDS; round++)); do
   if [ ! -e "$OUT/best$round.jsonl" ]; then
      python -m openrlhf.cli.eval "$MODEL" \
         --data "$DATA" \
         --data.label_key label \
         --reward "$REWARD" \
         --n "$SAMPLES" \
         --temperature 1 \
         --threshold "$THRESHOLD" \
         --train.seed "$round" \
         --max_len "$MAX_LEN" \
         --max_new_tokens "$MAX_NEW_TOKENS" \
         ${CHAT:+--apply_chat_template} \
         --save "$OUT/samples$round.jsonl" \
         --sft "$OUT/best$round.jsonl"
   fi
   if [ ! -e "$OUT/model$round/config.json" ]; then
      # The prompts are as the policy has read them: no template is put around them again.
      python -m openrlhf.cli.train_sft \
         --model.model_name_or_path "$MODEL" \
         --data.dataset "$OUT/best$round.jsonl" \
         --data.input_key input \
         --data.output_key output \
         --data.input_template '{}' \
         --data.max_len "$MAX_LEN" \
         --train.batch_size "$BATCH" \
         --train.max_epochs 1 \
         --adam.lr 5e-6 \
         --ckpt.output_dir "$OUT/model$round" \
         "$@"
   fi
   MODEL=$OUT/model$round
done
