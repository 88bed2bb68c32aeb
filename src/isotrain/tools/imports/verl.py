"""A recipe from verl's keys of PPO and its relatives."""

from __future__ import annotations

import re
from typing import Any

from isotrain.observe.loggers import LOGGERS
from isotrain.recipe.rules import ENGINE_OPTIONS
from isotrain.tools.imports.draft import Draft, Off
from isotrain.tools.imports.hydra import OWN_CONFIGS, shown
from isotrain.tools.imports.keys import as_flag, verl_ppo
from isotrain.tools.imports.source import Stray, Unknown
from isotrain.tools.imports.verl_algorithm import (
    OPTIM,
    REF,
    A,
    M,
    R,
    algorithm,
    batch_size,
    correction,
    dapo,
    distillation,
    kl,
    loss,
    optimizer,
    reward_manager,
    router_replay,
)

CUTS = {"error": "error", "left": "truncate-left", "right": "truncate", "middle": "truncate-middle"}
OVERLONG = ("reward.reward_kwargs", "reward_model.reward_kwargs", "reward_model")
NULLABLE = frozenset(f"{A}.{key}" for key in ("clip_ratio_low", "clip_ratio_high", "optim.lr_warmup_steps"))
ENGINES = ("dp", "fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel", "mindspeed")
VERL_REWARD = "verl_reward.py:compute_score"
PROGRAMS = (
    "verl.trainer.main_ppo",
    "verl.trainer.main_ppo_sync",
    "recipe.dapo.main_dapo",
    "main_ppo",
    "main_dapo",
)
MULTIMODAL = re.compile(
    r"(?i)(?<![a-z])(?:\w*vl|vlm?|omni|llava\w*|internvl\w*|vision|video\w*|image\w*|audio\w*|geo3k\w*|\w*mm|geometry3k"
    r"|minicpm[-_.]?[ov]\w*|pixtral|paligemma|idefics\d*|glm[-_]?4(?:\.\d)?v|kimi[-_]vl|captions?)(?![a-z])"
)


def fill(d: Draft) -> None:
    """All fields of the recipe."""
    naming(d)
    devices(d)
    d.simple()
    precision(d)
    lora(d)
    lengths(d)
    algorithm(d)
    loss(d)
    router_replay(d)
    kl(d)
    distillation(d)
    correction(d)
    dapo(d)
    rollout(d)
    rewards(d)
    cluster(d)
    optimizer(d)
    trainer(d)
    observe(d)
    program(d)
    multimodal(d)


def program(d: Draft) -> None:
    """Changes by another program than `main_ppo`, or another configuration than its own."""
    name = d.source.program
    asynchronous = "fully_async" in name or "one_step_off" in name
    if name and not asynchronous and name not in PROGRAMS:
        why = "a program whose training loop and defaults are not known"
        d.source.strays.append(Stray(shown(name), why, 0))
    if asynchronous:
        why = d.table.exact["async_training.staleness_threshold"].why
        d.refuse("program", f"{shown(name)}: {why}")
        if not d.given("algorithm.rollout_correction.bypass_mode"):
            d.put("algorithm.rollout_correction.bypass_mode", True, note="on by default there")
    if not own_config(d):
        file = d.value("--config-name") or d.value("--config-path") or d.value("--config-dir")
        text = f"the configuration {shown(str(file), 60)}"
        d.source.opened.append(Stray(text, "it is not read", 0))


def own_config(d: Draft) -> bool:
    """Whether the configuration is one of verl's own, whose defaults the tables have."""
    name, path, directory = (d.raw(f"--config-{part}") for part in ("name", "path", "dir"))
    folder = str(path).removeprefix("./")
    inside = path is None or (
        isinstance(path, str) and re.fullmatch(r"config|(?:.*/)?verl/(?:.*/)?config", folder)
    )
    return bool(inside) and directory is None and (name is None or name in OWN_CONFIGS)


