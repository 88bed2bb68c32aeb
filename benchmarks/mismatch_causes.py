"""Does `isotrain mismatch` name the cause that was put in, and accuse nobody where nothing was?

An engine samples and is measured while one cause is there, as the command measures it; then the trainer's
part and the verdict are those of the command. `right`: the cause has the largest share. `part` is that share.
`honest` cases have nothing put in, with other seeds: a fault there is a false accusation.

    python benchmarks/mismatch_causes.py [--engine hf] [--model tiny] [--honest 3] [--cases NAME ...]

`ratio` is the share of cases that are right; the goal is all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch

from isotrain.data.prepare.tiny import make_tiny
from isotrain.models.config import vocabulary_size
from isotrain.models.load import read_config
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection
from isotrain.tools.mismatch import engine_side
from isotrain.tools.mismatch.diagnose import Target, read_diagnosis
from isotrain.tools.mismatch.job import SEQUENCES, Job, read, write
from isotrain.tools.mismatch.passes import Sequence_
from isotrain.weights.file import write_update

Inject = Callable[[Any, Job], Any]
STALE = "model.layers.1.mlp.down_proj.weight"


def model_of(side: Any) -> Any:
    return side.model if hasattr(side, "model") else side.runner.get_model()


def is_vllm(side: Any) -> bool:
    return hasattr(side, "runner")


def together(side: Any, output: torch.Tensor) -> bool:
    """Whether more than one sequence is computed."""
    return bool(side.runner.input_batch.num_reqs > 1 if is_vllm(side) else output.shape[0] > 1)


def decoding(side: Any, output: torch.Tensor) -> bool:
    if is_vllm(side):
        return bool(output.shape[0] == side.runner.input_batch.num_reqs)
    return output.shape[1] == 1


@contextmanager
def scaled_mlp(side: Any, when: Callable[[Any, torch.Tensor], bool], factor: float) -> Iterator[None]:
    def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * factor if when(side, output) else None

    mlp = model_of(side).get_submodule("model.layers.1.mlp")
    with mlp.register_forward_hook(hook):
        yield


@contextmanager
def nothing(side: Any, job: Job) -> Iterator[None]:
    yield


@contextmanager
def other_weights(side: Any, job: Job, change: Callable[[dict[str, torch.Tensor]], None]) -> Iterator[None]:
    """The engine takes changed weights, and the right ones afterwards."""
    right = published(job)
    changed = {name: t.clone() for name, t in right.items()}
    change(changed)
    version = side.engine.version
    side.engine.update_weights(write_update(changed.items(), version + 1))
    try:
        yield
    finally:
        side.engine.update_weights(write_update(right.items(), version + 2))


def published(job: Job) -> dict[str, torch.Tensor]:
    from isotrain.models.weights import WeightFiles

    files = WeightFiles(job.directory)
    return {name: files.whole(name).to(getattr(torch, job.dtype)) for name in files.file_of}


def stale_tensor(side: Any, job: Job) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = STALE if STALE in tensors else "model.layers.1.self_attn.o_proj.weight"
        draw = torch.Generator().manual_seed(1)
        tensors[name] += 0.05 * tensors[name].std() * torch.randn(tensors[name].shape, generator=draw)

    return other_weights(side, job, change)


@contextmanager
def raw_logps(side: Any, job: Job) -> Iterator[None]:
    if is_vllm(side):
        sampler = side.runner.sampler
        kept = sampler.logprobs_mode
        parts = [sampler, sampler.topk_topp_sampler]
        for part in parts:
            part.logprobs_mode = "raw_logprobs"
        try:
            yield
        finally:
            for part in parts:
                part.logprobs_mode = kept
        return
    hf: Any = import_module("isotrain.rollout.hf")
    draw = hf.draw

    def raw(logits_BV: Any, sampling: Any, seeds: Any, positions: Any) -> Any:
        token_B, _ = draw(logits_BV, sampling, seeds, positions)
        return token_B, logits_BV.float().log_softmax(-1).gather(1, token_B[:, None])[:, 0]

    hf.draw = raw
    try:
        yield
    finally:
        hf.draw = draw


@contextmanager
def narrow_head(side: Any, job: Job) -> Iterator[None]:
    if is_vllm(side):
        model = model_of(side)
        compute = model.compute_logits
        model.compute_logits = lambda hidden, *rest: (
            compute(hidden.bfloat16().float(), *rest).bfloat16().float()
        )
        try:
            yield
        finally:
            model.compute_logits = compute
        return
    head = side.model.get_output_embeddings()
    kept = head.forward
    head.forward = lambda hidden: torch.nn.functional.linear(
        hidden.bfloat16(), head.weight.bfloat16()
    ).float()
    try:
        yield
    finally:
        head.forward = kept


@contextmanager
def prefix_of_old_weights(side: Any, job: Job) -> Iterator[None]:
    """The cache is filled, weights change, and the cache stays."""
    assert is_vllm(side)
    engine = side.engine

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("v_proj.weight"):
                tensors[name] *= 1.2

    drop = engine._llm.reset_prefix_cache
    with other_weights(side, job, change):
        side.sample(job.prompts, 1)
        salt = engine._updates
        engine._llm.reset_prefix_cache = lambda: True
    engine._updates = salt
    engine._llm.reset_prefix_cache = drop
    yield
    drop()  # the next case has an honest cache


@contextmanager
def other_routes(side: Any, job: Job) -> Iterator[None]:
    def hook(_: Any, __: Any, output: Any) -> Any:
        logits = output[0]
        noise = torch.sin(1000 * logits.float()).to(logits.dtype) * logits.float().std().to(logits.dtype)
        if is_vllm(side):
            return (logits + noise, *output[1:])
        scores = (logits + noise).float().softmax(-1)
        best, chosen = scores.topk(output[2].shape[-1], dim=-1)
        return logits + noise, (best / best.sum(-1, keepdim=True)).to(output[1].dtype), chosen

    with model_of(side).get_submodule("model.layers.1.mlp.gate").register_forward_hook(hook):
        yield


@contextmanager
def wrong_rope(side: Any, job: Job) -> Iterator[None]:
    attention = model_of(side).get_submodule("model.layers.1.self_attn")

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        if is_vllm(side):
            return args, {**kwargs, "positions": kwargs["positions"] // 2}
        cos, sin = kwargs["position_embeddings"]
        angle = torch.atan2(sin, cos)
        return args, {**kwargs, "position_embeddings": ((1.2 * angle).cos(), (1.2 * angle).sin())}

    with attention.register_forward_pre_hook(hook, with_kwargs=True):
        yield


def batch(side: Any, job: Job) -> Any:
    return scaled_mlp(side, together, 1.1)


def decode(side: Any, job: Job) -> Any:
    return scaled_mlp(side, decoding, 1.1)


def one_token_more(sequences: Sequence[Any], job: Job) -> list[Any]:
    """The trainer's template begins twice, with a token that the engine did not see."""
    first = sequences[0].tokens_T[:1]
    return [
        replace(s, tokens_T=np.concatenate([first, s.tokens_T]), prompt_length=s.prompt_length + 1)
        for s in sequences
    ]


