#!/usr/bin/env bash
# GRPO with KL in the loss: arrays, a case, arithmetic and defaults of parameters.
set -xeuo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
BACKEND=fsdp
nodes=2
gpus=8
prompts=256
max_prompt=$((1024 * 2))
max_response=4096
budget=$(((max_prompt + max_response) * 2))

case "$BACKEND" in
    fsdp | fsdp2) TP=2 ;;
    megatron) TP=4 ;;
    *) echo "unknown backend" && exit 1 ;;
esac

DATA=(
    data.train_files="$HOME/data/gsm8k/train.parquet"
    data.val_files="$HOME/data/gsm8k/test.parquet"
    data.train_batch_size=${prompts}
    data.max_prompt_length=$max_prompt
    data.max_response_length=${max_response}
    data.filter_overlong_prompts=True
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=2e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05
    actor_rollout_ref.actor.ppo_mini_batch_size=$((prompts / 4))
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${budget}
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.005
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
)
DATA+=(data.shuffle=False)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=import-tests \
    trainer.experiment_name="grpo 3B" \
    trainer.nnodes=$nodes \
    trainer.n_gpus_per_node=$gpus \
    trainer.test_freq=10 \
    trainer.total_epochs=3 "$@"
