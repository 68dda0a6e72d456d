#!/usr/bin/env bash
# A reward model from preference pairs, in one process, on a CPU or one GPU.
# Records: {"chosen": [messages], "rejected": [messages]}; a "margin" counts with --model.margin_loss_enable.
#   MODEL=./ckpt/sft DATA=./pairs.jsonl bash examples/scripts/train_rm_local.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a data set of pairs}"

python -m openrlhf.cli.train_rm \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.chosen_key chosen \
   --data.rejected_key rejected \
   --data.apply_chat_template \
   --data.max_len 2048 \
   --train.batch_size 64 \
   --train.micro_batch_size 2 \
   --train.max_epochs 1 \
   --adam.lr 9e-6 \
   --ckpt.output_dir ./ckpt/rm \
   "$@"
