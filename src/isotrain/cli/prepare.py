"""`isotrain prepare`: data sets and toy models, written in the form that recipes use."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="Write data sets, or a tiny model with data, to a directory.")

_Out = Annotated[Path, typer.Option("--out", help="The directory to write to.")]


@app.command()
def gsm8k(
    out: _Out,
    source: Annotated[
        Path | None,
        typer.Option("--source", help="A directory with train.jsonl and test.jsonl; by default the Hub."),
    ] = None,
) -> None:
    """Write GSM8K (school mathematics) as train.parquet and test.parquet.

    Example:

        isotrain prepare gsm8k --out work/gsm8k
    """
    from isotrain.data.prepare.gsm8k import prepare_gsm8k

    for name, rows in prepare_gsm8k(source, out).items():
        typer.echo(f"wrote {out / name} ({rows:,} rows)")
    typer.echo(
        "\nNext, with any supervised recipe:\n"
        f"    isotrain preview RECIPE data.train={_quoted(out / 'train.parquet')} \\\n"
        f"        data.validation={_quoted(out / 'test.parquet')} \\\n"
        "        data.prompt_key=extra_info.question data.completion_key=extra_info.answer"
    )


@app.command()
def tiny(
    out: _Out,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same files.")] = 0,
    rows: Annotated[int, typer.Option("--rows", min=10, help="Training rows.")] = 2000,
    architecture: Annotated[
        Literal["llama", "qwen2", "qwen3"], typer.Option("--architecture", help="Kind of model.")
    ] = "llama",
) -> None:
    """Write a tiny random model, its tokenizer, and sums for it to learn. Nothing is downloaded.

    Example:

        isotrain prepare tiny --out work/tiny
    """
    from isotrain.data.prepare.tiny import make_tiny

    validation = max(1, rows // 10)
    make_tiny(out, seed=seed, train_rows=rows, validation_rows=validation, architecture=architecture)
    typer.echo(f"wrote {out / 'model'} (random weights)")
    typer.echo(f"wrote {out / 'train.jsonl'} ({rows:,} rows)")
    typer.echo(f"wrote {out / 'validation.jsonl'} ({validation:,} rows)")
    typer.echo(f"\nNext:\n    isotrain train tiny-sft{_overrides(out)}")


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _overrides(out: Path) -> str:
    """Nothing where the recipe looks anyway."""
    if out == Path("work/tiny"):
        return ""
    values = {"model.path": "model", "data.train": "train.jsonl", "data.validation": "validation.jsonl"}
    return "".join(f" \\\n        {key}={_quoted(out / name)}" for key, name in values.items())
