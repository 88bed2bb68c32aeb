"""An online step of every algorithm equals the formulas, written out without packing in formulas.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import formulas
import numpy as np
import pytest
import torch
from formulas import Tensors
from hand_made_step import (
    FLAT,
    GREEDY,
    LORA_ALPHA,
    LORA_RANK,
    MAX_TOKENS,
    N_SAMPLES,
    PROMPTS,
    SCORES,
    Step,
    step_recipe,
    take_step,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from support import how_computed
from traced_runs import layers_level

pytestmark = pytest.mark.heavy

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {},
    "reinforce++": {"gamma": 0.9},
    "reinforce++-baseline": {},
    "remax": {},
    "ppo": {"gamma": 0.95, "lam": 0.9, "critic": {"lr": 1e-2, "clip": 0.1}},
}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "one update": {},
    "four updates, KL in the loss, entropy bonus": {
        "algorithm": {
            "mini_batch_size": 2,
            "ppo_epochs": 2,
            "kl": {"place": "loss", "coefficient": 0.3},
            "loss": {"entropy": 0.05},
        },
        "rollout": {"temperature": 0.7},
    },
    "two updates, KL in the reward, correction, small micro-batches": {
        "algorithm": {
            "mini_batch_size": 2,
            "kl": {
                "place": "reward",
                "coefficient": 0.2,
                "estimator": "k1",
                "controller": "adaptive",
                "horizon": 20,
            },
            "rollout_correction": {"level": "token", "upper": 1.2},
            "overlong": {"buffer": 4, "factor": 0.5},
        },
        "data": {"tokens_per_micro_batch": 42},
    },
}

# Steps of GRPO whose four updates move far enough for every clip to matter.
LOSSES: dict[str, dict[str, Any]] = {
    "narrow clip": {"loss": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "dual_clip": 1.2}},
    "no dual clip": {"loss": {"dual_clip": None, "aggregation": "seq-mean-token-sum"}},
    "gspo": {"loss": {"name": "gspo", "clip_ratio_low": 0.01, "clip_ratio_high": 0.02}},
    "cispo": {"loss": {"name": "cispo", "clip_ratio_high": 0.1}, "kl": {"place": "loss", "estimator": "k2"}},
    "reinforce": {"loss": {"name": "reinforce", "aggregation": "seq-mean-token-mean", "entropy": 0.1}},
    "gmpo": {"loss": {"name": "gmpo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1}},
    "sapo": {"loss": {"name": "sapo", "tau_pos": 2.0, "tau_neg": 5.0}},
    "dppo": {"loss": {"name": "dppo-kl", "clip_ratio_low": 1e-3, "clip_ratio_high": 2e-3, "max_ratio": 1.2}},
    "Dr. GRPO": {"loss": {"aggregation": "seq-mean-token-sum-norm"}, "scale_by_std": False},
    "whole responses weighted": {"rollout_correction": {"level": "sequence", "upper": 3.0, "lower": 0.5}},
    "whole responses left out": {"rollout_correction": {"level": "sequence", "mode": "mask", "upper": 4.0}},
    "tokens left out": {
        "rollout_correction": {"level": "token", "mode": "mask", "upper": 1.5},
        "kl": {"place": "loss", "estimator": "abs"},
    },
    "geometric means, single tokens left out": {
        "rollout_correction": {
            "level": "geometric", "upper": 1.1, "reject": {"token_k1": [0.4, 2.0], "token_k3": 0.2}
        },
    },
    "whole responses rejected": {
        "rollout_correction": {"level": "token", "reject": {"seq_mean_k1": 1.2, "seq_max_k2": 1.5}}
    },
    "the engine's log-probs are the old ones": {"rollout_correction": {"bypass_mode": True}},
    "the engine's, with weights and rejection": {
        "loss": {"name": "reinforce"},
        "rollout_correction": {
            "bypass_mode": True, "level": "token", "upper": 1.3, "reject": {"seq_sum_k3": 2.0}
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def causal(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)


@pytest.fixture(scope="module")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with one label, as transformers saves it."""
    path = tmp_path_factory.mktemp("judge")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def classifier(reward_model: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)


def merged(*sections: dict[str, Any]) -> dict[str, Any]:
    return {name: value for section in sections for name, value in section.items()}


