"""The report of a verdict: its files, its page, its pictures, from runs that may be hostile."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from run_samples import isotrain_run

from isotrain import __version__
from isotrain.errors import DataError
from isotrain.observe.plots import GREEN, ORANGE, PURPLE
from isotrain.tools.parity.compare.comparison import Comparison, compare
from isotrain.tools.parity.compare.outcome import Pairing, outcome_of
from isotrain.tools.parity.compare.power import Power, PowerRow
from isotrain.tools.parity.levels.level import LEVELS, Check, Level
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.report import evidence, pictures
from isotrain.tools.parity.report.page import page
from isotrain.tools.parity.report.text import MOST_ROWS
from isotrain.tools.parity.report.write import write_report
from isotrain.tools.parity.run import RunLog, Series
from isotrain.tools.parity.thresholds import RULES_SINCE
from isotrain.tools.parity.verdict import Verdict, judge

pytestmark = pytest.mark.heavy

HOSTILE = """<script>alert("x")</script>'"><img src=x onerror=y>|`$\\frac{$\x1b[31m\u202e\udcff/loss"""
VOID = {"meta", "img"}


def run(name: str = "a", steps: int = 60, shift: float = 0.0, **more: Any) -> RunLog:
    steps_S = np.arange(1, steps + 1)
    loss_S = 2.0 / steps_S + shift * (steps_S % 7)
    metrics = {
        "train/loss": Series(steps_S, loss_S),
        "critic/rewards/mean": Series(steps_S, 1 - loss_S / 4),
        "perf/throughput": Series(steps_S, np.full(steps, 100.0 * (1 + shift))),
    }
    return RunLog(Path(name), "test", {**metrics, **more.pop("metrics", {})}, **more)


def layers(count: int, past: int | None = None) -> dict[str, Any]:
    rows = [
        {
            "step": 1,
            "kind": "gradient",
            "name": f"layers.{n}",
            "error": 1e-3 if n == past else 1e-8,
            "limit": 1e-6,
        }
        for n in range(count)
    ]
    first = None if past is None else {"step": 1, "kind": "gradient", "name": f"layers.{past}"}
    return {"layers": rows, "first": first}


def verdict(*levels: Level, **more: Any) -> Verdict:
    """Of the loss alone: every picture takes its time."""
    return judged(compare(run(), run("b", **more), ["train/loss"]), *levels)


def judged(compared: Comparison, *levels: Level) -> Verdict:
    found = levels or [Level("P2", "same", "the curves agree")]
    return judge(compared, outcome_of(compared, "paired"), found)


def report(found: Verdict, path: Path, power: Power | None = None) -> str:
    write_report(found, path, power=power)
    return (path / "report.html").read_text(encoding="utf-8")


def html_of(found: Verdict, power: Power | None = None) -> str:
    """The page alone, for what has nothing to do with pictures."""
    return page(found, [], 0, power, "2026-01-02")


