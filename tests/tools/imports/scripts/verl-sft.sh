# SFT with the newer trainer, on conversations.
torchrun --nnodes=1 --nproc_per_node=4 -m verl.trainer.sft_trainer \
    data.train_files=chat/train.parquet \
    data.val_files=chat/test.parquet \
    data.messages_key=messages \
    data.train_batch_size=96 \
    data.max_length=2048 \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=8192 \
    data.truncation=right \
    model.path=Qwen/Qwen2.5-0.5B \
    optim.lr=2e-5 \
    optim.lr_scheduler_type=cosine \
    optim.lr_warmup_steps_ratio=0.02 \
    optim.min_lr_ratio=0.1 \
    trainer.total_epochs=2 \
    trainer.seed=1111 \
    trainer.logger=console \
    trainer.experiment_name=sft-chat
