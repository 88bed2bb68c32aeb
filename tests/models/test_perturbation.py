"""Changes of the last digit: as small as they can be, and the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine, build_reference
from isotrain.engine.world import join_world
from isotrain.models.weights import perturb
from isotrain.recipe.schema import ModelSection, OptimizerSection


def test_weights_move_by_one_unit_in_the_last_place() -> None:
    before = torch.randn(1000)
    weight = nn.Parameter(before.clone())
    perturb([("w", weight)], seed=1)
    moved = weight.detach()
    assert ((moved - before).abs() <= 2 * torch.finfo(torch.float32).eps * before.abs()).all()
    assert (moved != before).float().mean() > 0.99
    assert 0.4 < (moved > before).float().mean() < 0.6


def test_seed_and_name_decide() -> None:
    def moved(name: str, seed: int) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(64))
        perturb([(name, weight)], seed)
        return weight.detach()

    assert torch.equal(moved("a", 1), moved("a", 1))
    assert not torch.equal(moved("a", 1), moved("a", 2))
    assert not torch.equal(moved("a", 1), moved("b", 1))


@pytest.mark.parametrize("seed", [0, 3])
def test_policy_and_reference_stay_the_same_model(tiny: Path, device_type: str, seed: int) -> None:
    device = choose_device(device_type)
    model = ModelSection(path=str(tiny / "model"), dtype="float32", perturbation=seed)
    plain = ModelSection(path=str(tiny / "model"), dtype="float32")
    with join_world(device) as world:
        policy = build_engine(model, OptimizerSection(), device=device, world=world, seed=1)
        reference = build_reference(model, device=device, world=world)
        before = build_reference(plain, device=device, world=world)
        for name, weight in policy.model.named_parameters():
            assert torch.equal(weight, reference.model.get_parameter(name))
            assert torch.equal(weight, before.model.get_parameter(name)) == (seed == 0)
