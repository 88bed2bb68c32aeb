"""verl's keys of PPO and its relatives (`verl.trainer.main_ppo`), one line each, grouped as a recipe is."""

from __future__ import annotations

from isotrain.imports.draft import every, flag, number, text, whole
from isotrain.imports.rules import ByVersion, Table, drops, maps, part, refuses
from isotrain.imports.verl_data_keys import DATA, DEVICES, MODEL, NAMES
from isotrain.imports.verl_reasons import (
    ALWAYS,
    ASYNC,
    BUDGET,
    ENGINE,
    LAYOUT,
    LOGGED,
    OPTIM,
    RAY,
    SAMPLING,
    SAVED,
    TRANSFER,
    TURNS,
    A,
    R,
)

# Options of engines that change their speed and memory, and no token.
ENGINE_OPTIONS = (
    "compilation_config.*,mm_processor_cache_gb,disable_mm_preprocessor_cache,attention_backend,"
    "batch_wait_timeout_iters,batch_wait_max_tokens_ratio,mamba_scheduler_strategy,disable_radix_cache,"
    "enable_memory_saver,enable_dp_attention,chunked_prefill_size,cuda_graph_max_bs,max_running_requests,"
    "disable_cuda_graph,enable_expert_parallel,enable_weights_cpu_backup,enable_draft_weights_cpu_backup,"
    "disable_overlap_schedule,additional_config.enable_cpu_binding,async_scheduling,swap_space"
)
VERSIONS = ("0.5.0", "0.7.0", "2026-08")
"""Whose defaults are in the tables; the last is verl's main branch of August 2026."""


def _by(*values: object) -> ByVersion:
    return ByVersion(values)


ALGORITHM = [
    part("algorithm.adv_estimator", "algorithm.name", "gae"),
    part("algorithm.norm_adv_by_std_in_grpo", "algorithm.scale_by_std", True),
    part("algorithm.gamma", "algorithm.gamma", 1.0),
    part("algorithm.lam", "algorithm.lam", 1.0),
    part(f"{A}.ppo_mini_batch_size", "algorithm.mini_batch_size", 256),
    maps(f"{A}.ppo_epochs", "algorithm.ppo_epochs", 1, whole),
    refuses(f"{A}.shuffle", False, why="mini-batches keep the order in which prompts were drawn"),
    part(f"{A}.policy_loss.loss_mode", "algorithm.loss.name", "vanilla"),
    part(f"{A}.use_gpg_loss", "algorithm.loss.name"),
    drops(f"{A}.policy_loss.*", "a constant of a policy loss that is not used"),
    drops(f"{A}.{{tau_pos,tau_neg}}", "a constant of a policy loss that is not used (sapo)"),
    part(f"{A}.clip_ratio", "algorithm.loss.clip_ratio_low", 0.2),
    part(f"{A}.clip_ratio_low", "algorithm.loss.clip_ratio_low", 0.2),
    part(f"{A}.clip_ratio_high", "algorithm.loss.clip_ratio_high", 0.2),
    part(f"{A}.clip_ratio_c", "algorithm.loss.dual_clip", 3.0),
    part(f"{A}.loss_agg_mode", "algorithm.loss.aggregation", "token-mean"),
    part(f"{A}.loss_scale_factor", "algorithm.loss.aggregation"),
    maps(f"{A}.entropy_coeff", "algorithm.loss.entropy", 0, number),
    drops(f"{A}.{{calculate_entropy,calculate_sum_pi_squared}}", LOGGED),
    part("algorithm.use_kl_in_reward", "algorithm.kl.place", False),
    part("algorithm.kl_penalty", "algorithm.kl.estimator", "kl"),
    part("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", 0.001),
    part("algorithm.kl_ctrl.type", "algorithm.kl.controller", "fixed"),
    part("algorithm.kl_ctrl.target_kl", "algorithm.kl.target", 0.1),
    part("algorithm.kl_ctrl.horizon", "algorithm.kl.horizon", 10000),
    part(f"{A}.use_kl_loss", "algorithm.kl.place", False),
    part(f"{A}.kl_loss_coef", "algorithm.kl.coefficient", 0.001),
    part(f"{A}.kl_loss_type", "algorithm.kl.estimator", "low_var_kl"),
    part("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.level"),
    part("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_correction.upper", 2.0),
    part(f"{A}.tis_imp_ratio_cap", "algorithm.rollout_correction.upper", -1),
    refuses(
        "algorithm.rollout_correction.rollout_rs",
        why="isotrain masks by the weights of rollout_is only: set rollout_correction.mode: mask",
    ),
    drops(
        "algorithm.rollout_correction.{rollout_rs_threshold,rollout_rs_threshold_lower,"
        "rollout_token_veto_threshold}",
        "the bounds of rollout_rs",
    ),
    refuses(
        "algorithm.rollout_correction.bypass_mode",
        False,
        why="isotrain always computes old log-probs with the trained model",
    ),
    drops("algorithm.rollout_correction.loss_type", "the loss of bypass_mode"),
    refuses(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        False,
        why="weights are not normalized over the batch",
    ),
    part("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.max_attempts", False),
    part("algorithm.filter_groups.metric", "algorithm.dynamic_sampling.max_attempts"),
    part("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.max_attempts", 0),
    drops("algorithm.filter_groups.max_inflight_gen_batches", "it changes the speed only"),
    part("{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.enable", "algorithm.overlong.buffer"),
    part("{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.len", "algorithm.overlong.buffer"),
    part(
        "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.penalty_factor", "algorithm.overlong.factor"
    ),
    drops("{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.log", LOGGED),
    part("{reward_model,reward}.reward_kwargs.max_resp_len", "rollout.max_tokens"),
    part("reward_model.overlong_buffer.{enable,len}", "algorithm.overlong.buffer"),
    part("reward_model.overlong_buffer.penalty_factor", "algorithm.overlong.factor"),
    drops("reward_model.overlong_buffer.log", LOGGED),
    refuses("algorithm.use_pf_ppo", False, why="isotrain does not reweight samples"),
    drops("algorithm.pf_ppo.*", "its switch use_pf_ppo is off"),
]

