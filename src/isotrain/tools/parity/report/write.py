"""A verdict's directory: verdict.json, report.html, the plots, summaries in Markdown."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from isotrain import __version__
from isotrain.errors import DataError
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.parity.compare.power import Power, evidence_of
from isotrain.tools.parity.report.page import page
from isotrain.tools.parity.report.summary import SUMMARIES, summary
from isotrain.tools.parity.report.text import plain
from isotrain.tools.parity.verdict import Verdict

VERDICT, PAGE, PLOTS = "verdict.json", "report.html", "plots"
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
