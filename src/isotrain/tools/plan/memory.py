"""Device memory of a recipe's training step, from fake steps with few layers.

Each runs in a process of its own, `python -m isotrain.tools.plan.memory` with JSON in and out: torch has room
for one device that it does not know, and a vendor's package takes that room when torch is imported.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.device.vendors import hide_packages
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
    """Weights that take part in matrix products of a token."""
    trained: int
    all_parameters: int
    communicators: tuple[int, int]
    """Of groups of ranks, and of those whose ranks send to single others."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def training_memory(recipe: Recipe, layers: int, ranks: int, micro_batches: int) -> TrainingMemory:
    """Memory for a model with so many layers."""
    depths = [min(depth, layers) for depth in DEPTHS]
    with ThreadPoolExecutor(len(depths)) as pool:
        few, more = pool.map(lambda depth: run_fake_step(recipe, depth, ranks, micro_batches), depths)

    def at_depth(first: float, second: float) -> int:
        per_layer = (second - first) / (depths[1] - depths[0]) if depths[1] > depths[0] else 0.0
        return round(second + per_layer * (layers - depths[1]))

    phases = {}
    for phase in more["peaks"]:
        first, second = few["peaks"].get(phase, {}), more["peaks"][phase]
        parts = {name: at_depth(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}
        phases[phase] = {name: size for name, size in parts.items() if size > 0}
    worst = max(phases, key=lambda phase: sum(phases[phase].values()))
    parameters, trained, whole = (
        at_depth(a, b) for a, b in zip(few["parameters"], more["parameters"], strict=True)
    )
    host, (groups, to_one) = at_depth(few["host"], more["host"]), more["communicators"]
    return TrainingMemory(phases[worst], worst, host, parameters, trained, whole, (groups, to_one))


def run_fake_step(recipe: Recipe, layers: int, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Reply of the process that runs a fake step."""
    question = {"recipe": resolved(recipe), "layers": layers, "ranks": ranks, "micro_batches": micro_batches}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "isotrain.tools.plan.memory"],
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
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def with_layers(recipe: Recipe, layers: int, directory: Path) -> Recipe:
    """The recipe with a model of fewer layers, of which only the configuration exists."""
    from isotrain.models.config import text_part
    from isotrain.models.files import model_directory

    source = model_directory(recipe.model.path)
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copyfile(file, directory / file.name)  # some algorithms ask the tokenizer
    config = json.loads((source / "config.json").read_text())
    text = text_part(config)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(text.get(name), list):
            text[name] = text[name][:layers]
    text["num_hidden_layers"] = layers
    (directory / "config.json").write_text(json.dumps(config))
    model = recipe.model.model_copy(update={"path": str(directory)})
    return recipe.model_copy(update={"model": model})


def reply(question: dict[str, Any]) -> dict[str, Any]:
    from isotrain.tools.plan.step import fake_step

    recipe = Recipe.model_validate(question["recipe"])
    with tempfile.TemporaryDirectory() as directory:
        fewer = with_layers(recipe, question["layers"], Path(directory))
        usage = fake_step(fewer, question["ranks"], question["micro_batches"])
    return {
        "peaks": {phase: peak.parts for phase, peak in usage.peaks.items()},
        "host": usage.host,
        "parameters": usage.parameters,
        "communicators": usage.communicators,
    }


def main() -> None:
    hide_packages()
    logging.disable(logging.WARNING)
    json.dump(reply(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
