"""Responses that may be one version of the weights old against strictly on-policy ones. Higher is better.

The tiny model learns to answer with digits, as `isotrain train` runs it, with a reward that takes a second,
as a call over a network does, and responses of very unequal lengths. With `rollout.staleness: 1` the next
step's responses are generated and scored while the model learns from this step's, and importance weights of
tokens correct for their age. What is learnt must be the same: `rewards` are means of the last steps.

Four sides, each in turns with different seeds. `on-policy`, `staleness 1` and `in flight` (staleness 2, with
weight updates that do not wait for responses) differ in nothing else: engine and rank are placed separately,
with a core each. `ratio` is the median of the time of all steps on-policy over that with staleness 1,
`ratio_in_flight` over that in flight. `on-policy, colocated` is what a user without staleness would run:
engine and rank take turns on all cores; `ratio_colocated` compares it with staleness 1.

Lengths: a random model hardly ever ends a response. So it is first taught, with SFT, to answer with random
digits and capitals, most of the responses short and some long (a log-normal distribution), and learns from
rewards to leave the capitals out; where a response ends is nothing to the reward.

With `--device npu`, the simulated one, the sides differ in how weights travel instead: through files or, as
they do by default, from device to device into a second buffer, both with and without updates in flight.
`ratio` is the time of all steps with files over that without, `ratio_update` that of the updates
(`timing_s/update_weights`), in which ranks wait. The engine is transformers. The model is tiny: these are
times of what an update costs whatever its size. benchmarks/weight_sync.py counts bytes.

    python benchmarks/asynchrony.py [--turns 2] [--steps 24]
    PYTHONPATH=tests/device/npusim/site python benchmarks/asynchrony.py --device npu --steps 8
"""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import bench

from isotrain.data.prepare.tiny import make_tiny, toy_prompts
from isotrain.observe.metrics import read_metrics

GOAL = 2.0
REWARD_TOLERANCE = 0.05
LAST_STEPS = 5
LONGEST = 96
REWARD = """
import asyncio, string

async def score(response: str) -> float:
    await asyncio.sleep(1.0)
    return sum(c in string.digits for c in response) / len(response) if response else 0.0
"""
# A core each: with the default of as many threads as cores, engine and rank would wait for each other.
A_CORE_EACH = {"OMP_NUM_THREADS": "1"}


class Side(NamedTuple):
    overrides: tuple[str, ...]
    variables: Mapping[str, str]


ON_POLICY, STALE, IN_FLIGHT, COLOCATED = "on-policy", "staleness 1", "in flight", "on-policy, colocated"
SIDES = {
    ON_POLICY: Side(("cluster.placement=separate",), A_CORE_EACH),
    STALE: Side(
        ("cluster.placement=separate", "rollout.staleness=1", "algorithm.rollout_correction.level=token"),
        A_CORE_EACH,
    ),
    IN_FLIGHT: Side(
        (
            "cluster.placement=separate",
            "rollout.staleness=2",
            "rollout.in_flight=true",
            "algorithm.rollout_correction.level=token",
        ),
        A_CORE_EACH,
    ),
    COLOCATED: Side(("cluster.placement=colocated",), {}),
}
BY_FILE = ", files"
ROUTES = {"": "broadcast to a second buffer", BY_FILE: "file"}
NPU_SIDES = {
    side + by: Side(
        (*SIDES[side].overrides, "device.type=npu", f"rollout.weight_transfer={transfer}"), A_CORE_EACH
    )
    for side in (STALE, IN_FLIGHT)
    for by, transfer in ((BY_FILE, "file"), ("", "auto"))
}
SHOWN = (
    "timing_s/wait_for_batch",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "timing_s/step",
)


