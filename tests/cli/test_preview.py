from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from isotrain.cli.preview import preview
from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.prepare.tiny_vision import draw_picture, make_tiny_vision
from isotrain.errors import DataError

RECIPE = """\
name: shown
output: {root}/run
model:
  path: {root}/model
data:
  train: {root}/train.jsonl
algorithm:
  name: sft
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("preview")
    make_tiny(root, train_rows=3, validation_rows=1, layers=1)
    (root / "train.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "Hi\\u001b[31m"}], "completion": "A\\tsum é"}\n'
        '{"prompt": [{"role": "user", "content": "Q"}], "completion": "What is 3?"}\n'
    )
    path = root / "recipe.yaml"
    path.write_text(RECIPE.format(root=root))
    return path


@pytest.fixture(autouse=True)
def no_colour_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


def test_without_colour_brackets_mark_the_loss(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preview(str(recipe), [], 1)
    out = capsys.readouterr().out
    assert "\x1b" not in out, "neither our colours nor the escapes in the data"
    assert "\\u001b" in out
    assert "<|im_start|>│user│⏎\n" in out
    marked = out.partition("⟦")[2].partition("⟧")[0].replace("│", "")
    assert marked.startswith("A⇥sum·") and marked.endswith("<|im_end|>")
    assert "train.jsonl:1: " in out and "train.jsonl:2" not in out
    assert "⟦loss⟧  no loss" in out and "1 sample: " in out


def test_with_colour(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    preview(str(recipe), [], 2)
    out = capsys.readouterr().out
    assert "⟦" not in out and "\x1b[1;32m" in out and "\x1b[2m" in out
    assert "2 samples: " in out
    monkeypatch.setenv("NO_COLOR", "1")
    preview(str(recipe), [], 1)
    out = capsys.readouterr().out
    assert "⟦" in out and "\x1b[1;32m" not in out


def test_rows_left_out_are_counted(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preview(str(recipe), ["data.max_length=21", "data.too_long=drop"], 5)
    out = capsys.readouterr().out
    assert "train.jsonl:2: " in out and "1 rows were dropped" in out
    with pytest.raises(DataError, match="no sample to show: 2 rows"):
        preview(str(recipe), ["data.max_length=2", "data.too_long=drop"], 5)


ONLINE = (
    RECIPE.replace("name: sft", "name: grpo")
    + """\
rollout: {{n: 2, max_tokens: 8}}
reward:
  function: {{path: reward.py:score}}
  answer_key: extra.answer
"""
)


class TestPrompts:
    @pytest.fixture(scope="class")
    def online(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        root = tmp_path_factory.mktemp("prompts")
        make_tiny(root, train_rows=3, validation_rows=1, layers=1)
        (root / "train.jsonl").write_text(
            '{"prompt": [{"role": "user", "content": "Hi\\u001b[31m"}], '
            '"extra": {"answer": "4\\n\\u001b2"}}\n'
            '{"prompt": "What is 3?", "extra": {"answer": [3]}}\n'
            '{"prompt": "And 4?", "extra": {}}\n'
        )
        path = root / "recipe.yaml"
        path.write_text(ONLINE.format(root=root))
        return path

    def test_prompts_and_answers(self, online: Path, capsys: pytest.CaptureFixture[str]) -> None:
        preview(str(online), [], 2)
        out = capsys.readouterr().out
        assert "\x1b" not in out and "⟦" not in out, (
            "escapes in the data are spelled; there is no loss to mark"
        )
        first, second, _ = out.split("\n\n")
        assert "train.jsonl:1: " in first and "\\u001b" in first
        assert first.endswith("<|im_start|>│assistant│⏎\nanswer (extra.answer): 4⏎\\u001b2")
        assert "user│⏎\n" in second and second.endswith("answer (extra.answer): [3]")
        assert "2 prompts: " in out and "token boundary" in out and "warning" not in out

    def test_a_missing_answer(self, online: Path, capsys: pytest.CaptureFixture[str]) -> None:
        preview(str(online), [], 3)
        out = capsys.readouterr().out
        assert out.count("warning: ") == 1
        assert "warning: no 'extra.answer'" in out and "the row has 'prompt', 'extra'" in out
        preview(str(online), ["reward.function=null", "reward.model.path=somewhere"], 3)
        out = capsys.readouterr().out
        assert "warning" not in out and "a reward model needs none" in out

    def test_too_long(self, online: Path, capsys: pytest.CaptureFixture[str]) -> None:
        preview(str(online), ["data.max_length=14", "data.too_long=drop"], 1)
        assert "1 rows were dropped" in capsys.readouterr().out
        with pytest.raises(DataError, match="no prompt to show: 3 rows"):
            preview(str(online), ["data.max_length=2", "data.too_long=drop"], 1)
        preview(str(online), ["data.max_length=2", "data.too_long=truncate"], 1)
        assert "dropped" not in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_command_shows_the_same_without_torch(
    recipe: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = recipe.parent / f"{algorithm}.jsonl"
    pair = '"chosen": "What is 3?", "rejected": "No"' if algorithm == "dpo" else '"completion": "What is 3?"'
    rows.write_text(f'{{"prompt": [{{"role": "user", "content": "Q"}}], {pair}}}\n')
    overrides = [f"data.train={rows}", f"algorithm.name={algorithm}"]
    code = (
        "import sys; from isotrain.cli.preview import preview; preview(sys.argv[1], sys.argv[2:], rows=1); "
        "assert sys.modules['torch'] is None"
    )
    command = [sys.executable, "-c", code, str(recipe), *overrides]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0 and "PyTorch" not in told.stderr, told.stderr
    preview(str(recipe), overrides, rows=1)
    assert told.stdout == capsys.readouterr().out != ""


def test_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their size, where they are, and one placeholder with a number instead of all."""
    monkeypatch.setenv("ISOTRAIN_CACHE", str(tmp_path / "cache"))
    make_tiny_vision(tmp_path, train_rows=1, validation_rows=1)
    (tmp_path / "a.png").write_bytes(draw_picture("digits", random.Random(0)))
    row = {"prompt": [{"role": "user", "content": "<image>?"}], "completion": "123", "images": ["a.png"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(root=tmp_path))
    preview(str(path), ["data.image_key=images"], 1)
    out = capsys.readouterr().out
    assert "picture 1: 56 x 56 pixels, 4 x 4 patches, tokens 7 to 10\n" in out
    assert "<|vision_start|>│<|image_pad|>x4│<|vision_end|>" in out and out.count("<|image_pad|>") == 1


def test_pictures_of_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTRAIN_CACHE", str(tmp_path / "cache"))
    make_tiny_vision(tmp_path, train_rows=2, validation_rows=1, architecture="qwen3_vl")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(root=tmp_path).replace("sft", "grpo"))
    changes = [
        f"data.train={tmp_path}/pictures.parquet",
        "data.image_key=images",
        "rollout.n=2",
        "rollout.engine=hf",
    ]
    preview(
        str(path),
        [*changes, "reward.answer_key=answer", f"reward.function.path={tmp_path}/reward.py:score"],
        2,
    )
    out = capsys.readouterr().out
    assert out.count("picture 1: 64 x 64 pixels, 4 x 4 patches, tokens 7 to 10\n") == 2
    assert out.count("<|image_pad|>x4│") == 2 and "answer (answer): " in out
    assert "bytes" not in out, "pictures are no text"
