"""`pip install .` in a new environment, without torch: what works there from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_torch(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=tmp_path, check=True, timeout=300)
    python = str(tmp_path / "env" / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clone = tmp_path / "isotrain"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True, timeout=60)
    install = [python, "-m", "pip", "install", "--quiet", str(clone)]
    subprocess.run(install, env=clean, check=True, timeout=1500)
    for name, shift in (("a", 0.0), ("b", 0.5)):
        rows = [{"step": step, "train/loss": 3.0 - 0.01 * step + shift} for step in range(1, 101)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = subprocess.run(
        [python, "-c", PROGRAM], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = "this needs the package 'torch': pip install 'isotrain[train]'"
    assert done.stdout.splitlines()[-1] == f"missing-torch equivalent different | {said}"
