# KTO; flat flags, of a trainer that newer versions do not have.
deepspeed --num_gpus 2 --module openrlhf.cli.train_kto \
    --pretrain models/sft --dataset responses.jsonl --input_key prompt --output_key completion --label_key label \
    --apply_chat_template --max_len 1024 --beta 0.1 --learning_rate 5e-7 --train_batch_size 64 \
    --micro_train_batch_size 1 --desirable_loss_weight 1.5 --max_epochs 1 --zero_stage 3 --bf16 \
    --save_path runs/kto
