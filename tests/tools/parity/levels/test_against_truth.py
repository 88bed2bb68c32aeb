"""Both sides of a step against its truth: known distances in, and their ratio out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from isotrain.tools.parity.levels.layer_errors import ALL, LayerRating, against_truth
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.read.layer_trace import KINDS, read_layer_trace
from traced_runs import layers_level

LAYERS = ("embed", "layers.0", "layers.1", "head")
Run = Callable[..., Path]


def write_trace(run: Path, off: dict[tuple[str, str], float], loss: float, data: str, step: int) -> Path:
    """Each layer's numbers are its truth plus a share of it, `off` or 0, in directions of the run's own."""
    draw = np.random.default_rng(zlib.crc32(run.name.encode()))
    tensors: dict[str, Any] = {"loss": np.array([loss]), "weight/norm": np.ones(len(LAYERS))}
    kinds = KINDS if run.name != "truth" else KINDS[:-1]
    for kind in KINDS:
        names = LAYERS if kind in kinds else ()
        truth = np.random.default_rng(0).normal(size=(len(names), 32, 32))
        aside = draw.normal(size=truth.shape)
        for number, name in enumerate(names):
            size = np.linalg.norm(truth[number])
            aside[number] *= off.get((kind, name), 0.0) * size / np.linalg.norm(aside[number])
        sketches = truth + aside
        tensors[f"{kind}/sketch"] = sketches
        tensors[f"{kind}/norm"] = np.linalg.norm(sketches, axis=(1, 2))
        tensors[f"{kind}/shape"] = np.full((len(names), 2), 32)
    tensors["weight/norm"] = np.ones(len(LAYERS) if "update" in kinds else 0)
    facts = {
        "format": 1,
        "step": step,
        "ranks": 1,
        "digests": {"tokens": data, "packing": "p", "loss": "l"},
        "names": {kind: LAYERS if kind in kinds else () for kind in KINDS},
    }
    (run / "layer_trace").mkdir(parents=True)
    file = run / f"layer_trace/step-{step:06d}-rank-00000.safetensors"
    save_file(tensors, file, {name: json.dumps(fact) for name, fact in facts.items()})
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def write(name: str, *, loss: float = 2.0, data: str = "d", step: int = 1, **off: float) -> Path:
        """`off` is by kind, for all layers, or by kind and layer's number."""
        by_entry = {}
        for key, share in off.items():
            kind, _, number = key.partition("_at_")
            for layer in [LAYERS[int(number)]] if number else LAYERS:
                by_entry[kind.replace("_", " "), layer] = share
        return write_trace(tmp_path / name, by_entry, loss, data, step)

    return write


def ratings(reference: Path, candidate: Path, truth: Path) -> dict[tuple[str, str], LayerRating]:
    a, b, t = (read_layer_trace(path)[1] for path in (reference, candidate, truth))
    return {rating.difference.key[1:]: rating for rating in against_truth(1, a, b, (t, t), "float32")}


def test_z_is_the_ratio_of_the_distances(run: Run) -> None:
    far = {"gradient": 1e-3, "parameter_gradient": 1e-3}
    a, b = run("a", activation=1e-5, **far), run("b", activation=3e-5, activation_at_2=2e-4, **far)
    z = {key: rating.z for key, rating in ratings(a, b, run("truth")).items()}
    assert z["activation", "layers.0"] == pytest.approx(3, rel=1e-6)
    assert z["activation", "layers.1"] == pytest.approx(20, rel=1e-6)
    # A factor that all share is beside what all of them are off by.
    assert z["gradient", ALL] < 1 and z["parameter gradient", "head"] == pytest.approx(1, rel=1e-6)
    assert "update" not in {kind for kind, _ in z}


def test_a_reference_that_is_right_by_chance_is_expected_to_round(run: Run) -> None:
    a, b = run("a"), run("b", activation=2.0**-23)
    z = {key: rating.z for key, rating in ratings(a, b, run("truth")).items()}
    assert z["activation", "embed"] == pytest.approx(4, rel=1e-6)
    assert z["activation", "head"] == pytest.approx(4 / np.sqrt(4), rel=1e-6)


