"""`isotrain export`: a checkpoint of a run to a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from isotrain.api import Run


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory: `output` of its recipe.")],
    out: Annotated[Path, Option(help="The directory to write the model to.")],
    step: Annotated[
        int | None, Option(min=0, help="The checkpoint to export; the newest by default.")
    ] = None,
    adapter: Annotated[
        bool, Option("--adapter", help="Write only the LoRA adapter, not the merged model.")
    ] = False,
) -> None:
    """Write a checkpoint as a model that transformers, vLLM and others load.

    Example:

        isotrain export runs/tiny-sft --out models/tiny-sft
    """
    typer.echo(f"wrote {Run(run).export(out, step, adapter_only=adapter)}")
