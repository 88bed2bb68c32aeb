"""The same numbers as TRL's trainers, whose own methods are run here.

A trainer is made without its constructor, and everything around the maths is replaced: generation, the
reward functions and the model's forward give fixed numbers.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from steps import LENGTHS, MASK, numbers, whole
from torch.nn.utils.rnn import pad_sequence

from isotrain.algorithms.advantages import grpo, rloo
from isotrain.algorithms.aggregation import LossNormalizer
from isotrain.algorithms.kl import kl_loss
from isotrain.algorithms.mismatch import rollout_correction
from isotrain.algorithms.policy_losses import cispo, clip, gspo
from isotrain.algorithms.segments import spread, sums

pytest.importorskip("trl")
GRPOTrainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
RLOOTrainer = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer

HORIZON = 16
ADVANTAGES_R = torch.tensor([1.5, -0.7, 0.4])


def padded(values_N: torch.Tensor) -> torch.Tensor:
    """One row per trajectory, as TRL has them."""
    return pad_sequence(values_N.split(LENGTHS), batch_first=True)


def trainer(kind: type, **settings: Any) -> Any:
    """A trainer of one process that was never set up, with TRL's defaults and the given settings."""
    result = object.__new__(kind)
    arguments = {
        "use_bias_correction_kl": False,
        "delta": None,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "gradient_checkpointing_kwargs": None,
    }
    state = {
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=1,
            process_index=0,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(**{key: settings.pop(key, value) for key, value in arguments.items()}),
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "environment_factories": None,
        "environments": None,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "loss_type": "dapo",
        "mask_truncated_completions": False,
        "max_completion_length": HORIZON,
        "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False,
        "num_iterations": 1,
        "off_policy_mask_threshold": None,
        "pad_to_multiple_of": None,
        "reward_clip_range": None,
        "reward_func_names": ["score"],
        "reward_weights": torch.ones(1),
        "scale_rewards": "group",
        "tools": [],
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "_entropy_bonus_enabled": False,
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        **settings,
    }
    for name, value in state.items():
        object.__setattr__(result, name, value)
    return result


def trl_loss(
    logp_N: torch.Tensor,
    old_N: torch.Tensor,
    share: LossNormalizer,
    *,
    ref_N: torch.Tensor | None = None,
    weights_N: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    entropies = torch.zeros_like(padded(logp_N))
    subject = trainer(
        GRPOTrainer,
        _get_per_token_logps_and_entropies=lambda *a, **k: (padded(logp_N), entropies, None),
        use_vllm=weights_N is not None,
        **settings,
    )
    ids = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": padded(torch.ones(len(logp_N), dtype=torch.int64)),
        "completion_mask": padded(torch.ones(len(logp_N), dtype=torch.int64)),
        "tool_mask": padded(share.mask_N.long()),
        "advantages": ADVANTAGES_R.to(logp_N.dtype),
        "old_per_token_logps": padded(old_N),
        "num_items_in_batch": torch.tensor(share.tokens),
    }
    if ref_N is not None:
        inputs["ref_per_token_logps"] = padded(ref_N)
    if weights_N is not None:
        inputs["importance_sampling_ratio"] = padded(weights_N)
    loss = subject._compute_loss(subject.model, inputs)
    return loss, subject._metrics["train"]


@pytest.fixture
def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LossNormalizer]:
    """Log-probs on both sides of every clip, those of the old policy, advantages, the packing."""
    old_N = numbers(0) - 2
    logp_N = (old_N + 0.4 * numbers(5)).requires_grad_()
    return logp_N, old_N, spread(ADVANTAGES_R, LENGTHS), whole(LENGTHS, MASK, horizon=HORIZON)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, logp_N: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(loss, logp_N)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert gradients[0].any()


@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("dapo", "token-mean"),
        ("bnpo", "token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
        ("luspo", "seq-mean-token-sum"),
    ],
)
def test_clip_in_every_aggregation(step: Any, loss_type: str, aggregation: str) -> None:
    logp_N, old_N, advantages_N, share = step
    theirs, logged = trl_loss(logp_N, old_N, share, loss_type=loss_type, epsilon_high=0.28)
    ours, metrics = clip(
        logp_N, old_N, advantages_N, share, clip_ratio_high=0.28, dual_clip=None, aggregation=aggregation
    )
    assert_same(ours, theirs, logp_N)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(logged["clip_ratio/region_mean"][0])
    assert 0 < metrics["actor/pg_clipfrac"] < 1


def test_dual_clip_is_their_delta(step: Any) -> None:
    logp_N, old_N, advantages_N, share = step
    moved_N = (logp_N.detach() + share.mask_N * 1.5).requires_grad_()
    theirs, _ = trl_loss(moved_N, old_N, share, delta=3.0)
    ours, metrics = clip(moved_N, old_N, advantages_N, share, dual_clip=3.0)
    assert_same(ours, theirs, moved_N)
    assert metrics["actor/pg_clipfrac_lower"] > 0


def test_gspo(step: Any) -> None:
    logp_N, old_N, advantages_N, share = step
    settings = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    theirs, _ = trl_loss(logp_N, old_N, share, **settings)
    ours, _ = gspo(logp_N, old_N, advantages_N, share)
    assert_same(ours, theirs, logp_N)


