"""One training step on kernels of several instruction sets, honest and with a mistake, against float64.

Each candidate is compared with the reference, which has the best instructions of this machine, through the
step's truth. `ratio` is the share of candidates that are called what they are: honest ones the same, mistakes
different. Lines have the size of each difference and the largest z of each layer.

    python benchmarks/parity_truth.py [--model smollm2] [--work DIR] [--only avx2 scale-0.2%]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
from power.honest_patches import PATCHES

REFERENCE = "best"
"""The instructions that torch and oneDNN choose by themselves."""
HONEST = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "eager-attention": {},
    "split-products": {},
    "other-norms": {},
}
MODELS = {
    # Tokens of a row, and how many rows a step has.
    "tiny": (64, 2),
    "smollm2": (96, 2),
}


def _middle(model: Any) -> Any:
    layers = model.model.layers
    return layers[len(layers) // 2]


def _scale(factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        _middle(model).self_attn.scaling *= factor

    return change


def _epsilon(model: Any) -> None:
    _middle(model).input_layernorm.variance_epsilon = 1e-3


def _epsilons(model: Any) -> None:
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.variance_epsilon /= 10


def _rope(model: Any) -> None:
    """A base that is 1 % larger."""
    frequencies_F = model.model.rotary_emb.inv_freq
    exponent_F = -frequencies_F.new_tensor(range(len(frequencies_F))) / len(frequencies_F)
    model.model.rotary_emb.inv_freq = frequencies_F * 1.01**exponent_F


def _window(model: Any) -> None:
    attention = _middle(model).self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, sliding_window=32)


def _weight(model: Any) -> None:
    _middle(model).self_attn.q_proj.weight.data.mul_(1.004)


def _backward(model: Any) -> None:
    _middle(model).register_full_backward_hook(lambda module, into, _: tuple(1.01 * g for g in into))


BUGS: dict[str, Callable[[Any], None]] = {
    "scale-2%": _scale(1.02),
    "scale-0.2%": _scale(1.002),
    "one-epsilon": _epsilon,
    "all-epsilons": _epsilons,
    "rope-1%": _rope,
    "window": _window,
    "weight-0.4%": _weight,
    "backward-1%": _backward,
}


def side(name: str, recipe: str) -> None:
    """Train one side in this process."""
    import importlib

    from isotrain import api
    from isotrain.engine.engine import TrainingEngine

    for module, patch in PATCHES.get(name, {}).items():
        patch(importlib.import_module(module))
    build = TrainingEngine.__init__

    def changed(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        build(self, model, *args, **kwargs)
        BUGS[name](model.pretrained)

    if name in BUGS:
        TrainingEngine.__init__ = changed  # type: ignore[method-assign]
    api.train(recipe, in_process=True)


def train(work: Path, name: str, dtype: str, model: str) -> Path:
    run = work / f"{model}-{dtype}-{name}"
    if (run / "done").exists():
        return run
    tokens, rows = MODELS[model]
    recipe = {
        "name": "parity-truth",
        "output": str(run),
        "device": {"type": "cpu"},
        "model": {"path": str(_model(work, model)), "dtype": dtype},
        "data": {
            "train": str(_rows(work)),
            "batch_size": rows,
            "max_length": tokens,
            "too_long": "truncate",
            "tokens_per_micro_batch": tokens * rows,
        },
        "algorithm": {"name": "sft"},
        "trainer": {"steps": 1},
        "observe": {"layer_trace": 1, "operators": True, "loggers": []},
    }
    run.mkdir(parents=True, exist_ok=True)
    written = run.with_suffix(".yaml")
    written.write_text(json.dumps(recipe))
    command = [sys.executable, __file__, "--side", name, str(written)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **HONEST.get(name, {})}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    (run / "done").touch()
    return run


def _model(work: Path, name: str) -> Path:
    if name == "smollm2":
        from smollm2 import smollm2

        return smollm2()
    from isotrain.data.prepare.tiny import make_tiny

    if not (work / "tiny").exists():
        make_tiny(work / "tiny")
    return work / "tiny" / "model"


TEXTS = (
    "Natalia sold 48/2 = 24 clips in May. Natalia sold 48+24 = 72 clips altogether in April and May. ",
    "Weng earns 12/60 = 0.2 dollars per minute. Working 50 minutes, she earned 0.2 x 50 = 10 dollars. "
    "The train left the station at noon, and nobody on the platform had noticed its doors were open. ",
)


def _rows(work: Path) -> Path:
    path = work / "train.jsonl"
    ask = {"role": "user", "content": "How much is it?"}
    rows = [{"messages": [ask, {"role": "assistant", "content": text * 4}]} for text in TEXTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def truth(run: Path) -> None:
    if not (run / "truth" / "done").exists():
        command = [sys.executable, "-m", "isotrain.cli.main", "parity", "truth", str(run)]
        subprocess.run(command, check=True, capture_output=True)
        (run / "truth" / "done").touch()


def compared(reference: Path, candidate: Path) -> dict[str, Any]:
    """What the levels of single steps say, and how far the candidate's layers are from float64."""
    from isotrain.tools.parity.protocol import verdict_on

    verdict = verdict_on(reference, candidate)
    operators, steps = verdict.level("P0"), verdict.level("P1")
    states = {operators.state, steps.state}
    called = next((state for state in ("different", "cannot tell") if state in states), "same")
    largest: dict[str, float] = {}
    for entry in steps.evidence.get("layers", []):
        if "z" in entry:
            largest[entry["kind"]] = max(largest.get(entry["kind"], 0.0), float(f"{entry['z']:.3g}"))
    against = [level for level in (operators, steps) if level.state == called]
    return {
        "called": called,
        "P0": operators.state,
        "P1": steps.state,
        "z": largest,
        "words": "; ".join(level.words for level in against),
        "z_by_layer": _by_layer(steps.evidence.get("layers", [])),
    }


def _by_layer(entries: list[dict[str, Any]]) -> list[float]:
    """The largest z of each decoder layer, over its outputs, gradients and parameters."""
    largest: dict[int, float] = {}
    for entry in entries:
        if (number := re.search(r"layers\.(\d+)", entry["name"])) and "z" in entry:
            layer = int(number[1])
            largest[layer] = max(largest.get(layer, 0.0), entry["z"])
    return [float(f"{largest[layer]:.3g}") for layer in sorted(largest)]


def main() -> None:
    parser = bench.Options(__doc__, dtypes=["float32"], only=["avx2", "scale-0.2%", "weight-0.4%"])
    parser.add_argument("--work", type=Path, help="keeps what is trained; by default a temporary directory")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=[*HONEST, *BUGS], metavar="NAME")
    options = parser.read()
    with tempfile.TemporaryDirectory() as temporary:
        work: Path = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        right: dict[str, list[bool]] = {"honest": [], "mistakes": []}
        for dtype in options.dtypes:
            reference = train(work, REFERENCE, dtype, options.model)
            truth(reference)
            for name in options.only:
                kind, expected = ("honest", "same") if name in HONEST else ("mistakes", "different")
                result = compared(reference, train(work, name, dtype, options.model))
                right[kind].append(result["called"] == expected)
                bench.show(dtype=dtype, candidate=name, expected=expected, **result)
        every = [*right["honest"], *right["mistakes"]]
        counts = {f"{kind}_right": [sum(calls), len(calls)] for kind, calls in right.items()}
        bench.report("parity_truth", sum(every) / len(every), goal=1.0, met=all(every), **counts)


if __name__ == "__main__":
    side(*sys.argv[2:]) if sys.argv[1:2] == ["--side"] else main()
