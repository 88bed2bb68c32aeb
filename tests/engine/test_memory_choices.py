"""What is offloaded takes no device memory, and training is the same to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Callable

import memory_ranks
import npusim
import pytest
import torch
from jobs import Tensors, results
from memory_ranks import CHOICES, KINDS

from isotrain.data.prepare.tiny import make_tiny

Trained = Callable[[int, str], list[Tensors]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("memory")
    make_tiny(path, layers=4, train_rows=1, validation_rows=1)
    done: dict[tuple[int, str], list[Tensors]] = {}

    def trained(ranks: int, kind: str) -> list[Tensors]:
        if (ranks, kind) not in done:
            out = path / f"{kind}-{ranks}"
            out.mkdir()
            command = [sys.executable, memory_ranks.__file__, str(path / "model"), str(out), kind]
            npusim.run_ranks(command, ranks, timeout=600)
            done[ranks, kind] = results(out, ranks)
        return done[ranks, kind]

    return trained


def of(found: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}


CASES = pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (1, "float32"),
        *(pytest.param(1, kind, marks=pytest.mark.slow) for kind in KINDS if kind != "float32"),
        *(pytest.param(2, kind, marks=[pytest.mark.ranks, pytest.mark.slow]) for kind in KINDS),
    ],
)


@CASES
def test_offloading_changes_no_bit(trained: Trained, ranks: int, kind: str) -> None:
    for found in trained(ranks, kind):
        expected = of(found, "nothing/")
        assert len(expected) > 10
        for choice in CHOICES:
            told = of(found, f"{choice}/")
            assert told["saved"], "what was handed to the writer changed with the next update"
            different = {name for name in expected if not torch.equal(expected[name], told[name])}
            assert not different - {"bytes"}


@CASES
def test_it_frees_the_device(trained: Trained, ranks: int, kind: str) -> None:
    for found in trained(ranks, kind):
        held, peak = {}, {}
        for choice in CHOICES:
            held[choice], peak[choice] = found[f"{choice}/bytes"].tolist()
        assert held["weights"] < 1024, "only buffers stay"
        assert held["activations"] == held["nothing"]
        if kind != "adapters":
            # Of weights and two moments, all float32, the weights stay.
            assert held["optimizer"] == pytest.approx(held["nothing"] / 3, rel=0.01)
        for choice in set(CHOICES) - {"nothing"}:
            assert peak[choice] < peak["nothing"]
        assert peak["everything"] < peak["weights"]


@CASES
def test_moments_in_bfloat16(trained: Trained, ranks: int, kind: str) -> None:
    """Half of their memory; on the host they are the same ones."""
    for found in trained(ranks, kind):
        whole, short = of(found, "nothing/"), of(found, "short/nothing/")
        if kind != "adapters":
            held, shorter = int(whole["bytes"][0]), int(short["bytes"][0])
            assert shorter == pytest.approx(held * 2 / 3, rel=0.01)
        difference = (short["numbers"][:, 0] - whole["numbers"][:, 0]).abs() / whole["numbers"][:, 0].abs()
        assert 0 < difference.max() < 1e-3
        on_host = of(found, "short/optimizer/")
        assert all(torch.equal(short[name], on_host[name]) for name in short if name != "bytes")


@CASES
def test_a_frozen_model_on_the_host(trained: Trained, ranks: int, kind: str) -> None:
    for found in trained(ranks, kind):
        assert torch.equal(found["reference/nothing/logps"], found["reference/weights/logps"])
        assert found["reference/weights/bytes"] < 1024 < found["reference/nothing/bytes"]
