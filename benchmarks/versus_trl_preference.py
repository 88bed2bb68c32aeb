"""DPO, KTO and reward models on GSM8K's solutions beside corrupted ones, with TRL and isotrain in turns.

SmolLM2-135M-Instruct in bfloat16 with gradient checkpointing, which is TRL's default, on the same rows in the
same order. Both sides ask a live reference in each step (isotrain: `algorithm.reference: live`, although its
default would ask it once). `ratio` is the step time of TRL's defaults over isotrain's. These train weights in
bfloat16, as they are stored, where most of a small update is rounded away; isotrain's are float32. So losses
are compared with those of a third side, TRL with float32 weights, at the same steps; `ratio_float32` is its
step time over isotrain's. TRL's KTO pairs prompts with other responses than isotrain's, so that its reference
point, and with it the loss, may differ a little. `waste` is the share of computed positions without a token.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import bench
from smollm2 import smollm2
from trl_side import count_batches, in_turns, settings
from turns import Measured, take_turns

SIDES = ["trl", "trl-float32", "isotrain"]
ALGORITHMS = ["dpo", "kto", "rm"]
BATCH, LR, MAX_LENGTH = 2 if bench.QUICK else 8, 1e-5, 512
GOAL, MOST_WASTE = 1.5, 0.05
LOSS_TOLERANCE = 0.02


def write_rows(algorithm: str, directory: Path, count: int) -> Path:
    from isotrain.data.prepare.gsm8k import prepare_gsm8k_preferences

    prepare_gsm8k_preferences(bench.gsm8k(), directory)
    file = directory / ("responses-train.jsonl" if algorithm == "kto" else "pairs-train.jsonl")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))
    return rows


def trl(algorithm: str, rows: Path, steps: int, directory: Path, dtype: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

    data = Dataset.from_list([json.loads(line) for line in rows.read_text().splitlines()])
    kinds = {
        "dpo": (DPOConfig, DPOTrainer),
        "kto": (KTOConfig, KTOTrainer),
        "rm": (RewardConfig, RewardTrainer),
    }
    config, trainer = kinds[algorithm]
    counted: list[float] = []
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    kind = AutoModelForSequenceClassification if algorithm == "rm" else AutoModelForCausalLM
    model: Any = kind.from_pretrained(
        smollm2(), dtype=dtype, **({"num_labels": 1} if algorithm == "rm" else {})
    )
    if algorithm == "rm":
        # TRL draws the new head at random; isotrain begins at 0, and both must take the same steps.
        model.config.pad_token_id = tokenizer.pad_token_id
        torch.nn.init.zeros_(model.score.weight)
    made = trainer(
        model,
        args=config(
            **settings(directory, LR),
            per_device_train_batch_size=BATCH,
            max_length=MAX_LENGTH,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
        ),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[in_turns(steps, lambda logs: {"loss": logs["loss"], "waste": counted.pop(0)})],
    )

    def padding(_: Any, batch: Any) -> float:
        masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
        return 1.0 - sum(int(m.sum()) for m in masks) / sum(int(m.numel()) for m in masks)

    count_batches(made, counted, padding)
    made.train()


def isotrain(algorithm: str, rows: Path, steps: int, directory: Path) -> None:
    from isotrain_side import supervised_recipe, train_in_turns

    settled = {} if algorithm == "rm" else {"reference": "live"}
    recipe = supervised_recipe(
        directory, rows, {"name": algorithm, **settled}, LR, batch_size=BATCH, max_length=MAX_LENGTH
    )
    train_in_turns(recipe, steps, lambda values: {"loss": values["train/loss"]})


@cache
def packing_waste(algorithm: str, turns: int, steps: int) -> float:
    """Share of the positions isotrain computes beyond its samples' tokens, a pair's prompt counted once."""
    from isotrain_side import BUDGET

    from isotrain.data.items import sizes
    from isotrain.data.loader import BatchLoader, Sampler
    from isotrain.data.preference import PreferenceEncoder
    from isotrain.data.rows import read_rows
    from isotrain.data.tokenise import build_store
    from isotrain.models.files import load_tokenizer

    kind = "responses" if algorithm == "kto" else "pairs"
    with tempfile.TemporaryDirectory() as directory:
        rows = write_rows(algorithm, Path(directory), (turns + 2) * steps * BATCH)
        encoder = PreferenceEncoder(load_tokenizer(smollm2()), kind, MAX_LENGTH, "error")  # type: ignore[arg-type]
        store = build_store(read_rows(str(rows)), encoder, Path(directory) / "store", "rows")
        loader = BatchLoader(
            store,
            Sampler(len(store), BATCH, 0, shuffle=False),
            BUDGET,
            0,
            1,
            share_prompts=kind == "pairs",
            longest=MAX_LENGTH if kind == "responses" else None,
        )
        computed = wanted = 0
        for batch in (batch for data in loader.one_pass() for batch in data.batches):
            computed += batch.packed.tokens_T.numel()
            for own in (sizes(store, number) for number in batch.numbers):
                # The responses of a pair have one prompt.
                wanted += own[0].prompt + sum(size.tokens - size.prompt for size in own)
    return 1 - wanted / computed


def run_side(algorithm: str, side: str, turns: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        # One turn warms up, and one keeps the loop alive until the parent ends it.
        rows = write_rows(algorithm, Path(directory), (turns + 2) * steps * BATCH)
        if side == "isotrain":
            isotrain(algorithm, rows, steps, Path(directory))
        else:
            trl(
                algorithm,
                rows,
                steps,
                Path(directory),
                "float32" if side == "trl-float32" or bench.QUICK else "auto",
            )


def tell(algorithm: str, turns: int, steps: int, results: Measured) -> None:
    seconds = {side: [turn["seconds"] / steps for turn in told] for side, told in results.items()}
    losses = {side: [row["loss"] for turn in told for row in turn["rows"]] for side, told in results.items()}
    ratios = {
        side: bench.spread([a / b for a, b in zip(seconds[side], seconds["isotrain"], strict=True)])
        for side in ("trl", "trl-float32")
    }
    ratio = ratios["trl"]
    means = {side: mean(values) for side, values in losses.items()}
    equal = abs(means["isotrain"] - means["trl-float32"]) <= LOSS_TOLERANCE * means["trl-float32"]
    waste = {
        "trl": mean(row["waste"] for turn in results["trl"] for row in turn["rows"]),
        "isotrain": packing_waste(algorithm, turns, steps),
    }
    bench.report(
        f"versus_trl {algorithm}",
        ratio["median"],
        goal=GOAL,
        met=ratio["median"] >= GOAL and equal and waste["isotrain"] < MOST_WASTE,
        ratio_float32=ratios["trl-float32"]["median"],
        ratios=ratio,
        ratios_float32=ratios["trl-float32"],
        losses_agree=equal,
        mean_losses={side: round(value, 5) for side, value in means.items()},
        largest_loss_difference=round(
            max(abs(a - b) for a, b in zip(losses["trl-float32"], losses["isotrain"], strict=True)), 5
        ),
        step_s={side: bench.spread(values) for side, values in seconds.items()},
        waste={side: round(value, 4) for side, value in waste.items()},
        peak_gib={side: round(told[-1]["peak_bytes"] / 2**30, 2) for side, told in results.items()},
    )


def compare(algorithm: str, turns: int, steps: int) -> None:
    take_turns(SIDES, turns, partial(tell, algorithm, turns, steps))
