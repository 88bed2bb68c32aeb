"""Peak memory of `isotrain parity truth` on SmolLM2-135M, beside its plan and beside a model held in float64.

`ratio` is the peak over the plan. The figure of the 7B model is by plan alone: it was not run.

    python benchmarks/truth_memory.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
from smollm2 import smollm2


def peak_of(*command: str) -> int:
    """Largest anonymous memory of one child process, in bytes.

    Pages of the files that hold gradients are not in it: the kernel takes them back where memory is short.
    """
    process = subprocess.Popen([sys.executable, "-m", "isotrain.cli.main", *command])
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        peak = max(peak, int(lines.get("RssAnon", "0 kB").split()[0]) * 1024)
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return peak


def main() -> None:
    parser = bench.Options(__doc__, tokens=128)
    parser.add_argument("--tokens", type=int, default=512, help="length of the micro-batch")
    tokens: int = parser.read().tokens
    from isotrain.models.load import build_causal_lm
    from isotrain.tools.probes.truth import memory_of

    model = build_causal_lm(smollm2(), "sdpa")
    plan = memory_of(model, tokens)
    parameters = sum(p.numel() for p in model.parameters())
    large = memory_of(build_causal_lm(bench.REPOSITORY / "benchmarks/plan_models/qwen2.5-7b", "sdpa"), tokens)
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        recipe = {
            "name": "truth-memory",
            "output": str(run),
            "device": {"type": "cpu"},
            "model": {"path": str(smollm2()), "dtype": "float32"},
            "data": {
                "train": str(_rows(Path(directory))),
                "batch_size": 2,
                "max_length": tokens // 2,
                "too_long": "truncate",
                "tokens_per_micro_batch": tokens,
            },
            "algorithm": {"name": "sft"},
            "trainer": {"steps": 1},
            "observe": {"layer_trace": 1, "loggers": []},
        }
        (Path(directory) / "recipe.yaml").write_text(json.dumps(recipe))
        peak_of("train", f"{directory}/recipe.yaml")
        peak = peak_of("parity", "truth", str(run))
    bench.report(
        "truth_memory",
        peak / plan.total,
        goal=1.0,
        met=peak <= plan.total,
        peak_gb=peak / 1e9,
        plan_gb=plan.total / 1e9,
        gradients_on_disk_gb=plan.disk / 1e9,
        float64_weights_and_gradients_gb=16 * parameters / 1e9,
        tokens=tokens,
        plan_7b_gb=large.total / 1e9,
    )


def _rows(directory: Path) -> Path:
    """Long enough to fill the micro-batch."""
    path, text = directory / "train.jsonl", "one plus two is three and " * 200
    row = {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": text}]}
    path.write_text((json.dumps(row) + "\n") * 4)
    return path


if __name__ == "__main__":
    main()
