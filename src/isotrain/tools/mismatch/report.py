"""A diagnosis as a table, a picture and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from isotrain.language import listed, said, tr
from isotrain.observe.plots import BLUE, GREY, INK, RED, as_png, new_figure, plain
from isotrain.observe.run_directory import write_atomically
from isotrain.terminal import rich_console
from isotrain.tools.mismatch.attribution import Share
from isotrain.tools.mismatch.causes import CAUSES
from isotrain.tools.mismatch.matter import Effect
from isotrain.tools.mismatch.verdict import Diagnosis, percent

Row = tuple[str, str, str, str, str]


def table(diagnosis: Diagnosis) -> list[Row]:
    """A row for each cause, the rest, and the whole."""
    attribution = diagnosis.attribution

    def row(label: str, share: Share, apart: bool) -> Row:
        ends = f"{share.first:.2g} / {share.last:.2g}" if apart else ""
        if share.shared:
            ends = listed([ends, tr("shared")], " ")
        interval = f"{share.low:.2g} .. {share.high:.2g}"
        return label, percent(attribution.part(share)), f"{share.nats:.2g}", interval, ends

    rows = [row(CAUSES[share.cause].label, share, True) for share in attribution.ranked]
    whole = "100 %" if attribution.total else percent(0.0)
    rest = row(tr("unexplained rest"), attribution.rest, False)
    return [*rows, rest, (tr("whole"), whole, f"{attribution.total:.2g}", "", "")]


def effect_lines(effect: Effect) -> Iterator[str]:
    """Answers to "did it matter"."""
    yield tr(
        "Effective sample size: {tokens} of the tokens, {sequences} of the sequences; importance weights of "
        "tokens have a standard deviation of {spread}, {clipped} of them are beyond 2.",
        spread=f"{effect.spread:.2g}",
        tokens=percent(effect.token_samples),
        sequences=percent(effect.sequence_samples),
        clipped=f"{100 * effect.clipped:.2g} %",
    )
    for name, value in ((tr("length"), effect.length), (tr("advantage"), effect.advantage)):
        if value is not None and value.is_significant:
            yield tr(
                "The mismatch of a sequence goes with its {name}: rank correlation {value}.",
                name=name,
                value=f"{value.coefficient:+.2f}",
            )
    if effect.is_visible:
        yield tr("It can change the update: correct it, or train a second run with the cure and compare.")
    else:
        yield tr(
            "These sequences show no effect on the update; only a run with the cure shows that on training."
        )


def picture(diagnosis: Diagnosis, run: str) -> bytes:
    """Shares as bars with their intervals."""
    attribution = diagnosis.attribution
    title = said(tr("Mismatch: {total} nats per token", total=f"{attribution.total:.2g}"))
    figure, (axes,) = new_figure(title, run, 1, size=(9.0, 4.8))
    shares = [*attribution.ranked, attribution.rest][::-1]
    known = [CAUSES.get(s.cause) for s in shares]
    labels = [said(cause.label if cause else tr("unexplained rest")) for cause in known]
    colours = [GREY if cause is None else RED if cause.fault else BLUE for cause in known]
    unit = 100 / (attribution.total or 1.0)
    values = [unit * s.nats for s in shares]
    reach = [
        [unit * max(0.0, way) for way in ways]
        for ways in zip(*((s.nats - s.low, s.high - s.nats) for s in shares), strict=True)
    ]
    axes.barh(range(len(shares)), values, color=colours, xerr=reach, ecolor=INK, capsize=3)
    axes.set_yticks(range(len(shares)), [plain(label) for label in labels])
    axes.set_xlabel(plain(said(tr("share of the mismatch, %"))))
    return as_png(figure)


def as_text(diagnosis: Diagnosis, cured: str = "") -> str:
    """What the command prints; `cured` is the answer of a run with the cure."""
    from rich.table import Table

    heading = (
        tr("cause"),
        tr("share"),
        tr("nats per token"),
        tr("95 % interval"),
        tr("removed first / last"),
    )
    rows = Table(*(said(cell) for cell in heading), box=None, header_style="bold", pad_edge=False)
    for row in table(diagnosis):
        rows.add_row(*(said(cell) for cell in row))
    cures = (
        [tr("What cures it:"), *(f"  {said(r)}" for r in diagnosis.remedies)] if diagnosis.remedies else []
    )
    below = [*diagnosis.faults, *diagnosis.problems, *diagnosis.notes, *effect_lines(diagnosis.effect)]
    console = rich_console(file=StringIO(), width=200, highlight=False, markup=False)
    with console.capture() as shown:
        for text in (diagnosis.sentence, rows, *below, *cures, cured):
            console.print(said(text) if isinstance(text, str) else text, soft_wrap=True)
    return "\n".join(line.rstrip() for line in shown.get().rstrip().splitlines())


def write_report(directory: Path, diagnosis: Diagnosis, name: str, content: object, shown: str) -> None:
    """`mismatch.json` with this content, `mismatch.png` and `mismatch.md` in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "mismatch.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    (directory / "mismatch.png").write_bytes(picture(diagnosis, name))
    causes = [CAUSES[share.cause] for share in diagnosis.attribution.ranked]
    lines = [f"# {name}", "", "```text", shown, "```", "", "![](mismatch.png)", ""]
    lines += [f"- {said(cause.label)}: {said(cause.isolated_by)}" for cause in causes]
    write_atomically(directory / "mismatch.md", "\n".join(lines) + "\n")