CRITIC = [
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
    drops("critic.{rollout_n,data_loader_seed}", "the critic follows the policy"),
    refuses("critic.shuffle", False, why="mini-batches keep the order in which prompts were drawn"),
    refuses("critic.enable", True, why="PPO (adv_estimator: gae) has a critic"),
    part("critic.loss_scale_factor", "algorithm.loss.aggregation"),
    part("critic.optim.*", "optimizer"),
    drops(
        "critic.{ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu,ppo_micro_batch_size,"
        "use_dynamic_bsz,forward_max_token_len_per_gpu,forward_micro_batch_size,"
        "forward_micro_batch_size_per_gpu}",
        BUDGET,
    ),
    drops(
        "critic.model.enable_gradient_checkpointing", "model.gradient_checkpointing holds for the critic too"
    ),
    part("critic.model.fsdp_config.{param_offload,optimizer_offload}", "cluster.offload", False),
    part("critic.fsdp.{param_offload,optimizer_offload}", "cluster.offload", False),
    refuses("critic.model.lora_rank", 0, why="the critic trains all weights"),
    drops("critic.model.*", "the critic follows the policy's model options"),
    drops("critic.nccl_timeout", RAY),
    refuses("critic.load_weight", True, why="the critic begins with the weights of algorithm.critic.path"),
]

