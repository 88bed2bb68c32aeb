"""The engine's part of a diagnosis, in a process of its own: `python -m ... WORK PROCESS`.

A process is the engine with one setting: `given`, as it samples; `plain`, without a quantised cache;
`float32`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from isotrain.children import die_with_parent
from isotrain.device.detect import choose_device
from isotrain.errors import RolloutError
from isotrain.models.config import number_of_experts
from isotrain.models.load import build_causal_lm, layers_of, read_config
from isotrain.models.weights import WeightFiles
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.build import build_rollout
from isotrain.tools.mismatch.job import (
    Job,
    WeightDifferences,
    first_rows,
    read_sequences,
    write_forced,
    write_inside,
    write_sequences,
)
from isotrain.tools.mismatch.passes import Pass, Sequence_, Side


def module_names(directory: Path) -> list[str]:
    """The parts of each layer that take and give hidden states, and its routers."""
    model = build_causal_lm(directory, "sdpa")
    layers = {id(layer) for layer in layers_of(model)}
    names = [
        f"{name}.{child}"
        for name, layer in model.named_modules()
        if id(layer) in layers
        for child, part in layer.named_children()
        if "norm" not in type(part).__name__.lower()
    ]
    experts = number_of_experts(read_config(directory))
    gates = [
        name
        for name, module in model.named_modules()
        if experts
        and name.endswith(".gate")
        and getattr(module, "weight", torch.empty(0)).shape[:1] == (experts,)
    ]
    return names + gates


def compare_weights(directory: Path, tensors: Mapping[str, torch.Tensor], dtype: str) -> WeightDifferences:
    """The engine's tensors against those of the files, in the engine's type, bit for bit."""
    files, differs, compared = WeightFiles(directory), dict[str, torch.Tensor](), 0
    unread = []
    for name in files.file_of:
        if name not in tensors:
            unread.append(name)
            continue
        whole, own = files.whole(name), tensors[name].cpu()
        compared += 1
        rounded = [whole.to(own.dtype), whole.to(getattr(torch, dtype)).to(own.dtype)]
        if not any(own.shape == w.shape and torch.equal(own, w) for w in rounded):
            differs[name] = own.contiguous().clone()
    return WeightDifferences(compared, unread, differs)


@contextmanager
def started(job: Job, process: str) -> Iterator[Side]:
    """The engine of a process, given its tokens."""
    options = dict(job.engine_options)
    if process != "given":
        options.pop("kv_cache_dtype", None)
    section = RolloutSection(
        engine=job.engine,
        max_tokens=job.max_tokens,
        eager=True,
        kv_cache_gb=job.kv_cache_gb,
        memory_utilization=job.memory_utilization,
        engine_options=options,
        load_format="safetensors",
        server_python=job.server_python,
    )
    engine = build_rollout(
        section,
        job.model,
        "float32" if process == "float32" else job.dtype,
        device=choose_device(job.device),
        max_prompt=max(1, job.max_length - job.max_tokens),
        seed=job.seed,
        name=job.engine,
        head_float32=job.head_float32,
    )
    try:
        yield side_of(engine, job)
    finally:
        engine.close()


def side_of(engine: object, job: Job) -> Side:
    from isotrain.rollout.hf import HfEngine

    if isinstance(engine, HfEngine):
        from isotrain.tools.mismatch.hf_side import HfSide

        return HfSide(engine, job.sampling)
    from isotrain.rollout.vllm import VllmEngine

    if isinstance(engine, VllmEngine):
        from isotrain.tools.mismatch.vllm_side import VllmSide

        return VllmSide(engine, job.sampling)
    raise RolloutError(f"--engine: isotrain cannot look into {job.engine} yet; write vllm or hf")


def passes(job: Job, process: str) -> list[Pass]:
    """The cached prefixes come first: they are those of the sampling before."""
    cached = [Pass(True, True, cached=True)] if process == "given" and job.engine != "hf" else []
    return [*cached, Pass(True, True), Pass(True, False), Pass(False, True), Pass(False, False)]


def measure(job: Job, work: Path, side: Side, process: str) -> None:
    """All that a process has to tell, written to `work`."""
    if process == "given" and job.prompts:
        prompts = [np.array(prompt, np.int32) for prompt in job.prompts]
        sampled = [Sequence_.of(t) for t in side.sample(prompts, job.n)]
        write_sequences(work, first_rows(sampled))
    sequences = read_sequences(work)
    for way in passes(job, process):
        write_forced(work, process, way, side.force(way, sequences))
    if process == "given":
        compare_weights(Path(job.model), side.tensors(), job.dtype).write(work)
    # A quantised cache is a cause of its own: attention is looked at without it.
    if process == ("plain" if job.quantised else "given"):
        write_inside(work, side.look_inside(sequences, module_names(Path(job.model))))


def main(work: Path, process: str) -> None:
    die_with_parent()
    job = Job.read(work)
    with started(job, process) as side:
        measure(job, work, side, process)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
