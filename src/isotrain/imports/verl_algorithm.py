"""The algorithm of a recipe from verl's keys: advantages, losses, KL, corrections."""

from __future__ import annotations

from isotrain.imports.draft import Draft, as_number, number
from isotrain.imports.hydra import shown
from isotrain.imports.verl_reasons import OPTIM, A, R

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
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce"}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
GROUPED = ("grpo", "rloo", "reinforce++-baseline")


def algorithm(d: Draft) -> None:
    key = "algorithm.adv_estimator"
    wanted = d.text(key, "gae")
    name = ESTIMATORS.get(wanted)
    if name is None:
        name, why = NEAREST.get(wanted, ("grpo", f"isotrain has {', '.join(ESTIMATORS)}"))
        d.refuse(key, f"{shown(wanted, 40)} is not an estimator of isotrain; {name} is written: {why}")
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
        d.put("algorithm.scale_by_std", scaled and wanted != "gpg", *([key] if wanted != "gpg" else []))
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
    mini, fetched = (
        d.whole(f"{A}.ppo_mini_batch_size", 256, 1),
        d.whole("async_training.require_batches", 1, 1),
    )
    return (mini or 256) * (fetched or 1)


def critic(d: Draft) -> None:
    d.put("algorithm.lam", d.number("algorithm.lam", 1.0), "algorithm.lam")
    d.put("algorithm.critic.path", d.text("critic.model.path"), "critic.model.path")
    d.put("algorithm.critic.lr", d.number("critic.optim.lr", 1e-5), "critic.optim.lr")
    d.put("algorithm.critic.clip", d.number("critic.cliprange_value", 0.5), "critic.cliprange_value")
    warmup = d.whole("trainer.critic_warmup", 0, 0)
    d.put("algorithm.critic.warmup_steps", warmup, "trainer.critic_warmup")
    same = {
        "critic.optim.lr_warmup_steps_ratio": f"{OPTIM}.lr_warmup_steps_ratio",
        "critic.optim.lr_warmup_steps": f"{OPTIM}.lr_warmup_steps",
        "critic.optim.weight_decay": f"{OPTIM}.weight_decay",
        "critic.optim.betas": f"{OPTIM}.betas",
        "critic.optim.warmup_style": f"{OPTIM}.warmup_style",
        "critic.optim.lr_scheduler_type": f"{OPTIM}.lr_scheduler_type",
        "critic.optim.lr_decay_style": f"{OPTIM}.lr_decay_style",
        "critic.ppo_mini_batch_size": f"{A}.ppo_mini_batch_size",
        "critic.ppo_epochs": f"{A}.ppo_epochs",
        "critic.loss_scale_factor": f"{A}.loss_scale_factor",
        "critic.grad_clip": f"{A}.grad_clip",
        "critic.optim.clip_grad": f"{OPTIM}.clip_grad",
    }
    for own in d.source.settings:
        if own.startswith("critic.optim.") and own != "critic.optim.lr":
            same.setdefault(own, own.replace("critic.optim", OPTIM))
    for own, actors in same.items():
        if d.given(own) and d.value(own) is not None and d.value(own) != d.value(actors):
            d.refuse(own, f"the critic has the policy's value, {shown(str(d.value(actors)), 30)}")


