"""Divergences from a teacher, against values by hand, identities and exact gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from steps import LENGTHS, MASK, cut, numbers, whole

from isotrain.algorithms.distillation import (
    DIVERGENCES,
    distillation_advantages,
    distillation_loss,
    divergence,
    sampled_divergence,
)
from isotrain.algorithms.policy_losses import reinforce
from isotrain.models.packed import TokenHead

NAMES = pytest.mark.parametrize("name", DIVERGENCES)
P, Q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]


def logits(seed: int, rows: int = 5, vocabulary: int = 7) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The policy is P, the teacher Q; each moves a quarter of the mass by a factor of two.
        ("forward-kl", 0.25 * math.log(2)),
        ("reverse-kl", 0.25 * math.log(2)),
        ("jsd", 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
    ],
)
def test_by_hand(device_type: str, name: str, expected: float) -> None:
    policy, teacher = (torch.tensor([p], device=device_type).log() for p in (P, Q))
    assert divergence(name, None, policy, teacher).item() == pytest.approx(expected, rel=1e-5)


@NAMES
def test_nothing_between_a_model_and_itself(name: str) -> None:
    assert divergence(name, None, logits(0), logits(0) + 3.0).abs().max() < 1e-12
    assert (divergence(name, None, logits(0), logits(1)) > 0).all()


@NAMES
def test_fewer_tokens_are_a_lower_bound_that_grows(name: str) -> None:
    """The others count as one token: nothing is gained by moving mass beyond the teacher's best."""
    by_k = [divergence(name, k, logits(0), logits(1)) for k in (1, 2, 4, 6)]
    full = divergence(name, None, logits(0), logits(1))
    for fewer, more in zip(by_k, [*by_k[1:], full], strict=True):
        assert (fewer <= more + 1e-12).all() and (fewer >= 0).all()
    torch.testing.assert_close(by_k[-1], full)  # one token is left over: itself
    assert torch.equal(divergence(name, 7, logits(0), logits(1)), full)


@NAMES
def test_padded_vocabularies_are_compared_where_both_are(name: str) -> None:
    padded = F.pad(logits(1), (0, 3), value=50.0)
    assert torch.equal(
        divergence(name, None, logits(0), padded), divergence(name, None, logits(0), logits(1))
    )


@NAMES
@pytest.mark.parametrize("top_k", [None, 2])
def test_gradcheck(name: str, top_k: int | None) -> None:
    policy = logits(0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: divergence(name, top_k, x, logits(1)), (policy,))


def test_the_policy_gradient_is_that_of_the_reverse_kl() -> None:
    """In expectation over the policy's own samples: each token weighted by how likely it is."""
    policy = logits(0, rows=1).requires_grad_()
    (exact,) = torch.autograd.grad(divergence("reverse-kl", None, policy, logits(1, rows=1)).sum(), policy)
    logp_V, teacher_V = policy.log_softmax(-1)[0], logits(1, rows=1).log_softmax(-1)[0]
    advantages_V = distillation_advantages(logp_V, teacher_V)
    assert not advantages_V.requires_grad
    expected_loss = -(logp_V.detach().exp() * advantages_V * logp_V).sum()
    (sampled,) = torch.autograd.grad(expected_loss, policy)
    torch.testing.assert_close(sampled, exact)


def test_advantages_enter_the_policy_loss_as_any_others() -> None:
    share = whole([3], [1, 0, 1])
    logp_N = torch.tensor([-1.0, -9.0, -2.0], requires_grad=True)
    advantages_N = distillation_advantages(logp_N, torch.tensor([-1.5, 5.0, -1.0]))
    assert advantages_N.tolist() == [-0.5, 14.0, 1.0]
    loss, _ = reinforce(logp_N, logp_N.detach(), advantages_N, share)
    loss.backward()
    assert logp_N.grad is not None and logp_N.grad.tolist() == pytest.approx([0.25, 0.0, -0.5])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_loss_shares_add_up_and_do_not_see_beyond_the_mask(estimator: str) -> None:
    share = whole(LENGTHS, MASK)
    logp_N = torch.where(share.mask_N, numbers(0), torch.nan).requires_grad_()
    teacher_N = torch.where(share.mask_N, numbers(1), -torch.inf)

    def loss(part: slice | torch.Tensor, of: object) -> torch.Tensor:
        values_N = sampled_divergence(logp_N[part], teacher_N[part], of, estimator)  # type: ignore[arg-type]
        return distillation_loss(values_N, of, coefficient=0.5, aggregation="token-mean")[0]  # type: ignore[arg-type]

    together = loss(slice(None), share)
    apart = torch.stack([loss(at, part) for part, at in cut(share, [[2], [1, 0]])]).sum()
    torch.testing.assert_close(together, apart)
    together.backward()
    assert logp_N.grad is not None and torch.isfinite(logp_N.grad).all()


@NAMES
@pytest.mark.parametrize("top_k", [None, 3])
def test_chunks_of_the_head_change_nothing(device_type: str, name: str, top_k: int | None) -> None:
    """Against one matrix of all logits and torch's own derivative."""
    draw = torch.Generator().manual_seed(4)
    hidden_ND, other_ND = (torch.randn(10, 6, generator=draw).to(device_type) for _ in range(2))
    weight_VD, other_VD = (torch.randn(11, 6, generator=draw).to(device_type) for _ in range(2))
    grad_N = torch.randn(10, generator=draw).to(device_type)
    compare, targets_N = (
        partial(divergence, name, top_k),
        torch.zeros(10, dtype=torch.long, device=device_type),
    )
    results = []
    for chunk in (4, 12, 400):
        leaves = hidden_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()
        head = TokenHead(*leaves, targets_N, chunk)
        teacher = TokenHead(other_ND, other_VD, targets_N, chunk)
        values_N = head.divergences(teacher, compare, temperature=0.7)
        results.append((values_N.detach(), *torch.autograd.grad(values_N, leaves, grad_N)))
    leaves = hidden_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    plain_N = compare(leaves[0] @ leaves[1].T / 0.7, other_ND @ other_VD.T / 0.7)
    expected = (plain_N.detach(), *torch.autograd.grad(plain_N, leaves, grad_N))
    for result in results:
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
