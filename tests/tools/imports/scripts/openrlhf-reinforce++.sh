# REINFORCE++ with a baseline; dotted flags.
python3 -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path models/base --actor.num_nodes 1 --actor.num_gpus_per_node 4 \
    --ref.num_nodes 1 --ref.num_gpus_per_node 4 \
    --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --vllm.sync_backend nccl --train.colocate_all \
    --vllm.gpu_memory_utilization 0.6 --ds.zero_stage 3 --ds.param_dtype bf16 --ds.packing_samples \
    --algo.advantage.estimator reinforce_baseline --algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.init_coef 1e-4 \
    --actor.eps_clip_low_high 0.2 0.27 --actor.adam.lr 1e-6 --actor.adam.betas 0.9 0.98 \
    --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
    --train.batch_size 256 --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.max_epochs 1 \
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 \
    --data.max_len 5120 --rollout.max_new_tokens 4096 --train.num_episodes 3 \
    --data.prompt_dataset math.jsonl --data.input_key prompt --data.label_key answer --data.apply_chat_template \
    --reward.remote_url rewards/math_reward.py --ckpt.output_dir runs/rpp --ckpt.load_enable --ckpt.save_steps 20
