"""Run directories as trainings leave them, with responses that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from isotrain.data.record import Marks, Recorded, step_file, write_trajectories
from isotrain.data.trajectory import Trajectory
from isotrain.observe.metrics import MetricsLog

PROMPT = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"


def tokenizer_of(tiny: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny / "model" / "tokenizer.json"))


def response(
    tokens: Sequence[int],
    prompt: Sequence[int] = (5, 6, 7),
    *,
    prompt_index: int = 0,
    sample: int = 0,
    reward: float = 0.5,
    advantage: float | None = 0.25,
    mask: Sequence[bool] | None = None,
    version: Sequence[int] | None = None,
    logp: Sequence[float] | None = None,
    finished: bool = True,
    failure: str | None = None,
    detail: str = "",
    source: str = "data",
    parts: Mapping[str, float] | None = None,
) -> Recorded:
    number = len(tokens)
    trajectory = Trajectory(
        row=prompt_index + 100,
        prompt_index=prompt_index,
        sample=sample,
        seed=7,
        prompt_length=len(prompt),
        tokens_T=np.array([*prompt, *tokens], np.int32),
        mask_N=np.array([True] * number if mask is None else mask, np.bool_),
        logp_N=np.array(np.linspace(-3, 0, number) if logp is None else logp, np.float32),
        version_N=np.array([3] * number if version is None else version, np.int32),
        finished=finished,
    )
    told = {"function": reward} if parts is None else dict(parts)
    marks = Marks(reward, told, failure, source, None, reward, detail)
    return Recorded(trajectory, marks, advantage)


def write_metrics(run: Path, first: int, last: int) -> None:
    path = run / "metrics.jsonl"
    with MetricsLog.resume(path, first - 1) if path.exists() else MetricsLog(path) as log:
        for step in range(first, last + 1):
            row = {
                "critic/score/mean": step / 10,
                "actor/entropy": 1 / step,
                "critic/rewards/mean": step / 10,
            }
            validated = {"val-core/data/reward/mean@1": step / 9} if step % 2 == 0 else {}
            log.append(step, row | validated)


def make_run(run: Path, model: Path | str, steps: int = 3, **records: Sequence[Recorded]) -> Path:
    """Metrics of some steps; `step_2=[...]` are responses of step 2, `step_2_rank_1` of its rank 1."""
    run.mkdir(parents=True, exist_ok=True)
    recipe = {
        "name": "shown",
        "model": {"path": str(model)},
        "algorithm": {"name": "grpo"},
        "trainer": {"steps": 10},
        "rollout": {"record": True},
    }
    (run / "resolved.json").write_text(json.dumps(recipe))
    write_metrics(run, 1, steps)
    ranks = {name.partition("_rank_")[0]: 0 for name in records}
    for name in records:
        ranks[name.partition("_rank_")[0]] += 1
    for name, own in records.items():
        step, _, rank = name.partition("_rank_")
        path = step_file(run / "trajectories", int(step.removeprefix("step_")), int(rank or 0))
        write_trajectories(path, own, ranks[step])
    return run
