"""A recipe from the keys of verl's two SFT trainers."""

from __future__ import annotations

from isotrain.tools.imports.draft import Draft, Off, every, flag, number, text, texts, whole
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.rules import KeyTable, by, maps, no_effect, part, refused
from isotrain.tools.imports.source import ImportSource, Stray
from isotrain.tools.imports.verl import checkpoints, lora, mesh, multimodal, observe, own_config, run_name
from isotrain.tools.imports.verl_algorithm import schedule, total_steps, warmup
from isotrain.tools.imports.verl_keys import (
    ALWAYS,
    CODE,
    DEVICE,
    KERNELS,
    LAYOUT,
    LOGGED,
    PACKED,
    RAY,
    SAVED,
)

VERSIONS = ("fsdp_sft_trainer", "sft_trainer")
"""The trainer up to verl 0.7, and the one that followed it; their defaults differ."""


NO_EFFECT = {
    DEVICE: "trainer.device",
    LAYOUT: """
        engine.strategy {engine,model} model.strategy
        {engine,model.fsdp_config}.{wrap_policy.*,reshard_after_forward,forward_prefetch}
        engine.{use_orig_params,forward_only,param_offload,optimizer_offload,seed}
    """,
    PACKED: "model.use_remove_padding use_remove_padding data.pad_mode",
    KERNELS: """
        {model.use_liger,model.use_shm,model.use_fused_kernels,model.fused_kernel_options.*}
        {model.tiled_mlp.*,model.lora.*,model.mtp.*,engine.*}
    """,
    "it changes the speed only": "data.{balance_dp_token,num_workers,use_shm}",
    "it names a class of the file that is refused": "data.custom_cls.name",
    "the column is called tools": "data.{tools_key,multiturn.tools_key}",
    "the template gets the rows' keys": "data.{enable_thinking_key,multiturn.enable_thinking_key}",
    "the mask is found or the row is refused (docs/data.md)": "data.ignore_input_ids_mismatch",
    "isotrain's first step of a warm-up is 1 / steps, not 0": "optim.zero_indexed_step",
    "trainer.steps is one field": "optim.total_training_steps",
    SAVED: "{trainer.default_hdfs_dir,trainer.checkpoint.*,checkpoint.*}",
    ALWAYS: "trainer.balance_batch",
    LOGGED: "trainer.profile_interval {profiler.*,*._target_}",
    RAY: "ray_kwargs.*",
}

REFUSED = {
    "list the modules in model.lora.targets": "model.{exclude_modules,lora_adapter_path}",
    CODE: "model.{external_lib,hf_config_path,tokenizer_path,override_config*} data.custom_cls.path",
    "write it into the model's tokenizer": "{model.custom_chat_template,data.chat_template}",
    "write the values into the chat template": "data.apply_chat_template_kwargs*",
    "set the fields of optimizer": "optim.override_optimizer_config*",
    "its values are not known: import the resolved configuration": """
        {--config-name,--config-path,--config-dir}
    """,
    "the schedule of this optimizer has other keys: check optimizer": "optim=fsdp",
    "trained weights are always float32": "{model.fsdp_config,engine}.model_dtype=fp32",
    "set model.dtype": "engine.dtype=bfloat16",
    "write these rows into a file of their own": "data.{train_max_samples,val_max_samples}=-1",
    "write the value into the chat template": "data.enable_thinking_default=none",
    "isotrain has AdamW": "optim.optimizer=AdamW optim.optimizer_impl=torch.optim",
    "the cosine falls once": "optim.num_cycles=0.5",
}

# Refusals that do not change the training.
REFUSED_SETTINGS = {
    CODE: "model.trust_remote_code=False",
    "copy the run directory to output": "trainer.resume_from_path",
}

