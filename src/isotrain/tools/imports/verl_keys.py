"""verl's keys of PPO and its relatives (`verl.trainer.main_ppo`), grouped as a recipe is."""

from __future__ import annotations

from isotrain.tools.imports.draft import every, flag, number, text, texts, whole
from isotrain.tools.imports.rules import KeyTable, by, maps, no_effect, part, refused

VERSIONS = ("0.5.0", "0.7.0", "2026-08")
"""Whose defaults are in the tables; the last is verl's main branch of August 2026."""

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIM = f"{A}.optim"
REF = "actor_rollout_ref.ref"

# Why a key has no effect or is refused, where several keys share the reason.
PACKED = "isotrain always packs samples without padding"
BUDGET = "data.tokens_per_micro_batch is the budget of every pass"
ENGINE = "an engine option that changes its speed only"
TRANSFER = "rollout.weight_transfer chooses how weights reach the engines"
LAYOUT = "FSDP2 shards weights over all ranks; see `isotrain plan` for the memory"
KERNELS = "another kernel for the same result; see model.fused and model.compile"
SAVED = "checkpoints hold all state; `isotrain export` writes a Hugging Face model"
RAY = "a setting of their processes"
LOGGED = "it changes logs only"
ALWAYS = "isotrain always does this"
DEVICE = "device.type: auto takes the device that is present"
IMAGES = "isotrain trains on text: remove images, video and audio from the rows"
CODE = "isotrain runs no code of models or data sets: convert the rows, or use a model of transformers"
TURNS = "write an environment (docs/agents.md) and set rollout.environment.path"
SAMPLING = "validation samples from all tokens: set it to its default, or compare other metrics"
ASYNC = "set rollout.staleness, in weight versions (docs/rollout.md): verl counts samples"
MEGATRON = "a model option of Megatron"
RECORDED = "set rollout.record and rollout.replay"
CONFIG = "edit config.json of the model directory"