def isotrain(*arguments: str, variables: Mapping[str, str] = A_CORE_EACH) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = {**inherited, "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, "-m", "isotrain.cli.main", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"isotrain {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_recipe(file: Path, **sections: Any) -> Path:
    file.write_text(json.dumps({"name": file.stem, **sections}))  # JSON is YAML
    return file


def make_task(directory: Path, engine: str) -> Path:
    """The taught model, prompts and reward; returns the recipe that learns from rewards."""
    make_tiny(directory)
    draw = random.Random(0)
    kinds = (string.digits, string.ascii_uppercase)

    def response() -> str:
        length = min(LONGEST, 1 + int(draw.lognormvariate(2.1, 1.0)))
        return "".join(draw.choice(draw.choice(kinds)) for _ in range(length))

    prompts = [row for row in toy_prompts(4000, seed=5) if row["answer"] == "digits"]
    taught = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": response()}]}
        for row in prompts
        for _ in "ab"
    ]
    sft = write_recipe(
        directory / "lengths.yaml",
        output=str(directory / "lengths"),
        model={"path": str(directory / "model"), "dtype": "float32"},
        data={
            "train": str(write_rows(directory / "taught.jsonl", taught)),
            "max_length": 192,
            "batch_size": 32,
        },
        algorithm={"name": "sft"},
        optimizer={"lr": 5e-3},
        trainer={"steps": 40 if bench.QUICK else 120},
    )
    isotrain("train", str(sft))
    isotrain("export", str(directory / "lengths"), "--out", str(directory / "taught"))
    (directory / "slow_reward.py").write_text(REWARD)
    return write_recipe(
        directory / "asynchrony.yaml",
        output="set by each run",
        model={"path": str(directory / "taught"), "dtype": "float32"},
        data={
            "train": str(write_rows(directory / "prompts-digits.jsonl", prompts)),
            "max_length": 64,
            "batch_size": 32,
        },
        algorithm={"name": "grpo"},
        rollout={"n": 8, "max_tokens": LONGEST, "kv_cache_gb": 0.25, "engine": engine},
        reward={
            "answer_key": "answer",
            "function": {"path": f"{directory / 'slow_reward.py'}:score", "concurrency": 256},
        },
        cluster={"address": "local"},
        optimizer={"lr": 1e-3, "schedule": "constant", "warmup_ratio": 0},
    )


def run(recipe: Path, sides: Mapping[str, Side], side: str, seed: int, steps: int) -> dict[str, float]:
    """Metrics of one run, by name; times are seconds of a step."""
    output = recipe.with_name(f"run-{list(sides).index(side)}-{seed}")
    started = time.perf_counter()
    isotrain(
        "train",
        str(recipe),
        f"output={output}",
        f"seed={seed}",
        f"trainer.steps={steps}",
        *sides[side].overrides,
        variables=sides[side].variables,
    )
    if sides is NPU_SIDES:
        start = json.loads((output / "environment.json").read_text())["starts"][-1]
        route, expected = start["device"]["rollout"]["weights by"], ROUTES[BY_FILE if BY_FILE in side else ""]
        if route != expected:
            raise SystemExit(f"{side}: weights went by {route}, not by {expected}")
    rows = read_metrics(output / "metrics.jsonl")
    metrics = {
        "steps_s": sum(row["timing_s/step"] for row in rows),
        "whole_run_s": time.perf_counter() - started,
        "first_reward": rows[0]["critic/score/mean"],
        "last_reward": mean(row["critic/score/mean"] for row in rows[-LAST_STEPS:]),
        "length": mean(row["response_length/mean"] for row in rows),
        "longest": mean(row["response_length/max"] for row in rows),
        "token_age": mean(row["rollout/staleness/token_mean"] for row in rows),
        "oldest_token": max(row["rollout/staleness/max"] for row in rows),
        **{name.removeprefix("timing_s/"): mean(row[name] for row in rows) for name in SHOWN},
    }
    print(
        f"seed {seed}, {side}: {metrics['steps_s']:.1f} s, reward from "
        f"{metrics['first_reward']:.3f} to {metrics['last_reward']:.3f}, "
        f"lengths {metrics['length']:.0f} of up to {metrics['longest']:.0f}, "
        f"tokens {metrics['token_age']:.2f} versions old, at most {metrics['oldest_token']:.0f}",
        file=sys.stderr,
        flush=True,
    )
    return metrics


def tell(told: Mapping[str, list[dict[str, float]]], steps: int) -> None:
    def over(side: str, fast: str, name: str = "steps_s") -> dict[str, float]:
        pairs = zip(told[side], told[fast], strict=True)
        return bench.spread([a[name] / b[name] for a, b in pairs])

    rewards = {side: mean(row["last_reward"] for row in rows) for side, rows in told.items()}
    agree = max(rewards.values()) - min(rewards.values()) <= REWARD_TOLERANCE
    ratios: dict[str, dict[str, float]]
    if ON_POLICY in told:
        goal, ratio = GOAL, over(ON_POLICY, STALE)
        ratios = {"ratio_in_flight": over(ON_POLICY, IN_FLIGHT), "ratio_colocated": over(COLOCATED, STALE)}
    else:
        goal, ratio = None, over(STALE + BY_FILE, STALE)
        ratios = {
            "ratio_update": over(STALE + BY_FILE, STALE, "update_weights"),
            "ratio_in_flight": over(IN_FLIGHT + BY_FILE, IN_FLIGHT),
            "ratio_update_in_flight": over(IN_FLIGHT + BY_FILE, IN_FLIGHT, "update_weights"),
        }
    bench.report(
        "asynchrony",
        ratio["median"],
        goal=goal,
        met=None if goal is None else ratio["median"] >= goal and agree,
        ratios=ratio,
        **ratios,
        rewards={side: round(value, 4) for side, value in rewards.items()},
        rewards_agree=agree,
        steps=steps,
        **{
            side: {name: bench.spread([row[name] for row in rows]) for name in rows[0]}
            for side, rows in told.items()
        },
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=1, steps=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--device", choices=["cpu", "npu"], default="cpu")
    options = parser.read()
    sides = NPU_SIDES if options.device == "npu" else SIDES
    told: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ISOTRAIN_CACHE"] = f"{directory}/cache"
        # transformers starts sooner than vLLM, which has no build for the simulated device.
        recipe = make_task(Path(directory), "hf" if bench.QUICK or sides is NPU_SIDES else "vllm")
        print("the model answers with digits and capitals of skewed lengths now", file=sys.stderr, flush=True)
        if sides is NPU_SIDES:
            simulated = {"NPU_SIM_DEVICES": "2", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
            (Path(directory) / "machine").mkdir()
            os.environ.update(simulated | {"NPU_SIM_HOST": f"{directory}/machine"})
        for turn in range(options.turns):
            for side in sides if turn % 2 == 0 else reversed(sides):
                told[side].append(run(recipe, sides, side, 42 + turn, options.steps))
            tell(told, options.steps)


if __name__ == "__main__":
    main()
