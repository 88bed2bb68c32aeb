"""OpenRLHF's flags, one line each, grouped as a recipe is; the flat names before 2026-04-19 are below."""

from __future__ import annotations

from isotrain.tools.imports.draft import every, flag, number, text, whole
from isotrain.tools.imports.rules import KeyTable, by, maps, no_effect, part, refused
from isotrain.tools.imports.verl_keys import ENGINE, LAYOUT, LOGGED, PACKED, SAVED, TRANSFER

VERSIONS = ("0.5.9", "0.8.0", "0.10.1", "0.11.0")
"""Whose defaults are in the tables; 0.10.1 was the last with flat names."""


KERNELS = "another kernel for the same result; see model.attention and model.fused"
PLACED = "all models but the engines share the training ranks"
IMAGES = "isotrain trains on text: remove images from the rows"
SHORT = "write it as `data.train: [a, b]` with the rows that you want of each"

COMMON_NO_EFFECT = {
    LAYOUT: """
        ds.ring_attn_head_stride ds.tensor_parallel_size ds.zero_stage ds.zpg ds.overlap_comm
        ds.{grad_accum_dtype,deepcompile,use_universal_ckpt,experts_implementation}
        {local_rank,perf,actor_init_on_gpu,save_value_network,critic.save_value_network}
    """,
    "model.dtype is bfloat16": "bf16",
    KERNELS: """
        ds.attn_implementation flash_attn ds.use_liger_kernel {actor,model}.gradient_checkpointing_reentrant
    """,
    PACKED: "ds.packing_samples",
    "the head of a reward model is found by its shape": "ds.value_head_prefix",
    "it changes the speed only": "data.{disable_fast_tokenizer,dataloader_num_workers}",
    "checkpoints are in the run directory (output)": "ckpt.path",
    SAVED: "ckpt.save_hf ckpt.{disable_ds,max_mem,best_metric_key}",
    "the wandb package reads WANDB_ENTITY and WANDB_RUN_GROUP": "logger.wandb.{org,group}",
    LOGGED: "logger.logging_steps",
    "download the model and give its directory": "use_ms",
}

COMMON_REFUSED = {
    "isotrain trains no quantized weights: use model.lora without it": "ds.load_in_4bit=False",
    "write the template into the model's tokenizer files": "data.tokenizer_chat_template",
}

COMMON = [
    maps("train.seed", "seed", 42, whole),
    part("train.full_determinism_enable", "device.determinism", False),
    part("ds.ring_attn_size", "device.mesh.context", 1),
    part("ds.param_dtype", "model.dtype", "bf16"),
    maps("ds.adam_offload", "model.offload.optimizer", False, flag),
    part("ds.lora.rank", "model.lora.rank", 0),
    part("ds.lora.alpha", "model.lora.alpha", 16),
    part("ds.lora.target_modules", "model.lora.targets", "all-linear"),
    part("ds.lora.dropout", "model.lora.dropout", 0),
    part("data.max_samples", "data.train"),
    part("data.apply_chat_template", "data.prompt_key", False),
    part("data.input_template", "data.prompt_key"),
    part("train.batch_size", "algorithm.mini_batch_size", 128),
    part("train.dynamic_batch_enable", "data.tokens_per_micro_batch", False),
    part("train.max_tokens_per_gpu", "data.tokens_per_micro_batch", 16192),
    part("ckpt.output_dir", "output"),
    maps("ckpt.save_steps", "trainer.save_every", -1, every),
    maps("ckpt.max_num", "trainer.keep_checkpoints", 3, whole),
    part("ckpt.load_enable", "trainer.resume", False),
    maps("eval.steps", "trainer.validate_every", -1, every),
    part("eval.dataset eval.split", "data.validation"),
    part("logger.wandb.key logger.tensorboard_dir", "observe.loggers"),
    part("logger.wandb.project", "observe.project"),
    part("logger.wandb.run_name", "name"),
]