NO_EFFECT = {
    "the order of mini-batches, which actor.shuffle: False keeps": "A.data_loader_seed",
    "seed is one field": "{A,REF,critic}.{fsdp_config,fsdp,megatron}.seed R.seed *.megatron.seed",
    DEVICE: "trainer.device",
    LAYOUT: """
        {REF,critic,reward_model}.ulysses_sequence_parallel_size
        {REF.fsdp_config,critic.fsdp,critic.model.fsdp_config}.ulysses_sequence_parallel_size
        {A,REF,critic}.megatron.{tensor_model_parallel_size,pipeline_model_parallel_size,
          virtual_pipeline_model_parallel_size,expert_tensor_parallel_size,sequence_parallel,
          use_distributed_optimizer} {REF,critic}.megatron.{context_parallel_size,expert_model_parallel_size}
        {REF.fsdp_config,critic.fsdp,critic.model.fsdp_config,reward_model.model.fsdp_config}.fsdp_size
        *.fsdp_config.{wrap_policy.min_num_params,reshard_after_forward,forward_prefetch,use_orig_params,
          forward_only}
        critic.fsdp.{wrap_policy.min_num_params,reshard_after_forward,forward_prefetch,use_orig_params,
          forward_only} A.fsdp_config.forward_prefetch
        {A.fsdp_config,REF,REF.fsdp_config,critic,critic.fsdp,critic.model.fsdp_config,reward_model}.strategy
        *.megatron.override_transformer_config.{num_layers_in_*,account_for_*,deallocate_pipeline_outputs,
          sequence_parallel,recompute_*,tp_comm_overlap}
        *.megatron.{use_remove_padding,use_megatron_fsdp,extra,forward_only,load_weight}
        *.megatron.{override_ddp_config*,use_distributed_optimizer}
        A.optim.{use_checkpoint_opt_param_scheduler,use_layer_wise_distributed_optimizer}
    """,
    "device.determinism is one field": """
        {REF.fsdp_config,critic.fsdp,critic.model.fsdp_config}.full_determinism
    """,
    RAY: """
        actor_rollout_ref.nccl_timeout critic.nccl_timeout R.{nnodes,n_gpus_per_node,skip_dump_dir}
        R.agent.{num_workers,custom_async_server.name}
        {sandbox_fusion.*,reward.num_workers,reward_model.num_workers,reward_model.launch_reward_fn_async,
          reward_model.use_reward_loop}
        trainer.{use_legacy_worker_impl,use_v1,ray_wait_register_center_timeout}
        ray_kwargs.ray_init.runtime_env.py_executable
        {ray_kwargs.*,ray_init.*,global_profiler.*,transfer_queue.*,trainer.profile_steps,
          trainer.npu_profile.*,trainer.controller_nsight_options.*,trainer.worker_nsight_options.*} hydra.*
    """,
    "buffers keep the type that transformers gives them": "*.mixed_precision.buffer_dtype",
    "model.dtype and model.offload hold for all models": """
        {REF.fsdp_config,critic.fsdp,critic.model.fsdp_config}.{model_dtype,dtype,offload_policy}
    """,
    "Megatron's LoRA, which lora.rank: 0 switches off": "M.lora.*",
    KERNELS: """
        {M,critic.model,reward_model.model}.{use_remove_padding,use_shm,use_liger,use_fused_kernels}
        M.{fused_kernel_options.*,tiled_mlp.*,gradient_checkpointing_kwargs.*}
        {A,REF}.{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,
          entropy_checkpointing,use_fused_kernels,use_remove_padding,use_prefix_grouper,pad_to_length}
        *.fsdp_config.{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,
          entropy_checkpointing,pad_to_length,pad_to_length_bucket,turbo_config.*}
        critic.fsdp.{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,
          entropy_checkpointing,pad_to_length,pad_to_length_bucket,turbo_config.*}
        A.megatron.override_transformer_config.moe_permute_fusion
        *.megatron.override_transformer_config.{*_fusion,*deepep,*_overlap,moe_token_dispatcher_type,
          moe_grouped_gemm,use_flash_attn,attention_backend,persist_layer_norm,use_fused_swiglu}
    """,
    "multi-token prediction, which mtp.enable: False switches off": "M.mtp.*",
    "quantization-aware training, which qat.enable: False switches off": "*.qat.*",
    "router replay, which mode: disabled switches off": "*.router_replay.*",
    "model.gradient_checkpointing recomputes every layer": """
        A.megatron.override_transformer_config.{recompute_granularity,recompute_num_layers,recompute_method}
    """,
    MEGATRON: "*.megatron.override_transformer_config",
    SAVED: """
        A.megatron.{use_mbridge,use_dist_checkpointing}
        *.megatron.{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_path,
          dist_checkpointing_prefix}
        trainer.{max_critic_ckpt_to_keep,del_local_ckpt_after_load,default_hdfs_dir,esi_redundant_time}
        {A,critic}.checkpoint.{save_contents,load_contents,async_save,strict}
    """,
    "it is for images": """
        data.{return_multi_modal_inputs,image_patch_size,mm_processor_kwargs} R.limit_images
    """,
    "it names a class of the file that is refused": "data.{custom_cls.name,sampler.class_name,datagen.name}",
    "rewards get the whole row": "data.{return_raw_chat,return_raw_input_ids,return_full_prompt}",
    "it changes the speed only": """
        data.{val_batch_size,dataloader_num_workers,filter_overlong_prompts_workers,use_shm,
          validation_shuffle} algorithm.filter_groups.max_inflight_gen_batches
    """,
    BUDGET: """
        {R,REF}.{log_prob_use_dynamic_bsz,log_prob_max_token_len_per_gpu,log_prob_micro_batch_size_per_gpu,
          log_prob_micro_batch_size}
        critic.{ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu,ppo_micro_batch_size,use_dynamic_bsz,
          forward_max_token_len_per_gpu,forward_micro_batch_size,forward_micro_batch_size_per_gpu}
    """,
    "a constant of a policy loss that is not used": "A.policy_loss.*",
    "a constant of a policy loss that is not used (sapo)": "A.{tau_pos,tau_neg}",
    LOGGED: """
        A.{calculate_entropy,calculate_sum_pi_squared}
        {reward_model,reward}.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log
    """,
    "the bounds of rollout_rs": """
        algorithm.rollout_correction.{rollout_rs_threshold,rollout_rs_threshold_lower,
          rollout_token_veto_threshold}
    """,
    "the loss of bypass_mode": "algorithm.rollout_correction.loss_type",
    "its switch use_pf_ppo is off": "algorithm.pf_ppo.*",
    "the critic follows the policy": "critic.{rollout_n,data_loader_seed}",
    "model.gradient_checkpointing holds for the critic too": "critic.model.enable_gradient_checkpointing",
    "the critic follows the policy's model options": "critic.model.*",
    "rollout.tensor_parallel divides the engine's experts too": "R.expert_parallel_size",
    ENGINE: """
        R.{max_num_batched_tokens,max_num_seqs,enable_chunked_prefill,enable_prefix_caching,
          free_cache_engine,disable_log_stats,skip_tokenizer_init,cudagraph_capture_sizes,
          multi_stage_wake_up,scheduling_policy,full_determinism}
        R.{prometheus.*,disaggregation.*,trace.*,layer_name_map.*,micro_batch_size}
        R.engine_kwargs.{vllm,sglang,trtllm}.{compilation_config.*,mm_processor_cache_gb,
          disable_mm_preprocessor_cache,attention_backend,batch_wait_timeout_iters,
          batch_wait_max_tokens_ratio,mamba_scheduler_strategy,disable_radix_cache,enable_memory_saver,
          enable_dp_attention,chunked_prefill_size,cuda_graph_max_bs,max_running_requests,disable_cuda_graph,
          enable_expert_parallel,enable_weights_cpu_backup,enable_draft_weights_cpu_backup,
          disable_overlap_schedule,additional_config.enable_cpu_binding,async_scheduling,swap_space}
    """,
    TRANSFER: """
        R.{load_format,layered_summon,update_weights_bucket_megabytes}
        R.checkpoint_engine.{update_weights_bucket_megabytes,backend,engine_kwargs,custom_backend_module}
    """,
    "isotrain's engines always run beside the controller": "R.mode",
    ALWAYS: "R.calculate_log_probs trainer.balance_batch",
    "multi-turn rollout: see multi_turn.enable": "R.multi_turn.{max_assistant_turns,format} R.multi_turn.*",
    "rollout.n is one field": "{A,REF}.rollout_n",
    "see reward_manager.name": "{reward.reward_manager,reward_manager}.{source,module.name}",
    "set reward.code.processes and reward.code.memory_gb": "{reward_model,reward}.sandbox_fusion.*",
    "see reward_manager": """
        {reward_model.reward_loop_source,reward_model.reward_loop_module_path,
          reward_model.reward_loop_class_name}
    """,
    "the reward model runs on the training ranks": """
        {reward_model,reward.reward_model}.{enable_resource_pool,n_gpus_per_node,nnodes,rollout.*,model.*,
          micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz,forward_max_token_len_per_gpu,megatron,
          nccl_timeout,load_weight}
    """,
    "gradients of FSDP2 stay on the device": "{A,REF,critic}.megatron.grad_offload",
    "see trainer.test_freq and trainer.total_epochs": "rollout.{test_freq,total_epochs}",
    "the asynchronous trainers, which trainer_mode: sync switches off": "trainer.v1.*",
    "set model.offload.optimizer": """
        A.optim.override_optimizer_config.{optimizer_cpu_offload,overlap_cpu_optimizer_d2h_h2d,
          optimizer_offload_fraction}
    """,
    "isotrain's first step of a warm-up is 1 / steps, not 0": "A.optim.zero_indexed_step",
    "trainer.steps is one field": "A.optim.total_training_steps",
    "the schedule WSD, which lr_decay_style chooses": "A.optim.{lr_wsd_decay_style,lr_wsd_decay_steps}",
    "the optimizer Muon, which optim.optimizer chooses": "A.optim.muon_*",
    "rollout.record writes the responses; `isotrain view` shows them": """
        trainer.{log_val_generations,validation_data_dir}
    """,
}

