# PPO with a reward model; flat flags of 2025.
set -x
ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json='{"working_dir": "."}' \
    -- python3 -m openrlhf.cli.train_ppo_ray \
    --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
    --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
    --critic_num_nodes 1 --critic_num_gpus_per_node 8 \
    --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
    --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \
    --colocate_all_models --vllm_gpu_memory_utilization 0.5 \
    --pretrain models/llama-sft --reward_pretrain models/llama-rm \
    --save_path runs/llama-ppo \
    --micro_train_batch_size 2 --train_batch_size 128 \
    --micro_rollout_batch_size 4 --rollout_batch_size 256 \
    --max_epochs 1 --prompt_max_len 512 --generate_max_len 1024 \
    --zero_stage 3 --bf16 \
    --actor_learning_rate 5e-7 --critic_learning_rate 8e-6 \
    --init_kl_coef 0.02 --gamma 0.99 --lambd 0.95 \
    --prompt_data prompts.jsonl --input_key question --apply_chat_template \
    --gradient_checkpointing --packing_samples --flash_attn \
    --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep \
    --use_wandb {wandb_token}
