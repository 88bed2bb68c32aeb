"""The reference engine sees: its log-probs are those of the packed forward, whatever shares a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_vision import TOLERANCE, engine_of

from isotrain.data.packing import pack_trajectories
from isotrain.data.pictures import Picture
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.weights.check import TOLERANCE as WEIGHT_TOLERANCE
from isotrain.weights.check import WeightCheck, check_pictures
from isotrain.weights.send import SendOrder, WeightSender
from vision_models import FAMILIES, make_vlm, samples_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vlm(tmp_path_factory.mktemp(request.param), request.param)


def requests_of(directory: Path) -> tuple[list[Request], dict[int, tuple[Picture, ...]]]:
    """Two responses to each of three prompts: of one picture, two, and none."""
    samples, prompts = samples_of(directory)
    requests = [
        Request(k // 2, k // 2, k % 2, 7 + k, s.tokens_T[:n], pictures=s.pictures)
        for k, (s, n) in enumerate(zip(samples, prompts, strict=True))
    ]
    return requests, {request.row: request.pictures for request in requests}


def generated(directory: Path, device_type: str, requests: list[Request], at_once: int) -> list[Trajectory]:
    engine = HfEngine(
        directory, name="engine", dtype="float32", device=torch.device(device_type), batch=at_once
    )
    done = list(engine.generate(requests, Sampling(max_tokens=9)))
    return sorted(done, key=lambda t: (t.row, t.sample))


def test_its_log_probs_are_the_trainers(directory: Path, device_type: str) -> None:
    requests, pictures = requests_of(directory)
    together = generated(directory, device_type, requests, 6)
    one_by_one = generated(directory, device_type, requests, 1)
    assert [t.tokens_T.tolist() for t in together] == [t.tokens_T.tolist() for t in one_by_one]
    assert [t.pictures for t in together] == [tuple(p.digest for p in pictures[t.row]) for t in together]
    with engine_of(directory, device_type) as engine:
        for shared in (False, True):
            batch = pack_trajectories(together, range(6), shared, pictures.__getitem__)
            (logp_N,) = engine.infer([batch.packed], lambda head: head.logps())
            assert (logp_N.cpu() - batch.rollout_logp_N).abs().max() < TOLERANCE
    blind = generated(directory, device_type, [replace(request, pictures=()) for request in requests], 6)
    differences = [np.abs(a.logp_N[0] - b.logp_N[0]) for a, b in zip(together, blind, strict=True)]
    assert min(differences[:4]) > 1e-3, "pictures do not matter to this model"
    assert max(differences[4:]) < TOLERANCE


def test_refuses_responses_to_other_pictures(directory: Path) -> None:
    requests, pictures = requests_of(directory)
    trajectories = generated(directory, "cpu", requests[:2], 2)
    altered = replace(pictures[0][0], digest="0" * 64)
    with pytest.raises(DataError, match=r"row 0 saw other pictures \([0-9a-f]{12}\) than .* \(0{12}\)"):
        pack_trajectories(trajectories, [0, 1], True, lambda row: (altered,))
    with pytest.raises(DataError, match=r"than data\.train has there \(none\)"):
        pack_trajectories(trajectories, [0, 1])


def test_the_weight_check_finds_a_tower_that_did_not_follow(directory: Path, device_type: str) -> None:
    requests, pictures = requests_of(directory)
    prompts = [requests[2 * row].prompt_P for row in sorted(pictures)]
    order = SendOrder(1, "file", "", 0, 1.0, check_prompts=prompts)
    rollout = HfEngine(directory, name="engine", dtype="float32", device=torch.device(device_type), batch=6)
    logps = np.concatenate(rollout.logps(prompts, check_pictures(prompts, pictures.__getitem__)))
    blind = np.concatenate(rollout.logps(prompts))
    with engine_of(directory, device_type) as engine:
        sees = WeightSender(engine, torch.float32, lambda but_weights: None, pictures.__getitem__)
        blinded = WeightSender(engine, torch.float32, lambda but_weights: None)
        check, unseeing = WeightCheck(WEIGHT_TOLERANCE["float32"]), WeightCheck(WEIGHT_TOLERANCE["float32"])
        before, before_blind = sees._check_logps(order), blinded._check_logps(order)
        assert before is not None and before_blind is not None
        assert np.abs(before - logps).max() < TOLERANCE and not check.problem(0, 1, logps, before)
        assert not unseeing.problem(0, 1, blind, before_blind)
        with torch.no_grad():
            for parameter in engine.model.vision.tower.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        after, after_blind = sees._check_logps(order), blinded._check_logps(order)
        assert after is not None and after_blind is not None
        assert "differ from the trained model" in check.problem(0, 2, logps, after)
        assert not unseeing.problem(0, 2, blind, after_blind), "without pictures it passes unseen"