REFUSED = {
    "list the modules to train in model.lora.targets; start from a merged model": """
        M.{exclude_modules,lora_adapter_path}
    """,
    CODE: """
        M.{external_lib,hf_config_path,tokenizer_path} data.custom_cls.path
        data.{sampler.class_path,datagen.path}
    """,
    "write the template into the model's tokenizer files": "M.custom_chat_template",
    CONFIG: """
        M.override_config.max_position_embeddings {M,critic.model}.override_config
        M.override_config.{attention_dropout,embd_pdrop,resid_pdrop}=0
    """,
    MEGATRON: "*.megatron.{override_mcore_model_config,override_mcore_model_config.*}",
    "the tokenizer is the model's own": "data.tokenizer",
    "write the values into the model's chat template": "data.apply_chat_template_kwargs*",
    TURNS: """
        data.{tool_config_path,function_tool_path}
        R.multi_turn.{tool_config_path,interaction_config_path,function_tool_path}
        R.agent.{agent_loop_config_path,custom_async_server.path} R.multi_turn.enable=False
        R.agent.default_agent_loop=single_turn_agent
    """,
    "isotrain masks by the weights of rollout_is only: set rollout_correction.mode: mask": """
        algorithm.rollout_correction.rollout_rs
    """,
    "engines get the trained weights as they are": "R.{quantization,quantization_config_file}",
    "give the parameters of the function these defaults": """
        {custom_reward_function,reward.custom_reward_function}.reward_kwargs*
    """,
    "write a reward function (docs/rewards.md)": "{reward.reward_manager,reward_manager}.module.path",
    ASYNC: """
        async_training.{staleness_threshold,trigger_parameter_sync_step,require_batches}
        trainer.v1.trainer_mode=sync
    """,
    "rewards see the whole response": "reward_model.max_length",
    "its values are not known: import the resolved configuration of a run": """
        {--config-name,--config-path,--config-dir}
    """,
    "set model.dtype": "*.mixed_precision.param_dtype=bf16 *.megatron.dtype=bfloat16|bf16",
    "gradients are always reduced in float32": "*.mixed_precision.reduce_dtype=fp32",
    "trained weights are always float32": "A.fsdp_config.model_dtype=fp32|float32",
    "Megatron's LoRA has other modules: use model.lora.rank and model.lora.targets": "M.lora.rank=0",
    "isotrain trains the routers too": "M.override_config.moe_config.freeze_moe_router=False",
    "isotrain does not train multi-token prediction heads": "M.mtp.enable=False",
    IMAGES: "A.freeze_vision_tower=False",
    "models begin with the weights of model.path": "{A,REF}.load_weight=True",
    "isotrain does not train quantized weights": "*.qat.enable=False",
    "isotrain has no router replay": "*.router_replay.mode=disabled R.enable_rollout_routing_replay=False",
    "write the rows to train on into a file of their own": "data.train_max_samples=-1",
    "the reward function gets the whole row as `row`": "data.reward_fn_key=data_source",
    "mini-batches keep the order in which prompts were drawn": "A.shuffle=False critic.shuffle=False",
    "isotrain always computes old log-probs with the trained model": """
        algorithm.rollout_correction.bypass_mode=False
    """,
    "weights are not normalized over the batch": """
        algorithm.rollout_correction.rollout_is_batch_normalize=False
    """,
    "isotrain does not reweight samples": "algorithm.use_pf_ppo=False",
    "PPO (adv_estimator: gae) has a critic": "critic.enable=True",
    "the critic trains all weights": "critic.model.lora_rank=0",
    "the critic begins with the weights of algorithm.critic.path": "critic.load_weight=True",
    "training samples: GRPO and its relatives compare different responses": "R.do_sample=True",
    "responses end at the end-of-text token": "R.ignore_eos=False",
    "isotrain waits for every response": "R.over_sample_rate=0",
    "isotrain samples every token at one temperature": "R.use_fire_sampling=False",
    "engines compute in model.dtype": "R.dtype=bfloat16|auto",
    "log-probs of the engine are those of the tokens that it samples from": """
        R.logprobs_mode=processed_logprobs
    """,
    RECORDED: "R.skip_rollout=False skip.{rollout,rollout_tq,async_rollout}.enable=False",
    "the cosine falls once": "A.optim.num_cycles=0.5",
    "isotrain has AdamW": "A.optim.optimizer=AdamW|adam|adamw",
    "isotrain has AdamW; optimizer.state_dtype: bfloat16 saves memory": "A.optim.optimizer_impl=torch.optim",
    "isotrain has no such schedule": "A.optim.{weight_decay_incr_style,lr_warmup_init}=constant|0.0",
    "gradients and moments are float32; optimizer.state_dtype: bfloat16 saves memory": """
        A.optim.{use_precision_aware_optimizer,main_grads_dtype,exp_avg_dtype,
          exp_avg_sq_dtype}=False|fp32|float32
    """,
    "isotrain has no run without training; set trainer.steps: 1 and validate_first": """
        trainer.val_only=False
    """,
    "isotrain has no distillation": "distillation.enabled=False",
}

