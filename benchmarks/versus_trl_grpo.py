"""GRPO on GSM8K with TRL and with isotrain, in turns.

SmolLM2-135M-Instruct, computing in bfloat16, with gradient checkpointing, which is TRL's default and which
`--keep-activations` switches off on both sides; 4 prompts x 8 completions of at most 64 tokens a step, one
update, no KL, the same rows in the same order, the same Python reward, optimizer, temperature and loss. The
prompts are GSM8K's questions or, with `--prompts sums`, single calculations out of its solutions. TRL
generates with transformers: with vLLM its first weight update fails on a CPU, where vLLM repacks weights
after it has loaded them. isotrain is the whole program, with Ray and vLLM. TRL keeps its weights in bfloat16
as they are stored, which is its default; isotrain trains in float32 and rounds for computing, as always.

Both sides are to write as many tokens: with `--lengths equal` the model has an end token that it never
writes, so that all completions have 64 tokens. With `--lengths natural` they end where the model ends them,
and only tokens per second compare. `ratio` is isotrain's step rate over TRL's, in the median over the turns.
Memory is summed over the processes of a side, each with its own peak, so that shared pages count more than
once.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import bench
from number_reward import digits, score
from trl_side import STORED, in_turns, optimizer, settings
from turns import Measured, take_turns

SIDES = ["trl", "isotrain"]
PROMPTS, COMPLETIONS, MAX_TOKENS = (1, 4, 16) if bench.QUICK else (4, 8, 64)
# Sixteen tokens hold no answer: with all rewards equal nothing would be trained.
REWARD = "digits" if bench.QUICK else "score"
TEMPERATURE = 1.0
LR = 1e-6
STEPS = 10_000  # more than any run takes
GOAL = 4.0


def prepared_model(directory: Path, lengths: str) -> Path:
    """The model, or for equal lengths a copy that shares its weights and has another end token."""
    if lengths == "natural":
        return directory
    target = directory.with_name(f"{directory.name}-endless")
    if target.is_dir():
        return target
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    end = json.loads((directory / "tokenizer_config.json").read_text())["eos_token"]
    never = max((token for token in tokens if token["content"] != end), key=lambda token: token["id"])
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.mkdir()
    for file in directory.iterdir():
        if file.suffix == ".safetensors":
            (partial / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, partial / file.name)
    changes = {
        "config.json": {"eos_token_id": never["id"]},
        "generation_config.json": {"eos_token_id": never["id"]},
        "tokenizer_config.json": {"eos_token": never["content"]},
    }
    for name, values in changes.items():
        path = partial / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    partial.rename(target)
    return target


def write_rows(directory: Path, prompts: str) -> Path:
    from isotrain.data.prepare.gsm8k import prepare_gsm8k, prepare_gsm8k_sums

    if prompts == "sums":
        prepare_gsm8k_sums(bench.gsm8k(), directory)
        return directory / "train.jsonl"
    prepare_gsm8k(bench.gsm8k(), directory)
    return directory / "train.parquet"


def trl(model: Path, steps: int, prompts: str, checkpointing: bool, directory: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from isotrain.data.rows import read_rows

    rows = [row.values for row in read_rows(str(write_rows(directory, prompts)))]
    data = Dataset.from_list(
        [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in rows]
    )

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        return [
            digits(messages[0]["content"]) if REWARD == "digits" else score(messages[0]["content"], right)
            for messages, right in zip(completions, answer, strict=True)
        ]

    def metrics(logs: Mapping[str, float]) -> dict[str, float]:
        return {
            "length": logs["completions/mean_length"],
            "reward": logs["reward"],
            "grad_norm": float(logs["grad_norm"]),
        }

    config = GRPOConfig(
        **settings(directory, LR),
        **STORED,
        per_device_train_batch_size=PROMPTS * COMPLETIONS,
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group",
        max_steps=STEPS,
        shuffle_dataset=False,
        gradient_checkpointing=checkpointing,
    )
    callback = in_turns(steps, metrics)
    GRPOTrainer(
        str(model), reward_funcs=reward, args=config, train_dataset=data, callbacks=[callback]
    ).train()


def isotrain(model: Path, steps: int, prompts: str, checkpointing: bool, directory: Path) -> None:
    from isotrain_side import train_in_turns

    from isotrain.recipe.schema import Recipe

    recipe = Recipe.model_validate(
        {
            "name": "versus-trl",
            "output": str(directory / "run"),
            "model": {"path": str(model), "dtype": bench.DTYPE, "gradient_checkpointing": checkpointing},
            "data": {
                "train": str(write_rows(directory, prompts)),
                "batch_size": PROMPTS,
                "max_length": 512,
                "tokens_per_micro_batch": 4096,
                "shuffle": False,
            },
            "algorithm": {"name": "grpo", "convention": "trl"},
            "rollout": {
                "n": COMPLETIONS,
                "max_tokens": MAX_TOKENS,
                "temperature": TEMPERATURE,
                "kv_cache_gb": 0.5,
                "eager": bench.QUICK,  # compiling takes minutes
            },
            "reward": {"function": {"path": f"{Path(__file__).with_name('number_reward.py')}:{REWARD}"}},
            "cluster": {"address": "local"},
            "optimizer": optimizer(LR),
            "trainer": {"steps": STEPS},
            "observe": {"loggers": []},
        }
    )

    def metrics(values: Mapping[str, float]) -> dict[str, float]:
        parts = {name: value for name, value in values.items() if name.startswith("timing_s/")}
        return {
            "length": values["response_length/mean"],
            "reward": values["critic/score/mean"],
            "grad_norm": values["actor/grad_norm"],
            **parts,
        }

    train_in_turns(recipe, steps, metrics)


def run_side(side: str, model: Path, steps: int, prompts: str, checkpointing: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (isotrain if side == "isotrain" else trl)(model, steps, prompts, checkpointing, Path(directory))


def tell(lengths: str, prompts: str, checkpointing: bool, results: Measured) -> None:
    rows = {side: [row for turn in told for row in turn["rows"]] for side, told in results.items()}
    seconds = {side: [turn["seconds"] / len(turn["rows"]) for turn in told] for side, told in results.items()}
    tokens = {
        side: [
            PROMPTS * COMPLETIONS * sum(row["length"] for row in turn["rows"]) / turn["seconds"]
            for turn in told
        ]
        for side, told in results.items()
    }
    steps = bench.spread([a / b for a, b in zip(seconds["trl"], seconds["isotrain"], strict=True)])
    rates = bench.spread([a / b for a, b in zip(tokens["isotrain"], tokens["trl"], strict=True)])
    ratio = rates if lengths == "natural" else steps
    parts = [name for name in rows["isotrain"][0] if name.startswith("timing_s/")]
    bench.report(
        "versus_trl grpo",
        ratio["median"],
        goal=GOAL,
        met=ratio["median"] >= GOAL,
        lengths=lengths,
        prompts=prompts,
        gradient_checkpointing=checkpointing,
        ratios=steps,
        ratios_tokens_per_s=rates,
        step_s={side: bench.spread(values) for side, values in seconds.items()},
        completion_tokens_per_s={side: bench.spread(values) for side, values in tokens.items()},
        mean_length={side: round(mean(row["length"] for row in told), 2) for side, told in rows.items()},
        mean_reward={side: round(mean(row["reward"] for row in told), 4) for side, told in rows.items()},
        grad_norm={side: bench.spread([row["grad_norm"] for row in told]) for side, told in rows.items()},
        peak_gib={side: round(told[-1]["peak_bytes"] / 2**30, 2) for side, told in results.items()},
        isotrain_s={
            name.removeprefix("timing_s/"): bench.spread([row[name] for row in rows["isotrain"]])
            for name in parts
        },
        trl_generation="transformers: TRL's weight updates of vLLM fail on a CPU",
    )


def compare(turns: int, lengths: str, prompts: str, checkpointing: bool) -> None:
    # The default of every side, but written down: all of them use the same cores, one side at a time.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    take_turns(SIDES, turns, partial(tell, lengths, prompts, checkpointing))
