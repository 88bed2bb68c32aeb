"""`rollout.exact`: tokens of the reference engine are drawn from the ranks' own forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.data.packing import pack_trajectories
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_alone
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.build import build_rollout
from isotrain.rollout.hf import HfEngine
from isotrain.rollout.sampling import gumbel
from isotrain.weights.file import write_update

PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 17, 30)]
REQUESTS = [
    Request(row=row, prompt_index=row, sample=sample, seed=1000 * row + sample, prompt_P=prompt)
    for row, prompt in enumerate(PROMPTS)
    for sample in range(3)
]


def section(tiny: Path, dtype: str, head: str = "model") -> ModelSection:
    return ModelSection.model_validate({"path": str(tiny / "model"), "dtype": dtype, "head_dtype": head})


def build(model: ModelSection, device_type: str, exact: bool) -> Any:
    return build_rollout(
        RolloutSection(engine="hf", exact=exact, max_tokens=24),
        model.path,
        model.dtype,
        device=choose_device(device_type),
        max_prompt=40,
        seed=0,
        name="e",
        head_float32=model.head_dtype == "float32",
        trained=model,
    )


def written(engine: HfEngine, sampling: Sampling) -> list[Trajectory]:
    return sorted(engine.generate(REQUESTS, sampling), key=lambda t: (t.row, t.sample))


def trained(
    model: ModelSection, device_type: str, trajectories: list[Trajectory], temperature: float
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Log-probs of each response in one micro-batch of all, as a rank computes them, and its logits."""
    policy = build_alone(model, device=choose_device(device_type))
    batch = pack_trajectories(trajectories, range(len(trajectories)), share_prompts=True)
    (logp_N,) = policy.infer([batch.packed], lambda head: head.logps(temperature))
    (parts,) = policy.infer([batch.packed], lambda head: [logits for _, logits in head.logits()])
    logits = torch.cat(parts).cpu().split(list(batch.lengths))
    for logp, logits_NV in zip(logp_N.cpu().split(list(batch.lengths)), logits, strict=True):
        yield logp.numpy(), logits_NV


@pytest.mark.parametrize(
    ("dtype", "head"), [("float32", "model"), ("bfloat16", "model"), ("bfloat16", "float32")]
)
def test_log_probs_are_the_ranks_bit_for_bit(tiny: Path, device_type: str, dtype: str, head: str) -> None:
    model, sampling = section(tiny, dtype, head), Sampling(max_tokens=24, temperature=0.8)
    trajectories = written(build(model, device_type, exact=True), sampling)
    assert [(t.row, t.sample) for t in trajectories] == [(r.row, r.sample) for r in REQUESTS]
    for t, (logp_N, logits_NV) in zip(
        trajectories, trained(model, device_type, trajectories, 0.8), strict=True
    ):
        assert np.array_equal(t.logp_N, logp_N)
        noise_NV = gumbel([t.seed] * len(logp_N), range(len(logp_N)), logits_NV.shape[1])
        drawn_N = ((logits_NV / 0.8).log_softmax(-1) + noise_NV).argmax(-1)
        assert drawn_N.tolist() == t.response_N.tolist()
        assert t.finished == (t.tokens_T[-1] == 2) and (t.finished or len(t.response_N) == 24)
    if dtype == "bfloat16":
        plain = written(build(model, device_type, exact=False), sampling)
        expected = [logp_N for logp_N, _ in trained(model, device_type, plain, 0.8)]
        assert max(np.abs(t.logp_N - logp_N).max() for t, logp_N in zip(plain, expected, strict=True)) > 1e-3


def test_a_pass_with_a_cache_decides_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong logits while decoding cost time, and change no token."""
    model = section(tiny, "float32")
    right = written(build(model, "cpu", exact=True), Sampling(max_tokens=6))
    step = HfEngine._step
    monkeypatch.setattr(HfEngine, "_step", lambda self, *inputs: -step(self, *inputs))
    plain = written(build(model, "cpu", exact=False), Sampling(max_tokens=6))
    assert [t.tokens_T.tolist() for t in plain] != [t.tokens_T.tolist() for t in right]
    corrected = written(build(model, "cpu", exact=True), Sampling(max_tokens=6))
    for a, b in zip(corrected, right, strict=True):
        assert np.array_equal(a.tokens_T, b.tokens_T) and np.array_equal(a.logp_N, b.logp_N)
        assert len(a.logp_N) == len(a.version_N) == len(a.response_N)


def test_greedy_and_cut_responses(tiny: Path) -> None:
    model = section(tiny, "bfloat16")
    engine = build(model, "cpu", exact=True)
    greedy = written(engine, Sampling(max_tokens=8, temperature=0.0))
    for t, (logp_N, logits_NV) in zip(greedy, trained(model, "cpu", greedy, 1.0), strict=True):
        assert t.response_N.tolist() == logits_NV.argmax(-1).tolist() and np.array_equal(t.logp_N, logp_N)
    for t in written(engine, Sampling(max_tokens=8, top_k=1)):
        assert (t.logp_N == 0).all()  # the one token that is left


def test_new_weights_reach_the_ranks_forward(tiny: Path) -> None:
    model = section(tiny, "float32")
    engine = build(model, "cpu", exact=True)
    policy = build_alone(model, device=choose_device("cpu"))
    tensors = [(n.removeprefix("pretrained."), 1.1 * p) for n, p in policy.parameters.items()]
    (before,) = engine.logps(PROMPTS[-1:])
    engine.update_weights(write_update(tensors, 1))
    (after,) = engine.logps(PROMPTS[-1:])
    assert not np.allclose(before, after, atol=1e-3)
    for t in engine.generate(REQUESTS[:1], Sampling(max_tokens=8)):
        np.testing.assert_array_equal(engine.logps([t.tokens_T])[0][2:], t.logp_N)
        assert (t.version_N == 1).all()
