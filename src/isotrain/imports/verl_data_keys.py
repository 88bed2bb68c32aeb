"""verl's keys of PPO and its relatives for names, devices, model and data, one line each."""

from __future__ import annotations

from isotrain.imports.draft import flag, text, texts, whole
from isotrain.imports.rules import drops, maps, part, refuses
from isotrain.imports.verl_reasons import (
    BUDGET,
    CODE,
    DEVICE,
    IMAGES,
    KERNELS,
    LAYOUT,
    MEGATRON,
    RAY,
    SAVED,
    TURNS,
    A,
    M,
    R,
)

NAMES = [
    part("trainer.experiment_name", "name", "gsm8k"),
    part("trainer.default_local_dir", "output"),
    part("data.seed", "seed"),
    drops(f"{A}.data_loader_seed", "the order of mini-batches, which actor.shuffle: False keeps"),
    drops(f"{{{A},actor_rollout_ref.ref,critic}}.{{fsdp_config,fsdp,megatron}}.seed", "seed is one field"),
    drops(f"{R}.seed", "seed is one field"),
]

DEVICES = [
    part("trainer.nnodes", "device.ranks", 1),
    part("trainer.n_gpus_per_node", "device.ranks", 8),
    drops("trainer.device", DEVICE),
    part(f"{A}.ulysses_sequence_parallel_size", "device.mesh.context", 1),
    part(f"{A}.fsdp_config.ulysses_sequence_parallel_size", "device.mesh.context", 1),
    part(f"{A}.megatron.context_parallel_size", "device.mesh.context", 1),
    part(f"{A}.megatron.expert_model_parallel_size", "device.mesh.expert", 1),
    part(f"{A}.fsdp_config.fsdp_size", "device.mesh.replicas", -1),
    part(f"{A}.fsdp_config.full_determinism", "device.determinism", False),
    drops("{actor_rollout_ref.ref,critic,reward_model}.ulysses_sequence_parallel_size", LAYOUT),
    drops(
        "{actor_rollout_ref.ref.fsdp_config,critic.fsdp,"
        "critic.model.fsdp_config}.ulysses_sequence_parallel_size",
        LAYOUT,
    ),
    drops(
        f"{{{A},actor_rollout_ref.ref,critic}}.megatron.{{tensor_model_parallel_size,"
        "pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,expert_tensor_parallel_size,"
        f"sequence_parallel,use_distributed_optimizer}}",
        LAYOUT,
    ),
    drops(
        "{actor_rollout_ref.ref,critic}.megatron.{context_parallel_size,expert_model_parallel_size}", LAYOUT
    ),
    drops(
        "{actor_rollout_ref.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config,"
        "reward_model.model.fsdp_config}.fsdp_size",
        LAYOUT,
    ),
    drops(
        "{actor_rollout_ref.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config}.full_determinism",
        "device.determinism is one field",
    ),
    drops(
        "*.fsdp_config.{wrap_policy.min_num_params,reshard_after_forward,forward_prefetch,"
        "use_orig_params,forward_only}",
        LAYOUT,
    ),
    drops(
        "critic.fsdp.{wrap_policy.min_num_params,reshard_after_forward,forward_prefetch,use_orig_params,"
        "forward_only}",
        LAYOUT,
    ),
    drops(f"{A}.fsdp_config.forward_prefetch", LAYOUT),
    part(f"{A}.strategy", "optimizer.schedule", "fsdp"),
    part("model_engine", "optimizer.schedule"),
    drops("*.{veomni,torchtitan,automodel}.*", LAYOUT),
    drops(
        f"{{{A}.fsdp_config,actor_rollout_ref.ref,actor_rollout_ref.ref.fsdp_config,critic,critic.fsdp,"
        f"critic.model.fsdp_config,reward_model}}.strategy",
        LAYOUT,
    ),
    drops("actor_rollout_ref.nccl_timeout", RAY),
]

