"""The process that runs a fake step: `python -m isotrain.tools.plan.child`, JSON in and out.

A process of its own, because torch has room for one device that it does not know, and a vendor's package
takes that room when torch is imported.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from isotrain.device.vendors import hide_packages
from isotrain.recipe.schema import Recipe


def with_layers(recipe: Recipe, layers: int, directory: Path) -> Recipe:
    """The recipe with a model of fewer layers, of which only the configuration exists."""
    from isotrain.models.config import text_part
    from isotrain.models.load import model_directory

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


def answer(question: dict[str, Any]) -> dict[str, Any]:
    from isotrain.tools.plan.step import fake_step

    recipe = Recipe.model_validate(question["recipe"])
    with tempfile.TemporaryDirectory() as directory:
        fewer = with_layers(recipe, question["layers"], Path(directory))
        usage = fake_step(fewer, question["ranks"], question["micro_batches"])
    return {
        "peaks": {phase: peak.parts for phase, peak in usage.peaks.items()},
        "host": usage.host,
        "parameters": usage.parameters,
    }


def main() -> None:
    hide_packages()
    logging.disable(logging.WARNING)
    json.dump(answer(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