ROLLOUT = [
    part(f"{R}.name", "rollout.engine", "vllm"),
    maps(f"{R}.n", "rollout.n", 1, whole),
    maps("data.max_response_length", "rollout.max_tokens", 512, whole),
    maps(f"{R}.temperature", "rollout.temperature", 1.0, number),
    maps(f"{R}.top_p", "rollout.top_p", 1, number),
    maps(f"{R}.top_k", "rollout.top_k", -1, lambda value: whole(value) or -1),
    maps(f"{R}.tensor_model_parallel_size", "rollout.tensor_parallel", 2, whole),
    maps(f"{R}.gpu_memory_utilization", "rollout.memory_utilization", 0.5, number),
    maps(f"{R}.enforce_eager", "rollout.eager", _by(True, False, False), flag),
    part(f"{R}.val_kwargs.n", "rollout.validation.n", 1),
    part(f"{R}.val_kwargs.temperature", "rollout.validation.temperature", 0),
    part(f"{R}.val_kwargs.do_sample", "rollout.validation.temperature", False),
    refuses(f"{R}.val_kwargs.top_p", 1, why=SAMPLING, changes=False),
    refuses(f"{R}.val_kwargs.top_k", -1, 0, why=SAMPLING, changes=False),
    refuses(
        f"{R}.do_sample", True, why="training samples: GRPO and its relatives compare different responses"
    ),
    refuses(f"{R}.ignore_eos", False, why="responses end at the end-of-text token"),
    refuses(
        f"{R}.{{data_parallel_size,pipeline_model_parallel_size}}",
        1,
        why="set rollout.engines and rollout.tensor_parallel",
        changes=False,
    ),
    drops(f"{R}.expert_parallel_size", "rollout.tensor_parallel divides the engine's experts too"),
    refuses(
        f"{R}.{{quantization,quantization_config_file}}", why="engines get the trained weights as they are"
    ),
    refuses(f"{R}.enable_rollout_routing_replay", False, why="isotrain has no router replay"),
    refuses(f"{R}.over_sample_rate", 0, why="isotrain waits for every response"),
    refuses(f"{R}.use_fire_sampling", False, why="isotrain samples every token at one temperature"),
    part(f"{R}.{{max_model_len,prompt_length,response_length}}", "rollout.max_tokens"),
    drops(
        f"{R}.{{max_num_batched_tokens,max_num_seqs,enable_chunked_prefill,enable_prefix_caching,"
        "free_cache_engine,disable_log_stats,skip_tokenizer_init,cudagraph_capture_sizes,"
        f"multi_stage_wake_up,scheduling_policy,full_determinism}}",
        ENGINE,
    ),
    refuses(f"{R}.dtype", "bfloat16", "auto", why="engines compute in model.dtype"),
    drops(f"{R}.{{prometheus.*,disaggregation.*,trace.*,layer_name_map.*,micro_batch_size}}", ENGINE),
    drops(f"{R}.engine_kwargs.{{vllm,sglang,trtllm}}.{{{ENGINE_OPTIONS}}}", ENGINE),
    refuses(f"{R}.engine_kwargs*", why="an option of the engine that isotrain does not know"),
    refuses(
        f"{R}.logprobs_mode",
        "processed_logprobs",
        why="log-probs of the engine are those of the tokens that it samples from",
    ),
    drops(f"{R}.{{load_format,layered_summon,update_weights_bucket_megabytes}}", TRANSFER),
    drops(
        f"{R}.checkpoint_engine.{{update_weights_bucket_megabytes,backend,engine_kwargs,"
        f"custom_backend_module}}",
        TRANSFER,
    ),
    drops(f"{R}.mode", "isotrain's engines always run beside the controller"),
    drops(f"{R}.calculate_log_probs", ALWAYS),
    drops(f"{R}.{{nnodes,n_gpus_per_node,skip_dump_dir}}", RAY),
    refuses(f"{R}.skip_rollout", False, why="set rollout.record and rollout.replay"),
    refuses(f"{R}.multi_turn.enable", False, why=TURNS),
    refuses(f"{R}.multi_turn.{{tool_config_path,interaction_config_path,function_tool_path}}", why=TURNS),
    drops(f"{R}.multi_turn.{{max_assistant_turns,format}}", "multi-turn rollout: see multi_turn.enable"),
    drops(f"{R}.multi_turn.*", "multi-turn rollout: see multi_turn.enable"),
    refuses(f"{R}.agent.{{agent_loop_config_path,custom_async_server.path}}", why=TURNS),
    refuses(f"{R}.agent.default_agent_loop", "single_turn_agent", why=TURNS),
    drops(f"{R}.agent.{{num_workers,custom_async_server.name}}", RAY),
    drops("{actor_rollout_ref.actor,actor_rollout_ref.ref}.rollout_n", "rollout.n is one field"),
]

