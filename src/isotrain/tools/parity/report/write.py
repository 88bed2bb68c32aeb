"""A verdict's directory: verdict.json, report.html, the plots, summaries in Markdown."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from isotrain import __version__
from isotrain.errors import DataError
from isotrain.language import Language, said, tr, using
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.parity.compare.effects import ANSWERS
from isotrain.tools.parity.compare.power import Power, evidence_of
from isotrain.tools.parity.report.facts import safe_cell
from isotrain.tools.parity.report.page import page
from isotrain.tools.parity.report.text import LONGEST_TEXT, WINDOW_COLUMNS, number, plain, window_cells
from isotrain.tools.parity.run import ROLES
from isotrain.tools.parity.verdict import Verdict

VERDICT, PAGE, PLOTS = "verdict.json", "report.html", "plots"
SUMMARIES = {Language.en: "summary.md", Language.zh: "summary.zh.md"}
# GitHub shows summaries of at most a megabyte.
_MOST_METRICS = 40
# What the names of our pictures begin with: an earlier report's are ours to remove, others are not.
_OURS = ("curve-", "difference-", "layers-")


def write_report(verdict: Verdict, directory: Path, *, power: Power | None) -> None:
    """Into a directory that is new, empty, or that of an earlier report, which it replaces."""
    # matplotlib takes a second to import, and a caller may only look at names here.
    from isotrain.tools.parity.report.pictures import MOST_METRICS, draw, metrics_shown

    try:
        _check(directory)
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        # Everything is made before anything is written: what fails leaves an earlier report whole.
        content = {
            "isotrain": __version__,
            "date": date,
            **verdict.as_json(),
            "power": None if power is None else power.told(evidence_of(verdict)),
        }
        as_text = json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
        pictures = draw(verdict)
        more = max(0, len(metrics_shown(verdict)) - MOST_METRICS)
        html = page(verdict, pictures, more, power, date)
        summaries = {file: summary(verdict, language) for language, file in SUMMARIES.items()}
        plots = directory / PLOTS
        plots.mkdir(parents=True, exist_ok=True)
        # A kill from here on leaves no page of another verdict, in a directory that is taken again.
        for old in (
            directory / PAGE,
            *(directory / file for file in summaries),
            *plots.glob("*.png"),
        ):
            if old.parent == directory or old.name.startswith(_OURS):
                old.unlink(missing_ok=True)
        write_atomically(directory / VERDICT, as_text)
        for picture in pictures:
            write_atomically(plots / picture.file, picture.png)
        for file, text in summaries.items():
            write_atomically(directory / file, text)
        write_atomically(directory / PAGE, html)
    except OSError as error:
        raise DataError(
            f"{directory}: the report cannot be written there ({error.strerror or error}): "
            "choose a directory that can be written to"
        ) from error


def _check(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise DataError(f"{directory}: is a file; choose a directory for the report")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / VERDICT).is_file():
        raise DataError(
            f"{directory}: is not empty, and holds no {VERDICT} of an earlier report; choose another"
        )


def summary(verdict: Verdict, language: Language) -> str:
    """Both answers in words, then each metric where its verdict rests; verdict.json has all windows."""
    comparison = verdict.comparison
    runs = {"reference": comparison.reference, "candidate": comparison.candidate}
    with using(language):
        columns = list(map(said, (tr("metric"), *WINDOW_COLUMNS, tr("margin"), tr("outcome"))))
        lines = [
            "### isotrain parity",
            "",
            *(
                f"- {said(ROLES[role])}: {safe_cell(str(run.path))} ({said(run.format)})"
                for role, run in runs.items()
            ),
            "",
            *(f"{safe_cell(paragraph, LONGEST_TEXT)}\n" for paragraph in said(verdict.words).split("\n")),
        ]
        if verdict.outcome.effects:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for effect in verdict.outcome.effects[:_MOST_METRICS]:
            answer = (number(effect.margin), ANSWERS[effect.verdict])
            cells = (effect.metric, *window_cells(effect.worst), *answer)
            lines.append("| " + " | ".join(safe_cell(said(cell)) for cell in cells) + " |")
        if (left := len(verdict.outcome.effects) - _MOST_METRICS) > 0:
            lines.append("\n" + said(tr("and {count:,} more metrics: verdict.json has them all", count=left)))
    return "\n".join(lines) + "\n"
