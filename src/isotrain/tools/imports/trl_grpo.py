"""The part of a recipe that only TRL's GRPO trainer has: responses, loss, KL, correction and rewards."""

from __future__ import annotations

from isotrain.tools.imports.draft import Draft
from isotrain.tools.imports.hydra import shown
from isotrain.tools.imports.keys import as_flag, as_number

_AGGREGATIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_UNBOUNDED = 1e9
REWARD = "trl_reward.py:score"
ADAPTER = (
    "TRL's reward functions get lists. Write trl_reward.py with `def score(response, answer, row):` that "
    "calls them with lists of one response and the row's columns, and returns the weighted sum of rewards"
)


def fill(d: Draft, each: int, rounds: int, ranks: int) -> None:
    d.put("algorithm.convention", "trl")
    n = d.whole("num_generations", 8, 2) or 8
    generated = d.whole("generation_batch_size", None, 1)
    per_generation = d.whole("steps_per_generation", None, 1)
    batch = generated or each * ranks * (per_generation or rounds)
    update = each * ranks * rounds
    batch = max(batch, update)
    for name, responses in (("generation_batch_size", batch), ("gradient_accumulation_steps", update)):
        if responses % n:
            d.refuse(
                name, f"{responses} responses are no whole groups of {n}: the next smaller number is written"
            )
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
             "generation_batch_size", "num_generations")  # fmt: skip
    prompts = max(1, batch // n)
    d.put("data.batch_size", prompts, *names, note=f"{batch} responses / {n}")
    mini = min(prompts, max(1, update // n))
    note = f"{each} x {rounds} x {ranks} devices / {n} responses"
    d.put("algorithm.mini_batch_size", mini, *names[:2], note=note)
    _sampling(d, each, ranks)
    _advantages_and_loss(d, prompts > mini or (d.whole("num_iterations", 1, 1) or 1) > 1)
    _correction(d)
    _rewards(d)
    d.note(
        "prompts that are one text get the chat template as a user message here; TRL takes them as they are"
    )


def _sampling(d: Draft, each: int, ranks: int) -> None:
    answer = d.whole("max_completion_length", None, 1)
    if answer is None:
        d.refuse("max_completion_length", "isotrain needs a limit: 512 is written, set rollout.max_tokens")
        answer = 512
    d.put("rollout.max_tokens", answer, "max_completion_length")
    longest = d.whole("max_prompt_length", None, 2)
    cuts = (
        "TRL before 1.0 cuts the beginning"
        if longest
        else "TRL has no limit: raise max_length for longer prompts"
    )
    d.put("data.max_length", longest or 1024, *(["max_prompt_length"] if longest else []))
    d.put("data.too_long", "truncate-left" if longest else "error", note=cuts)
    longest = longest or 1024
    size = f"{each} x (prompt + response of {longest + answer} tokens)"
    d.put("data.tokens_per_micro_batch", each * (longest + answer), "per_device_train_batch_size", note=size)
    vllm = d.flag("use_vllm")
    d.put(
        "rollout.engine", "vllm", "use_vllm", note="" if vllm else "TRL samples with transformers, as hf does"
    )
    if vllm:
        mode = d.text("vllm_mode", "colocate")
        d.put("cluster.placement", "colocated" if mode == "colocate" else "separate", "vllm_mode")
        tensor = d.whole("vllm_tensor_parallel_size", 1, 1) or 1
        if mode == "colocate" and tensor <= ranks:
            d.put("rollout.tensor_parallel", tensor, "vllm_tensor_parallel_size")
        d.put(
            "rollout.memory_utilization",
            d.number("vllm_gpu_memory_utilization", 0.3),
            "vllm_gpu_memory_utilization",
        )
    if d.text("eval_strategy", "no") != "no":
        count = d.whole("num_generations_eval", None, 1) or d.whole("num_generations", 8, 1)
        d.put("rollout.validation.n", count, "num_generations_eval")
        d.put("rollout.validation.temperature", d.number("temperature", 1.0), "temperature")


def _advantages_and_loss(d: Draft, off_policy: bool) -> None:
    scale = d.value("scale_rewards")
    scaled = {"group": True, "none": False}.get(str(scale), as_flag(scale))
    if scaled is None:
        d.refuse(
            "scale_rewards", f"isotrain scales by the group or not at all, not by {shown(str(scale), 20)}"
        )
    d.put("algorithm.scale_by_std", scaled is not False, "scale_rewards")
    loss, sequence = d.text("loss_type", "dapo"), d.text("importance_sampling_level", "token") == "sequence"
    if loss not in _AGGREGATIONS:
        d.refuse("loss_type", f"{shown(loss, 20)} is not a loss of isotrain; clip is written")
    elif loss == "bnpo":
        d.refuse("loss_type", "bnpo averages over the tokens of each micro-batch; the mean of all is written")
    mode = _AGGREGATIONS.get(loss, "token-mean")
    if loss == "cispo" and sequence:
        d.refuse("importance_sampling_level", "isotrain's cispo weighs tokens")
    name = "cispo" if loss == "cispo" else "gspo" if sequence else "clip"
    d.put("algorithm.loss.name", name, "importance_sampling_level", "loss_type")
    d.put("algorithm.loss.aggregation", mode, "loss_type")
    low = d.number("epsilon", 0.2) or 0.0
    high = d.number("epsilon_high", None)
    high = low if high is None else high
    if name == "cispo":
        low, high = 1.0, high - 1
        if high < 0:
            d.refuse("epsilon_high", "cispo bounds the ratio itself: it must be at least 1; 5.0 is usual")
            high = 4.0
    note = "the ratio has no lower bound" if name == "cispo" else ""
    d.put("algorithm.loss.clip_ratio_low", low, "epsilon", note=note)
    note = "epsilon_high - 1" if name == "cispo" else ""
    d.put("algorithm.loss.clip_ratio_high", high, "epsilon_high", "epsilon", note=note)
    delta = d.number("delta", None)
    if name == "clip":
        d.put("algorithm.loss.dual_clip", delta, "delta")
    elif delta is not None:
        d.refuse("delta", f"isotrain's {name} has no dual clip")
    if d.number("entropy_coef", 0.0):
        d.put("algorithm.loss.entropy", d.number("entropy_coef", 0.0), "entropy_coef")
        if mode != "token-mean":
            d.refuse(
                "entropy_coef", f"TRL takes the mean over tokens; isotrain aggregates it as the loss, {mode}"
            )
    beta = d.number("beta", 0.0) or 0.0
    d.put("algorithm.kl.place", "loss" if beta else "off", "beta")
    if beta:
        _kl(d, beta, off_policy or sequence)


def _kl(d: Draft, beta: float, differs: bool) -> None:
    """k3 times the ratio has, where the ratio is 1, the gradient of k2: (logp - ref) grad logp."""
    d.put("algorithm.kl.coefficient", beta, "beta")
    key, corrected = "use_bias_correction_kl", d.flag("use_bias_correction_kl")
    note = "k3 times the ratio; k2 has its gradient while the ratio is 1" if corrected else ""
    d.put("algorithm.kl.estimator", "k2" if corrected else "k3", key, note=note)
    if corrected and differs:
        d.refuse(
            key, "several updates of a step, or sequence ratios, weigh TRL's KL: k2 does not; it is written"
        )


def _correction(d: Draft) -> None:
    section, key = "algorithm.rollout_correction", "vllm_importance_sampling_correction"
    if not (d.flag("use_vllm") and d.flag(key)):
        d.put(f"{section}.level", "off", *([key] if d.flag("use_vllm") else ["use_vllm"]))
        return
    mode = d.text("vllm_importance_sampling_mode", "sequence_mask")
    level, _, bound = mode.partition("_")
    if level not in ("token", "sequence") or bound not in ("mask", "truncate"):
        d.refuse(
            "vllm_importance_sampling_mode", f"{shown(mode, 30)} is not a mode of TRL; token_mask is written"
        )
        level, bound = "token", "mask"
    d.put(f"{section}.level", level, key, "vllm_importance_sampling_mode")
    d.put(f"{section}.mode", bound, "vllm_importance_sampling_mode")
    high = d.number("vllm_importance_sampling_clip_max", None)
    low = d.number("vllm_importance_sampling_clip_min", None)
    note = "TRL has none" if high is None else ""
    d.put(
        f"{section}.upper",
        _UNBOUNDED if high is None else high,
        "vllm_importance_sampling_clip_max",
        note=note,
    )
    if low is not None or bound == "mask":
        d.put(f"{section}.lower", low or 0.0, "vllm_importance_sampling_clip_min")


def _rewards(d: Draft) -> None:
    model = d.text("reward_model_name_or_path")
    key = "trainer.reward_funcs" if "trainer.reward_funcs" in d.source.settings else "reward_funcs"
    given = d.value(key)
    names = [str(name) for name in (given if isinstance(given, list) else [given] if given else [])]
    code = names if key == "reward_funcs" else [name for name in names if name.endswith("()")]
    models = [name for name in names if name not in code] + ([model] if model else [])
    weights = d.value("reward_weights")
    weights = weights if isinstance(weights, list) else [weights] if as_number(weights) is not None else None
    if models:
        d.put("reward.model.path", models[0], *(["reward_model_name_or_path"] if model else [key]))
    if len(models) > 1:
        d.refuse(key, "isotrain has one reward model; the first is written")
    environment = d.text("trainer.environment_factory")
    if environment:
        name = environment.removesuffix("()").rpartition(".")[2]
        d.put("rollout.environment.path", f"environment.py:{name}", "trainer.environment_factory")
        d.ask(
            "trainer.environment_factory",
            f"{shown(environment, 40)} is code: copy the class to environment.py",
        )
    if code or not models:
        d.put("reward.function.path", REWARD, key, note="write this file, see above")
        d.ask(
            key, f"{shown(', '.join(code), 80)}: {ADAPTER}" if code else "there is no reward that can be read"
        )
    if weights and len(names) > 1:
        d.refuse("reward_weights", f"weigh the rewards in {REWARD}, or with reward.*.weight")
    elif weights:
        path = "reward.model.weight" if models else "reward.function.weight"
        d.put(path, as_number(weights[0]), "reward_weights")


def updates(d: Draft) -> int:
    """Updates of a step: TRL counts these."""
    prompts, mini = int(d.lines["data.batch_size"].value), int(d.lines["algorithm.mini_batch_size"].value)
    return -(-prompts // mini) * (d.whole("num_iterations", 1, 1) or 1)
