"""Routes of mixtures, recorded from routers and forced on them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.data.items import Sample
from isotrain.data.packing import FREE, ExpertRoutes, PackedBatch, pack, pack_shared
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.load import build_causal_lm
from isotrain.models.routes import RouteReplay
from isotrain.recipe.schema import ModelSection, OptimizerSection

SAMPLES = [Sample(np.arange(5, 5 + n, dtype=np.int32), np.arange(n) >= 4) for n in (9, 12, 7)]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    make_tiny(out, train_rows=1, validation_rows=1, architecture=request.param)
    return out / "model"


def replaying(directory: Path, device_type: str, world: Any, **model: Any) -> TrainingEngine:
    section = ModelSection(path=str(directory), **{"dtype": "float32", "fused": "off", **model})
    optimizer = OptimizerSection(betas=(0.5, 0.9), max_grad_norm=0, weight_decay=0)
    engine = build_engine(section, optimizer, device=choose_device(device_type), world=world, seed=0)
    engine.model.replay = RouteReplay(engine.model.pretrained)
    return engine


def own_routes(engine: TrainingEngine, batch: PackedBatch) -> ExpertRoutes:
    replay = engine.model.replay
    assert replay is not None
    replay.record()
    (chosen_RLK,) = engine.infer([batch], lambda _: replay.recorded())
    return ExpertRoutes(chosen_RLK, as_seen=True)


def gradients(engine: TrainingEngine, batch: PackedBatch) -> dict[str, torch.Tensor]:
    engine.model.train()
    engine.forward(batch, lambda head: head.logps().sum()).backward()
    grads = {n: p.grad.clone() for n, p in engine.trained.items() if p.grad is not None}
    engine.optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("attention", ["sdpa", "padded"])
def test_a_models_own_routes_change_nothing(directory: Path, device_type: str, attention: str) -> None:
    """Not a bit of log-probs and gradients, also of layers that run again in the backward pass."""
    with join_world(choose_device(device_type)) as world:
        engine = replaying(directory, device_type, world, attention=attention)
        assert engine.model.replay is not None
        batch = pack(SAMPLES)
        routes = own_routes(engine, batch)
        assert routes.chosen.shape[1] == engine.model.replay.layers
        forced = PackedBatch(**{**batch.__dict__, "routes": routes})
        (free_N,), (forced_N,) = (engine.infer([b], lambda head: head.logps()) for b in (batch, forced))
        assert torch.equal(free_N, forced_N)
        free, same = gradients(engine, batch), gradients(engine, forced)
        assert free.keys() == same.keys() and any(".gate." in name for name in free)
        assert all(torch.equal(free[name], same[name]) for name in free)


def test_other_routes_are_taken_and_none_is_free(directory: Path) -> None:
    with join_world(choose_device("cpu")) as world:
        engine = replaying(directory, "cpu", world)
        batch = pack(SAMPLES)
        own_TLK = own_routes(engine, batch).chosen
        other_TLK = (own_TLK + 1) % 8
        logps = {}
        for name, chosen_TLK in (
            ("free", torch.full_like(own_TLK, FREE)),
            ("other", other_TLK),
            ("last", torch.cat([own_TLK[:-1], other_TLK[-1:]])),
        ):
            forced = PackedBatch(**{**batch.__dict__, "routes": ExpertRoutes(chosen_TLK.to(torch.int16))})
            (logps[name],) = engine.infer([forced], lambda head: head.logps())
        (own_N,) = engine.infer([batch], lambda head: head.logps())
        assert torch.equal(logps["free"], own_N)
        assert (logps["other"] - own_N).abs().max() > 1e-4
        assert torch.equal(logps["last"], own_N)  # nothing is predicted from the last token of all
        grads = [
            gradients(engine, b)
            for b in (batch, PackedBatch(**{**batch.__dict__, "routes": ExpertRoutes(other_TLK)}))
        ]
        assert any(not torch.equal(grads[0][n], grads[1][n]) for n in grads[0] if ".gate." in n)


def test_rows_that_are_padded_take_the_routes_of_their_tokens(directory: Path, device_type: str) -> None:
    draw = np.random.default_rng(0)
    batch = pack(SAMPLES)
    layers, used = (2, 2) if "qwen3" in directory.parent.name else (1, 2)
    chosen_TLK = np.argsort(draw.random((len(batch.tokens_T), layers, 8)), axis=-1)[..., :used]
    forced = replace(batch, routes=ExpertRoutes(torch.from_numpy(chosen_TLK.astype(np.int16))))
    logps = {}
    with join_world(choose_device(device_type)) as world:
        for attention in ("sdpa", "padded"):
            engine = replaying(directory, device_type, world, attention=attention)
            (logps[attention],) = engine.infer([forced], lambda head: head.logps().cpu())
            (free_N,) = engine.infer([batch], lambda head: head.logps().cpu())
            assert (logps[attention] - free_N).abs().max() > 1e-4
    torch.testing.assert_close(logps["padded"], logps["sdpa"], rtol=0, atol=1e-5)


def test_the_host_does_not_read_routes_from_a_device(directory: Path) -> None:
    """Tensors without data cannot be read."""
    replay = RouteReplay(build_causal_lm(directory, "padded"))
    replay.force(torch.empty(28, replay.layers, 2, dtype=torch.int16, device="meta"))


def test_routes_of_another_model_are_refused(directory: Path, tiny: Path) -> None:
    with join_world(choose_device("cpu")) as world:
        engine = replaying(directory, "cpu", world)
        batch = pack(SAMPLES)
        own_TLK = own_routes(engine, batch).chosen
        for chosen, message in (
            (own_TLK[:, :, :1], "the recorded routes have 1 experts"),
            (own_TLK[:-1], "for each of 27 tokens"),
            (own_TLK.repeat(1, 2, 1), "layers with experts, this model has"),
            (torch.full_like(own_TLK, 8), "are they of this recipe"),
        ):
            with pytest.raises(ModelError, match=message):
                engine.infer([PackedBatch(**{**batch.__dict__, "routes": ExpertRoutes(chosen)})], lambda _: 0)
        dense = build_engine(
            ModelSection(path=str(tiny / "model"), dtype="float32"),
            OptimizerSection(),
            device=choose_device("cpu"),
            world=world,
            seed=0,
        )
        with pytest.raises(ModelError, match=r"algorithm.router_replay: model type 'llama' has no experts"):
            RouteReplay(dense.model.pretrained)


def test_routes_follow_tokens_into_a_shared_prompt(directory: Path) -> None:
    """A prompt's routes are the first sample's; a sample without routes leaves them free."""
    routes = [np.full((len(s), 2, 1), number, np.int16) for number, s in enumerate(SAMPLES)]
    shared = pack_shared(SAMPLES, [4, 4, 4], [routes[0], None, routes[2]])
    assert shared.routes is not None and shared.continues
    starts = np.cumsum([0, *shared.lengths])
    by_segment = [shared.routes.chosen[a:b].unique().tolist() for a, b in pairwise(starts)]
    lengths = {4: 0, 3: 2, 5: 0, 8: FREE}  # the prompt, and what follows it in each sample
    assert by_segment == [[lengths[n]] for n in shared.lengths]
    plain = pack(SAMPLES, routes).routes
    assert plain is not None
    assert plain.chosen[:, 0, 0].tolist() == [0] * 9 + [1] * 12 + [2] * 7
    assert pack(SAMPLES).routes is None
