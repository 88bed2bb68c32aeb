"""The formulas of online algorithms written out over full logits and lists, one trajectory at a time.

N: response tokens of a trajectory, T: with its prompt, V: vocabulary. Nothing here is packed, and nothing is
shared with the package: only the recipe's sections are read. Lists have one entry for each trajectory; after
`written`, only the tokens that the policy wrote are left in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from isotrain.data.trajectory import Trajectory

Tensors = list[torch.Tensor]
Weights = dict[str, torch.Tensor]


def written(values: Sequence[torch.Tensor], trajectories: Sequence[Trajectory]) -> Tensors:
    return [value[t.mask_N] for value, t in zip(values, trajectories, strict=True)]


def load(model: Any, weights: Weights) -> None:
    loaded = model.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}, loaded
    model.zero_grad()


def ask_policy(
    model: Any, weights: Weights, trajectories: Sequence[Trajectory], temperature: float
) -> tuple[Tensors, Tensors]:
    """Log-probs and entropies of the written tokens, with gradients."""
    load(model, weights)
    logps, entropies = [], []
    for trajectory in trajectories:
        ids_T = torch.from_numpy(trajectory.tokens_T).long()
        logp_TV = (model(ids_T[None]).logits[0] / temperature).log_softmax(-1)
        logp_NV = logp_TV[trajectory.prompt_length - 1 : -1]
        logps.append(logp_NV.gather(1, ids_T[trajectory.prompt_length :, None])[:, 0])
        entropies.append(-(logp_NV.exp() * logp_NV).sum(-1))
    return written(logps, trajectories), written(entropies, trajectories)


def ask_critic(model: Any, weights: Weights, trajectories: Sequence[Trajectory]) -> Tensors:
    """Values of the states before each written token, with gradients."""
    load(model, weights)
    values = []
    for trajectory in trajectories:
        hidden_TD = model.base_model(torch.from_numpy(trajectory.tokens_T).long()[None])[0][0]
        values.append(model.score(hidden_TD)[trajectory.prompt_length - 1 : -1, 0])
    return written(values, trajectories)


def gradient_norm(model: Any, loss: torch.Tensor) -> float:
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def divergence(estimator: str, logp: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    d = (ref - logp).clamp(-20, 20)
    return {"k1": -d, "abs": d.abs(), "k2": d**2 / 2, "k3": (d.exp() - d - 1).clamp(-10, 10)}[estimator]


def shaped(score: float, length: int, longest: int, overlong: Any) -> float:
    """A score after what a response loses for its length."""
    if not overlong.buffer:
        return score
    return score - overlong.factor * max(0, length - (longest - overlong.buffer)) / overlong.buffer


def advantages(
    algorithm: Any,
    scores: Sequence[float],
    penalties: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    greedy: Sequence[float],
    n: int,
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns of the written tokens, which `penalties` and `values` are of as well.

    Penalties have their coefficient in them; groups are `n` trajectories that follow each other.
    """
    rewards = [score - sum(own) for score, own in zip(scores, penalties, strict=True)]
    found: list[list[float]] = []
    returns: list[list[float]] = []
    for r, (score, own_penalties, own_values) in enumerate(zip(scores, penalties, values, strict=True)):
        group = rewards[r // n * n : r // n * n + n]
        centred, count = rewards[r] - sum(group) / n, len(own_penalties)
        tokens = [-penalty for penalty in own_penalties]
        if tokens:
            tokens[-1] += score
        if algorithm.name == "ppo":
            own = _gae(tokens, own_values, algorithm.gamma, algorithm.lam)
        elif algorithm.name == "reinforce++":
            own = _to_come(tokens, algorithm.gamma)
        elif algorithm.name == "remax":
            own = _to_come(tokens, 1.0)
        elif algorithm.name == "rloo":
            own = [n / (n - 1) * centred] * count
        elif algorithm.name == "reinforce++-baseline":
            own = [centred] * count
        else:
            scale = np.std(group, ddof=1) + 1e-6 if algorithm.scale_by_std else 1.0
            own = [float(centred / scale)] * count
        returns.append([a + v for a, v in zip(own, own_values, strict=True)])
        found.append([a - greedy[r // n] for a in own] if algorithm.name == "remax" else own)
    if algorithm.name in ("ppo", "reinforce++", "reinforce++-baseline"):
        everything = np.array([value for own in found for value in own])
        mean, scale = everything.mean(), 1 / math.sqrt(everything.var(ddof=1) + 1e-8)
        found = [[float((value - mean) * scale) for value in own] for own in found]
    return found, returns


def _gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    found = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        error = rewards[t] + gamma * next_value - values[t]
        found[t] = next_advantage = error + gamma * lam * next_advantage
        next_value = values[t]
    return found


def _to_come(rewards: Sequence[float], gamma: float) -> list[float]:
    return [sum(gamma**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]


def aggregate(name: str, values: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    """The losses of a mini-batch's written tokens as one number; trajectories without any do not count."""
    values = [value for value in values if len(value)]
    if name == "token-mean":
        return torch.cat(values).mean()
    if name == "seq-mean-token-mean":
        return torch.stack([value.mean() for value in values]).mean()
    total = torch.stack([value.sum() for value in values]).mean()
    return total / longest if name == "seq-mean-token-sum-norm" else total


def policy_losses(
    loss: Any, logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one trajectory's written tokens, and at which of them the clip and the dual clip hold."""
    low, high = 1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high
    ratio, never = (logp - old).clamp(-20, 20).exp(), torch.zeros(len(logp))
    if loss.name == "gspo":
        ratio = (logp - old).mean().exp().detach() * (logp - logp.detach()).exp()
    if loss.name == "reinforce":
        return -advantage * logp, never, never
    if loss.name == "cispo":
        held = ratio.detach().clamp(low, high)
        return -held * advantage * logp, (held != ratio).float(), never
    if loss.name == "gmpo":
        moved = logp - old
        upper, lower = moved.clamp(max=loss.clip_ratio_high), moved.clamp(min=-loss.clip_ratio_low)
        bound = torch.where(advantage > 0, upper, lower)
        value = bound.mean().exp().detach() * (bound - bound.detach()).exp()
        return -advantage * value, (bound != moved).float(), never
    if loss.name == "sapo":
        tau = torch.where(advantage > 0, loss.tau_pos, loss.tau_neg)
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp()), never, never
    if loss.name.startswith("dppo"):
        p, q = torch.distributions.Bernoulli(logp.detach().exp()), torch.distributions.Bernoulli(old.exp())
        distance = torch.distributions.kl_divergence(q, p)
        if loss.name == "dppo-tv":
            distance = (p.probs - q.probs).abs()
        wanted = torch.where(advantage > 0, logp > old, logp < old)
        out = wanted & (distance > torch.where(advantage > 0, loss.clip_ratio_high, loss.clip_ratio_low))
        weight = ratio.detach().clamp(max=loss.max_ratio)
        kept = torch.where(out, 0.0, -weight * advantage * logp)
        return kept, out.float(), (~out & (ratio.detach() > loss.max_ratio)).float()
    free, held = -advantage * ratio, -advantage * ratio.clamp(low, high)
    worse = torch.maximum(free, held)
    if loss.name == "gspo" or loss.dual_clip is None:
        return worse, (held > free).float(), never
    limit = -advantage * loss.dual_clip
    dual = (advantage < 0) & (worse > limit)
    return torch.where(dual, limit, worse), (held > free).float(), dual.float()


def correction(section: Any, old: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """Weights of one trajectory's written tokens."""
    log_ratio = old - rollout
    kept = rejection(section.reject, log_ratio)
    if section.level == "off":
        return kept
    if section.level == "sequence":
        log_ratio = log_ratio.sum().expand(len(old))
    if section.level == "geometric":
        log_ratio = log_ratio.mean().expand(len(old))
    ratio = log_ratio.clamp(-20, 20).exp()
    if section.mode == "truncate":
        return kept * ratio.clamp(section.lower, section.upper)
    low = 1 / section.upper if section.lower is None else section.lower
    return kept * torch.where((ratio < low) | (ratio > section.upper), 0.0, ratio)


def rejection(reject: dict[str, Any], log_ratio: torch.Tensor) -> torch.Tensor:
    """1 for tokens that are kept, token by token and bound by bound."""
    kept = torch.ones(len(log_ratio))
    for name, bound in reject.items():
        low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
        for token, own in enumerate(log_ratio.tolist()):
            values = [own] if name.startswith("token") else log_ratio.tolist()
            if name.endswith("k1"):
                # A ratio of probabilities, of their products or of their geometric means.
                outside = not low <= math.exp(sum(values) / (len(values) if "mean" in name else 1)) <= high
            else:
                distances = [v * v / 2 if name.endswith("k2") else math.exp(v) - v - 1 for v in values]
                whole = max(distances) if "max" in name else sum(distances)
                outside = whole / (len(values) if "mean" in name else 1) > bound
            if outside:
                kept[token] = 0
    return kept


def value_losses(
    clip: float | None, values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one trajectory's written tokens, and at which of them the clip holds the value."""
    free = (values - returns) ** 2
    if clip is None:
        return free / 2, torch.zeros(len(free))
    held = (torch.clamp(values, old - clip, old + clip) - returns) ** 2
    return torch.maximum(free, held) / 2, (held > free).float()