REWARD = [
    part("{custom_reward_function,reward.custom_reward_function}.path", "reward.function.path"),
    part(
        "{custom_reward_function,reward.custom_reward_function}.name", "reward.function.path", "compute_score"
    ),
    refuses(
        "{custom_reward_function,reward.custom_reward_function}.reward_kwargs*",
        why="give the parameters of the function these defaults",
    ),
    part("{reward_model.reward_manager,reward.reward_manager.name,reward_manager.name}", "reward", "naive"),
    part("{reward_model,reward.reward_model}.enable", "reward.model", False),
    part("{reward_model.model.path,reward.reward_model.model_path}", "reward.model.path"),
    refuses(
        "{reward.reward_manager,reward_manager}.module.path", why="write a reward function (docs/rewards.md)"
    ),
    drops("{reward.reward_manager,reward_manager}.{source,module.name}", "see reward_manager.name"),
    part("{reward_model,reward}.sandbox_fusion.url", "reward.code.sandbox"),
    drops("{reward_model,reward}.sandbox_fusion.*", "set reward.code.processes and reward.code.memory_gb"),
    drops(
        "{sandbox_fusion.*,reward.num_workers,reward_model.num_workers,"
        "reward_model.launch_reward_fn_async,reward_model.use_reward_loop}",
        RAY,
    ),
    drops(
        "{reward_model.reward_loop_source,reward_model.reward_loop_module_path,"
        "reward_model.reward_loop_class_name}",
        "see reward_manager",
    ),
    drops(
        "{reward_model,reward.reward_model}.{enable_resource_pool,n_gpus_per_node,nnodes,rollout.*,"
        "model.*,micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz,"
        "forward_max_token_len_per_gpu,megatron,nccl_timeout,load_weight}",
        "the reward model runs on the training ranks",
    ),
]

CLUSTER = [
    part(f"{A}.fsdp_config.{{param_offload,optimizer_offload}}", "cluster.offload", False),
    part("actor_rollout_ref.ref.fsdp_config.{param_offload,optimizer_offload}", "cluster.offload", False),
    part(f"{A}.megatron.{{param_offload,optimizer_offload}}", "cluster.offload", False),
    drops(
        f"{{{A},actor_rollout_ref.ref,critic}}.megatron.grad_offload", "gradients of FSDP2 stay on the device"
    ),
    part("actor_rollout_ref.ref.megatron.param_offload", "cluster.offload", False),
    part("actor_rollout_ref.hybrid_engine", "cluster.placement", True),
    part("rollout.nnodes", "rollout.engines"),
    part("rollout.n_gpus_per_node", "rollout.engines"),
    part("rollout.total_rollout_steps", "trainer.steps"),
    refuses("async_training.{staleness_threshold,trigger_parameter_sync_step,require_batches}", why=ASYNC),
    part("async_training.partial_rollout", "rollout.in_flight"),
    refuses("async_training.*", why=ASYNC),
    drops("rollout.{test_freq,total_epochs}", "see trainer.test_freq and trainer.total_epochs"),
    refuses("trainer.v1.trainer_mode", "sync", why=ASYNC),
    drops("trainer.v1.*", "the asynchronous trainers, which trainer_mode: sync switches off"),
]

OPTIMIZER = [
    maps(f"{OPTIM}.lr", "optimizer.lr", 1e-6, number),
    maps(f"{OPTIM}.betas", "optimizer.betas", [0.9, 0.999]),
    maps(f"{OPTIM}.weight_decay", "optimizer.weight_decay", 0.01, number),
    part(f"{A}.grad_clip", "optimizer.max_grad_norm", 1.0),
    part(f"{OPTIM}.clip_grad", "optimizer.max_grad_norm", 1.0),
    part(f"{OPTIM}.lr_warmup_steps", "optimizer.warmup_steps", -1),
    part(f"{OPTIM}.lr_warmup_steps_ratio", "optimizer.warmup_ratio", 0.0),
    part(f"{OPTIM}.warmup_style", "optimizer.schedule", _by("constant", None, None)),
    part(f"{OPTIM}.lr_scheduler_type", "optimizer.schedule", _by(None, "constant", "constant")),
    part(f"{OPTIM}.lr_decay_style", "optimizer.schedule", "constant"),
    part(f"{OPTIM}.lr_decay_steps", "optimizer.schedule"),
    part(f"{OPTIM}.min_lr_ratio", "optimizer.min_lr_ratio", 0.0),
    part(f"{OPTIM}.min_lr", "optimizer.min_lr_ratio", 0.0),
    refuses(f"{OPTIM}.num_cycles", 0.5, why="the cosine falls once"),
    refuses(f"{OPTIM}.optimizer", "AdamW", "adam", "adamw", why="isotrain has AdamW"),
    refuses(
        f"{OPTIM}.optimizer_impl",
        "torch.optim",
        why="isotrain has AdamW; optimizer.state_dtype: bfloat16 saves memory",
    ),
    drops(
        f"{OPTIM}.override_optimizer_config.{{optimizer_cpu_offload,overlap_cpu_optimizer_d2h_h2d,"
        f"optimizer_offload_fraction}}",
        "set model.offload.optimizer",
    ),
    refuses(f"{OPTIM}.override_optimizer_config*", why="set the fields of optimizer"),
    refuses(
        f"{OPTIM}.{{weight_decay_incr_style,lr_warmup_init}}",
        "constant",
        0.0,
        why="isotrain has no such schedule",
    ),
    drops(f"{OPTIM}.zero_indexed_step", "isotrain's first step of a warm-up is 1 / steps, not 0"),
    drops(f"{OPTIM}.total_training_steps", "trainer.steps is one field"),
    drops(
        f"{OPTIM}.{{lr_wsd_decay_style,lr_wsd_decay_steps}}", "the schedule WSD, which lr_decay_style chooses"
    ),
    drops(f"{OPTIM}.muon_*", "the optimizer Muon, which optim.optimizer chooses"),
    drops(f"{OPTIM}.{{use_checkpoint_opt_param_scheduler,use_layer_wise_distributed_optimizer}}", LAYOUT),
    refuses(
        f"{OPTIM}.{{use_precision_aware_optimizer,main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype}}",
        False,
        "fp32",
        "float32",
        why="gradients and moments are float32; optimizer.state_dtype: bfloat16 saves memory",
    ),
]

