#!/usr/bin/env bash
# DPO in one process, on a CPU or one GPU. IPO: add --model.ipo_enable. cDPO: add --model.label_smoothing 0.1.
# Records: {"chosen": [messages], "rejected": [messages]}, alike up to the last message.
# KTO: add --model.loss_type kto; records: {"prompt": …, "response": …, "label": true}.
#   MODEL=./ckpt/sft DATA=./pairs.jsonl bash examples/scripts/train_dpo_local.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a data set of pairs}"

python -m openrlhf.cli.train_dpo \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.chosen_key chosen \
   --data.rejected_key rejected \
   --data.apply_chat_template \
   --data.max_len 2048 \
   --model.beta 0.1 \
   --train.batch_size 64 \
   --train.micro_batch_size 2 \
   --train.max_epochs 1 \
   --adam.lr 5e-7 \
   --ckpt.output_dir ./ckpt/dpo \
   "$@"
