"""Supervised fine-tuning on GSM8K with TRL and with isotrain, in turns.

SmolLM2-135M-Instruct in bfloat16 with gradient checkpointing, which is TRL's default, in three processes: TRL
with its default collation (padding), TRL with its own packing, and isotrain. All read the same token ids and
labels. `ratio` is isotrain's loss-bearing tokens per second over those of TRL's default; `ratio_packing`
compares with TRL's packing, which forms other batches of the same rows. `final_losses` are means over the
last turn; TRL's default and isotrain take the same steps, so theirs must agree.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import bench
from smollm2 import smollm2
from trl_side import STORED, count_batches, in_turns, settings
from turns import Measured, take_turns

SIDES = ["trl", "trl-packing", "isotrain"]
BATCH, LR, MAX_LENGTH = 2 if bench.QUICK else 8, 1e-5, 1024
GOAL = 1.5
LOSS_TOLERANCE = 0.02


def write_rows(directory: Path, count: int) -> Path:
    rows = directory / "rows.jsonl"
    with (bench.gsm8k() / "train.jsonl").open() as file:
        rows.write_text("".join(next(file) for _ in range(count)))
    return rows


def trl(rows: Path, steps: int, packing: bool, directory: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from isotrain.data.encode import Encoder
    from isotrain.data.tokenise import cached_store
    from isotrain.models.files import load_tokenizer

    encoder = Encoder(load_tokenizer(smollm2()), "auto", "question", "answer", MAX_LENGTH, "error")
    store = cached_store(str(rows), encoder, directory / "tokens")
    samples = [store[i].samples[0] for i in range(len(store))]
    data = Dataset.from_list(
        [
            {
                "input_ids": sample.tokens_T.tolist(),
                "labels": [
                    t if m else -100 for t, m in zip(sample.tokens_T.tolist(), sample.mask_T, strict=True)
                ],
            }
            for sample in samples
        ]
    )
    counted: list[dict[str, float]] = []
    config = SFTConfig(
        **settings(directory, LR),
        **STORED,
        per_device_train_batch_size=2 if packing else BATCH,
        num_train_epochs=1,
        max_length=MAX_LENGTH,
        packing=packing,
        train_sampling_strategy="sequential",
    )
    callback = in_turns(steps, lambda logs: {"loss": logs["loss"], **counted.pop(0)})
    trainer = SFTTrainer(str(smollm2()), args=config, train_dataset=data, callbacks=[callback])

    def tokens(examples: list[dict[str, Any]], batch: Any) -> dict[str, float]:
        return {
            "tokens": sum(len(example["input_ids"]) for example in examples),
            "loss_tokens": int((batch["labels"] != -100).sum()),
        }

    count_batches(trainer, counted, tokens)
    trainer.train()


def isotrain(rows: Path, steps: int, directory: Path) -> None:
    from isotrain_side import supervised_recipe, train_in_turns

    recipe = supervised_recipe(
        directory,
        rows,
        {"name": "sft"},
        LR,
        batch_size=BATCH,
        max_length=MAX_LENGTH,
        prompt_key="question",
        completion_key="answer",
    )
    names = ("loss", "tokens", "loss_tokens")
    train_in_turns(recipe, steps, lambda values: {name: values[f"train/{name}"] for name in names})


def run_side(side: str, turns: int, steps: int) -> None:
    # Packed batches of TRL hold more rows than the others'; enough for every side until the parent ends it.
    with tempfile.TemporaryDirectory() as directory:
        rows = write_rows(Path(directory), (turns + 2) * steps * BATCH * 2)
        if side == "isotrain":
            isotrain(rows, steps, Path(directory))
        else:
            trl(rows, steps, side == "trl-packing", Path(directory))


def tell(results: Measured) -> None:
    rate = {
        side: [sum(row["loss_tokens"] for row in turn["rows"]) / turn["seconds"] for turn in turns]
        for side, turns in results.items()
    }
    total = {
        side: [sum(row["tokens"] for row in turn["rows"]) / turn["seconds"] for turn in turns]
        for side, turns in results.items()
    }
    final = {side: mean(row["loss"] for row in turns[-1]["rows"]) for side, turns in results.items()}
    over_default = bench.spread([a / b for a, b in zip(rate["isotrain"], rate["trl"], strict=True)])
    over_packing = bench.spread([a / b for a, b in zip(rate["isotrain"], rate["trl-packing"], strict=True)])
    equal = abs(final["isotrain"] - final["trl"]) <= LOSS_TOLERANCE * final["trl"]
    bench.report(
        "versus_trl sft",
        over_default["median"],
        goal=GOAL,
        met=over_default["median"] >= GOAL and over_packing["median"] >= 1.0 and equal,
        ratio_packing=over_packing["median"],
        losses_agree=equal,
        final_losses={side: round(loss, 4) for side, loss in final.items()},
        ratios=over_default,
        ratios_packing=over_packing,
        loss_tokens_per_s={side: bench.spread(values) for side, values in rate.items()},
        tokens_per_s={side: bench.spread(values) for side, values in total.items()},
        peak_gib={side: round(turns[-1]["peak_bytes"] / 2**30, 2) for side, turns in results.items()},
    )


def compare(turns: int) -> None:
    take_turns(SIDES, turns, tell)