def verdict(reference: Path, candidate: Path) -> Level:
    return layers_level(reference, candidate, dtype="float32")


def test_sides_that_are_alike_far_from_the_truth_are_the_same(run: Run) -> None:
    """Each rounds more than the limits for pairs without a truth allow."""
    honest = {"activation": 1e-4, "gradient": 1e-4, "parameter_gradient": 1e-4}
    a, b = run("a", loss=2.00002, **honest), run("b", loss=1.99995, **honest)
    without = verdict(a, b)
    assert without.state == "different"
    run("a/truth")
    level = verdict(a, b)
    assert level.state == "same" and "against float64, all 15 entries" in level.words, level.words
    assert {check.name for check in level.checks if check.passed} >= {"activations: z against float64"}


def test_finds_the_truth_beside_either_run(run: Run) -> None:
    a, b = run("a", activation=1e-5), run("b", activation=1e-5)
    run("b/truth")
    assert "against float64" in verdict(a, b).words


def test_a_reference_that_is_wrong_alone_is_different(run: Run) -> None:
    """Nothing is as near the truth as a wrong reference is far from it."""
    a, b = run("a", activation=1e-5, activation_at_2=1e-2), run("b", activation=1e-5)
    run("a/truth")
    level = verdict(a, b)
    assert level.state == "different" and "layers.1" in level.words
    assert "the reference is 1.0e-02 from float64, z = 1e+03" in level.words


@pytest.mark.parametrize(("share", "state"), [(2e-4, "same"), (1e-2, "cannot tell")])
def test_two_runs_that_are_both_far_are_not_called_the_same(run: Run, share: float, state: str) -> None:
    """Two mistakes of one size, or a truth of another model: each run is as near as the other."""
    a, b = run("a", activation=1e-5, activation_at_2=share), run("b", activation=1e-5, activation_at_2=share)
    run("a/truth")
    level = verdict(a, b)
    assert level.state == state, level.words
    assert ("both runs are further from float64 than rounding explains" in level.words) is (state != "same")


@pytest.mark.parametrize(("share", "state"), [(3.9e-5, "same"), (6e-5, "cannot tell"), (8.1e-5, "different")])
def test_names_the_first_layer_beyond_the_limit(run: Run, share: float, state: str) -> None:
    a, b = run("a", activation=1e-5), run("b", activation=1e-5, activation_at_2=share)
    run("a/truth")
    level = verdict(a, b)
    assert level.state == state, level.words
    assert "layers.1" in level.words and f"z = {share / 1e-5:.3g}" in level.words
    if state == "different":
        assert level.evidence["first"]["name"] == "layers.1"
        assert level.evidence["first"]["z"] == pytest.approx(8.1, rel=1e-6)
        assert level.causes[0].startswith("layer layers.1")


def test_later_steps_may_be_as_far_apart_as_the_truth_allows(run: Run, tmp_path: Path) -> None:
    a, b = run("a", activation=1e-4), run("b", activation=1e-4)
    run("a/truth")
    for side, share in ((a, 1e-4), (b, 3e-4)):
        later = run(f"later-{side.name}", activation=share, step=2)
        (file,) = (later / "layer_trace").iterdir()
        file.rename(side / "layer_trace" / file.name)
    assert verdict(a, b).state == "same"


def test_no_number_is_different_on_either_side(run: Run) -> None:
    good = run("a", activation=1e-5)
    run("a/truth")
    bad = run("b", activation=1e-5, activation_at_1=float("nan"))
    assert verdict(good, bad).state == "different"
    run("b/truth")
    assert verdict(bad, good).state == "different"


def test_refuses_the_truth_of_another_step(run: Run) -> None:
    a, b = run("a"), run("b")
    run("a/truth", data="other")
    level = verdict(a, b)
    assert level.state == "not run" and "of other data" in level.words
    c = run("c")
    run("c/truth", step=3)
    level = verdict(c, b)
    assert level.state == "not run" and "step 3" in level.words
    # Where the runs themselves have other data, that is the difference.
    other = run("d", data="other")
    assert verdict(a, other).state == "different"
