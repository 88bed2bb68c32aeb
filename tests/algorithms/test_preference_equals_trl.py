"""The same numbers as TRL's preference trainers, whose own methods are run here on fixed log-probs.

P: pairs, S: responses, T: tokens.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isotrain.algorithms.preference_losses import Side, dpo, ipo, kto, orpo, reference_point, rm, simpo

pytest.importorskip("trl")
DPOTrainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
KTOTrainer = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
RewardTrainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer

LENGTHS = (3, 6, 1, 4, 2, 5)  # of the responses: three chosen, three rejected
REF = torch.tensor([-4.0, -9.5, -2.0, -5.5, -3.0, -8.0])
PROMPT = 2


def responses() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and mask of the responses' tokens, padded; the prompt's are not 0 but masked."""
    draw = torch.Generator().manual_seed(0)
    mask_ST = torch.zeros(6, PROMPT + max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask_ST[row, PROMPT : PROMPT + length] = 1
    logp_ST = -3 * torch.rand(mask_ST.shape, generator=draw)
    return (logp_ST * mask_ST)[:, 1:].requires_grad_(), mask_ST


def trainer(kind: type, **settings: Any) -> Any:
    """A trainer of one process that was never set up."""
    result = object.__new__(kind)
    state = {
        "accelerator": SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(center_rewards_coefficient=None),
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "beta": 0.1,
        **settings,
    }
    for name, value in state.items():
        setattr(result, name, value)
    return result


def outputs(logp_ST: torch.Tensor) -> SimpleNamespace:
    zeros = torch.zeros_like(logp_ST)
    return SimpleNamespace(log_probs=logp_ST, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def sides(logp_ST: torch.Tensor) -> tuple[Side, Side]:
    logp_S, tokens_S = logp_ST.sum(1), torch.tensor(LENGTHS)
    return Side(logp_S[:3], REF[:3], tokens_S[:3]), Side(logp_S[3:], REF[3:], tokens_S[3:])


def gradient(loss: torch.Tensor, logp_ST: torch.Tensor) -> torch.Tensor:
    (grad_ST,) = torch.autograd.grad(loss, logp_ST)
    return grad_ST


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize(
    ("theirs", "loss", "options"),
    [
        ("sigmoid", dpo, {}),
        ("ipo", ipo, {"length_averaged": True}),
        ("sigmoid_norm", dpo, {"length_averaged": True}),
    ],
)
def test_dpo_and_ipo(theirs: str, loss: Any, options: dict[str, Any], beta: float) -> None:
    logp_ST, mask_ST = responses()
    settings = {
        "beta": beta,
        "loss_types": [theirs],
        "loss_weights": [1.0],
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
    }
    inputs = {
        "input_ids": torch.ones_like(mask_ST),
        "attention_mask": torch.ones_like(mask_ST),
        "completion_mask": mask_ST,
        "ref_chosen_logps": REF[:3],
        "ref_rejected_logps": REF[3:],
    }
    dpo_trainer = trainer(DPOTrainer, **settings)
    expected = dpo_trainer._compute_loss(lambda **_: outputs(logp_ST), inputs, False)
    preference = loss(*sides(logp_ST), beta=beta, **options)
    torch.testing.assert_close(preference.loss_P.mean(), expected)
    torch.testing.assert_close(gradient(preference.loss_P.mean(), logp_ST), gradient(expected, logp_ST))
    if not options:
        (margin,) = dpo_trainer._metrics["train"]["rewards/margins"]
        assert (preference.chosen_P - preference.rejected_P).mean().item() == pytest.approx(margin, rel=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_simpo(label_smoothing: float) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    logp_ST, _ = responses()
    chosen, rejected = sides(logp_ST)
    settings = {
        "beta": 2.0,
        "simpo_gamma": 0.5,
        "alpha": 0.0,
        "loss_type": "simpo",
        "label_smoothing": label_smoothing,
    }
    expected, *_ = trainer(cpo, **settings).cpo_loss(chosen.mean_logp_P(), rejected.mean_logp_P())
    preference = simpo(chosen, rejected, beta=2.0, margin=0.5, label_smoothing=label_smoothing)
    torch.testing.assert_close(preference.loss_P, expected)


def test_orpo() -> None:
    orpo_trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    logp_ST, _ = responses()
    chosen, rejected = sides(logp_ST)
    mean_c, mean_r = chosen.mean_logp_P(), rejected.mean_logp_P()
    bonus, *_ = trainer(orpo_trainer, beta=0.3).odds_ratio_loss(mean_c, mean_r)
    preference = orpo(chosen, rejected, beta=0.3)
    # TRL's negative log-likelihood is a mean over the tokens of the batch; ours is one of each response.
    torch.testing.assert_close(preference.loss_P, -mean_c - bonus)


@pytest.mark.parametrize("shift", [0.0, -30.0])
def test_kto(shift: float) -> None:
    """With a reference point above 0, and with one that would be below."""
    logp_ST, mask_ST = responses()
    label_S = torch.tensor([True, False, True, True, False, False])
    mismatched_S, ref_mismatched_S = REF + 1.5 + shift, REF
    settings = {
        "loss_type": "kto",
        "calculate_KL": True,
        "desirable_weight": 1.2,
        "undesirable_weight": 0.8,
        "_compute_kl_logps": lambda model, batch: mismatched_S,
    }
    inputs = {
        "input_ids": torch.ones_like(mask_ST),
        "attention_mask": torch.ones_like(mask_ST),
        "completion_mask": mask_ST,
        "label": label_S,
        "ref_logps": REF,
        "ref_KL_logps": ref_mismatched_S,
    }
    kto_trainer = trainer(KTOTrainer, **settings)
    expected = kto_trainer._compute_loss(lambda **_: outputs(logp_ST), inputs, False)
    kl = reference_point((mismatched_S - ref_mismatched_S).sum().item(), 6)
    loss, metrics = kto(
        logp_ST.sum(1), REF, label_S, kl=kl, responses=6, desirable_weight=1.2, undesirable_weight=0.8
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, logp_ST), gradient(expected, logp_ST))
    (chosen,) = kto_trainer._metrics["train"]["rewards/chosen"]
    mean = metrics["chosen_reward_share"] / metrics["chosen_share"]
    assert mean.item() == pytest.approx(chosen, rel=1e-5)


@pytest.mark.parametrize("centre", [0.0, 0.05])
@pytest.mark.parametrize("with_margin", [False, True])
def test_rm(with_margin: bool, centre: float) -> None:
    scores_S = torch.tensor([1.0, 0.2, -0.5, 0.3, 0.9, -2.0])
    margin_P = torch.tensor([0.5, 0.0, 1.0]) if with_margin else None
    inputs = {"attention_mask": torch.ones(6, 4), **({"margin": margin_P} if with_margin else {})}
    arguments = SimpleNamespace(center_rewards_coefficient=centre or None)
    expected = trainer(RewardTrainer, args=arguments).compute_loss(
        lambda **_: SimpleNamespace(logits=scores_S[:, None]), inputs
    )
    preference = rm(scores_S[:3], scores_S[3:], margin_P=margin_P, centre=centre)
    torch.testing.assert_close(preference.loss_P.mean(), expected)
