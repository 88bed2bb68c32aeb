"""`isotrain import` and `isotrain export-config` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app

RUNNER = CliRunner()
OVERRIDES = "algorithm.adv_estimator=gae\ndata.train_files=gsm8k.parquet\ndata.val_files=gsm8k.parquet\n"


def test_recipe_on_stdout_and_report_on_stderr() -> None:
    result = RUNNER.invoke(app, ["import", "verl", "-"], input=OVERRIDES)
    assert result.exit_code == 0
    assert result.stdout.startswith("# From verl") and "name: ppo  # algorithm.adv_estimator" in result.stdout
    assert "3 keys: 3 mapped, 0 without effect, 0 refused, 0 unknown" in result.stderr


def test_a_guessed_version_is_called_a_guess(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=a.parquet\n"
    )
    guess = "is a guess, the script does not say it: --version has others"
    assert guess in RUNNER.invoke(app, ["import", "verl", str(script)]).stderr
    assert guess not in RUNNER.invoke(app, ["import", "verl", str(script), "--version", "0.7.0"]).stderr


def test_the_exit_code_says_that_the_training_differs() -> None:
    result = RUNNER.invoke(
        app, ["import", "verl", "-"], input=OVERRIDES + "my.option=1\nalgorithm.gamma=high\n"
    )
    assert result.exit_code == 1
    assert "my.option (line 4): value 1" in result.stderr and "algorithm.gamma (line 5)" in result.stderr
    harmless = OVERRIDES + "actor_rollout_ref.model.trust_remote_code=True\n"
    result = RUNNER.invoke(app, ["import", "verl", "-"], input=harmless)
    assert result.exit_code == 0 and "[the training is the same]" in result.stderr


def test_json_has_recipe_and_report() -> None:
    result = RUNNER.invoke(app, ["import", "verl", "-", "--json"], input=OVERRIDES + "my.option=1\n")
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and report["same_training"] is False
    assert [item["key"] for item in report["unknown"]] == ["my.option"]
    assert report["recipe"].startswith("# From verl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "verl", "no-such-file"], "cannot be read: No such file"),
        (["import", "verl", "-", "--version", "9"], "are known"),
        (["export-config", "tiny-dpo"], "verl has no trainer for dpo"),
    ],
)
def test_refuses_what_cannot_be_imported(arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, arguments, input=OVERRIDES)
    assert result.exit_code == 1 and message in result.output.replace("\n", " ")


def test_export_writes_a_script(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    result = RUNNER.invoke(app, ["export-config", "gsm8k-grpo-8x", "--to", "verl", "--out", str(path)])
    assert result.exit_code == 0, result.output
    assert "python3 -m verl.trainer.main_ppo" in path.read_text()
    assert "trainer.save_every" in result.stderr
    lossy = RUNNER.invoke(app, ["export-config", "tiny-grpo"])
    assert lossy.exit_code == 1 and "# NOT CARRIED OVER reward.answer_key" in lossy.stdout
