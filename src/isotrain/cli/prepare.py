"""`isotrain prepare`: write data sets and toy models for recipes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

app = typer.Typer(no_args_is_help=True, help="Write data sets, or a tiny model with data, to a directory.")

_Out = Annotated[Path, Option("--out", help="The directory to write to.")]
_Gsm8k = Annotated[
    Path | None,
    Option("--source", help="A directory with train.jsonl and test.jsonl; by default the Hub."),
]
_Seed = Annotated[int, Option("--seed", min=0, help="Random seed; the same seed writes the same files.")]


@app.command()
def gsm8k(out: _Out, source: _Gsm8k = None) -> None:
    """Write GSM8K (school mathematics) as train.parquet and test.parquet.

    Example:

        isotrain prepare gsm8k --out work/gsm8k
    """
    from isotrain.data.prepare.gsm8k import prepare_gsm8k

    _tell(out, prepare_gsm8k(source, out))
    online = {"data.train": "train.parquet", "data.validation": "test.parquet"}
    typer.echo(
        "\nNext, with any supervised recipe:\n"
        f"    isotrain preview RECIPE data.train={_quoted(out / 'train.parquet')} \\\n"
        f"        data.validation={_quoted(out / 'test.parquet')} \\\n"
        "        data.prompt_key=extra_info.question data.completion_key=extra_info.answer"
        "\nor, learning from rewards on 8 accelerators:\n"
        f"    isotrain train gsm8k-grpo-8x{_overrides(out, online, Path('work/gsm8k'))}"
    )


@app.command()
def gsm8k_sums(out: _Out, source: _Gsm8k = None) -> None:
    """Write the small calculations in GSM8K's solutions as prompts: a task for small models.

    Example:

        isotrain prepare gsm8k-sums --out work/gsm8k-sums
    """
    from isotrain.data.prepare.gsm8k import prepare_gsm8k_sums

    _tell(out, prepare_gsm8k_sums(source, out))
    online = {"data.train": "train.jsonl", "data.validation": "test.jsonl"}
    typer.echo(f"\nNext:\n    isotrain train gsm8k-grpo{_overrides(out, online, Path('work/gsm8k-sums'))}")


@app.command()
def gsm8k_tool(out: _Out, source: _Gsm8k = None) -> None:
    """Write chains of calculations from GSM8K's solutions as prompts, and a calculator as a tool for them.

    Example:

        isotrain prepare gsm8k-tool --out work/gsm8k-tool
    """
    from isotrain.data.prepare.gsm8k import prepare_gsm8k_tool

    _tell(out, prepare_gsm8k_tool(source, out))
    typer.echo(f"wrote {out / 'calculator.py'}")
    online = {
        "data.train": "train.jsonl",
        "data.validation": "test.jsonl",
        "rollout.environment.path": "calculator.py:Calculator",
    }
    typer.echo(f"\nNext:\n    isotrain train gsm8k-tool{_overrides(out, online, Path('work/gsm8k-tool'))}")


@app.command()
def gsm8k_preferences(out: _Out, source: _Gsm8k = None, seed: _Seed = 0) -> None:
    """Write correct and corrupted GSM8K solutions: pairs, labelled responses and labelled steps.

    Example:

        isotrain prepare gsm8k-preferences --out work/gsm8k-preferences
    """
    from isotrain.data.prepare.gsm8k import prepare_gsm8k_preferences

    _tell(out, prepare_gsm8k_preferences(source, out, seed))


@app.command()
def preferences(
    name: Annotated[
        Literal["ultrafeedback", "prm800k", "math-shepherd"],
        typer.Argument(help="The published format of the rows."),
    ],
    source: Annotated[str, Option(help="JSON lines or Parquet files, or a Hub name.")],
    out: Annotated[Path, Option(help="The .jsonl file to write.")],
) -> None:
    """Convert a published set of preferences or step labels to rows for training.

    Example:

        isotrain prepare preferences ultrafeedback --source train_prefs.parquet --out work/pairs.jsonl
    """
    from isotrain.data.prepare.preference_sets import prepare_preference_set

    read, written = prepare_preference_set(name, source, out)
    typer.echo(f"wrote {out} ({written:,} rows from {read:,})")


@app.command()
def tiny(
    out: _Out,
    seed: _Seed = 0,
    rows: Annotated[int, Option(min=10, help="Training rows.")] = 2000,
    architecture: Annotated[
        Literal["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "qwen2_5_vl", "qwen3_vl"],
        Option(help="Kind of model; those with vl are vision-language models."),
    ] = "llama",
    vision: Annotated[bool, Option("--vision", help="The same as --architecture qwen2_5_vl.")] = False,
) -> None:
    """Write a tiny random model, its tokenizer, and two tasks to learn. Nothing is downloaded.

    Vision-language models get two others: to name a picture's colour, and to write what the colour says.

    Example:

        isotrain prepare tiny --out work/tiny
    """
    from isotrain.data.prepare.tiny import make_tiny
    from isotrain.data.prepare.tiny_vision import make_tiny_vision

    validation = max(1, rows // 10)
    if vision and architecture == "llama":
        architecture = "qwen2_5_vl"
    if architecture == "qwen2_5_vl" or architecture == "qwen3_vl":
        make_tiny_vision(
            out, seed=seed, train_rows=rows, validation_rows=validation, architecture=architecture
        )
        typer.echo(f"wrote {out / 'model'} (random weights)")
        counts = {
            "train": rows,
            "validation": validation,
            "pictures": rows,
            "pictures-validation": validation,
        }
        _tell(out, {f"{name}.parquet": count for name, count in counts.items()})
        typer.echo(f"wrote {out / 'reward.py'}")
        _tell_next(out, "tiny-vision", "train.parquet", "validation.parquet", "pictures{}.parquet")
        return
    if vision:
        raise typer.BadParameter(f"{architecture} reads no pictures; leave --architecture or --vision out")
    make_tiny(out, seed=seed, train_rows=rows, validation_rows=validation, architecture=architecture)
    typer.echo(f"wrote {out / 'model'} (random weights)")
    counts = {"train": rows, "validation": validation, "prompts": rows, "prompts-validation": validation}
    _tell(out, {f"{name}.jsonl": count for name, count in counts.items()})
    for kind in ("pairs", "responses", "steps"):
        typer.echo(f"wrote {out / f'{kind}.jsonl'} ({rows:,} rows), {kind}-validation.jsonl ({validation:,})")
    typer.echo(f"wrote {out / 'reward.py'}")
    _tell_next(out, "tiny", "train.jsonl", "validation.jsonl", "prompts{}.jsonl")


def _tell_next(out: Path, kind: str, train: str, validation: str, prompts: str) -> None:
    """The two recipes to run, with overrides where the files are not in their usual place."""
    model, usual = {"model.path": "model"}, Path("work") / kind
    supervised = {**model, "data.train": train, "data.validation": validation}
    online = {
        **model,
        "data.train": prompts.format(""),
        "data.validation": prompts.format("-validation"),
        "reward.function.path": "reward.py:score",
    }
    typer.echo(
        f"\nNext:\n    isotrain train {kind}-sft{_overrides(out, supervised, usual)}"
        f"\nor, learning from rewards:\n    isotrain train {kind}-grpo{_overrides(out, online, usual)}"
    )


@app.command()
def verifiers(
    name: Annotated[str, typer.Argument(help="The environment, as verifiers names it.")],
    out: _Out,
    python: Annotated[
        str | None, Option("--python", help="The Python that has the environment; by default isotrain's.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        Option("--arg", help="An argument of the environment, key=value; value as in YAML. Repeatable."),
    ] = None,
    limit: Annotated[int, Option("--limit", min=1, help="Maximum tasks per file.")] = 1_000_000,
    held_out: Annotated[
        int, Option("--held-out", min=0, help="Tasks for training to use for validation instead.")
    ] = 0,
) -> None:
    """Write the tasks of a verifiers environment as rows for rollout.agent.verifiers.

    Example:

        isotrain prepare verifiers my-env --python .venv-agents/bin/python --out work/my-env
    """
    import json

    from isotrain.data.prepare.verifiers_tasks import prepare_verifiers, read_arguments

    arguments = read_arguments(arg or [])
    written = prepare_verifiers(name, out, arguments=arguments, python=python, limit=limit, held_out=held_out)
    _tell(out, written)
    # JSON is YAML too, and keeps a text like "null" a text.
    agent = {"verifiers": name, "arguments": arguments, "python": python}
    block = json.dumps({key: value for key, value in agent.items() if value}, ensure_ascii=False)
    typer.echo(f"\nNext, in a recipe for online training:\n    rollout:\n      agent: {block}")
    typer.echo("    reward:\n      environment: {}")
    typer.echo(f"    data:\n      train: {json.dumps(str(out / 'train.jsonl'), ensure_ascii=False)}")


def _tell(out: Path, written: Mapping[str, int]) -> None:
    for file, rows in written.items():
        typer.echo(f"wrote {out / file} ({rows:,} rows)")


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _overrides(out: Path, files: dict[str, str], usual: Path) -> str:
    """Overrides for a recipe that expects the files in `usual`; nothing if they are there."""
    if out == usual:
        return ""
    return "".join(f" \\\n        {key}={_quoted(out / name)}" for key, name in files.items())