class Page(HTMLParser):
    """What a browser would make of it: tags with attributes, and text; every tag must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def test_writes_its_files_and_no_others(tmp_path: Path) -> None:
    found = judged(compare(run(), run("b", shift=1e-4)))
    report(found, tmp_path / "new" / "report")
    made = sorted(
        str(file.relative_to(tmp_path / "new/report")) for file in tmp_path.rglob("*") if file.is_file()
    )
    assert made == [
        "plots/curve-critic-rewards-mean.png",
        "plots/curve-train-loss.png",
        "plots/difference-critic-rewards-mean.png",
        "plots/difference-train-loss.png",
        "report.html",
        "summary.md",
        "summary.zh.md",
        "verdict.json",
    ]
    for file in tmp_path.rglob("*.png"):
        image = imread(file)
        assert image.shape[0] > 500 and image.shape[1] > 1000
        assert 0.01 < float((image[..., :3].min(axis=-1) < 0.9).mean()) < 0.5, file


def test_where_curves_of_runs_that_sampled_their_own_responses_part_is_not_told() -> None:
    compared = compare(run(), run("b", shift=0.5), ["train/loss"])
    both: tuple[Pairing, Pairing] = ("paired", "free-running")
    titles = {
        pairing: pictures.draw(judge(compared, outcome_of(compared, pairing), []))[0].words
        for pairing in both
    }
    assert "part at step" in titles["paired"]
    assert titles["free-running"] == "train/loss: each run sampled its own responses"


def test_real_run_directories(tmp_path: Path) -> None:
    a, b = (read_run(isotrain_run(tmp_path / name)) for name in "ab")
    html = report(judged(compare(a, b)), tmp_path / "report")
    assert all(digest in html for digest in a.sha256.values()) and len(a.sha256) == 3


@pytest.mark.parametrize(
    ("state", "headline", "css"),
    [
        ("same", "The same", "same"),
        ("different", "Different", "different"),
        ("cannot tell", "Inconclusive", "inconclusive"),
    ],
)
def test_both_answers_come_first(state: Any, headline: str, css: str) -> None:
    found = verdict(Level("P2", state, "a sentence about curves"))
    html = html_of(found)
    parsed = Page(html)
    shown = [text.strip() for text in parsed.text if text.strip()]
    assert shown[0].startswith("b against a") and "Accept: the runs end up alike" in shown[2]
    assert shown[3:6:2] == ["Do the runs end up alike?", "Equivalent"]
    second = shown.index("Is it the same computation?")
    assert shown[second + 2] == headline and "a sentence about curves" in shown[second + 3]
    assert [a["class"] for tag, a in parsed.tags if (a.get("class") or "").startswith("answer ")] == [
        "answer equivalent",
        f"answer {css}",
    ]
    titles = ("The curves", "The runs", "Outcome", "Computation", "Would this evidence have")
    places = [html.index(f"<h2>{title}") for title in titles]
    assert html.index("<h1>") < places[0] and places == sorted(places)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    html = report(verdict(Level("P1", "same", "agree", evidence=layers(5))), tmp_path)
    parsed = Page(html)
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:|//)""", html) and "@import" not in html
    sources = [attributes["src"] for tag, attributes in parsed.tags if tag == "img"]
    assert len(sources) == 3 and all(str(one).startswith("data:image/png;base64,") for one in sources)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "object", "a", "form"}
    assert "default-src 'none'" in [
        attributes.get("content", "").split(";")[0] for _, attributes in parsed.tags
    ]  # type: ignore[union-attr]
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html


def test_hostile_words_are_only_words(tmp_path: Path) -> None:
    metrics = {HOSTILE: Series(np.arange(1, 61), np.ones(60)), "nan": Series(np.arange(1), np.ones(1))}
    around: dict[str, Any] = {
        "recipe": {"algorithm": {"name": HOSTILE}, "model": {"path": HOSTILE}},
        "environment": {"device": {"name": HOSTILE}, HOSTILE: HOSTILE},
        "data": {HOSTILE: "a"},
        "sha256": {HOSTILE: HOSTILE},
    }
    a = run(HOSTILE, metrics=metrics, **around)
    b = run("b", metrics=metrics, **{**around, "environment": {"x": HOSTILE}, "data": {HOSTILE: "b"}})
    errors = {"dtype": HOSTILE, "reference": 0.0, "candidate": 1.0, "ratio": 2.0}
    called = {"operator": HOSTILE, "shapes": HOSTILE}
    operators = {"operators": [called | errors], "missing": [called | {"missing in": "reference"}]}
    rows = [{"step": 1, "kind": HOSTILE, "name": HOSTILE, "error": 1.0, "limit": 0.1}]
    found = judged(
        compare(a, b, [HOSTILE, "train/loss"], ["data"]),
        Level("P0", "same", HOSTILE, (Check(HOSTILE, math.nan, 1.0, None, HOSTILE),), evidence=operators),
        Level("P1", "different", HOSTILE, (), (HOSTILE,), {"layers": rows, "first": rows[0]}),
        Level("P3", "same", HOSTILE),
    )
    row = PowerRow(HOSTILE, "mutation", HOSTILE, {"probes": "same"}, HOSTILE, True)
    power = Power(HOSTILE, HOSTILE, (row,))
    parsed = Page(report(found, tmp_path, power))
    assert not any(tag == "script" for tag, _ in parsed.tags)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert {attributes["src"][:10] for tag, attributes in parsed.tags if tag == "img"} == {"data:image"}  # type: ignore[index]
    text = "".join(parsed.text)
    assert text.count('<script>alert("x")</script>') > 15
    assert not any(letter in text for letter in "\x1b\u202e\udcff")
    assert json.loads((tmp_path / "verdict.json").read_text())["computation"]["levels"][1]["causes"] == [
        HOSTILE
    ]