MODEL = [
    maps(f"{M}.path", "model.path", "~/models/deepseek-llm-7b-chat", text),
    maps(f"{M}.enable_gradient_checkpointing", "model.gradient_checkpointing", True, flag),
    maps(f"{M}.enable_activation_offload", "model.offload.activations", False, flag),
    part(f"{A}.fsdp_config.offload_policy", "model.offload.weights", False),
    part(f"{A}.fsdp_config.dtype", "model.dtype", "bfloat16"),
    refuses("*.mixed_precision.param_dtype", "bf16", why="set model.dtype"),
    refuses("*.mixed_precision.reduce_dtype", "fp32", why="gradients are always reduced in float32"),
    drops("*.mixed_precision.buffer_dtype", "buffers keep the type that transformers gives them"),
    refuses(f"{A}.fsdp_config.model_dtype", "fp32", "float32", why="trained weights are always float32"),
    drops(
        "{actor_rollout_ref.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config}.{model_dtype,dtype,"
        "offload_policy}",
        "model.dtype and model.offload hold for all models",
    ),
    part(f"{M}.lora_rank", "model.lora.rank", 0),
    part(f"{M}.lora_alpha", "model.lora.alpha", 16),
    part(f"{M}.target_modules", "model.lora.targets", "all-linear"),
    refuses(
        f"{M}.{{exclude_modules,lora_adapter_path}}",
        why="list the modules to train in model.lora.targets; start from a merged model",
    ),
    refuses(
        f"{M}.lora.rank",
        0,
        why="Megatron's LoRA has other modules: use model.lora.rank and model.lora.targets",
    ),
    drops(f"{M}.lora.*", "Megatron's LoRA, which lora.rank: 0 switches off"),
    refuses(f"{M}.trust_remote_code", False, why=CODE, changes=False),
    refuses(f"{M}.{{external_lib,hf_config_path,tokenizer_path}}", why=CODE),
    refuses(f"{M}.custom_chat_template", why="write the template into the model's tokenizer files"),
    refuses(f"{M}.override_config.max_position_embeddings", why="edit config.json of the model directory"),
    refuses(
        f"{M}.override_config.attn_implementation",
        "flash_attention_2",
        "sdpa",
        why="set model.attention",
        changes=False,
    ),
    refuses(
        f"{M}.override_config.moe_config.freeze_moe_router", False, why="isotrain trains the routers too"
    ),
    refuses(
        f"{M}.override_config.{{attention_dropout,embd_pdrop,resid_pdrop}}",
        0,
        why="edit config.json of the model directory",
    ),
    refuses(f"{{{M},critic.model}}.override_config", why="edit config.json of the model directory"),
    refuses(f"{M}.override_config.*", why="edit config.json of the model directory"),
    drops(
        f"{{{M},critic.model,reward_model.model}}.{{use_remove_padding,use_shm,use_liger,use_fused_kernels}}",
        KERNELS,
    ),
    drops(f"{M}.{{fused_kernel_options.*,tiled_mlp.*,gradient_checkpointing_kwargs.*}}", KERNELS),
    refuses(f"{M}.mtp.enable", False, why="isotrain does not train multi-token prediction heads"),
    drops(f"{M}.mtp.*", "multi-token prediction, which mtp.enable: False switches off"),
    refuses(f"{A}.freeze_vision_tower", False, why=IMAGES),
    drops(
        f"{{{A},actor_rollout_ref.ref}}.{{use_torch_compile,entropy_from_logits_with_chunking,"
        "entropy_from_logits_chunk_size,entropy_checkpointing,use_fused_kernels,use_remove_padding,"
        f"use_prefix_grouper,pad_to_length}}",
        KERNELS,
    ),
    refuses(
        f"{{{A},actor_rollout_ref.ref}}.load_weight", True, why="models begin with the weights of model.path"
    ),
    drops(
        "*.fsdp_config.{use_torch_compile,entropy_from_logits_with_chunking,"
        "entropy_from_logits_chunk_size,entropy_checkpointing,pad_to_length,pad_to_length_bucket,"
        "turbo_config.*}",
        KERNELS,
    ),
    drops(
        "critic.fsdp.{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,"
        "entropy_checkpointing,pad_to_length,pad_to_length_bucket,turbo_config.*}",
        KERNELS,
    ),
    refuses("*.qat.enable", False, why="isotrain does not train quantized weights"),
    drops("*.qat.*", "quantization-aware training, which qat.enable: False switches off"),
    refuses("*.router_replay.mode", "disabled", why="isotrain has no router replay"),
    drops("*.router_replay.*", "router replay, which mode: disabled switches off"),
    drops(
        f"{A}.megatron.override_transformer_config.{{recompute_granularity,recompute_num_layers,"
        f"recompute_method}}",
        "model.gradient_checkpointing recomputes every layer",
    ),
    drops(f"{A}.megatron.override_transformer_config.moe_permute_fusion", KERNELS),
    drops(
        "*.megatron.override_transformer_config.{*_fusion,*deepep,*_overlap,moe_token_dispatcher_type,"
        "moe_grouped_gemm,use_flash_attn,attention_backend,persist_layer_norm,use_fused_swiglu}",
        KERNELS,
    ),
    drops(
        "*.megatron.override_transformer_config.{num_layers_in_*,account_for_*,deallocate_pipeline_outputs,"
        "sequence_parallel,recompute_*,tp_comm_overlap}",
        LAYOUT,
    ),
    refuses(
        f"{A}.megatron.override_transformer_config.moe_router_dtype",
        "fp32",
        why="routers compute as transformers does",
        changes=False,
    ),
    refuses(
        "*.megatron.override_transformer_config.*",
        why=MEGATRON + " that isotrain does not know: check what it changes",
    ),
    drops("*.megatron.override_transformer_config", MEGATRON),
    drops(f"{A}.megatron.{{use_mbridge,use_dist_checkpointing}}", SAVED),
    drops(
        "*.megatron.{use_mbridge,vanilla_mbridge,use_dist_checkpointing,dist_checkpointing_path,"
        "dist_checkpointing_prefix}",
        SAVED,
    ),
    drops("*.megatron.{use_remove_padding,use_megatron_fsdp,extra,forward_only,load_weight}", LAYOUT),
    drops("*.megatron.{override_ddp_config*,use_distributed_optimizer}", LAYOUT),
    drops("*.megatron.seed", "seed is one field"),
    drops(
        "*.megatron.{param_offload,optimizer_offload,grad_offload,*_parallel_size,sequence_parallel}", LAYOUT
    ),
    refuses("*.megatron.dtype", "bfloat16", "bf16", why="set model.dtype"),
    refuses("*.megatron.{override_mcore_model_config,override_mcore_model_config.*}", why=MEGATRON),
]

