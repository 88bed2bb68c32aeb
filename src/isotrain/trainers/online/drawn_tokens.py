"""The drawn tokens of a recorded step, with the logits that this process computes at their positions.

Q: positions, V: the vocabulary, T: tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from isotrain.data.record import read_step
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError, ModelError
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved
from isotrain.trainers.online.recording import recorded_digests, trajectories

# Logits of one forward pass, at most: a hundred megabytes in float32.
_LARGEST = 25_000_000


@dataclass(frozen=True)
class RecordedStep:
    """The inputs of a sampler test, read from a run directory that may come from elsewhere."""

    model: Path
    dtype: str
    temperature: float
    top_p: float
    top_k: int
    engine: str
    trajectories: list[Trajectory]
    """Trajectories that were sampled from the weights in `model` alone."""


def read_recorded_step(run: Path, step: int = 1, model: Path | None = None) -> RecordedStep:
    """A step of a run with `rollout.record`; `model` has the weights after the step before.

    The first step's weights are those that the run began with, and its recording has their digest.
    """
    recipe = load_resolved(RunDirectory(run).resolved)
    if recipe.rollout is None:
        raise DataError(f"{run} is not an online run: it has drawn no tokens")
    if recipe.rollout.temperature == 0:
        raise DataError(f"{run}: rollout.temperature is 0: nothing is drawn at random")
    if model is None:
        if step != 1:
            raise DataError(
                f"--step {step} needs --model DIR with the weights after step {step - 1}: "
                f"isotrain export {run} --step {step - 1} --out DIR"
            )
        model = _initial_model(run, recipe.model.path, recipe.model.perturbation)
    written = [record.trajectory for record in read_step(trajectories(run), step)]
    if any(trajectory.pictures for trajectory in written):
        raise DataError(f"{run}: its prompts have pictures, with which this cannot compute yet")
    fitting = [t for t in written if len(t.mask_N) and (t.version_N[t.mask_N] == step - 1).all()]
    if not fitting:
        raise DataError(
            f"{run}: no response of step {step} was written by the weights after step {step - 1} alone"
        )
    rollout = recipe.rollout
    return RecordedStep(
        model, recipe.model.dtype, rollout.temperature, rollout.top_p, rollout.top_k, rollout.engine, fitting
    )


def _initial_model(run: Path, path: str, perturbation: int) -> Path:
    from isotrain.models.files import model_directory
    from isotrain.trainers.start import model_digest

    if perturbation:
        raise DataError(f"{run}: model.perturbation changed the first weights; give --step and --model")
    directory = model_directory(path)
    recorded = recorded_digests(run).get("model")
    if recorded != model_digest(directory):
        raise DataError(
            f"{directory} is not the model that {run} was recorded with (the digests differ); give --model"
        )
    return directory


def drawn_tokens(
    step: RecordedStep, most: int
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
    """Logits at temperature 1 and the drawn tokens, of the first `most` positions.

    Weights are rounded as the engine's are; everything after that is computed in float32, on the CPU.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from isotrain.models.config import vocabulary_size
    from isotrain.models.load import keep_attention_cap

    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            step.model, dtype=getattr(torch, step.dtype), use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{step.model}: the model cannot be loaded: {error}") from error
    keep_attention_cap(loaded)
    model = cast(Any, loaded).float().eval()
    vocabulary = vocabulary_size(model)
    left = most
    for trajectory in step.trajectories:
        if left <= 0:
            return
        tokens_T = trajectory.tokens_T
        if ((tokens_T < 0) | (tokens_T >= vocabulary)).any():
            raise DataError(f"draw {trajectory.prompt_index} has tokens outside the model's vocabulary")
        places_Q = trajectory.prompt_length + np.flatnonzero(trajectory.mask_N)[:left]
        left -= len(places_Q)
        chunk = max(1, _LARGEST // vocabulary)
        with torch.no_grad():
            ids_T = torch.from_numpy(tokens_T.astype(np.int64))
            for start in range(0, len(places_Q), chunk):
                part_Q = places_Q[start : start + chunk]
                # The logits before a token are those that it was drawn from.
                before_Q = torch.from_numpy(part_Q - 1)
                logits_QV = model(input_ids=ids_T[None], use_cache=False, logits_to_keep=before_Q).logits[0]
                yield logits_QV.float().numpy(), tokens_T[part_Q].astype(np.int64)