def near(found: float, wanted: Any) -> bool:
    return bool(found == pytest.approx(float(wanted), rel=1e-5, abs=1e-5))


def check(step: Step, causal: Any, values: Tensors | None = None) -> list[list[float]]:
    """A step against the formulas, with the critic's values; returns what the critic is to learn."""
    algorithm, rollout = step.recipe.algorithm, step.recipe.rollout
    temperature = rollout.temperature
    with torch.no_grad():
        files = type(causal).from_pretrained(step.recipe.model.path, dtype=torch.float32).state_dict()
        ref, _ = formulas.ask_policy(causal, files, FLAT, temperature)
        old, _ = formulas.ask_policy(causal, step.weights, FLAT, temperature)
    sampled = formulas.written([torch.from_numpy(t.logp_N) for t in FLAT], FLAT)
    longest = [len(t.mask_N) for t in FLAT]
    scores = [
        formulas.shaped(score, length, MAX_TOKENS, algorithm.overlong)
        for score, length in zip(SCORES, longest, strict=True)
    ]
    penalties = [[0.0] * len(one) for one in old]
    if algorithm.kl.place == "reward":
        kl = [formulas.divergence(algorithm.kl.estimator, o, r) for o, r in zip(old, ref, strict=True)]
        penalties = [(algorithm.kl.coefficient * one).tolist() for one in kl]
        check_controller(step, float(np.mean([one.mean() if len(one) else 0.0 for one in kl])))
    known = [one.tolist() for one in values] if values else [[0.0] * len(one) for one in old]
    advantages, returns = formulas.advantages(algorithm, scores, penalties, known, GREEDY, N_SAMPLES)
    check_tokens(step.found("advantages_N"), advantages)
    rewards = [score - sum(own) for score, own in zip(scores, penalties, strict=True)]
    # Without old log-probs, only the first update has those of the weights that sampled.
    bypass = algorithm.rollout_correction.bypass_mode
    measured = mini_batches(step)[0] if bypass else range(len(FLAT))
    before, engine = (torch.cat([own[i] for i in measured]) for own in (old, sampled))
    check_metrics(step, rewards, [a for own in advantages for a in own], before, engine)
    tensors = [torch.tensor(own) for own in advantages]
    check_policy(step, causal, tensors, old, ref, sampled)
    return returns


def check_tokens(found: Tensors, wanted: list[list[float]]) -> None:
    for own, trajectory, expected in zip(found, FLAT, wanted, strict=True):
        mask_N = torch.from_numpy(trajectory.mask_N)
        assert own[mask_N].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert not own[~mask_N].any()


def check_controller(step: Step, kl: float) -> None:
    section = step.recipe.algorithm.kl
    assert abs(kl) > 1e-3 and near(step.metrics["actor/reward_kl_penalty"], kl)
    change = 0.0
    if section.controller == "adaptive":
        change = min(max(kl / section.target - 1, -0.2), 0.2) * len(FLAT) / section.horizon
    assert near(step.metrics["actor/kl_coef"], section.coefficient)
    assert near(step.next_kl_coefficient, section.coefficient * (1 + change))


