"""One device alone: the reference runs that come with isotrain, and a certificate from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import npusim
import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.recipe.load import load_resolved, resolved
from isotrain.tools.parity.certify.certificate import read_certificate
from isotrain.tools.parity.certify.issue import levels_again
from isotrain.tools.parity.certify.reference_runs import FOLDER, TINY, find_reference, reference_runs
from isotrain.tools.parity.certify.verify import is_consistent, verify
from isotrain.tools.parity.compare.comparison import recipe_changes
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.thresholds import FEWEST_MEMBERS
from isotrain.trainers.start import model_digest
from support import run_cli

NAMES = ("sft", "dpo", "grpo")


def test_an_unknown_name_lists_the_known() -> None:
    done = CliRunner().invoke(app, ["parity", "contribute", "lisp", "--out", "nowhere"])
    assert done.exit_code == 2 and "there are dpo, grpo, sft" in done.output


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_runs_are_whole(name: str) -> None:
    reference = find_reference(name)
    run = read_run(reference.path)
    assert run.data["model"] == model_digest(TINY / "model")
    assert len(reference.members) >= FEWEST_MEMBERS
    for member in reference.members:
        other = read_run(member).data
        assert all(run.data[name] == digest for name, digest in other.items()) and "model" in other
    recipe = load_resolved(reference.path / "resolved.json")
    assert recipe.observe.layer_trace and recipe.observe.operators and recipe.algorithm.name == name
    assert (reference.path / "trajectories").is_dir() == (name == "grpo")


@pytest.mark.parametrize("name", NAMES)
def test_the_paths_of_this_machine_make_no_other_recipe(name: str) -> None:
    reference = find_reference(name)
    run = read_run(reference.path)
    recipe = resolved(load_resolved(reference.path / "resolved.json", reference.settings()))
    # A replay does not read the reward function, and so has no digest of it.
    data = {name: digest for name, digest in run.data.items() if name != "reward.function"}
    assert recipe["model"]["path"] == str(TINY / "model")
    assert recipe_changes(run, replace(run, recipe=recipe, data=data)) == []


def test_nothing_of_the_machine_is_in_them() -> None:
    assert set(reference_runs()) == set(NAMES)
    files = [path for path in FOLDER.rglob("*.json") if TINY not in path.parents]
    assert len(files) > 2 * 3 * FEWEST_MEMBERS
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'"/[a-z]|"~/', text) and '"command"' not in text, path
        json.loads(text)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 8 << 20


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", "npu"])
def test_a_contribution(tmp_path: Path, on: str) -> None:
    variables = npusim.environment() if on == "npu" else {}
    done = run_cli(
        *("parity", "contribute", *NAMES, "--out", str(tmp_path), "--device", on), timeout=900, **variables
    )
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == len(NAMES), done.stdout
    for file in files:
        certificate = read_certificate(file)
        assert is_consistent(verify(file, again=levels_again))
        assert certificate.candidate.simulated == (on == "npu")
        assert str(tmp_path) not in file.read_text()
    assert "not in it: names of hosts" in done.stdout
