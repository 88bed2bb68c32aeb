"""One script, run by TRL and imported: the same loss of the first step."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from isotrain.observe.metrics import read_metrics
from isotrain.recipe.load import load_recipe
from isotrain.tools.imports.convert import convert
from isotrain.trainers.launch import train_supervised

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

ROWS = 16  # one step takes all of them, so their order is the same
SCRIPT = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

args = SFTConfig(
    output_dir="OUTPUT",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_steps=2,
    learning_rate=1e-3,
    completion_only_loss=True,
    bf16=False,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
)
dataset = load_dataset("json", data_files="ROWS", split="train")
trainer = SFTTrainer(model="MODEL", args=args, train_dataset=dataset)
trainer.train()
"""


def test_the_first_steps_have_the_loss_of_trl(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    lines = (tiny / "train.jsonl").read_text().splitlines()[:ROWS]
    chats = [json.loads(line)["messages"] for line in lines]
    rows = [{"prompt": chat[-2]["content"], "completion": chat[-1]["content"]} for chat in chats]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    places = {"OUTPUT": tmp_path / "run", "ROWS": tmp_path / "rows.jsonl", "MODEL": tiny / "model"}
    text = SCRIPT
    for name, place in places.items():
        text = text.replace(name, str(place))
    (tmp_path / "sft.py").write_text(text)

    imported = convert(text.encode(), "trl")
    assert imported.same_training
    (tmp_path / "sft.yaml").write_text(imported.recipe)
    train_supervised(load_recipe(tmp_path / "sft.yaml"), "sft.yaml")
    ours = [row["train/loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]

    (tmp_path / "sft.py").write_text(text.replace(str(tmp_path / "run"), str(tmp_path / "trl")))
    trainer = runpy.run_path(str(tmp_path / "sft.py"))["trainer"]
    theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(ours) == len(theirs) == 2
    # the second step comes after an update by AdamW with TRL's constants
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert abs(ours[1] - ours[0]) > 1e-3
