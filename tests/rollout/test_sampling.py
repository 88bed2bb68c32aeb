"""Draws follow the distribution that temperature, top-k and top-p leave, and depend on the seed alone."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from isotrain.errors import RolloutError
from isotrain.rollout.base import Request, Sampling, trajectory_of
from isotrain.rollout.sampling import draw, gumbel, processed
from isotrain.rollout.vllm import _trajectory

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 0.9, -3.0])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=1.0),
        Sampling(1, temperature=0.5),
        Sampling(1, temperature=2.0, top_k=4),
        Sampling(1, temperature=1.0, top_p=0.8),
        Sampling(1, temperature=1.5, top_k=6, top_p=0.9),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    draws = 20_000
    token_B, logp_B = draw(LOGITS.expand(draws, -1), sampling, list(range(draws)), [0] * draws)
    logp_V = processed(LOGITS[None], sampling)[0].log_softmax(-1)
    assert torch.equal(logp_B, logp_V[token_B])
    expected_V = logp_V.double().exp() * draws
    counts_V = torch.bincount(token_B, minlength=len(LOGITS)).double()
    possible_V = torch.isfinite(logp_V)
    assert counts_V[~possible_V].sum() == 0
    chi2 = float(((counts_V - expected_V) ** 2 / expected_V)[possible_V].sum())
    freedom = int(possible_V.sum()) - 1
    # Wilson and Hilferty: the 0.999 quantile of chi-square.
    assert chi2 < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_what_top_k_and_top_p_keep() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()

    def kept(top_p: float, top_k: int = -1) -> list[bool]:
        return torch.isfinite(processed(logits, Sampling(1, top_p=top_p, top_k=top_k)))[0].tolist()

    assert kept(1.0) == [True] * 4
    assert kept(0.76) == [True, True, True, False]
    assert kept(0.74) == [True, True, False, False]
    assert kept(0.01) == [True, False, False, False]
    assert kept(1.0, top_k=3) == [True, True, True, False]
    # Of the two that top-k leaves, the first has 2/3.
    assert kept(0.7, top_k=2) == [True, True, False, False]
    assert kept(0.6, top_k=2) == [True, False, False, False]


def test_noise_depends_on_seed_and_position_alone() -> None:
    alone = gumbel([7], [3], 50)
    assert torch.equal(gumbel([1, 7, 2], [0, 3, 3], 50)[1:2], alone)
    assert not torch.equal(gumbel([7], [4], 50), alone)
    assert not torch.equal(gumbel([8], [3], 50), alone)
    assert torch.isfinite(gumbel([2**63 + 5], [10**6], 50)).all()


def test_greedy_takes_the_best_at_temperature_one() -> None:
    token_B, logp_B = draw(LOGITS[None], Sampling(1, temperature=0.0, top_k=1), [0], [0])
    assert token_B.tolist() == [0]
    assert torch.equal(logp_B, LOGITS.log_softmax(-1)[:1])


REQUEST = Request(0, 3, 1, 5, np.array([4], np.int32))


@pytest.mark.parametrize("logp", [math.nan, -math.inf])
def test_a_response_without_log_probs_is_refused(logp: float) -> None:
    """Whatever engine made it: ratios to such log-probs would not be numbers either."""
    tokens_N = np.array([7, 8], np.int32)
    with pytest.raises(RolloutError, match=r"prompt 3, response 1: .*log-prob of token 1 is not finite"):
        trajectory_of(REQUEST, tokens_N, np.array([-0.5, logp], np.float32), 0, True)


@pytest.mark.parametrize(
    ("reason", "finished"),
    [("stop", True), ("length", False), ("abort", None), ("error", None), (None, None)],
)
def test_vllm_s_reasons_for_an_end(reason: str | None, finished: bool | None) -> None:
    """A response that vLLM gave up is neither ended nor cut at its longest."""
    logprobs = SimpleNamespace(start_indices=[0, 1], logprobs=[-0.5, -0.25])
    output = SimpleNamespace(token_ids=[7, 8], logprobs=logprobs, finish_reason=reason, stop_reason=None)
    if finished is None:
        with pytest.raises(RolloutError, match="vLLM ended a response with"):
            _trajectory(REQUEST, output, np.zeros(2, np.int32))
    else:
        assert _trajectory(REQUEST, output, np.zeros(2, np.int32)).finished is finished