def test_long_words_and_tables_are_bounded() -> None:
    checks = tuple(Check(f"check {n}", 0.0, 1.0, True) for n in range(1000))
    found = verdict(Level("P1", "same", "x" * 10_000, checks, evidence=layers(3000)))
    html = html_of(found)
    assert html.count("<tr>") < 4 * MOST_ROWS
    assert "and 800 more" in html and "3,000 comparisons" in html
    assert "x" * 1300 not in html and "8,801 more characters" in html


def test_levels_and_their_evidence(tmp_path: Path) -> None:
    operators = [
        {
            "operator": name,
            "shapes": "[2] [2]",
            "dtype": "float32",
            "reference": 1e-7,
            "candidate": 2e-7,
            "ratio": r,
        }
        for name, r in (("aten.add", 1.0), ("aten.mm", 7.25), ("aten.exp", 0.5))
    ]
    one_sided = {"operator": "aten.topk", "shapes": "[3]", "missing in": "reference"}
    found = verdict(
        Level(
            "P0",
            "same",
            "all round alike",
            evidence={
                "operators": operators,
                "missing": [one_sided],
                "no_oracle": {"candidate": ["aten.sort"]},
            },
        ),
        Level(
            "P1",
            "different",
            "one differs",
            (Check("loss", 0.5, 0.25, False),),
            ("an epsilon",),
            layers(9, 4),
        ),
    )
    html = report(found, tmp_path)
    text = " ".join("".join(Page(html).text).split())
    assert all(question in text for _, question in LEVELS.values())
    assert html.count('<span class="chip not-run">not run</span>') == 2
    assert html.index("aten.mm") < html.index("aten.add") < html.index("aten.exp") and "aten.sort" in html
    assert "aten.topk [3] (not in the reference)" in html
    assert "The first that differs: layers.4 (gradient, step 1)." in text and "an epsilon" in text
    assert "<td>loss</td><td>0.5</td><td>0.25</td>" in html
    assert (tmp_path / "plots" / "layers-gradient.png").is_file()
    assert "Gradients: layers.4 is past its limit" in html


def test_an_error_that_is_no_number_is_past_every_limit() -> None:
    def decades(error: float, limit: float = 1e-6) -> float:
        return evidence.LayerErrors(1, "update", "n", error, limit).decades

    assert decades(math.nan) == decades(math.inf) == decades(1.0, 0.0) == math.inf
    assert decades(0.0) == decades(0.0, 0.0) == -math.inf and decades(1e-4) == pytest.approx(2.0)


def test_the_envelope_and_the_interval_are_drawn(tmp_path: Path) -> None:
    def tinted(path: Path, colour: str, alpha: float) -> int:
        ink = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        image = imread(path)[..., :3]
        return int((np.abs(image - (alpha * ink + 1 - alpha)).max(axis=-1) < 0.02).sum())

    band = {"steps": list(range(1, 61)), "low": [-0.1] * 60, "high": [0.1] * 60, "members": 8}
    levels = [Level("P3", "same", "inside", evidence={"envelope": {"train/loss": band}})]
    report(judged(compare(run(), run("b", shift=0.01)), *levels), tmp_path)
    loss, reward = (
        tmp_path / "plots" / f"difference-{name}.png" for name in ("train-loss", "critic-rewards-mean")
    )
    assert tinted(loss, GREEN, 0.16) > 50_000 > 100 > tinted(reward, GREEN, 0.16)
    assert tinted(reward, ORANGE, 0.30) > 3000 and tinted(reward, PURPLE, 1.0) > 1000


