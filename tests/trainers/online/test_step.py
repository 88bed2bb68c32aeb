"""Advantages of a rank's micro-batches, estimated together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hand_made_step import FLAT, GREEDY, N_SAMPLES, SCORES

from isotrain.algorithms.advantages import ADVANTAGES
from isotrain.data.packing import pack_trajectories
from isotrain.engine.engine import UpdateResult
from isotrain.trainers.online.step import AdvantageSettings, Micro, estimate, update_means

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"gamma": 0.95, "lam": 0.9},
    "reinforce++": {"gamma": 0.9},
    "remax": {},
}
# One micro-batch is empty, as on a rank that has fewer trajectories than another.
SPLIT = ((0, 7, 4), (), (2,), (1, 3, 5, 6, 8, 9, 10, 11))


def make_micro(index: tuple[int, ...], device_type: str) -> Micro:
    batch = pack_trajectories([FLAT[i] for i in index], index).to(torch.device(device_type))
    draw = torch.Generator().manual_seed(sum(index))
    values_N, old_N, ref_N = torch.randn(3, len(batch.mask_N), generator=draw).to(device_type)
    return Micro(batch, old_logp_N=old_N, ref_logp_N=ref_N, values_N=values_N)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_advantages_do_not_depend_on_micro_batches(device_type: str, name: str) -> None:
    settings = AdvantageSettings(ADVANTAGES[name], OPTIONS[name], "verl")

    def run(micros: list[Micro]) -> None:
        estimate(
            micros,
            settings,
            scores=dict(enumerate(SCORES)),
            trajectory_advantages=None,
            greedy={i: GREEDY[i // N_SAMPLES] for i in range(len(FLAT))},
            kl_estimator="k1",
            kl_coefficient=0.3,
        )

    together, alone = ([make_micro(index, device_type) for index in SPLIT] for _ in range(2))
    run(together)
    for micro in alone:
        run([micro])
    for one, other in zip(together, alone, strict=True):
        for found, wanted in ((one.advantages_N, other.advantages_N), (one.returns_N, other.returns_N)):
            assert found is not None and wanted is not None and torch.equal(found, wanted)
    assert sum(float(m.advantages_N.abs().sum()) for m in together if m.advantages_N is not None) > 0


def test_a_norm_that_overflowed_is_left_out_of_the_mean() -> None:
    skipped, scales = {"loss_scale_skipped": 1.0}, (64.0, 32.0, 32.0)
    results = [
        UpdateResult(0.5, norm, norm != math.inf, {}, overflowed=norm == math.inf, scale_metrics=scale)
        for norm, scale in zip(
            (math.inf, 2.0, 4.0), ({"loss_scale": value, **skipped} for value in scales), strict=True
        )
    ]
    assert update_means(results, "actor") == {
        "actor/grad_norm": pytest.approx(3.0),
        "actor/loss_scale": 32.0,
        "actor/loss_scale_skipped": 1.0,
        "actor/skipped": 0.0,
    }
    assert "actor/grad_norm" not in update_means(results[:1], "actor")


def test_metrics_of_a_step_are_means_over_its_updates() -> None:
    first = UpdateResult(0.5, 2.0, True, {"actor/pg_loss": 1.0}, router_aux_loss=1.5)
    second = UpdateResult(0.5, 4.0, False, {"actor/pg_loss": -0.5}, router_aux_loss=0.5)
    assert update_means([first, second], "actor") == {
        "actor/pg_loss": 0.25,
        "actor/grad_norm": 3.0,
        "actor/router_aux_loss": 1.0,
        "actor/skipped": 1.0,
    }
