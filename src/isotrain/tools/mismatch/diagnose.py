"""From a run or a model to a diagnosis: engine and trainer compute in turn, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.children import module_command
from isotrain.data.record import read_step
from isotrain.engine.export import export_run
from isotrain.errors import DataError, IsotrainError, ModelError, RolloutError
from isotrain.language import tr
from isotrain.models.config import positions, vocabulary_size
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.models.load import read_config
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import LoraSection, ModelSection
from isotrain.tools.mismatch import experiments
from isotrain.tools.mismatch.attribution import attribute
from isotrain.tools.mismatch.job import SEQUENCES, Job, first_rows, write
from isotrain.tools.mismatch.matter import effect
from isotrain.tools.mismatch.passes import Sequence_
from isotrain.tools.mismatch.verdict import Diagnosis, judge
from isotrain.trainers.online.drawn_tokens import read_recorded_step
from isotrain.trainers.online.recording import trajectories

# For a model before training: their responses are as good as any for arithmetic.
_QUESTIONS = (
    "What is 17 + 25?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "A box holds 12 eggs. How many eggs are in 5 boxes?",
    "What comes after Tuesday?",
    "Explain why the sky is blue.",
    "List the first five prime numbers.",
    "Translate 'good morning' into French.",
)
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Target:
    """Everything that a diagnosis starts from."""

    job: Job
    name: str
    sequences: list[Sequence_] = field(default_factory=list)
    """Recorded ones; without them the engine samples."""
    advantages: list[float | None] = field(default_factory=list)


def of_model(path: str, sequences: int, dtype: str | None, rollout: dict[str, Any]) -> Target:
    """A model before training: the engine samples from a few prompts."""
    directory = model_directory(path, "MODEL")
    section = RolloutSection(**{"max_tokens": 64, "kv_cache_gb": 0.5, **rollout})
    model = ModelSection(path=str(directory), **({"dtype": dtype} if dtype else {}))
    return Target(_sampling(Job(model, section), sequences), Path(path).name)


def of_run(
    run: Path,
    sequences: int,
    dtype: str | None,
    rollout: dict[str, Any],
    step: int | None,
    model: str | None,
    work: Path,
) -> Target:
    """A run: its recorded step, or, without recordings, responses of a checkpoint, by default the newest."""
    recipe = load_resolved(RunDirectory(run).resolved)
    if recipe.rollout is None:
        raise DataError(f"{run} is not an online run: no engine generated in it; give a model directory")
    recorded = trajectories(run).is_dir()
    if recorded and (given := sorted(rollout.keys() - {"engine"})):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise DataError(f"{options}: the responses of {run} are recorded already; leave it out")
    number = (step or 1) if recorded else step
    if model is None and not (recorded and number == 1):
        model = str(export_run(run, work / "model", number and number - 1, False))
    given_step = (
        read_recorded_step(run, number or 1, None if model is None else Path(model)) if recorded else None
    )
    section = recipe.model.model_copy(
        update={
            "path": str(given_step.model if given_step else model),
            "dtype": dtype or recipe.model.dtype,
            "lora": LoraSection(),
            "perturbation": 0,
            "compile": False,
        }
    )
    job = Job(
        section,
        recipe.rollout.model_copy(update={"environment": None, "agent": None, **rollout}),
        recipe.device.type,
        recipe.data.max_length + recipe.rollout.max_tokens,
    )
    if given_step is None:
        return Target(_sampling(job, sequences), run.name)
    advantages = {
        (r.trajectory.prompt_index, r.trajectory.tokens_T.tobytes()): r.advantage
        for r in read_step(trajectories(run), number or 1)
    }
    chosen = given_step.trajectories[:sequences]
    kept = first_rows([Sequence_.of(t) for t in chosen])
    of_kept = [advantages[t.prompt_index, t.tokens_T.tobytes()] for t in chosen[: len(kept)]]
    return Target(job, run.name, kept, of_kept)


def _sampling(job: Job, sequences: int) -> Job:
    """With prompts, and room for them and their responses in the model's positions."""
    room, most = job.max_length, job.rollout.max_tokens
    room = min(room, positions(read_config(job.directory)).limit or room)
    prompts = tuple(tokens[: max(1, room - most)] for tokens in _prompts(job.directory))
    changes = {
        "n": max(1, -(-sequences // len(prompts))),
        "max_tokens": min(most, max(1, room - max(map(len, prompts)))),
    }
    rollout = job.rollout.model_copy(update=changes)
    return replace(job, prompts=prompts, rollout=rollout, max_length=room)


def _prompts(directory: Path) -> list[tuple[int, ...]]:
    try:
        tokenizer: Any = load_tokenizer(directory)
    except ModelError:
        draw, most = np.random.default_rng(0), vocabulary_size(read_config(directory))
        return [tuple(int(t) for t in draw.integers(0, most, 12)) for _ in _QUESTIONS]

    def encoded(question: str) -> Any:
        if not tokenizer.chat_template:
            return tokenizer.encode(question)
        asked = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)

    return [tuple(int(token) for token in encoded(question)) for question in _QUESTIONS]


def diagnose(target: Target, work: Path, say: Callable[[str], None]) -> Diagnosis:
    target.job.write(work)
    if target.sequences:
        write(work / SEQUENCES, target.sequences)
    names = [*target.job.processes, "trainer"]
    begin = time.monotonic()
    for number, name in enumerate(names):
        seconds = round((time.monotonic() - begin) / max(1, number) * (len(names) - number))
        left = tr("about {seconds} s left", seconds=seconds) if number else ""
        which = {"number": number + 1, "count": len(names), "part": _PARTS[name]}
        say(tr("{number} of {count}: {part} {left}", **which, left=left))
        module = ("experiments",) if name == "trainer" else ("engine_side", name)
        _run(module[0], work, *module[1:])
    return read_diagnosis(target, work)


def read_diagnosis(target: Target, work: Path) -> Diagnosis:
    results, findings = experiments.load(work)
    advantages = None
    if target.advantages and all(a is not None for a in target.advantages):
        advantages = np.array(target.advantages, float)
    told = effect(results[experiments.NOTHING], advantages)
    return judge(attribute(results, findings.active), findings, told, target.job.dtype)


_PARTS = {
    "given": tr("the engine, as it samples;"),
    "plain": tr("the engine with its cache in the type of the model;"),
    "float32": tr("the engine in float32;"),
    "trainer": tr("the trainer;"),
}


def _run(module: str, work: Path, *arguments: str) -> None:
    """A child, whose words are shown only where it fails."""
    done = subprocess.run(
        module_command(f"isotrain.tools.mismatch.{module}", str(work), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS},
        check=False,
    )
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        # The last line of a traceback is the error with its kind.
        kind, _, message = last.partition(": ")
        kinds = {c.__name__: c for c in IsotrainError.__subclasses__()}
        raise kinds.get(kind.rpartition(".")[2], RolloutError)(message or last)