def multimodal(d: Draft) -> None:
    """Refuse images, video and audio, whose columns are not imported."""
    why = verl_ppo().exact[f"{A}.freeze_vision_tower"].why
    saved = d.source.kind in ("config", "log")  # they hold the defaults too
    for key in ("image", "video", "audio"):
        column = d.value(f"data.{key}_key")
        if column and not (saved and column == f"{key}s"):
            d.refuse(f"data.{key}_key", why)
    keys = [f"{M}.path", "model.path", "model.partial_pretrain", "data.train_files", "data.val_files"]
    keys += ["actor.model_name_or_path", "model.model_name_or_path", "data.prompt_dataset", "data.dataset"]
    for key in keys:
        value = d.raw(key)
        text = value.text if isinstance(value, Unknown) else str(value)
        if name := MULTIMODAL.search(text):
            d.refuse(key, f"{shown(name[0])}: {why}; if all rows are text, use a text model")


def unused(d: Draft) -> list[Off]:
    """Keys without effect in this training: those of a critic where there is none, and so on."""
    megatron = d.value(f"{A}.strategy") == "megatron"
    dynamic = d.flag(f"{A}.use_dynamic_bsz")
    estimator = d.text("algorithm.adv_estimator", "gae")
    ppo, discounts = estimator == "gae", estimator in ("gae", "reinforce_plus_plus")
    loss_name = d.written("algorithm.loss.name", "clip")
    shaped = any(d.flag(f"{place}.overlong_buffer{end}.enable") for place in OVERLONG for end in ("", "_cfg"))
    function = any(d.value(f"{place}custom_reward_function.path") for place in ("", "reward."))
    correction = "algorithm.rollout_correction"
    uncorrected = d.written(f"{correction}.level", "off") == "off"
    bypass = d.written(f"{correction}.bypass_mode", False)
    fixed_kl = d.text("algorithm.kl_ctrl.type", "fixed") == "fixed"
    overlong = f"{{{','.join(OVERLONG)}}}.{{overlong_buffer,max_resp_len}}"
    return [
        (not ppo, "critic. trainer.critic_warmup", "only PPO (adv_estimator: gae) has a critic"),
        (not ppo, "algorithm.lam", "only PPO (adv_estimator: gae) has it"),
        (not discounts, "algorithm.gamma", f"{shown(estimator, 30)} does not discount"),
        (estimator != "grpo", "algorithm.norm_adv_by_std_in_grpo", "only grpo has it"),
        (
            d.written("rollout.engine", "vllm") != "vllm",
            " ".join(_option_keys(d)),
            "an option of vLLM, which is not the engine",
        ),
        (own_config(d), "--config-", "verl's own configuration, whose defaults are known"),
        (not shaped, overlong, "its switch enable is off"),
        (not d.whole(f"{M}.lora_rank", 0, 0), f"{M}.lora_alpha {M}.target_modules", "lora_rank is 0"),
        (uncorrected, f"{correction}.rollout_is_threshold", "rollout_is is off"),
        (not d.value(f"{correction}.rollout_rs"), f"{correction}.rollout_rs_threshold", "rollout_rs is off"),
        (not bypass, f"{correction}.loss_type", "bypass_mode is off"),
        (
            not d.flag("distillation.enabled"),
            "distillation.{distillation_loss,teacher_model}",
            "distillation.enabled is off",
        ),
        (
            not function,
            "{reward.custom_reward_function,custom_reward_function}.name",
            "custom_reward_function.path is not given",
        ),
        (
            not megatron,
            f"{OPTIM}.{{lr_decay_,lr_warmup_init,weight_decay_incr_style}}",
            "the engine is not Megatron",
        ),
        (megatron, f"{OPTIM}.{{lr_scheduler_type,warmup_style}}", "the engine is Megatron"),
        (
            not d.flag("reward_model.enable"),
            "reward_model.{model.,rollout.}",
            "reward_model.enable is off",
        ),
        (not d.flag(f"{A}.use_kl_loss"), f"{A}.kl_loss_", "use_kl_loss is off"),
        (
            not d.flag("algorithm.use_kl_in_reward"),
            "algorithm.{kl_ctrl.,kl_penalty}",
            "use_kl_in_reward is off",
        ),
        (fixed_kl, "algorithm.kl_ctrl.{target_kl,horizon}", "kl_ctrl.type is fixed"),
        (dynamic, f"{A}.ppo_micro_batch_size", "use_dynamic_bsz is on"),
        (not dynamic, f"{A}.ppo_max_token_len_per_gpu", "use_dynamic_bsz is off"),
        (loss_name not in ("clip", "dppo-tv", "dppo-kl"), f"{A}.clip_ratio_c", "the loss has no such bound"),
        (loss_name != "sapo", f"{A}.{{tau_pos,tau_neg}}", "only the loss sapo has it"),
        (not megatron, f"{A}.megatron. {REF}.megatron.", "the engine is not Megatron"),
        (megatron, f"{A}.fsdp_config. {REF}.fsdp_config.", "the engine is Megatron"),
    ]