PPO_NO_EFFECT = {
    PLACED: """
        {ref,critic,reward}.num_nodes {ref,critic,reward}.num_gpus_per_node train.colocate_actor_ref
        train.colocate_critic_reward
    """,
    "cluster.offload moves idle models to host memory": "{ref,reward}.offload",
    "data.tokens_per_micro_batch is the budget of every pass": """
        rollout.micro_batch_size rollout.max_tokens_per_gpu
    """,
    "its switch enable_ema is off": "{train.ema_beta,ema_beta}",
    "see pretrain_data": "pretrain_split",
    ENGINE: "vllm.enable_prefix_caching",
    "colocated engines always sleep while the ranks train": "vllm.enable_sleep",
    TRANSFER: "vllm.{sync_backend,sync_with_ray}",
    "constants of Muon, which optim: adam switches off": "{actor,critic}.muon.*",
}

PPO_REFUSED = {
    IMAGES: "actor.freeze_visual_encoder=False data.image_key data.max_images_per_prompt=0",
    SHORT: "data.prompt_probs",
    "isotrain whitens with the standard deviation": "algo.advantage.no_std_norm=False",
    "set algorithm.overlong, or do it in a reward function": "reward.stop_properly_penalty_coef",
    "isotrain keeps no average of the weights": "{train.enable_ema,enable_ema}=False",
    "isotrain mixes no pre-training loss in": "{pretrain_data,pretrain_data_probs,ptx_coef}=0.05",
    "export the reward model with its scores normalized": "reward.normalize_enable=False",
    "isotrain has AdamW": "{actor,critic}.optim=adam",
}

