"""What another package may bring: a reward, advantages, policy losses; some of them are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NUMBER = 3


def digits(response: str, answer: Any, *, bonus: float = 0.0) -> dict[str, float]:
    """The share of digits in a response, and what was asked for as a bonus."""
    share = sum(character.isdigit() for character in response) / max(1, len(response))
    return {"score": share + bonus, "length": float(len(response))}


def _lazily() -> dict[str, Any]:
    """A reward process imports this file too and needs no torch."""
    from isotrain.algorithms.advantages import Estimator

    def centred(rewards_R: Any, group_R: Any, *, scale: float = 1.0) -> Any:
        return scale * (rewards_R - rewards_R.mean())

    def with_returns(rewards_N: Any, mask_N: Any, lengths: Sequence[int], values_N: Any) -> tuple[Any, Any]:
        return rewards_N - values_N, rewards_N

    return {
        "mean_only": Estimator(centred, per="trajectory"),
        "short": Estimator(lambda rewards_R, group_R: rewards_R[1:], per="trajectory"),
        "with_values": Estimator(with_returns, per="token", needs=("values_N",)),
    }


def __getattr__(name: str) -> Any:
    if name in ("mean_only", "short", "with_values"):
        return _lazily()[name]
    raise AttributeError(name)


def plain(
    logp_N: Any, old_logp_N: Any, advantages_N: Any, share: Any, *, aggregation: str, correction_N: Any
) -> Any:
    """REINFORCE in three lines, as a sum over the step's tokens."""
    loss_N = -share.only(advantages_N) * share.only(logp_N)
    return loss_N.sum() / share.tokens, {"actor/plain": loss_N.detach().sum()}


def per_token(logp_N: Any, *rest: Any, **options: Any) -> Any:
    return logp_N
