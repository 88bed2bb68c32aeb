"""Routes that the reference engine records: those of the pass that sampled, through files and turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from isotrain.data.packing import FREE, pack_trajectories
from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.record import Marks, Recorded, read_trajectories, write_trajectories
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_alone
from isotrain.environments.conversation import TokenSequence
from isotrain.errors import DataError
from isotrain.models.routes import RouteReplay
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.build import build_rollout

PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 17)]
MARKS = Marks(0.0, {}, None, "tiny", None, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    out = tmp_path_factory.mktemp("mixture")
    make_tiny(out, train_rows=1, validation_rows=1, architecture="qwen3_moe")
    return ModelSection(path=str(out / "model"), dtype="float32")


@pytest.fixture(scope="module")
def trajectories(model: ModelSection) -> list[Trajectory]:
    engine = build_rollout(
        RolloutSection(engine="hf", max_tokens=12),
        model.path,
        "float32",
        device=choose_device("cpu"),
        max_prompt=40,
        seed=0,
        name="e",
        routes=True,
    )
    requests = [Request(r, r, s, 10 * r + s, p) for r, p in enumerate(PROMPTS) for s in range(2)]
    return sorted(engine.generate(requests, Sampling(max_tokens=12)), key=lambda t: (t.row, t.sample))


def test_routes_are_those_of_a_plain_pass(model: ModelSection, trajectories: list[Trajectory]) -> None:
    """In float32, where rounding turns no route."""
    policy = build_alone(model, device=choose_device("cpu"))
    policy.model.replay = replay = RouteReplay(policy.model.pretrained)
    for trajectory in trajectories:
        routes_TLK = trajectory.routes_TLK
        assert routes_TLK is not None and routes_TLK.shape == (len(trajectory), 2, 2)
        assert (routes_TLK[-1] == FREE).all()
        batch = pack_trajectories([trajectory], [0]).packed
        assert batch.routes is not None and torch.equal(batch.routes.chosen, torch.from_numpy(routes_TLK))
        replay.record()
        free = batch.__class__(**{**batch.__dict__, "routes": None})
        (chosen_TLK,) = policy.infer([free], lambda _: replay.recorded())
        assert np.array_equal(chosen_TLK[:-1].numpy(), routes_TLK[:-1])


def test_recordings_keep_routes(trajectories: list[Trajectory], tmp_path: Path) -> None:
    plain = Trajectory(**{**trajectories[0].__dict__, "routes_TLK": None})
    write_trajectories(tmp_path / "a.parquet", [Recorded(t, MARKS, None) for t in [*trajectories, plain]])
    *again, without = (record.trajectory for record in read_trajectories(tmp_path / "a.parquet"))
    for before, after in zip(trajectories, again, strict=True):
        assert before.routes_TLK is not None and after.routes_TLK is not None
        assert np.array_equal(before.routes_TLK, after.routes_TLK)
        assert after.routes_TLK.dtype == np.int16
    assert without.routes_TLK is None


def test_recordings_with_routes_of_other_shapes_are_refused(
    trajectories: list[Trajectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trajectory, "route_layers", property(lambda _: 5))
    write_trajectories(tmp_path / "a.parquet", [Recorded(t, MARKS, None) for t in trajectories])
    with pytest.raises(DataError, match=r"routes are not those of 5 layers and \d+ tokens"):
        read_trajectories(tmp_path / "a.parquet")


def test_tokens_of_earlier_turns_keep_their_routes() -> None:
    def turn(prompt: list[int], response: list[int], route: int) -> Trajectory:
        tokens_T = np.array(prompt + response, np.int32)
        routes_TLK = np.full((len(tokens_T), 2, 1), route, np.int16)
        routes_TLK[-1] = FREE
        count = len(response)
        return Trajectory(
            0,
            0,
            0,
            0,
            len(prompt),
            tokens_T,
            np.ones(count, np.bool_),
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
            True,
            routes_TLK=routes_TLK,
        )

    sequence = TokenSequence([7, 8])
    sequence.wrote(turn([7, 8], [1, 2, 3], 4))
    sequence.given([9, 9])
    sequence.wrote(turn([7, 8, 1, 2, 3, 9, 9], [5, 6], 6))
    sequence.given([9])
    whole = sequence._routes()
    # The last token of a turn is read by the next one; nobody has read the two at the end.
    assert whole is not None and whole[:, 0, 0].tolist() == [4, 4, 4, 4, 6, 6, 6, 6, FREE, FREE]
    sequence.without_last_turn()
    sequence.without_unanswered()
    whole = sequence._routes()
    assert whole is not None and whole[:, 1, 0].tolist() == [4, 4, 4, 4, 6]
