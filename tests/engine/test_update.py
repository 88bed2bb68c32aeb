"""Updates by an objective: their numbers do not depend on how the work is cut, nor on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import pytest
import torch
from jobs import SAMPLES, TOKENS, Job, Tensors, numbers, policy_objective, updates
from transformers import AutoModelForCausalLM

from isotrain.data.packing import PackedBatch, pack
from isotrain.device.detect import choose_device
from isotrain.engine.engine import Objective
from isotrain.engine.world import join_world
from isotrain.models.packed import TokenHead

Outcome = Callable[[str, int], Path]


@pytest.fixture
def job(tiny: Path, device_type: str) -> Iterator[Job]:
    device = choose_device(device_type)
    with join_world(device) as world:
        yield Job(device, world, tiny / "model")


def by_hand(tiny: Path) -> tuple[float, float, float]:
    """Loss, gradient norm and entropy of the first update, sample by sample, from full logits."""
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    loss, entropy = torch.zeros(()), torch.zeros(())
    for one in SAMPLES:
        tokens_T = torch.from_numpy(one.tokens_T).long()
        written_T = torch.from_numpy(one.mask_T)[1:]
        logits_NV = model(input_ids=tokens_T[None]).logits[0, :-1][written_T] / 0.7
        targets_N = tokens_T[1:][written_T]
        logp_NV = logits_NV.log_softmax(-1)
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
        logp_N = logp_NV.gather(1, targets_N[:, None])[:, 0]
        loss = loss - (targets_N.float().sin() * logp_N + 0.02 * entropy_N).sum() / TOKENS
        entropy = entropy + entropy_N.sum() / TOKENS
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return loss.item(), math.sqrt(sum(squares)), entropy.item()


def test_loss_gradient_and_metrics_equal_full_logits(tiny: Path, job: Job) -> None:
    (result, *_) = updates(job.policy(), policy_objective, [pack(SAMPLES[:2]), pack(SAMPLES[2:])], steps=1)
    loss, norm, entropy = by_hand(tiny)
    assert result.applied
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert list(result.metrics) == ["entropy", "tokens"]
    assert result.metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert result.metrics["tokens"] == TOKENS


def test_accumulation_changes_nothing(job: Job) -> None:
    """1 micro-batch == 4 of them, one of which is empty."""
    cuts: list[list[PackedBatch]] = [
        [pack(SAMPLES)],
        [pack(SAMPLES[4:]), pack([]), pack(SAMPLES[1:4]), pack(SAMPLES[:1])],
    ]
    whole, parts = (numbers(updates(job.policy(), policy_objective, batches)) for batches in cuts)
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["policy", "lora", "critic"])
def test_the_number_of_ranks_changes_nothing(outcome: Outcome, device_type: str, kind: str) -> None:
    """1 rank == 2 ranks, of which one has an empty micro-batch; both know the same numbers."""
    (alone,) = jobs.results(outcome(device_type, 1), 1)
    first, second = jobs.results(outcome(device_type, 2), 2)
    assert torch.equal(first[kind], second[kind])
    torch.testing.assert_close(first[kind], alone[kind], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(alone[kind][0], alone[kind][-1], rtol=1e-3), "nothing was learned"


def test_the_devices_agree(outcome: Outcome) -> None:
    on_host, on_device = (jobs.results(outcome(device_type, 1), 1)[0] for device_type in ("cpu", "npu"))
    for kind in ("policy", "lora", "critic"):
        torch.testing.assert_close(on_host[kind], on_device[kind], rtol=1e-5, atol=1e-5)


def not_finite(batch: PackedBatch) -> Objective:
    def objective(head: TokenHead) -> tuple[torch.Tensor, Tensors]:
        loss, metrics = policy_objective(batch)(head)
        return loss * math.nan, metrics

    return objective


def test_an_update_that_is_not_finite_is_left_out(job: Job) -> None:
    engine, untouched = job.policy(), job.policy()
    (result,) = updates(engine, not_finite, job.batches, steps=1)
    assert not result.applied and math.isnan(result.loss)
    assert result.metrics["tokens"] == TOKENS
    results = [updates(e, policy_objective, job.batches, steps=1) for e in (engine, untouched)]
    assert results[0] == results[1]
    assert jobs.same(jobs.local(engine), jobs.local(untouched))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inference_is_without_dropout_and_changes_nothing(job: Job, dtype: str) -> None:
    results = []
    for asks in (False, True):
        job.device.seed(0)
        engine = job.policy(lora={"rank": 4, "dropout": 0.5}, dtype=dtype)
        updates(engine, policy_objective, job.batches, steps=2)
        if asks:
            first, again = (engine.infer([pack([]), *job.batches], TokenHead.logps) for _ in range(2))
            assert [len(logp_N) for logp_N in first] == [0, TOKENS]
            assert torch.equal(first[1], again[1]) and not first[1].requires_grad
            assert first[1].device.type == job.device.type
        results.append((updates(engine, policy_objective, job.batches, steps=1), jobs.local(engine)))
    assert results[0][0] == results[1][0] and jobs.same(results[0][1], results[1][1])


def test_the_first_ratio_is_exactly_one(job: Job) -> None:
    """Old log-probs are inferred, new ones come with entropies and gradients: the same bits."""
    engine, ratios = job.policy(), []
    (old_N,) = engine.infer(job.batches, lambda head: head.logps(0.7))

    def objective(head: TokenHead) -> tuple[torch.Tensor, Tensors]:
        logp_N, _ = head.logps_and_entropies(0.7)
        ratios.append((logp_N.detach() - old_N).exp())
        return logp_N.sum() * 0, {}

    engine.update([(job.batches[0], objective)], lr=0.0)
    assert torch.equal(ratios[0], torch.ones_like(ratios[0]))


def test_the_base_model_below_adapters_is_the_reference(outcome: Outcome, device_type: str) -> None:
    for ranks in (1, 2):
        for found in jobs.results(outcome(device_type, ranks), ranks):
            assert found["base differs"] == 0 and found["adapters differ"] > 0.1


def test_a_reference_is_stored_in_its_compute_type(job: Job) -> None:
    reference = job.reference(dtype="bfloat16")
    assert {p.dtype for p in reference.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in reference.model.parameters())
    (found_N,) = reference.infer(job.batches, TokenHead.logps)
    # What the policy computes from float32 weights: rounded in storage or on the way, it is the same.
    (expected_N,) = job.policy(dtype="bfloat16").infer(job.batches, TokenHead.logps)
    assert found_N.dtype == torch.float32 and torch.equal(found_N, expected_N)
