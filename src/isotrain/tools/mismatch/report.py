"""A diagnosis as a table, a picture and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from isotrain.language import listed, said, tr
from isotrain.observe.plots import BLUE, GREY, INK, RED, as_png, new_figure, plain
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.mismatch.attribution import Share
from isotrain.tools.mismatch.causes import CAUSES
from isotrain.tools.mismatch.matter import Effect
from isotrain.tools.mismatch.verdict import Diagnosis, percent

Row = tuple[str, str, str, str, str]


def heading() -> Row:
    return (
        tr("cause"),
        tr("share"),
        tr("nats per token"),
        tr("95 % interval"),
        tr("removed first / last"),
    )


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
    rows.append(row(tr("unexplained rest"), attribution.rest, False))
    whole = "100 %" if attribution.total else percent(0.0)
    return [*rows, (tr("whole"), whole, f"{attribution.total:.2g}", "", "")]


def effect_lines(effect: Effect) -> Iterator[str]:
    """Answers to "did it matter"."""
    yield tr(
        "Effective sample size: {tokens} of the tokens, {sequences} of the sequences; {clipped} of the "
        "tokens have weights beyond 2.",
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
    labels = [said(CAUSES[s.cause].label if s.cause in CAUSES else tr("unexplained rest")) for s in shares]
    whole = attribution.total or 1.0
    colours = [GREY if s.cause not in CAUSES else RED if CAUSES[s.cause].fault else BLUE for s in shares]
    values = [100 * s.nats / whole for s in shares]
    reach = [
        [100 * max(0.0, s.nats - s.low) / whole for s in shares],
        [100 * max(0.0, s.high - s.nats) / whole for s in shares],
    ]
    axes.barh(range(len(shares)), values, color=colours, xerr=reach, ecolor=INK, capsize=3)
    axes.set_yticks(range(len(shares)), [plain(label) for label in labels])
    axes.set_xlabel(plain(said(tr("share of the mismatch, %"))))
    return as_png(figure)


def write_report(directory: Path, diagnosis: Diagnosis, name: str, extra: dict[str, object]) -> None:
    """`mismatch.json`, `mismatch.png` and `mismatch.md` in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {**diagnosis.as_json(), **extra}
    write_atomically(directory / "mismatch.json", json.dumps(content, indent=2) + "\n")
    (directory / "mismatch.png").write_bytes(picture(diagnosis, name))
    lines = [f"# {name}", "", said(diagnosis.sentence), ""]
    rows = [heading(), ("---",) * 5, *table(diagnosis)]
    lines += ["| " + " | ".join(said(cell) for cell in row) + " |" for row in rows]
    texts = [*diagnosis.faults, *diagnosis.problems, *diagnosis.notes, *effect_lines(diagnosis.effect)]
    lines += ["", *(f"- {said(text)}" for text in texts), "", "![](mismatch.png)", ""]
    causes = [CAUSES[share.cause] for share in diagnosis.attribution.ranked]
    lines += [f"- {said(cause.label)}: {said(cause.isolated_by)}" for cause in causes]
    if diagnosis.remedies:
        lines += ["", said(tr("What cures it:")), "", *(f"- `{said(r)}`" for r in diagnosis.remedies)]
    write_atomically(directory / "mismatch.md", "\n".join(lines) + "\n")
