# RLOO, asynchronous, with dynamic filtering.
python3 -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path models/base --actor.num_gpus_per_node 4 \
    --vllm.num_engines 4 --algo.advantage.estimator rloo --algo.kl.init_coef 0 \
    --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
    --train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable \
    --train.batch_size 512 --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 \
    --data.max_len 4096 --rollout.max_new_tokens 3072 \
    --data.prompt_dataset math.jsonl --data.input_key prompt --data.apply_chat_template \
    --reward.model_name_or_path models/rm --ckpt.output_dir runs/rloo
