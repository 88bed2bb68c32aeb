"""The wheel of the sdist in a new environment, without torch: what works there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

PROGRAM = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None
import isotrain

recipe = isotrain.load_recipe("tiny-sft", "seed=7")
assert recipe.seed == 7
(missing,) = [f.id for f in isotrain.doctor("cpu", recipe).errors]
same = isotrain.compare("a.jsonl", "a.jsonl").outcome.verdict
other = isotrain.compare("a.jsonl", isotrain.Run("b.jsonl")).outcome.verdict
try:
    isotrain.train(recipe)
except isotrain.errors.IsotrainError as error:
    print(missing, same, other, "|", error)
"""


def built(directory: Path) -> tuple[Path, Path]:
    """The sdist of this commit, and the wheel that is built from it, without the network."""
    clone = directory / "isotrain"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True, timeout=60)
    build = [sys.executable, "-m", "hatchling", "build", "--target"]
    subprocess.run([*build, "sdist"], cwd=clone, check=True, capture_output=True, timeout=120)
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    source = directory / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*build, "wheel"], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = (source / "dist").glob("*.whl")
    return sdist, wheel


@pytest.mark.heavy
def test_the_wheel_of_the_sdist_has_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    _, wheel = built(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = ["git", "-C", str(tmp_path / "isotrain"), "ls-files", "src/isotrain", "recipes"]
    files = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {name.removeprefix("src/") if name.startswith("src/") else f"isotrain/{name}" for name in files}
    assert packed == wanted


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_torch(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=tmp_path, check=True, timeout=300)
    python = str(tmp_path / "env" / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    _, wheel = built(tmp_path)
    install = [python, "-m", "pip", "install", "--quiet", str(wheel)]
    subprocess.run(install, env=clean, check=True, timeout=1500)
    for name, shift in (("a", 0.0), ("b", 0.5)):
        rows = [{"step": step, "train/loss": 3.0 - 0.01 * step + shift} for step in range(1, 101)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = subprocess.run(
        [python, "-c", PROGRAM], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = "this needs the package 'torch': pip install '.[train]' in a clone of isotrain"
    assert done.stdout.splitlines()[-1] == f"missing-torch equivalent different | {said}"

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = str(tmp_path / "env/bin/isotrain")
        return subprocess.run(
            [program, *arguments], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300
        )

    helped = command("--help")
    assert helped.returncode == 0 and "parity" in helped.stdout
    doctor = command("doctor")
    assert doctor.returncode == 1 and "torch" in doctor.stdout, doctor.stderr
    assert "tiny-sft" in command("recipes").stdout
    same, other = (command("parity", "compare", "a.jsonl", name) for name in ("a.jsonl", "b.jsonl"))
    assert same.returncode == 0 and other.returncode == 1, other.stderr
