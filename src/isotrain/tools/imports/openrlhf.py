"""A recipe from OpenRLHF's flags of PPO and its relatives (`train_ppo_ray`)."""

from __future__ import annotations

import re
from typing import Any

from isotrain.tools.imports.draft import Draft, Off
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.keys import as_number, expanded
from isotrain.tools.imports.verl import run_name

ESTIMATORS = {
    "gae": "ppo",
    "reinforce": "reinforce++",
    "reinforce_baseline": "reinforce++-baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
GROUPED = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
CRITIC_SHARES = expanded("adam.{betas,weight_decay,eps} lr_scheduler lr_warmup_ratio min_lr_ratio max_norm")
"""Flags of the critic for which isotrain takes the policy's value."""
REWARD = "openrlhf_reward.py:score"
ADAPTER = (
    "OpenRLHF's reward_func gets lists. Write openrlhf_reward.py with `def score(response, answer, row):` "
    "that calls it with lists of one query (prompt + response), one prompt and one label, and returns its "
    "one reward"
)


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


def fill(d: Draft) -> None:
    """All fields of the recipe."""
    names(d)
    _devices(d)
    d.simple()
    lora(d, "actor.aux_loss_coef")
    _data(d)
    _batches(d)
    _algorithm(d)
    _loss(d)
    _kl(d)
    _correction(d)
    _dapo(d)
    _rollout(d)
    _reward(d)
    schedule(d, "actor.lr_scheduler", "actor.min_lr_ratio")
    checkpoints(d)


def unused(d: Draft) -> list[Off]:
    """Flags without effect beside the others."""
    estimator = d.value("algo.advantage.estimator")
    remote, dynamic = bool(d.value("reward.remote_url")), d.flag("train.dynamic_batch_enable")
    free = not d.number("algo.kl.init_coef")
    grouped = estimator in GROUPED
    return [
        (estimator != "gae", "critic.", "only gae has a critic"),
        (remote, "reward.normalize_enable", "it is for reward models"),
        (grouped, "algo.advantage.gamma", "OpenRLHF takes 1 for estimators that compare responses"),
        (estimator != "gae", "algo.advantage.lambd", "only gae has it"),
        (dynamic, "train.micro_batch_size", "dynamic_batch_enable is on"),
        (not dynamic, "train.max_tokens_per_gpu", "dynamic_batch_enable is off"),
        (free, "algo.kl.{use_loss,estimator}", "init_coef is 0"),
    ]


def _devices(d: Draft) -> None:
    nodes, each = d.whole("actor.num_nodes", 1, 1) or 1, d.whole("actor.num_gpus_per_node", 8, 1) or 8
    note = f"{nodes} x {each}" if nodes > 1 else ""
    d.put("device.ranks", nodes * each, "actor.num_gpus_per_node", "actor.num_nodes", note=note)
    mesh(d, nodes * each)


def _data(d: Draft) -> None:
    sources(d, "data.prompt_dataset", "data.prompt_split")
    d.put("data.too_long", "error", note="OpenRLHF cuts or fails; set drop to leave longer prompts out")
    if not d.flag("data.apply_chat_template"):
        d.ask("data.apply_chat_template", PLAIN_PROMPTS)
    if d.value("data.input_template"):
        d.refuse("data.input_template", "write the text around the prompt into the rows")


def _batches(d: Draft) -> None:
    """Lengths and numbers of samples: OpenRLHF counts samples where isotrain counts prompts."""
    longest, answer = _lengths(d)
    n = d.whole("rollout.n_samples_per_prompt", 1, 1) or 1
    prompts = d.whole("rollout.batch_size", 1024, 1) or 1024
    samples = d.whole("train.batch_size", 128, 1) or 128
    mini = max(1, min(prompts, samples // n))
    note = f"{samples} samples / {n} responses; a step of {prompts} prompts is {-(-prompts // mini)} updates"
    if samples % n or samples > prompts * n:
        d.refuse(
            "train.batch_size",
            f"{samples} samples are no whole prompts of a step ({prompts} x {n}): {mini} is written",
        )
    d.put("algorithm.mini_batch_size", mini, "train.batch_size", "rollout.n_samples_per_prompt", note=note)
    if d.flag("train.dynamic_batch_enable"):
        size, key = d.whole("train.max_tokens_per_gpu", 16192, 1) or 16192, "train.max_tokens_per_gpu"
        context = int(d.written("device.mesh.context", 1))
        size, note = size * context, f"x {context} ranks of a context" if context > 1 else ""
    else:
        key = "train.micro_batch_size"
        each = d.whole(key, 1, 1) or 1
        size, note = each * (longest + answer), f"{each} x (prompt + response of {longest + answer} tokens)"
    if size < longest + answer:
        size, note = longest + answer, f"{size} is raised to hold the longest sample"
    d.put("data.tokens_per_micro_batch", size, key, note=note)


def _lengths(d: Draft) -> tuple[int, int]:
    """Longest prompt and longest response."""
    if d.given("prompt_max_len") or d.given("generate_max_len") or d.version in ("0.5.9", "0.8.0"):
        prompt = d.whole("prompt_max_len", 1024, 2) or 1024
        answer = d.whole("generate_max_len", 1024, 1) or 1024
        d.put("data.max_length", prompt, "prompt_max_len")
        d.put("rollout.max_tokens", answer, "generate_max_len")
        return prompt, answer
    total, limit = d.whole("data.max_len", 2048, 4) or 2048, d.whole("rollout.max_new_tokens", None, 1)
    answer = min(limit or total // 2, total - 2)
    if limit is None:
        d.refuse(
            "data.max_len",
            f"without max_new_tokens a response may fill what the prompt leaves of {total} tokens; "
            f"{total - answer} + {answer} is written: set data.max_length and rollout.max_tokens",
        )
    d.put("data.max_length", total - answer, "data.max_len", note=f"{total} - {answer} for the response")
    d.put("rollout.max_tokens", answer, "rollout.max_new_tokens")
    return total - answer, answer


def _algorithm(d: Draft) -> None:
    key = "algo.advantage.estimator"
    estimator = d.text(key, "gae")
    if estimator not in ESTIMATORS:
        d.refuse(
            key, f"{shown(estimator, 30)} is not an estimator of isotrain, which has {', '.join(ESTIMATORS)}"
        )
        estimator = "group_norm"
    name = ESTIMATORS[estimator]
    d.put("algorithm.name", name, key)
    d.put("algorithm.convention", "openrlhf")
    if estimator in GROUPED and (d.whole("rollout.n_samples_per_prompt", 1, 1) or 1) < 2:
        d.refuse(
            "rollout.n_samples_per_prompt", f"{estimator} compares responses to one prompt: 2 is written"
        )
        d.put("rollout.n", 2, "rollout.n_samples_per_prompt", note="raised to compare")
    if name == "grpo":
        d.put("algorithm.scale_by_std", estimator != "dr_grpo", key)
    if name in ("ppo", "reinforce++"):
        d.put("algorithm.gamma", d.number("algo.advantage.gamma", 1.0), "algo.advantage.gamma")
    if name == "ppo":
        _critic(d)


def _critic(d: Draft) -> None:
    d.put("algorithm.lam", d.number("algo.advantage.lambd", 1.0), "algo.advantage.lambd")
    path, model = d.value("critic.model_name_or_path"), d.value("reward.model_name_or_path")
    if path:
        d.put("algorithm.critic.path", str(path), "critic.model_name_or_path")
    elif model and not d.value("reward.remote_url"):
        note, first = "OpenRLHF's critic starts from it", str(model).split(",")[0]
        d.put("algorithm.critic.path", first, "reward.model_name_or_path", note=note)
    d.put("algorithm.critic.lr", d.number("critic.adam.lr", 9e-6), "critic.adam.lr")
    d.put("algorithm.critic.clip", d.number("critic.value_clip", 0.5), "critic.value_clip")
    mode = "seq-mean-token-mean" if d.version == "0.5.9" else "token-mean"
    d.put("algorithm.critic.aggregation", mode, note=f"what OpenRLHF {d.version} does")
    frozen = max(0, d.whole("critic.freezing_steps", -1) or 0)
    d.put("algorithm.critic.warmup_steps", frozen, "critic.freezing_steps")
    for name in CRITIC_SHARES:
        key, policys = f"critic.{name}", f"actor.{name}"
        if d.given(key) and d.value(key) != d.value(policys):
            d.refuse(key, f"the critic has the policy's value, {shown(str(d.value(policys)), 30)}")


def _loss(d: Draft) -> None:
    kind = d.text("actor.policy_loss_type", "ppo")
    gspo = kind == "gspo"
    if kind not in ("ppo", "gspo"):
        d.refuse("actor.policy_loss_type", f"{shown(kind, 20)} is not a loss of isotrain; clip is written")
    d.put("algorithm.loss.name", "gspo" if gspo else "clip", "actor.policy_loss_type")
    pair, single = d.value("actor.eps_clip_low_high"), d.number("actor.eps_clip", 0.2)
    is_pair = isinstance(pair, list) and len(pair) == 2
    both = [as_number(item) for item in pair] if isinstance(pair, list) and is_pair else [single, single]
    if pair is not None and (not is_pair or None in both):
        d.refuse("actor.eps_clip_low_high", f"{shown(str(pair), 40)} is no pair of numbers")
    keys = ["actor.eps_clip_low_high"] if isinstance(pair, list) else ["actor.eps_clip"]
    for side, value in zip(("low", "high"), both, strict=True):
        d.put(f"algorithm.loss.clip_ratio_{side}", 0.2 if value is None else value, *keys)
    bound = d.number("actor.dual_clip")
    if not gspo:
        d.put("algorithm.loss.dual_clip", bound, "actor.dual_clip")
    elif bound is not None:
        d.refuse("actor.dual_clip", "isotrain's gspo has no dual clip")
    whole_sequences = gspo or d.version == "0.5.9"
    mode = "seq-mean-token-mean" if whole_sequences else "token-mean"
    d.put("algorithm.loss.aggregation", mode, note=f"what OpenRLHF {d.version} does")
    if d.version != "0.11.0":
        d.note(
            f"OpenRLHF {d.version} averages losses in each micro-batch, isotrain over the whole mini-batch"
        )
    d.put("algorithm.loss.entropy", d.number("actor.entropy_coef", 0.0) or 0.0, "actor.entropy_coef")


def _kl(d: Draft) -> None:
    coefficient = d.number("algo.kl.init_coef", 0.01) or 0.0
    if coefficient <= 0:
        d.put("algorithm.kl.place", "off", "algo.kl.init_coef")
        return
    in_loss, estimator = d.flag("algo.kl.use_loss"), d.text("algo.kl.estimator", "k1")
    if d.flag("use_kl_estimator_k3"):
        estimator = "k3"
    d.put("algorithm.kl.place", "loss" if in_loss else "reward", "algo.kl.use_loss")
    d.put("algorithm.kl.coefficient", coefficient, "algo.kl.init_coef")
    if estimator not in ("k1", "k2", "k3"):
        d.refuse("algo.kl.estimator", f"{shown(estimator, 20)} is not an estimator of isotrain")
        estimator = "k3" if in_loss else "k1"
    d.put("algorithm.kl.estimator", estimator, "algo.kl.estimator")
    target = d.number("algo.kl.target")
    if target and not in_loss:
        d.put("algorithm.kl.controller", "adaptive", "algo.kl.target")
        d.put("algorithm.kl.target", target, "algo.kl.target")
        d.put("algorithm.kl.horizon", d.whole("algo.kl.horizon", 10000, 1), "algo.kl.horizon")
    elif target:
        d.refuse("algo.kl.target", "a coefficient in the loss is fixed in isotrain")
    if not in_loss and d.value("algo.advantage.estimator") in GROUPED:
        d.refuse(
            "algo.kl.init_coef",
            "OpenRLHF subtracts the KL of each token after it compared a group, isotrain before: use KL in "
            "the loss (algorithm.kl.place: loss), or accept the difference",
        )


def _correction(d: Draft) -> None:
    section, prefix = "algorithm.rollout_correction", "algo.advantage.is_correction"
    if not d.flag(f"{prefix}_enable"):
        d.put(f"{section}.level", "off", f"{prefix}_enable")
        return
    kind, bounds = d.text(f"{prefix}_type", "tis"), d.value(f"{prefix}_threshold")
    if kind not in ("tis", "icepop") or d.value("actor.policy_loss_type") == "gspo":
        d.refuse(
            f"{prefix}_type", f"{shown(kind, 20)} with this loss has no equal: use tis or icepop with ppo"
        )
        return
    pair = bounds if isinstance(bounds, list) and len(bounds) == 2 else [None, bounds]
    low, high = as_number(pair[0]), as_number(pair[1])
    d.put(f"{section}.level", "token", f"{prefix}_enable")
    d.put(f"{section}.mode", "truncate" if kind == "tis" else "mask", f"{prefix}_type")
    d.put(f"{section}.upper", 5.0 if high is None else high, f"{prefix}_threshold")
    if low is not None:
        d.put(f"{section}.lower", low, f"{prefix}_threshold")


def _dapo(d: Draft) -> None:
    if d.flag("algo.dynamic_filtering_enable"):
        key, note = "algo.dynamic_filtering_enable", "OpenRLHF has no bound"
        d.put("algorithm.dynamic_sampling.max_attempts", 100, key, note=note)
        span = d.value("algo.dynamic_filtering_range")
        if span not in ([0, 1], [0.0, 1.0]):
            d.refuse("algo.dynamic_filtering_range", "isotrain replaces groups whose rewards are all equal")
        else:
            d.note(
                "algo.dynamic_filtering_range 0 1 and isotrain agree if rewards are 0 or 1 for each response"
            )
    length = d.whole("reward.overlong_buffer_len", None, 0)
    if length:
        d.put("algorithm.overlong.buffer", length, "reward.overlong_buffer_len")
        factor = d.number("reward.overlong_penalty_factor", 1.0)
        d.put("algorithm.overlong.factor", factor, "reward.overlong_penalty_factor")


def _rollout(d: Draft) -> None:
    d.put("rollout.engine", "vllm")
    asynchronous, colocated = d.flag("train.async_enable"), d.flag("train.colocate_all")
    shared = colocated and not asynchronous
    placement = "colocated" if shared else "separate"
    d.put("cluster.placement", placement, "train.colocate_all", "train.async_enable")
    d.put("cluster.offload", d.flag("ds.enable_sleep"), "ds.enable_sleep")
    engines, tensor = d.whole("vllm.num_engines", None, 1), int(d.written("rollout.tensor_parallel", 1))
    ranks = int(d.lines["device.ranks"].value)
    if shared and tensor > ranks:
        note = f"there are {ranks} devices"
        d.put("rollout.tensor_parallel", ranks, "vllm.tensor_parallel_size", note=note)
        tensor = ranks
    if engines and not (shared and engines * tensor > ranks):
        d.put("rollout.engines", engines, "vllm.num_engines")
    memory = d.number("vllm.gpu_memory_utilization", 0.95)
    d.put("rollout.memory_utilization", memory, "vllm.gpu_memory_utilization")
    if asynchronous:
        key, note = "train.async_queue_size", "weight versions; OpenRLHF counts batches"
        d.put("rollout.staleness", d.whole(key, 1, 1), key, note=note)
        if d.flag("train.partial_rollout_enable"):
            d.put("rollout.in_flight", True, "train.partial_rollout_enable")
    temperature = d.number("eval.temperature", 0.6) or 0.0
    d.put("rollout.validation.temperature", temperature, "eval.temperature")
    count = d.whole("eval.n_samples_per_prompt", 4, 1) if temperature else 1
    d.put("rollout.validation.n", count, "eval.n_samples_per_prompt")


def _reward(d: Draft) -> None:
    remote: Any = d.value("reward.remote_url")
    model = d.value("reward.model_name_or_path")
    if d.given("reward.clip_range") and d.value("reward.clip_range") not in ([-10, 10], [-10.0, 10.0]):
        d.refuse("reward.clip_range", "isotrain clips no rewards: do it in a reward function")
    elif model:
        d.note("OpenRLHF clips rewards to -10 .. 10 (reward.clip_range), isotrain does not")
    if d.value("data.label_key"):
        d.put("reward.answer_key", d.text("data.label_key"), "data.label_key")
    agent = d.text("train.agent_func_path")
    if re.fullmatch(r"[^:\x00]+\.py", agent):
        # OpenRLHF's agents run as they are, and give the reward.
        d.put("rollout.environment.path", f"{agent}:AgentExecutor", "train.agent_func_path")
        d.put("rollout.environment.max_turns", 100, note="OpenRLHF has no bound")
        d.put("reward.environment.weight", 1.0, "train.agent_func_path", note="what step returns as rewards")
        return
    if agent:
        d.refuse("train.agent_func_path", f"{shown(agent, 40)} is no FILE.py")
    if remote:
        d.put("reward.function.path", REWARD, "reward.remote_url", note="write this file, see above")
        is_file = re.fullmatch(r"[^:]+\.py", str(remote))
        what = ADAPTER if is_file else "Write a function that asks the server: docs/rewards.md"
        d.ask("reward.remote_url", what)
    elif model:
        first, *others = str(model).split(",")
        d.put("reward.model.path", first, "reward.model_name_or_path")
        if others:
            d.refuse("reward.model_name_or_path", "isotrain has one reward model; the first is written")
    else:
        d.put("reward.function.path", REWARD, note="write this file, see above")
        d.ask(
            "reward",
            "there is no reward: set reward.model.path, reward.function.path or another of docs/rewards.md",
        )


def names(d: Draft) -> None:
    """Name, directory and loggers. The wandb key only says that wandb is on."""
    output = d.text("ckpt.output_dir", "./ckpt")
    given = d.text("logger.wandb.run_name", "")
    d.put("name", run_name(given or output.rstrip("/").rpartition("/")[2]), "logger.wandb.run_name")
    output = output if d.given("ckpt.output_dir") else f"runs/{d.lines['name'].value}"
    d.put("output", output, "ckpt.output_dir")
    keys = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    loggers = [name for key, name in keys.items() if d.raw(key) not in (None, False, "")]
    d.put("observe.loggers", ["console", *loggers], *keys)
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
    known = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
    if dtype not in known:
        d.refuse("ds.param_dtype", f"{shown(dtype, 20)}: use bf16 or fp16; bfloat16 is written")
    d.put("model.dtype", known.get(dtype, "bfloat16"), "ds.param_dtype")
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
        targets = targets if isinstance(targets, list) else [str(targets)]
        d.put("model.lora.targets", targets, "ds.lora.target_modules")
    dropout = d.number("ds.lora.dropout", 0.0)
    if dropout:
        d.put("model.lora.dropout", dropout, "ds.lora.dropout")


def sources(d: Draft, key: str, split_key: str) -> None:
    """Training and validation data: files, directories or Hub names with their split."""
    split = d.text(split_key, "train") or "train"
    files = [_with_split(name, split) for name in d.text(key).split(",") if name]
    if not files:
        d.ask(key, "there is no training data: set data.train")
        files = ["train.jsonl"]
    d.put("data.train", files if len(files) > 1 else files[0], key, split_key)
    held_out = d.text("eval.dataset")
    if held_out:
        files = [_with_split(name, d.text("eval.split", "train")) for name in held_out.split(",") if name]
        d.put("data.validation", files if len(files) > 1 else files[0], "eval.dataset", "eval.split")
    most = d.number("data.max_samples")
    if most is not None and most < _MANY:
        why = f"write the first {most:.0f} rows into a file of their own, or leave it out"
        d.refuse("data.max_samples", why)


def _with_split(name: str, split: str) -> str:
    """A Hub name carries its split; a local file has none."""
    local = name.startswith((".", "/", "~")) or name.endswith((".jsonl", ".json", ".parquet"))
    return name if local or split == "train" or ":" in name else f"{name}:{split}"


def schedule(d: Draft, kind_key: str, least_key: str) -> None:
    kind = d.text(kind_key, "cosine_with_min_lr")
    if kind not in SCHEDULES:
        d.refuse(kind_key, f"{shown(kind, 30)} is not a schedule of isotrain; cosine is written")
    d.put("optimizer.schedule", SCHEDULES.get(kind, "cosine"), kind_key)
    least = d.number(least_key, 0.1) if kind == "cosine_with_min_lr" else 0.0
    d.put("optimizer.min_lr_ratio", least, least_key)


def checkpoints(d: Draft) -> None:
    resume = "auto" if d.flag("ckpt.load_enable") else "never"
    d.put("trainer.resume", resume, "ckpt.load_enable")
