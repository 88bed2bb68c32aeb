"""A bare PyTorch loop against isotrain: same model, batches and seed. Lower is better.

Two processes, one with a loop written out by hand (transformers model, cross-entropy, fused AdamW) and one
with isotrain's whole supervised trainer, metrics file included, take turns of a few steps each; only one runs
at a time. `ratio` is the median over the turns of isotrain's step time over the bare one's in the same turn;
`losses_equal` compares every loss bit for bit.

    python benchmarks/supervised_overhead.py [--dtype float32|bfloat16] [--turns 7] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import numpy as np

LENGTH, BATCH, LR, DECAY, CLIP = 512, 2, 1e-5, 0.01, 1.0


def rows_of(path: Path, count: int) -> np.ndarray:
    """Real text cut into full-length rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench.smollm2())
    ids: list[int] = []
    with path.open() as file:
        while len(ids) < count * LENGTH:
            row = json.loads(next(file))
            ids += tokenizer(row["question"] + "\n" + row["answer"] + "\n")["input_ids"]
    return np.array(ids[: count * LENGTH], dtype=np.int32).reshape(count, LENGTH)


class Turns:
    """A worker's side: it works only between the parent's `go` and its own answer."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.losses: list[float] = []
        self.answer(ready=True)

    def answer(self, **fields: object) -> None:
        print(json.dumps(fields), flush=True)
        if not sys.stdin.readline():
            sys.exit()
        self.started = time.perf_counter()

    def after_step(self, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) == self.steps:
            seconds = (time.perf_counter() - self.started) / self.steps
            losses, self.losses = self.losses, []
            self.answer(seconds=seconds, losses=losses)


def bare(rows: np.ndarray, dtype_name: str, steps: int) -> None:
    """What one would write by hand. In bfloat16: float32 weights, copied to a bfloat16 model each step."""
    import torch
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype_name)
    model = AutoModelForCausalLM.from_pretrained(bench.smollm2(), dtype=dtype).train()
    working = [p for p in model.parameters() if p.requires_grad]
    same = dtype == torch.float32
    master = working if same else [p.detach().float().requires_grad_() for p in working]
    groups = [
        {"params": [p for p in master if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in master if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    turns = Turns(steps)
    for start in range(0, len(rows), BATCH):
        ids = torch.from_numpy(rows[start : start + BATCH]).long()
        if not same:
            with torch.no_grad():
                torch._foreach_copy_(working, master)
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden.flatten(0, 1)).float()
        targets = ids[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, reduction="none").sum() / len(targets)
        del logits
        loss.backward()
        if not same:
            for parameter, leaf in zip(working, master, strict=True):
                leaf.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turns.after_step(loss.item())


def isotrain(rows: np.ndarray, dtype_name: str, steps: int) -> None:
    """The trainer as a recipe builds it, but for where its samples come from."""
    from isotrain.algorithms import sft_loss
    from isotrain.data.feed import Feed
    from isotrain.data.sample import Sample
    from isotrain.data.sampler import Sampler
    from isotrain.data.store import build_store
    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine
    from isotrain.engine.checkpoint.writer import CheckpointWriter
    from isotrain.engine.world import join_world
    from isotrain.observe.metrics import MetricsLog
    from isotrain.observe.progress import Progress
    from isotrain.recipe.schema import ModelSection, OptimizerSection
    from isotrain.trainers.recorder import Recorder
    from isotrain.trainers.supervised import SupervisedTrainer

    class InTurns(Recorder):
        def write(self, step, values):  # type: ignore[no-untyped-def]
            super().write(step, values)
            turns.after_step(values["train/loss"])

    model = ModelSection(
        path=str(bench.smollm2()), dtype=dtype_name, gradient_checkpointing=False, head_chunk=BATCH * LENGTH
    )
    optimizer = OptimizerSection(lr=LR, weight_decay=DECAY, clip_norm=CLIP)
    device = choose_device("cpu")
    mask = np.ones(LENGTH, dtype=np.bool_)
    with tempfile.TemporaryDirectory() as directory, join_world(device) as world:
        store = build_store(list(rows), lambda row: Sample(row, mask), Path(directory) / "tokens", "rows")
        trainer = SupervisedTrainer(
            engine=build_engine(model, optimizer, device=device, world=world, seed=0),
            device=device,
            loss=sft_loss,
            schedule=lambda step: LR,
            feed=Feed(store, Sampler(len(rows), BATCH, 0, shuffle=False), BATCH * LENGTH, 0, 1),
            validation=None,
            writer=CheckpointWriter(Path(directory) / "checkpoints", 0, 1, keep=1),
            recorder=InTurns(Progress()),
            steps=len(rows) // BATCH,
            validate_every=0,
            save_every=0,
            max_skipped=0,
            peak_flops=None,
        )
        trainer.recorder.log = MetricsLog(Path(directory) / "metrics.jsonl")
        turns = Turns(steps)
        trainer.train(done=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--side", choices=["bare", "isotrain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    data = bench.shared() / "data" / "gsm8k" / "train.jsonl"
    if options.side:
        # One more turn than is measured: the last answer must come from a running loop.
        rows = rows_of(data, (options.turns + 2) * options.steps * BATCH)
        {"bare": bare, "isotrain": isotrain}[options.side](rows, options.dtype, options.steps)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--side"]
    sides = {
        side: subprocess.Popen([*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side in ("bare", "isotrain")
    }
    try:
        results = _alternate(sides, options.turns)
    finally:
        for process in sides.values():
            process.kill()
            process.wait()
    ratios = [
        mine["seconds"] / theirs["seconds"]
        for theirs, mine in zip(results["bare"], results["isotrain"], strict=True)
    ]
    losses = {side: [loss for turn in turns for loss in turn["losses"]] for side, turns in results.items()}
    equal = losses["bare"] == losses["isotrain"]
    median = bench.spread(ratios)["median"]
    bench.report(
        f"supervised_overhead ({options.dtype})",
        median,
        goal=1.03,
        met=median <= 1.03 and equal,
        losses_equal=equal,
        max_loss_difference=max(abs(a - b) for a, b in zip(losses["bare"], losses["isotrain"], strict=True)),
        ratios=bench.spread(ratios),
        bare_step_s=bench.spread([turn["seconds"] for turn in results["bare"]]),
        isotrain_step_s=bench.spread([turn["seconds"] for turn in results["isotrain"]]),
        tokens_per_step=BATCH * LENGTH,
    )


def _alternate(sides: dict[str, subprocess.Popen[str]], turns: int) -> dict[str, list[dict]]:
    results: dict[str, list[dict]] = {side: [] for side in sides}
    for process in sides.values():
        assert json.loads(process.stdout.readline())["ready"]
    for turn in range(turns + 1):
        order = list(sides) if turn % 2 else list(reversed(sides))
        for side in order:
            sides[side].stdin.write("go\n")
            sides[side].stdin.flush()
            results[side].append(json.loads(sides[side].stdout.readline()))
        print(
            f"turn {turn}: " + ", ".join(f"{s} {results[s][-1]['seconds']:.3f} s" for s in sides), flush=True
        )
    # The first turn warms caches and memory up.
    return {side: results[side][1:] for side in sides}


if __name__ == "__main__":
    main()
