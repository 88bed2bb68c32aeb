"""`isotrain parity certify` from a recipe to a certificate that verifies, and to a refusal."""

from __future__ import annotations

from pathlib import Path

import npusim
import pytest
from typer.testing import CliRunner, Result

import mutations
from certified_runs import MEMBERS, SIDES, run_of
from isotrain.cli.main import app
from isotrain.tools.parity.certify.certificate import read_certificate
from isotrain.tools.parity.certify.verify import is_consistent, verify
from support import run_cli, tiny_recipe, write_recipe


def certify(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", "certify", *map(str, arguments)])


def test_mistakes_are_told_before_anything_runs(tmp_path: Path) -> None:
    work = ("--work", tmp_path / "work")
    assert "give two" in certify("tiny-sft", "--devices", "cpu", *work).output
    assert "is unknown; use two of" in certify("tiny-sft", "--devices", "cpu,tpu", *work).output
    assert "such as 30m" in certify("tiny-sft", "--devices", "cpu,cpu-avx2", *work, "--budget", "long").output
    assert "only online recipes" in certify("tiny-sft", "--devices", "cpu,cpu-avx2", *work, "--free").output
    pair = ("--devices", "cpu,cpu", *work, "--candidate")
    assert "optimizer.lr: " in certify("tiny-sft", *pair, "device.ranks=2", "optimizer.lr=1").output
    assert "--devices A,B has the types" in certify("tiny-sft", *pair, "device.type=npu").output
    assert "cannot be divided" in certify("tiny-sft", *pair, "device.ranks=3", "device.mesh.context=2").output
    assert not (tmp_path / "work").exists()


def test_finished_runs_are_certified_from_their_directories(tmp_path: Path) -> None:
    """Of two machines: only their directories are needed."""
    runs = {"reference": 0.0, "candidate": 1e-4, **MEMBERS}
    sections = {role: SIDES.get(role, SIDES["reference"]) for role in runs}
    paths = [run_of(tmp_path / role, shift, **sections[role]) for role, shift in runs.items()]
    made = tmp_path / "made"
    done = certify("--from", *paths, "--certificates", made)
    assert done.exit_code == 0, done.output
    (file,) = made.glob("*.json")
    certificate = read_certificate(file)
    assert {f"{role}/metrics.jsonl" for role in runs} <= set(certificate.inputs), "also what P3 rests on"
    assert certificate.file_name == file.name and certificate.file_name.startswith("sft-tiny-1-cpu-amx-cpu-")
    assert is_consistent(verify(file, dict(zip(runs, paths[:2], strict=False))))
    told = certify("--from", *paths[:2])
    assert told.exit_code == 3 and "Computation: inconclusive" in told.output, "curves alone"
    assert "give the reference and the candidate" in certify("--from", paths[0]).output
    assert "remove the recipe" in certify("tiny-sft", "--from", *paths[:2]).output
    assert "--candidate and" in certify("--from", *paths[:2], "--candidate", "device.ranks=2").output
    assert "or --from RUN RUN" in certify("tiny-sft").output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", ["cpu-avx2,cpu", "cpu,npu"])
def test_a_trained_pair_gets_a_certificate(tiny: Path, tmp_path: Path, devices: str) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "unused", "cpu", trainer={"steps": 12})
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    given = ("--devices", devices, "--work", str(tmp_path / "work"), "--members", "5")
    made = run_cli(
        "parity", "certify", str(path), *given, "--certificates", str(tmp_path / "made"), timeout=800
    )
    assert "Computation: the same." in made.stdout
    (file,) = (tmp_path / "made").glob("*.json")
    certificate = read_certificate(file)
    states = {level.name: level.state for level in certificate.levels}
    assert [states[name] for name in ("P0", "P1", "P3")] == ["same"] * 3
    assert certificate.candidate.simulated == devices.endswith("npu")
    runs = [f"--{role}={tmp_path / 'work' / role}" for role in ("reference", "candidate")]
    checked = run_cli("parity", "verify", str(file), *runs).stdout
    assert "\nconsistent\n" in checked and "nobody signed it" in checked
    assert (tmp_path / "work" / "report" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mesh_against_one_rank(tiny: Path, tmp_path: Path) -> None:
    """Ring attention over two ranks: layers are not recorded, curves and envelope decide."""
    recipe = tiny_recipe(tiny, tmp_path / "unused", "cpu", trainer={"steps": 12})
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    mesh = ("device.ranks=2", "device.mesh.context=2", "device.mesh.context_attention=ring")
    given = ("--devices", "cpu,cpu", "--work", str(tmp_path / "work"), "--members", "4")
    made = ("--certificates", str(tmp_path / "made"))
    run_cli("parity", "certify", str(path), *given, "--candidate", *mesh, *made, timeout=800)
    (file,) = (tmp_path / "made").glob("*-cpu-cpu-context-2-ring-paired-*.json")
    certificate = read_certificate(file)
    states = {level.name: level.state for level in certificate.levels}
    assert states["P0"] == states["P1"] == "not run" and states["P3"] == "same"
    assert "divides its layers over ranks (context 2 (ring))" in certificate.levels[0].words
    assert (certificate.reference.ranks, certificate.reference.mesh) == (1, "")
    assert (certificate.candidate.ranks, certificate.candidate.mesh) == (2, "context 2 (ring)")
    error = certificate.figures.loss_error
    assert error is not None and 0 < error < 1e-3, "hundredths"
    runs = [f"--{role}={tmp_path / 'work' / role}" for role in ("reference", "candidate")]
    assert "\nconsistent\n" in run_cli("parity", "verify", str(file), *runs).stdout


@pytest.mark.slow
def test_it_stops_at_the_first_level_that_fails(tiny: Path, tmp_path: Path) -> None:
    """Both sides make the mistake but for a device that does not know of it."""
    recipe = tiny_recipe(tiny, tmp_path / "unused", "cpu", trainer={"steps": 6})
    path = write_recipe(recipe, tmp_path / "recipe.yaml")
    reference = tmp_path / "work" / "reference"
    plain = tiny_recipe(
        tiny,
        reference,
        "cpu",
        trainer={"steps": 6},
        observe={"loggers": [], "layer_trace": 3, "operators": True},
    )
    run_cli("train", str(write_recipe(plain, tmp_path / "plain.yaml")))
    wrong = {**npusim.environment(), **mutations.environment("attention-scale")}
    given = ("--devices", "cpu,cpu", "--work", str(tmp_path / "work"))
    done = run_cli("parity", "certify", str(path), "observe.loggers=[]", *given, check=False, **wrong)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "model.layers.1.self_attn" in done.stdout
    assert not (tmp_path / "work" / "member-1").exists()