RULES = [
    # Names and devices
    part("trainer.experiment_name", "name", "test"),
    part("trainer.default_local_dir", "output"),
    maps("trainer.seed", "seed", 1, whole),
    part("trainer.nnodes", "device.ranks", 1),
    part("trainer.n_gpus_per_node", "device.ranks", by(8, 1)),
    part("ulysses_sequence_parallel_size engine.ulysses_sequence_parallel_size", "device.mesh.context", 1),
    part("engine.fsdp_size", "device.mesh.replicas", -1),
    part("engine.full_determinism", "device.determinism", False),
    # Model
    part("model.path model.partial_pretrain", "model.path"),
    maps("model.enable_gradient_checkpointing", "model.gradient_checkpointing", True, flag),
    maps("model.enable_activation_offload", "model.offload.activations", False, flag),
    maps("engine.offload_policy", "model.offload.weights", False, flag),
    part("model.fsdp_config.{cpu_offload,offload_params}", "model.offload.weights", False),
    part("model.lora_rank", "model.lora.rank", 0),
    part("model.lora_alpha", "model.lora.alpha", 16),
    part("model.target_modules", "model.lora.targets", "all-linear"),
    # Data
    maps("data.train_files", "data.train", "~/data/gsm8k/train.parquet", texts),
    maps("data.val_files", "data.validation", by("~/data/gsm8k/test.parquet", None), texts),
    maps("data.train_batch_size", "data.batch_size", 256, whole),
    maps("data.max_length", "data.max_length", 1024, whole),
    part("data.truncation", "data.too_long", "error"),
    part("data.prompt_key", "data.prompt_key", "question"),
    part("data.prompt_dict_keys", "data.prompt_key"),
    part("data.response_key", "data.completion_key", "answer"),
    part("data.response_dict_keys", "data.completion_key"),
    part("data.multiturn.enable", "data.format", False),
    part("{data.messages_key,data.multiturn.messages_key}", "data.format", "messages"),
    part("data.micro_batch_size_per_gpu", "data.tokens_per_micro_batch", 4),
    part("data.micro_batch_size", "data.tokens_per_micro_batch"),
    part("data.max_token_len_per_gpu", "data.tokens_per_micro_batch", 8192),
    part("data.use_dynamic_bsz", "data.tokens_per_micro_batch", by(False, True)),
    # Optimizer
    maps("optim.lr", "optimizer.lr", by(1e-5, 0.001), number),
    maps("optim.betas", "optimizer.betas", by([0.9, 0.95], [0.9, 0.999])),
    maps("optim.weight_decay", "optimizer.weight_decay", 0.01, number),
    maps("optim.clip_grad", "optimizer.max_grad_norm", 1.0, number),
    part("optim.lr_warmup_steps_ratio", "optimizer.warmup_ratio", by(0.1, 0.0)),
    part("optim.warmup_steps_ratio", "optimizer.warmup_ratio"),
    part("optim.lr_warmup_steps", "optimizer.warmup_steps", -1),
    part("optim.lr_scheduler", "optimizer.schedule", by("cosine", None)),
    part("optim.lr_scheduler_type", "optimizer.schedule", by(None, "constant")),
    part("optim.warmup_style", "optimizer.schedule"),
    maps("optim.min_lr_ratio", "optimizer.min_lr_ratio", 0.0, number),
    # Trainer
    part("trainer.total_epochs", "trainer.epochs", 4),
    part("trainer.total_training_steps", "trainer.steps"),
    maps("trainer.test_freq", "trainer.validate_every", -1, every),
    maps("trainer.save_freq", "trainer.save_every", -1, every),
    part("trainer.max_ckpt_to_keep", "trainer.keep_checkpoints"),
    part("trainer.resume_mode", "trainer.resume", "auto"),
    part("trainer.logger", "observe.loggers", ["console", "wandb"]),
    maps("trainer.project_name", "observe.project", "gsm8k-sft", text),
    part("trainer.rollout_data_dir", "rollout.record"),
]

# Refusals first: `*._target_` has no effect, but not where all that is below a key is refused.
TABLE = KeyTable(refused(REFUSED), refused(REFUSED_SETTINGS, False), no_effect(NO_EFFECT), RULES)


def is_sft(source: ImportSource) -> bool:
    """Whether a source is one of SFT; its command tells, or else its keys."""
    if source.program:
        return "sft" in source.program
    keys = source.settings
    return not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in keys) and any(
        key.startswith(("optim.", "model.")) for key in keys
    )


def trainer_of(source: ImportSource, version: str | None) -> str:
    """Which of the two trainers a source is for."""
    old = "fsdp_sft_trainer" in source.program or "model.partial_pretrain" in source.settings
    return VERSIONS[0] if old or version == "0.5.0" else VERSIONS[1]


def fill(d: Draft) -> None:
    """All fields of the recipe."""
    d.put("algorithm.name", "sft", note="verl's SFT trainer")
    name = run_name(d.partly("trainer.experiment_name", "imported"))
    d.put("name", name, "trainer.experiment_name")
    output = d.text("trainer.default_local_dir")
    d.put("output", output or f"runs/{name}", *(["trainer.default_local_dir"] if output else []))
    d.simple()
    _devices(d)
    _model(d)
    _data(d)
    _optimizer(d)
    _trainer(d)
    observe(d)
    multimodal(d)
    if not own_config(d):
        d.source.opened.append(Stray("the configuration file", "it is not read", 0))


def unused(d: Draft) -> list[Off]:
    """Keys without effect in this training."""
    dynamic, old = d.flag("data.use_dynamic_bsz"), d.version == VERSIONS[0]
    plain = old and not d.flag("data.multiturn.enable")
    launched = "nproc_per_node" in d.source.launcher
    adapted = d.whole("model.lora_rank", 0, 0)
    return [
        (own_config(d), "--config-", "verl's own configuration, whose defaults are known"),
        (dynamic, "data.micro_batch_size", "use_dynamic_bsz is on"),
        (not dynamic, "data.max_token_len_per_gpu", "use_dynamic_bsz is off"),
        (not adapted, "model.{lora_alpha,target_modules}", "lora_rank is 0"),
        (launched, "trainer.{nnodes,n_gpus_per_node}", "torchrun has the number of ranks"),
        (plain, "data.{multiturn.messages_key,messages_key}", "multiturn.enable is off"),
        (not plain, "data.{prompt_,response_}", "rows are messages"),
    ]


