"""Advantages and policy losses of installed packages, held to the contract of ours.

R: trajectories, N: their response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from isotrain.algorithms import POLICY_LOSSES as OWN_LOSSES
from isotrain.algorithms.advantages import Estimator
from isotrain.algorithms.aggregate import Loss
from isotrain.plugins import ADVANTAGES, POLICY_LOSSES, Plugin, find_plugin
from isotrain.recipe.online import PluginSection

_NEEDS = ("values_N", "greedy_R")


def plugin_estimator(section: PluginSection, has_critic: bool) -> Estimator:
    """An `Estimator` of another package, with checked results."""
    plugin = find_plugin(ADVANTAGES, section.name, "algorithm.advantage.name")
    estimator = plugin.load()
    if not isinstance(estimator, Estimator):
        raise plugin.wrong(f"is of {type(estimator)}, not an isotrain.algorithms.advantages.Estimator")
    if estimator.per not in ("trajectory", "token") or not set(estimator.needs) <= {*_NEEDS}:
        known = " and ".join(_NEEDS)
        raise plugin.wrong(f"has per={estimator.per!r}, needs={estimator.needs!r}; allowed needs are {known}")
    if estimator.per == "trajectory" and estimator.needs:
        raise plugin.wrong("needs more than rewards and groups, which only per-token estimators get")
    if "values_N" in estimator.needs and not has_critic:
        raise plugin.wrong("needs a critic's values_N: write algorithm.name: ppo")
    if estimator.per == "trajectory" and has_critic:
        raise plugin.wrong("gives no returns for ppo's critic: write another algorithm.name")
    plugin.check_options(estimator.function, section.options)
    return replace(estimator, function=_checked(plugin, estimator))


def _checked(plugin: Plugin, estimator: Estimator) -> Callable[..., Any]:
    count = 1 if estimator.per == "trajectory" else 2

    def function(rewards: torch.Tensor, *rest: Any, **options: Any) -> Any:
        found = estimator.function(rewards, *rest, **options)
        parts = (found,) if count == 1 else found
        fits = isinstance(parts, tuple) and len(parts) == count
        if not fits or any(getattr(part, "shape", None) != rewards.shape for part in parts):
            wanted = "advantages_R" if count == 1 else "(advantages_N, returns_N)"
            raise plugin.wrong(f"must return {wanted}, as long as the {len(rewards)} rewards it was given")
        return found

    return function


def plugin_loss(section: PluginSection) -> Callable[..., Loss]:
    """A policy loss of another package, with checked results."""
    ours = {name: f"algorithm.loss.name: {name}" for name in OWN_LOSSES}
    plugin = find_plugin(POLICY_LOSSES, section.name, "algorithm.loss.plugin.name", ours)
    loss = plugin.load()
    if not callable(loss):
        raise plugin.wrong("is not a function")
    plugin.check_options(loss, {**section.options, "aggregation": "token-mean", "correction_N": None})

    def function(*tensors: Any, **options: Any) -> Loss:
        found = loss(*tensors, **options)
        pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
        if not pair or getattr(found[0], "shape", None) != torch.Size([]):
            raise plugin.wrong("must return (loss, metrics): a single number and a dict of numbers")
        return found[0], found[1]

    return function
