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
from turns import Turns, take_turns

SIDES = ["trl", "trl-packing", "isotrain"]
BATCH, LR, MAX_LENGTH = 8, 1e-5, 1024
BETAS, EPS, DECAY, CLIP = (0.9, 0.999), 1e-8, 0.0, 1.0
GOAL = 1.5
LOSS_TOLERANCE = 0.02


def open_store(count: int) -> Any:
    """GSM8K through the model's own chat template, tokenised by isotrain for all sides."""
    from isotrain.data.encode import Encoder
    from isotrain.data.store import cached_store
    from isotrain.models.load import load_tokenizer

    encoder = Encoder(load_tokenizer(smollm2()), "auto", "question", "answer", MAX_LENGTH, "error")
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.jsonl"
        with (bench.gsm8k() / "train.jsonl").open() as file:
            rows.write_text("".join(next(file) for _ in range(count)))
        return cached_store(str(rows), encoder, smollm2().parent / "benchmark-tokens")


def trl(rows: int, steps: int, packing: bool) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    store = open_store(rows)
    samples = [store[i] for i in range(len(store))]
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

    class InTurns(TrainerCallback):
        turns: Turns

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.turns = Turns(steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                tokens, loss_tokens = counted.pop(0)
                self.turns.after_step(loss=logs["loss"], tokens=tokens, loss_tokens=loss_tokens)

    counted: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        config = SFTConfig(
            output_dir=directory,
            per_device_train_batch_size=2 if packing else BATCH,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            weight_decay=DECAY,
            max_grad_norm=CLIP,
            num_train_epochs=1,
            max_length=MAX_LENGTH,
            packing=packing,
            train_sampling_strategy="sequential",
            use_cpu=True,
            bf16=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(str(smollm2()), args=config, train_dataset=data, callbacks=[InTurns()])
        collate = trainer.data_collator

        def counting(examples: list[dict[str, Any]]) -> Any:
            tokens = sum(len(example["input_ids"]) for example in examples)
            batch = collate(examples)
            counted.append((tokens, int((batch["labels"] != -100).sum())))
            return batch

        trainer.data_collator = counting
        trainer.train()


def isotrain(rows: int, steps: int) -> None:
    from isotrain_side import train_in_turns

    from isotrain.recipe.schema import ModelSection, OptimizerSection

    model = ModelSection(path=str(smollm2()), dtype="bfloat16", gradient_checkpointing=True)
    optimizer = OptimizerSection(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, clip_norm=CLIP)
    train_in_turns(open_store(rows), model, optimizer, batch=BATCH, budget=4096, steps=steps)


def run_side(side: str, turns: int, steps: int) -> None:
    # Packed batches of TRL hold more rows than the others'; enough for every side until the parent ends it.
    rows = (turns + 2) * steps * BATCH * 2
    if side == "isotrain":
        isotrain(rows, steps)
    else:
        trl(rows, steps, packing=side == "trl-packing")


def compare(turns: int) -> None:
    answers = take_turns(SIDES, turns)
    rate = {
        side: [sum(row["loss_tokens"] for row in turn["rows"]) / turn["seconds"] for turn in turns]
        for side, turns in answers.items()
    }
    total = {
        side: [sum(row["tokens"] for row in turn["rows"]) / turn["seconds"] for turn in turns]
        for side, turns in answers.items()
    }
    final = {side: mean(row["loss"] for row in turns[-1]["rows"]) for side, turns in answers.items()}
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
        peak_gib={side: round(turns[-1]["peak_bytes"] / 2**30, 2) for side, turns in answers.items()},
    )
