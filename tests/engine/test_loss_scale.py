"""float16 and the scale of its loss: what would vanish is kept, what overflows is left out, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import pytest
import torch
from jobs import LR, Job, policy_objective, sample, updates

from isotrain.data.packing import pack
from isotrain.device.detect import choose_device
from isotrain.engine.engine import Loss, LossScale, TrainingEngine
from isotrain.engine.world import join_world
from isotrain.models.packed import TokenHead

Outcome = Callable[[str, int], Path]

BATCHES = [pack([sample(12, 1), sample(20, 2)]), pack([sample(9, 3)])]
# As if the step had so many times its tokens: each one's gradient is below the least number of float16.
MANY = 10**7


@pytest.fixture
def job(tiny: Path, device_type: str) -> Iterator[Job]:
    device = choose_device(device_type)
    with join_world(device) as world:
        yield Job(device, world, tiny / "model")


def early(head: TokenHead, loss_tokens: int) -> torch.Tensor:
    """The loss whose gradient is taken in the forward pass."""
    return head.nll_share(loss_tokens * MANY)


def late(head: TokenHead, loss_tokens: int) -> torch.Tensor:
    return -head.logps().sum() / (loss_tokens * MANY)


def test_course_of_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (LossScale().value, LossScale.growth_interval) == (65536, 2000), "torch's"
    monkeypatch.setattr(LossScale, "growth_interval", 3)
    scale, values = LossScale(4.0), []
    for finite in (True, True, False, True, True, True, True, False, False, False, False):
        scale.update(finite)
        values.append(scale.value)
    assert values == [4, 4, 2, 2, 2, 4, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("loss", [early, late])
def test_gradients_that_vanish_are_kept_by_the_scale(job: Job, loss: Loss) -> None:
    """Beside float32: right with the scale, and nothing without it."""

    def gradient(engine: TrainingEngine) -> float:
        result = engine.step(BATCHES, loss, LR)
        assert result.applied
        return result.grad_norm

    expected = gradient(job.policy())
    assert 0 < expected < 1e-6
    assert gradient(job.policy(dtype="float16")) == pytest.approx(expected, rel=0.01)
    unscaled = job.policy(dtype="float16")
    unscaled.loss_scale = None
    assert gradient(unscaled) < 0.01 * expected


@pytest.mark.parametrize("largest", [0.0, 0.1])
@pytest.mark.parametrize("loss", [early, late])
def test_a_scale_changes_no_bit(job: Job, loss: Loss, largest: float) -> None:
    """In float32, whose range no scale leaves: the norm, what is clipped, and the weights after it."""
    results = []
    for scale in (None, LossScale(2.0**13)):
        engine = job.policy()
        engine.max_grad_norm, engine.loss_scale = largest / MANY, scale
        steps = [engine.step(BATCHES, loss, LR) for _ in range(3)]
        results.append(([(step.loss, step.grad_norm) for step in steps], jobs.local(engine)))
        assert steps[0].grad_norm > engine.max_grad_norm, "clipped, or not limited"
    assert results[0][0] == results[1][0] and jobs.same(results[0][1], results[1][1])


def test_updates_that_overflow_are_left_out(job: Job) -> None:
    """Until the scale is small enough; then training is what it is with this scale from the start."""
    engine, plain = job.policy(dtype="float16"), job.policy(dtype="float16")
    engine.loss_scale, before = LossScale(2.0**28), jobs.local(engine)
    work = [(batch, policy_objective(batch)) for batch in BATCHES]
    for lost in range(1, 29):
        result = engine.update(work, LR)
        if result.applied:
            break
        assert result.overflowed and math.isfinite(result.loss)
        assert result.scale_metrics == {"loss_scale": 2.0 ** (29 - lost), "loss_scale_skipped": lost}
        assert jobs.same(jobs.local(engine), before)
    assert 1 < lost < 28 and not result.overflowed
    assert engine.loss_scale == LossScale(2.0 ** (29 - lost), finite=1, skipped=lost - 1)
    plain.loss_scale = LossScale(engine.loss_scale.value)
    (expected,) = updates(plain, policy_objective, BATCHES, steps=1)
    assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    assert jobs.same(jobs.local(engine), jobs.local(plain))


@pytest.mark.parametrize(("fault", "scale"), [("loss", 65536.0), ("gradient", 1.0)])
def test_a_scale_is_no_excuse_for_other_faults(job: Job, fault: str, scale: float) -> None:
    engine = job.policy(dtype="float16")
    engine.loss_scale = LossScale(scale)

    def loss(head: TokenHead, loss_tokens: int) -> torch.Tensor:
        share = head.nll_share(loss_tokens)
        # The root of 0 is finite, its slope is not.
        return share / 0 if fault == "loss" else share + (share - share.detach()).abs().sqrt()

    result = engine.step(BATCHES, loss, LR)
    assert math.isfinite(result.loss) == (fault == "gradient")
    assert not result.applied and not result.overflowed and engine.loss_scale.skipped == 0


def test_ranks_skip_the_same_updates(outcome: Outcome, device_type: str) -> None:
    """1 rank == 2 ranks, with overflows on the way."""
    (alone,) = jobs.results(outcome(device_type, 1), 1)
    first, second = (found["float16"] for found in jobs.results(outcome(device_type, 2), 2))
    assert torch.equal(first, second)
    expected = alone["float16"]
    for skipped, made in (first[0].tolist(), expected[0].tolist()):
        assert skipped == made - jobs.STEPS > 0
    torch.testing.assert_close(first[1:], expected[1:], rtol=5e-3, atol=1e-4)
