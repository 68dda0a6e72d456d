#!/usr/bin/env bash
# Supervised fine-tuning on all GPUs of one machine (pip install -e '.[deepspeed]'). Other launchers do as well:
# torchrun --standalone --nproc-per-node gpu -m openrlhf.cli.train_sft …
#   MODEL=./my-model DATA=./examples.jsonl bash examples/scripts/train_sft.sh
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a data set}"

deepspeed --module openrlhf.cli.train_sft \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.input_key input \
   --data.output_key output \
   --data.apply_chat_template \
   --data.max_len 4096 \
   --train.batch_size 256 \
   --train.micro_batch_size 2 \
   --train.max_epochs 1 \
   --model.gradient_checkpointing_enable \
   --ds.zero_stage 2 \
   --ds.param_dtype bf16 \
   --adam.lr 5e-6 \
   --ckpt.path ./ckpt/sft_checkpoints \
   --ckpt.save_steps 200 \
   --ckpt.load_enable \
   --ckpt.output_dir ./ckpt/sft \
   "$@"
