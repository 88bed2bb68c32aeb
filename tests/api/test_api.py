"""`import isotrain`: recipes, training in a child, runs, comparing, the doctor, with their real parts."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import isotrain
from isotrain.api import Metrics
from isotrain.errors import DataError, IsotrainError, RecipeError
from support import tiny_recipe

pytestmark = pytest.mark.heavy


def run_python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    file = cwd / "program.py"
    file.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(file), *arguments], cwd=cwd, capture_output=True, text=True, timeout=550
    )


def test_the_import_is_light(tmp_path: Path) -> None:
    code = """
        import sys, time
        began = time.process_time()
        import isotrain
        spent = time.process_time() - began
        isotrain.load_recipe("tiny-sft")
        heavy = [m for m in ("torch", "transformers", "numpy", "rich", "ray") if m in sys.modules]
        print(spent < 0.3, heavy)
    """
    assert run_python(code, cwd=tmp_path).stdout == "True []\n"


def test_names_that_are_not_there() -> None:
    assert all(getattr(isotrain, name) for name in isotrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        isotrain.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_users_of_the_package_are_type_checked(tmp_path: Path) -> None:
    """`py.typed` and the late names: a strict checker sees the real signatures."""
    (tmp_path / "user.py").write_text(
        textwrap.dedent("""
            from isotrain import Run, Verdict, compare, doctor, load_recipe, train

            run: Run = train(load_recipe("tiny-sft", "seed=1"))
            steps, losses = run.metrics.curve("train/loss")
            verdict: Verdict = compare(run, "runs/other")
            fits: bool = not doctor("cpu").errors
            wrong: int = train("tiny-sft")
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "MYPYPATH": str(Path(isotrain.__file__).parents[1])},
    )
    assert 'user.py:8: error: Incompatible types in assignment (expression has type "Run"' in done.stdout
    assert "Found 1 error" in done.stdout, done.stdout


def test_a_recipe_by_name_file_and_dict(tmp_path: Path) -> None:
    by_name = isotrain.load_recipe("tiny-sft", "seed=7")
    assert by_name.seed == 7
    file = tmp_path / "mine.yaml"
    file.write_text(by_name.model_dump_json())
    assert isotrain.load_recipe(file) == by_name
    values = json.loads(file.read_text())
    assert isotrain.load_recipe({**values, "output": Path("runs/mine")}).output == "runs/mine"
    assert isotrain.load_recipe(by_name, "seed=42") == isotrain.load_recipe("tiny-sft")
    assert values == json.loads(file.read_text())  # a dict stays as it was


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"optimizer": {"lrr": 1e-3}},
            "the recipe: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?",
        ),
        ({"seed": math.nan}, "the recipe cannot be written as a file"),
        ({"seed": {1, 2}}, "the recipe contains {1, 2}"),
        ({"reward": {"function": len}}, "train\\(recipe, reward=function\\)"),
    ],
)
def test_what_is_wrong_with_a_dict(change: dict[str, object], said: str) -> None:
    values = isotrain.load_recipe("tiny-sft").model_dump(mode="json")
    with pytest.raises(RecipeError, match=said):
        isotrain.load_recipe({**values, **change})


def test_metrics_as_a_table() -> None:
    metrics = Metrics([{"step": 1, "a": 2.0}, {"step": 2, "a": 3.0, "val/a": 4.0}])
    assert metrics.names == list(metrics) == ["step", "a", "val/a"] and len(metrics) == 2
    assert metrics["a"] == [2.0, 3.0] and math.isnan(metrics["val/a"][0])
    assert metrics.curve("val/a") == ([2], [4.0])
    assert metrics.to_pandas()["a"].to_dict() == {1: 2.0, 2: 3.0}
    with pytest.raises(DataError, match="no metric 'val/b'; the run has val/a"):
        metrics["val/b"]


def test_training_leaves_this_process_as_it_was(tiny: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tiny,
        tmp_path / "a",
        "cpu",
        trainer={"steps": 3},
        device={"determinism": "on"},
        observe={"loggers": ["console"]},
    )
    code = """
        import os, sys, isotrain
        before = dict(os.environ)
        a, b = (isotrain.train(sys.argv[1], f"output={name}", f"seed={ord(name)}") for name in "ab")
        assert dict(os.environ) == before and "torch" not in sys.modules
        assert a.metrics["train/loss"] != b.metrics["train/loss"]
        assert list(a.checkpoints) == [3] and a.recipe.seed == 97
        other = isotrain.compare(a, b.path)
        same = isotrain.compare(a, a).computation.verdict
        print(same, "|", other.computation.verdict, "|", other.computation.inputs)
        print(a.export("model"))
    """
    file = tmp_path / "recipe.json"
    file.write_text(recipe.model_dump_json())
    done = run_python(code, str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("step 3/3  loss") for line in lines)  # the child's progress is told here
    assert lines[-2].startswith("same | different | ('the recipes differ: seed")
    assert lines[-1] == "model" and (tmp_path / "model" / "config.json").is_file()
    assert json.loads((tmp_path / "a" / "resolved.json").read_text())["seed"] == 97
    assert (tmp_path / "a" / "recipe.yaml").read_text() == file.read_text()


def test_errors_of_the_child_are_raised_here(tiny: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", data={"train": str(tmp_path / "none.jsonl")})
    with pytest.raises(DataError, match=r"none\.jsonl"):
        isotrain.train(recipe)
    with pytest.raises(IsotrainError, match="this needs the package 'torch'"):
        run_without_torch(recipe)


def run_without_torch(recipe: isotrain.Recipe) -> None:
    """Hidden from the child as a module that cannot be imported."""
    os.environ["ISOTRAIN_HIDDEN_MODULES"] = "torch"
    try:
        isotrain.train(recipe)
    finally:
        del os.environ["ISOTRAIN_HIDDEN_MODULES"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interruption_ends_the_child_too(tiny: Path, tmp_path: Path, sent: signal.Signals) -> None:
    recipe = tiny_recipe(
        tiny, tmp_path / "run", "cpu", trainer={"steps": 5000}, observe={"loggers": ["console"]}
    )
    file = tmp_path / "recipe.json"
    file.write_text(recipe.model_dump_json())
    (tmp_path / "program.py").write_text("import sys, isotrain\nisotrain.train(sys.argv[1])\n")
    program = subprocess.Popen(
        [sys.executable, "program.py", str(file)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith("step "):
            break
    (child,) = children_of(program.pid)
    program.send_signal(sent)
    said, errors = program.communicate(timeout=120)
    if sent == signal.SIGINT:
        assert "Ctrl-C: saving a checkpoint after step" in said and "KeyboardInterrupt" in errors
        assert "the same command resumes after step" in said
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()


def test_the_doctor_without_a_command() -> None:
    import isotrain.tools.doctor.examine  # its package has the function's name

    report = isotrain.doctor("cpu", "tiny-sft")
    assert isinstance(report, isotrain.Report) and report.target == "cpu"
    with pytest.raises(RecipeError, match="device 'tpu' is unknown: use one of"):
        isotrain.doctor("tpu")
