# A reward model.
deepspeed --module openrlhf.cli.train_rm \
    --model.model_name_or_path models/sft --data.dataset pairs.jsonl --data.apply_chat_template \
    --data.max_len 4096 --adam.lr 9e-6 --train.batch_size 128 --train.micro_batch_size 1 --train.max_epochs 1 \
    --model.loss_type sigmoid --ds.zero_stage 3 --ds.packing_samples --ckpt.output_dir runs/rm
