"""What the flags of all trainers of OpenRLHF have in common."""

from __future__ import annotations

from isotrain.imports.draft import Draft, as_number
from isotrain.imports.hydra import shown
from isotrain.imports.verl import run_name

SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_MANY = 1_000_000


PLAIN_PROMPTS = (
    "it is off, so prompts are plain text. isotrain uses the chat template if the tokenizer has one: "
    "remove it from the tokenizer files for the same prompts"
)


def names(d: Draft) -> None:
    """Name, directory and loggers. The wandb key only says that wandb is on."""
    output = d.text("ckpt.output_dir", "./ckpt")
    given = d.text("logger.wandb.run_name", "")
    d.put("name", run_name(given or output.rstrip("/").rpartition("/")[2]), "logger.wandb.run_name")
    d.put(
        "output", output if d.given("ckpt.output_dir") else f"runs/{d.lines['name'].value}", "ckpt.output_dir"
    )
    loggers = ["console"]
    if d.raw("logger.wandb.key") not in (None, False, ""):
        loggers.append("wandb")
    if d.raw("logger.tensorboard_dir") not in (None, False, ""):
        loggers.append("tensorboard")
    d.put("observe.loggers", loggers, "logger.wandb.key", "logger.tensorboard_dir")
    if d.value("logger.wandb.project"):
        d.put("observe.project", d.text("logger.wandb.project"), "logger.wandb.project")


def mesh(d: Draft, ranks: int) -> None:
    context = d.whole("ds.ring_attn_size", 1, 1) or 1
    if context > 1 and ranks % context == 0:
        d.put("device.mesh.context", context, "ds.ring_attn_size")
        d.put("device.mesh.context_attention", "ring", "ds.ring_attn_size")
    elif context > 1:
        d.refuse(
            "ds.ring_attn_size", f"{context} does not divide {ranks} ranks: set device.mesh.context", False
        )
    if d.flag("train.full_determinism_enable"):
        d.put("device.determinism", "on", "train.full_determinism_enable")


def lora(d: Draft, balancing: str) -> None:
    dtype = d.text("ds.param_dtype", "bf16")
    if dtype not in ("bf16", "bfloat16"):
        d.refuse(
            "ds.param_dtype", f"{shown(dtype, 20)}: model.dtype is bfloat16 or float32; bfloat16 is written"
        )
    d.put("model.dtype", "bfloat16", "ds.param_dtype")
    weight = d.number(balancing, 0.0)
    if weight and weight > 1e-8:
        d.put("model.router_aux_loss", weight, balancing)
    rank = d.whole("ds.lora.rank", 0, 0)
    if not rank:
        return
    d.put("model.lora.rank", rank, "ds.lora.rank")
    d.put("model.lora.alpha", d.whole("ds.lora.alpha", 16, 1), "ds.lora.alpha")
    targets = d.value("ds.lora.target_modules")
    if targets != "all-linear" and targets != ["all-linear"]:
        d.put(
            "model.lora.targets",
            targets if isinstance(targets, list) else [str(targets)],
            "ds.lora.target_modules",
        )
    dropout = d.number("ds.lora.dropout", 0.0)
    if dropout:
        d.put("model.lora.dropout", dropout, "ds.lora.dropout")


def sources(d: Draft, key: str, split_key: str) -> None:
    """Training and validation data: files, directories or Hub names with their split."""
    split = d.text(split_key, "train") or "train"
    found = [_with_split(name, split) for name in d.text(key).split(",") if name]
    if not found:
        d.ask(key, "there is no training data: set data.train")
        found = ["train.jsonl"]
    d.put("data.train", found if len(found) > 1 else found[0], key, split_key)
    held_out = d.text("eval.dataset")
    if held_out:
        files = [_with_split(name, d.text("eval.split", "train")) for name in held_out.split(",") if name]
        d.put("data.validation", files if len(files) > 1 else files[0], "eval.dataset", "eval.split")
    most = as_number(d.value("data.max_samples"))
    if most is not None and most < _MANY:
        d.refuse(
            "data.max_samples", f"write the first {most:.0f} rows into a file of their own, or leave it out"
        )


def _with_split(name: str, split: str) -> str:
    """A Hub name carries its split; a local file has none."""
    local = name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet"))
    return name if local or split == "train" or ":" in name else f"{name}:{split}"


def schedule(d: Draft, kind_key: str, least_key: str) -> None:
    wanted = d.text(kind_key, "cosine_with_min_lr")
    if wanted not in SCHEDULES:
        d.refuse(kind_key, f"{shown(wanted, 30)} is not a schedule of isotrain; cosine is written")
    d.put("optimizer.schedule", SCHEDULES.get(wanted, "cosine"), kind_key)
    least = d.number(least_key, 0.1) if wanted == "cosine_with_min_lr" else 0.0
    d.put("optimizer.min_lr_ratio", least, least_key)


def checkpoints(d: Draft) -> None:
    resume = "auto" if d.flag("ckpt.load_enable") else "never"
    d.put("trainer.resume", resume, "ckpt.load_enable")