PPO = [
    *refused({"isotrain asks for one step at a time": "rollout.vllm_generate_batch_size"}, changes=False),
    part("actor.num_nodes", "device.ranks", 1),
    part("actor.num_gpus_per_node", "device.ranks", 8),
    maps("actor.model_name_or_path", "model.path", convert=text),
    maps("actor.gradient_checkpointing_enable", "model.gradient_checkpointing", False, flag),
    part("actor.aux_loss_coef", "model.router_aux_loss", 0),
    part("data.prompt_dataset", "data.train"),
    part("data.prompt_split", "data.train", "train"),
    maps("data.input_key", "data.prompt_key", "input", text),
    part("data.max_len", "data.max_length", by(None, None, 2048, 2048)),
    part("prompt_max_len", "data.max_length", 1024),
    part("generate_max_len", "rollout.max_tokens", 1024),
    part("rollout.max_new_tokens", "rollout.max_tokens"),
    maps("rollout.batch_size", "data.batch_size", 1024, whole),
    part("train.micro_batch_size", "data.tokens_per_micro_batch", by(4, 4, 1, 1)),
    part("algo.advantage.estimator", "algorithm.name", "gae"),
    part("algo.advantage.gamma", "algorithm.gamma", 1),
    part("algo.advantage.lambd", "algorithm.lam", 1),
    maps("train.max_epochs", "algorithm.ppo_epochs", 1, whole),
    part("actor.policy_loss_type", "algorithm.loss.name", "ppo"),
    part("actor.eps_clip", "algorithm.loss.clip_ratio_low", 0.2),
    part("actor.eps_clip_low_high", "algorithm.loss.clip_ratio_high"),
    part("actor.dual_clip", "algorithm.loss.dual_clip"),
    part("actor.entropy_coef", "algorithm.loss.entropy"),
    part("algo.kl.init_coef", "algorithm.kl.coefficient", 0.01),
    part("algo.kl.use_loss", "algorithm.kl.place", False),
    part("algo.kl.estimator", "algorithm.kl.estimator", "k1"),
    part("use_kl_estimator_k3", "algorithm.kl.estimator", False),
    part("algo.kl.target", "algorithm.kl.target"),
    part("algo.kl.horizon", "algorithm.kl.horizon", 10000),
    part("algo.advantage.is_correction_enable", "algorithm.rollout_correction.level", False),
    part("algo.advantage.is_correction_type", "algorithm.rollout_correction.mode", "tis"),
    part("algo.advantage.is_correction_threshold", "algorithm.rollout_correction.upper", [0.5, 5.0]),
    part("algo.dynamic_filtering_enable", "algorithm.dynamic_sampling.max_attempts", False),
    part("algo.dynamic_filtering_range", "algorithm.dynamic_sampling.max_attempts", [0, 1]),
    part("reward.overlong_buffer_len", "algorithm.overlong.buffer"),
    part("reward.overlong_penalty_factor", "algorithm.overlong.factor", 1),
    part("critic.model_name_or_path", "algorithm.critic.path"),
    part("critic.adam.lr", "algorithm.critic.lr", 9e-6),
    part("critic.value_clip", "algorithm.critic.clip", by(0.2, 0.2, 0.5, 0.5)),
    part("critic.freezing_steps", "algorithm.critic.warmup_steps", -1),
    part("critic.adam.{betas,weight_decay,eps}", "optimizer.betas"),
    part("critic.{lr_scheduler,lr_warmup_ratio,min_lr_ratio,max_norm}", "optimizer.schedule"),
    maps("rollout.n_samples_per_prompt", "rollout.n", 1, whole),
    maps("rollout.temperature", "rollout.temperature", 1.0, number),
    maps("rollout.top_p", "rollout.top_p", 1.0, number),
    part("vllm.num_engines", "rollout.engines"),
    maps("vllm.tensor_parallel_size", "rollout.tensor_parallel", 1, whole),
    part("vllm.gpu_memory_utilization", "rollout.memory_utilization", by(0.9, 0.95, 0.95, 0.95)),
    maps("vllm.enforce_eager", "rollout.eager", False, flag),
    part("eval.temperature", "rollout.validation.temperature", 0.6),
    part("eval.n_samples_per_prompt", "rollout.validation.n", 4),
    part("train.async_enable", "rollout.staleness", False),
    part("train.async_queue_size", "rollout.staleness", 1),
    part("train.partial_rollout_enable", "rollout.in_flight", False),
    part("train.agent_func_path", "rollout.environment.path"),
    part("reward.model_name_or_path", "reward.model.path"),
    part("reward.remote_url", "reward.function.path"),
    part("data.label_key", "reward.answer_key"),
    part("reward.clip_range", "reward", [-10, 10]),
    part("train.colocate_all", "cluster.placement", False),
    part("ds.enable_sleep", "cluster.offload", False),
    maps("actor.adam.lr", "optimizer.lr", 1e-6, number),
    maps("actor.adam.betas", "optimizer.betas", [0.9, 0.95]),
    maps("actor.adam.eps", "optimizer.eps", 1e-8, number),
    maps("actor.adam.weight_decay", "optimizer.weight_decay", 0.0, number),
    part("actor.lr_scheduler", "optimizer.schedule", "cosine_with_min_lr"),
    maps("actor.lr_warmup_ratio", "optimizer.warmup_ratio", 0.03, number),
    part("actor.min_lr_ratio", "optimizer.min_lr_ratio", 0.1),
    maps("actor.max_norm", "optimizer.max_grad_norm", 1.0, number),
    maps("train.num_episodes", "trainer.epochs", 1, whole),
]

OFFLINE_NO_EFFECT = {
    "losses are always float32": "model.compute_fp32_loss_enable",
    "reference log-probs are computed once, before training": "ref.offload",
    "constants of Muon, which optim: adam switches off": "muon.*",
}

OFFLINE_REFUSED = {
    "isotrain's DPO has no term for the chosen responses' likelihood": "model.nll_loss_coef=0",
    "write rows with one column text (data.format: text)": "model.pretrain_mode_enable=False",
    SHORT: "data.dataset_probs",
    "isotrain has AdamW": "optim=adam",
}