def naming(d: Draft) -> None:
    name = run_name(d.partly("trainer.experiment_name", "imported"))
    d.put("name", name, "trainer.experiment_name")
    if d.given("trainer.default_local_dir"):
        d.put("output", d.text("trainer.default_local_dir"), "trainer.default_local_dir")
    else:
        d.value("trainer.default_local_dir")  # asks if it is not known
        d.put("output", f"runs/{name}")
    seed = d.whole("data.seed")
    if seed is not None and 0 <= seed < 2**32:
        d.put("seed", seed, "data.seed")
    elif seed is not None:
        d.refuse("data.seed", f"{seed} is not between 0 and 2^32: set seed")


def run_name(text: str) -> str:
    """Text as a name that files can have."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-._+")[:120]
    return name if re.match(r"[A-Za-z0-9]", name) else "imported"


def devices(d: Draft) -> None:
    nodes, per_node = d.whole("trainer.nnodes", 1, 1) or 1, d.whole("trainer.n_gpus_per_node", 8, 1) or 8
    ranks = nodes * per_node
    note = f"{nodes} x {per_node}" if nodes > 1 else ""
    d.put("device.ranks", ranks, "trainer.n_gpus_per_node", "trainer.nnodes", note=note)
    megatron = d.value(f"{A}.strategy") == "megatron"
    ulysses = (f"{A}.ulysses_sequence_parallel_size", f"{A}.fsdp_config.ulysses_sequence_parallel_size")
    keys = (f"{A}.megatron.context_parallel_size",) if megatron else ulysses
    mesh(d, ranks, keys, "auto" if megatron else "ulysses")
    if megatron:
        expert = d.whole(f"{A}.megatron.expert_model_parallel_size", 1, 1) or 1
        if expert > 1 and ranks % expert == 0:
            d.put("device.mesh.expert", expert, f"{A}.megatron.expert_model_parallel_size")
        elif expert > 1:
            why = f"{expert} does not divide device.ranks ({ranks}): set device.mesh.expert"
            d.refuse(f"{A}.megatron.expert_model_parallel_size", why, False)
    if d.flag(f"{A}.fsdp_config.full_determinism"):
        d.put("device.determinism", "on", f"{A}.fsdp_config.full_determinism")
    strategy, engine = d.text(f"{A}.strategy", "fsdp"), d.text("model_engine", "dp")
    for key, name in ((f"{A}.strategy", strategy), ("model_engine", engine)):
        if name not in ENGINES:
            d.refuse(key, f"{shown(name, 20)} is not an engine of verl that isotrain knows")
    if strategy not in ("fsdp", "fsdp2"):
        d.note(f"{A}.strategy is {shown(strategy, 20)}; isotrain has FSDP2, which computes the same losses")


def mesh(
    d: Draft, ranks: int, keys: tuple[str, ...], attention: str, sharded: str = f"{A}.fsdp_config.fsdp_size"
) -> None:
    """Context parallelism and copies of the weights."""
    context = max([1, *(d.whole(key, 1, 1) or 1 for key in keys)])
    if context > 1 and ranks % context:
        d.refuse(keys[0], f"{context} does not divide device.ranks ({ranks}): set device.mesh.context", False)
        context = 1
    if context > 1:
        d.put("device.mesh.context", context, *keys)
        d.put("device.mesh.context_attention", attention, *keys)
    size = d.whole(sharded, -1)
    if size is None or size <= 0 or size >= ranks:
        return
    if ranks % size or size % context:
        d.refuse(sharded, f"{size} does not divide {ranks} ranks", False)
        return
    note = f"{ranks} ranks / {size}"
    d.put("device.mesh.replicas", ranks // size, sharded, note=note)


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def dtype(d: Draft, key: str) -> str:
    given = d.text(key, "bfloat16")
    name = DTYPES.get(given, given)
    if name not in DTYPES.values():
        d.refuse(
            key, f"model.dtype is bfloat16, float16 or float32, not {shown(name, 20)}; bfloat16 is written"
        )
        name = "bfloat16"
    d.put("model.dtype", name, key)
    return name


def precision(d: Draft) -> None:
    name = dtype(d, f"{A}.fsdp_config.dtype")
    engines = d.text(f"{R}.dtype", "auto") if d.given(f"{R}.dtype") else "auto"
    if engines != "auto" and DTYPES.get(engines, engines) != name:
        d.refuse(f"{R}.dtype", f"engines compute in model.dtype, which is {name}")
    if d.flag(f"{A}.fsdp_config.offload_policy"):
        d.put("model.offload.weights", True, f"{A}.fsdp_config.offload_policy")


def lora(d: Draft, model: str = M) -> None:
    rank = d.whole(f"{model}.lora_rank", 0, 0)
    if not rank:
        return
    d.put("model.lora.rank", rank, f"{model}.lora_rank")
    d.put("model.lora.alpha", d.whole(f"{model}.lora_alpha", 16, 1), f"{model}.lora_alpha")
    targets = d.value(f"{model}.target_modules")
    if targets != "all-linear":
        targets = [str(item) for item in targets] if isinstance(targets, list) else [str(targets)]
    d.put("model.lora.targets", targets, f"{model}.target_modules")


def lengths(d: Draft) -> None:
    """Long prompts, and the size of batches and micro-batches."""
    note = "ppo_mini_batch_size x require_batches" if d.value("data.train_batch_size") == 0 else ""
    d.put("data.batch_size", batch_size(d), "data.train_batch_size", note=note)
    long_prompts(d)
    prompt, response = (d.whole(f"data.max_{part}_length", 512, 1) or 512 for part in ("prompt", "response"))
    longest = prompt + response
    for key, least in (("max_model_len", longest), ("prompt_length", prompt), ("response_length", response)):
        length = d.whole(f"{R}.{key}")
        if length is not None and (length < least or (key != "max_model_len" and length != least)):
            d.refuse(f"{R}.{key}", f"{length}: isotrain's engines take what data.max_length and "
                     f"rollout.max_tokens give, {least}")  # fmt: skip
    rows = d.whole("data.val_max_samples", -1)
    if rows is not None and rows > 0:
        d.put("data.validation_rows", rows, "data.val_max_samples", note="the first rows")
    context = d.written("device.mesh.context", 1)
    if d.flag(f"{A}.use_dynamic_bsz"):
        size = d.whole(f"{A}.ppo_max_token_len_per_gpu", 16384, 1) or 16384
        budget, keys = size * context, [f"{A}.ppo_max_token_len_per_gpu"]
        note = f"{size} x {context} ranks of a context" if context > 1 else ""
    else:
        samples, keys = micro_batch(d)
        budget, note = samples * longest, f"{samples} x (prompt + response of {longest} tokens)"
    if budget < longest:
        note, budget = f"{budget} is raised to hold the longest sample", longest
    d.put("data.tokens_per_micro_batch", budget, *keys, note=note)


def long_prompts(d: Draft) -> None:
    """verl 0.5.0 cuts as `data.truncation` says; 0.7.0 cuts nothing, later ones the left, whatever it is."""
    filtered, key = "data.filter_overlong_prompts", "data.truncation"
    cut = d.text(key, "error")
    if cut not in CUTS:
        d.refuse(key, f"{shown(cut, 20)} is none of {', '.join(CUTS)}")
    if d.flag(filtered):
        d.put("data.too_long", "drop", filtered, key)
    elif d.version == "0.5.0":
        d.put("data.too_long", CUTS.get(cut, "error"), key)
    elif d.version == "0.7.0":
        d.put("data.too_long", "error", key, note="verl 0.7.0 fails too, whatever it says")
    else:
        d.put("data.too_long", "truncate-left", key, note="verl cuts the left, whatever it says")


def micro_batch(d: Draft) -> tuple[int, list[str]]:
    """Samples on one device at a time."""
    per_device = f"{A}.ppo_micro_batch_size_per_gpu"
    samples = d.whole(per_device, None, 1)
    if samples:
        return samples, [per_device]
    overall = d.whole(f"{A}.ppo_micro_batch_size", None, 1)
    if overall:
        return max(1, overall // int(d.lines["device.ranks"].value)), [f"{A}.ppo_micro_batch_size"]
    return 1, [per_device]


def rollout(d: Draft) -> None:
    engine = d.text(f"{R}.name", "vllm")
    if engine not in ("vllm", "sglang", "hf"):
        d.refuse(f"{R}.name", f"{shown(engine, 20)} is not an engine of isotrain; vllm is written", False)
        engine = "vllm"
    d.put("rollout.engine", engine, f"{R}.name")
    if engine == "hf":
        d.lines.pop("rollout.tensor_parallel", None)
    tensor, ranks = d.lines.get("rollout.tensor_parallel"), int(d.lines["device.ranks"].value)
    if tensor is not None and int(tensor.value) > ranks:
        note = f"{tensor.value} is more than the {ranks} device(s)"
        d.put("rollout.tensor_parallel", ranks, f"{R}.tensor_model_parallel_size", note=note)
    engine_options(d, engine)
    keys = (f"{R}.val_kwargs.do_sample", f"{R}.val_kwargs.temperature")
    temperature, count = d.number(keys[1], 0.0), d.whole(f"{R}.val_kwargs.n", 1, 1)
    if not d.flag(keys[0]):
        temperature = 0.0
    d.put("rollout.validation.temperature", temperature or 0.0, *keys)
    d.put("rollout.validation.n", count if temperature else 1, f"{R}.val_kwargs.n")


def engine_options(d: Draft, engine: str) -> None:
    """vLLM's own options; those of its compilation are in a section there."""
    keys = [key for key in _option_keys(d) if engine == "vllm" and d.given(key)]
    # verl's default of the tokens of a step is also that of isotrain.
    given = {
        key.rpartition(".")[2]: value
        for key in keys
        if (value := d.value(key)) is not None and value not in d.table.exact[key].defaults
    }
    options = {name: value for name, value in given.items() if name in ENGINE_OPTIONS}
    if compilation := {name: value for name, value in given.items() if name not in ENGINE_OPTIONS}:
        options["compilation_config"] = compilation
    if options:
        d.put("rollout.engine_options", options, *keys)


