# SFT: the command is a text in a variable.
set -x
LR=5e-6
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \
   --max_len 4096 \
   --dataset questions.jsonl \
   --input_key question \
   --output_key response \
   --apply_chat_template \
   --train_batch_size 256 \
   --micro_train_batch_size 2 \
   --pretrain meta-llama/Meta-Llama-3-8B \
   --save_path ./checkpoint/llama3-8b-sft \
   --save_steps -1 --logging_steps 1 --eval_steps -1 \
   --zero_stage 2 --max_epochs 1 --bf16 --flash_attn --packing_samples \
   --learning_rate $LR \
   --lora_rank 32 --lora_alpha 64 --gradient_checkpointing
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 8 --module $training_commands
fi
