from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.prepare import app


def test_tiny_writes_files_and_says_what_to_run_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["tiny", "--out", "work/tiny", "--rows", "20"])
    assert result.exit_code == 0, result.output
    assert "wrote work/tiny/train.jsonl (20 rows)" in result.output
    assert "wrote work/tiny/prompts-validation.jsonl (2 rows)" in result.output
    assert result.output.endswith(
        "Next:\n    isotrain train tiny-sft\nor, learning from rewards:\n    isotrain train tiny-grpo\n"
    )
    assert (tmp_path / "work/tiny/reward.py").is_file()
    assert (tmp_path / "work/tiny/model/model.safetensors").is_file()


def test_tiny_elsewhere_says_what_to_override(tmp_path: Path) -> None:
    out = tmp_path / "with space"
    result = CliRunner().invoke(app, ["tiny", "--out", str(out), "--rows", "10", "--architecture", "qwen3"])
    assert result.exit_code == 0, result.output
    assert f"model.path='{out}/model'" in result.output and f"data.train='{out}/train.jsonl'" in result.output
    assert f"data.train='{out}/prompts.jsonl'" in result.output
    assert f"reward.function.path='{out}/reward.py:score'" in result.output


def test_tiny_writes_a_vision_language_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiny", "--out", str(tmp_path), "--rows", "10", "--vision"])
    assert result.exit_code == 0, result.output
    for name in ("train", "validation", "pictures", "pictures-validation"):
        assert (
            f"wrote {tmp_path}/{name}.parquet (" in result.output and (tmp_path / f"{name}.parquet").is_file()
        )
    assert "isotrain train tiny-vision-sft" in result.output
    assert f"data.validation={tmp_path}/pictures-validation.parquet" in result.output
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "qwen2_5_vl"
    refused = CliRunner().invoke(app, ["tiny", "--out", "x", "--vision", "--architecture", "qwen3"])
    assert refused.exit_code == 2 and "qwen3 reads no pictures" in refused.output


def test_gsm8k_writes_parquet_and_says_what_to_run_next(tmp_path: Path) -> None:
    for split in ("train", "test"):
        line = json.dumps({"question": "How many?", "answer": "#### 3"})
        (tmp_path / f"{split}.jsonl").write_text(line + "\n")
    result = CliRunner().invoke(app, ["gsm8k", "--out", str(tmp_path / "out"), "--source", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'out' / 'test.parquet'} (1 rows)" in result.output
    assert "data.prompt_key=extra_info.question" in result.output
    online = f"isotrain train gsm8k-grpo-8x \\\n        data.train={tmp_path / 'out' / 'train.parquet'}"
    assert online in result.output


def test_gsm8k_tool_writes_rows_and_the_calculator(tmp_path: Path) -> None:
    for split, first in (("train", 20), ("test", 30)):
        solution = f"<<{first}*6={first * 6}>> <<{first * 6}+67={first * 6 + 67}>>"
        line = json.dumps({"question": "How many?", "answer": solution})
        (tmp_path / f"{split}.jsonl").write_text(line + "\n")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["gsm8k-tool", "--out", str(out), "--source", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"wrote {out / 'test.jsonl'} (1 rows)" in result.output
    assert f"wrote {out / 'calculator.py'}" in result.output
    assert f"rollout.environment.path={out / 'calculator.py'}:Calculator" in result.output


def test_preferences_are_converted_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "prefs.jsonl"
    source.write_text(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n")
    out = tmp_path / "pairs.jsonl"
    result = CliRunner().invoke(
        app, ["preferences", "ultrafeedback", "--source", str(source), "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert f"wrote {out} (1 rows from 1)" in result.output and out.is_file()


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys, isotrain.cli.prepare, isotrain.cli.preview;"
        "print({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
