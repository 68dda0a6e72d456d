#!/usr/bin/env bash
# Supervised fine-tuning on several machines of a SLURM cluster: one task per GPU, no other launcher. A job that is
# started again, by hand or by --requeue, continues from its last checkpoint. Two minutes before its time is over the
# run saves, and the job queues again.
#   MODEL=./my-model DATA=./examples.jsonl sbatch examples/scripts/train_sft_slurm.sh
#SBATCH --job-name=sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --signal=USR1@120
set -euo pipefail
: "${MODEL:?name a Hugging Face model folder}" "${DATA:?name a data set}"

status=0
srun --kill-on-bad-exit=1 python -m openrlhf.cli.train_sft \
   --model.model_name_or_path "$MODEL" \
   --data.dataset "$DATA" \
   --data.input_key input \
   --data.output_key output \
   --data.apply_chat_template \
   --data.max_len 4096 \
   --train.batch_size 512 \
   --train.micro_batch_size 2 \
   --train.max_epochs 1 \
   --model.gradient_checkpointing_enable \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --adam.lr 5e-6 \
   --ckpt.path ./ckpt/sft_checkpoints \
   --ckpt.save_steps 200 \
   --ckpt.load_enable \
   --ckpt.output_dir ./ckpt/sft \
   "$@" || status=$?
# Ended by SIGUSR1, with a checkpoint.
if [ "$status" -eq 138 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
