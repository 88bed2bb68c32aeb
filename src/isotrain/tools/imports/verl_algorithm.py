"""Algorithm and optimizer of a recipe from verl's keys: advantages, losses, KL, corrections, schedule."""

from __future__ import annotations

import re
from typing import Any, get_args

from isotrain.recipe.policy_loss import Rejection
from isotrain.tools.imports.draft import Draft
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.keys import as_number, as_whole, expanded, number

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REF, OPTIM, C = "actor_rollout_ref.ref", f"{A}.optim", "algorithm.rollout_correction"

ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
}
# The nearest algorithm, for what isotrain does not have.
NEAREST = {
    "gpg": ("grpo", "gpg multiplies grpo's unscaled advantages by (responses / responses with a reward)")
}
LOSSES = {
    "vanilla": "clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "gpg": "reinforce",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "dppo_tv": "dppo-tv",
    "dppo_kl": "dppo-kl",
}
# verl aggregates these in one way, whatever `loss_agg_mode` says.
BY_SEQUENCE = ("gspo", "gmpo", "sapo")
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
TEACHER = r"distillation\.teacher_model(s\.[^.]+)?\.model_path"
# What verl called them before it named the divergence.
EARLIER_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
GROUPED = ("grpo", "rloo", "reinforce++-baseline")
# Keys of the critic for which isotrain takes the policy's value.
CRITIC_SHARES = expanded("""
    critic.optim.{lr_warmup_steps_ratio,lr_warmup_steps,weight_decay,betas,warmup_style,lr_scheduler_type}
    critic.optim.lr_decay_style critic.{ppo_mini_batch_size,ppo_epochs,loss_scale_factor,grad_clip}
    critic.optim.clip_grad
""")


def algorithm(d: Draft) -> None:
    key = "algorithm.adv_estimator"
    estimator = d.text(key, "gae")
    name = ESTIMATORS.get(estimator)
    if name is None:
        name, why = NEAREST.get(estimator, ("grpo", f"isotrain has {', '.join(ESTIMATORS)}"))
        d.refuse(key, f"{shown(estimator, 40)} is not an estimator of isotrain; {name} is written: {why}")
    d.put("algorithm.name", name, key)
    n = d.whole(f"{R}.n", 1, 1) or 1
    if name in GROUPED and n < 2:
        d.refuse(
            f"{R}.n",
            f"{name} compares responses to one prompt: 2 is written; verl's {n} learns from the reward alone",
        )
        d.put("rollout.n", 2, f"{R}.n", note="raised to compare")
    if name == "grpo":
        scaled, key = d.flag("algorithm.norm_adv_by_std_in_grpo"), "algorithm.norm_adv_by_std_in_grpo"
        d.put("algorithm.scale_by_std", scaled and estimator != "gpg", *([key] if estimator != "gpg" else []))
    if name in ("ppo", "reinforce++"):
        d.put("algorithm.gamma", d.number("algorithm.gamma", 1.0), "algorithm.gamma")
    batch, mini = batch_size(d), d.whole(f"{A}.ppo_mini_batch_size", 256, 1) or 256
    note = f"{batch} prompts = {-(-batch // mini)} updates of {mini} prompts, each with {n} responses"
    if mini > batch:
        note = f"{mini} is more than the {batch} prompts of a step: one update"
    d.put("algorithm.mini_batch_size", min(mini, batch), f"{A}.ppo_mini_batch_size", note=note)
    d.put("algorithm.convention", "verl")
    if name == "ppo":
        critic(d)


def batch_size(d: Draft) -> int:
    """Prompts of a step. verl's fully asynchronous trainer has 0 there, and fetches mini-batches."""
    size = d.whole("data.train_batch_size", 1024)
    if size is None or size > 0:
        return size or 1024
    mini = d.whole(f"{A}.ppo_mini_batch_size", 256, 1) or 256
    return mini * (d.whole("async_training.require_batches", 1, 1) or 1)


