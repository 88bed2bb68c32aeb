# DPO; dotted flags.
deepspeed --num_gpus 4 --module openrlhf.cli.train_dpo \
    --model.model_name_or_path models/sft --data.dataset pairs.jsonl --data.apply_chat_template \
    --data.chosen_key chosen --data.rejected_key rejected --data.max_len 2048 \
    --model.beta 0.05 --adam.lr 5e-7 --train.batch_size 64 --train.micro_batch_size 1 --train.max_epochs 1 \
    --ds.zero_stage 3 --ds.param_dtype bf16 --ds.packing_samples --model.gradient_checkpointing_enable \
    --ckpt.output_dir runs/dpo --lr_warmup_ratio 0.1 --ds.adam_offload --logger.tensorboard_dir runs/tb