def loss(d: Draft) -> None:
    key = f"{A}.policy_loss.loss_mode"
    mode = d.text(key, "vanilla")
    if d.flag(f"{A}.use_gpg_loss"):
        mode, key = "gpg", f"{A}.use_gpg_loss"
    if mode not in LOSSES:
        d.refuse(
            key,
            f"{shown(mode, 30)} is not a loss of isotrain, which has {', '.join(LOSSES)}; clip is written",
        )
    name = LOSSES.get(mode, "clip")
    d.put("algorithm.loss.name", name, key)
    ratio = d.number(f"{A}.clip_ratio", 0.2)
    if name != "reinforce":
        for side in ("low", "high"):
            own = f"{A}.clip_ratio_{side}"
            value = d.number(own)
            taken = ratio if value is None else value
            d.put(
                f"algorithm.loss.clip_ratio_{side}",
                taken,
                own,
                *([] if value is not None else [f"{A}.clip_ratio"]),
            )
        if (
            d.given(f"{A}.clip_ratio")
            and d.value(f"{A}.clip_ratio_low") is not None
            and ratio != d.number(f"{A}.clip_ratio_low")
        ):
            d.note(
                f"{A}.clip_ratio ({ratio}) has no effect in verl, where clip_ratio_low and _high come first"
            )
    if name == "clip":
        bound = d.number(f"{A}.clip_ratio_c", 3.0)
        d.put("algorithm.loss.dual_clip", bound, f"{A}.clip_ratio_c")
    key = f"{A}.loss_agg_mode"
    if d.written("algorithm.name", "") == "ppo":
        # The default of verl's critic is the actor's key, also with gspo, which does not use it.
        own = "critic.loss_agg_mode"
        own = own if d.given(own) and d.value(own) is not None else key
        d.put("algorithm.critic.aggregation", aggregation(d, own), own)
    if name == "gspo" and d.text(key, "token-mean") != "seq-mean-token-mean":
        d.put("algorithm.loss.aggregation", "seq-mean-token-mean", note="what verl's gspo always uses")
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
    wanted = d.text(kind)
    # `k2+` is `k2`; the others with a plus have the gradient of k2 and the value of their own.
    estimator = KL.get(wanted.removesuffix("+") if wanted in ("k2+", "mse+") else wanted)
    if estimator is None and wanted.endswith("+") and in_loss:
        estimator = "k2"
        d.note(f"{kind} {shown(wanted, 20)} has the gradient of k2, which is written; the logged KL differs")
    elif estimator is None:
        d.refuse(kind, f"{shown(wanted, 20)} is not an estimator of isotrain: use k1, abs, k2 or k3")
        estimator = "k3" if in_loss else "k1"
    d.put("algorithm.kl.estimator", estimator, kind)
    if in_reward and not in_loss:
        controller = d.text("algorithm.kl_ctrl.type", "fixed")
        d.put("algorithm.kl.controller", controller, "algorithm.kl_ctrl.type")
        if controller == "adaptive":
            d.put(
                "algorithm.kl.target",
                d.number("algorithm.kl_ctrl.target_kl", 0.1),
                "algorithm.kl_ctrl.target_kl",
            )
            d.put(
                "algorithm.kl.horizon",
                d.whole("algorithm.kl_ctrl.horizon", 10000),
                "algorithm.kl_ctrl.horizon",
            )


def correction(d: Draft) -> None:
    section = "algorithm.rollout_correction"
    level, cap = d.value(f"{section}.rollout_is"), d.number(f"{A}.tis_imp_ratio_cap", -1)
    if cap is not None and cap > 0:
        d.put(f"{section}.level", "token", f"{A}.tis_imp_ratio_cap")
        d.put(f"{section}.upper", cap, f"{A}.tis_imp_ratio_cap")
        return
    if level in (None, "null", "off"):
        d.put(f"{section}.level", "off", f"{section}.rollout_is")
        return
    if level not in ("token", "sequence"):
        d.refuse(f"{section}.rollout_is", f"{shown(str(level), 20)} is no level: use token or sequence")
        return
    threshold = f"{section}.rollout_is_threshold"
    bound = d.value(threshold)
    low, _, high = str(bound).rpartition("_")
    d.put(f"{section}.level", level, f"{section}.rollout_is")
    if as_number(bound) is not None:
        d.put(f"{section}.upper", number(bound), threshold)
    elif as_number(low) is not None and as_number(high) is not None:
        d.put(f"{section}.mode", "mask", threshold, note="IcePop")
        d.put(f"{section}.lower", number(low), threshold)
        d.put(f"{section}.upper", number(high), threshold)
    else:
        d.refuse(threshold, "expected one bound, or low_high")


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
