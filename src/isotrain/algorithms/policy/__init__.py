"""Policy losses by name."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.algorithms.aggregate import Loss
from isotrain.algorithms.policy.cispo import cispo
from isotrain.algorithms.policy.clip import clip
from isotrain.algorithms.policy.gspo import gspo
from isotrain.algorithms.policy.reinforce import reinforce

# All are called as `loss(logp_N, old_logp_N, advantages_N, share, **options)`.
POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