def _option_keys(d: Draft) -> list[str]:
    return [key for key, rule in d.table.exact.items() if rule.field == "rollout.engine_options"]


def rewards(d: Draft) -> None:
    places = ("reward.custom_reward_function", "custom_reward_function")
    custom = next((place for place in places if d.value(f"{place}.path")), None)
    manager, kind = reward_manager(d)
    if kind not in ("naive", "dapo", "prime", "None", ""):
        d.refuse(manager, f"{shown(kind, 20)}: isotrain calls a reward function once for each response")
    for section, name in (("reward.reward_model", "model_path"), ("reward_model", "model.path")):
        path = f"{section}.{name}"
        if d.flag(f"{section}.enable") and d.value(path):
            d.put("reward.model.path", d.text(path), path)
            return
    if custom:
        path, name = d.text(f"{custom}.path"), d.text(f"{custom}.name", "compute_score")
        if re.fullmatch(r"[^:\x00]+\.py", path) and re.fullmatch(r"[A-Za-z_]\w*", name):
            d.put("reward.function.path", f"{path}:{name}", f"{custom}.path", f"{custom}.name")
            return
        d.refuse(f"{custom}.path", "reward.function.path is FILE.py:NAME of a local file")
    files = [*_list(d.value("data.train_files")), *_list(d.value("data.val_files"))]
    if files and all("gsm8k" in str(file).lower() for file in files):
        note = "verl's reward of data_source openai/gsm8k, taken from the file names"
        d.put("reward.gsm8k.method", "strict", note=note)
        return
    d.put("reward.function.path", VERL_REWARD, note="write this file, see above")
    d.ask(
        "reward",
        "verl chooses the reward by the data_source of each row. For the same rewards write verl_reward.py "
        "with the line `from verl.utils.reward_score import default_compute_score as compute_score`, or set "
        "reward.gsm8k, reward.math or reward.function",
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def cluster(d: Draft) -> None:
    actor = "megatron" if d.value(f"{A}.strategy") == "megatron" else "fsdp_config"
    offloaded = ("param_offload", "optimizer_offload")
    switches = [
        *(f"{A}.{actor}.{name}" for name in offloaded),
        *(f"{REF}.{actor}.{name}" for name in offloaded),
        *(f"critic.{place}.{name}" for place in ("model.fsdp_config", "fsdp") for name in offloaded),
    ]
    on = [key for key in switches if d.flag(key)]
    d.put("cluster.offload", bool(on), *(on or switches[:1]))
    if as_flag(d.value("actor_rollout_ref.hybrid_engine")) is False or d.given("rollout.n_gpus_per_node"):
        d.put("cluster.placement", "separate", "actor_rollout_ref.hybrid_engine", "rollout.n_gpus_per_node")
        free = (d.whole("rollout.nnodes", 1, 1) or 1) * (d.whole("rollout.n_gpus_per_node", 8, 1) or 8)
        tensor = d.lines.get("rollout.tensor_parallel")
        engines = max(1, free // (int(tensor.value) if tensor else 1))
        d.put("rollout.engines", engines, "rollout.n_gpus_per_node", note=f"{free} devices / tensor_parallel")
        note = "verl's thresholds count samples: choose a number of weight versions"
        d.put("rollout.staleness", 1, note=note)
        if d.flag("async_training.partial_rollout") and d.lines["rollout.engine"].value != "sglang":
            d.put("rollout.in_flight", True, "async_training.partial_rollout")
    else:
        d.put("cluster.placement", "colocated", "actor_rollout_ref.hybrid_engine")


def trainer(d: Draft) -> None:
    steps = d.whole("trainer.total_training_steps", None, 1)
    epochs = d.whole("trainer.total_epochs", 30, 1) or 30
    if steps:
        most = max(1, d.rows // batch_size(d)) * epochs if d.rows else steps
        note = f"{epochs} epochs end it earlier than {steps}" if most < steps else ""
        keys = ("trainer.total_training_steps", "trainer.total_epochs")
        d.put("trainer.steps", min(steps, most), *keys, note=note)
        if not d.rows and not d.source.total_steps:
            d.note(f"verl ends after {epochs} epochs if that is before {steps} steps: --rows N tells")
    elif d.source.total_steps:
        note = f"{d.source.total_steps} steps, verl drops the last, smaller batch of each of {epochs} epochs"
        d.put("trainer.steps", d.source.total_steps, "trainer.total_epochs", note=note)
    elif d.given("rollout.total_rollout_steps"):
        prompts = d.whole("rollout.total_rollout_steps", 0, 1) or 1
        batch = int(d.lines["data.batch_size"].value)
        note = f"{prompts} prompts / {batch}"
        d.put("trainer.steps", max(1, prompts // batch), "rollout.total_rollout_steps", note=note)
    else:
        d.put("trainer.epochs", epochs, "trainer.total_epochs")
    checkpoints(d, "trainer.max_actor_ckpt_to_keep")


def checkpoints(d: Draft, kept: str) -> None:
    """How many are kept, and whether a run begins with the last."""
    if keep := d.whole(kept, None, 1):
        d.put("trainer.keep_checkpoints", keep, kept)
    mode = d.text("trainer.resume_mode", "auto")
    if mode not in ("auto", "disable"):
        why = "resume is auto or never: copy the run directory to output"
        d.refuse("trainer.resume_mode", why, changes=False)
    d.put("trainer.resume", "never" if mode == "disable" else "auto", "trainer.resume_mode")


def observe(d: Draft) -> None:
    names = [str(item) for item in _list(d.value("trainer.logger"))]
    known = {"console", *LOGGERS}
    kept = [name for name in names if name in known]
    d.put("observe.loggers", kept or ["console"], "trainer.logger")
    if lacking := set(names) - known:
        missing = ", ".join(sorted(lacking))
        d.refuse("trainer.logger", f"{shown(missing, 60)}: metrics.jsonl is always written", changes=False)
    if d.value("trainer.rollout_data_dir"):
        d.put("rollout.record", True, "trainer.rollout_data_dir")
