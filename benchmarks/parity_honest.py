"""Honest pairs of forced steps, and mistakes that nobody tuned for, judged against float64.

One step of tiny models is trained once on each kernel; all pairs of kernels of a model and type are judged
by P1, and by P0 where its record is cheap. Models have vocabularies of 512 to 151,936, three dense families
and a mixture. Then each mistake of power/unseen.py is made on AVX2 kernels and compared with the reference
on the best ones. `ratio` is the share of honest pairs that are called different; bugs are counted beside
it. `left_out` says, for each family of kernels and each model, the largest z without it, and how many pairs
with it are above that.

    python benchmarks/parity_honest.py [--work DIR] [--kernels avx2 sse] [--models llama-512] [--bugs NAME]
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import bench
from power.honest_patches import PATCHES
from power.unseen import BUGS

REFERENCE = "best"
"""The instructions that the libraries choose by themselves."""
# Variables of processes, by kernel; the others are changes within one, below.
VARIABLES: dict[str, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "two-threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
}
SETTINGS: dict[str, dict[str, Any]] = {"chunked-head": {"logits_chunk": 24}}
KERNELS = (
    *(REFERENCE, "avx2", "sse", "mkl-compatible", "two-threads", "onednn-off", "chunked-head"),
    *("eager-attention", "split-products", "other-norms"),
)
FAMILIES = {
    "instructions": ("avx2", "sse", "mkl-compatible", "onednn-off"),
    "order of sums": ("two-threads", "chunked-head", "split-products"),
    "formulas": ("eager-attention", "other-norms"),
}
"""Kernels that are left out together: what they share with the others is none of theirs."""
# Architecture, size of the vocabulary, hidden size.
MODELS: dict[str, tuple[Any, int, int]] = {
    "llama-512": ("llama", 512, 64),
    "llama-152k": ("llama", 151_936, 32),
    "qwen3-8k": ("qwen3", 8_192, 64),
    "qwen3-152k": ("qwen3", 151_936, 32),
    "gemma3-2k": ("gemma3", 2_048, 96),
    "gemma3-64k": ("gemma3", 65_536, 96),
    "mixture-512": ("qwen3_moe", 512, 64),
    "mixture-32k": ("qwen3_moe", 32_768, 64),
}
WITH_OPERATORS = {REFERENCE, "avx2", "sse", "llama-512", "qwen3-152k", "gemma3-2k", "mixture-512"}
"""Kernels and models whose operators are compared with float64: that takes longer than all the rest."""
DTYPES = ("float32", "bfloat16")
TOKENS, ROWS = 64, 2
TEXTS = (
    "Natalia sold 48/2 = 24 clips in May. Natalia sold 48+24 = 72 clips altogether in April and May. ",
    "The train left the station at noon, and nobody on the platform had noticed its doors were open. ",
)


def prepare(work: Path, models: Sequence[str]) -> None:
    """Models and rows, in a child process."""
    from power.families import make_gemma

    from isotrain.data.prepare.tiny import make_model, make_tokenizer

    ask = {"role": "user", "content": "How much is it?"}
    rows = [{"messages": [ask, {"role": "assistant", "content": text * 4}]} for text in TEXTS]
    (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in models:
        out, (architecture, vocab, hidden) = work / "models" / name, MODELS[name]
        if (out / "config.json").exists():
            continue
        make_tokenizer(out)
        if architecture == "gemma3":
            make_gemma(out, vocab)
        else:
            size: dict[str, Any] = {"vocab": vocab, "hidden": hidden, "heads": 4, "kv_heads": 2}
            make_model(out, seed=0, architecture=architecture, layers=2, tie_word_embeddings=True, **size)


def run_of(work: Path, model: str, dtype: str, side: str) -> Path:
    return work / "runs" / f"{model}.{dtype}.{side}"


def train(work: Path, side: str, cells: Sequence[tuple[str, str]], settings: dict[str, Any]) -> None:
    """One step for each model and type, in this process."""
    from isotrain import api
    from isotrain.trainers import job

    job.draw_plots = lambda *_: None  # a fifth of the time of one step
    for model, dtype in cells:
        run = run_of(work, model, dtype, side)
        if (run / "done").exists():
            continue
        operators = model in WITH_OPERATORS and side in WITH_OPERATORS
        recipe = {
            "name": "parity-honest",
            "output": str(run),
            "device": {"type": "cpu"},
            "model": {"path": str(work / "models" / model), "dtype": dtype, **settings},
            "data": {
                "train": str(work / "train.jsonl"),
                "batch_size": ROWS,
                "max_length": TOKENS,
                "too_long": "truncate",
                "tokens_per_micro_batch": TOKENS * ROWS,
            },
            "algorithm": {"name": "sft"},
            "trainer": {"steps": 1, "save_every": 0},
            "observe": {"layer_trace": 1, "operators": operators, "loggers": []},
        }
        run.mkdir(parents=True, exist_ok=True)
        written = run.with_suffix(".yaml")
        written.write_text(json.dumps(recipe))
        api.train(str(written), in_process=True)
        shutil.rmtree(run / "checkpoints")
        (run / "done").touch()


def one_kernel(work: Path, kernel: str, cells: Sequence[tuple[str, str]]) -> None:
    import torch

    if kernel == "onednn-off":
        torch.backends.mkldnn.set_flags(False)
    if kernel == "two-threads":
        torch.set_num_threads(2)
    for module, patch in PATCHES.get(kernel, {}).items():
        patch(importlib.import_module(module))
    train(work, kernel, cells, SETTINGS.get(kernel, {}))


def one_bug(work: Path, name: str, cells: Sequence[tuple[str, str]]) -> None:
    """The mistake is made when the engine has been built, and taken back."""
    from isotrain.engine.engine import TrainingEngine

    build = TrainingEngine.__init__
    for model, dtype in cells:
        undo: list[Any] = []

        def changed(self: Any, *args: Any, undo: list[Any] = undo, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            undo.append(BUGS[name].make(self))

        TrainingEngine.__init__ = changed  # type: ignore[method-assign]
        try:
            train(work, f"bug-{name}", [(model, dtype)], {})
        finally:
            TrainingEngine.__init__ = build  # type: ignore[method-assign]
            for function in filter(None, undo):
                function()


def truths(work: Path, cells: Sequence[tuple[str, str]], sides: Sequence[str]) -> None:
    """One for each model, of mixtures one for each set of routes; each run has a link to its own."""
    from isotrain.cli.parity_runs import truth
    from isotrain.errors import IsotrainError

    for model, dtype in cells:
        reference = run_of(work, model, "float32", REFERENCE)
        for side in sides:
            run = run_of(work, model, dtype, side)
            if not (run / "done").exists() or (run / "truth").is_symlink():
                continue
            out = work / "truths" / f"{model}-{_routes_of(run)}"
            try:
                if not (out / "done").exists():
                    truth(reference, out=out, routes=run)
                    (out / "done").touch()
            except IsotrainError as error:
                print(f"no truth of {run.name}: {error}", file=sys.stderr)
                continue
            (run / "truth").symlink_to(out)


def _routes_of(run: Path) -> str:
    from isotrain.tools.parity.read.layer_trace import read_layer_trace

    update, digest = read_layer_trace(run)[1], hashlib.sha256()
    for table in update.routes.values():
        digest.update(table.tobytes())
    return digest.hexdigest()[:12]


def judged(reference: Path, candidate: Path) -> dict[str, Any]:
    """What the levels of single steps say of a pair."""
    from isotrain.tools.parity.levels.layers import layers_level
    from isotrain.tools.parity.levels.operators import operators_level
    from isotrain.tools.parity.read.runs import read_isotrain_run

    dtype = reference.name.split(".")[1]
    one, other = (read_isotrain_run(path) for path in (reference, candidate))
    operators, steps = operators_level(reference, candidate), layers_level(one, other, dtype=dtype)
    states = [level.state for level in (operators, steps) if level.state != "not run" or level is steps]
    called = next((s for s in ("different", "cannot tell", "not run") if s in states), "same")
    entries = [entry for entry in steps.evidence.get("layers", []) if "z" in entry]
    furthest = max(entries, key=lambda entry: entry["z"], default={"z": 0.0, "name": "", "kind": ""})
    flips = steps.evidence.get("routes", [])
    return {
        "called": "cannot tell" if called == "not run" else called,
        **{"P0": operators.state, "P1": steps.state, "z": float(f"{furthest['z']:.3g}")},
        "furthest": f"{furthest['kind']} {furthest['name']}",
        "flips": sum(flip["flips"] for flip in flips),
        "furthest_flip": max((flip["furthest"] or 0.0 for flip in flips), default=0.0),
        "words": "; ".join(level.words for level in (operators, steps) if level.state == called),
    }


def identical(*runs: Path) -> bool:
    """In every bit of what was recorded; such pairs say nothing about rounding."""
    from safetensors.numpy import load_file

    name = "layer_trace/step-000001-rank-00000.safetensors"
    one, other = (load_file(run / name) for run in runs)
    return one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


def interval(count: int, total: int) -> list[float]:
    """Clopper-Pearson, 95 %, in %."""
    from scipy.stats import beta

    low = beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    return [float(f"{100 * float(x):.2g}") for x in (low, high)]


def left_out(pairs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """As if limits were fitted without a family of kernels, or a model: what they would be, and its pairs."""
    tables = {}
    names = [*FAMILIES, *dict.fromkeys(p["model"] for p in pairs)]
    for name in names:
        kernels = FAMILIES.get(name, ())
        inside = [p for p in pairs if p["model"] == name or {p["a"], p["b"]} & set(kernels)]
        rest = [p for p in pairs if p not in inside]
        if inside and rest:
            largest = max(p["z"] for p in rest)
            above = sum(p["z"] > largest for p in inside)
            most = max(p["z"] for p in inside)
            tables[name] = {
                "largest_z_without": largest,
                "pairs": len(inside),
                "above": above,
                "largest_z": most,
            }
    return tables


def child(arguments: Sequence[str], variables: dict[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **variables}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr.decode()[-3000:]}")


def in_child(task: str, work: str, names: str, cells: str) -> None:
    """A process for each kernel; `names` of one or several sides, `cells` as model.dtype."""
    chosen = [(model, dtype) for model, _, dtype in (cell.rpartition(".") for cell in cells.split(","))]
    match task:
        case "models":
            prepare(Path(work), names.split(","))
        case "kernel":
            one_kernel(Path(work), names, chosen)
        case "bugs":
            for name in names.split(","):
                one_bug(Path(work), name, [cell for cell in chosen if cell[0] == BUGS[name].model])
        case "truths":
            truths(Path(work), chosen, names.split(","))


def honest_pairs(
    work: Path, cells: Sequence[tuple[str, str]], kernels: Sequence[str]
) -> list[dict[str, Any]]:
    pairs = []
    for model, dtype in cells:
        for a, b in combinations(kernels, 2):
            runs = run_of(work, model, dtype, a), run_of(work, model, dtype, b)
            if not identical(*runs):
                pair = {"model": model, "dtype": dtype, "a": a, "b": b, **judged(*runs)}
                pairs.append(pair)
                bench.show(**{k: v for k, v in pair.items() if pair["called"] != "same" or k != "words"})
    return pairs


def main() -> None:
    quick = {
        "models": ["llama-512", "mixture-512"],
        "kernels": [REFERENCE, "avx2"],
        "bugs": ["log-softmax-bf16"],
    }
    parser = bench.Options(__doc__, dtypes=["float32"], **quick)
    parser.add_argument("--work", type=Path, help="keeps what is trained; by default a temporary directory")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--bugs", nargs="*", choices=BUGS, default=list(BUGS))
    options = parser.read()
    with tempfile.TemporaryDirectory() as temporary:
        work: Path = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        measure(work, options)


def measure(work: Path, options: Any) -> None:
    begun = time.monotonic()
    cells = [(model, dtype) for model in options.models for dtype in options.dtypes]
    text = ",".join(f"{model}.{dtype}" for model, dtype in cells)
    child(["--in-child", "models", str(work), ",".join(options.models), text], {})
    kernels = list(dict.fromkeys([REFERENCE, *options.kernels]))
    for kernel in kernels:
        if not all((run_of(work, *cell, kernel) / "done").exists() for cell in cells):
            child(["--in-child", "kernel", str(work), kernel, text], VARIABLES.get(kernel, {}))
    child(["--in-child", "truths", str(work), ",".join(kernels), text], {})
    pairs = honest_pairs(work, cells, kernels)
    counts = Counter(pair["called"] for pair in pairs)
    bugs = unseen_bugs(work, cells, [n for n in options.bugs if BUGS[n].model in options.models])
    accused, total = counts["different"], len(pairs)
    from isotrain.observe.environment import cpu_features

    bench.report(
        "parity_honest",
        accused / max(1, total),
        goal=0.01,
        met=accused <= 0.01 * total,
        pairs=total,
        called=dict(counts),
        different_95=interval(accused, max(1, total)),
        by_cell={
            ".".join(cell): _called([p for p in pairs if (p["model"], p["dtype"]) == cell]) for cell in cells
        },
        left_out=left_out(pairs),
        bugs=dict(Counter(f"{bug['dtype']}: {bug['called']}" for bug in bugs)),
        instructions=cpu_features(),
        seconds=round(time.monotonic() - begun),
    )


def _called(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    largest = max((pair["z"] for pair in pairs), default=0.0)
    return {**Counter(pair["called"] for pair in pairs), "largest_z": largest}


def unseen_bugs(work: Path, cells: Sequence[tuple[str, str]], names: Sequence[str]) -> list[dict[str, Any]]:
    if not names:
        return []
    text = ",".join(f"{model}.{dtype}" for model, dtype in cells)
    child(["--in-child", "bugs", str(work), ",".join(names), text], VARIABLES["avx2"])
    child(["--in-child", "truths", str(work), ",".join(f"bug-{name}" for name in names), text], {})
    results = []
    for name in names:
        for dtype in [dtype for model, dtype in cells if model == BUGS[name].model]:
            model = BUGS[name].model
            runs = run_of(work, model, dtype, REFERENCE), run_of(work, model, dtype, f"bug-{name}")
            result = {"bug": name, "model": model, "dtype": dtype, **judged(*runs)}
            results.append(result)
            bench.show(**result)
    return results


if __name__ == "__main__":
    in_child(*sys.argv[2:]) if sys.argv[1:2] == ["--in-child"] else main()
