"""Should `algorithm.rollout_correction` be on by default? Runs with a cause of mismatch, corrected or not.

GRPO of the tiny model on its task, `hf` samples, one process (tiny_grpo.py). A run has one cause in its
engine from the first step to the last, and one correction: `off`, or `token` (truncated importance weights,
at most 2). `reward` is the mean of the last 10 steps; a run survives if that is at least 0.9 times the reward
of the same seed without cause and correction. Runs that `--out` has already are not run again.

    python benchmarks/mismatch_default.py [--out FILE] [--seeds 3] [--steps 60] [--causes NAME ...]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import bench
import torch
from mismatch_causes import STALE, decode, encoded_again, narrow_head, one_token_more, raw_logps, wrong_rope
from tiny_grpo import TinyGrpo, tiny_grpo

from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.trajectory import Trajectory

GAP = "training/rollout_logp_diff_mean"
LAST, SURVIVES = 10, 0.9
LEVELS = ("off", "token")


class Cause(NamedTuple):
    inject: Callable[[Any, Any], AbstractContextManager[None]] | None = None
    change: Callable[[Any, Any], list[Any]] | None = None
    """Of the tokens, between engine and ranks."""
    stale: tuple[str, ...] = ()
    """Tensors that keep their first values in the engine."""
    rollout: Mapping[str, Any] = MappingProxyType({})
    dtype: str = "float32"


CAUSES = {
    "none, float32": Cause(),
    "none, bfloat16": Cause(dtype="bfloat16"),
    "stale tensor": Cause(stale=(STALE,)),
    "raw log-probs at T=0.7": Cause(raw_logps, rollout={"temperature": 0.7}),
    "top-p 0.8": Cause(rollout={"top_p": 0.8}),
    "template off by one": Cause(change=one_token_more),
    "bf16 head": Cause(narrow_head),
    "decode kernel": Cause(decode),
    "wrong rope in one layer": Cause(wrong_rope),
    "re-tokenised prompt": Cause(change=encoded_again),
}


def train(tiny: Path, cause: Cause, level: str, seed: int, steps: int) -> dict[str, Any]:
    correction = {"rollout_correction": {"level": level}}
    sections = {"model": {"dtype": cause.dtype}, "rollout": cause.rollout, "algorithm": correction}
    rewards, gaps = [], []
    with tiny_grpo(tiny, seed=seed, **sections) as run, injected(run, cause):
        for _ in range(steps):
            scores = run.train(lambda written: changed(written, cause), stale=cause.stale)
            rewards.append(float(scores.mean()))
            gaps.append(run.gap[GAP])
    return {"reward": mean(rewards[-LAST:]), "best": max(rewards), "nats": mean(gaps), "rewards": rewards}


def injected(run: TinyGrpo, cause: Cause) -> AbstractContextManager[None]:
    side = SimpleNamespace(model=run.engine.model, engine=run.engine)
    return cause.inject(side, None) if cause.inject else nullcontext()


def changed(written: list[Trajectory], cause: Cause) -> list[Trajectory]:
    return cause.change(written, None) if cause.change else written


def tell(rows: list[dict[str, Any]], names: list[str]) -> None:
    honest = {
        row["seed"]: row["reward"]
        for row in rows
        if row["cause"] == "none, float32" and row["level"] == "off"
    }
    for name in names:
        table = {
            level: [
                row
                for row in rows
                if row["cause"] == name and row["level"] == level and row["seed"] in honest
            ]
            for level in LEVELS
        }
        if not all(table.values()):
            continue
        bench.show(
            name="mismatch_default",
            cause=name,
            nats={level: float(f"{mean(row['nats'] for row in table[level]):.2g}") for level in LEVELS},
            reward={level: bench.spread([row["reward"] for row in table[level]]) for level in LEVELS},
            survived={
                level: sum(row["reward"] >= SURVIVES * honest[row["seed"]] for row in table[level])
                for level in LEVELS
            },
        )


def main() -> None:
    parser = bench.Options(__doc__, seeds=1, steps=20, causes=["none, float32", "stale tensor"])
    parser.add_argument("--out", type=Path, help="a file that keeps each run: the next call goes on with it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--causes", nargs="*", choices=CAUSES, default=list(CAUSES))
    options = parser.read()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as directory,
        (options.out or Path(directory, "runs.jsonl")).open("a+") as out,
    ):
        out.seek(0)
        rows = [json.loads(line) for line in out]
        done = {(row["cause"], row["level"], row["seed"]) for row in rows}
        make_tiny(Path(directory), train_rows=256, validation_rows=8)
        for key in (
            (name, level, seed)
            for seed in range(options.seeds)
            for name in options.causes
            for level in LEVELS
        ):
            if key in done:
                continue
            name, level, seed = key
            row = train(Path(directory), CAUSES[name], level, seed, options.steps)
            rows.append({"cause": name, "level": level, "seed": seed, **row})
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    tell(rows, options.causes)


if __name__ == "__main__":
    main()