def _devices(d: Draft) -> None:
    """torchrun has the number of ranks; it is a question if the script takes it from elsewhere."""
    counts = [d.launched(name) for name in ("nnodes", "nproc_per_node")]
    if d.source.launcher.get("nproc_per_node"):
        ranks = (counts[0] or 1) * (counts[1] or 1)
        d.put("device.ranks", ranks, note="torchrun's nnodes x nproc_per_node")
    else:
        nodes, per_node = d.whole("trainer.nnodes", 1, 1) or 1, d.whole("trainer.n_gpus_per_node", 1, 1) or 1
        ranks = nodes * per_node
        note = f"{nodes} x {per_node}"
        d.put("device.ranks", ranks, "trainer.n_gpus_per_node", "trainer.nnodes", note=note)
    keys = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size")
    mesh(d, ranks, keys, "ulysses", "engine.fsdp_size")
    if d.flag("engine.full_determinism"):
        d.put("device.determinism", "on", "engine.full_determinism")


def _model(d: Draft) -> None:
    default = "~/models/gemma-1.1-7b-it" if d.version == VERSIONS[0] else "~/models/deepseek-llm-7b-chat"
    key = "model.partial_pretrain" if d.value("model.partial_pretrain") else "model.path"
    d.put("model.path", d.text(key, default), key)
    lora(d, "model")
    for name in ("cpu_offload", "offload_params"):
        if d.flag(f"model.fsdp_config.{name}"):
            d.put("model.offload.weights", True, f"model.fsdp_config.{name}")


def _data(d: Draft) -> None:
    cut = d.text("data.truncation", "error")
    d.put("data.too_long", {"right": "truncate"}.get(cut, "error"), "data.truncation")
    if cut not in ("error", "right"):
        why = f"isotrain cuts the end only, not {shown(cut, 20)}: raise data.max_length"
        d.refuse("data.truncation", why)
    messages = d.version == VERSIONS[1] or d.flag("data.multiturn.enable")
    if messages:
        key = "data.multiturn.messages_key" if d.given("data.multiturn.messages_key") else "data.messages_key"
        d.put("data.format", "messages", key)
        if d.text(key, "messages") != "messages":
            d.refuse(key, "the column is called messages: rename it in the rows")
    else:
        for side, field in (("prompt", "data.prompt_key"), ("response", "data.completion_key")):
            inner = d.value(f"data.{side}_dict_keys")
            names = [d.text(f"data.{side}_key"), *(inner if isinstance(inner, list) else [])]
            d.put(field, ".".join(str(name) for name in names), f"data.{side}_key", f"data.{side}_dict_keys")
    longest = d.whole("data.max_length", 1024, 2) or 1024
    context = d.written("device.mesh.context", 1)
    if d.flag("data.use_dynamic_bsz"):
        size = (d.whole("data.max_token_len_per_gpu", 8192, 1) or 8192) * context
        key, note = "data.max_token_len_per_gpu", f"x {context} ranks of a context" if context > 1 else ""
    else:
        key = "data.micro_batch_size_per_gpu"
        samples = d.whole(key, 4, 1) or 4
        size, note = samples * longest, f"{samples} x {longest} tokens"
    if size < longest:
        size, note = longest, f"{size} is raised to hold the longest sample"
    d.put("data.tokens_per_micro_batch", size, key, note=note)


def _optimizer(d: Draft) -> None:
    styles = ("optim.warmup_style", "optim.lr_scheduler_type", "optim.lr_scheduler")
    style = next((key for key in styles if d.value(key)), styles[1])
    schedule(d, style, d.value(style))
    old = d.value("optim.warmup_steps_ratio") is not None
    warmup(d, "optim.lr_warmup_steps", "optim.warmup_steps_ratio" if old else "optim.lr_warmup_steps_ratio")
    d.note("verl's AdamW decays biases and norms too, isotrain's does not (optimizer.weight_decay)")
    if d.version == VERSIONS[0]:
        d.note("verl's fsdp_sft_trainer averages the loss in each micro-batch, isotrain over the whole batch")


def _trainer(d: Draft) -> None:
    epochs = d.whole("trainer.total_epochs", 4, 1) or 4
    steps = d.whole("trainer.total_training_steps", None, 1)
    if steps:
        d.put("trainer.steps", steps, "trainer.total_training_steps")
    elif total_steps(d):
        d.put("trainer.steps", total_steps(d), "trainer.total_epochs", note=f"{epochs} epochs")
    else:
        d.put("trainer.epochs", epochs, "trainer.total_epochs")
    checkpoints(d, "trainer.max_ckpt_to_keep")