def encoded_again(sequences: Sequence[Any], job: Job) -> list[Any]:
    """In some sequences, two tokens of an earlier turn became two others."""
    changed = []
    for number, s in enumerate(sequences):
        tokens_T = s.tokens_T.copy()
        if number % 3 == 0:
            middle = s.prompt_length // 2
            tokens_T[middle : middle + 2] = tokens_T[middle : middle + 2][::-1] + 1
        changed.append(replace(s, tokens_T=tokens_T))
    return changed


# The cause to be named; what is put in while the engine samples and is measured; what becomes of the tokens
# afterwards; settings.
CASES: dict[str, tuple[str, Inject, Any, dict[str, Any]]] = {
    "stale tensor": ("weights", stale_tensor, None, {}),
    "raw log-probs at T=0.7": ("sampling", raw_logps, None, {"temperature": 0.7}),
    "top-p convention": ("sampling", nothing, None, {"top_p": 0.8}),
    "template off by one": ("ids", nothing, one_token_more, {}),
    "bf16 head": ("head", narrow_head, None, {}),
    "other batch composition": ("batch", batch, None, {}),
    "prefix cache after an update": ("prefix", prefix_of_old_weights, None, {}),
    "fp8 cache": ("kv_cache", nothing, None, {"engine_options": {"kv_cache_dtype": "fp8", "block_size": 32}}),
    "routing": ("routing", other_routes, None, {}),
    "decode kernel": ("decode", decode, None, {}),
    "wrong rope in one layer": ("module", wrong_rope, None, {}),
    "re-tokenised turn": ("ids", nothing, encoded_again, {}),
}
ONLY_VLLM = {"prefix cache after an update", "fp8 cache"}
OF_LIVE_ENGINES = {"stale tensor", "raw log-probs at T=0.7", "prefix cache after an update"}
# A process for themselves: the engine is made with the setting.
OWN_ENGINE = {"fp8 cache"}


def cases_for(engine: str, model: str) -> list[str]:
    return [
        name
        for name in CASES
        if (engine == "vllm" or name not in ONLY_VLLM) and (model == "mixture" or name != "routing")
    ]


def make_job(model: Path, engine: str, dtype: str, seed: int, **changes: Any) -> Job:
    draw, vocabulary = np.random.default_rng(seed), vocabulary_size(read_config(model))
    small = vocabulary < 10_000
    lengths = draw.integers(40, 70, 6 if small else 4)
    prompts = tuple(tuple(int(t) for t in draw.integers(5, vocabulary, int(n))) for n in lengths)
    # Prompts are longer than a block of the cache.
    options = {"engine_options": {"block_size": 32}} if engine == "vllm" else {}
    rollout: dict[str, Any] = {"n": 2 if small else 1, "max_tokens": 32 if small else 30, "kv_cache_gb": 0.25}
    section = RolloutSection(**{"engine": engine, **rollout, **options, **changes})
    return Job(ModelSection(path=str(model), dtype=dtype), section, "cpu", 128, seed, prompts)


