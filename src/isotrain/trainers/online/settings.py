"""From the recipe's algorithm section to plain numbers for the maths: configuration ends here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from isotrain.algorithms import ADVANTAGES
from isotrain.algorithms.advantages import Estimator
from isotrain.recipe.online import (
    GrpoSection,
    LossSection,
    Online,
    PpoSection,
    ReinforcePlusPlusSection,
    RemaxSection,
    RolloutCorrectionSection,
)
from isotrain.recipe.schema import Recipe


@dataclass(frozen=True)
class UpdateSettings:
    """All that an update of the policy depends on besides the responses."""

    temperature: float
    ppo_epochs: int
    loss_name: str
    loss_options: dict[str, Any]
    aggregation: str
    horizon: int
    entropy: float
    kl_place: str
    kl_estimator: str
    correction: dict[str, Any] | None


@dataclass(frozen=True)
class AdvantageSettings:
    estimator: Estimator
    options: dict[str, Any]
    whitening: Literal["verl", "openrlhf"]


def update_settings(recipe: Recipe, algorithm: Online) -> UpdateSettings:
    assert recipe.rollout is not None
    rollout, loss, kl = recipe.rollout, algorithm.loss, algorithm.kl
    return UpdateSettings(
        temperature=rollout.temperature,
        ppo_epochs=algorithm.ppo_epochs,
        loss_name=loss.name,
        loss_options=_loss_options(loss),
        aggregation=loss.aggregation or ("seq-mean-token-mean" if loss.name == "gspo" else "token-mean"),
        horizon=rollout.max_tokens,
        entropy=loss.entropy,
        kl_place=kl.place,
        kl_estimator=kl.estimator,
        correction=_correction_options(algorithm.rollout_correction),
    )


def _loss_options(loss: LossSection) -> dict[str, Any]:
    if loss.name == "reinforce":
        return {}
    clips: dict[str, Any] = {"clip_ratio_low": loss.clip_ratio_low, "clip_ratio_high": loss.clip_ratio_high}
    return clips | ({"dual_clip": loss.dual_clip} if loss.name == "clip" else {})


def _correction_options(rollout_correction: RolloutCorrectionSection) -> dict[str, Any] | None:
    if rollout_correction.level == "off":
        return None
    return {
        "level": rollout_correction.level,
        "mode": rollout_correction.mode,
        "upper": rollout_correction.upper,
        "lower": rollout_correction.lower,
    }


def advantage_settings(algorithm: Online) -> AdvantageSettings:
    convention = algorithm.convention
    estimator = ADVANTAGES[algorithm.name]
    options: dict[str, Any] = {} if isinstance(algorithm, RemaxSection) else {"convention": convention}
    if isinstance(algorithm, GrpoSection):
        options["scale_by_std"] = algorithm.scale_by_std
    if isinstance(algorithm, (PpoSection, ReinforcePlusPlusSection)):
        options["gamma"] = algorithm.gamma
    if isinstance(algorithm, PpoSection):
        options["lam"] = algorithm.lam
    # What TRL has is not whitened.
    return AdvantageSettings(estimator, options, "openrlhf" if convention == "openrlhf" else "verl")