OFFLINE = [
    maps("model.model_name_or_path", "model.path", convert=text),
    maps("model.gradient_checkpointing_enable", "model.gradient_checkpointing", False, flag),
    part("model.aux_loss_coef", "model.router_aux_loss", 0),
    part("model.beta", "algorithm.beta"),
    part("model.ipo_enable", "algorithm.loss", False),
    part("model.label_smoothing", "algorithm.label_smoothing", 0.0),
    part("model.loss_type", "algorithm.loss", "sigmoid"),
    part("model.margin_loss_enable", "algorithm.margins", False),
    part("desirable_loss_weight", "algorithm.desirable_weight", 1.0),
    part("undesirable_loss_weight", "algorithm.undesirable_weight", 1.0),
    part("ref.model_name_or_path", "algorithm.reference"),
    part("data.dataset train_split", "data.train"),
    part("data.dataset_split", "data.train", "train"),
    part("data.input_key", "data.prompt_key", "input"),
    part("data.output_key", "data.completion_key"),
    part("data.label_key", "data.completion_key", "label"),
    part("data.multiturn", "data.format", False),
    part("data.prompt_key", "data.prompt_key"),
    part("data.chosen_key", "data.train", "chosen"),
    part("data.rejected_key", "data.train", "rejected"),
    part("data.max_len", "data.max_length"),
    part("train.micro_batch_size", "data.tokens_per_micro_batch"),
    part("train.max_epochs", "trainer.epochs"),
    part("adam.lr", "optimizer.lr"),
    maps("adam.betas", "optimizer.betas", [0.9, 0.95]),
    maps("adam.eps", "optimizer.eps", 1e-8, number),
    maps("adam.weight_decay", "optimizer.weight_decay", 0.0, number),
    part("lr_scheduler", "optimizer.schedule", "cosine_with_min_lr"),
    maps("lr_warmup_ratio", "optimizer.warmup_ratio", 0.03, number),
    part("min_lr_ratio", "optimizer.min_lr_ratio", 0.1),
    maps("max_norm", "optimizer.max_grad_norm", 1.0, number),
]

COMMON_RULES = [*COMMON, *no_effect(COMMON_NO_EFFECT), *refused(COMMON_REFUSED)]
PPO_TABLE = KeyTable(COMMON_RULES, PPO, no_effect(PPO_NO_EFFECT), refused(PPO_REFUSED))
OFFLINE_TABLE = KeyTable(COMMON_RULES, OFFLINE, no_effect(OFFLINE_NO_EFFECT), refused(OFFLINE_REFUSED))

FLAT = {
    "param_dtype": "ds.param_dtype", "data_type": "ds.param_dtype", "zero_stage": "ds.zero_stage",
    "save_path": "ckpt.output_dir", "ckpt_path": "ckpt.path", "save_steps": "ckpt.save_steps",
    "load_checkpoint": "ckpt.load_enable", "save_hf_ckpt": "ckpt.save_hf", "max_ckpt_num": "ckpt.max_num",
    "disable_ds_ckpt": "ckpt.disable_ds", "max_ckpt_mem": "ckpt.max_mem", "zpg": "ds.zpg",
    "best_metric_key": "ckpt.best_metric_key", "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size", "max_epochs": "train.max_epochs",
    "max_len": "data.max_len", "input_key": "data.input_key", "output_key": "data.output_key",
    "label_key": "data.label_key", "packing_samples": "ds.packing_samples", "seed": "train.seed",
    "apply_chat_template": "data.apply_chat_template", "max_samples": "data.max_samples",
    "attn_implementation": "ds.attn_implementation", "eval_steps": "eval.steps", "eval_split": "eval.split",
    "eval_dataset": "eval.dataset", "logging_steps": "logger.logging_steps",
    "overlap_comm": "ds.overlap_comm",
    "adam_offload": "ds.adam_offload", "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu", "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project", "wandb_run_name": "logger.wandb.run_name",
    "wandb_org": "logger.wandb.org", "wandb_group": "logger.wandb.group",
    "use_tensorboard": "logger.tensorboard_dir", "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride", "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha", "lora_dropout": "ds.lora.dropout", "load_in_4bit": "ds.load_in_4bit",
    "target_modules": "ds.lora.target_modules", "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "input_template": "data.input_template", "full_determinism": "train.full_determinism_enable",
    "use_liger_kernel": "ds.use_liger_kernel", "grad_accum_dtype": "ds.grad_accum_dtype",
    "deepcompile": "ds.deepcompile", "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer", "value_head_prefix": "ds.value_head_prefix",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "tokenizer_chat_template": "data.tokenizer_chat_template",
}  # fmt: skip
"""Flat names that every trainer has."""