# Refusals that do not change the training.
REFUSED_SETTINGS = {
    CODE: "M.trust_remote_code=False data.trust_remote_code=False",
    "set model.attention": "M.override_config.attn_implementation=flash_attention_2|sdpa",
    "routers compute as transformers does": "A.megatron.override_transformer_config.moe_router_dtype=fp32",
    SAMPLING: "R.val_kwargs.top_p=1 R.val_kwargs.top_k=-1|0",
    "set rollout.engines and rollout.tensor_parallel": """
        R.{data_parallel_size,pipeline_model_parallel_size}=1
    """,
    "copy the run directory to output, and resume: auto goes on there": "trainer.resume_from_path",
}

RULES = [
    # Names
    part("trainer.experiment_name", "name", "gsm8k"),
    part("trainer.default_local_dir", "output"),
    part("data.seed", "seed"),
    # Devices
    part("trainer.nnodes", "device.ranks", 1),
    part("trainer.n_gpus_per_node", "device.ranks", 8),
    part("A.{,fsdp_config.}ulysses_sequence_parallel_size", "device.mesh.context", 1),
    part("A.megatron.context_parallel_size", "device.mesh.context", 1),
    part("A.megatron.expert_model_parallel_size", "device.mesh.expert", 1),
    part("A.fsdp_config.fsdp_size", "device.mesh.replicas", -1),
    part("A.fsdp_config.full_determinism", "device.determinism", False),
    part("A.strategy", "optimizer.schedule", "fsdp"),
    part("model_engine", "optimizer.schedule"),
    # Model
    maps("M.path", "model.path", "~/models/deepseek-llm-7b-chat", text),
    maps("M.enable_gradient_checkpointing", "model.gradient_checkpointing", True, flag),
    maps("M.enable_activation_offload", "model.offload.activations", False, flag),
    part("A.fsdp_config.offload_policy", "model.offload.weights", False),
    part("A.fsdp_config.dtype", "model.dtype", "bfloat16"),
    part("M.lora_rank", "model.lora.rank", 0),
    part("M.lora_alpha", "model.lora.alpha", 16),
    part("M.target_modules", "model.lora.targets", "all-linear"),
    # Data
    maps("data.train_files", "data.train", "~/data/rlhf/gsm8k/train.parquet", texts),
    maps("data.val_files", "data.validation", "~/data/rlhf/gsm8k/test.parquet", texts),
    maps("data.prompt_key", "data.prompt_key", "prompt", text),
    maps("data.max_prompt_length", "data.max_length", 512, whole),
    part("data.train_batch_size", "data.batch_size", 1024),
    maps("data.shuffle", "data.shuffle", True, flag),
    part("data.filter_overlong_prompts", "data.too_long", False),
    part("data.truncation", "data.too_long", "error"),
    part("A.use_dynamic_bsz", "data.tokens_per_micro_batch", False),
    part("A.ppo_max_token_len_per_gpu", "data.tokens_per_micro_batch", 16384),
    part("A.ppo_micro_batch_size{_per_gpu,}", "data.tokens_per_micro_batch"),
    part("data.gen_batch_size", "algorithm.dynamic_sampling.max_attempts"),
    part("data.val_max_samples", "data.validation_rows", -1),
    part("data.{image_key,video_key,audio_key}", "data.train"),
    # Algorithm
    part("algorithm.adv_estimator", "algorithm.name", "gae"),
    part("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_by_std", True),
    part("algorithm.gamma", "algorithm.gamma", 1.0),
    part("algorithm.lam", "algorithm.lam", 1.0),
    part("A.ppo_mini_batch_size", "algorithm.mini_batch_size", 256),
    maps("A.ppo_epochs", "algorithm.ppo_epochs", 1, whole),
    part("A.policy_loss.loss_mode", "algorithm.loss.name", "vanilla"),
    part("A.use_gpg_loss", "algorithm.loss.name"),
    part("A.clip_ratio A.clip_ratio_low", "algorithm.loss.clip_ratio_low", 0.2),
    part("A.clip_ratio_high", "algorithm.loss.clip_ratio_high", 0.2),
    part("A.clip_ratio_c", "algorithm.loss.dual_clip", 3.0),
    part("A.loss_agg_mode", "algorithm.loss.aggregation", "token-mean"),
    part("A.loss_scale_factor", "algorithm.loss.aggregation"),
    maps("A.entropy_coeff", "algorithm.loss.entropy", 0, number),
    part("algorithm.use_kl_in_reward A.use_kl_loss", "algorithm.kl.place", False),
    part("algorithm.kl_penalty", "algorithm.kl.estimator", "kl"),
    part("algorithm.kl_ctrl.kl_coef A.kl_loss_coef", "algorithm.kl.coefficient", 0.001),
    part("algorithm.kl_ctrl.type", "algorithm.kl.controller", "fixed"),
    part("algorithm.kl_ctrl.target_kl", "algorithm.kl.target", 0.1),
    part("algorithm.kl_ctrl.horizon", "algorithm.kl.horizon", 10000),
    part("A.kl_loss_type", "algorithm.kl.estimator", "low_var_kl"),
    part("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.level"),
    part("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_correction.upper", 2.0),
    part("A.tis_imp_ratio_cap", "algorithm.rollout_correction.upper", -1),
    part("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.max_attempts", False),
    part("algorithm.filter_groups.metric", "algorithm.dynamic_sampling.max_attempts"),
    part("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.max_attempts", 0),
    part("{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.{enable,len}", "algorithm.overlong.buffer"),
    part(
        "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.penalty_factor", "algorithm.overlong.factor"
    ),
    part("{reward_model,reward}.reward_kwargs.max_resp_len", "rollout.max_tokens"),
    part("reward_model.overlong_buffer.{enable,len}", "algorithm.overlong.buffer"),
    part("reward_model.overlong_buffer.penalty_factor", "algorithm.overlong.factor"),
    # Critic
    part("critic.model.path", "algorithm.critic.path", "~/models/deepseek-llm-7b-chat"),
    part("critic.optim.lr", "algorithm.critic.lr", 1e-5),
    part("critic.cliprange_value", "algorithm.critic.clip", 0.5),
    part("trainer.critic_warmup", "algorithm.critic.warmup_steps", 0),
    part("critic.optim.lr_warmup_steps_ratio", "optimizer.warmup_ratio", 0.0),
    part("critic.optim.lr_warmup_steps", "optimizer.warmup_steps"),
    part("critic.optim.weight_decay", "optimizer.weight_decay", 0.01),
    part("critic.optim.betas", "optimizer.betas"),
    part("critic.optim.{warmup_style,lr_scheduler_type,lr_decay_style}", "optimizer.schedule"),
    part("critic.optim.min_lr_ratio", "optimizer.min_lr_ratio"),
    part("critic.optim.clip_grad", "optimizer.max_grad_norm"),
    part("critic.grad_clip", "optimizer.max_grad_norm", 1.0),
    part("critic.ppo_mini_batch_size", "algorithm.mini_batch_size"),
    part("critic.ppo_epochs", "algorithm.ppo_epochs"),
    part("critic.loss_agg_mode", "algorithm.critic.aggregation"),
    part("critic.loss_scale_factor", "algorithm.loss.aggregation"),
    part("critic.{model.fsdp_config,fsdp}.{param_offload,optimizer_offload}", "cluster.offload", False),
    # Rollout
    part("R.name", "rollout.engine", "vllm"),
    maps("R.n", "rollout.n", 1, whole),
    maps("data.max_response_length", "rollout.max_tokens", 512, whole),
    maps("R.temperature", "rollout.temperature", 1.0, number),
    maps("R.top_p", "rollout.top_p", 1, number),
    maps("R.top_k", "rollout.top_k", -1, lambda value: whole(value) or -1),
    maps("R.tensor_model_parallel_size", "rollout.tensor_parallel", 2, whole),
    maps("R.gpu_memory_utilization", "rollout.memory_utilization", 0.5, number),
    maps("R.enforce_eager", "rollout.eager", by(True, False, False), flag),
    part("R.val_kwargs.n", "rollout.validation.n", 1),
    part("R.val_kwargs.temperature", "rollout.validation.temperature", 0),
    part("R.val_kwargs.do_sample", "rollout.validation.temperature", False),
    part("R.{max_model_len,prompt_length,response_length}", "rollout.max_tokens"),
    # Reward
    part("{custom_reward_function,reward.custom_reward_function}.path", "reward.function.path"),
    part(
        "{custom_reward_function,reward.custom_reward_function}.name", "reward.function.path", "compute_score"
    ),
    part("{reward_model.reward_manager,reward.reward_manager.name,reward_manager.name}", "reward", "naive"),
    part("{reward_model,reward.reward_model}.enable", "reward.model", False),
    part("{reward_model.model.path,reward.reward_model.model_path}", "reward.model.path"),
    part("{reward_model,reward}.sandbox_fusion.url", "reward.code.sandbox"),
    # Cluster
    part("{A,REF}.fsdp_config.{param_offload,optimizer_offload}", "cluster.offload", False),
    part("A.megatron.{param_offload,optimizer_offload}", "cluster.offload", False),
    part("REF.megatron.param_offload", "cluster.offload", False),
    part("actor_rollout_ref.hybrid_engine", "cluster.placement", True),
    part("rollout.nnodes rollout.n_gpus_per_node", "rollout.engines"),
    part("rollout.total_rollout_steps", "trainer.steps"),
    part("async_training.partial_rollout", "rollout.in_flight"),
    # Optimizer
    maps("A.optim.lr", "optimizer.lr", 1e-6, number),
    maps("A.optim.betas", "optimizer.betas", [0.9, 0.999]),
    maps("A.optim.weight_decay", "optimizer.weight_decay", 0.01, number),
    part("A.grad_clip A.optim.clip_grad", "optimizer.max_grad_norm", 1.0),
    part("A.optim.lr_warmup_steps", "optimizer.warmup_steps", -1),
    part("A.optim.lr_warmup_steps_ratio", "optimizer.warmup_ratio", 0.0),
    part("A.optim.warmup_style", "optimizer.schedule", by("constant", None, None)),
    part("A.optim.lr_scheduler_type", "optimizer.schedule", by(None, "constant", "constant")),
    part("A.optim.lr_decay_style", "optimizer.schedule", "constant"),
    part("A.optim.lr_decay_steps", "optimizer.schedule"),
    part("A.optim.min_lr_ratio A.optim.min_lr", "optimizer.min_lr_ratio", 0.0),
    # Trainer
    part("trainer.total_epochs", "trainer.epochs", 30),
    part("trainer.total_training_steps", "trainer.steps"),
    maps("trainer.test_freq", "trainer.validate_every", -1, every),
    maps("trainer.val_before_train", "trainer.validate_first", True, flag),
    maps("trainer.save_freq", "trainer.save_every", -1, every),
    part("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    part("trainer.resume_mode", "trainer.resume", "auto"),
    part("trainer.logger", "observe.loggers", ["console", "wandb"]),
    maps("trainer.project_name", "observe.project", "verl_examples", text),
    part("trainer.rollout_data_dir", "rollout.record"),
]

# Patterns that hold where no rule above does.
REST = {
    "a model option of Megatron that isotrain does not know: check what it changes": """
        *.megatron.override_transformer_config.*
    """,
    "an option of the engine that isotrain does not know": "R.engine_kwargs*",
    "set the fields of optimizer": "A.optim.override_optimizer_config*",
    ASYNC: "async_training.*",
    CONFIG: "M.override_config.*",
}
REST_NO_EFFECT = {
    LAYOUT: """
        *.megatron.{param_offload,optimizer_offload,grad_offload,*_parallel_size,sequence_parallel}
    """,
    LOGGED: "{*.profiler.*,*.profile.*,*.profiler,*._target_,_target_}",
    "distillation, which enabled: False switches off": "distillation.*",
    "its switch is off": "skip.*",
}

TABLE = KeyTable(
    no_effect({LAYOUT: "*.{veomni,torchtitan,automodel}.*"}),
    RULES,
    refused(REFUSED),
    refused(REFUSED_SETTINGS, changes=False),
    no_effect(NO_EFFECT),
    [part("critic.optim.*", "optimizer")],
    refused(REST),
    no_effect(REST_NO_EFFECT),
    short={"A": A, "R": R, "M": M, "REF": REF},
)
