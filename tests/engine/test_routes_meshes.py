"""Forced routes of a mixture are the same training on every mesh."""

from __future__ import annotations

import sys
from pathlib import Path

import npusim
import pytest
import routes_ranks
import torch
import transformers
from safetensors.torch import load_file

from isotrain.data.prepare.tiny import make_tiny

needs_dispatch = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 19),
    reason="this version of transformers cannot send tokens to experts",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixture")
    make_tiny(out, train_rows=1, validation_rows=1, architecture="qwen3_moe")
    return out / "model"


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, torch.Tensor]:
    out = model.parent / "alone"
    out.mkdir()
    routes_ranks.main(str(model), out, 1, 1)
    return load_file(out / "0.safetensors")


@pytest.mark.parametrize(
    ("context", "expert"),
    [(2, 1), pytest.param(1, 2, marks=needs_dispatch), pytest.param(2, 2, marks=needs_dispatch)],
)
def test_two_ranks(
    model: Path, alone: dict[str, torch.Tensor], tmp_path: Path, context: int, expert: int
) -> None:
    program = [sys.executable, routes_ranks.__file__, str(model), str(tmp_path), str(context), str(expert)]
    npusim.run_ranks(program, 2, timeout=240)
    for rank in range(2):
        split = load_file(tmp_path / f"{rank}.safetensors")
        torch.testing.assert_close(split["logp"], alone["logp"], rtol=0, atol=1e-5)
        torch.testing.assert_close(split["norm"], alone["norm"], rtol=1e-4, atol=0)
