"""`isotrain mismatch`: why the engine's log-probs differ from the trainer's, and whether it matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from isotrain import api
from isotrain.cli.arguments import AsJson
from isotrain.language import said, tr
from isotrain.terminal import rich_console


def mismatch(
    target: Annotated[
        str, Argument(metavar="RUN|MODEL", help="A run directory, or a model directory or name.")
    ],
    engine: Annotated[
        str | None, Option(metavar="vllm|hf", help="The engine; by default that of the run, or vllm.")
    ] = None,
    step: Annotated[int, Option(min=1, help="The recorded step of a run.")] = 1,
    model: Annotated[
        str | None, Option(metavar="DIR", help="Weights after the step before; by default from the run.")
    ] = None,
    dtype: Annotated[
        str | None, Option(metavar="bfloat16|float32", help="Type of both sides; by default the run's.")
    ] = None,
    temperature: Annotated[float | None, Option(min=0.01, help="Of a model; 1 by default.")] = None,
    top_p: Annotated[float | None, Option(min=0.01, max=1.0, help="Of a model; 1 by default.")] = None,
    sequences: Annotated[int, Option(min=1, help="How many sequences to compare.")] = 16,
    max_tokens: Annotated[int | None, Option(min=1, help="Response tokens that a model samples.")] = None,
    with_cure: Annotated[
        Path | None, Option(metavar="RUN", help="The same run with the cure: did the outcome differ?")
    ] = None,
    report: Annotated[Path | None, Option(metavar="DIR", help="Write a page, a picture and JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Name why the engine's log-probs differ from the trainer's, with a share for each cause.

    Each cause is removed by an experiment on the same tokens: weights, sampling convention, token ids, batch,
    prefix cache, decode kernels, head, experts, modules, type. Engine and trainer compute in turn, so one
    device is enough. Without a recorded run, the engine samples a few responses first.

    Exit code 0: explained by arithmetic; 1: a fault is named; 2: it cannot be examined; 3: not explained.

    Examples:

        isotrain mismatch runs/grpo --report mismatch

        isotrain mismatch work/tiny/model --engine hf
    """
    from isotrain.tools.mismatch.diagnose import diagnose, of_model, of_run, temporary
    from isotrain.tools.mismatch.report import write_report

    changes = {"dtype": dtype, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    given = {name: value for name, value in changes.items() if value is not None}
    with temporary() as directory:
        work = Path(directory)
        if (Path(target) / "resolved.json").is_file():
            of = of_run(Path(target), step, engine, {**given, "model": model}, sequences, work)
        else:
            of = of_model(target, engine or "vllm", given, sequences)
        diagnosis = diagnose(of, work, lambda text: typer.echo(said(text), err=True))
    extra: dict[str, object] = {"target": target, "engine": of.job.engine, "dtype": of.job.dtype}
    cured = None if with_cure is None else api.compare(target, with_cure)
    if cured is not None:
        extra["with_cure"] = cured.as_json()
    if report is not None:
        write_report(report, diagnosis, of.name, extra)
    if as_json:
        typer.echo(json.dumps({**diagnosis.as_json(), **extra}, indent=2))
    else:
        _show(diagnosis)
        if cured is not None:
            typer.echo(said(tr("With and without the cure: {words}", words=cured.words)))
        if report is not None:
            typer.echo(said(tr("report: {path}", path=report / "mismatch.md")))
    raise typer.Exit(diagnosis.exit_code)


def _show(diagnosis: object) -> None:
    from rich.table import Table

    from isotrain.tools.mismatch.report import effect_lines, heading, table
    from isotrain.tools.mismatch.verdict import Diagnosis

    assert isinstance(diagnosis, Diagnosis)
    console = rich_console(soft_wrap=True, highlight=False, markup=False)
    console.print(said(diagnosis.sentence))
    rows = Table(*(said(cell) for cell in heading()), box=None, header_style="bold", pad_edge=False)
    for row in table(diagnosis):
        rows.add_row(*(said(cell) for cell in row))
    console.print(rows)
    for text in (*diagnosis.faults, *diagnosis.problems, *diagnosis.notes, *effect_lines(diagnosis.effect)):
        console.print(said(text))
    if diagnosis.remedies:
        console.print(said(tr("What cures it:")))
        for remedy in diagnosis.remedies:
            console.print(f"  {said(remedy)}")
