"""What to evaluate, as a recipe: from a model, or from a checkpoint of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.engine.checkpoint.layout import MARKER, newest_complete, step_directory, steps_in
from isotrain.errors import DataError, RecipeError
from isotrain.models.files import hub_commit, model_directory
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import check_values, load_resolved, resolved
from isotrain.recipe.schema import Recipe

REWARDS = ("gsm8k", "math", "choice", "code")
# Of a run's rollout section, what says how engines run; the rest is about training.
_ENGINE = (
    *("engine", "max_tokens", "tensor_parallel", "memory_utilization", "kv_cache_gb", "eager"),
    *("engine_options", "server_python", "update_timeout", "validation"),
)
# A micro-batch is never made.
_ANY_BUDGET = 2**31 - 1
UNLIMITED = 2**20


@dataclass(frozen=True)
class Options:
    """What the command line says beside overrides; None where it says nothing."""

    data: str | None = None
    reward: str | None = None
    n: int | None = None
    temperature: float | None = None
    limit: int | None = None


def is_run(path: str) -> bool:
    return RunDirectory(path).resolved.is_file()


def checkpoint_steps(run: str) -> list[int]:
    """Steps of complete checkpoints, oldest first."""
    root = RunDirectory(run).checkpoints
    return [s for s in sorted(steps_in(root)) if (step_directory(root, s) / MARKER).exists()]


def choose_step(run: str, step: int | None) -> int:
    """The step of the checkpoint to evaluate, by default the newest."""
    known = checkpoint_steps(run)
    chosen = newest_complete(RunDirectory(run).checkpoints) if step is None else step
    if chosen not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise RecipeError(f"{run} has no complete checkpoint of step {chosen} (steps there: {listed})")
    return chosen


def evaluation_recipe(target: str, options: Options, overrides: Sequence[str], out: Path) -> Recipe:
    """The recipe's model is the target's own directory; for a run, the directory that it was trained from."""
    values: dict[str, Any] = {"model": {"path": target}}
    rollout: dict[str, Any] = {"max_tokens": 1024, "update_timeout": 300.0}
    data: dict[str, Any] = {"max_length": UNLIMITED, "too_long": "drop"}
    reward: dict[str, Any] | None = None
    if is_run(target):
        run = load_resolved(RunDirectory(target).resolved)
        _refuse_training_rewards(run)
        trained = resolved(run)
        values = {"seed": run.seed, "model": {**trained["model"], "lora": {}}}
        values["device"] = {key: trained["device"][key] for key in ("type", "determinism")}
        data = {key: trained["data"][key] for key in ("prompt_key", "validation", "validation_rows")}
        data |= {"max_length": run.data.max_length, "too_long": run.data.too_long}
        if run.rollout is None:  # lengths of supervised samples are not those of prompts
            data |= {"max_length": UNLIMITED, "too_long": "drop"}
        else:
            rollout = {key: trained["rollout"][key] for key in _ENGINE}
        reward = trained["reward"]
    if options.data is not None:
        data |= {"validation": options.data, "validation_rows": None}
    if not data.get("validation"):
        raise DataError("which rows? write --data FILE (.jsonl, .parquet, a directory or a Hub data set)")
    data |= {"train": data["validation"], "tokens_per_micro_batch": _ANY_BUDGET}
    if options.limit is not None:
        data["validation_rows"] = options.limit
    if options.reward is not None:
        reward = _reward(options.reward, reward)
    if reward is None and not any(override.startswith("reward.") for override in overrides):
        raise RecipeError(f"which reward? write --reward with {', '.join(REWARDS)}, or FILE.py:FUNCTION")
    validation = dict(rollout.get("validation") or {})
    if options.n is not None:
        validation["n"] = options.n
    # Several greedy responses would be one: by themselves they are sampled.
    if options.temperature is not None:
        validation["temperature"] = options.temperature
    elif options.n is not None and options.n > 1 and not validation.get("temperature"):
        validation["temperature"] = 1.0
    rollout |= {"validation": validation, "load_format": "safetensors"}
    values |= {"name": "evaluation", "output": str(out), "data": data, "rollout": rollout}
    values |= {"algorithm": {"name": "reinforce++"}, "cluster": {"placement": "separate"}}
    return check_values(values | ({"reward": reward} if reward else {}), "the evaluation", overrides)


def _refuse_training_rewards(run: Recipe) -> None:
    if run.rollout is not None and run.rollout.episodes is not None:
        raise RecipeError(
            "this run has episodes (rollout.environment or rollout.agent), which evaluate does not play: its "
            "own validation does (trainer.validate_every)"
        )


def check_reward(recipe: Recipe) -> None:
    """Rewards that a model on training ranks computes are not for one engine."""
    assert recipe.reward is not None
    if names := sorted(recipe.reward.reward_models):
        raise RecipeError(f"reward.{names[0]} needs training ranks: evaluate with another --reward")
    if recipe.reward.environment is not None:
        raise RecipeError("reward.environment needs episodes: evaluate with another --reward")


def _reward(name: str, trained: dict[str, Any] | None) -> dict[str, Any]:
    """The reward that the user named, with the answer key of the run if there is one."""
    common = {} if trained is None else {"answer_key": trained["answer_key"]}
    if name in REWARDS:
        return {**common, name: {}}
    if ":" in name:
        return {**common, "function": {"path": name}}
    raise RecipeError(f"--reward {name} is unknown: write {', '.join(REWARDS)}, or FILE.py:FUNCTION")


def model_identity(target: str, step: int | None) -> dict[str, Any]:
    """What tells this model from one that takes its place: a checkpoint's sums, or its files' times."""
    if step is not None:
        manifest = step_directory(RunDirectory(target).checkpoints, step) / MARKER
        return {"path": target, "step": step, "digest": hashlib.sha256(manifest.read_bytes()).hexdigest()}
    directory = model_directory(target)
    files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".json", ".jinja"))
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    commit = hub_commit(target)
    return {"path": target, "step": None, "digest": digest} | ({"commit": commit} if commit else {})