def check_metrics(
    step: Step, rewards: list[float], advantages: list[float], old: torch.Tensor, sampled: torch.Tensor
) -> None:
    metrics = step.metrics
    wanted = {
        "critic/score/mean": np.mean(SCORES),
        "critic/rewards/mean": np.mean(rewards),
        "critic/rewards/min": min(rewards),
        "critic/advantages/mean": np.mean(advantages),
        "critic/advantages/max": max(advantages),
        "critic/advantages/min": min(advantages),
        "training/rollout_logp_diff_mean": (old - sampled).abs().mean(),
        "training/rollout_probs_diff_max": (old.exp() - sampled.exp()).abs().max(),
        "prompt_length/mean": np.mean(PROMPTS),
        "response_length/mean": np.mean([len(t.mask_N) for t in FLAT]),
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(
        {name: float(value) for name, value in wanted.items()}, rel=1e-5, abs=1e-5
    )


def mini_batches(step: Step) -> list[list[int]]:
    """Trajectories of each update: whole groups in their order, once per pass."""
    size = (step.recipe.algorithm.mini_batch_size or len(PROMPTS)) * N_SAMPLES
    wanted = [list(range(first, first + size)) for first in range(0, len(FLAT), size)]
    assert step.numbers() == wanted
    return wanted * step.recipe.algorithm.ppo_epochs


def check_policy(
    step: Step, causal: Any, advantages: Tensors, old: Tensors, ref: Tensors, sampled: Tensors
) -> None:
    """Loss, its parts and the norm of its gradient, of each update with the weights that it began with."""
    algorithm, temperature = step.recipe.algorithm, step.recipe.rollout.temperature
    loss, kl = algorithm.loss, algorithm.kl
    how = loss.aggregation or (
        "seq-mean-token-mean" if loss.name in ("gspo", "gmpo", "sapo") else "token-mean"
    )
    for (weights, result), mini in zip(step.policy, mini_batches(step), strict=True):
        logps, entropies = formulas.ask_policy(causal, weights, FLAT, temperature)
        before, corrected = old, old
        if algorithm.rollout_correction.bypass_mode:
            before, corrected = sampled, [logp.detach() for logp in logps]
        told = [formulas.policy_losses(loss, logps[i], before[i], advantages[i]) for i in mini]
        factors = [formulas.correction(algorithm.rollout_correction, corrected[i], sampled[i]) for i in mini]
        weighted = [own * factor for (own, *_), factor in zip(told, factors, strict=True)]
        policy = formulas.aggregate(how, weighted, MAX_TOKENS)
        entropy = formulas.aggregate(how, [entropies[i] for i in mini], MAX_TOKENS)
        total = policy - loss.entropy * entropy
        wanted = {
            "actor/pg_loss": policy,
            "actor/entropy": entropy,
            "actor/pg_clipfrac": torch.cat([held for _, held, _ in told]).mean(),
            "actor/pg_clipfrac_lower": torch.cat([dual for _, _, dual in told]).mean(),
            "actor/ppo_kl": torch.cat([before[i] - logps[i] for i in mini]).mean(),
        }
        if kl.place == "loss":
            own = [formulas.divergence(kl.estimator, logps[i], ref[i]) for i in mini]
            wanted["actor/kl_loss"] = formulas.aggregate(how, own, MAX_TOKENS)
            total = total + kl.coefficient * wanted["actor/kl_loss"]
        for name, value in wanted.items():
            assert near(result.metrics[name], value.item()), name
        assert result.applied and near(result.loss, total.item())
        if not step.recipe.model.lora.rank:
            assert result.grad_norm == pytest.approx(formulas.gradient_norm(causal, total), rel=1e-4)


def check_critic(step: Step, model: Any, old: Tensors, returns: list[list[float]]) -> None:
    found = formulas.written(step.found("values_N"), FLAT)
    torch.testing.assert_close(torch.cat(found), torch.cat(old), rtol=1e-5, atol=1e-5)
    check_tokens(step.found("returns_N"), returns)
    algorithm, wanted = step.recipe.algorithm, [torch.tensor(own) for own in returns]
    how = algorithm.critic.aggregation or algorithm.loss.aggregation or "token-mean"
    for (weights, result), mini in zip(step.critic, mini_batches(step), strict=True):
        values = formulas.ask_critic(model, weights, FLAT)
        told = [formulas.value_losses(algorithm.critic.clip, values[i], old[i], wanted[i]) for i in mini]
        loss = formulas.aggregate(how, [own for own, _ in told], MAX_TOKENS)
        assert near(result.loss, loss.item()) and near(result.metrics["critic/vf_loss"], loss.item())
        assert near(result.metrics["critic/vf_clipfrac"], torch.cat([held for _, held in told]).mean())
        assert result.grad_norm == pytest.approx(formulas.gradient_norm(model, loss), rel=1e-4)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_step_equals_the_formulas(
    tiny: Path,
    tmp_path: Path,
    device_type: str,
    causal: Any,
    reward_model: Path,
    algorithm: str,
    variant: str,
) -> None:
    sections = dict(VARIANTS[variant])
    own = merged({"name": algorithm}, ALGORITHMS[algorithm], sections.pop("algorithm", {}))
    fresh = variant == "one update"
    if algorithm == "ppo" and not fresh:
        own["critic"] = {**own["critic"], "path": str(reward_model)}
    step = take_step(step_recipe(tiny, tmp_path, device_type, algorithm=own, **sections))
    if algorithm != "ppo":
        check(step, causal)
        return
    model = classifier(reward_model)
    weights = step.critic[0][0]
    if fresh:
        assert not weights["score.weight"].any() and not any(one.any() for one in step.found("values_N"))
    with torch.no_grad():
        values = formulas.ask_critic(model, weights, FLAT)
    check_critic(step, model, values, check(step, causal, values))


@pytest.mark.parametrize(
    ("loss", "critic"),
    [
        ({"aggregation": "seq-mean-token-sum"}, {}),
        ({"aggregation": "seq-mean-token-mean"}, {"aggregation": "seq-mean-token-sum-norm"}),
    ],
)
def test_the_critic_aggregates_as_the_recipe_says(
    tiny: Path,
    tmp_path: Path,
    device_type: str,
    causal: Any,
    reward_model: Path,
    loss: dict[str, Any],
    critic: dict[str, Any],
) -> None:
    """As the policy by default, with small micro-batches, which add up to the same."""
    own = {"name": "ppo", **ALGORITHMS["ppo"], "mini_batch_size": 2, "loss": loss}
    own["critic"] = {**own["critic"], "path": str(reward_model), **critic}
    data = {"tokens_per_micro_batch": 42}
    step = take_step(step_recipe(tiny, tmp_path, device_type, algorithm=own, data=data))
    model = classifier(reward_model)
    with torch.no_grad():
        values = formulas.ask_critic(model, step.critic[0][0], FLAT)
    check_critic(step, model, values, check(step, causal, values))


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss_and_correction_equals_its_formula(
    tiny: Path, tmp_path: Path, device_type: str, causal: Any, name: str
) -> None:
    own = merged({"name": "grpo", "mini_batch_size": 2, "ppo_epochs": 2}, LOSSES[name])
    step = take_step(step_recipe(tiny, tmp_path, device_type, algorithm=own))
    check(step, causal)
    clips = own.get("loss", {}).get("name", "clip") not in ("reinforce", "sapo")
    assert (step.metrics["actor/pg_clipfrac"] > 0) == clips
    assert step.metrics["actor/pg_clipfrac_lower"] > 0 or name != "narrow clip"


def test_with_lr_0_nothing_moves_at_all(tiny: Path, tmp_path: Path, device_type: str) -> None:
    """Old log-probs are those of the updates bit for bit, with and without gradients."""
    step = take_step(
        step_recipe(
            tiny,
            tmp_path,
            device_type,
            algorithm={"name": "grpo", "mini_batch_size": 2, "ppo_epochs": 2},
            data={"tokens_per_micro_batch": 42},
            rollout={"temperature": 0.7},
            optimizer={"lr": 0.0},
        )
    )
    assert len(step.policy) == 4 and len(step.minis[1]) > 1
    for _, result in step.policy:
        assert result.metrics["actor/ppo_kl"] == 0.0 and result.metrics["actor/pg_clipfrac"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, LORA_RANK], ids=["full", "lora"])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_first_update_begins_at_the_reference(
    tiny: Path, tmp_path: Path, device_type: str, place: str, rank: int, dtype: str
) -> None:
    """Policy and reference go through the same kernels in the same micro-batches, bit for bit."""
    model = {"path": str(tiny / "model"), "dtype": dtype, **how_computed(device_type)}
    if rank:
        model["lora"] = {"rank": rank, "alpha": LORA_ALPHA}
    step = take_step(
        step_recipe(
            tiny,
            tmp_path,
            device_type,
            model=model,
            algorithm={"name": "grpo", "kl": {"place": place, "coefficient": 0.2}},
            data={"tokens_per_micro_batch": 42},
        ),
        shaken=0.0,
    )
    assert len(step.policy) == 1 and len(step.minis[0]) > 1
    assert step.metrics["actor/kl_loss" if place == "loss" else "actor/reward_kl_penalty"] == 0.0
    assert step.metrics["actor/ppo_kl"] == 0.0 and step.metrics["actor/grad_norm"] > 0.0


