"""From a run or a model to a diagnosis: engine and trainer compute in turn, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
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
from isotrain.models.load import load_tokenizer, model_directory, read_config
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved
from isotrain.tools.mismatch import experiments
from isotrain.tools.mismatch.attribution import attribute
from isotrain.tools.mismatch.job import Job, first_rows, write_sequences
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


def of_model(path: str, engine: str, changes: dict[str, Any], sequences: int) -> Target:
    """A model before training: the engine samples from a few prompts."""
    directory = model_directory(path, "MODEL")
    job = Job(str(directory), engine, changes.pop("dtype", None) or "bfloat16")
    return Target(_sampling(replace(job, **changes), sequences), Path(path).name)


def of_run(
    run: Path, step: int, engine: str | None, changes: dict[str, Any], sequences: int, work: Path
) -> Target:
    """A run: its recorded step, or, without recordings, responses of its newest checkpoint."""
    recipe = load_resolved(RunDirectory(run).resolved)
    rollout = recipe.rollout
    if rollout is None:
        raise DataError(f"{run} is not an online run: no engine generated in it; give a model directory")
    recorded = trajectories(run).is_dir()
    model = changes.pop("model", None)
    if model is None and (not recorded or step > 1):
        model = str(export_run(run, work / "model", step - 1 if recorded else None, False))
    given: dict[str, Any] = {
        "dtype": recipe.model.dtype,
        "head_float32": recipe.model.head_dtype == "float32",
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_tokens": rollout.max_tokens,
        "engine_options": dict(rollout.engine_options),
        "server_python": rollout.server_python,
        "attention": recipe.model.attention,
        "device": recipe.device.type,
        "max_length": recipe.data.max_length + rollout.max_tokens,
        "kv_cache_gb": rollout.kv_cache_gb,
        "memory_utilization": rollout.memory_utilization,
    }
    given |= {name: value for name, value in changes.items() if value is not None}
    if not recorded:
        assert model is not None
        job = Job(model, engine or rollout.engine, **given)
        return Target(_sampling(job, sequences), run.name)
    read = read_recorded_step(run, step, None if model is None else Path(model))
    fitting = {id(t): t for t in read.trajectories}
    advantages = {
        (r.trajectory.prompt_index, r.trajectory.sample): r.advantage
        for r in read_step(trajectories(run), step)
    }
    chosen = first_rows([Sequence_.of(t) for t in fitting.values()][:sequences])
    kept = list(fitting.values())[: len(chosen)]
    job = Job(str(read.model), engine or rollout.engine, **given)
    return Target(job, run.name, chosen, [advantages.get((t.prompt_index, t.sample)) for t in kept])


def _sampling(job: Job, sequences: int) -> Job:
    """With prompts, and room for them and their responses in the model's positions."""
    directory = Path(job.model)
    limit = positions(read_config(directory)).limit
    room = min(job.max_length, limit or job.max_length)
    longest = max(1, room - job.max_tokens)
    prompts = [tokens[:longest] for tokens in _prompts(directory)]
    n = max(1, -(-sequences // len(prompts)))
    most = min(job.max_tokens, max(1, room - max(map(len, prompts))))
    return replace(job, prompts=tuple(prompts), n=n, max_tokens=most, max_length=room)


def _prompts(directory: Path) -> list[tuple[int, ...]]:
    try:
        tokenizer: Any = load_tokenizer(directory)
    except ModelError:
        draw, most = np.random.default_rng(0), vocabulary_size(read_config(directory))
        return [tuple(int(t) for t in draw.integers(0, most, 12)) for _ in _QUESTIONS]
    prompts = []
    for question in _QUESTIONS:
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        else:
            ids = tokenizer.encode(question)
        prompts.append(tuple(int(token) for token in ids))
    return prompts


def processes(job: Job) -> list[str]:
    """The engine's processes: as it samples, then with single settings changed."""
    plain = ["plain"] if job.quantised else []
    return ["given", *plain, *(["float32"] if job.dtype != "float32" else [])]


def diagnose(target: Target, work: Path, say: Callable[[str], None]) -> Diagnosis:
    target.job.write(work)
    if target.sequences:
        write_sequences(work, target.sequences)
    names = [*processes(target.job), "trainer"]
    begin = time.monotonic()
    for number, name in enumerate(names):
        left = ""
        if number:
            seconds = (time.monotonic() - begin) / number * (len(names) - number)
            left = tr("about {seconds} s left", seconds=round(seconds))
        say(
            tr(
                "{number} of {count}: {part} {left}",
                number=number + 1,
                count=len(names),
                part=_PARTS[name],
                left=left,
            )
        )
        module = "experiments" if name == "trainer" else "engine_side"
        arguments = [str(work)] if name == "trainer" else [str(work), name]
        _run(f"isotrain.tools.mismatch.{module}", arguments, work / f"{name}.log")
    return read_diagnosis(target, work)


def read_diagnosis(target: Target, work: Path) -> Diagnosis:
    results, findings = experiments.load(work)
    whole = results[frozenset()]
    advantages = None
    if target.advantages and all(a is not None for a in target.advantages):
        advantages = np.array(target.advantages, float)
    return judge(attribute(results, findings.active), findings, effect(whole, advantages), target.job.dtype)


_PARTS = {
    "given": tr("the engine, as it samples;"),
    "plain": tr("the engine with its cache in the type of the model;"),
    "float32": tr("the engine in float32;"),
    "trainer": tr("the trainer;"),
}


def _run(module: str, arguments: Sequence[str], log: Path) -> None:
    """A child, whose words are shown only where it fails."""
    variables = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    with log.open("wb") as output:
        done = subprocess.run(
            module_command(module, *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            check=False,
        )
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
        # The last line of a traceback is the error with its kind.
        kind, _, message = last.partition(": ")
        kinds = {c.__name__: c for c in IsotrainError.__subclasses__()}
        raise kinds.get(kind.rpartition(".")[2], RolloutError)(
            message or last or f"exit code {done.returncode}"
        )


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="isotrain-mismatch-")