DATA = [
    maps("data.train_files", "data.train", "~/data/rlhf/gsm8k/train.parquet", texts),
    maps("data.val_files", "data.validation", "~/data/rlhf/gsm8k/test.parquet", texts),
    maps("data.prompt_key", "data.prompt_key", "prompt", text),
    maps("data.max_prompt_length", "data.max_length", 512, whole),
    part("data.train_batch_size", "data.batch_size", 1024),
    maps("data.shuffle", "data.shuffle", True, flag),
    part("data.filter_overlong_prompts", "data.too_long", False),
    part("data.truncation", "data.too_long", "error"),
    part(f"{A}.use_dynamic_bsz", "data.tokens_per_micro_batch", False),
    part(f"{A}.ppo_max_token_len_per_gpu", "data.tokens_per_micro_batch", 16384),
    part(f"{A}.ppo_micro_batch_size_per_gpu", "data.tokens_per_micro_batch"),
    part(f"{A}.ppo_micro_batch_size", "data.tokens_per_micro_batch"),
    part("data.gen_batch_size", "algorithm.dynamic_sampling.max_attempts"),
    refuses("data.train_max_samples", -1, why="write the rows to train on into a file of their own"),
    part("data.val_max_samples", "data.validation_rows", -1),
    part("data.{image_key,video_key,audio_key}", "data.train"),
    drops("data.{return_multi_modal_inputs,image_patch_size,mm_processor_kwargs}", "it is for images"),
    drops(f"{R}.limit_images", "it is for images"),
    refuses("data.custom_cls.path", why=CODE),
    refuses("data.{sampler.class_path,datagen.path}", why=CODE),
    drops(
        "data.{custom_cls.name,sampler.class_name,datagen.name}",
        "it names a class of the file that is refused",
    ),
    refuses("data.trust_remote_code", False, why=CODE, changes=False),
    refuses("data.tokenizer", why="the tokenizer is the model's own"),
    refuses("data.apply_chat_template_kwargs*", why="write the values into the model's chat template"),
    refuses("data.reward_fn_key", "data_source", why="the reward function gets the whole row as `row`"),
    refuses("data.{tool_config_path,function_tool_path}", why=TURNS),
    drops("data.{return_raw_chat,return_raw_input_ids,return_full_prompt}", "rewards get the whole row"),
    drops(
        "data.{val_batch_size,dataloader_num_workers,filter_overlong_prompts_workers,use_shm,"
        "validation_shuffle}",
        "it changes the speed only",
    ),
    drops(
        f"{{{R},actor_rollout_ref.ref}}.{{log_prob_use_dynamic_bsz,log_prob_max_token_len_per_gpu,"
        f"log_prob_micro_batch_size_per_gpu,log_prob_micro_batch_size}}",
        BUDGET,
    ),
]
