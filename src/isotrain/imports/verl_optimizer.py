"""AdamW and its schedule from verl's keys."""

from __future__ import annotations

from typing import Any

from isotrain.imports.draft import Draft, as_whole
from isotrain.imports.hydra import shown
from isotrain.imports.verl_reasons import OPTIM, A


def optimizer(d: Draft) -> None:
    clips = [f"{A}.grad_clip", f"{OPTIM}.clip_grad"]
    given = [key for key in clips if d.given(key)]
    key = given[0] if given else clips[1 if d.version == "2026-08" else 0]
    d.put("optimizer.max_grad_norm", d.number(key, 1.0), key)
    if len(given) == 2 and d.number(clips[0]) != d.number(clips[1]):
        d.refuse(clips[1], f"{clips[0]} has another value, which is written: set optimizer.max_grad_norm")
    if d.value(f"{A}.strategy") == "megatron":
        _megatron_schedule(d)
    else:
        d.note("verl's AdamW decays biases and norms too, isotrain's does not (optimizer.weight_decay)")
        style = f"{OPTIM}.warmup_style" if d.value(f"{OPTIM}.warmup_style") else f"{OPTIM}.lr_scheduler_type"
        schedule(d, style, d.value(style) or "constant")
        d.put(
            "optimizer.min_lr_ratio", d.number(f"{OPTIM}.min_lr_ratio", 0.0) or 0.0, f"{OPTIM}.min_lr_ratio"
        )
    warmup(d, f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio")


def _megatron_schedule(d: Draft) -> None:
    kinds = ("constant", "cosine", "linear")
    schedule(d, f"{OPTIM}.lr_decay_style", d.value(f"{OPTIM}.lr_decay_style"), kinds)
    least, peak = d.number(f"{OPTIM}.min_lr", 0.0) or 0.0, d.number(f"{OPTIM}.lr", 1e-6) or 0.0
    ratio = min(1.0, least / peak) if peak else 0.0
    d.put("optimizer.min_lr_ratio", ratio, f"{OPTIM}.min_lr", note="min_lr / lr" if ratio else "")
    decay = d.whole(f"{OPTIM}.lr_decay_steps")
    if decay and d.lines["optimizer.schedule"].value != "constant" and decay != total_steps(d):
        d.refuse(
            f"{OPTIM}.lr_decay_steps",
            "the schedule falls over all steps: set trainer.steps to it, or keep it out",
        )


def schedule(d: Draft, key: str, kind: Any, kinds: tuple[str, ...] = ("constant", "cosine")) -> None:
    """`kinds` are those that verl and isotrain have."""
    if kind not in kinds:
        d.refuse(key, f"{shown(str(kind), 20)} is not a schedule of isotrain; constant is written")
        kind = "constant"
    d.put("optimizer.schedule", kind, key)


def total_steps(d: Draft) -> int | None:
    """All steps of the run: given, printed in a log, or computed from the number of rows."""
    known = as_whole(d.value("trainer.total_training_steps")) or d.source.total_steps
    batch, epochs = as_whole(d.value("data.train_batch_size")), as_whole(d.value("trainer.total_epochs"))
    if known or not (d.rows and batch and epochs):
        return known
    return max(1, d.rows // batch) * epochs


def warmup(d: Draft, steps_key: str, ratio_key: str) -> None:
    steps, ratio = d.whole(steps_key, -1), d.number(ratio_key, 0.0) or 0.0
    if steps is None or steps <= 0:
        d.put("optimizer.warmup_ratio", ratio, ratio_key, steps_key)
    else:
        d.put("optimizer.warmup_steps", steps, steps_key, ratio_key)
