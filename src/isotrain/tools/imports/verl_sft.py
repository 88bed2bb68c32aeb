"""A recipe from the keys of verl's two SFT trainers."""

from __future__ import annotations

from isotrain.tools.imports.draft import Draft, Off
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.keys import verl_sft
from isotrain.tools.imports.source import ImportSource, Stray
from isotrain.tools.imports.verl import (
    checkpoints,
    dtype,
    lora,
    mesh,
    multimodal,
    observe,
    own_config,
    run_name,
)
from isotrain.tools.imports.verl_algorithm import schedule, total_steps, warmup


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
    return verl_sft().versions[0 if old or version == "0.5.0" else 1]


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
    dynamic, old = d.flag("data.use_dynamic_bsz"), d.version == d.table.versions[0]
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
    default = "deepseek-llm-7b-chat" if d.version == d.table.versions[1] else "gemma-1.1-7b-it"
    key = "model.partial_pretrain" if d.value("model.partial_pretrain") else "model.path"
    d.put("model.path", d.text(key, f"~/models/{default}"), key)
    dtype(d, "engine.dtype")
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
    messages = d.version == d.table.versions[1] or d.flag("data.multiturn.enable")
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
    if d.version == d.table.versions[0]:
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