FLAT_PPO = {
    "pretrain": "actor.model_name_or_path", "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "rollout_batch_size": "rollout.batch_size", "micro_rollout_batch_size": "rollout.micro_batch_size",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu", "max_new_tokens": "rollout.max_new_tokens",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt", "temperature": "rollout.temperature",
    "top_p": "rollout.top_p", "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "prompt_data": "data.prompt_dataset", "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split", "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler", "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "min_lr_ratio": "actor.min_lr_ratio", "max_norm": "actor.max_norm", "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high", "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type", "entropy_loss_coef": "actor.entropy_coef",
    "aux_loss_coef": "actor.aux_loss_coef", "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps", "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss", "kl_estimator": "algo.kl.estimator", "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon", "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma", "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_enable_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "reward_clip_range": "reward.clip_range", "normalize_reward": "reward.normalize_enable",
    "remote_rm_url": "reward.remote_url", "agent_func_path": "train.agent_func_path",
    "num_episodes": "train.num_episodes", "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size", "partial_rollout": "train.partial_rollout_enable",
    "colocate_all_models": "train.colocate_all", "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward", "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node", "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node", "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node", "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node", "ref_reward_offload": "ref.offload",
    "vllm_num_engines": "vllm.num_engines", "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_sync_backend": "vllm.sync_backend", "vllm_sync_with_ray": "vllm.sync_with_ray",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization", "enforce_eager": "vllm.enforce_eager",
    "vllm_enable_sleep": "vllm.enable_sleep", "deepspeed_enable_sleep": "ds.enable_sleep",
    "enable_prefix_caching": "vllm.enable_prefix_caching", "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt", "image_key": "data.image_key",
    "max_images_per_prompt": "data.max_images_per_prompt",
    "freeze_visual_encoder": "actor.freeze_visual_encoder",
}  # fmt: skip
"""Flat names of PPO and its relatives (`train_ppo_ray`)."""

FLAT_OFFLINE = {
    "pretrain": "model.model_name_or_path", "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant",
    "learning_rate": "adam.lr", "adam_betas": "adam.betas", "l2": "adam.weight_decay",
    "dataset": "data.dataset", "dataset_probs": "data.dataset_probs", "dataset_split": "data.dataset_split",
    "multiturn": "data.multiturn", "prompt_key": "data.prompt_key", "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key", "beta": "model.beta", "ipo": "model.ipo_enable",
    "label_smoothing": "model.label_smoothing", "nll_loss_coef": "model.nll_loss_coef",
    "loss": "model.loss_type", "margin_loss": "model.margin_loss_enable",
    "compute_fp32_loss": "model.compute_fp32_loss_enable", "pretrain_mode": "model.pretrain_mode_enable",
    "ref_pretrain": "ref.model_name_or_path", "ref_offload": "ref.offload",
    "aux_loss_coef": "model.aux_loss_coef",
}  # fmt: skip
"""Flat names of SFT, DPO, KTO and reward models."""
