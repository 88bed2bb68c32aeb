"""One device alone: every algorithm on a tiny model, held against float64, and a certificate of each."""

from __future__ import annotations

from pathlib import Path

import npusim
import pytest
from typer.testing import CliRunner

import mutations
from isotrain.api import load_recipe
from isotrain.cli.main import app
from isotrain.tools.parity.certify.certificate import read_certificate
from isotrain.tools.parity.certify.contributed import contributed, recipe_of
from isotrain.tools.parity.certify.verify import is_consistent, verify
from support import run_cli

OFFLINE = ("sft", "dpo", "kto", "rm", "prm")


def test_an_unknown_name_lists_the_known() -> None:
    done = CliRunner().invoke(app, ["parity", "contribute", "lisp", "--out", "nowhere"])
    assert done.exit_code == 2 and "there are sft, dpo, kto" in done.output
    assert not Path("nowhere").exists()


def test_each_is_a_recipe_of_its_algorithm() -> None:
    for name in contributed([]):
        recipe, settings = recipe_of(name, Path("/somewhere/tiny"), Path("/somewhere"))
        loaded = load_recipe(recipe, *settings)
        assert loaded.algorithm.name == name and loaded.model.dtype == "float32"
        assert (loaded.rollout is None) == (name in OFFLINE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("on", ["cpu", "npu"])
def test_a_contribution(tmp_path: Path, on: str) -> None:
    variables = npusim.environment() if on == "npu" else {}
    names = contributed([]) if on == "cpu" else ["sft", "grpo"]
    done = run_cli(
        *("parity", "contribute", *names, "--out", str(tmp_path), "--device", on), timeout=3600, **variables
    )
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == len(names), done.stdout
    for file in files:
        certificate = read_certificate(file)
        assert is_consistent(verify(file))
        assert [level.state for level in certificate.levels[:2]] == ["same", "same"]
        assert certificate.levels[1].truth == "float32" and certificate.levels[3].state == "not run"
        assert certificate.candidate.simulated == (on == "npu")
        assert str(tmp_path) not in file.read_text()
    assert "not in it: names of hosts" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_device_that_computes_something_else(tmp_path: Path) -> None:
    wrong = {**npusim.environment(), **mutations.environment("attention-scale")}
    out = ("--out", str(tmp_path), "--device", "npu")
    done = run_cli("parity", "contribute", "sft", *out, check=False, timeout=900, **wrong)
    assert done.returncode == 1 and "self_attn" in done.stdout, done.stdout
    assert not list(tmp_path.glob("*.json"))
