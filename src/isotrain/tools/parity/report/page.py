"""A verdict as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from isotrain import __version__
from isotrain.language import Language, chosen, listed, tr
from isotrain.tools.parity.compare.power import Power, evidence_of
from isotrain.tools.parity.levels.level import LEVELS, STATES
from isotrain.tools.parity.report.facts import UNKNOWN, device_of, facts
from isotrain.tools.parity.report.sections import (
    around,
    effects,
    inputs,
    level_block,
    power_table,
    published,
    statistics,
)
from isotrain.tools.parity.report.text import Markup, element, text
from isotrain.tools.parity.run import ROLES, RunLog
from isotrain.tools.parity.verdict import (
    Verdict,
    computation_reason,
    decision_words,
    inputs_first,
    next_words,
    outcome_reason,
)

# matplotlib comes in only where pictures are drawn.
if TYPE_CHECKING:
    from isotrain.tools.parity.report.pictures import Picture

_OUTCOMES = {
    "equivalent": ("\N{CHECK MARK}", tr("Equivalent")),
    "different": ("\N{MULTIPLICATION X}", tr("Different")),
    "inconclusive": ("?", tr("Inconclusive")),
}
_TAGS = {Language.en: "en", Language.zh: "zh-CN"}
_COMPUTATIONS = _OUTCOMES | {"same": ("\N{CHECK MARK}", tr("The same"))}
# Nothing may be loaded and nothing may run, whatever found its way into the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(
    verdict: Verdict, pictures: Sequence[Picture], more_metrics: int, power: Power | None, date: str
) -> str:
    """`more_metrics` is how many were compared and not drawn."""
    style = files("isotrain.tools.parity.report").joinpath("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        element("title", _title(verdict)),
        element("style", Markup(style)),
    )
    main = element(
        "main",
        _banner(verdict),
        _pictures(pictures, more_metrics),
        _runs(verdict, date),
        _section(tr("Outcome: by how much the runs differ"), effects(verdict)),
        _section(
            tr("Computation, level by level"), *(level_block(level) for level in verdict.computation.levels)
        ),
        _section(tr("How far the curves are apart"), statistics(verdict)),
        _section(tr("What the published rules say"), published(verdict)),
        _section(tr("What differs around the runs"), around(verdict)),
        _section(tr("Would this evidence have shown a real bug?"), power_table(power, evidence_of(verdict))),
        _section(tr("What was read"), inputs(verdict)),
    )
    made = tr(
        "isotrain {version}, {date}. All figures are in verdict.json beside this page.",
        version=__version__,
        date=date,
    )
    body = element("body", main, element("footer", made))
    return "<!doctype html>\n" + element("html", head, body, lang=_TAGS[chosen()]) + "\n"


def _section(title: str, *children: Markup) -> Markup:
    return element("section", element("h2", title), *children)


def _banner(verdict: Verdict) -> Markup:
    outcome, computation = verdict.outcome.verdict, verdict.computation.verdict
    answers = (
        _answer(tr("Do the runs end up alike?"), outcome, _OUTCOMES, outcome_reason(verdict)),
        _answer(tr("Is it the same computation?"), computation, _COMPUTATIONS, computation_reason(verdict)),
    )
    decision = element("p", decision_words(verdict), class_=f"decision {_css(verdict.answer)}")
    return element(
        "header",
        element("h1", _title(verdict)),
        decision,
        element("div", *inputs_first(verdict, answers), class_="answers"),
        *(element("p", *_with_code(words), class_="words") for words in next_words(verdict)),
        class_="verdict",
    )


def _with_code(words: str) -> list[object]:
    return [element("code", part) if odd % 2 else part for odd, part in enumerate(words.split("`"))]


def _runs(verdict: Verdict, date: str) -> Markup:
    runs = _run("reference", verdict.comparison.reference), _run("candidate", verdict.comparison.candidate)
    return _section(
        tr("The runs"),
        element("div", *runs, class_="runs"),
        element("ol", *(_step(verdict, name) for name in LEVELS), class_="levels"),
        element("p", " · ".join([*_about(verdict), date]), class_="about"),
    )


def _title(verdict: Verdict) -> str:
    """What against what, by their devices where these tell them apart, and what they trained."""
    known, comparison = facts(verdict), verdict.comparison
    names = [known.candidate_device, known.reference_device]
    if UNKNOWN in names or names[0] == names[1]:
        names = [run.path.name or str(run.path) for run in (comparison.candidate, comparison.reference)]
    against = tr("{candidate} against {reference}", candidate=names[0], reference=names[1])
    trained = [part for part in (known.model, known.algorithm) if part != UNKNOWN]
    return listed((against, *([listed(trained)] if trained else [])), ": ")


def _about(verdict: Verdict) -> Iterator[str]:
    if (throughput := facts(verdict).throughput) is not None:
        yield tr("throughput {ratio:.2f} × the reference's", ratio=throughput)


def _answer(question: str, answer: str, headlines: dict[str, tuple[str, str]], words: str) -> Markup:
    mark, headline = headlines[answer]
    title = element("span", mark, class_="mark", aria_hidden="true"), element("h2", headline)
    return element(
        "div",
        element("p", question, class_="question"),
        element("div", *title, class_="headline"),
        element("p", words, class_="words"),
        class_=f"answer {_css(answer)}",
    )


def _run(role: str, run: RunLog) -> Markup:
    device = device_of(run)
    return element(
        "div",
        element("span", ROLES[role], class_="role"),
        element("strong", run.path.name or run.path if device == UNKNOWN else device),
        element("span", f"{run.path} ({run.format})", class_="path"),
        class_="run",
    )


def _step(verdict: Verdict, name: str) -> Markup:
    state = verdict.level(name).state
    title, _ = LEVELS[name]
    shown = element("span", STATES[state], class_="state")
    return element("li", element("b", name), " ", title, shown, class_=_css(state))


def _pictures(pictures: Sequence[Picture], more_metrics: int) -> Markup:
    if not pictures:
        nothing = tr("There is nothing to draw: no metric is in both runs.")
        return _section(tr("The curves"), element("p", nothing))
    figures = element("div", *map(_figure, pictures), class_="pictures")
    rest = element("p", tr("{count:,} more metrics are not drawn.", count=more_metrics), class_="rest")
    return _section(tr("The curves"), figures, *([rest] if more_metrics else []))


def _figure(picture: Picture) -> Markup:
    data = base64.b64encode(picture.png).decode()
    image = Markup(f'<img src="data:image/png;base64,{data}" alt="{text(picture.words)}">')
    # The picture's own title is English: not every machine has a font with Chinese characters.
    caption = [] if chosen() is Language.en else [element("figcaption", picture.words)]
    return element("figure", image, *caption)


def _css(state: str) -> str:
    return state.replace(" ", "-")
