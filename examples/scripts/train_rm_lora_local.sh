#!/usr/bin/env bash
# A reward model as a LoRA adapter, then merged into its base: a folder that serve_rm and --reward.model_name_or_path take.
# On a GPU with little memory add --ds.load_in_4bit (pip install -e '.[qlora]').
#   MODEL=./ckpt/sft DATA=./pairs.jsonl bash examples/scripts/train_rm_lora_local.sh
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
   --adam.lr 1e-4 \
   --ds.lora.rank 32 \
   --ds.lora.alpha 64 \
   --ckpt.output_dir ./ckpt/rm_lora \
   "$@"

python -m openrlhf.cli.lora_combiner \
   --model_path "$MODEL" \
   --lora_path ./ckpt/rm_lora \
   --output_path ./ckpt/rm \
   --is_rm
