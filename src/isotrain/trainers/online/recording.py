"""Metadata of a recording, by which a replay checks that it belongs to the same training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from isotrain.data.record import step_file
from isotrain.engine.identity import model_digest
from isotrain.errors import DataError
from isotrain.models.load import model_directory
from isotrain.observe.run_directory import write_atomically
from isotrain.recipe.difference import FIXED_BY_RECORDING
from isotrain.recipe.load import resolved
from isotrain.recipe.online import OnlineSection, PpoSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.start import digest_field

DESCRIPTION = "recorded.json"
_LARGEST = 1 << 20


def trajectories(run: str | Path) -> Path:
    """Where a run's recorded responses are."""
    return Path(run) / "trajectories"


def frozen_models(recipe: Recipe) -> list[str]:
    """Sections of models whose weights a checkpoint does not hold: a run that goes on reads them again."""
    assert recipe.reward is not None and isinstance(recipe.algorithm, OnlineSection)
    read_again = recipe.model.lora.rank > 0 or recipe.algorithm.kl.place != "off"
    return (["model"] if read_again else []) + [f"reward.{name}" for name in recipe.reward.reward_models]


def model_digests(recipe: Recipe, sections: Collection[str] | None = None) -> dict[str, str]:
    """Of all models that a step is computed with, by their sections; only of these `sections`, if given."""
    assert recipe.reward is not None
    model, process = recipe.reward.model, recipe.reward.process
    critic = recipe.algorithm.critic.path if isinstance(recipe.algorithm, PpoSection) else None
    paths = {
        "model": recipe.model.path,
        "algorithm.critic": critic,
        "reward.model": model.path if model else None,
        "reward.process": process.path if process else None,
    }
    return {
        name: model_digest(model_directory(path, digest_field(name)))
        for name, path in paths.items()
        if path and (sections is None or name in sections)
    }


def function_digests(recipe: Recipe, source: str | None) -> dict[str, str]:
    """Of the user's reward function, where there is one; `source` is the text of its file."""
    if source is None or recipe.reward is None or recipe.reward.function is None:
        return {}
    name = recipe.reward.function.path.rpartition(":")[2]
    return {"reward.function": hashlib.sha256(f"{name}\n{source}".encode()).hexdigest()}


def write_description(recipe: Recipe, digests: Mapping[str, str], steps: int) -> None:
    """Beside the trajectories; `digests` are those of data and models."""
    directory = trajectories(recipe.output)
    directory.mkdir(exist_ok=True)
    content = {"recipe": _fields(recipe), "digests": dict(digests), "steps": steps}
    write_atomically(directory / DESCRIPTION, json.dumps(content, indent=2) + "\n")


def check_recording(run: str, recipe: Recipe, digests: Mapping[str, str], steps: int) -> None:
    """Refuse a recording that this recipe cannot be trained from, before any worker is started."""
    path = trajectories(run) / DESCRIPTION
    described = _read(path)
    recorded, wanted = described["recipe"], _fields(recipe)
    for name, value in wanted.items():
        if recorded.get(name) != value:
            raise DataError(f"{name} is {value!r}, but {path} was recorded with {recorded.get(name)!r}")
    for name, digest in digests.items():
        if described["digests"].get(name) != digest:
            raise DataError(
                f"{digest_field(name)}: {path} was recorded with other content (the digests differ)"
            )
    for step in range(1, steps + 1):
        if not (file := step_file(path.parent, step, 0)).is_file():
            raise DataError(
                f"{file} is missing, so step {step} of {steps} cannot be replayed; finish the recording, "
                f"or replay less of it with trainer.steps={step - 1}"
            )


def _fields(recipe: Recipe) -> dict[str, Any]:
    found = {}
    for name in FIXED_BY_RECORDING:
        value: Any = resolved(recipe)
        for part in name.split("."):
            value = value[part]
        found[name] = value
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        content = json.loads(data) if len(data) <= _LARGEST else None
    except FileNotFoundError:
        raise DataError(
            f"rollout.replay: there is no {path}; record a run with `isotrain parity record`, or with "
            "rollout.record=true"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), dict) for key in ("recipe", "digests")
    ):
        raise DataError(f"{path} is not the metadata of a recording; record the run again")
    return content
