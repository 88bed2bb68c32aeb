"""A recipe from the settings of TRL's SFT, DPO, KTO, reward-model and GRPO trainers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isotrain.tools.imports import keys, trl_grpo
from isotrain.tools.imports.draft import Draft, Off
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.keys import KeyTable, as_flag, as_whole
from isotrain.tools.imports.source import ImportSource, ImportSourceError, flatten
from isotrain.tools.imports.trl_script import dataset_name, with_split
from isotrain.tools.imports.verl import run_name

TRAINERS = ("sft", "dpo", "kto", "reward", "grpo")
PAIRS = ("dpo", "reward")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_LOGGERS = ("tensorboard", "wandb", "swanlab", "mlflow")
_LONGEST_JSON = 100_000
_MIXTURE = re.compile(r"moe|mixtral|A\d+B|gpt-oss|deepseek-v", re.I)


def prepare(source: ImportSource) -> tuple[str, KeyTable]:
    """The trainer and its table; keys get the names of today, and sections become dotted keys."""
    trainer = _trainer(source)
    table = keys.key_table("trl", "common", trainer)
    settings, names = source.settings, {}
    source.settings, settled = {}, source.settled
    for key, setting in settings.items():
        name, value = key.replace("-", "_"), setting.value
        if name.startswith("no_") and name[3:] in table.exact and as_flag(value) is True:
            name, value = name[3:], False
        name = table.flat.get(name, name)
        if isinstance(value, str) and value.startswith("{") and len(value) < _LONGEST_JSON:
            value = _parsed(value)
        parts = flatten({name: value}) if isinstance(value, Mapping) and value else {name: value}
        parts = {table.flat.get(part, part): inner for part, inner in parts.items()}
        names[key] = list(parts)
        for part, inner in parts.items():
            source.settings[part] = replace(setting, value=inner)
    for entry in source.entries:
        entry.keys[:] = [name for key in entry.keys for name in names.get(key, [key])]
    source.settled = {name for key in settled for name in names.get(key, [key])}
    return trainer, table


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _trainer(source: ImportSource) -> str:
    """Which trainer the settings are for: the command says it, or a key that only one has."""
    name = re.search(r"(?:^|[./])(sft|dpo|kto|reward|grpo)(?:_\w+)?$", source.program)
    if name:
        return name[1]
    fitting = [kind for kind in TRAINERS if _own_keys(kind) & source.settings.keys()]
    if len(fitting) != 1:
        raise ImportSourceError(
            "this is no configuration of one trainer of TRL: say which with --set trainer=sft, "
            "dpo, kto, reward or grpo"
        )
    return fitting[0]


def _own_keys(kind: str) -> set[str]:
    """Keys that no other trainer has."""
    tables = {name: keys.key_table("trl", "common", name).exact.keys() for name in TRAINERS}
    return tables[kind] - set[str]().union(*(tables[name] for name in TRAINERS if name != kind))


def fill(d: Draft, trainer: str) -> None:
    """All fields of the recipe."""
    d.put("algorithm.name", "rm" if trainer == "reward" else trainer, note=f"{trainer} of TRL")
    _names(d)
    ranks = _devices(d)
    d.simple()
    _model(d, trainer)
    _data(d)
    each = d.whole("per_device_train_batch_size", 8, 1) or 8
    rounds = d.whole("gradient_accumulation_steps", 1, 1) or 1
    if trainer == "grpo":
        trl_grpo.fill(d, each, rounds, ranks)
    else:
        note = f"{each} x {rounds} x {ranks} devices"
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        d.put("data.batch_size", each * rounds * ranks, *names, note=note)
        _lengths(d, trainer, each)
        {"sft": _sft, "dpo": _dpo, "kto": _kto, "reward": _reward_model}[trainer](d)
    d.put("data.shuffle", _shuffles(d, trainer), "train_sampling_strategy")
    _optimizer(d)
    _course(d, trl_grpo.updates(d) if trainer == "grpo" else 1)


def nullable(table: KeyTable) -> frozenset[str]:
    """Keys for which null is a value of its own."""
    return frozenset(
        {"max_length", "max_completion_length", "vllm_importance_sampling_clip_max"} & table.exact.keys()
    )


def unused(d: Draft, trainer: str) -> list[Off]:
    """Keys without effect beside the others."""
    evaluates = d.text("eval_strategy", "no") != "no"
    saves = d.text("save_strategy", "steps") == "steps"
    adapters = d.flag("use_peft")
    off: list[Off] = [
        (
            not evaluates,
            "{eval_steps,eval_on_start,dataset_test_split,trainer.eval_dataset}",
            "eval_strategy is no",
        ),
        (not saves, "save_steps", "save_strategy is not steps"),
        (not adapters, "{lora_,peft.}", "use_peft is off"),
    ]
    if trainer == "grpo":
        vllm = d.flag("use_vllm")
        corrects = vllm and d.flag("vllm_importance_sampling_correction")
        off += [
            (not vllm, "vllm_", "use_vllm is off"),
            (not corrects, "vllm_importance_sampling_", "the correction is off"),
            (not d.number("beta", 0.0), "use_bias_correction_kl", "beta is 0"),
            (not evaluates, "num_generations_eval", "eval_strategy is no"),
        ]
    return off


def _names(d: Draft) -> None:
    given = d.partly("run_name", "")
    output = d.partly("output_dir", "")
    d.put("name", run_name(given or output.rstrip("/").rpartition("/")[2] or "imported"), "run_name")
    d.put("output", output or f"runs/{d.lines['name'].value}", "output_dir")
    loggers = d.value("report_to")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    if strange := [str(name) for name in loggers if name not in (*_LOGGERS, "none", None)]:
        d.refuse(
            "report_to", f"isotrain has {', '.join(_LOGGERS)}, not {shown(', '.join(strange), 40)}", False
        )
    d.put("observe.loggers", ["console", *(name for name in _LOGGERS if name in loggers)], "report_to")
    if d.given("project"):
        d.put("observe.project", d.text("project"), "project")


def _devices(d: Draft) -> int:
    """Batch sizes of TRL are those of one device; the launcher has their number."""
    known = d.whole("num_processes", None, 1) or d.launched("num_processes")
    each = d.launched("nproc_per_node")
    shipped = d.text("accelerate_config") in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu")
    if known:
        ranks, note = known, "processes of the launcher"
    elif each:
        ranks = each * (d.launched("nnodes") or 1)
        note = "nnodes x nproc_per_node of the launcher"
    elif shipped:
        ranks, note = 8, "TRL's file of this name says 8 processes"
    else:
        ranks, note = 1, "the number of devices is not given, 1 is assumed"
        d.note("batch sizes are per device; 1 device is assumed: --set num_processes=N says how many")
        if d.source.launcher.get("name") or d.given("accelerate_config"):
            d.ask(
                "num_processes", "the launcher takes it from elsewhere; 1 is written: --set num_processes=N"
            )
    d.put("device.ranks", ranks, *(["num_processes"] if d.given("num_processes") else []), note=note)
    if any(entry.text.startswith("--config_file") for entry in d.source.entries):
        d.note("the launcher's configuration file is not read: check that it sets no clipping or optimizer")
    if d.flag("use_cpu"):
        d.put("device.type", "cpu", "use_cpu")
    if d.flag("full_determinism"):
        d.put("device.determinism", "on", "full_determinism")
    return ranks


def _model(d: Draft, trainer: str) -> None:
    path = d.text("model_name_or_path")
    key = "model_init_kwargs.revision" if d.given("model_init_kwargs.revision") else "model_revision"
    revision = d.text(key, "main")
    if path:
        name = path if revision in ("", "main") else f"{path}@{revision}"
        d.put("model.path", name, "model_name_or_path", key)
    loaded = "model_init_kwargs.dtype" if d.given("model_init_kwargs.dtype") else "dtype"
    kept, half = d.text(loaded, "float32"), d.flag("fp16")
    mixed = not half if d.value("bf16") is None else d.flag("bf16")
    if kept not in ("float32", "None"):
        why = f"{shown(kept, 20)} is the type of the trained weights; isotrain keeps them in float32"
        if not d.flag("use_peft"):
            d.refuse(loaded, why)
        elif kept not in ("bfloat16", "auto"):
            d.refuse(loaded, f"{shown(kept, 20)}: set model.dtype; bfloat16 is written")
    low = "bfloat16" if mixed or kept != "float32" else "float32"
    d.put("model.dtype", "float16" if half else low, "bf16", "fp16", loaded)
    balancing = d.number("router_aux_loss_coef", None)
    if balancing:
        d.put("model.router_aux_loss", balancing, "router_aux_loss_coef")
    elif balancing is None and trainer != "reward" and _MIXTURE.search(path):
        d.note("TRL takes router_aux_loss_coef of a mixture's config.json: set model.router_aux_loss to it")
    if trainer == "grpo" and d.flag("cast_lm_head_to_fp32"):
        d.put("model.head_dtype", "float32", "cast_lm_head_to_fp32")
    if d.flag("use_peft"):
        _lora(d, trainer)


def _lora(d: Draft, trainer: str) -> None:
    script = any(key.startswith("peft.") for key in d.source.settings) or d.source.program in TRAINERS
    rank, alpha, dropout, targets = (
        ("peft.r", "peft.lora_alpha", "peft.lora_dropout", "peft.target_modules")
        if script
        else ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
    )
    d.put("model.lora.rank", d.whole(rank, 8, 1), rank)
    d.put("model.lora.alpha", d.whole(alpha, 8, 1), alpha)
    drops = 0.0 if trainer != "sft" and d.flag("disable_dropout") else d.number(dropout, 0.0)
    note = "disable_dropout sets it to 0" if trainer != "sft" and d.flag("disable_dropout") else ""
    d.put("model.lora.dropout", drops, dropout, note=note)
    value = d.value(targets)
    if value is None:
        note = "peft's targets of Llama, Qwen and their kin: check yours"
        d.put("model.lora.targets", ["q_proj", "v_proj"], targets, note=note)
    else:
        whole = value in ("all-linear", ["all-linear"])
        d.put(
            "model.lora.targets",
            "all-linear" if whole else value if isinstance(value, list) else [str(value)],
            targets,
        )


def _data(d: Draft) -> None:
    for side, split in (("train", "dataset_train_split"), ("eval", "dataset_test_split")):
        if side == "eval" and d.text("eval_strategy", "no") == "no":
            continue
        key, names, field = _rows(d, side, split)
        if not names and side == "train":
            d.ask(key, "there is no training data that can be read: set data.train")
            names = ["train.jsonl"]
        if names:
            path = "data.train" if side == "train" else "data.validation"
            d.put(path, names if len(names) > 1 else names[0], key, *field)


def _rows(d: Draft, side: str, split_key: str) -> tuple[str, list[str], list[str]]:
    """The key that names rows, their files or names, and further keys."""
    key, mixture = f"trainer.{side}_dataset", d.value("datasets") if side == "train" else None
    if d.given(key) or key in d.source.settings:
        value = d.value(key)
        return key, value if isinstance(value, list) else [value] if value else [], []
    if mixture:
        parts = [_part(part) for part in mixture] if isinstance(mixture, list) else [None]
        if None in parts:
            d.refuse("datasets", "a part of it is more than path, name, data_files and split: write one file")
        return "datasets", [name for part in parts if part for name in part], []
    name = d.text("dataset_name")
    if not name:
        return "dataset_name", [], []
    config, split = d.text("dataset_config"), d.text(split_key)
    value = with_split(f"{name}:{config}" if config else name, split)
    if not isinstance(value, str):
        d.refuse(split_key, value.why)
        value = name
    return "dataset_name", [value], ["dataset_config", split_key]


def _part(part: Any) -> list[str] | None:
    """One data set of a mixture."""
    if not isinstance(part, Mapping):
        return None
    value = dataset_name({key: inner for key, inner in part.items() if inner is not None})
    return value if isinstance(value, list) else [value] if isinstance(value, str) else None


def _lengths(d: Draft, trainer: str, each: int) -> None:
    longest = d.whole("max_length", None, 2)
    if longest is None:
        d.refuse(
            "max_length", "without a limit TRL takes rows of any length: 1024 is written, set data.max_length"
        )
        longest = 1024
    d.put("data.max_length", longest, "max_length")
    d.put("data.too_long", "truncate", note="TRL cuts the end")
    sides = 2 if trainer in PAIRS else 1
    size = f"{each} x {longest} tokens" + (" x 2 responses" if sides == 2 else "")
    d.put("data.tokens_per_micro_batch", each * longest * sides, "per_device_train_batch_size", note=size)


def _sft(d: Draft) -> None:
    if d.flag("packing"):
        d.refuse(
            "packing",
            f"a sample of TRL is then a pack of max_length tokens: set data.batch_size to the "
            f"rows in {d.lines['data.batch_size'].value} packs",
        )
    completion = d.value("completion_only_loss")
    if d.text("dataset_text_field", "text") != "text":
        d.refuse("dataset_text_field", "the column of plain text is called text: rename it in the rows")
    d.note(
        "TRL may learn what a chat template writes behind the end of a turn, such as a newline; isotrain not"
    )
    if d.flag("assistant_only_loss"):
        d.put("data.format", "messages", "assistant_only_loss")
    elif completion is None:
        d.ask(
            "assistant_only_loss",
            "rows with messages: TRL learns from every token, isotrain from those of the assistant, as "
            "assistant_only_loss does. Rows with prompt and completion, or with text, are the same: set "
            "data.format to prompt-completion or text",
        )
    elif as_flag(completion):
        d.put("data.format", "prompt-completion", "completion_only_loss")
    else:
        d.refuse(
            "completion_only_loss", "isotrain learns from completions only; rows with text have no prompt"
        )


def _dpo(d: Draft) -> None:
    losses = d.value("loss_type")
    loss = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
    if loss not in ("sigmoid", "ipo"):
        d.refuse("loss_type", f"{shown(str(loss), 40)} is not a loss of isotrain's DPO; sigmoid is written")
    d.put("algorithm.loss", loss if loss in ("sigmoid", "ipo") else "sigmoid", "loss_type")
    if loss == "ipo":
        d.put("algorithm.length_averaged", True, "loss_type", note="TRL's ipo takes means over tokens")


def _kto(d: Draft) -> None:
    d.note("TRL estimates KTO's KL in each batch of a device, isotrain over the whole step")


def _reward_model(d: Draft) -> None:
    d.put("algorithm.loss", "sigmoid")
    d.put(
        "algorithm.centre", d.number("center_rewards_coefficient", None) or 0.0, "center_rewards_coefficient"
    )
    d.note("TRL uses a column margin if rows have one: set algorithm.margins then")


def _shuffles(d: Draft, trainer: str) -> bool:
    order = d.text("train_sampling_strategy", "random")
    if order not in ("random", "sequential"):
        why = f"isotrain has a random order or that of the file, not {shown(order, 20)}; random is written"
        d.refuse("train_sampling_strategy", why)
    return order != "sequential" and (trainer != "grpo" or d.flag("shuffle_dataset"))


def _optimizer(d: Draft) -> None:
    betas = [d.number("adam_beta1", 0.9), d.number("adam_beta2", 0.999)]
    d.put("optimizer.betas", betas, "adam_beta1", "adam_beta2")
    kind = d.text("lr_scheduler_type", "linear")
    if kind not in SCHEDULES:
        d.refuse("lr_scheduler_type", f"{shown(kind, 30)} is not a schedule of isotrain; cosine is written")
    d.put("optimizer.schedule", SCHEDULES.get(kind, "cosine"), "lr_scheduler_type")
    rate, least = "lr_scheduler_kwargs.min_lr_rate", "lr_scheduler_kwargs.min_lr"
    ratio = 0.0
    if kind == "cosine_with_min_lr":
        peak = d.number("learning_rate") or 0.0
        ratio = d.number(rate, None) or 0.0
        if d.given(least) and peak:
            ratio = min(1.0, (d.number(least, 0.0) or 0.0) / peak)
    d.put("optimizer.min_lr_ratio", ratio, *(key for key in (rate, least) if d.given(key)))
    steps = d.number("warmup_steps", 0.0) or 0.0
    share = d.number("warmup_ratio", None) if d.given("warmup_ratio") else None
    if 0 < steps < 1 or (share is not None and not steps):
        key = "warmup_steps" if steps else "warmup_ratio"
        d.put("optimizer.warmup_ratio", steps or share, key)
    else:
        d.put("optimizer.warmup_steps", math.ceil(steps), "warmup_steps")


def _course(d: Draft, updates: int) -> None:
    """Length of the run, validation and checkpoints, from updates to steps."""
    note = f"{updates} updates are a step" if updates > 1 else ""
    most, epochs = d.whole("max_steps", -1) or -1, d.number("num_train_epochs", 3.0) or 3.0
    if most > 0:
        d.put("trainer.steps", max(1, most // updates), "max_steps", note=note)
        d.used.add("num_train_epochs")
    elif d.rows and as_whole(epochs) is None:
        steps = max(1, math.ceil(d.rows * epochs / int(d.lines["data.batch_size"].value)))
        d.put("trainer.steps", steps, "num_train_epochs", note=f"{epochs:g} epochs of {d.rows} rows")
    else:
        if as_whole(epochs) is None:
            d.refuse("num_train_epochs", f"{epochs:g} epochs are no whole number: --rows N makes steps of it")
        d.put("trainer.epochs", max(1, math.ceil(epochs)), "num_train_epochs")
    strategy = d.text("eval_strategy", "no")
    every = d.number("eval_steps", None)
    if strategy == "steps" and every is not None and every < 1:
        d.refuse("eval_steps", "a share of the run: set trainer.validate_every in steps", False)
    elif strategy == "steps":
        count = int(every or d.number("logging_steps", 10) or 10)
        d.put("trainer.validate_every", max(1, count // updates), "eval_steps", "eval_strategy", note=note)
    elif strategy != "no":
        d.refuse("eval_strategy", f"{shown(strategy, 20)}: set trainer.validate_every in steps", False)
    if d.flag("eval_on_start"):
        d.put("trainer.validate_first", True, "eval_on_start")
    _checkpoints(d, updates, note)


def _checkpoints(d: Draft, updates: int, note: str) -> None:
    strategy, every = d.text("save_strategy", "steps"), d.number("save_steps", 500) or 0
    if strategy == "no":
        d.put("trainer.save_every", 0, "save_strategy", note="the last one is always saved")
    elif strategy == "steps" and every >= 1:
        d.put("trainer.save_every", max(1, int(every) // updates), "save_steps", "save_strategy", note=note)
    else:
        key = "save_strategy" if strategy != "steps" else "save_steps"
        d.refuse(key, "set trainer.save_every in steps; by default isotrain saves by time", False)
    limit = d.whole("save_total_limit", None, 1)
    if limit:
        d.put("trainer.keep_checkpoints", limit, "save_total_limit")
