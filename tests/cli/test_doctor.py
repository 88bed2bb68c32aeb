"""`isotrain doctor` as people and programs see it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import npusim
import pytest
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.tools.doctor.self_test.stages import STAGES
from support import command

MACHINES = Path(__file__).parents[1] / "tools" / "doctor" / "machines"


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "100"})


def test_a_good_machine_has_no_problem() -> None:
    result = doctor(str(MACHINES / "good-a2"))
    assert result.exit_code == 0
    assert "8 x 910B3" in result.output and "no problem prevents training on npu" in result.output


def test_a_broken_machine_gets_commands_that_mend_it() -> None:
    result = doctor(str(MACHINES / "openrlhf-0.6.2"))
    assert result.exit_code == 1
    for words in (
        "error",
        "torch 2.5.1 is installed; isotrain needs torch>=2.10",
        "published for CANN 8.1.RC1: torch 2.5.1",
        "nearest complete stack: vllm-ascend 0.23.0 (published)",
        "    pip install torch==2.10.0\n",
        "pip install '.[train]'   # in a clone of isotrain\n",
    ):
        assert words in result.output, result.output


def test_json_has_findings_and_facts() -> None:
    result = doctor(str(MACHINES / "mask-out-of-order"), "--json")
    report = json.loads(result.output)
    assert result.exit_code == 1 and report["device"] == "npu" and not report["fits"]
    assert [finding["id"] for finding in report["findings"] if finding["level"] == "error"] == [
        "mask-out-of-order"
    ]
    assert report["facts"]["npus"][0]["name"] == "910B3"


def test_a_recipe_decides_the_device(tmp_path: Path) -> None:
    result = doctor(str(MACHINES / "plugin-without-cann"), "--recipe", "tiny-sft", "--for", "cpu")
    assert result.exit_code == 0 and "isotrain's own commands avoid it" in result.output.replace(
        "\n", " "
    ).replace("         ", "")


@pytest.mark.heavy
def test_a_saved_machine_is_read_back(tmp_path: Path) -> None:
    result = doctor("--for", "cpu", "--save", str(tmp_path / "report"))
    assert result.exit_code == 0 and "check it before you send it" in result.output
    again = doctor("--for", "cpu", str(tmp_path / "report"))
    assert again.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--for", "tpu"), 2, "npu, cuda, cpu"),
        (("nowhere",), 1, "not a recorded machine"),
        (("--save", "a", "b"), 2, "FOLDER is read, nothing runs"),
        (("--self-test", "a", "b"), 2, "FOLDER is read, nothing runs"),
        (("--self-test", "a", "--save", "b"), 2, "remove --save"),
        (("--cluster", "10.0.0.1:6379"), 2, "is for --self-test"),
        (("--recipe", "nowhere"), 1, "nowhere"),
    ],
)
def test_refuses_options_that_contradict_each_other(
    arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = doctor(*arguments)
    assert result.exit_code == code and words in result.output


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", "npu"])
def test_the_self_test_passes_its_stages_or_says_why_not(tmp_path: Path, on: str) -> None:
    """All stages pass, or say why they do not apply; together both devices have run all but one."""
    machine = tmp_path / "machine"
    machine.mkdir()
    folder = tmp_path / "trial"
    done = subprocess.run(
        command("doctor", "--for", on, "--self-test", str(folder)),
        env=npusim.environment(host=machine) if on == "npu" else None,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "self-test.json").read_text())
    assert [verdict["stage"] for verdict in results["verdicts"]] == list(STAGES)
    skipped = {verdict["stage"] for verdict in results["verdicts"] if verdict["outcome"] == "skipped"}
    assert (
        skipped
        == {
            "cpu": {"sft", "sft-bfloat16", "fused", "sleep", "weight-route", "two-machines"},
            "npu": {"graphs", "tensor-parallel", "two-machines"},
        }[on]
    )
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1 << 20
    again = doctor(str(folder))
    assert again.exit_code == 0 and "memory-returned    passed" in again.output


def test_a_self_test_needs_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = doctor("--for", "cpu", "--self-test", str(tmp_path))
    assert result.exit_code == 1 and "is not an empty directory" in str(result.output) + str(result.exception)


def test_a_machine_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "machine").symlink_to(MACHINES / "good-a2")
    result = doctor(str(tmp_path))
    assert result.exit_code == 1 and "is a link out of the folder" in str(result.output) + str(
        result.exception
    )
