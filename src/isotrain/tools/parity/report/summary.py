"""A verdict as Markdown: for the comment of a pull request or the summary of a CI job, in each language."""

from __future__ import annotations

from isotrain.language import Language, said, tr, using
from isotrain.tools.parity.compare.effects import ANSWERS
from isotrain.tools.parity.report.facts import safe_cell
from isotrain.tools.parity.report.text import LONGEST_TEXT, WINDOW_COLUMNS, number, window_cells
from isotrain.tools.parity.run import ROLES
from isotrain.tools.parity.verdict import Verdict

SUMMARIES = {Language.en: "summary.md", Language.zh: "summary.zh.md"}
# GitHub shows summaries of at most a megabyte.
_MOST_METRICS = 40


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