@pytest.mark.parametrize(("date", "old"), [("2026-11-17", True), (RULES_SINCE, False)])
def test_a_power_table_of_earlier_rules_says_so(date: str, old: bool) -> None:
    power = Power("p", date, (PowerRow("m", "mutation", "sft", {"logs": "different"}, None, True),))
    page = html_of(judged(compare(run(), run("b"))), power)
    assert "called different" in page and ("with rules that have changed since" in page) is old


def test_verdict_json_is_strict_and_whole(tmp_path: Path) -> None:
    level = Level(
        "P2", "different", "apart", (Check("c", math.inf, np.float64(1.0), False),), (), {"n": np.arange(2)}
    )
    power = Power("p", "2026-01-02", (PowerRow("m", "mutation", "sft", {"logs": "different"}, None, True),))
    found = verdict(level, shift=0.1)
    report(found, tmp_path, power)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = json.loads((tmp_path / "verdict.json").read_text(), parse_constant=refuse)
    assert told["isotrain"] == __version__ and told["power"] == power.told("logs")
    level = told["computation"]["levels"][2]
    assert level["checks"][0]["value"] == "inf" and level["evidence"] == {"n": [0, 1]}
    assert told["comparison"] == json.loads(json.dumps(found.comparison.as_json()))
    assert (told["computation"]["verdict"], told["words"]) == ("different", found.words)


def test_power_is_told_or_said_to_be_unknown() -> None:
    assert "has not been measured" in html_of(verdict())
    rows = [PowerRow(f"bug {n}", "mutation", "sft", {"logs": "different"}, None, n > 0) for n in range(20)]
    power = Power("tiny models", "2026-01-02", tuple(rows))
    html = html_of(verdict(), power)
    assert "rests on logs alone" in html and "it does not find between 0 % and 17 % (95 % interval)" in html
    probed = html_of(verdict(Level("P1", "same", "agree"), Level("P2", "same", "agree")), power)
    assert "probes of layers or operators miss a bug has not been measured" in probed


def test_figures_up_to_where_a_run_breaks(tmp_path: Path) -> None:
    broken = run("b", metrics={"train/loss": Series(np.arange(1, 61), np.full(60, np.nan))})
    html = report(judged(compare(run(), broken, ["train/loss"])), tmp_path)
    assert "of the candidate is not a number from step 1" in html
    assert html.count("no steps in common at which both are numbers") == 2


def test_only_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"not empty, and holds no verdict\.json"):
        report(verdict(), other)
    assert [file.name for file in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(DataError, match="is a file"):
        report(verdict(), other / "thesis.txt")
    with pytest.raises(DataError, match="cannot be written there"):
        report(verdict(), other / "thesis.txt" / "below")
    ours = tmp_path / "ours"
    report(verdict(Level("P1", "same", "agree", evidence=layers(3))), ours)
    (ours / "plots" / "mine.png").write_bytes(b"x")
    report(verdict(), ours)
    names = {file.name for file in (ours / "plots").iterdir()}
    assert "mine.png" in names and "layers-gradient.png" not in names and len(names) == 3


def test_many_metrics_with_names_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_METRICS", 2)
    series = Series(np.arange(1, 4), np.ones(3))
    metrics = dict.fromkeys(("</loss", ">/loss", "!/loss", "?/loss"), series)
    html = report(judged(compare(run(metrics=metrics), run("b", metrics=metrics), list(metrics))), tmp_path)
    assert "2 more metrics are not drawn" in html
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == [
        "curve-loss-2.png",
        "curve-loss.png",
        "difference-loss-2.png",
        "difference-loss.png",
    ]


def test_a_hundred_thousand_steps_take_seconds(tmp_path: Path) -> None:
    found = judged(compare(run(steps=100_000), run("b", steps=100_000, shift=1e-4)))
    start = time.process_time()
    html = report(found, tmp_path)
    assert time.process_time() - start < 8 and len(html) < 3_000_000


def test_naming_a_report_does_not_import_matplotlib() -> None:
    code = "import sys, isotrain.tools.parity.report.write; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
