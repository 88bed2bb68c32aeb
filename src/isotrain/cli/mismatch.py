"""`isotrain mismatch`: why the engine's log-probs differ from the trainer's, and whether it matters."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from isotrain import api
from isotrain.cli.arguments import AsJson
from isotrain.errors import DataError
from isotrain.language import said, tr


def mismatch(
    target: Annotated[
        str, Argument(metavar="RUN|MODEL", help="A run directory, or a model directory or name.")
    ],
    engine: Annotated[
        Literal["vllm", "hf"] | None, Option(help="The engine; by default that of the run, or vllm.")
    ] = None,
    step: Annotated[
        int | None, Option(min=1, help="The step of a run; by default its first that is recorded.")
    ] = None,
    model: Annotated[
        str | None, Option(metavar="DIR", help="Weights after the step before; by default from the run.")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        Option(help="Type of both sides; by default the run's."),
    ] = None,
    temperature: Annotated[
        float | None, Option(min=0.01, help="To sample at; by default the run's, or 1.")
    ] = None,
    top_p: Annotated[
        float | None, Option(min=0.01, max=1.0, help="To sample with; by default the run's, or 1.")
    ] = None,
    sequences: Annotated[int, Option(min=1, help="How many sequences to compare.")] = 16,
    max_tokens: Annotated[int | None, Option(min=1, help="Response tokens to sample.")] = None,
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
    from isotrain.tools.mismatch.diagnose import diagnose, of_model, of_run
    from isotrain.tools.mismatch.report import as_text, write_report
    from isotrain.tools.parity.report.text import plain

    options = {"engine": engine, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    rollout = {name: value for name, value in options.items() if value is not None}
    is_run = (Path(target) / "resolved.json").is_file()
    if not is_run and (step or model or with_cure):
        raise DataError(f"--step, --model and --with-cure: {target} is no run directory; leave them out")
    # First, as it takes the least time.
    cured = None if with_cure is None else api.compare(target, with_cure)
    with tempfile.TemporaryDirectory(prefix="isotrain-mismatch-") as directory:
        work = Path(directory)
        if is_run:
            of = of_run(Path(target), sequences, dtype, rollout, step, model, work)
        else:
            of = of_model(target, sequences, dtype, rollout)
        diagnosis = diagnose(of, work, lambda text: typer.echo(said(text), err=True))
    content = {
        **diagnosis.as_json(),
        "target": target,
        "engine": of.job.rollout.engine,
        "dtype": of.job.dtype,
    }
    content = plain(content | ({} if cured is None else {"with_cure": cured.as_json()}))
    answer = "" if cured is None else tr("With and without the cure: {words}", words=cured.words)
    shown = as_text(diagnosis, answer)
    if report is not None:
        write_report(report, diagnosis, of.name, content, shown)
        shown += "\n" + said(tr("report: {path}", path=report / "mismatch.md"))
    typer.echo(json.dumps(content, indent=2, allow_nan=False) if as_json else shown)
    raise typer.Exit(diagnosis.exit_code)