def measure_case(side: Any, job: Job, work: Path, inject: Inject, change: Any) -> None:
    """As the engine's process of the command, with the cause there."""
    side.drop_cache()  # of the case before, with the same prompts
    with inject(side, job):
        sequences = side.sample(job.prompts, job.rollout.n)
        write(work / SEQUENCES, change(sequences, job) if change else sequences)
        replace(job, prompts=()).write(work)
        engine_side.measure(replace(job, prompts=()), work, side, "given")


def measure_all(
    directory: Path, model: Path, engine: str, names: Sequence[str], honest: int, dtype: str
) -> None:
    """The engine's part of all cases, each in a directory of its own."""
    jobs = {name: make_job(model, engine, dtype, 0, **CASES[name][3]) for name in names}
    jobs |= {f"honest {seed}": make_job(model, engine, dtype, seed + 1) for seed in range(honest)}
    shared = [name for name in jobs if name not in OWN_ENGINE]
    common = jobs[shared[0]]
    for process in common.processes:
        with engine_side.started(common, process) as started:
            side: Any = started
            for name in shared:
                side.sampling = jobs[name].sampling
                _measure(directory, name, jobs[name], side, process)
    for name in set(jobs) - set(shared):
        for process in jobs[name].processes:
            with engine_side.started(jobs[name], process) as side:
                _measure(directory, name, jobs[name], side, process)


def _measure(directory: Path, name: str, job: Job, side: Any, process: str) -> None:
    work = directory / name.replace(" ", "-")
    work.mkdir(exist_ok=True)
    _, inject, change, _ = CASES.get(name, ("", nothing, None, {}))
    if process == "given":
        measure_case(side, job, work, inject, change)
        return
    # A fault of the code is there in each process; the command itself keeps wrong weights there.
    with (nothing if name in OF_LIVE_ENGINES else inject)(side, job):
        engine_side.measure(replace(job, prompts=()), work, side, process)
    if name == "stale tensor":
        engine_side.take_tensors(side, job, process, {})


def judge(directory: Path, name: str, dtype: str) -> dict[str, Any]:
    """The trainer's part and the verdict."""
    from isotrain.tools.mismatch import experiments

    work = directory / name.replace(" ", "-")
    experiments.run_experiments(work)
    job = Job.read(work)
    diagnosis = read_diagnosis(Target(job, name, read(work / SEQUENCES, Sequence_)), work)
    attribution = diagnosis.attribution
    parts = {s.cause: round(attribution.part(s), 3) for s in attribution.ranked}
    cause = CASES[name][0] if name in CASES else ""
    largest = attribution.ranked[0].cause
    right = diagnosis.outcome == "explained" if not cause else largest == cause and parts[cause] > 0.5
    own = next((s for s in attribution.shares if s.cause == cause), None)
    return {
        "case": name,
        "cause": cause or "none",
        "right": right,
        "largest": largest,
        "part": parts.get(cause),
        "ends": own and [round(end / attribution.total, 3) for end in (own.first, own.last)],
        "second": list(parts.items())[1:3],
        "outcome": diagnosis.outcome,
        "nats": float(f"{attribution.total:.3g}"),
        "rest": round(attribution.part(attribution.rest), 3),
        "faults": [str(text) for text in diagnosis.faults],
    }


def main() -> None:
    parser = bench.Options(__doc__, honest=1, cases=["stale tensor", "decode kernel"])
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--model", choices=("tiny", "mixture", "smollm2"), default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--honest", type=int, default=3)
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--side", choices=("engine", "trainer"))
    parser.add_argument("--work")
    options = parser.read()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = cases_for(options.engine, options.model) if options.cases is None else options.cases
    if options.side is None:
        with tempfile.TemporaryDirectory() as directory:
            for side in ("engine", "trainer"):
                command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--work", directory]
                subprocess.run(command, check=True)
        return
    work = Path(options.work)
    if options.side == "engine":
        model = model_directory(options.model, work)
        measure_all(work, model, options.engine, names, options.honest, options.dtype)
        return
    results = []
    for name in [*names, *(f"honest {seed}" for seed in range(options.honest))]:
        results.append(judge(work, name, options.dtype))
        bench.show(name="mismatch_causes", engine=options.engine, model=options.model, **results[-1])
    injected = [r for r in results if r["cause"] != "none"]
    false = [r for r in results if r["cause"] == "none" and r["faults"]]
    right = sum(r["right"] for r in results) / len(results)
    bench.report(
        "mismatch_causes",
        right,
        goal=1.0,
        met=right == 1.0,
        engine=options.engine,
        model=options.model,
        dtype=options.dtype,
        named=sum(r["right"] for r in injected),
        injected=len(injected),
        honest=len(results) - len(injected),
        false_accusations=len(false),
    )


def model_directory(kind: str, work: Path) -> Path:
    if kind == "smollm2":
        from smollm2 import smollm2

        return smollm2()
    architecture: Any = "qwen3_moe" if kind == "mixture" else "llama"
    make_tiny(work / "model", train_rows=1, validation_rows=1, architecture=architecture)
    return work / "model" / "model"


if __name__ == "__main__":
    main()
