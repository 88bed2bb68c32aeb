# PPO with a critic and adaptive KL in the reward.
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.gamma=0.99 algorithm.lam=0.95 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.02 algorithm.kl_ctrl.target_kl=0.05 \
    data.train_files=data/gsm8k/train.parquet data.val_files=data/gsm8k/test.parquet \
    data.train_batch_size=512 data.max_prompt_length=512 data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    critic.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    critic.optim.lr=2e-5 critic.cliprange_value=0.3 \
    trainer.critic_warmup=5 trainer.n_gpus_per_node=4 trainer.logger=console \
    trainer.total_training_steps=200 actor_rollout_ref.actor.optim.lr_warmup_steps=20
