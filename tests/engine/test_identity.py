from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from isotrain.errors import ModelError
from isotrain.trainers.start import model_digest


def test_only_weights_and_config_count(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny / "model", copy)
    digest = model_digest(tiny / "model")
    (copy / "README.md").write_text("words")
    assert model_digest(copy) == digest
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_digest(copy) != digest, "one bit of a weight"


def test_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: .*config\.json cannot be read"):
        model_digest(tmp_path)
