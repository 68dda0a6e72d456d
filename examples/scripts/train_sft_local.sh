#!/usr/bin/env bash
# Supervised fine-tuning in one process, on a CPU or one GPU.
# Records: {"input": "What is 2 + 3?", "output": "5"}, or chats under "input" without --data.output_key.
#   MODEL=./my-model DATA=./examples.jsonl bash examples/scripts/train_sft_local.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a data set}"

python -m openrlhf.cli.train_sft \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.input_key input \
   --data.output_key output \
   --data.apply_chat_template \
   --data.max_len 2048 \
   --train.batch_size 64 \
   --train.micro_batch_size 4 \
   --train.max_epochs 2 \
   --adam.lr 5e-6 \
   --ckpt.output_dir ./ckpt/sft \
   "$@"