def test_the_mismatch_is_told_while_the_critic_warms_up(tiny: Path, tmp_path: Path) -> None:
    def told(warmup: int) -> dict[str, float]:
        own = {"name": "ppo", "critic": {"warmup_steps": warmup}}
        data = {"tokens_per_micro_batch": 42}
        step = take_step(step_recipe(tiny, tmp_path, "cpu", algorithm=own, data=data))
        assert bool(step.policy) == (warmup == 0) and len(step.critic) == 1
        return {name: value for name, value in step.metrics.items() if name.startswith("training/")}

    assert len(told(1)) == 5 and told(1) == told(0)


@pytest.mark.parametrize(
    ("algorithm", "extra"),
    [
        ({"name": "grpo"}, []),
        ({"name": "grpo", "kl": {"place": "loss"}}, []),
        ({"name": "ppo"}, []),
        ({"name": "grpo", "kl": {"place": "reward"}}, ["prepare"]),
    ],
)
def test_a_step_is_three_calls_to_the_ranks(
    tiny: Path, tmp_path: Path, algorithm: dict[str, Any], extra: list[str]
) -> None:
    """One more where penalties of all ranks are part of a group's rewards."""
    step = take_step(step_recipe(tiny, tmp_path, "cpu", algorithm=algorithm))
    # Before the first step the engines get weights, and after the last one everything is saved.
    assert step.called == ["send_weights", "load", *extra, "learn", "send_weights", "save", "finish"]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_micro_batches_do_not_matter(tiny: Path, tmp_path: Path, device_type: str, algorithm: str) -> None:
    def taken(budget: int) -> Step:
        recipe = step_recipe(
            tiny,
            tmp_path,
            device_type,
            algorithm={"name": algorithm, "kl": {"place": "reward", "coefficient": 0.1}},
            data={"tokens_per_micro_batch": budget},
        )
        return take_step(recipe)

    one, several = taken(512), taken(42)
    assert len(one.minis[0]) == 1 and len(several.minis[0]) == 3
    for (_, whole), (_, parts) in zip(one.policy + one.critic, several.policy + several.critic, strict=True):
        assert parts.loss == pytest.approx(whole.loss, abs=1e-6)
        assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6, abs=1e-6)
        assert parts.metrics == pytest.approx(whole.metrics, abs=1e-6)
    timed = ("timing_s/", "perf/")
    stable = [{k: v for k, v in s.metrics.items() if not k.startswith(timed)} for s in (one, several)]
    assert stable[1] == pytest.approx(stable[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_without_its_adapters_the_policy_is_its_reference(
    tiny: Path, tmp_path: Path, device_type: str, causal: Any, place: str
) -> None:
    recipe = step_recipe(
        tiny,
        tmp_path,
        device_type,
        model={"lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA}},
        algorithm={
            "name": "grpo",
            "mini_batch_size": 2,
            "kl": {"place": place, "coefficient": 0.2},
        },
    )
    step = take_step(recipe, shaken=0.1)
    check(step, causal)
    files = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    with torch.no_grad():
        base, _ = formulas.ask_policy(files, files.state_dict(), FLAT, 1.0)
    found = formulas.written(step.found("ref_logp_N"), FLAT)
    torch.testing.assert_close(torch.cat(found), torch.cat(base), rtol=0, atol=1e-5)
    moved = torch.cat(formulas.written(step.found("old_logp_N"), FLAT)) - torch.cat(found)
    assert moved.abs().mean() > 0.05


def whole_response(model: Any, trajectory: Any) -> float:
    """The score of a conversation that ends as the chat template ends it: the end of the turn, a new line."""
    tokens = torch.from_numpy(np.append(trajectory.tokens_T, [2, 201])).long()
    return float(model(tokens[None]).logits.item())


def test_adds_scores_of_a_reward_model(
    tiny: Path, tmp_path: Path, device_type: str, reward_model: Path
) -> None:
    sections: dict[str, Any] = {
        "reward": {"model": {"path": str(reward_model), "weight": 2.0}},
        "data": {"tokens_per_micro_batch": 42},
    }
    step = take_step(step_recipe(tiny, tmp_path, device_type, algorithm={"name": "rloo"}, **sections))
    model = classifier(reward_model)
    with torch.no_grad():
        told = [whole_response(model, t) for t in FLAT]
    assert np.std(told) > 0.01
    scores = [score + 2.0 * own for score, own in zip(SCORES, told, strict=True)]
    nothing = [[0.0] * int(t.mask_N.sum()) for t in FLAT]
    wanted, _ = formulas.advantages(step.recipe.algorithm, scores, nothing, nothing, GREEDY, N_SAMPLES)
    check_tokens(step.found("advantages_N"), wanted)
    assert near(step.metrics["critic/score/mean"], np.mean(scores))
    assert near(step.metrics["critic/score/max"], max(scores))


@pytest.fixture(scope="module", params=["tokens", "classifier"])
def step_model(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model of each kind."""
    path = tmp_path_factory.mktemp("step-judge")
    torch.manual_seed(2)
    kind = AutoModelForCausalLM if request.param == "tokens" else AutoModelForTokenClassification
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=2, classifier_dropout=0.0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that step_scores differ
        if request.param == "classifier":
            model.score.bias.copy_(torch.tensor([0.5, -0.25]))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(path)
    return path


def good_steps(model: Any, tokenizer: Any, trajectory: Any, separator: str) -> list[float]:
    """Probabilities of the steps of a response, each from a sequence that ends with it."""
    text = tokenizer.decode(trajectory.response_N.tolist(), skip_special_tokens=True)
    tokens = trajectory.tokens_T[: trajectory.prompt_length].tolist()
    (bad,), (good,), end = (
        tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("-", "+", separator)
    )
    found = []
    for step in (part for part in text.split(separator) if part.strip()):
        tokens += tokenizer(step, add_special_tokens=False)["input_ids"] + end
        logits_K = model(torch.tensor([tokens])).logits[0, -1]
        pair = logits_K if len(logits_K) == 2 else logits_K[[bad, good]]
        found.append(torch.softmax(pair, 0)[1].item())
    return found


@pytest.mark.parametrize("aggregate", ["min", "mean", "product", "last"])
def test_adds_scores_of_a_process_reward_model(
    tiny: Path, tmp_path: Path, device_type: str, reward_model: Path, step_model: Path, aggregate: str
) -> None:
    process = {"path": str(step_model), "step_separator": "e", "aggregate": aggregate, "weight": 3.0}
    sections: dict[str, Any] = {
        "reward": {"process": process, "model": {"path": str(reward_model)}},
        "data": {"tokens_per_micro_batch": 42},
    }
    step = take_step(step_recipe(tiny, tmp_path, device_type, algorithm={"name": "rloo"}, **sections))
    config = AutoConfig.from_pretrained(step_model)
    kind = AutoModelForTokenClassification if "Token" in config.architectures[0] else AutoModelForCausalLM
    model = kind.from_pretrained(step_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(step_model)
    folds = {"min": min, "mean": np.mean, "product": np.prod, "last": lambda steps: steps[-1]}
    with torch.no_grad():
        steps = [good_steps(model, tokenizer, t, "e") for t in FLAT]
        told = [whole_response(classifier(reward_model), t) for t in FLAT]
    assert max(map(len, steps)) > 1 and np.std([p for own in steps for p in own]) > 0.01
    preference = [folds[aggregate](own) if own else 0.0 for own in steps]
    scores = [a + b + 3.0 * c for a, b, c in zip(SCORES, told, preference, strict=True)]
    assert near(step.metrics["reward/process/mean"], np.mean(preference))
    assert near(step.metrics["critic/score/mean"], np.mean(scores))
    assert near(step.metrics["critic/score/max"], max(scores))


def test_layers_of_an_online_step_agree_on_two_devices(tiny: Path, tmp_path: Path) -> None:
    for device_type in ("cpu", "npu"):
        sections: dict[str, Any] = {
            "algorithm": {"name": "grpo", "mini_batch_size": 2, "kl": {"place": "loss"}},
            "observe": {"layer_trace": 2, "loggers": []},
        }
        if device_type == "npu":
            sections["model"] = {"fused": "on"}
        take_step(step_recipe(tiny, tmp_path / device_type, device_type, **sections))
    level = layers_level(tmp_path / "cpu", tmp_path / "npu", dtype="float32")
    assert level.state == "same", level.words
    # Two updates of one step; what asks the model for log-probs between them is not training.
    assert {layer["step"] for layer in level.evidence["layers"]} == {1, 2}
    assert max(layer["error"] / layer["limit"] for layer in level.evidence["layers"]) > 0