def critic(d: Draft) -> None:
    d.put("algorithm.lam", d.number("algorithm.lam", 1.0), "algorithm.lam")
    d.put("algorithm.critic.path", d.text("critic.model.path"), "critic.model.path")
    d.put("algorithm.critic.lr", d.number("critic.optim.lr", 1e-5), "critic.optim.lr")
    d.put("algorithm.critic.clip", d.number("critic.cliprange_value", 0.5), "critic.cliprange_value")
    warmup = d.whole("trainer.critic_warmup", 0, 0)
    d.put("algorithm.critic.warmup_steps", warmup, "trainer.critic_warmup")
    given = [key for key in d.source.settings if key.startswith("critic.optim.") and key != "critic.optim.lr"]
    for key in dict.fromkeys((*CRITIC_SHARES, *given)):
        policys = key.replace("critic", A, 1)
        if d.given(key) and d.value(key) is not None and d.value(key) != d.value(policys):
            d.refuse(key, f"the critic has the policy's value, {shown(str(d.value(policys)), 30)}")


def router_replay(d: Draft) -> None:
    key = f"{A}.router_replay.mode"
    mode = d.text(key, "disabled")
    if mode not in ("disabled", "R2"):
        d.refuse(key, f"{shown(mode, 20)}: of an engine's routes, those of rollout.engine hf alone are read")
        mode = "disabled"
    if mode == "R2" and d.flag(f"{C}.bypass_mode"):
        d.refuse(key, "R2 takes routes of the pass for old log-probs, which bypass_mode leaves out")
        mode = "disabled"
    d.put("algorithm.router_replay", mode, key)


def loss(d: Draft) -> None:
    key = f"{A}.policy_loss.loss_mode"
    mode = d.text(key, "vanilla")
    if d.flag(f"{A}.use_gpg_loss"):
        mode, key = "gpg", f"{A}.use_gpg_loss"
    if d.flag(f"{C}.bypass_mode"):
        # It replaces the policy loss by one of its own.
        key = f"{C}.loss_type"
        mode = {"ppo_clip": "vanilla", "reinforce": "gpg"}.get(d.text(key, "ppo_clip"), d.text(key))
    if mode not in LOSSES:
        d.refuse(
            key,
            f"{shown(mode, 30)} is not a loss of isotrain, which has {', '.join(LOSSES)}; clip is written",
        )
    name = LOSSES.get(mode, "clip")
    d.put("algorithm.loss.name", name, key)
    ratio = d.number(f"{A}.clip_ratio", 0.2)
    if name not in ("reinforce", "sapo"):
        for side in ("low", "high"):
            side_key = f"{A}.clip_ratio_{side}"
            value = d.number(side_key)
            keys = [side_key] if value is not None else [side_key, f"{A}.clip_ratio"]
            d.put(f"algorithm.loss.clip_ratio_{side}", ratio if value is None else value, *keys)
        low = f"{A}.clip_ratio_low"
        if d.given(f"{A}.clip_ratio") and d.value(low) is not None and ratio != d.number(low):
            where = "where clip_ratio_low and _high come first"
            d.note(f"{A}.clip_ratio ({ratio}) has no effect in verl, {where}")
    if name == "clip" or name.startswith("dppo"):
        field = "dual_clip" if name == "clip" else "max_ratio"
        d.put(f"algorithm.loss.{field}", d.number(f"{A}.clip_ratio_c", 3.0), f"{A}.clip_ratio_c")
    if name == "sapo":
        d.put("algorithm.loss.tau_pos", d.number(f"{A}.tau_pos", 1.0), f"{A}.tau_pos")
        d.put("algorithm.loss.tau_neg", d.number(f"{A}.tau_neg", 1.05), f"{A}.tau_neg")
    key = f"{A}.loss_agg_mode"
    if d.written("algorithm.name", "") == "ppo":
        # The default of verl's critic is the actor's key, also with gspo, which does not use it.
        critics = "critic.loss_agg_mode"
        critics = critics if d.given(critics) and d.value(critics) is not None else key
        d.put("algorithm.critic.aggregation", aggregation(d, critics), critics)
    if name in BY_SEQUENCE and d.text(key, "token-mean") != "seq-mean-token-mean":
        d.put("algorithm.loss.aggregation", "seq-mean-token-mean", note=f"what verl's {mode} always uses")
        return
    d.put("algorithm.loss.aggregation", aggregation(d, key), key)


