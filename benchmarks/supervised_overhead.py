"""A bare PyTorch loop against isotrain: same model, batches and seed. Lower is better.

Two processes, one with a loop written out by hand (transformers model, cross-entropy, fused AdamW) and one
with isotrain's whole supervised trainer, metrics file included, take turns of a few steps each; only one
works at a time. `ratio` is the median over the turns of isotrain's step time over the bare one's in the same
turn; `losses_equal` compares every loss bit for bit.

    python benchmarks/supervised_overhead.py [--dtype float32|bfloat16] [--turns 7] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import bench
import numpy as np
import torch
from smollm2 import smollm2
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import Measured, Turns, take_turns

LENGTH, BATCH, LR, DECAY, CLIP = 512, 2, 1e-5, 0.01, 1.0
GOAL = 1.03


def full_rows(count: int) -> np.ndarray:
    """Real text cut into rows of full length."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    ids: list[int] = []
    with (bench.gsm8k() / "train.jsonl").open() as file:
        while len(ids) < count * LENGTH:
            row = json.loads(next(file))
            ids += tokenizer(row["question"] + "\n" + row["answer"] + "\n")["input_ids"]
    return np.array(ids[: count * LENGTH], dtype=np.int32).reshape(count, LENGTH)


def bare(rows: np.ndarray, dtype_name: str, steps: int) -> None:
    """What one would write by hand. In bfloat16: float32 weights, copied to a bfloat16 model each step."""
    dtype = getattr(torch, dtype_name)
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=dtype).train()
    working = [p for p in model.parameters() if p.requires_grad]
    single = dtype == torch.float32
    master = working if single else [p.detach().float().requires_grad_() for p in working]
    groups = [
        {"params": [p for p in master if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in master if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    turns = Turns(steps)
    for start in range(0, len(rows), BATCH):
        ids = torch.from_numpy(rows[start : start + BATCH]).long()
        if not single:
            with torch.no_grad():
                torch._foreach_copy_(working, master)
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden.flatten(0, 1)).float()
        targets = ids[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, reduction="none").sum() / len(targets)
        del logits
        loss.backward()
        if not single:
            for parameter, leaf in zip(working, master, strict=True):
                leaf.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turns.after_step(loss=loss.item())


def isotrain(rows: np.ndarray, dtype_name: str, steps: int) -> None:
    from types import SimpleNamespace
    from typing import Any

    from isotrain_side import recorder_in_turns

    from isotrain.algorithms.sft import sft_loss
    from isotrain.data.items import SAMPLES, Item, Sample
    from isotrain.data.loader import BatchLoader, Sampler
    from isotrain.data.rows import Row
    from isotrain.data.tokenise import build_store
    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine
    from isotrain.engine.checkpoint.writer import CheckpointWriter
    from isotrain.engine.world import join_world
    from isotrain.observe.console import Console
    from isotrain.observe.metrics import MetricsLog
    from isotrain.observe.run_directory import RunDirectory
    from isotrain.recipe.schema import ModelSection, OptimizerSection
    from isotrain.trainers.job import Job, RankCheckpoints, SaveSchedule
    from isotrain.trainers.supervised import SftTask, SupervisedTrainer

    tokens = BATCH * LENGTH
    model = ModelSection(
        path=str(smollm2()), dtype=dtype_name, gradient_checkpointing=False, logits_chunk=tokens
    )
    optimizer = OptimizerSection(lr=LR, weight_decay=DECAY, max_grad_norm=CLIP)
    mask = np.ones(LENGTH, dtype=np.bool_)
    device = choose_device("cpu")
    with tempfile.TemporaryDirectory() as directory, join_world(device) as world:
        named = [Row({"tokens": tokens_T}, "rows") for tokens_T in rows]
        encoder: Any = SimpleNamespace(
            codec=SAMPLES, values=lambda row: [Item((Sample(row.values["tokens"], mask),))]
        )
        store = build_store(named, encoder, Path(directory) / "tokens", "rows")
        engine = build_engine(model, optimizer, device=device, world=world, seed=0)
        recorder = recorder_in_turns(steps, lambda values: {"loss": values["train/loss"]})(Console())
        recorder.log = MetricsLog(Path(directory) / "metrics.jsonl")
        run, total = RunDirectory(directory), len(store) // BATCH
        writer = CheckpointWriter(run.checkpoints, 0, 1, keep=1)
        SupervisedTrainer(
            job=Job(run, recorder, total, total, SaveSchedule(0, total), world=world),
            engine=engine,
            device=device,
            task=SftTask(engine, sft_loss),
            schedule=lambda step: LR,
            loader=BatchLoader(store, Sampler(len(store), BATCH, 0, shuffle=False), tokens, 0, 1),
            validation=None,
            checkpoints=RankCheckpoints(run, device, {"": engine}, writer),
            peak_flops=None,
        ).train(done=0)


def tell(dtype: str, steps: int, results: Measured) -> None:
    seconds = {side: [turn["seconds"] / steps for turn in turns] for side, turns in results.items()}
    losses = {
        side: [row["loss"] for turn in turns for row in turn["rows"]] for side, turns in results.items()
    }
    ratios = bench.spread([a / b for a, b in zip(seconds["isotrain"], seconds["bare"], strict=True)])
    equal = losses["bare"] == losses["isotrain"]
    bench.report(
        f"supervised_overhead {dtype}",
        ratios["median"],
        goal=GOAL,
        met=ratios["median"] <= GOAL and equal,
        losses_equal=equal,
        max_loss_difference=max(abs(a - b) for a, b in zip(losses["bare"], losses["isotrain"], strict=True)),
        ratios=ratios,
        bare_step_s=bench.spread(seconds["bare"]),
        isotrain_step_s=bench.spread(seconds["isotrain"]),
        tokens_per_step=BATCH * LENGTH,
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=2, steps=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--side", choices=["bare", "isotrain"], help=argparse.SUPPRESS)
    options = parser.read()
    if options.side:
        # One turn more than is measured warms up, and one keeps the loop alive until the parent ends it.
        rows = full_rows((options.turns + 2) * options.steps * BATCH)
        {"bare": bare, "isotrain": isotrain}[options.side](rows, options.dtype, options.steps)
        return
    take_turns(["bare", "isotrain"], options.turns, partial(tell, options.dtype, options.steps))


if __name__ == "__main__":
    main()