TRAINER = [
    part("trainer.total_epochs", "trainer.epochs", 30),
    part("trainer.total_training_steps", "trainer.steps"),
    maps("trainer.test_freq", "trainer.validate_every", -1, every),
    maps("trainer.val_before_train", "trainer.validate_first", True, flag),
    maps("trainer.save_freq", "trainer.save_every", -1, every),
    part("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    part("trainer.resume_mode", "trainer.resume", "auto"),
    refuses(
        "trainer.resume_from_path",
        why="copy the run directory to output, and resume: auto goes on there",
        changes=False,
    ),
    refuses(
        "trainer.val_only",
        False,
        why="isotrain has no run without training; set trainer.steps: 1 and validate_first",
    ),
    drops(
        "trainer.{max_critic_ckpt_to_keep,del_local_ckpt_after_load,default_hdfs_dir,esi_redundant_time}",
        SAVED,
    ),
    drops(f"{{{A},critic}}.checkpoint.{{save_contents,load_contents,async_save,strict}}", SAVED),
    drops("trainer.balance_batch", ALWAYS),
    drops("trainer.{use_legacy_worker_impl,use_v1,ray_wait_register_center_timeout}", RAY),
    drops("ray_kwargs.ray_init.runtime_env.py_executable", RAY),
    drops(
        "{ray_kwargs.*,ray_init.*,global_profiler.*,transfer_queue.*,trainer.profile_steps,"
        "trainer.npu_profile.*,trainer.controller_nsight_options.*,trainer.worker_nsight_options.*}",
        RAY,
    ),
    drops("{*.profiler.*,*.profile.*,*.profiler,*._target_,_target_}", LOGGED),
    refuses("distillation.enabled", False, why="isotrain has no distillation"),
    refuses("reward_model.max_length", why="rewards see the whole response"),
    drops("distillation.*", "distillation, which enabled: False switches off"),
    refuses(
        "skip.{rollout,rollout_tq,async_rollout}.enable", False, why="set rollout.record and rollout.replay"
    ),
    drops("skip.*", "its switch is off"),
    drops("hydra.*", RAY),
    refuses(
        "{--config-name,--config-path,--config-dir}",
        why="its values are not known: import the resolved configuration of a run",
    ),
]

OBSERVE = [
    part("trainer.logger", "observe.loggers", ["console", "wandb"]),
    maps("trainer.project_name", "observe.project", "verl_examples", text),
    drops(
        "trainer.{log_val_generations,validation_data_dir}",
        "rollout.record writes the responses; `isotrain view` shows them",
    ),
    part("trainer.rollout_data_dir", "rollout.record"),
]

TABLE = Table(
    NAMES, DEVICES, MODEL, DATA, ALGORITHM, CRITIC, ROLLOUT, REWARD, CLUSTER, OPTIMIZER, TRAINER, OBSERVE
)