def aggregation(d: Draft, key: str) -> str:
    """The mode that a key names, if isotrain has it."""
    mode = d.text(key, "token-mean")
    if mode not in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        d.refuse(key, f"{shown(mode, 30)} is not an aggregation of isotrain; token-mean is written")
        mode = "token-mean"
    if mode == "seq-mean-token-sum-norm":
        length, factor = d.whole("data.max_response_length", 512), d.value(f"{A}.loss_scale_factor")
        if d.version != "2026-08":
            d.refuse(
                key,
                f"verl {d.version} sums over the responses of this mode, isotrain and newer versions average",
            )
        elif factor is not None and as_number(factor) != length:
            d.refuse(f"{A}.loss_scale_factor", f"isotrain divides by rollout.max_tokens ({length})")
    if d.version == "0.5.0":
        d.note("verl 0.5.0 averages losses in each micro-batch, isotrain and newer verl over the mini-batch")
    return mode


def kl(d: Draft) -> None:
    in_loss, in_reward = d.flag(f"{A}.use_kl_loss"), d.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        d.refuse("algorithm.use_kl_in_reward", "isotrain adds KL in one place: the loss is written")
    if not in_loss and not in_reward:
        d.put("algorithm.kl.place", "off", f"{A}.use_kl_loss", "algorithm.use_kl_in_reward")
        return
    place = "loss" if in_loss else "reward"
    switch, coefficient, kind = (
        (f"{A}.use_kl_loss", f"{A}.kl_loss_coef", f"{A}.kl_loss_type")
        if in_loss
        else ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    )
    d.put("algorithm.kl.place", place, switch)
    d.put("algorithm.kl.coefficient", d.number(coefficient, 0.001), coefficient)
    name = d.text(kind)
    # `k2+` is `k2`; the others with a plus have the gradient of k2 and the value of their own.
    estimator = KL.get(name.removesuffix("+") if name in ("k2+", "mse+") else name)
    if estimator is None and name.endswith("+") and in_loss:
        estimator = "k2"
        d.note(f"{kind} {shown(name, 20)} has the gradient of k2, which is written; the logged KL differs")
    elif estimator is None:
        d.refuse(kind, f"{shown(name, 20)} is not an estimator of isotrain: use k1, abs, k2 or k3")
        estimator = "k3" if in_loss else "k1"
    d.put("algorithm.kl.estimator", estimator, kind)
    if in_reward and not in_loss:
        section = "algorithm.kl_ctrl"
        controller = d.text(f"{section}.type", "fixed")
        d.put("algorithm.kl.controller", controller, f"{section}.type")
        if controller == "adaptive":
            d.put("algorithm.kl.target", d.number(f"{section}.target_kl", 0.1), f"{section}.target_kl")
            d.put("algorithm.kl.horizon", d.whole(f"{section}.horizon", 10000), f"{section}.horizon")


