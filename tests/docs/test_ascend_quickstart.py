"""docs/ascend-quickstart.md shows what the doctor prints, the matrix's versions and valid commands."""

from __future__ import annotations

import shlex
from importlib.resources import files

import pytest
import yaml
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.recipe.library import locate
from isotrain.recipe.load import load_recipe
from side_by_side import DOCS, blocks

PAGE = (DOCS / "ascend-quickstart.md").read_text(encoding="utf-8")
MACHINES = DOCS.parent / "tests" / "tools" / "doctor" / "machines"
MISTAKES = {
    "container-without-driver": "no NPU is visible in this container",
    "container-without-permission": "npu-smi has no permission to use the driver",
    "cann-not-sourced": "CANN is installed, but its variables are not set in this shell",
}


def doctor(machine: str, monkeypatch: pytest.MonkeyPatch, language: str = "en") -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["--lang", language, "doctor", str(MACHINES / machine)])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_doctor_of_a_good_machine(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE if language == "en" else (DOCS / "zh/ascend-quickstart.md").read_text(encoding="utf-8")
    code, text = doctor("vllm-ascend-0.23-a2", monkeypatch, language)
    assert code == 0
    printed = {line.rstrip() for line in text.splitlines()}
    shown = blocks(page, "text")[0].splitlines()
    assert len(shown) == 5 and set(shown) <= printed


@pytest.mark.parametrize("machine", MISTAKES)
def test_the_doctor_of_mistakes(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = doctor(machine, monkeypatch)
    assert code == 1
    assert MISTAKES[machine] in text and f"| `{MISTAKES[machine]}` |" in PAGE


def test_versions_are_those_of_the_matrix() -> None:
    matrix = yaml.safe_load(
        files("isotrain.tools.doctor").joinpath("matrix.yaml").read_text(encoding="utf-8")
    )
    (row,) = [row for row in matrix["stacks"] if row["name"] == "isotrain on Ascend"]
    packages = row["packages"]
    assert packages["vllm"] == packages["vllm-ascend"]
    versions = [row["cann"], row["python"].removeprefix("==").removesuffix(".*"), packages["torch"]]
    versions += [packages["torch-npu"], packages["vllm"]]
    assert f"| {' | '.join(versions)} |" in PAGE


def test_recipes_and_overrides_are_valid() -> None:
    commands = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
    trained = [
        shlex.split(line, comments=True)[2:] for line in commands if line.startswith("isotrain train ")
    ]
    assert len(trained) == 3
    for name, *overrides in trained:
        assert load_recipe(locate(name), overrides).device.type == "npu"


def test_the_self_test_is_that_of_its_page() -> None:
    line = blocks(PAGE, "text")[1]
    assert line in (DOCS / "self-test.md").read_text(encoding="utf-8")
