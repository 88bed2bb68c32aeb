"""Device memory of a recipe's training step, from fake steps with few layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from isotrain.errors import PlanError
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe

# Layers are alike: what one more takes is what each takes. From three on, all that happens at one time does:
# the gradients of one layer travel while the next one computes and the weights of a third arrive.
DEPTHS = (3, 4)

# A fake step takes seconds; minutes say that something is wrong.
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one rank."""

    parts: dict[str, int]
    """On the device at the worst moment, by purpose."""
    phase: str
    """When that is."""
    host: int
    parameters: int
    """That take part in matrix products of a token."""
    trained: int
    all_parameters: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def training_memory(recipe: Recipe, layers: int, ranks: int, micro_batches: int) -> TrainingMemory:
    """Of a model with so many layers."""
    depths = [min(depth, layers) for depth in DEPTHS]
    with ThreadPoolExecutor(len(depths)) as pool:
        few, more = pool.map(lambda depth: _ask(recipe, depth, ranks, micro_batches), depths)

    def at_depth(first: float, second: float) -> int:
        per_layer = (second - first) / (depths[1] - depths[0]) if depths[1] > depths[0] else 0.0
        return round(second + per_layer * (layers - depths[1]))

    phases = {}
    for phase in more["peaks"]:
        one, two = few["peaks"].get(phase, {}), more["peaks"][phase]
        parts = {name: at_depth(one.get(name, 0), two.get(name, 0)) for name in {**one, **two}}
        phases[phase] = {name: size for name, size in parts.items() if size > 0}
    worst = max(phases, key=lambda phase: sum(phases[phase].values()))
    counts = [at_depth(a, b) for a, b in zip(few["parameters"], more["parameters"], strict=True)]
    return TrainingMemory(phases[worst], worst, at_depth(few["host"], more["host"]), *counts)


def _ask(recipe: Recipe, layers: int, ranks: int, micro_batches: int) -> dict[str, Any]:
    question = {"recipe": resolved(recipe), "layers": layers, "ranks": ranks, "micro_batches": micro_batches}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "isotrain.tools.plan.child"],
            input=json.dumps(question),
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"the step of this recipe was not planned within {TIMEOUT_SECONDS:.0f} s; try on an idle machine"
        ) from None
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise PlanError(f"the step of this recipe cannot be planned: {last.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
