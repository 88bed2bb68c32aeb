"""A recipe from the flags of OpenRLHF's SFT, DPO, KTO and reward-model trainers."""

from __future__ import annotations

from isotrain.tools.imports.draft import Draft
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.openrlhf import PLAIN_PROMPTS, checkpoints, lora, mesh, names, schedule, sources

# Defaults that differ between the trainers: learning rate, epochs, longest sample, micro-batch.
DEFAULTS = {
    "sft": (5e-6, 2, 2048, 8),
    "dpo": (1e-5, 1, 512, 8),
    "rm": (9e-6, 1, 512, 1),
    "kto": (1e-5, 1, 2048, 8),
}
PAIRS = ("dpo", "rm")


def fill(d: Draft, trainer: str) -> None:
    """All fields of the recipe."""
    lr, epochs, longest, micro = DEFAULTS[trainer]
    names(d)
    _devices(d)
    d.simple()
    d.put("algorithm.name", trainer, note=f"train_{trainer}")
    lora(d, "model.aux_loss_coef")
    sources(d, "data.dataset", "train_split" if d.given("train_split") else "data.dataset_split")
    d.put("data.batch_size", d.whole("train.batch_size", 128, 1), "train.batch_size")
    d.put("data.max_length", d.whole("data.max_len", longest, 2), "data.max_len")
    d.put("data.too_long", "truncate", note="OpenRLHF cuts responses, and leaves longer prompts out")
    _micro_batches(d, trainer, longest, micro)
    {"sft": _sft, "dpo": _dpo, "rm": _rm, "kto": _kto}[trainer](d)
    d.put("optimizer.lr", d.number("adam.lr", lr), "adam.lr")
    d.put("trainer.epochs", d.whole("train.max_epochs", epochs, 1), "train.max_epochs")
    schedule(d, "lr_scheduler", "min_lr_ratio")
    checkpoints(d)
    if d.version != "0.11.0" and trainer == "sft":
        d.note(f"OpenRLHF {d.version} averages the loss in each micro-batch, isotrain over the whole batch")


def _devices(d: Draft) -> None:
    """deepspeed has the numbers of machines and devices, or takes all that there are."""
    each = d.launched("num_gpus") or d.launched("nproc_per_node")
    ranks = (each or 1) * (d.launched("num_nodes") or d.launched("nnodes") or 1)
    note = "" if each else "the launcher takes all devices of a machine: set their number"
    d.put("device.ranks", ranks, note=note)
    mesh(d, ranks)


def _micro_batches(d: Draft, trainer: str, default: int, micro: int) -> None:
    longest = d.whole("data.max_len", default, 2) or default
    sides = 2 if trainer in PAIRS else 1
    key = "train.micro_batch_size"
    each = d.whole(key, micro, 1) or micro
    note = f"{each} x {longest} tokens" + (" x 2 responses" if sides == 2 else "")
    d.put("data.tokens_per_micro_batch", each * longest * sides, key, note=note)


def _sft(d: Draft) -> None:
    chat, answer = d.flag("data.apply_chat_template"), d.value("data.output_key")
    if answer:
        d.put("data.prompt_key", d.text("data.input_key", "input"), "data.input_key")
        d.put("data.completion_key", str(answer), "data.output_key")
        if not chat:
            d.refuse(
                "data.input_template",
                "without apply_chat_template rows are plain text: name the columns prompt and completion and "
                "write the text around the prompt into them",
            )
        return
    d.put("data.format", "messages", "data.input_key")
    if d.text("data.input_key", "input") != "messages":
        d.refuse("data.input_key", "the column of conversations is called messages: rename it in the rows")
    if not d.flag("data.multiturn"):
        d.refuse(
            "data.multiturn",
            "it is off: OpenRLHF trains on the last response only, isotrain on all of messages; "
            "rows with prompt and completion do the same",
        )


def _dpo(d: Draft) -> None:
    d.put("algorithm.loss", "ipo" if d.flag("model.ipo_enable") else "sigmoid", "model.ipo_enable")
    d.put("algorithm.beta", d.number("model.beta", 0.1), "model.beta")
    if smoothing := d.number("model.label_smoothing", 0.0):
        d.put("algorithm.label_smoothing", smoothing, "model.label_smoothing")
    reference = d.value("ref.model_name_or_path")
    if reference and reference != d.value("model.model_name_or_path"):
        why = f"the reference is the initial model, not {shown(str(reference), 60)}"
        d.refuse("ref.model_name_or_path", why)
    _columns(d, prompt="prompt", chosen="chosen", rejected="rejected")


def _rm(d: Draft) -> None:
    loss = d.text("model.loss_type", "sigmoid")
    margins = d.flag("model.margin_loss_enable")
    d.put("algorithm.loss", "sigmoid" if loss == "sigmoid" or margins else "logexp", "model.loss_type")
    d.put("algorithm.margins", margins, "model.margin_loss_enable")
    _columns(d, prompt="prompt", chosen="chosen", rejected="rejected")


def _kto(d: Draft) -> None:
    d.put("algorithm.beta", d.number("model.beta", 0.01), "model.beta")
    for name in ("desirable", "undesirable"):
        d.put(f"algorithm.{name}_weight", d.number(f"{name}_loss_weight", 1.0), f"{name}_loss_weight")
    _columns(d, input="prompt", output="completion", label="label")


def _columns(d: Draft, **columns: str) -> None:
    """The names that columns must have, and the chat template."""
    for side, column in columns.items():
        name = d.value(f"data.{side}_key")
        if name is not None and name != column:
            why = f"the column is called {column}: rename {shown(str(name), 40)} in the rows"
            d.refuse(f"data.{side}_key", why)
    if not d.flag("data.apply_chat_template"):
        d.ask("data.apply_chat_template", PLAIN_PROMPTS)
    if d.value("data.input_template") and not d.flag("data.apply_chat_template"):
        d.refuse("data.input_template", "write the text around the prompt into the rows")