def distillation(d: Draft) -> None:
    """A teacher's log-probs of what the policy samples."""
    section = "distillation.distillation_loss"
    if not d.flag("distillation.enabled"):
        return
    teachers = [key for key in d.source.settings if re.fullmatch(TEACHER, key) and d.value(key) is not None]
    if len(teachers) != 1:
        what = "several teachers" if teachers else "no teacher's model_path"
        d.refuse("distillation.enabled", f"{what}: set algorithm.distillation.path to one model directory")
        d.used.update(key for key in d.source.settings if key.startswith("distillation."))
        return
    d.put("algorithm.distillation.path", d.text(teachers[0]), "distillation.enabled", teachers[0])
    mode, gradient = d.text(f"{section}.loss_mode", "k3"), d.flag(f"{section}.use_policy_gradient")
    estimator = KL.get(mode)
    if gradient and estimator == "k1":
        name = "policy-gradient"
    elif not gradient and estimator in ("k2", "k3"):
        name = estimator
    elif not gradient and mode in ("forward_kl_topk", "forward_kl_topk_tail"):
        name = "forward-kl"
        d.put("algorithm.distillation.top_k", d.whole(f"{section}.topk", 32, 1), f"{section}.topk")
        if mode == "forward_kl_topk":
            d.refuse(f"{section}.loss_mode", "isotrain counts all other tokens as one: forward_kl_topk_tail")
        if d.value(f"{section}.log_prob_min_clamp") is not None:
            d.refuse(f"{section}.log_prob_min_clamp", "isotrain does not clamp log-probs of tokens")
    else:
        name = "policy-gradient"
        how = "with" if gradient else "without"
        d.refuse(
            f"{section}.loss_mode",
            f"{shown(mode, 30)} {how} use_policy_gradient is not in isotrain; {name} is written",
        )
    d.put("algorithm.distillation.loss", name, f"{section}.loss_mode", f"{section}.use_policy_gradient")
    d.used.update((f"{section}.topk", f"{section}.log_prob_min_clamp"))
    if (clamp := d.number(f"{section}.loss_max_clamp")) is not None:
        d.put("algorithm.distillation.clamp", clamp, f"{section}.loss_max_clamp")
    rewards = d.flag(f"{section}.use_task_rewards")
    d.put("algorithm.distillation.task_rewards", rewards, f"{section}.use_task_rewards")
    coefficient = d.number(f"{section}.distillation_loss_coef", 1.0) if rewards else 1.0
    d.put("algorithm.distillation.coefficient", coefficient, f"{section}.distillation_loss_coef")
    for key, policys in (
        ("policy_loss_mode", "policy_loss.loss_mode"),
        *((name, name) for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")),
    ):
        if d.given(f"{section}.{key}") and d.value(f"{section}.{key}") != d.value(f"{A}.{policys}"):
            d.refuse(f"{section}.{key}", "the distillation loss has the policy loss's value")
        d.used.add(f"{section}.{key}")


def correction(d: Draft) -> None:
    """Importance weights, rejection, and old log-probs of the engine."""
    bypass = d.flag(f"{C}.bypass_mode")
    d.put(f"{C}.bypass_mode", bypass, f"{C}.bypass_mode")
    if bypass and d.written("algorithm.loss.name", "clip") != "reinforce":
        d.put(
            f"{C}.level", "off", f"{C}.rollout_is", note="with bypass_mode verl's clipped loss has no weights"
        )
    else:
        _weights(d)
    _rejection(d)


def _weights(d: Draft) -> None:
    level, cap = d.value(f"{C}.rollout_is"), d.number(f"{A}.tis_imp_ratio_cap", -1)
    if cap is not None and cap > 0:
        d.put(f"{C}.level", "token", f"{A}.tis_imp_ratio_cap")
        d.put(f"{C}.upper", cap, f"{A}.tis_imp_ratio_cap")
        return
    if level in (None, "null", "off"):
        d.put(f"{C}.level", "off", f"{C}.rollout_is")
        return
    if level not in ("token", "sequence"):
        d.refuse(f"{C}.rollout_is", f"{shown(str(level), 20)} is no level: use token or sequence")
        return
    threshold = f"{C}.rollout_is_threshold"
    d.put(f"{C}.level", level, f"{C}.rollout_is")
    low, high = _bounds(d.value(threshold))
    if high is None:
        d.refuse(threshold, "expected one bound, or low_high")
        return
    if low is not None:
        d.put(f"{C}.mode", "mask", threshold, note="IcePop")
        d.put(f"{C}.lower", low, threshold)
    d.put(f"{C}.upper", high, threshold)


def _rejection(d: Draft) -> None:
    key, threshold = f"{C}.rollout_rs", f"{C}.rollout_rs_threshold"
    if d.value(key) in (None, "null", ""):
        return
    named = [name.strip() for name in d.text(key).split(",") if name.strip()]
    names = [EARLIER_REJECTIONS.get(name, name) for name in named]
    unknown = [name for name in names if name not in get_args(Rejection)]
    limits = [_bounds(part) for part in str(d.value(threshold)).split(",") if part.strip()]
    if len(limits) == 1:
        limits *= len(names)
    if unknown or len(limits) != len(names) or any(high is None for _, high in limits):
        wrong, what = (key, unknown[0]) if unknown else (threshold, str(d.value(threshold)))
        d.refuse(wrong, f"{shown(what, 30)} is no rejection of isotrain: set {C}.reject yourself")
        return
    reject: dict[str, Any] = {}
    for name, given, (low, high) in zip(names, named, limits, strict=True):
        assert high is not None
        low = d.number(f"{C}.rollout_rs_threshold_lower", low) if given in EARLIER_REJECTIONS else low
        # verl bounds the ratio of the engine to the trained model in newer versions; isotrain its inverse.
        inverse = low is not None and low > 0 and given not in EARLIER_REJECTIONS
        pair = [float(f"{1 / bound:.12g}") for bound in (high, low)] if inverse and low else [low, high]
        reject[name] = high if low is None else pair
    d.put(f"{C}.reject", reject, key, threshold, note="of the ratio of the trained model to the engine")
    d.refuse(key, "verl averages losses over the tokens that are left, isotrain over all, rejected ones as 0")


def _bounds(value: Any) -> tuple[float | None, float | None]:
    """Of `high` or `low_high`; no upper bound where it is neither."""
    low, _, high = str(value).strip().rpartition("_")
    if low and (as_number(low) is None or as_number(high) is None):
        return None, None
    return (number(low) if low else None), (number(high) if as_number(high) is not None else None)


def dapo(d: Draft) -> None:
    """Dynamic sampling and overlong shaping."""
    batch = batch_size(d)
    if d.flag("algorithm.filter_groups.enable"):
        rounds = d.whole("algorithm.filter_groups.max_num_gen_batches", 0) or 0
        drawn = d.whole("data.gen_batch_size", None, 1) or batch
        keys = ("algorithm.filter_groups.max_num_gen_batches", "data.gen_batch_size")
        if rounds > 0:
            attempts = max(1, -(-rounds * drawn // batch) - 1)
            note = f"{rounds} rounds of {drawn} prompts = {batch} + {attempts} x {batch}"
        else:
            attempts, note = 100, "verl has no bound; 100 is one"
        d.put("algorithm.dynamic_sampling.max_attempts", attempts, *keys, note=note)
        metric = d.text("algorithm.filter_groups.metric", "")
        if metric not in ("", "seq_reward", "seq_final_reward", "score"):
            d.note(f"algorithm.filter_groups.metric {shown(metric, 20)}: isotrain compares rewards")
    elif d.given("data.gen_batch_size") and d.whole("data.gen_batch_size") not in (None, batch):
        d.refuse(
            "data.gen_batch_size",
            f"without filter_groups verl draws so many prompts per step; data.batch_size is {batch}",
        )
    shaping(d)


def shaping(d: Draft) -> None:
    """DAPO's overlong penalty, which only the reward manager of that name applies."""
    prefixes = ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.reward_kwargs.overlong_buffer_cfg")
    prefix = next((p for p in (*prefixes, "reward_model.overlong_buffer") if d.flag(f"{p}.enable")), None)
    if prefix is None:
        return
    if reward_manager(d)[1] != "dapo":
        d.note(f"{prefix}.enable has no effect in verl without the reward manager dapo: it is left out")
        return
    d.put("algorithm.overlong.buffer", d.whole(f"{prefix}.len", 0, 0), f"{prefix}.len")
    factor = d.number(f"{prefix}.penalty_factor", 1.0)
    d.put("algorithm.overlong.factor", factor, f"{prefix}.penalty_factor")
    for key in ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"):
        limit = d.whole(key)
        if limit is not None and limit != d.whole("data.max_response_length", 512):
            d.refuse(
                key, "overlong shaping counts from rollout.max_tokens: set data.max_response_length to it"
            )


def reward_manager(d: Draft) -> tuple[str, str]:
    """Key and name of the reward manager."""
    keys = ("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    key = next((key for key in keys if d.given(key) and d.value(key) is not None), keys[0])
    return key, d.text(key, "naive")


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
        least = f"{OPTIM}.min_lr_ratio"
        d.put("optimizer.min_lr_ratio", d.number(least, 0.0) or 0.0, least)
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
    known = d.whole("trainer.total_training_steps", None, 1) or d.source.total_steps
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