def test_cispo(step: Any) -> None:
    logp_N, old_N, advantages_N, share = step
    # TRL's bound is the largest weight itself, and it has no lower one.
    theirs, _ = trl_loss(logp_N, old_N, share, loss_type="cispo", epsilon_high=1.25)
    ours, _ = cispo(logp_N, old_N, advantages_N, share, clip_ratio_low=1.0, clip_ratio_high=0.25)
    assert_same(ours, theirs, logp_N)


def test_divergence_in_the_loss(step: Any) -> None:
    logp_N, old_N, advantages_N, share = step
    ref_N = old_N + 0.3 * numbers(6)
    theirs, logged = trl_loss(logp_N, old_N, share, ref_N=ref_N, beta=0.1)
    policy, _ = clip(logp_N, old_N, advantages_N, share, dual_clip=None)
    penalty, metrics = kl_loss(logp_N, ref_N, share, coefficient=0.1)
    assert_same(policy + penalty, theirs, logp_N)
    assert metrics["actor/kl_loss"].item() == pytest.approx(logged["kl"][0], rel=1e-5)


def test_weights_of_the_rollout_correction(step: Any) -> None:
    logp_N, old_N, advantages_N, share = step
    weights_N = numbers(7).exp()
    theirs, _ = trl_loss(logp_N, old_N, share, weights_N=weights_N)
    ours, _ = clip(logp_N, old_N, advantages_N, share, dual_clip=None, correction_N=weights_N)
    assert_same(ours, theirs, logp_N)


def generated(
    kind: type, rewards_R: torch.Tensor, lengths: list[int], **settings: Any
) -> dict[str, torch.Tensor]:
    """What TRL makes of responses of these lengths with these rewards."""
    ids = [[1] * length for length in lengths]
    responses = ([[1]] * len(ids), ids)
    logp_N = settings.pop("logp_N", torch.zeros(sum(lengths)))
    rollout_N = settings.pop("rollout_N", None)
    tools = settings.pop("mask_N", torch.ones(sum(lengths))).long().split(lengths)
    full = (
        *responses,
        [part.tolist() for part in tools],
        ["text"] * len(ids),
        None if rollout_N is None else [part.tolist() for part in rollout_N.split(lengths)],
        {},
        None,
        None,
    )
    logp = pad_sequence(logp_N.split(lengths), batch_first=True)
    subject = trainer(
        kind,
        _generate=lambda prompts: full if kind is GRPOTrainer else (*responses, ["text"] * len(ids)),
        _calculate_rewards=lambda *a: rewards_R[:, None],
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, None, None),
        **settings,
    )
    output: dict[str, torch.Tensor] = subject._generate_and_score_completions([{"prompt": "text"}] * len(ids))
    return output


GROUPS_R = torch.arange(12) // 4
REWARDS_R = torch.cat([numbers(0, 4), torch.full((4,), 0.3), 1e-4 * numbers(1, 4)])


@pytest.mark.parametrize("scale", [True, False])
def test_grpo_advantages(scale: bool) -> None:
    settings = {"num_generations": 4, "scale_rewards": "group" if scale else "none"}
    theirs = generated(GRPOTrainer, REWARDS_R, [1] * 12, **settings)["advantages"]
    ours = grpo(REWARDS_R, GROUPS_R, scale_by_std=scale, convention="trl")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # The conventions are told apart by the third group, whose rewards are as narrow as TRL's epsilon.
    if scale:
        assert not torch.allclose(grpo(REWARDS_R, GROUPS_R), theirs, atol=0.1)


def test_grpo_advantage_of_a_single_response() -> None:
    theirs = generated(GRPOTrainer, REWARDS_R, [1] * 12, num_generations=1)["advantages"]
    assert torch.equal(grpo(REWARDS_R, torch.arange(12), convention="trl"), theirs)


def test_rloo_advantages() -> None:
    settings = {"num_generations": 4, "normalize_advantages": False}
    theirs = generated(RLOOTrainer, REWARDS_R, [1] * 12, **settings)["advantages"]
    torch.testing.assert_close(rloo(REWARDS_R, GROUPS_R), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("lower", [None, 0.8])
def test_rollout_correction(level: str, mode: str, lower: float | None) -> None:
    logp_N, rollout_N, share = numbers(0), numbers(0) + 0.5 * numbers(1), whole(LENGTHS, MASK)
    theirs = generated(
        GRPOTrainer,
        torch.ones(3),
        list(LENGTHS),
        num_generations=3,
        logp_N=logp_N,
        rollout_N=rollout_N,
        mask_N=share.mask_N,
        use_vllm=True,
        vllm_importance_sampling_mode=f"{level}_{mode}",
        vllm_importance_sampling_clip_min=lower,
        vllm_importance_sampling_clip_max=1.5,
    )["importance_sampling_ratio"]
    if mode == "mask" and lower is None:
        lower = 0.0  # TRL's band is then open below
    ours, _ = rollout_correction(logp_N, rollout_N, share, level=level, mode=mode, upper=1.5, lower=lower)  # type: ignore[arg-type]
    rows = theirs.expand(-1, max(LENGTHS))
    theirs_N = torch.cat([row[:length] for row, length in zip(rows, LENGTHS, strict=True)])
    torch.testing.assert_close(ours, torch.where(share.mask_N, theirs_N, 0.0))
    assert sums(ours, LENGTHS).any()
